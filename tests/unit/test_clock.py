"""Waiting for a wall-clock time while the clock may be set."""

from __future__ import annotations

import asyncio

import pytest

from helper.clock import RECHECK_SECONDS, SystemClock
from tests.support.clock import FakeClock
from tests.support.fakes import TIMEOUT_SECONDS, wait_until


class Waiter:
    """A task that waits one hour on a fake clock."""

    def __init__(self, clock: FakeClock) -> None:
        self.event = asyncio.Event()
        self.task = asyncio.create_task(clock.wait(self.event, clock.now() + 3600))

    async def is_waiting(self) -> bool:
        for _ in range(10):
            await asyncio.sleep(0)
        return not self.task.done()


async def test_wait_until_ends_at_wall_time() -> None:
    clock = FakeClock()
    waiter = Waiter(clock)
    for _ in range(3599):
        assert await waiter.is_waiting()
        clock.advance(1)
    assert await waiter.is_waiting()
    clock.advance(1)
    await wait_until(waiter.task.done)


async def test_wait_until_ends_when_event_is_set() -> None:
    waiter = Waiter(FakeClock())
    assert await waiter.is_waiting()
    waiter.event.set()
    await wait_until(waiter.task.done)


@pytest.mark.parametrize("jump", [3600, 86_400])
async def test_wait_until_detects_clock_set_forward_within_a_slice(jump: float) -> None:
    clock = FakeClock()
    waiter = Waiter(clock)
    assert await waiter.is_waiting()
    clock.set_wall_clock(jump)
    assert await waiter.is_waiting()
    clock.advance(RECHECK_SECONDS)
    await wait_until(waiter.task.done)


async def test_wait_until_waits_longer_after_clock_set_back() -> None:
    clock = FakeClock()
    waiter = Waiter(clock)
    assert await waiter.is_waiting()
    clock.set_wall_clock(-100)
    for _ in range(3699):
        clock.advance(1)
        assert await waiter.is_waiting()
    clock.advance(1)
    await wait_until(waiter.task.done)


async def test_system_clock_wait_until_waits() -> None:
    clock, event = SystemClock(), asyncio.Event()
    due = clock.now() + 0.01
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await clock.wait(event, due)
        assert clock.now() >= due
        await clock.wait(event, clock.now() - 1)
        event.set()
        await clock.wait(event, clock.now() + 3600)
