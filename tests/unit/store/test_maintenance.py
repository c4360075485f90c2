"""Integrity scan: a minute after the start, then hourly, by one host, despite failures."""

from __future__ import annotations

import asyncio
from typing import Any

from structlog.testing import capture_logs

from helper.errors import StoreError
from helper.store.rounds import delete_old_failure_counts
from helper.store.store import CHECK_SECONDS, FIRST_CHECK_SECONDS, run_maintenance
from tests.support.clock import FakeClock
from tests.support.partial_store import PartialStore


class FakeStore(PartialStore):
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.findings: list[str] = []
        self.is_unavailable = False
        self.is_damage_met = False

    @property
    def has_met_damage(self) -> bool:
        return self.is_damage_met

    async def run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        assert op is delete_old_failure_counts
        self.calls.append("cleaned")
        return 0

    async def verify(self) -> list[str]:
        if self.is_unavailable:
            raise StoreError("away", advice="Bring it back.")
        self.calls.append("verified")
        self.is_damage_met = False
        return self.findings


async def test_maintenance_repeats_and_reports_damage() -> None:
    database, clock = FakeStore(), FakeClock()
    is_responsible = True
    running = asyncio.create_task(run_maintenance(database, is_responsible=lambda: is_responsible, clock=clock))

    async def after(seconds: float) -> list[str]:
        """Advance the clock; return the database calls and log lines of this time."""
        database.calls = []
        await asyncio.sleep(0)
        with capture_logs() as log:
            while seconds > 0:
                clock.advance(min(seconds, FIRST_CHECK_SECONDS))
                seconds -= FIRST_CHECK_SECONDS
                for _ in range(5):
                    await asyncio.sleep(0)
        return database.calls + [line.get("reason") or line["error"] for line in log]

    assert await after(FIRST_CHECK_SECONDS - 1) == []
    assert await after(1) == ["cleaned", "verified"]
    assert await after(CHECK_SECONDS - 1) == []
    database.findings = ["row 7 is not what was written"]
    assert await after(1) == ["cleaned", "verified", "row 7 is not what was written"]
    database.is_damage_met = True
    assert await after(FIRST_CHECK_SECONDS) == ["cleaned", "verified", "row 7 is not what was written"]
    assert await after(CHECK_SECONDS - 1) == [], "once"
    database.findings = []
    assert await after(1) == ["cleaned", "verified"]
    database.is_unavailable = True
    assert await after(CHECK_SECONDS) == ["cleaned", "away"]
    database.is_unavailable, is_responsible = False, False
    assert await after(CHECK_SECONDS) == []
    is_responsible, database.findings = True, []
    assert await after(CHECK_SECONDS) == ["cleaned", "verified"]
    running.cancel()
