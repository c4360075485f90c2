"""Serving the two ASGI apps: wallets over TCP, operators over an owner-only unix socket."""

from __future__ import annotations

import contextlib
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from helper.errors import HelperError

STOP_GRACE = 5
"""Seconds that requests under way get when the service stops."""
KEEP_ALIVE = 30
"""Seconds that an idle connection is kept: wallets post 16 shares over one."""


class Server(uvicorn.Server):
    """uvicorn without its own signal handling: the service decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the service."""
        yield


def make_server(app: ASGIApp) -> Server:
    """A server for one app; it is started with `serve(sockets=[…])` and stopped with `should_exit = True`."""
    return Server(
        uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=STOP_GRACE,
            backlog=2048,
        )
    )


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening socket (port 0 takes a free one).

    Raises:
        HelperError: the address cannot be had; says which.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with the protocol spelt out asyncio turns Nagle's delay off: it would cost each answer some 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise HelperError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            advice="Set [helper] host and port to an address of this machine that is free.",
        ) from None
    listener.setblocking(False)
    return listener


def bind_unix(path: Path) -> socket.socket:
    """A listening socket that only this user can open; a socket file left behind by a crash is replaced.

    Raises:
        HelperError: the path cannot be used; says why.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        listener.close()
        raise HelperError(
            f"cannot make the control socket {path}: {error.strerror or error}",
            advice="Set [operator] socket to a path of at most 100 characters in a directory of the helper's own.",
        ) from None
    listener.setblocking(False)
    return listener
