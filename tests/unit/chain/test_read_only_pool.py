"""Read-only pool: failover between nodes without effect on their health."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from helper.chain.read_only_pool import ReadOnlyNodePool
from helper.errors import ChainError, ChainResponseError, ChainUnavailable
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import FakeNetwork, FakeNode

ADDRESS = "svvaloper1tp7fhly84qm6q4hhzmp0nh5frtdugmysz4l4zy"


BROKEN_NODES = {
    "no response": ({"faults": {"validators": lambda _: httpx.Response(501)}}, ChainResponseError),
    "away": ({"faults": {"validators": lambda _: httpx.Response(503)}}, ChainUnavailable),
    "silent": ({"hangs": True}, ChainUnavailable),
}


@pytest.mark.parametrize(("broken", "raised"), BROKEN_NODES.values(), ids=BROKEN_NODES)
async def test_read_only_pool_errors_do_not_affect_health(broken: dict[str, Any], raised: type[ChainError]) -> None:
    clock = FakeClock()
    network = FakeNetwork(a=FakeNode(clock), b=FakeNode(clock))
    endpoints = network.create_node_pool(clock)
    await endpoints.probe_all()
    pool = ReadOnlyNodePool(endpoints, timeout=0.05, transport=network)
    for node in network.nodes.values():
        for name, value in broken.items():
            setattr(node, name, value)
    with capture_logs() as logs, pytest.raises(raised, match=r"a:1317: .*b:1317: "):
        await pool.call(lambda client: client.validator_status(ADDRESS))
    assert [endpoint.name for endpoint in endpoints.usable_nodes] == ["a:1317", "b:1317"]
    assert logs == []
    await pool.aclose()


async def test_read_only_pool_calls_next_node_after_error() -> None:
    clock = FakeClock()
    network = FakeNetwork(a=FakeNode(clock, faults={"rounds": lambda _: httpx.Response(500)}), b=FakeNode(clock))
    endpoints = network.create_node_pool(clock)
    pool = ReadOnlyNodePool(endpoints, transport=network)
    with pytest.raises(ChainUnavailable, match="none is in sync"):
        await pool.call(lambda client: client.listed_rounds())
    await endpoints.probe_all()
    assert len(await pool.call(lambda client: client.listed_rounds())) == 1
    await pool.aclose()
