"""systemd integration: socket activation, readiness, status, watchdog, and priorities of log entries.

Implements sd_listen_fds(3), sd_notify(3) and sd-daemon(3). Without a service manager, all functions do nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Final, TextIO

import anyio

from helper.clock import Clock
from helper.core.text_forms import clean_text
from helper.errors import HelperError

WALLETS_SOCKET_NAME: Final = "wallets"
"""Name of the wallet API socket, required if more than one socket is passed (FileDescriptorName=)."""
STATUS_SECONDS: Final = 15.0
"""Interval of status notifications in seconds, unless the watchdog requires a shorter one."""

_FIRST_FD: Final = 3
_ADVICE: Final = "Pass one listening stream socket, or name the wallet API socket (FileDescriptorName=wallets)."

_PRIORITIES: Final = {"critical": 2, "error": 3, "warning": 4, "info": 6}
"""Priorities of syslog(3). That of other levels is 7 (debug)."""


def is_journal(env: Mapping[str, str], stream: TextIO) -> bool:
    """Return whether systemd-journald reads what is written to a stream (JOURNAL_STREAM in systemd.exec(5))."""
    try:
        status = os.fstat(stream.fileno())
    except OSError:  # also without a file descriptor
        return False
    return env.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def priority_prefix(level: str) -> str:
    """Return the prefix that gives a line of this level its priority in the journal."""
    return f"<{_PRIORITIES.get(level, 7)}>"


def adopt_inherited_listener(env: MutableMapping[str, str], pid: int) -> socket.socket | None:
    """Return the wallet API socket opened by the service manager, None without socket activation.

    Args:
        env: the environment. The socket variables are removed from it, because child processes must not use them.

    Raises:
        HelperError: the socket that was passed is not usable, or it is ambiguous.
    """
    variables = {name: env.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    count = int(variables["LISTEN_FDS"]) if variables["LISTEN_FDS"].isdecimal() else 0
    if variables["LISTEN_PID"] != str(pid) or count == 0:
        return None
    names = variables["LISTEN_FDNAMES"].split(":") if variables["LISTEN_FDNAMES"] else []
    indexes = [index for index in range(count) if names[index : index + 1] == [WALLETS_SOCKET_NAME]] or list(
        range(count)
    )
    if len(indexes) != 1:
        raise HelperError(f"{count} sockets were passed, and the wallet API socket is ambiguous", advice=_ADVICE)
    listener = _adopt_socket(_FIRST_FD + indexes[0])
    if listener.type != socket.SOCK_STREAM or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise HelperError("the socket that was passed is not listening", advice=_ADVICE)
    listener.setblocking(False)
    return listener


def _adopt_socket(fd: int) -> socket.socket:
    """Return the socket of a descriptor, and prevent its inheritance by child processes."""
    try:
        listener = socket.socket(fileno=fd)
        listener.set_inheritable(False)
    except OSError as error:
        raise HelperError(f"the descriptor that was passed is not a socket: {error.strerror}", advice=_ADVICE) from None
    return listener


class ServiceManager:
    """Sends notifications to the service manager (sd_notify).

    Args:
        env: the environment. The variables for this process are removed from it.

    Attributes:
        watchdog_seconds: watchdog timeout in seconds; None without a watchdog.
    """

    def __init__(self, env: MutableMapping[str, str], pid: int, clock: Clock) -> None:
        self._address = env.pop("NOTIFY_SOCKET", "")
        self._clock = clock
        microseconds, watchdog_pid = env.pop("WATCHDOG_USEC", ""), env.pop("WATCHDOG_PID", "")
        is_watched = watchdog_pid in ("", str(pid)) and microseconds.isdecimal() and int(microseconds) > 0
        self.watchdog_seconds = int(microseconds) / 1e6 if is_watched else None

    def notify(self, *lines: str) -> None:
        """Send notifications such as `READY=1` or `STATUS=…`; errors are ignored."""
        if not self._address:
            return
        path = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.sendto("\n".join(map(clean_text, lines)).encode(), path)

    async def run_heartbeat(self, get_status: Callable[[], Awaitable[str]]) -> None:
        """Send the status and watchdog notifications until cancelled.

        Args:
            get_status: returns a short status, once all essential parts have responded. While it does not return, no
                watchdog notification is sent, so the service manager restarts the service after its timeout.
        """
        if not self._address:
            return
        pause = STATUS_SECONDS if self.watchdog_seconds is None else self.watchdog_seconds / 3
        while True:
            with anyio.move_on_after(pause) as timeout:
                status = await get_status()
            if not timeout.cancelled_caught:
                self.notify("WATCHDOG=1", f"STATUS={status}")
            await self._clock.sleep(pause)
