"""A shared chain for tests that do not need their own, and helpers for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import anyio
import httpx
import pytest

from tests.support.devnet import DevChain


@pytest.fixture(scope="session")
def started_chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevChain]:
    """A chain with two nodes that accepts fake proofs. Started once per session because it takes seconds."""
    directory = tmp_path_factory.mktemp("chain")
    chain = DevChain(
        directory, httpx.AsyncClient(), "--block-seconds", "0.3", "--stand-in-proofs", "--extra-nodes", "1"
    )
    anyio.run(chain.start)
    yield chain
    anyio.run(chain.kill)


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
