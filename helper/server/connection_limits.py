"""Limits of a listener's connections, and which of them are closed above the limits.

A connection is judged by what its client does, never by its address: many wallets share the address of a Tor exit or of
a mobile network. The slowest connection is the one that has received the fewest bytes of its request per second since
the request, or the wait for it, began. A wallet over Tor may send nothing for about two seconds and then sends a share
at 20 kB/s or more, so no connection is closed in its first seconds.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_BODY_PIECES: Final = 256
"""Pieces of one body: its chunks, and the parts into which it is split because they look like the end of a head.

Each takes about as much time as 1 KiB of data. More are allowed if they have `MIN_PIECE_BYTES` bytes on average.
"""
MIN_PIECE_BYTES: Final = 256
READ_BYTES: Final = 16 << 10
"""Maximum bytes of one read, and of a connection's unparsed data: nothing is read while requests wait."""

MAX_HELD_BYTES: Final = 32 << 20
"""Bytes that all clients together may let wait: responses that they do not read, and requests behind the current one.

Nothing is read of such a client, so the kernel's receive buffer counts as full. Above the limit, the connection that
has waited longest is aborted.
"""

SEND_BUFFER_BYTES: Final = 64 << 10
RECEIVE_BUFFER_BYTES: Final = 16 << 10
"""Sizes of the kernel's two buffers of a connection, which the kernel doubles.

By default they grow to several megabytes, and a few hundred clients that read nothing, or whose pipeline waits, hold a
gigabyte of the kernel. The smaller one still receives 1 MiB in 40 s over a satellite (0.6 s there and back).
"""
KERNEL_UNSENT_BYTES: Final = 4 << 10
"""Bytes of a response that the kernel takes of a TCP connection beyond those that the client's window admits.

The others wait here, where they count. Without this limit, 4,000 clients that read nothing of a response of 53 kB hold
330 MB of the kernel. It does not limit what is on its way to a client.
"""

LINGER_SECONDS: Final = 3.0
"""Seconds in which the rest of a body is discarded after a response that closes the connection.

Closing with bytes unread resets the connection, and the client may lose the response. Allows for bytes that are on
their way over a slow connection.
"""


DRAIN_SECONDS: Final = 1.0
DRAIN_BYTES: Final = 4 << 20
"""Limits for discarding what arrives after a response or a refusal, so that the client can read it."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections.

    Attributes:
        head_seconds: from the connection, or a request's first byte, to the end of its headers.
        half_closed_seconds: for the response to a client that has closed its sending side. A disconnected client cannot
            be distinguished from such a client, so this also limits how long its requests run.
        stalled_seconds: a connection is dropped if the client reads nothing of a waiting response for this long; a
            proxy's only to make room.
        max_head_bytes: size of a request line with its headers; also of the chunk framing and trailers of a body.
        max_headers: number of headers and trailers of one request.
        max_connections: concurrent connections. For one more, the server closes the slowest, or refuses the new one.
        eviction_seconds: a connection whose request, or the wait for it, began within this time is not closed for a new
            one. Allows for a wallet over Tor that sends nothing at first.
    """

    head_seconds: float = 8.5
    half_closed_seconds: float = 10.0
    stalled_seconds: float = 10.0
    max_head_bytes: int = 64 << 10
    max_headers: int = 100
    max_connections: int = 4096
    eviction_seconds: float = 4.0


IDLE_SECONDS: Final = 1.0
"""Seconds from which an idle connection may be closed: a wallet that posts several shares sends the next one sooner."""
MAX_CLOSING: Final = 128
"""Connections above the limit while others are being closed, which may take a second."""
MAX_PENDING_BYTES: Final = 16 << 20
"""Maximum bytes of all incomplete requests, without the first `UNCOUNTED_BYTES` of each.

Less than `BodyReader` permits, so that slow bodies do not exhaust that.
"""
UNCOUNTED_BYTES: Final = 16 << 10
"""Bytes of each request that do not count, so that no share is closed to free memory. Connections limit their sum."""
_CLOSED_FRACTION: Final = 1 / 32
"""Fraction of the connections that is closed at once: a voter may open 128 at once, and between two scans none is."""
_FREED_FRACTION: Final = 1 / 16
"""Fraction of `MAX_PENDING_BYTES` that is freed at once."""
_SCAN_SECONDS: Final = 0.05
"""Minimum seconds between two scans of all connections, each of which takes a few milliseconds."""


class ConnectionProgress:
    """Progress of the client of one connection.

    Args:
        is_evictable: returns whether the connection may be closed if it is slow.
        evict: closes the connection.

    Attributes:
        started_at: time of the connection, of the start of the request, or of the latest response; event loop time.
        pending_bytes: received bytes of a request that is incomplete; 0 if it arrived in one piece.
        is_idle: whether the client has received a response and has sent nothing since.
        is_proxy: whether the connection is a proxy's. It is closed last while it is idle, because a request that the
            proxy sends at that moment would be lost; it looks idle too while a client of the proxy reads nothing.
    """

    __slots__ = ("evict", "is_evictable", "is_idle", "is_proxy", "pending_bytes", "started_at")

    def __init__(self, is_evictable: Callable[[], bool], evict: Callable[[], None]) -> None:
        self.is_evictable = is_evictable
        self.evict = evict
        self.started_at = 0.0
        self.pending_bytes = 0
        self.is_idle = False
        self.is_proxy = False


class ConnectionEvictor:
    """The connections of a listener that may be closed under pressure.

    Args:
        grace_seconds: a connection whose request, or the wait for it, began more recently is not closed to make room.
        max_pending_bytes: maximum bytes of all incomplete requests.
    """

    def __init__(self, grace_seconds: float, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self._grace_seconds = grace_seconds
        self._max_pending_bytes = max_pending_bytes
        self._members: set[ConnectionProgress] = set()
        self._closing: dict[ConnectionProgress, None] = {}  # in order
        self._pending_bytes = 0
        self._next_scan_at = self._next_memory_scan_at = 0.0

    def add(self, progress: ConnectionProgress, now: float) -> None:
        """Add a new connection."""
        progress.started_at = now
        self._members.add(progress)

    def discard(self, progress: ConnectionProgress) -> None:
        """Remove a closed connection, and drop the references to it."""
        self._members.discard(progress)
        self._closing.pop(progress, None)
        self.clear_pending(progress)
        progress.is_evictable, progress.evict = _return_false, _do_nothing

    def add_pending(self, progress: ConnectionProgress, size: int, now: float) -> None:
        """Count bytes of a request that is still incomplete; close the largest ones if all are too large."""
        if progress in self._members:
            before = _counted_bytes(progress)
            progress.pending_bytes += size
            self._pending_bytes += _counted_bytes(progress) - before
            if self._pending_bytes > self._max_pending_bytes and now >= self._next_memory_scan_at:
                self._free_memory(now)

    def clear_pending(self, progress: ConnectionProgress) -> None:
        """Stop counting the bytes of a request: it is complete, or it was dropped."""
        self._pending_bytes -= _counted_bytes(progress)
        progress.pending_bytes = 0

    def make_room(self, excess: int, now: float) -> bool:
        """Close the slowest connections, as many as necessary and some for the next ones.

        Idle ones are closed first, those of proxies last.

        Args:
            excess: number of open connections above the limit, the new one included.
            now: event loop time.

        Returns:
            Whether there is room for the new connection.
        """
        if excess > MAX_CLOSING:
            if self._closing:
                next(iter(self._closing)).evict()  # again: it has had time for its response, and is aborted now
            return False
        missing = excess - len(self._closing)  # a connection ends only some time after its close
        if missing > 0 and now >= self._next_scan_at:
            self._next_scan_at = now + _SCAN_SECONDS
            for progress in self._find_slowest(missing + int(len(self._members) * _CLOSED_FRACTION), now):
                self._close(progress)
        return excess <= len(self._closing)

    def _find_slowest(self, count: int, now: float) -> list[ConnectionProgress]:
        def slowness(progress: ConnectionProgress) -> tuple[bool, bool, float, float]:
            seconds = now - progress.started_at
            rate = progress.pending_bytes / seconds if seconds else 0.0
            return progress.is_idle and progress.is_proxy, not progress.is_idle, rate, progress.started_at

        return heapq.nsmallest(count, (each for each in self._members if self._is_slow(each, now)), key=slowness)

    def _is_slow(self, progress: ConnectionProgress, now: float) -> bool:
        if progress in self._closing:
            return False
        limit = min(IDLE_SECONDS, self._grace_seconds) if progress.is_idle else self._grace_seconds
        return now - progress.started_at >= limit and progress.is_evictable()

    def _free_memory(self, now: float) -> None:
        """Close connections, the one that holds the most first, until a part of the memory is free."""
        wanted = self._max_pending_bytes * (1 - _FREED_FRACTION)
        holders = [
            each for each in self._members if _counted_bytes(each) and each not in self._closing and each.is_evictable()
        ]
        for progress in sorted(holders, key=lambda each: each.pending_bytes, reverse=True):
            if self._pending_bytes <= wanted:
                return
            self.clear_pending(progress)
            self._close(progress)
        self._next_memory_scan_at = now + _SCAN_SECONDS

    def _close(self, progress: ConnectionProgress) -> None:
        self._closing[progress] = None
        progress.evict()


def _counted_bytes(progress: ConnectionProgress) -> int:
    return max(0, progress.pending_bytes - UNCOUNTED_BYTES)


def _return_false() -> bool:
    return False


def _do_nothing() -> None:
    pass


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

    @property
    def is_set(self) -> bool:
        """Whether the deadline is set and has not expired."""
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
