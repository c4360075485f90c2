"""Waiting for a wall time that may be set while one waits."""

from __future__ import annotations

import asyncio

import pytest

from helper.clock import SLICE, SystemClock
from tests.support.clock import FakeClock
from tests.support.fakes import PATIENCE, until


class Waiter:
    """Somebody who waits for an hour to pass, by a clock of ours."""

    def __init__(self, clock: FakeClock) -> None:
        self.event = asyncio.Event()
        self.task = asyncio.create_task(clock.wait(self.event, clock.now() + 3600))

    async def still_waits(self) -> bool:
        for _ in range(10):
            await asyncio.sleep(0)
        return not self.task.done()


async def test_it_ends_at_the_wall_time_and_not_before() -> None:
    clock = FakeClock()
    waiter = Waiter(clock)
    for _ in range(3599):
        assert await waiter.still_waits()
        clock.advance(1)
    assert await waiter.still_waits()
    clock.advance(1)
    await until(waiter.task.done)


async def test_it_ends_with_the_event() -> None:
    waiter = Waiter(FakeClock())
    assert await waiter.still_waits()
    waiter.event.set()
    await until(waiter.task.done)


@pytest.mark.parametrize("jump", [3600, 86_400])
async def test_a_clock_that_is_set_forward_is_noticed_within_a_slice(jump: float) -> None:
    clock = FakeClock()
    waiter = Waiter(clock)
    assert await waiter.still_waits()
    clock.jump(jump)
    assert await waiter.still_waits()
    clock.advance(SLICE)
    await until(waiter.task.done)


async def test_a_clock_that_is_set_back_makes_it_wait_longer() -> None:
    clock = FakeClock()
    waiter = Waiter(clock)
    assert await waiter.still_waits()
    clock.jump(-100)
    for _ in range(3699):
        clock.advance(1)
        assert await waiter.still_waits()
    clock.advance(1)
    await until(waiter.task.done)


async def test_the_machines_clock_waits_too() -> None:
    clock, event = SystemClock(), asyncio.Event()
    async with asyncio.timeout(PATIENCE):
        await clock.wait(event, clock.now() + 0.01)
        await clock.wait(event, clock.now() - 1)
        event.set()
        await clock.wait(event, clock.now() + 3600)
