from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from helper.store import SqliteStore
from helper.store.base import DamagedShare
from tests.support.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


@pytest.fixture
def reported() -> list[DamagedShare]:
    """What the store reports as damaged."""
    return []


@pytest.fixture
async def store(path: Path, clock: FakeClock, reported: list[DamagedShare]) -> AsyncIterator[SqliteStore]:
    opened = SqliteStore(path, clock=clock, on_damaged=reported.append)
    await opened.open()
    yield opened
    await opened.close()
