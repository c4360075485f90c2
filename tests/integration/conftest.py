"""Shared chains for tests that do not need their own, and helpers for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import anyio
import httpx
import pytest

from tests.support.devnet import NEW_ERA, OLD_ERA, DevChain, era_flags


@pytest.fixture(scope="session")
def started_chains() -> Iterator[dict[str, DevChain]]:
    """The chains that tests have started, by era. Each is started once per session because it takes seconds."""
    chains: dict[str, DevChain] = {}
    yield chains
    for chain in chains.values():
        anyio.run(chain.kill)


@pytest.fixture
def era(request: pytest.FixtureRequest) -> str:
    """The era of the chain that a test uses.

    Every test that talks to a node has this fixture. What differs between eras is tested without processes, and once
    with processes on both (`BOTH_ERAS`). The cases of a parametrized test alternate: 1.6, 0.5, 1.6, …
    All other tests run on 1.6.
    """
    callspec = getattr(request.node, "callspec", None)
    return OLD_ERA if callspec is not None and sum(callspec.indices.values()) % 2 else NEW_ERA


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client on this test's event loop."""
    async with httpx.AsyncClient(timeout=30, verify=False) as client:
        yield client


@pytest.fixture
async def chain(
    started_chains: dict[str, DevChain],
    tmp_path_factory: pytest.TempPathFactory,
    http: httpx.AsyncClient,
    era: str,
) -> AsyncIterator[DevChain]:
    """The shared chain of an era, without faults. It has two nodes and accepts fake proofs.

    Tests must use their own rounds. Between tests the chain produces no blocks, which would cost CPU and be read by the
    helpers of later tests.
    """
    if era not in started_chains:
        flags = ["--block-seconds", "0.3", "--stand-in-proofs", "--extra-nodes", "1", *era_flags(era)]
        started = DevChain(tmp_path_factory.mktemp("chain"), http, *flags)
        await started.start()
        started_chains[era] = started
    shared = started_chains[era].with_client(http)
    await shared.set_faults(halt_chain=False)
    await shared.mine()
    yield shared
    for node in range(len(shared.nodes)):
        await shared.clear_faults(node=node)
    await shared.set_faults(halt_chain=True)
