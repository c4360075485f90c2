"""Closes the slowest connections when there are too many, or when incomplete requests hold too much memory.

A connection is judged by its progress only, never by its address: many wallets share the address of a Tor exit or of a
mobile network. Progress is measured from the latest `PROGRESS_BYTES` that the client has sent. A client that sends a
byte per second makes none. A client that sends a share over a slow link makes progress several times per second.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

PROGRESS_BYTES: Final = 512
"""Bytes that count as progress; the growth that `BodyReader` requires of a small body."""
MAX_PENDING_BYTES: Final = 48 << 20
"""Maximum bytes of all incomplete requests. Less than `BodyReader` permits, so that slow bodies do not exhaust that."""
_FREED_FRACTION: Final = 1 / 16
"""Fraction of `MAX_PENDING_BYTES` that is freed at once."""
_CLOSED_FRACTION: Final = 1 / 64
"""Fraction of the connections that are closed at once, because finding the slowest takes about a millisecond."""
_SCAN_SECONDS: Final = 0.05
"""Seconds until the connections are examined again after none could be closed."""


class ConnectionProgress:
    """Progress of the client of one connection.

    Args:
        is_waiting: returns whether the connection waits for its client, and no response is pending.
        evict: closes the connection.

    Attributes:
        progressed_at: time of the latest progress, of the latest response, or of the connection; event loop time.
        pending_bytes: received bytes of a request that is incomplete; 0 if it arrived in one piece.
        is_idle: whether the client has received a response and has sent nothing since.
        is_kept_idle: whether the connection is not closed while it is idle, because it is a proxy's: a request that it
            sends at that moment would be lost.
    """

    __slots__ = ("_unmarked_bytes", "evict", "is_idle", "is_kept_idle", "is_waiting", "pending_bytes", "progressed_at")

    def __init__(self, is_waiting: Callable[[], bool], evict: Callable[[], None]) -> None:
        self.is_waiting = is_waiting
        self.evict = evict
        self.progressed_at = 0.0
        self.pending_bytes = 0
        self.is_idle = False
        self.is_kept_idle = False
        self._unmarked_bytes = 0

    def add_bytes(self, size: int, now: float) -> None:
        """Count bytes of an incomplete request."""
        self.pending_bytes += size
        self._unmarked_bytes += size
        if self._unmarked_bytes >= PROGRESS_BYTES:
            self._unmarked_bytes = 0
            self.progressed_at = now


class ConnectionEvictor:
    """The connections of a listener that may be closed under pressure.

    Args:
        min_seconds: a connection whose latest progress is more recent is not closed to make room. A new client over
            Tor sends nothing for the first second or two, so this is only a lower bound: the slowest are closed first.
        max_pending_bytes: maximum bytes of all incomplete requests.
    """

    def __init__(self, min_seconds: float, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self._min_seconds = min_seconds
        self._max_pending_bytes = max_pending_bytes
        self._members: set[ConnectionProgress] = set()
        self._closing: set[ConnectionProgress] = set()
        self._pending_bytes = 0
        self._next_scan_at = 0.0

    def add(self, progress: ConnectionProgress, now: float) -> None:
        """Add a new connection."""
        progress.progressed_at = now
        self._members.add(progress)

    def discard(self, progress: ConnectionProgress) -> None:
        """Remove a closed connection, and drop the references to it."""
        self._members.discard(progress)
        self._closing.discard(progress)
        self.clear_pending(progress)
        progress.is_waiting, progress.evict = _return_false, _do_nothing

    def add_pending(self, progress: ConnectionProgress, size: int, now: float) -> None:
        """Count bytes of a request that is still incomplete; close the slowest of these connections above the limit."""
        if progress in self._members:
            progress.add_bytes(size, now)
            self._pending_bytes += size
            if self._pending_bytes > self._max_pending_bytes:
                self._free_memory()

    def clear_pending(self, progress: ConnectionProgress) -> None:
        """Stop counting the bytes of a request: it is complete, or it was dropped."""
        self._pending_bytes -= progress.pending_bytes
        progress.pending_bytes = 0

    def make_room(self, excess: int, now: float) -> bool:
        """Close the connections whose clients have made no progress for the longest time, idle ones first.

        Args:
            excess: number of open connections above the limit, the new one included.
            now: event loop time.

        Returns:
            Whether there is room for the new connection.
        """
        if excess <= len(self._closing):
            return True  # a closed connection ends with a delay
        if now < self._next_scan_at:
            return False
        latest = now - self._min_seconds
        slow = [
            each
            for each in self._members
            if each.progressed_at <= latest
            if not (each.is_idle and each.is_kept_idle)
            if each not in self._closing and each.is_waiting()
        ]
        if not slow:
            self._next_scan_at = now + _SCAN_SECONDS
            return False
        count = max(1, int(len(self._members) * _CLOSED_FRACTION))
        for progress in heapq.nsmallest(count, slow, key=lambda each: (not each.is_idle, each.progressed_at)):
            self._close(progress)
        return excess <= len(self._closing)

    def _free_memory(self) -> None:
        """Close connections, the slowest first, until a part of the memory is free."""
        wanted = self._max_pending_bytes * (1 - _FREED_FRACTION)
        holders = sorted((each for each in self._members if each.pending_bytes), key=lambda each: each.progressed_at)
        for progress in holders:
            if self._pending_bytes <= wanted:
                return
            self.clear_pending(progress)
            self._close(progress)

    def _close(self, progress: ConnectionProgress) -> None:
        self._closing.add(progress)
        progress.evict()


def _return_false() -> bool:
    return False


def _do_nothing() -> None:
    pass
