"""A host whose clock is not the database's does nothing by it."""

from __future__ import annotations

import asyncio

import pytest

from helper.cluster.clock_skew import ClockSkewMonitor
from helper.core.pause import PauseReason
from helper.errors import StoreError
from tests.support.clock import FakeClock


class Database:
    ahead = 0.0
    away = False

    async def skew(self) -> float:
        if self.away:
            raise StoreError("away")
        return self.ahead


@pytest.mark.parametrize(
    ("ahead", "told"), [(2.0, None), (2.5, "2.5 s behind the"), (-2.0, None), (-30, "30.0 s ahead of")]
)
async def test_two_seconds_are_borne(ahead: float, told: str | None) -> None:
    watch = ClockSkewMonitor(database := Database(), clock=FakeClock())
    database.ahead = ahead
    await watch.look()
    assert (watch.trouble is None) == (told is None)
    assert told is None or told in str(watch.trouble)


async def test_it_is_looked_at_every_ten_seconds_and_silence_changes_nothing() -> None:
    clock = FakeClock()
    watch = ClockSkewMonitor(database := Database(), clock=clock)
    running = asyncio.create_task(watch.run())

    async def later() -> PauseReason | None:
        await asyncio.sleep(0)
        clock.advance(10)
        for _ in range(5):
            await asyncio.sleep(0)
        return watch.trouble

    database.ahead = 9
    assert await later() is not None
    database.away = True
    assert await later() is not None
    database.ahead, database.away = 0, False
    assert await later() is None
    running.cancel()


async def test_a_clock_that_is_set_between_two_looks_counts_at_once() -> None:
    watch = ClockSkewMonitor(Database(), clock=(clock := FakeClock()))
    await watch.look()
    clock.advance(5)
    assert watch.trouble is None
    clock.jump(3600)
    assert "3600.0 s ahead of" in str(watch.trouble)
    clock.jump(-3600)
    assert watch.trouble is None
