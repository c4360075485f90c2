"""HTTP servers and their sockets: wallets over TCP or a unix socket, operators over an owner-only unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, cast

import uvicorn
from starlette.types import Receive, Scope, Send

from helper.core.text_forms import Network
from helper.errors import HelperError
from helper.server.connection_limits import ConnectionLimits
from helper.server.protocol import Connection, Edge, Listener

STOP_GRACE_SECONDS = 5
"""Seconds that running requests may take to complete when the service stops."""
STOP_FLUSH_SECONDS = 1
"""Seconds after `STOP_GRACE_SECONDS` in which connections send their last bytes."""
PROXY_STOP_SECONDS = 0.3
"""Seconds before these in which the requests of a proxy are still accepted, and answered with `connection: close`.

A request that a proxy sends on a connection while the helper closes it is lost. After this time, only connections are
open that the proxy hardly uses.
"""
BACKLOG = 4096
"""Maximum number of connections waiting to be accepted; Linux permits as many by default (net.core.somaxconn).

One voter may open 128 connections at once. All of them are accepted within a second or two, because each iteration of
the event loop accepts several.
"""
_ACCEPTS_PER_ITERATION: Final = 8
"""Connections that are accepted in one iteration of the event loop."""
RESERVED_FILE_DESCRIPTORS = 512
"""File descriptors reserved for connections that are being closed, the gateway, the database, nodes and provers."""
NEEDED_FILE_DESCRIPTORS = ConnectionLimits().max_connections + RESERVED_FILE_DESCRIPTORS
MIN_CONNECTIONS = 64
OWNER_ONLY_MODE = 0o600
GROUP_MODE = 0o660


class Server(Listener, uvicorn.Server):
    """The connections to one socket, from its start to its end. The arguments are those of `Listener`.

    uvicorn opens the sockets, without its signal handling and without its polling, by its public interface: the methods
    that are overridden here, and a class for `Config(http=…)`, which it constructs with arguments that are not needed.
    uvicorn itself polls ten times per second whether to stop. With one server per listener, that took a third of the
    CPU time of an idle service.
    """

    def __init__(
        self, edge: Edge, limits: ConnectionLimits | None = None, *, trusted_networks: Sequence[Network] = ()
    ) -> None:
        Listener.__init__(self, edge, limits or connection_limits(), trusted_networks)
        config = uvicorn.Config(
            _no_application,
            loop="none",
            http=cast("type[asyncio.Protocol]", lambda **_arguments: self.create_connection()),
            ws="none",
            lifespan="off",
            log_config=None,
            backlog=BACKLOG,
        )
        uvicorn.Server.__init__(self, config)
        self.servers: list[asyncio.Server] = []
        self._stop = asyncio.Event()

    def create_connection(self) -> Connection:
        """Create a connection."""
        return Connection(self)

    def stop(self) -> None:
        """Request the end of `serve`, which serves the last connections to their end."""
        self._stop.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Several handles for the socket, because uvloop accepts one connection per handle and iteration.

        With one handle, a few hundred connections per second that all send data delay new ones by seconds. The socket
        itself stays open when the handles are closed, so that `shutdown` accepts the last connections.
        """
        await super().startup([each.dup() for each in sockets or () for _ in range(_ACCEPTS_PER_ITERATION)])

    async def main_loop(self) -> None:
        """Wait for `stop`."""
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and wait for the open ones.

        A proxy gets its last responses first (`PROXY_STOP_SECONDS`). Connections that wait to be accepted and requests
        that wait to be read are served too. Those without a response are refused after `STOP_GRACE_SECONDS`, and
        connections are aborted `STOP_FLUSH_SECONDS` later.
        """
        self.is_stopping = True
        if self.trusted_networks and self.connections:
            await asyncio.sleep(PROXY_STOP_SECONDS)
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(STOP_GRACE_SECONDS, self.refuse_late),
            loop.call_later(STOP_GRACE_SECONDS + STOP_FLUSH_SECONDS, self.abort),
        ]
        for server in self.servers:
            server.close()
        waiting = [accepted for listening in sockets or () for accepted in _accept_last(listening)]
        await asyncio.sleep(0)  # read what has arrived on idle connections; closing these would reset them
        self.close_idle()
        for accepted in waiting:
            with contextlib.suppress(OSError):  # the client has left
                await loop.connect_accepted_socket(self.create_connection, accepted)
        await asyncio.sleep(0)  # uvloop creates a connection one iteration after it has accepted it
        try:
            await self.wait_ended()
        finally:
            for timer in timers:
                timer.cancel()

    def close_idle(self) -> None:
        """Close idle connections. The others close after their responses; one that has just been opened is awaited."""
        for connection in list(self.connections):
            connection.close_idle()

    def refuse_late(self) -> None:
        """Refuse the requests that are not answered yet, and cancel their handlers."""
        for connection in list(self.connections):
            connection.stop_now()
        for task in self.tasks:
            task.cancel()

    def abort(self) -> None:
        """Abort all connections."""
        for connection in list(self.connections):
            connection.abort()

    async def wait_ended(self) -> None:
        """Wait until all connections and handlers have ended."""
        while self.connections or self.tasks:
            self.ended.clear()
            await self.ended.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the service handles signals."""
        yield


async def _no_application(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """Do nothing: uvicorn requires an application, but the edge serves the requests."""


def _accept_last(listening: socket.socket) -> list[socket.socket]:
    """Accept the connections that wait, and close the socket at once: one that comes in between is reset."""
    accepted = list[socket.socket]()
    listening.setblocking(False)
    with listening, contextlib.suppress(OSError):  # none waits any more, or too many files are open
        while len(accepted) < BACKLOG:
            accepted.append(listening.accept()[0])
    return accepted


def bind_tcp(host: str, port: int, *, section: str = "helper") -> socket.socket:
    """Return a listening TCP socket; port 0 takes a free port.

    Args:
        section: configuration section of host and port, for the advice.

    Raises:
        HelperError: the address is in use or not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only with an explicit protocol; Nagle's algorithm would delay responses by about 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise HelperError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            advice=f"Set [{section}] host and port to a free address of this machine.",
        ) from None
    listener.setblocking(False)
    return listener


def base_url(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def listen_unix(
    path: Path, *, name: str = "control socket", setting: str = "[operator] socket", mode: int = OWNER_ONLY_MODE
) -> Iterator[socket.socket]:
    """Listen on a unix socket. Deletes the file on exit, unless it was replaced.

    A stale socket file (after a crash) is replaced; a file on which a process listens is not.

    Args:
        name: what the socket is, for errors.
        setting: the setting of the path, for the advice.
        mode: mode of the file, which determines the users that may connect.

    Raises:
        HelperError: the path cannot be used, or another process listens on it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            if _is_listened_on(path):
                raise HelperError(
                    f"another process is listening on the {name} {path}",
                    advice=f"Stop the other helper, or set {setting} to another path.",
                )
            created = _bind_unix(listener, path, mode)
        except OSError as error:
            raise HelperError(
                f"cannot create the {name} {path}: {error.strerror or error}",
                advice=f"Set {setting} to a path of at most 100 characters in a directory that the helper owns.",
            ) from None
        try:
            yield listener
        finally:
            listener.close()
            with contextlib.suppress(OSError):
                if _file_identity(path) == created:
                    path.unlink()


def _is_listened_on(path: Path) -> bool:
    """Whether a process listens on a socket. A full accept queue counts as listening."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def _bind_unix(listener: socket.socket, path: Path, mode: int) -> tuple[int, int]:
    """Replace a stale socket, bind and listen. Returns the identity of the file."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    # Set the mode before bind(): chmod() by path would follow a link that another process has put there.
    os.fchmod(listener.fileno(), mode)
    listener.bind(str(path))
    created = _file_identity(path)
    _restore_mode(path, mode)
    # Listen immediately, so that another service that starts finds the path in use.
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return created


def _restore_mode(path: Path, mode: int) -> None:
    """Set the mode of a socket's file, of which bind() has removed the bits in the umask. Follows no link."""
    # The umask is not changed instead: it applies to all threads, and the database creates files at the same time.
    file = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        status = os.fstat(file)
        if stat.S_ISSOCK(status.st_mode) and stat.S_IMODE(status.st_mode) != mode:
            Path(f"/proc/self/fd/{file}").chmod(mode)
    finally:
        os.close(file)


def _file_identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def connection_limits(*, evicts: bool = True) -> ConnectionLimits:
    """Default limits, with fewer connections if the limit of open files requires it.

    Raises the soft limit of open files as far as necessary and permitted.

    Args:
        evicts: whether slow connections are closed when there are too many; not for operators.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < NEEDED_FILE_DESCRIPTORS:
        soft = NEEDED_FILE_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, NEEDED_FILE_DESCRIPTORS)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    available = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILE_DESCRIPTORS
    connections = max(MIN_CONNECTIONS, min(ConnectionLimits().max_connections, available))
    if evicts:
        return ConnectionLimits(max_connections=connections)
    return ConnectionLimits(max_connections=connections, eviction_seconds=math.inf, max_pending_bytes=sys.maxsize)
