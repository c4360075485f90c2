"""The database is looked through a minute after the start and every hour, by one host, whatever came of it before."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from helper.errors import StoreError
from helper.runtime.maintenance import FIRST_LOOK, LOOK_SECONDS, Maintenance
from tests.support.clock import FakeClock


class Database:
    def __init__(self) -> None:
        self.done: list[str] = []
        self.damage: list[str] = []
        self.away = False

    async def delete_old_failure_counts(self) -> int:
        self.done.append("swept")
        return 0

    async def verify(self) -> list[str]:
        if self.away:
            raise StoreError("away", advice="Bring it back.")
        self.done.append("looked")
        return self.damage


async def test_it_is_looked_through_for_ever_and_what_is_found_is_told() -> None:
    database, clock = Database(), FakeClock()
    mine = True
    running = asyncio.create_task(Maintenance(database, mine=lambda: mine, clock=clock).run())

    async def after(seconds: float) -> list[str]:
        """What was done, and told, in this time."""
        database.done = []
        await asyncio.sleep(0)
        with capture_logs() as log:
            clock.advance(seconds)
            for _ in range(5):
                await asyncio.sleep(0)
        return database.done + [line.get("reason") or line["error"] for line in log]

    assert await after(FIRST_LOOK - 1) == []
    assert await after(1) == ["swept", "looked"]
    assert await after(LOOK_SECONDS - 1) == []
    database.damage = ["row 7 is not what was written"]
    assert await after(1) == ["swept", "looked", "row 7 is not what was written"]
    database.away = True
    assert await after(LOOK_SECONDS) == ["swept", "away"]
    database.away, mine = False, False
    assert await after(LOOK_SECONDS) == []
    mine, database.damage = True, []
    assert await after(LOOK_SECONDS) == ["swept", "looked"]
    running.cancel()
