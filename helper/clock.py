"""The only module that reads the time; everything else is handed a `Clock`.

Two times are kept apart on purpose. *Wall* time is what wallets and the chain speak (unix seconds); it can jump.
*Monotonic* time measures how long something took and never jumps.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import Protocol

SLICE = 1.0
"""Seconds after which a wait for a wall time looks at the clock again: it may have been set."""


class Clock(Protocol):
    """A source of time that tests and simulations can replace."""

    def now(self) -> float:
        """Wall time in unix seconds; may jump either way when the machine's clock is set."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back; only differences mean anything."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait this many (monotonic) seconds; zero or less only yields to other tasks."""
        ...

    async def wait(self, event: asyncio.Event, until: float) -> None:
        """Wait for an event, or for a wall time in unix seconds, whichever comes first. A wall clock that is set
        meanwhile is noticed within `SLICE`.
        """
        ...


class SlicedWait(ABC):
    """`Clock.wait` for clocks that do not know when they are set: they look every `SLICE`."""

    @abstractmethod
    def now(self) -> float:
        """See `Clock`."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """See `Clock`."""

    async def wait(self, event: asyncio.Event, until: float) -> None:
        """Wait for an event or a wall time, and look at the wall clock every second."""
        happened = asyncio.ensure_future(event.wait())
        try:
            while not event.is_set() and (remaining := until - self.now()) > 0:
                pause = asyncio.ensure_future(self.sleep(min(remaining, SLICE)))
                try:
                    await asyncio.wait({happened, pause}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    pause.cancel()
        finally:
            happened.cancel()


class SystemClock(SlicedWait):
    """The machine's own clocks."""

    def now(self) -> float:
        """Wall time in unix seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds from an arbitrary start."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait on the event loop."""
        await asyncio.sleep(max(0.0, seconds))
