"""Sends without a response: sent again at the next height through another node, while the call continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from helper.chain.node import Node
from helper.chain.node_http import RequestProgress
from helper.chain.rest_client import ChainClient
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.verdicts import BroadcastOutcome, Verdict
from helper.core.share import ShareState
from helper.reveal.broadcaster import NODE_AVOIDANCE_SECONDS
from helper.reveal.send_call import SendCall
from tests.support.fakes import (
    ACCEPTED_REPLY,
    BAD_PROOF_REPLY,
    CHAIN_ID,
    FIRST_NODE,
    SECOND_NODE,
    NodeReply,
    refuse_with,
    wait_until,
)
from tests.support.queue_pipeline import Pipeline, open_pipeline

RESPONSE_WAIT = 3.0


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[Pipeline]:
    async with open_pipeline(tmp_path / "queue.db") as opened:
        yield opened
        await opened.broadcaster.stop()


class StoppedNode:
    """A node that responds after it continues."""

    def __init__(self, reply: NodeReply = ACCEPTED_REPLY) -> None:
        self._reply = reply
        self.continues = asyncio.Event()
        self.was_cancelled = False

    async def __call__(self, body: dict[str, Any]) -> httpx.Response:
        try:
            await self.continues.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return await self._reply(body)


async def wait_for_end(pipeline: Pipeline, work: Coroutine[Any, Any, None]) -> None:
    """Run work in which one call to a node gets no response."""
    posts = len(pipeline.nodes.posts)
    task = asyncio.create_task(work)
    await wait_until(lambda: len(pipeline.nodes.posts) > posts)
    await asyncio.sleep(0)
    pipeline.clock.advance(RESPONSE_WAIT - 0.5)
    await asyncio.sleep(0.01)
    assert not task.done()
    pipeline.clock.advance(0.5)
    await task


async def show_next_block(pipeline: Pipeline) -> None:
    """Process a block while a call to a node gets no response."""
    pipeline.clock.advance(5)
    pipeline.show_block()
    await wait_for_end(pipeline, pipeline.broadcaster.reconcile(pipeline.height))


@pytest.mark.rule("R11")
async def test_send_without_response_goes_to_other_node_at_next_height(pipeline: Pipeline) -> None:
    node = pipeline.nodes.replies[FIRST_NODE] = StoppedNode()
    pipeline.nodes.replies[SECOND_NODE] = refuse_with("mempool is full")
    share = await pipeline.prepare_message()
    await wait_for_end(pipeline, pipeline.broadcaster.send(share))
    assert pipeline.read_send_state()[-2:] == (FIRST_NODE, "AMBIGUOUS"), "the outcome is unknown"
    await pipeline.broadcaster.send(share)
    await pipeline.broadcaster.reconcile(pipeline.height)
    assert pipeline.nodes.posted_to == [FIRST_NODE], "not again at the same height"
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    assert pipeline.nodes.posts[0][1] == pipeline.nodes.posts[1][1], "the same bytes"
    assert pipeline.read_send_state()[1:] == (101, 102, SECOND_NODE, "UNAVAILABLE")
    node.continues.set()
    await wait_until(lambda: pipeline.stats.counts["answer_accepted"] == 1)
    await asyncio.sleep(0.01)
    assert pipeline.read_send_state()[-1] == "UNAVAILABLE", "a later send has replaced this one"
    assert pipeline.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0)


async def test_block_produced_during_the_wait_permits_the_next_send(pipeline: Pipeline) -> None:
    pipeline.nodes.replies[FIRST_NODE] = StoppedNode()
    notified: list[int] = []
    pipeline.broadcaster.subscribe_to_unanswered(lambda: notified.append(pipeline.height))
    task = asyncio.create_task(pipeline.broadcaster.send(await pipeline.prepare_message()))
    await wait_until(lambda: pipeline.nodes.posts)
    await asyncio.sleep(0)
    pipeline.clock.advance(1)
    pipeline.show_block()
    await pipeline.broadcaster.reconcile(pipeline.height)
    assert pipeline.nodes.posted_to == [FIRST_NODE], "the node still has time to respond"
    pipeline.clock.advance(2)
    await task
    assert notified == [pipeline.height]
    await pipeline.broadcaster.reconcile(pipeline.height)
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE], "no further block is needed"


async def test_late_acceptance_is_recorded(pipeline: Pipeline) -> None:
    pipeline.circuits.select_initial(CHAIN_ID, "", None)
    node = pipeline.nodes.replies[FIRST_NODE] = StoppedNode()
    await wait_for_end(pipeline, pipeline.broadcaster.send(await pipeline.prepare_message()))
    assert pipeline.circuits.is_current_unproven
    node.continues.set()
    await wait_until(lambda: pipeline.read_send_state()[-1] == "ACCEPTED")
    assert not pipeline.circuits.is_current_unproven
    await pipeline.next_block()
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE], "an accepted message has three blocks"


async def test_late_refusal_of_wrong_proof_spends_an_attempt(pipeline: Pipeline) -> None:
    node = pipeline.nodes.replies[FIRST_NODE] = StoppedNode(BAD_PROOF_REPLY)
    pipeline.prover.is_valid = False
    await wait_for_end(pipeline, pipeline.broadcaster.send(await pipeline.prepare_message()))
    assert pipeline.read_share(1, "attempts") == (0,)
    node.continues.set()
    await wait_until(lambda: pipeline.read_share(1, "attempts") == (1,))


async def test_node_without_response_gets_no_second_copy_for_a_time(pipeline: Pipeline) -> None:
    pipeline.set_replies(StoppedNode())
    await wait_for_end(pipeline, pipeline.broadcaster.send(await pipeline.prepare_message()))
    await show_next_block(pipeline)
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    await pipeline.next_block()
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    pipeline.clock.advance(NODE_AVOIDANCE_SECONDS)
    await show_next_block(pipeline)
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE, FIRST_NODE]


async def test_node_without_connection_leaves_send_to_next_node_at_once(pipeline: Pipeline) -> None:
    pipeline.nodes.connecting.add(FIRST_NODE)
    task = asyncio.create_task(pipeline.broadcaster.send(await pipeline.prepare_message()))
    await wait_until(lambda: pipeline.read_send_state()[0] == 1)
    await wait_until(lambda: pipeline.clock.sleeper_count)
    pipeline.clock.advance(RESPONSE_WAIT)
    await task
    assert pipeline.nodes.posted_to == [SECOND_NODE], "no byte has left, so the height is free"
    assert pipeline.read_send_state()[1:] == (101, 101, SECOND_NODE, "ACCEPTED")
    assert [node.name for node in pipeline.endpoints.usable_nodes] == [SECOND_NODE], "the node is in backoff"


async def test_call_whose_first_byte_left_during_its_cancellation_has_unknown_outcome(pipeline: Pipeline) -> None:
    class LateConnection(ChainClient):
        async def broadcast(self, message: RevealMessage, progress: RequestProgress | None = None) -> BroadcastOutcome:
            try:
                await asyncio.Event().wait()
            finally:
                assert progress is not None
                await progress.trace("http11.send_request_headers.started", {})
            raise AssertionError

    message = RevealMessage(b"\x01" * 32, b"\x02" * 64, 1, 0, b"\x03" * 4000, b"\x04" * 32, 84)
    call = SendCall(Node(LateConnection("http://late", transport=pipeline.nodes)), message, pipeline.clock)
    wait = asyncio.create_task(call.wait())
    await wait_until(lambda: pipeline.clock.sleeper_count)
    pipeline.clock.advance(RESPONSE_WAIT)
    outcome = await wait
    assert outcome is not None
    assert (outcome.verdict, outcome.may_be_sent) == (Verdict.AMBIGUOUS, True)


async def test_late_response_after_lease_was_lost_is_ignored(pipeline: Pipeline) -> None:
    node = pipeline.nodes.replies[FIRST_NODE] = StoppedNode()
    pipeline.circuits.select_initial(CHAIN_ID, "", None)
    lease: Any = SimpleNamespace(is_held=True, fence=1)
    broadcaster = pipeline.make_broadcaster(lease=lease)
    await wait_for_end(pipeline, broadcaster.send(await pipeline.prepare_message()))
    lease.fence += 2  # another host held it in between
    node.continues.set()
    await wait_until(lambda: pipeline.stats.counts["answer_accepted"] == 1)
    await asyncio.sleep(0.01)
    assert pipeline.read_send_state()[-1] == "AMBIGUOUS"
    assert pipeline.circuits.is_current_unproven


async def test_error_in_late_response_is_logged(pipeline: Pipeline) -> None:
    async def raise_bug(body: dict[str, Any]) -> httpx.Response:
        raise RuntimeError("a bug")

    node = pipeline.nodes.replies[FIRST_NODE] = StoppedNode(raise_bug)
    await wait_for_end(pipeline, pipeline.broadcaster.send(await pipeline.prepare_message()))
    with capture_logs() as logs:
        node.continues.set()
        await wait_until(lambda: logs)
    assert [entry["event"] for entry in logs] == ["late_response_failed"]
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]


async def test_stop_cancels_calls_without_response(pipeline: Pipeline) -> None:
    node = pipeline.nodes.replies[FIRST_NODE] = StoppedNode()
    await wait_for_end(pipeline, pipeline.broadcaster.send(await pipeline.prepare_message()))
    await pipeline.broadcaster.stop()
    assert node.was_cancelled


async def test_cancelled_send_cancels_its_call(pipeline: Pipeline) -> None:
    node = pipeline.nodes.replies[FIRST_NODE] = StoppedNode()
    task = asyncio.create_task(pipeline.broadcaster.send(await pipeline.prepare_message()))
    await wait_until(lambda: pipeline.nodes.posts)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await wait_until(lambda: node.was_cancelled)
