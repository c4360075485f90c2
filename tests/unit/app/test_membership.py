"""A host with a skewed clock neither dispatches nor sends."""

from __future__ import annotations

import asyncio

import pytest

from helper.app.cluster import ClockSkewMonitor
from helper.errors import StoreError
from tests.support.clock import FakeClock


class FakeStore:
    offset_seconds = 0.0
    is_unavailable = False

    async def measure_clock_skew(self) -> float:
        if self.is_unavailable:
            raise StoreError("away")
        return self.offset_seconds


@pytest.mark.parametrize(
    ("ahead", "expected_reason"), [(2.0, None), (2.5, "2.5 s behind the"), (-2.0, None), (-30, "30.0 s ahead of")]
)
async def test_skew_of_two_seconds_is_tolerated(ahead: float, expected_reason: str | None) -> None:
    watch = ClockSkewMonitor((database := FakeStore()).measure_clock_skew, clock=FakeClock())
    database.offset_seconds = ahead
    await watch.compare_clocks()
    assert (watch.fault_reason is None) == (expected_reason is None)
    assert expected_reason is None or expected_reason in str(watch.fault_reason)


async def test_skew_is_checked_every_ten_seconds_and_outage_keeps_result() -> None:
    clock = FakeClock()
    watch = ClockSkewMonitor((database := FakeStore()).measure_clock_skew, clock=clock)
    running = asyncio.create_task(watch.run())

    async def later() -> str | None:
        await asyncio.sleep(0)
        clock.advance(10)
        for _ in range(5):
            await asyncio.sleep(0)
        return watch.fault_reason

    database.offset_seconds = 9
    assert await later() is not None
    database.is_unavailable = True
    assert await later() is not None
    database.offset_seconds, database.is_unavailable = 0, False
    assert await later() is None
    running.cancel()


async def test_clock_set_between_checks_is_detected_immediately() -> None:
    watch = ClockSkewMonitor(FakeStore().measure_clock_skew, clock=(clock := FakeClock()))
    await watch.compare_clocks()
    clock.advance(5)
    assert watch.fault_reason is None
    clock.set_wall_clock(3600)
    assert "3600.0 s ahead of" in str(watch.fault_reason)
    clock.set_wall_clock(-3600)
    assert watch.fault_reason is None
