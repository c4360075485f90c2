"""Input and time limits of a connection: bounded reads, ends of request heads, deadlines, stalls, the peer process."""

from __future__ import annotations

import asyncio
import pwd
import re
import socket
import struct
from collections.abc import Callable
from typing import ClassVar, Final, NamedTuple

from helper.server.connection_limits import READ_BYTES

_HEAD_END: Final = b"\n\r\n"
"""The end of every request head that llhttp accepts."""
_LINE_ENDS: Final = re.compile(rb"[\r\n]+")


class SmallReads(asyncio.BufferedProtocol):
    """Forwards a transport's events to a connection, with reads of at most `READ_BYTES`.

    By default a read returns up to 256,000 bytes, and each connection may hold one. Unread data stays in the kernel's
    buffers, which are bounded. All connections share one buffer: a read is delivered before the next one begins.
    """

    _buffer: ClassVar = memoryview(bytearray(READ_BYTES))

    def __init__(self, connection: asyncio.Protocol) -> None:
        self._connection = connection

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (required by the protocol)
        """Return the buffer for the next read."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Deliver a copy of the bytes read."""
        self._connection.data_received(bytes(self._buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        """Forward to the connection."""
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        """Forward to the connection."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Forward to the connection."""
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forward to the connection."""
        self._connection.connection_lost(exc)


def ends_at_most_one_head(data: bytes) -> bool:
    """Whether received bytes contain at most one end of a request head, and thus are one piece."""
    # In a posted share the last line feed ends the head; this is much faster than a search through the body.
    last = data.rfind(b"\n")
    return last < 0 or (not data.startswith((b"\n", b"\r\n")) and data.find(_HEAD_END) + 2 == last)


def piece_end(data: bytes, at: int) -> int:
    """End of the piece that begins at `at`: after the next end of a request head.

    Line ends at the start are a separate piece, because the first ones may end a head that began in an earlier read.
    The others are empty lines before the next request.
    """
    if data.startswith((b"\n", b"\r\n"), at) and (line_ends := _LINE_ENDS.match(data, at)) is not None:
        return line_ends.end()
    head_end = data.find(_HEAD_END, at)
    return head_end + len(_HEAD_END) if head_end >= 0 else len(data)


_ROUNDING_SECONDS: Final = 0.001
"""Seconds by which an event loop's timer may fire early: uvloop has a resolution of one millisecond."""


class Deadline:
    """A movable deadline that rarely creates or cancels an event loop timer.

    When the deadline is moved later or cleared, the old timer fires at its time and is then set again for the remaining
    time. A connection moves its deadlines with every request, and a new timer each time would be expensive.

    Args:
        loop: the event loop.
        on_expired: called when the deadline expires, after it was cleared.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expired: Callable[[], None]) -> None:
        self._loop = loop
        self._on_expired = on_expired
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._expires_at: float | None = None

    def __bool__(self) -> bool:
        """Whether a deadline is set."""
        return self._expires_at is not None

    def set(self, at: float) -> None:
        """Set or move the deadline, in event loop time."""
        self._expires_at = at
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._start_timer(at)

    def clear(self) -> None:
        """Clear the deadline."""
        self._expires_at = None

    def close(self) -> None:
        """Clear the deadline, cancel the timer and drop the reference to the callback."""
        self._expires_at, self._on_expired = None, _do_nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self, at: float) -> None:
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._expires_at is None:
            return
        if self._expires_at - self._loop.time() > _ROUNDING_SECONDS:
            self._start_timer(self._expires_at)
        else:
            self._expires_at = None
            self._on_expired()


class StallTimer:
    """Aborts a transport whose write buffer has not shrunk for some time: the client does not read.

    Args:
        loop: the event loop.
        seconds: maximum seconds for which the client may read nothing.

    Attributes:
        started_at: since when there are unsent bytes, in event loop time; None if there are none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self.started_at: float | None = None

    def start(self, transport: asyncio.WriteTransport) -> None:
        """Start the timer, unless it runs."""
        if self._timer is None:
            if self.started_at is None:
                self.started_at = self._loop.time()
            unsent = transport.get_write_buffer_size()
            self._timer = self._loop.call_later(self._seconds, self._check, transport, unsent)

    def stop(self) -> None:
        """Stop the timer."""
        self.started_at = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, transport: asyncio.WriteTransport, before: int) -> None:
        self._timer = None
        unsent = transport.get_write_buffer_size()
        if not unsent:
            self.started_at = None
        elif unsent >= before:
            transport.abort()  # close() would wait until the client has read all data
        else:
            self.start(transport)


def _do_nothing() -> None:
    pass


PEER_KEY: Final = "peer"
"""Key of the peer's credentials in the request state."""
_CREDENTIALS: Final = struct.Struct("3i")


class Peer(NamedTuple):
    """Process id, user id and group id at the time of the connection."""

    pid: int
    uid: int
    gid: int


def read_peer(transport: asyncio.BaseTransport) -> Peer | None:
    """The peer process of a connection; None if it is not over a unix socket."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    return Peer(*_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


def user_name(uid: int) -> str:
    """The name of a user, or the user id if it has none. May block on a directory service."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
