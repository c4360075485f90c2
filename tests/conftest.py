"""Shared fixtures: the asyncio backend, and the recorded round."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support.postgres import Cluster
from tests.support.s3 import CREDENTIALS_ENV, ObjectStoreProcess, run_object_store

RECORDED = Path(__file__).parent / "recorded" / "round"


def pytest_configure() -> None:
    """Prepare this process for all tests."""
    # A background job of a script inherits an ignored SIGINT, and so do all child processes.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The default draws a picture of each error with its local variables, which takes a second.
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback
    # Hypothesis fails an example or a test that takes long, as all do on a busy machine.
    settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt the tests and their modules from garbage collection, which would visit them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each worker of pytest-xdist begin with some of the longest tests, so that none is left at the end.

    Each worker is first given one contiguous part of the list.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        simulations = [item for item in items if "simulation" in item.path.parts]
        others = [item for item in items if "simulation" not in item.path.parts]
        each = -(-len(others) // workers)
        items[:] = [
            item
            for number in range(workers)
            for item in simulations[number::workers] + others[number * each : (number + 1) * each]
        ]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def read_recorded_lines(name: str) -> list[dict[str, Any]]:
    """Read the rows of one recorded .jsonl file."""
    return [json.loads(line) for line in (RECORDED / name).read_text().splitlines()]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL cluster; each test has its own schema in it, and a vacuum would visit those of all tests before."""
    cluster = Cluster(settings={"autovacuum": "off"})
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
