"""Clocks for tests: one moved by hand, and one that runs faster."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time

from helper.clock import Clock


class FakeClock(Clock):
    """Wall and monotonic time moved by hand. Sleepers wake in the order of their deadlines."""

    def __init__(self, now: float = 1_795_268_000.0) -> None:
        self._now = now
        self._monotonic = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._count = itertools.count()

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    async def sleep(self, seconds: float) -> None:
        """Wait until a test has advanced the clock this far."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        event = asyncio.Event()
        heapq.heappush(self._sleepers, (self._monotonic + seconds, next(self._count), event))
        await event.wait()

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._monotonic += seconds
        while self._sleepers and self._sleepers[0][0] <= self._monotonic:
            heapq.heappop(self._sleepers)[2].set()

    def set_wall_clock(self, seconds: float) -> None:
        """Set the wall clock, as an administrator or NTP does. No sleeper wakes."""
        self._now += seconds


class JumpingClock(FakeClock):
    """A clock whose sleeps advance it and end at once; it records their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeps: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.advance(seconds)
        await asyncio.sleep(0)


class ScaledClock(Clock):
    """The machine's clock, `scale` times as fast since `origin` (Unix seconds). The dev chain has the same clock."""

    def __init__(self, scale: float, origin: float) -> None:
        self.scale = scale
        self.origin = origin

    def now(self) -> float:
        return self.origin + (time.time() - self.origin) * self.scale

    def monotonic(self) -> float:
        return time.monotonic() * self.scale

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds) / self.scale)
