from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from helper.store import writer_thread
from helper.store.models import DamagedShare
from helper.store.sqlite.store import SqliteStore
from tests.support.clock import FakeClock
from tests.unit.store.fixtures import StoreOpener


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[DamagedShare]:
    """The damaged shares that stores report."""
    shares: list[DamagedShare] = []
    monkeypatch.setattr(writer_thread, "report_damaged", shares.append)
    return shares


@pytest.fixture
async def open_sqlite_store(clock: FakeClock) -> AsyncIterator[StoreOpener]:
    """Opens stores and closes them at the end: an open reader's thread would block the exit of pytest."""
    stores: list[SqliteStore] = []

    async def open_store(path: Path) -> SqliteStore:
        store_ = SqliteStore(path, clock=clock)
        await store_.open()
        stores.append(store_)
        return store_

    yield open_store
    for store_ in stores:
        await store_.close()


@pytest.fixture
async def store(path: Path, open_sqlite_store: StoreOpener) -> SqliteStore:
    return await open_sqlite_store(path)
