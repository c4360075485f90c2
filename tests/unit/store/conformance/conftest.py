"""Every test here asks the same of every store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from secrets import token_hex

import pytest

from helper.store.rows import DamagedShare
from helper.store.store import Store
from tests.support.clock import FakeClock
from tests.support.postgres import binaries
from tests.unit.store.conformance.backends import Place, PostgresPlace, Reopen, SqlitePlace

KINDS = ["sqlite"] + (["postgres"] if binaries() is not None else [])


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return SqlitePlace(tmp_path)
    return PostgresPlace(request.getfixturevalue("cluster").address, f"test_{token_hex(6)}")


@pytest.fixture
async def reopen(place: Place, clock: FakeClock, reported: list[DamagedShare]) -> AsyncIterator[Reopen]:
    """Opens stores on the place, and closes them all at the end."""
    stores: list[Store] = []

    async def open_store() -> Store:
        one = place.store(clock, reported.append)
        await one.open()
        stores.append(one)
        await place.begin(one)
        return one

    yield open_store
    for one in stores:
        await one.close()


@pytest.fixture
async def store(reopen: Reopen) -> Store:
    return await reopen()
