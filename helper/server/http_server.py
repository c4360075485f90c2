"""Serving the two ASGI apps: wallets over TCP, operators over an owner-only unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import stat
from collections.abc import Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from helper.clock import Clock, SystemClock
from helper.errors import HelperError
from helper.server.connection import ClientPolicy, ConnectionLimits, bounded

STOP_GRACE = 5
"""Seconds that requests under way get when the service stops."""
STOP_FLUSH = 1
"""Seconds after them in which connections send their last bytes."""
KEEP_ALIVE = 30
"""Seconds that an idle connection is kept: wallets post 16 shares over one."""
IMPORT_SECONDS = 3600.0
"""The longest that an operator's request may take to come in."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
SPARE_FILES = 256
"""Open files that are not wallets' connections: the database, the nodes, the provers."""
MIN_CONNECTIONS = 64


class DateHeaderState(ServerState):
    """A server's state whose headers have the date of the second in which they are asked for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._second = -1
        super().__init__()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """What every answer begins with."""
        second = int(self._clock.now())
        if second != self._second:
            self._second = second
            self._headers = [(b"date", formatdate(second, usegmt=True).encode())]
        return self._headers

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._headers = headers


class Server(uvicorn.Server):
    """uvicorn without its own signal handling: the service decides when it stops.

    Nor does it look ten times a second whether it is to stop and whether the date is another, as uvicorn's own does:
    with a server a door, that was a third of what an idle service took of a core.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        self._stop = asyncio.Event()
        super().__init__(config)
        self.server_state = DateHeaderState(SystemClock())

    @property
    def should_exit(self) -> bool:
        """Whether it is to stop; set it to have it stop."""
        return self._stop.is_set()

    @should_exit.setter
    def should_exit(self, wanted: bool) -> None:
        if wanted:
            self._stop.set()
        else:
            self._stop.clear()

    async def main_loop(self) -> None:
        """Wait until it is to stop."""
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop as uvicorn does, but end late requests and connections before its timeout, which logs an error."""
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(STOP_GRACE, self._cancel_requests),
            loop.call_later(STOP_GRACE + STOP_FLUSH, self._abort_connections),
        ]
        try:
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()

    def _cancel_requests(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()

    def _abort_connections(self) -> None:
        for connection in self.server_state.connections:
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the service."""
        yield


def create_server(app: ASGIApp, limits: ConnectionLimits | None = None, *, door: ClientPolicy | None = None) -> Server:
    """A server for one app; it is started with `serve(sockets=[…])` and stopped with `should_exit = True`.

    Args:
        app: what answers.
        limits: of its connections, the usual unless told.
        door: knows the clients; without it none has limits of its own.
    """
    return Server(
        uvicorn.Config(
            app,
            loop="none",
            http=bounded(limits or connection_limits(), door),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=STOP_GRACE + 2 * STOP_FLUSH,  # `Server.shutdown` ends requests earlier
            backlog=BACKLOG,
        )
    )


def bind_tcp(host: str, port: int, *, section: str = "helper") -> socket.socket:
    """A listening socket (port 0 takes a free one).

    Args:
        host: its address.
        port: its port.
        section: of the settings, that names them.

    Raises:
        HelperError: the address cannot be had; says which.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with the protocol spelt out asyncio turns Nagle's delay off: it would cost each answer some 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise HelperError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            advice=f"Set [{section}] host and port to an address of this machine that is free.",
        ) from None
    listener.setblocking(False)
    return listener


def base_url(listener: socket.socket) -> str:
    """Where a listening socket is reached."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def unix_listener(path: Path) -> Iterator[socket.socket]:
    """A listening socket that only this user can open; its file goes with it, if it still is ours.

    A socket file left behind by a crash is replaced, one on which somebody answers is not.

    Raises:
        HelperError: the path cannot be used; says why.
    """
    listener, made = _bind_unix(path)
    try:
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if _identity(path) == made:
                path.unlink()


def _bind_unix(path: Path) -> tuple[socket.socket, tuple[int, int]]:
    """The socket, and what its file is known by."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                _refuse_taken(path)
                path.unlink()
        # Before it has a name: a chmod by path would follow a link that somebody has put in its place.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        # at once, so that another daemon that looks whether somebody answers finds us
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener, _identity(path)
    except OSError as error:
        listener.close()
        raise HelperError(
            f"cannot make the control socket {path}: {error.strerror or error}",
            advice="Set [operator] socket to a path of at most 100 characters in a directory of the helper's own.",
        ) from None
    except HelperError:
        listener.close()
        raise


def _refuse_taken(path: Path) -> None:
    """Raise HelperError when somebody answers on a socket; a full queue is an answer too."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                return
    raise HelperError(
        f"another daemon answers on the control socket {path}",
        advice="Set [operator] socket to a path of this daemon's own.",
    )


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def connection_limits() -> ConnectionLimits:
    """The usual ones, as far as this process's open files go; a quarter of the connections for one client."""
    most = connection_limit()
    return ConnectionLimits(connections=most, connections_each=max(MIN_CONNECTIONS, most // 4))


def control_limits() -> ConnectionLimits:
    """Of the operators' socket: an import comes in for as long as its shares are checked."""
    return replace(connection_limits(), request_seconds=IMPORT_SECONDS)


def connection_limit(wanted: int = ConnectionLimits().connections) -> int:
    """How many connections there may be: as wanted, or what this process's limit of open files leaves.

    The limit is raised as far as this process may raise it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_FILES
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(MIN_CONNECTIONS, min(wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES))
