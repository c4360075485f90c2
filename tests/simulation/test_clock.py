"""The simulated clock's shortcut: it waits exactly as long as the product's own wait does, which looks every second."""

from __future__ import annotations

import asyncio
import random

from helper.clock import Clock, SlicedWait
from tests.simulation.host import SimClock
from tests.simulation.virtual_loop import SimLoop

CASES = 300


class Looking(SlicedWait):
    """The product's wait by the simulated time."""

    def __init__(self, clock: SimClock) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock.now()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


async def _set_now_and_then(clock: SimClock, dice: random.Random) -> None:
    while True:
        await asyncio.sleep(dice.uniform(0, 12))
        clock.set(dice.choice((0.0, dice.uniform(-30, 30), 1e9, -1e9)))


async def _waited(loop: SimLoop, clock: Clock, event: asyncio.Event, until: float) -> float:
    """The time at which it was over."""
    await clock.wait(event, until)
    return loop.now


async def _compare(loop: SimLoop, dice: random.Random) -> None:
    clock = SimClock(loop)
    for _ in range(CASES):
        event = asyncio.Event()
        until = clock.now() + dice.choice((dice.uniform(-1, 40), 7.0, 1e9 + dice.uniform(0, 20)))
        loop.call_later(dice.uniform(0, 60), event.set)
        setting = asyncio.ensure_future(_set_now_and_then(clock, dice))
        ours, theirs = await asyncio.gather(
            _waited(loop, clock, event, until), _waited(loop, Looking(clock), event, until)
        )
        setting.cancel()
        clock.set(0.0)
        assert abs(ours - theirs) < 1e-4


def test_it_ends_when_the_products_own_wait_does() -> None:
    loop = SimLoop(random.Random("loop"))
    loop.run_until_complete(_compare(loop, random.Random("clock")))
    assert loop.faults == []
