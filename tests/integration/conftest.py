"""One chain for the tests that need none of their own, and helpers for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import anyio
import httpx
import pytest

from tests.support.devnet import DevChain


@pytest.fixture(scope="session")
def started_chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevChain]:
    """A process with two nodes that takes stand-in proofs; started once, as starting costs seconds."""
    folder = tmp_path_factory.mktemp("chain")
    chain = DevChain(folder, httpx.AsyncClient(), "--block-seconds", "0.3", "--stand-in-proofs", "--extra-nodes", "1")
    anyio.run(chain.start)
    yield chain
    anyio.run(chain.kill)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """Connections of this test's event loop."""
    async with httpx.AsyncClient(timeout=30) as client:
        yield client


@pytest.fixture
async def chain(started_chain: DevChain, http: httpx.AsyncClient) -> AsyncIterator[DevChain]:
    """The shared chain without faults; use rounds of your own."""
    shared = started_chain.with_client(http)
    yield shared
    for node in range(len(shared.nodes)):
        await shared.clear_faults(node=node)
