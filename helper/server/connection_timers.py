"""Timers of a connection: a movable deadline, and detection of stalled writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

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
