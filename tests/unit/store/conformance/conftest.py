"""Fixtures that run every test on every backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from helper.store.store import Store
from tests.support.clock import FakeClock
from tests.support.postgres import find_binaries
from tests.unit.store.conformance.backends import Reopen, SqliteBackend, StoreBackend, reuse_schema

BACKEND_KINDS = ["sqlite", "encrypted sqlite"] + (["postgres"] if find_binaries() is not None else [])


@pytest.fixture(params=BACKEND_KINDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreBackend]:
    if request.param != "postgres":
        yield SqliteBackend(tmp_path, is_encrypted=request.param == "encrypted sqlite")
        return
    with reuse_schema(request.getfixturevalue("cluster").url) as backend_:
        yield backend_


@pytest.fixture
async def reopen(backend: StoreBackend, clock: FakeClock) -> AsyncIterator[Reopen]:
    """Opens stores on the backend, and closes them at the end."""
    stores: list[Store] = []

    async def open_store() -> Store:
        store_ = backend.create_store(clock)
        await store_.open()
        stores.append(store_)
        await backend.prepare_store(store_)
        return store_

    yield open_store
    for store_ in stores:
        await store_.close()


@pytest.fixture
async def store(reopen: Reopen) -> Store:
    return await reopen()
