"""Asking the running daemon over its control socket, with the standard library alone: quick to load, for commands that
must answer at once. The socket's file mode is what lets a user in.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PATIENCE: Final = 3.0
"""Seconds that one question may take."""


class DaemonNotRunningError(Exception):
    """No daemon listens on the socket."""


class DaemonUnresponsiveError(Exception):
    """Something listens on the socket and does not answer as a daemon does; the text says how."""


class _Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("daemon", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket's file."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask_control(path: Path, target: str, *, timeout: float = PATIENCE) -> tuple[int, bytes]:
    """Status and body of the daemon's answer to `GET target`.

    Args:
        path: the control socket.
        target: path and query.
        timeout: seconds for each step of it.

    Raises:
        NobodyError: nobody listens there.
        PermissionError: this user may not use the socket.
        NoAnswerError: who listens there does not answer.
    """
    connection = _Connection(path, timeout)
    try:
        _connect(connection, path)
        return _exchange(connection, target)
    finally:
        connection.close()


def follow_control(path: Path, target: str, *, timeout: float = PATIENCE) -> Iterator[bytes]:
    """The lines of an answer to `GET target` that goes on for ever, each as it comes; ends when the daemon ends it.

    Args:
        path: the control socket.
        target: path and query.
        timeout: longest silence, in seconds.

    Raises:
        NobodyError: nobody listens there.
        PermissionError: this user may not use the socket.
        NoAnswerError: who listens there does not answer, or not with 200, or falls silent.
    """
    connection = _Connection(path, timeout)
    try:
        _connect(connection, path)
        connection.request("GET", target)
        answer = connection.getresponse()
        if answer.status != 200:
            raise DaemonUnresponsiveError(f"HTTP {answer.status}")
        while line := answer.readline():
            yield line
    except TimeoutError as error:
        raise DaemonUnresponsiveError(f"no word for {timeout:g} s") from error
    except PermissionError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise DaemonUnresponsiveError(f"the answer broke off ({type(error).__name__})") from error
    finally:
        connection.close()


def ask_web(host: str, port: int, target: str, *, timeout: float = PATIENCE) -> tuple[int, bytes]:
    """The same over TCP, of whoever listens at this address."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        try:
            connection.connect()
        except OSError as error:
            raise DaemonNotRunningError(f"nobody answers at {host}:{port}") from error
        return _exchange(connection, target)
    finally:
        connection.close()


def _connect(connection: _Connection, path: Path) -> None:
    try:
        connection.connect()
    except PermissionError:
        raise
    except OSError as error:  # none there, left behind by a crash, or a name too long for a socket
        raise DaemonNotRunningError(f"nobody answers on {path}") from error


def _exchange(connection: http.client.HTTPConnection, target: str) -> tuple[int, bytes]:
    try:
        connection.request("GET", target)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except TimeoutError as error:
        raise DaemonUnresponsiveError(f"no answer within {connection.timeout:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise DaemonUnresponsiveError(f"the answer broke off ({type(error).__name__})") from error
