"""A node that asks to wait gets no reveal until it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helper.chain.node_pool import Node, create_nodes
from helper.reveal.node_holds import MAX_HOLD_SECONDS, RECHECK_SECONDS, NodeHolds
from tests.support.clock import FakeClock
from tests.support.fakes import ACCEPTED_REPLY, FIRST_NODE, SECOND_NODE
from tests.support.queue_pipeline import Pipeline, open_pipeline

WARMING = {"status": "warming"}


class ReadinessNode(httpx.AsyncBaseTransport):
    """Responds to `GET readiness` only."""

    def __init__(self) -> None:
        self.response: tuple[int, Any] | None = (503, WARMING)
        self.requests = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("GET", "/shielded-vote/v1/readiness")
        self.requests += 1
        await asyncio.sleep(0)
        if self.response is None:
            raise httpx.ConnectError("refused")
        status, body = self.response
        return httpx.Response(status, json=body)

    def create_node(self) -> Node:
        return create_nodes(["http://node"], transport=self)[0]


async def warming_reply(body: dict[str, Any]) -> httpx.Response:
    return httpx.Response(503, json=WARMING, headers={"retry-after": "7"})


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[Pipeline]:
    async with open_pipeline(tmp_path / "queue.db") as opened:
        yield opened


@pytest.mark.rule("N16")
async def test_held_node_is_asked_once_after_its_hold_and_used_when_ready() -> None:
    clock, transport = FakeClock(1000.0), ReadinessNode()
    holds, node = NodeHolds(clock), transport.create_node()
    assert await holds.accepts_reveals(node)
    holds.hold(node, 7)
    clock.advance(6.9)
    assert not await holds.accepts_reveals(node)
    assert transport.requests == 0
    clock.advance(0.2)
    assert not any(await asyncio.gather(*(holds.accepts_reveals(node) for _ in range(5))))
    assert transport.requests == 1
    transport.response = (200, {"status": "ready"})
    clock.advance(RECHECK_SECONDS)
    assert await holds.accepts_reveals(node)
    assert await holds.accepts_reveals(node)
    assert transport.requests == 2


@pytest.mark.parametrize("response", [None, (404, {"error": "not found"}), (200, {"status": "odd"}), (500, {})])
async def test_node_without_readable_readiness_is_used_after_its_hold(response: tuple[int, Any] | None) -> None:
    clock, transport = FakeClock(1000.0), ReadinessNode()
    holds, node = NodeHolds(clock), transport.create_node()
    transport.response = response
    holds.hold(node, 10**15)
    clock.advance(MAX_HOLD_SECONDS - 0.1)
    assert not await holds.accepts_reveals(node)
    clock.advance(0.2)
    assert await holds.accepts_reveals(node)


@pytest.mark.rule("N16")
async def test_share_refused_by_warming_nodes_is_sent_again_only_after_their_hold(pipeline: Pipeline) -> None:
    pipeline.set_replies(warming_reply)
    first = await pipeline.prepare_message(1)
    await pipeline.broadcaster.send(first)
    assert pipeline.nodes.posted_to == [FIRST_NODE]
    await pipeline.next_block()  # 5 s later
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    pipeline.clock.advance(1)
    pipeline.show_block()
    await pipeline.broadcaster.reconcile(pipeline.height)
    assert len(pipeline.nodes.posts) == 2, "both nodes asked to wait longer"
    assert pipeline.read_send_state()[0] == 2, "no send is recorded while no node accepts reveals"
    pipeline.set_replies(ACCEPTED_REPLY)
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE, FIRST_NODE]
    assert pipeline.nodes.posts[0][1] == pipeline.nodes.posts[2][1]
    assert pipeline.read_send_state()[4] == "ACCEPTED"
    assert pipeline.read_share(1, "attempts") == (0,)
