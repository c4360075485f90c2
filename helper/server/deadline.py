"""A time by which something must have happened, which is moved far more often than it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_ROUNDING: Final = 0.001
"""Seconds by which a loop's timer may come early: uvloop counts in milliseconds."""


class Deadline:
    """One timer of the loop. Where the time was moved on, or taken away, the timer is left to fire and is set again
    for the rest: a connection moves its deadlines with every request, and making and cancelling a timer each time
    would cost more than the limits are worth.

    Args:
        loop: its timers are used.
        late: called when the time has come; no time is set by then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, late: Callable[[], None]) -> None:
        self._loop = loop
        self._late = late
        self._timer: asyncio.TimerHandle | None = None
        self._fires = 0.0
        self._at: float | None = None

    def __bool__(self) -> bool:
        """Whether a time is set."""
        return self._at is not None

    def set(self, at: float) -> None:
        """It is to have happened by then, in the loop's time."""
        self._at = at
        if self._timer is not None:
            if self._fires <= at:
                return
            self._timer.cancel()
        self._wait(at)

    def clear(self) -> None:
        """It has happened."""
        self._at = None

    def close(self) -> None:
        """Nothing will be waited for any more, nor is what was to be called kept."""
        self._at, self._late = None, _nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, at: float) -> None:
        self._fires = at
        self._timer = self._loop.call_at(at, self._fired)

    def _fired(self) -> None:
        self._timer = None
        if self._at is None:
            return
        if self._at - self._loop.time() > _ROUNDING:
            self._wait(self._at)
        else:
            self._at = None
            self._late()


def _nothing() -> None:
    """What is called in the end."""
