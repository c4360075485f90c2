"""A node that asks to wait gets no reveal until it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helper.chain.node_pool import Node, create_nodes
from helper.reveal.node_holds import MAX_HOLD_SECONDS, PROBE_SECONDS, RECHECK_SECONDS, NodeHolds
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


async def busy_reply(body: dict[str, Any]) -> httpx.Response:
    return httpx.Response(429, json={"error": "too many requests"}, headers={"retry-after": "60"})


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
async def test_shares_are_not_sent_to_a_held_node_while_another_accepts(pipeline: Pipeline) -> None:
    pipeline.nodes.replies = {FIRST_NODE: warming_reply, SECOND_NODE: ACCEPTED_REPLY}
    shares = [await pipeline.prepare_message(position) for position in (1, 2, 3)]
    await pipeline.broadcaster.send(shares[0])
    for share in shares[1:]:
        await pipeline.broadcaster.send(share)
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE, SECOND_NODE]
    await pipeline.next_block()  # 5 s later
    assert pipeline.nodes.posted_to[3:] == [SECOND_NODE]
    pipeline.nodes.replies[FIRST_NODE] = ACCEPTED_REPLY
    pipeline.clock.advance(30)
    pipeline.show_block()
    await pipeline.broadcaster.send(await pipeline.prepare_message(4))
    assert pipeline.nodes.posted_to[4:] == [FIRST_NODE], "its hold has ended"


async def test_one_share_probes_each_held_node_and_the_others_follow_an_accepted_one(pipeline: Pipeline) -> None:
    events: list[int] = []
    pipeline.broadcaster.subscribe_to_unanswered(lambda: events.append(len(pipeline.nodes.posts)))
    pipeline.set_replies(busy_reply)
    shares = [await pipeline.prepare_message(position) for position in range(1, 9)]
    for share in shares[:2]:
        await pipeline.broadcaster.send(share)
    assert pipeline.broadcaster.seconds_to_probe == PROBE_SECONDS
    first = len(pipeline.nodes.posts)
    pipeline.clock.advance(PROBE_SECONDS - 0.1)
    pipeline.show_block()
    await pipeline.broadcaster.reconcile(pipeline.height)
    assert len(pipeline.nodes.posts) == first
    pipeline.clock.advance(0.2)
    await pipeline.broadcaster.reconcile(pipeline.height)
    assert len(pipeline.nodes.posts) == first + 2, "one share for each node"
    pipeline.set_replies(ACCEPTED_REPLY)
    pipeline.clock.advance(PROBE_SECONDS)
    pipeline.show_block()
    await pipeline.broadcaster.reconcile(pipeline.height)
    assert events
    await pipeline.broadcaster.reconcile(pipeline.height)
    assert pipeline.query_rows("SELECT count(*) FROM reveals WHERE last_outcome = 'ACCEPTED'") == [(8,)]
    assert pipeline.broadcaster.seconds_to_probe is None


@pytest.mark.parametrize(("seconds_left", "hold"), [(45.0, 4.5), (300.0, 30.0), (3600.0, MAX_HOLD_SECONDS)])
async def test_hold_is_limited_to_a_tenth_of_the_time_until_the_end(seconds_left: float, hold: float) -> None:
    clock, transport = FakeClock(1000.0), ReadinessNode()
    transport.response = None
    holds, node = NodeHolds(clock), transport.create_node()
    holds.hold(node, 60)
    clock.advance(hold - 0.1)
    assert not await holds.accepts_reveals(node, seconds_left=seconds_left - (hold - 0.1))
    clock.advance(0.2)
    assert await holds.accepts_reveals(node, seconds_left=seconds_left - (hold + 0.1))
