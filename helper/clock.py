"""The only module that reads the time; everything else is handed a `Clock`.

Two times are kept apart on purpose. *Wall* time is what wallets and the chain speak (unix seconds); it can jump.
*Monotonic* time measures how long something took and never jumps.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


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


class SystemClock:
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
