"""HTTP client of the service's control socket.

Uses only the standard library, so that commands start quickly. The socket's file mode controls access.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

TIMEOUT_SECONDS: Final = 3.0
CONNECT_SECONDS: Final = 10.0


class DaemonNotRunningError(Exception):
    """No helper listens on the socket."""


class DaemonUnresponsiveError(Exception):
    """The process that listens on the socket sends no response, or an invalid one."""


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("daemon", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(min(self.timeout or CONNECT_SECONDS, CONNECT_SECONDS))
        try:
            self.sock.connect(str(self._path))
        except PermissionError:
            raise PermissionError(f"no permission to use {self._path}") from None
        except (TimeoutError, BlockingIOError) as error:  # the accept queue of a hung process is full
            raise DaemonUnresponsiveError("it accepts no connections") from error
        except OSError as error:  # no such file, a stale file after a crash, or a path too long for a socket
            raise DaemonNotRunningError(f"no helper is listening on {self._path}") from error
        self.sock.settimeout(self.timeout)


def request_control_socket(
    path: Path, target: str, body: bytes | Iterable[bytes] | None = None, *, timeout: float = TIMEOUT_SECONDS
) -> tuple[int, bytes]:
    """Send a GET request to the service, or a POST request with a body or its chunks.

    Returns status and body of the response.

    Args:
        timeout: seconds for each network operation.

    Raises:
        DaemonNotRunningError: no process listens on the socket; the body was not read.
        PermissionError: no permission to access the socket.
        DaemonUnresponsiveError: no valid response.
    """
    with _connect(_UnixConnection(path, timeout), f"no response within {timeout:g} s") as connection:
        return _send_request(connection, target, body)


def stream_control_socket(path: Path, target: str, *, timeout: float = TIMEOUT_SECONDS) -> Iterator[bytes]:
    """Yield the lines of a streamed response to a GET request, until the service ends it.

    Args:
        timeout: maximum seconds without data.

    Raises:
        DaemonNotRunningError: no process listens on the socket.
        PermissionError: no permission to access the socket.
        DaemonUnresponsiveError: no valid response, a status other than 200, or a timeout.
    """
    with _connect(_UnixConnection(path, timeout), f"no data for {timeout:g} s") as connection:
        connection.request("GET", target)
        response = connection.getresponse()
        if response.status != 200:
            raise DaemonUnresponsiveError(f"HTTP {response.status}")
        while line := response.readline():
            yield line


def request_tcp(host: str, port: int, target: str, *, timeout: float = TIMEOUT_SECONDS) -> tuple[int, bytes]:
    """Send `GET target` over TCP and return the response's status and body. See `request_control_socket`."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.connect()
    except OSError as error:
        raise DaemonNotRunningError(f"no server is listening on {host}:{port}") from error
    with _connect(connection, f"no response within {timeout:g} s"):
        return _send_request(connection, target)


@contextlib.contextmanager
def _connect(connection: http.client.HTTPConnection, on_timeout: str) -> Iterator[http.client.HTTPConnection]:
    """Connect unless connected, close in the end, and raise DaemonUnresponsiveError if the connection fails."""
    try:
        if connection.sock is None:
            connection.connect()
        try:
            yield connection
        except TimeoutError as error:
            raise DaemonUnresponsiveError(on_timeout) from error
        except (OSError, http.client.HTTPException) as error:
            raise DaemonUnresponsiveError(f"connection lost ({type(error).__name__})") from error
    finally:
        connection.close()


def _send_request(
    connection: http.client.HTTPConnection, target: str, body: bytes | Iterable[bytes] | None = None
) -> tuple[int, bytes]:
    try:
        connection.request("GET" if body is None else "POST", target, body)
    except (BrokenPipeError, ConnectionResetError):
        if body is None:
            raise
        # The server may refuse a long body before its end; the response has the reason.
    response = connection.getresponse()
    return response.status, response.read()
