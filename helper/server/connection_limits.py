"""Limits of a listener's connections, and which of them are closed above the limits.

A connection is judged by what its client does, never by its address: many wallets share the address of a Tor exit or of
a mobile network. The slowest connection is the one that has received the fewest bytes of its request per second since
the request, or the wait for it, began. A wallet over Tor may send nothing for about two seconds and then sends a share
at 20 kB/s or more, so no connection is closed in its first seconds.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

MAX_TARGET_BYTES: Final = 2048
"""Maximum size of a request's target. Longer ones cost milliseconds each to decode, while all other clients wait."""
MAX_EXPECT_BYTES: Final = 256
"""Size of an `Expect` header above which it is ignored, for the same reason."""
MAX_BODY_PIECES: Final = 256
"""Pieces of one body: its chunks, and the parts into which it is split because they look like the end of a head.

Each takes about as much time as 1 KiB of data. More are allowed if they have `MIN_PIECE_BYTES` bytes on average.
"""
MIN_PIECE_BYTES: Final = 256
READ_BYTES: Final = 16 << 10
"""Maximum bytes of one read, and of what a connection keeps unparsed: nothing is read while requests wait.

Nothing is read either while the handler has not taken more than this of a body.
"""

MAX_HELD_BYTES: Final = 32 << 20
"""Bytes that all clients together may let wait: responses that they do not read, and requests behind the current one.

Nothing is read of such a client, so the kernel's receive buffer counts as full. Above the limit, the connection that
has waited longest is aborted.
"""

SEND_BUFFER_BYTES: Final = 64 << 10
RECEIVE_BUFFER_BYTES: Final = 32 << 10
"""Sizes of the kernel's two buffers of a connection, which the kernel doubles.

By default they grow to several megabytes, and a few hundred clients that read nothing, or whose pipeline waits, hold a
gigabyte of the kernel. 32 KiB still receive 1 MiB in 20 s over a satellite (0.6 s there and back). With 16 KiB, less
than one segment of the loopback interface, a proxy on this machine would wait for a timer between two segments.
"""
UNIX_SEND_BUFFER_BYTES: Final = 8 << 10
"""The same of a unix socket, where `KERNEL_UNSENT_BYTES` has no effect and all of the buffer may be unread."""
KERNEL_UNSENT_BYTES: Final = 4 << 10
"""Bytes of a response that the kernel takes of a TCP connection beyond those that the client's window admits.

The others wait here, where they count. Without this limit, 4,000 clients that read nothing of a response of 53 kB hold
330 MB of the kernel. It does not limit what is on its way to a client.
"""

DRAIN_SECONDS: Final = 3.0
"""Seconds in which the rest of a body is discarded after a response that closes the connection.

Closing with bytes unread resets the connection, and the client may lose the response. Allows for bytes that are on
their way over a slow connection.
"""
LINGER_SECONDS: Final = 1.0
"""Seconds in which what arrives after a refusal is discarded, so that the client can read the refusal."""
MAX_DISCARDED_BYTES: Final = 4 << 20
"""Maximum number of these bytes."""


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
        keep_alive_seconds: how long a connection may stay idle: wallets post 16 shares over one connection.
        eviction_seconds: a connection whose request, or the wait for it, began within this time is not closed for a new
            one. Allows for a wallet over Tor that sends nothing at first.
        max_pending_bytes: size of all incomplete requests, without the first `UNCOUNTED_BYTES` of each. Less than
            `BodyReader` permits, so that slow bodies do not exhaust that.
    """

    head_seconds: float = 8.5
    half_closed_seconds: float = 10.0
    stalled_seconds: float = 10.0
    max_head_bytes: int = 16 << 10
    max_headers: int = 100
    max_connections: int = 4096
    keep_alive_seconds: float = 30.0
    eviction_seconds: float = 4.0
    max_pending_bytes: int = 16 << 20


IDLE_SECONDS: Final = 1.0
"""Seconds from which an idle connection may be closed: a wallet that posts several shares sends the next one sooner."""
MAX_CLOSING: Final = 128
"""Connections above the limit while others are being closed, which may take a second. Above it, those are aborted."""
UNCOUNTED_BYTES: Final = 16 << 10
"""Bytes of each request that do not count, so that no share is closed to free memory. Connections limit their sum."""
_CLOSED_FRACTION: Final = 1 / 32
"""Fraction of the connections that is closed at once: a voter may open 128 at once, and between two scans none is."""
_FREED_FRACTION: Final = 1 / 16
"""Fraction of `max_pending_bytes` that is freed at once."""
_SCAN_SECONDS: Final = 0.05
"""Minimum seconds between two scans of all connections, each of which takes a few milliseconds."""


class ConnectionProgress(ABC):
    """Progress of the client of one connection.

    Attributes:
        started_at: time of the connection, of the start of the request, or of the latest response; event loop time.
        pending_bytes: received bytes of a request that is incomplete; 0 if it arrived in one piece.
        is_idle: whether the client has received a response and has begun no request since.
        is_served: whether the client has received a response before.
        is_proxy: whether the connection is a proxy's. It is closed last while it is idle, because a request that the
            proxy sends at that moment would be lost; it looks idle too while a client of the proxy reads nothing.
    """

    started_at = 0.0
    pending_bytes = 0
    is_idle = False
    is_served = False
    is_proxy = False

    @property
    def counted_bytes(self) -> int:
        """The bytes that count towards `max_pending_bytes`."""
        return max(0, self.pending_bytes - UNCOUNTED_BYTES)

    @abstractmethod
    def is_evictable(self) -> bool:
        """Whether no complete request is being answered. One that waits for its turn is not, except a posted share."""

    @abstractmethod
    def evict(self) -> None:
        """Close the connection, because others need its place or its memory."""


class ConnectionEvictor:
    """Closes connections of a listener under pressure."""

    def __init__(self, connections: Set[ConnectionProgress], limits: ConnectionLimits) -> None:
        self._connections = connections
        self._limits = limits
        self._closing: dict[ConnectionProgress, None] = {}  # in order
        self._pending_bytes = 0
        self._next_scan_at = self._next_memory_scan_at = 0.0

    def discard(self, connection: ConnectionProgress) -> None:
        """Forget a closed connection."""
        self._closing.pop(connection, None)
        self.clear_pending(connection)

    def add_pending(self, connection: ConnectionProgress, size: int, now: float) -> None:
        """Count bytes of a request that is still incomplete; close the largest ones if all are too large."""
        before = connection.counted_bytes
        connection.pending_bytes += size
        self._pending_bytes += connection.counted_bytes - before
        if self._pending_bytes > self._limits.max_pending_bytes and now >= self._next_memory_scan_at:
            self._free_memory(now)

    def clear_pending(self, connection: ConnectionProgress) -> None:
        """Stop counting the bytes of a request: it is complete, or it was dropped."""
        self._pending_bytes -= connection.counted_bytes
        connection.pending_bytes = 0

    def make_room(self, excess: int, now: float) -> bool:
        """Close the slowest connections, as many as necessary and some for the next ones.

        Idle ones are closed first, those of proxies last. If too few are slow, those that were served before give way
        too, the one whose request began first: otherwise clients that always have a request of less than
        `eviction_seconds` in progress could keep all places forever.

        Args:
            excess: number of open connections above the limit, with the new one, which is not among them yet.
            now: event loop time.

        Returns:
            Whether there is room for the new connection.
        """
        missing = excess - len(self._closing)  # a connection ends only some time after its close
        if missing > 0 and now >= self._next_scan_at:
            self._next_scan_at = now + _SCAN_SECONDS
            count = missing + int(len(self._connections) * _CLOSED_FRACTION)
            slowest = self._find_slowest(count, now)
            for connection in slowest:
                self._close(connection)
            for connection in self._find_served(count - len(slowest)):
                self._close(connection)
        if excess > MAX_CLOSING and self._closing:
            longest = next(iter(self._closing))
            self._closing[longest] = self._closing.pop(longest)  # the next new connection ends another one
            longest.evict()  # again: it has had time for its response, and is aborted now
        return excess <= len(self._closing)

    def _find_slowest(self, count: int, now: float) -> list[ConnectionProgress]:
        def slowness(connection: ConnectionProgress) -> tuple[bool, bool, float, float]:
            seconds = now - connection.started_at
            rate = connection.pending_bytes / seconds if seconds else 0.0
            return connection.is_idle and connection.is_proxy, not connection.is_idle, rate, connection.started_at

        return heapq.nsmallest(count, (each for each in self._connections if self._is_slow(each, now)), key=slowness)

    def _find_served(self, count: int) -> list[ConnectionProgress]:
        served = (
            each
            for each in self._connections
            if each.is_served and not each.is_idle and each not in self._closing and each.is_evictable()
        )
        return heapq.nsmallest(count, served, key=lambda each: (each.is_proxy, each.started_at))

    def _is_slow(self, connection: ConnectionProgress, now: float) -> bool:
        if connection in self._closing:
            return False
        grace = self._limits.eviction_seconds
        limit = min(IDLE_SECONDS, grace) if connection.is_idle else grace
        return now - connection.started_at >= limit and connection.is_evictable()

    def _free_memory(self, now: float) -> None:
        """Close connections, the one that holds the most first, until a part of the memory is free."""
        wanted = self._limits.max_pending_bytes * (1 - _FREED_FRACTION)
        holders = [
            each
            for each in self._connections
            if each.counted_bytes and each not in self._closing and each.is_evictable()
        ]
        for connection in sorted(holders, key=lambda each: each.pending_bytes, reverse=True):
            if self._pending_bytes <= wanted:
                return
            self.clear_pending(connection)
            self._close(connection)
        self._next_memory_scan_at = now + _SCAN_SECONDS

    def _close(self, connection: ConnectionProgress) -> None:
        self._closing[connection] = None
        connection.evict()
