"""Shared fixtures: the asyncio backend, and the recorded round."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.postgres import Cluster
from tests.support.s3 import CREDENTIALS_ENV, ObjectStoreProcess, run_object_store

RECORDED = Path(__file__).parent / "recorded" / "round"


def pytest_configure() -> None:
    """Restore SIGINT: a background job of a script inherits an ignored SIGINT, and so do all child processes."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def read_recorded_lines(name: str) -> list[dict[str, Any]]:
    """Read the rows of one recorded .jsonl file."""
    return [json.loads(line) for line in (RECORDED / name).read_text().splitlines()]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL cluster; each test has its own schema in it."""
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


@pytest.fixture(scope="session")
def object_store_program() -> tuple[str, ...]:
    """Command of the object store, empty for moto. A module that repeats tests with another store overrides it."""
    return ()


@pytest.fixture
async def object_store(
    object_store_program: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ObjectStoreProcess]:
    """An object store with an empty bucket; its credentials are in the environment."""
    for name, value in CREDENTIALS_ENV.items():
        monkeypatch.setenv(name, value)
    async with run_object_store(tmp_path, object_store_program) as store:
        yield store


@pytest.fixture(scope="session")
def recorded_shares() -> list[dict[str, Any]]:
    return read_recorded_lines("shares.jsonl")


@pytest.fixture(scope="session")
def recorded_reveals() -> list[dict[str, Any]]:
    return read_recorded_lines("reveals.jsonl")


@pytest.fixture(scope="session")
def recorded_exchanges() -> list[dict[str, Any]]:
    return read_recorded_lines("exchanges.jsonl")
