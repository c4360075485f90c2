"""A shared chain for tests that do not need their own, and helpers for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache

import anyio
import httpx
import pytest

from tests.support.devnet import DevChain, era_flags


@pytest.fixture(scope="session")
def start_chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str | None], DevChain]]:
    """Start a chain of an era (None: the recorded responses) with two nodes that accepts fake proofs.

    Each is started once per session because it takes seconds.
    """

    @cache
    def start(era: str | None) -> DevChain:
        directory = tmp_path_factory.mktemp("chain")
        flags = ["--block-seconds", "0.3", "--stand-in-proofs", "--extra-nodes", "1", *era_flags(era)]
        chain = DevChain(directory, httpx.AsyncClient(), *flags)
        anyio.run(chain.start)
        started.append(chain)
        return chain

    started: list[DevChain] = []
    yield start
    for chain in started:
        anyio.run(chain.kill)


@pytest.fixture
def era() -> str | None:
    """The era of the shared chain. Tests that run on several eras override it with `BOTH_ERAS`."""
    return None


@pytest.fixture
def started_chain(start_chain: Callable[[str | None], DevChain], era: str | None) -> DevChain:
    """The shared chain of this test's era."""
    return start_chain(era)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client on this test's event loop."""
    async with httpx.AsyncClient(timeout=30) as client:
        yield client


@pytest.fixture
async def chain(started_chain: DevChain, http: httpx.AsyncClient) -> AsyncIterator[DevChain]:
    """The shared chain without faults. Tests must use their own rounds."""
    shared = started_chain.with_client(http)
    yield shared
    for node in range(len(shared.nodes)):
        await shared.clear_faults(node=node)
