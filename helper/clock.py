"""Clocks. This is the only module that reads the time; all other code receives a `Clock`.

*Wall* time (unix seconds) is used by wallets and the chain, and may jump. *Monotonic* time measures durations and
never jumps.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import Protocol

RECHECK_SECONDS = 1.0
"""Interval in seconds at which a wait for a wall time rereads the clock, because it may have been set."""


class Clock(Protocol):
    """A source of time that tests and simulations can replace."""

    def now(self) -> float:
        """Return the wall time in unix seconds. It jumps if the machine's clock is set."""
        ...

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never decreases."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Sleep for a number of (monotonic) seconds; zero or less only yields to other tasks."""
        ...

    async def wait(self, event: asyncio.Event, until: float) -> None:
        """Wait for an event or a wall time in unix seconds, whichever comes first.

        If the wall clock is set meanwhile, this takes effect within `RECHECK_SECONDS`.
        """
        ...


class SlicedWait(ABC):
    """Implements `Clock.wait` by rereading the wall clock every `RECHECK_SECONDS`."""

    @abstractmethod
    def now(self) -> float:
        """See `Clock`."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """See `Clock`."""

    async def wait(self, event: asyncio.Event, until: float) -> None:
        """See `Clock`."""
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


class SystemClock(SlicedWait):
    """The machine's clocks."""

    def now(self) -> float:
        """Return the wall time in unix seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the event loop."""
        await asyncio.sleep(max(0.0, seconds))
