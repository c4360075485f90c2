"""Clocks. This is the only module that reads the time; all other code receives a `Clock`.

*Wall* time (Unix seconds) is used by wallets and the chain, and may jump. *Monotonic* time measures durations and
never jumps.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod

RECHECK_SECONDS = 1.0
"""Interval in seconds at which a wait rereads the wall clock, because it may have been set."""


class Clock(ABC):
    """A source of time that tests and simulations can replace."""

    @abstractmethod
    def now(self) -> float:
        """Return the wall time in Unix seconds. It jumps if the machine's clock is set."""

    @abstractmethod
    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never decreases."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Sleep for a number of (monotonic) seconds; zero or less only yields to other tasks."""

    async def wait(self, event: asyncio.Event, until: float) -> None:
        """Wait for an event or a wall time in Unix seconds, whichever comes first.

        The wall clock is reread every `RECHECK_SECONDS`, so a change of the clock takes effect within this interval.
        """
        event_set = asyncio.ensure_future(event.wait())
        try:
            while not event.is_set() and (remaining := until - self.now()) > 0:
                pause = asyncio.ensure_future(self.sleep(min(remaining, RECHECK_SECONDS)))
                try:
                    await asyncio.wait({event_set, pause}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    pause.cancel()
        finally:
            event_set.cancel()


class SystemClock(Clock):
    """The machine's clocks."""

    def now(self) -> float:
        """Return the wall time."""
        return time.time()

    def monotonic(self) -> float:
        """Return the monotonic time."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the event loop."""
        await asyncio.sleep(max(0.0, seconds))
