"""HTTP servers and their sockets: wallets over TCP or a unix socket, operators over an owner-only unix socket."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp

from helper.errors import HelperError
from helper.server.client_limits import Network
from helper.server.connection import BoundedProtocol
from helper.server.connection_limits import ConnectionEvictor, ConnectionLimits, RequestTurns
from helper.server.uvicorn_adapter import Server, ServerTimes

STOP_GRACE_SECONDS = 5
"""Seconds that running requests may take to complete when the service stops."""
STOP_FLUSH_SECONDS = 1
"""Seconds after `STOP_GRACE_SECONDS` in which connections send their last bytes."""
KEEP_ALIVE_SECONDS = 30
"""Seconds that an idle connection stays open: wallets post 16 shares over one connection."""
IMPORT_TIMEOUT_SECONDS = 3600.0
"""Maximum seconds to receive an operator's request."""
BACKLOG = 4096
"""Maximum number of connections waiting to be accepted; Linux permits as many by default (net.core.somaxconn).

One voter may open 128 connections at once. All of them are accepted within a second or two, because each iteration of
the event loop accepts several.
"""
RESERVED_FILE_DESCRIPTORS = 256
"""File descriptors reserved for the database, the nodes and the provers."""
MIN_CONNECTIONS = 64
OWNER_ONLY_MODE = 0o600
GROUP_MODE = 0o660


def create_server(
    app: ASGIApp,
    limits: ConnectionLimits | None = None,
    *,
    refusals: Counter[int] | None = None,
    trusted_networks: Sequence[Network] = (),
) -> Server:
    """Create a server for one app. Start it with `serve(sockets=[…])`, stop it with `should_exit = True`.

    Args:
        app: the ASGI application.
        limits: limits of connections; default `connection_limits()`.
        refusals: counts the refusals of connections by status. None for a server of operators: nothing is counted, and
            no slow connection is closed.
        trusted_networks: networks of proxies, whose idle connections are not closed.
    """
    limits = limits or connection_limits()
    evictor = ConnectionEvictor(limits.eviction_seconds)
    protocol = partial(BoundedProtocol, limits, refusals, trusted_networks, evictor, RequestTurns())
    times = ServerTimes(keep_alive=KEEP_ALIVE_SECONDS, stop_grace=STOP_GRACE_SECONDS, stop_flush=STOP_FLUSH_SECONDS)
    return Server(app, protocol, times=times, backlog=BACKLOG)


def bind_tcp(host: str, port: int, *, section: str = "helper") -> socket.socket:
    """Return a listening TCP socket; port 0 takes a free port.

    Args:
        host: address to listen on.
        port: port to listen on.
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
        path: the socket's file.
        name: what the socket is, for errors.
        setting: the setting of the path, for the advice.
        mode: mode of the file, which determines the users that may connect.

    Raises:
        HelperError: the path cannot be used, or another process listens on it.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        created = _bind_unix(listener, path, mode)
    except OSError as error:
        listener.close()
        raise HelperError(
            f"cannot create the {name} {path}: {error.strerror or error}",
            advice=f"Set {setting} to a path of at most 100 characters in a directory that the helper owns.",
        ) from None
    except _SocketInUseError:
        listener.close()
        raise HelperError(
            f"another process is listening on the {name} {path}",
            advice=f"Stop the other helper, or set {setting} to another path.",
        ) from None
    try:
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if _file_identity(path) == created:
                path.unlink()


class _SocketInUseError(Exception):
    """A process listens on the socket."""


def _bind_unix(listener: socket.socket, path: Path, mode: int) -> tuple[int, int]:
    """Bind the socket and listen. Returns the identity of its file.

    Raises:
        OSError: the path cannot be used.
        _SocketInUseError: a process listens on it.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            _require_unused(path)
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


def _require_unused(path: Path) -> None:
    """Raise _SocketInUseError if a process listens on a socket. A full accept queue counts as listening."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                return
    raise _SocketInUseError


def _file_identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def connection_limits() -> ConnectionLimits:
    """Default limits, with fewer connections if the limit of open files requires it.

    Raises the soft limit of open files as far as necessary and permitted.
    """
    requested = ConnectionLimits().max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = requested + RESERVED_FILE_DESCRIPTORS
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    available = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILE_DESCRIPTORS
    connections = max(MIN_CONNECTIONS, min(requested, available))
    return ConnectionLimits(max_connections=connections)


def control_limits() -> ConnectionLimits:
    """Limits of the control socket. Receiving an import may take minutes: its shares are validated as they arrive."""
    return replace(connection_limits(), body_seconds=IMPORT_TIMEOUT_SECONDS)
