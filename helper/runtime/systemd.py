"""The service manager's side of a service: sockets that it has opened, and how the service is (systemd's conventions).

A service that is started by hand has no manager; then nothing here does anything. The conventions are a few lines of
environment and datagrams (sd_listen_fds(3), sd_notify(3)).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Final

import anyio

from helper.clock import Clock
from helper.core.text import clean_text
from helper.errors import HelperError

WALLETS: Final = "wallets"
"""The name of the socket for wallets, where there is more than one (FileDescriptorName=)."""
STATUS_SECONDS: Final = 15.0
"""How often the manager is told how the service is, where it does not ask for more."""

_FIRST_FD: Final = 3
_ADVICE: Final = "Give the service one listening stream socket, or call it wallets (FileDescriptorName=wallets)."


def inherited_listener(env: MutableMapping[str, str], pid: int) -> socket.socket | None:
    """The wallets' socket that the manager has opened, or None where it opens none.

    Args:
        env: the environment; what it says of sockets is taken out of it, as it is for this process alone.
        pid: of this process.

    Raises:
        HelperError: it is not one that wallets can be served on.
    """
    told = {name: env.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    count = int(told["LISTEN_FDS"]) if told["LISTEN_FDS"].isdecimal() else 0
    if told["LISTEN_PID"] != str(pid) or count == 0:
        return None
    names = told["LISTEN_FDNAMES"].split(":") if told["LISTEN_FDNAMES"] else []
    places = [place for place in range(count) if names[place : place + 1] == [WALLETS]] or list(range(count))
    if len(places) != 1:
        raise HelperError(f"{count} sockets were handed over, and which is for wallets is not said", advice=_ADVICE)
    listener = _adopted(_FIRST_FD + places[0])
    if listener.type != socket.SOCK_STREAM or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise HelperError("the socket that was handed over does not listen", advice=_ADVICE)
    listener.setblocking(False)
    return listener


def _adopted(fd: int) -> socket.socket:
    """The socket behind a descriptor, from here on not inherited any further."""
    try:
        listener = socket.socket(fileno=fd)
        listener.set_inheritable(False)
    except OSError as error:
        raise HelperError(f"what was handed over is no socket: {error.strerror}", advice=_ADVICE) from None
    return listener


class ServiceManager:
    """Whoever started this service and wants to know how it is.

    Args:
        env: the environment; what is for this process alone is taken out of it.
        pid: of this process.
        clock: the time.

    Attributes:
        watchdog: seconds in which it must hear of us; None where it does not watch.
    """

    def __init__(self, env: MutableMapping[str, str], pid: int, clock: Clock) -> None:
        self._address = env.pop("NOTIFY_SOCKET", "")
        self._clock = clock
        wanted, whose = env.pop("WATCHDOG_USEC", ""), env.pop("WATCHDOG_PID", "")
        ours = whose in ("", str(pid)) and wanted.isdecimal() and int(wanted) > 0
        self.watchdog = int(wanted) / 1e6 if ours else None

    def tell(self, *lines: str) -> None:
        """Tell it something (`READY=1`, `STATUS=…`); one that is not there any more is no concern of ours."""
        if not self._address:
            return
        path = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.sendto("\n".join(map(clean_text, lines)).encode(), path)

    async def keep_told(self, alive: Callable[[], Awaitable[str]]) -> None:
        """Tell it for ever that we live, and how.

        Args:
            alive: returns, in a few words, how the service is, once all has had a turn that must have one. While it
                does not return, the manager hears nothing, and acts when its patience ends.
        """
        if not self._address:
            return
        pause = STATUS_SECONDS if self.watchdog is None else self.watchdog / 3
        while True:
            with anyio.move_on_after(pause) as patience:
                status = await alive()
            if not patience.cancelled_caught:
                self.tell("WATCHDOG=1", f"STATUS={status}")
            await self._clock.sleep(pause)
