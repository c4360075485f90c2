"""The simulated clock waits exactly as long as `Clock.wait`."""

from __future__ import annotations

import asyncio
import random

from helper.clock import Clock
from tests.simulation.host import SimClock
from tests.simulation.virtual_loop import SimLoop

CASE_COUNT = 300


class PollingClock(Clock):
    """The product's wait on simulated time."""

    def __init__(self, clock: SimClock) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock.now()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


async def _set_repeatedly(clock: SimClock, rng: random.Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(0, 12))
        clock.set_offset(rng.choice((0.0, rng.uniform(-30, 30), 1e9, -1e9)))


async def _measure_wait(loop: SimLoop, clock: Clock, event: asyncio.Event, until: float) -> float:
    """Return the time at which the wait ended."""
    await clock.wait(event, until)
    return loop.now


async def _compare_waits(loop: SimLoop, rng: random.Random) -> None:
    clock = SimClock(loop)
    for _ in range(CASE_COUNT):
        event = asyncio.Event()
        until = clock.now() + rng.choice((rng.uniform(-1, 40), 7.0, 1e9 + rng.uniform(0, 20)))
        loop.call_later(rng.uniform(0, 60), event.set)
        setting = asyncio.ensure_future(_set_repeatedly(clock, rng))
        simulated, expected = await asyncio.gather(
            _measure_wait(loop, clock, event, until), _measure_wait(loop, PollingClock(clock), event, until)
        )
        setting.cancel()
        clock.set_offset(0.0)
        assert abs(simulated - expected) < 1e-4


def test_sim_clock_wait_ends_when_clock_wait_ends() -> None:
    loop = SimLoop(random.Random("loop"))
    loop.run_until_complete(_compare_waits(loop, random.Random("clock")))
    assert loop.unhandled_errors == []
