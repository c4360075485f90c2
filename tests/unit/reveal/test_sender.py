"""From a stored message to a confirmed reveal: send times, nodes, and the effect of each response."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from helper.chain.broadcast_outcome import BroadcastOutcome, Verdict
from helper.chain.chain_data import BlockHead
from helper.chain.node import Node
from helper.chain.node_http import RequestProgress
from helper.chain.node_pool import NodePool, create_nodes
from helper.chain.rest_client import ChainClient
from helper.chain.reveal_transaction import RevealMessage
from helper.core.share import ShareState
from helper.errors import ChainUnavailable
from helper.observability.service_state import RecentFailure
from helper.reveal import sender
from helper.reveal.send_policy import AVOIDANCE_SECONDS, PROBE_SECONDS, REPROVE_BLOCKS
from helper.reveal.sender import CONCURRENT_RESENDS, SendCall
from helper.store import messages
from helper.store.shares import claim_due, recover, requeue
from helper.store.table_rows import RevealRow
from helper.store.transaction import Transaction
from tests.support.fakes import (
    ACCEPTED_REPLY,
    ANCHOR,
    BAD_PROOF_REPLY,
    CHAIN_ID,
    FIRST_NODE,
    SECOND_NODE,
    START_TIME,
    NodeReply,
    create_share,
    fail_with,
    refuse_with,
    reply_with,
    wait_for_length,
    wait_until,
)
from tests.support.queue_pipeline import Pipeline, open_pipeline

ANCHOR_UNKNOWN = refuse_with("invalid zero-knowledge proof: no commitment tree root at height 90")
RESPONSE_WAIT = 3.0
ALREADY_SPENT = refuse_with("nullifier already spent: …")


async def raise_bug(body: dict[str, Any]) -> httpx.Response:
    raise RuntimeError("a bug")


async def test_prepared_message_is_on_disk_before_first_byte_is_sent(pipeline: Pipeline) -> None:
    states: list[tuple[Any, ...]] = []

    async def check_stored(body: dict[str, Any]) -> httpx.Response:
        states.append(
            (
                pipeline.read_share(1),
                pipeline.read_send_state(),
                pipeline.query_rows("SELECT substr(message, 33) FROM reveals")[0][0],
            )
        )
        return await ACCEPTED_REPLY(body)

    pipeline.nodes.replies[FIRST_NODE] = check_stored
    await pipeline.sender.send(await pipeline.prepare_message())
    ((state, sending, message),) = states
    assert state == (ShareState.SENT,)
    assert sending == (1, pipeline.height, pipeline.height, FIRST_NODE, None)
    body = json.loads(pipeline.nodes.posts[0][1])
    sent = RevealMessage.from_tx(message)
    assert {name: b64decode(body[name]) for name in ("proof", "share_nullifier", "enc_share")} == {
        "proof": sent.proof,
        "share_nullifier": sent.nullifier,
        "enc_share": create_share(1).c1 + create_share(1).c2,
    }
    assert body["vote_comm_tree_anchor_height"] == ANCHOR.height
    assert pipeline.read_send_state()[-1] == "ACCEPTED"


async def test_sender_sends_at_most_once_per_height(pipeline: Pipeline) -> None:
    share = await pipeline.prepare_message()
    await asyncio.gather(*(pipeline.sender.send(share) for _ in range(5)), pipeline.sender.reconcile())
    await pipeline.sender.send(share)
    await pipeline.sender.reconcile()
    assert len(pipeline.nodes.posts) == 1
    pipeline.height -= 5  # the node with the newest block is unreachable: no reason to resend
    pipeline.show_block()
    await pipeline.sender.reconcile()
    assert len(pipeline.nodes.posts) == 1


async def test_block_existing_at_last_send_causes_no_resend(pipeline: Pipeline) -> None:
    share = await pipeline.prepare_message()
    pipeline.set_replies(reply_with(502, error="lost"))
    pipeline.clock.advance(1)
    await pipeline.sender.send(share)
    pipeline.clock.advance(1)
    pipeline.height += 1
    for endpoint in pipeline.endpoints.nodes:  # the first probe since the send: the block may be older than the send
        pipeline.record_head(endpoint, BlockHead(CHAIN_ID, pipeline.height, pipeline.clock.now()))
    await pipeline.sender.reconcile()
    assert len(pipeline.nodes.posts) == 1
    await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 2


async def test_block_reported_late_by_node_causes_no_resend(pipeline: Pipeline) -> None:
    share = await pipeline.prepare_message()
    pipeline.set_replies(reply_with(502, error="lost"))
    pipeline.show_block()
    old, newer = pipeline.clock.now(), pipeline.clock.now() + 1
    pipeline.clock.advance(2)
    await pipeline.sender.send(share)
    # A probe after the send reported the old block, too.
    for height, time in ((pipeline.height, old), (pipeline.height + 1, newer)):
        pipeline.clock.advance(1)
        for endpoint in pipeline.endpoints.nodes:
            pipeline.record_head(endpoint, BlockHead(CHAIN_ID, height, time))
    pipeline.height += 1
    await pipeline.sender.reconcile()
    assert len(pipeline.nodes.posts) == 1
    await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 2


async def test_sender_logs_same_response_once_for_many_shares(pipeline: Pipeline) -> None:
    shares = [await pipeline.prepare_message(number) for number in range(1, 21)]
    pipeline.set_replies(ANCHOR_UNKNOWN)
    with capture_logs() as logs:
        for share in shares:
            await pipeline.sender.send(share)
        pipeline.set_replies(ALREADY_SPENT)
        await pipeline.next_block()
    delays = [(log.get("endpoint"), log["outcome"]) for log in logs if log["event"] == "reveal_not_accepted"]
    assert len(pipeline.nodes.posts) == 40
    assert len(delays) == len(set(delays))
    assert {outcome for _, outcome in delays} == {"BEHIND", "SPENT"}


async def test_refused_connection_tries_next_node_immediately(pipeline: Pipeline) -> None:
    pipeline.nodes.replies[FIRST_NODE] = fail_with(httpx.ConnectError)
    await pipeline.sender.send(await pipeline.prepare_message())
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    assert [endpoint.name for endpoint in pipeline.endpoints.usable_nodes] == [SECOND_NODE], "the node is in backoff"
    assert pipeline.stats.counts["broadcast"] == 1
    assert pipeline.read_send_state()[-2:] == (SECOND_NODE, "ACCEPTED")


@pytest.mark.rule("R11")
@pytest.mark.parametrize(
    "response",
    [
        reply_with(503, error="warming up"),
        reply_with(502, error="no engine"),
        fail_with(httpx.ReadError),
        ANCHOR_UNKNOWN,
    ],
    ids=["503", "502", "lost reply", "anchor unknown"],
)
async def test_outage_resends_same_bytes_to_other_node_at_next_block(pipeline: Pipeline, response: NodeReply) -> None:
    pipeline.nodes.replies[FIRST_NODE] = response
    await pipeline.sender.send(await pipeline.prepare_message())
    assert pipeline.nodes.posted_to == [FIRST_NODE], (
        "not to another node at the same height: the first may have accepted it"
    )
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    assert pipeline.nodes.posts[0][1] == pipeline.nodes.posts[1][1]
    assert pipeline.read_share(1, "state, attempts") == (ShareState.SENT, 0)


async def test_node_with_invalid_response_is_not_first_for_next_share(pipeline: Pipeline) -> None:
    pipeline.nodes.replies[FIRST_NODE] = fail_with(httpx.ReadTimeout)
    await pipeline.sender.send(await pipeline.prepare_message(1))
    await pipeline.sender.send(await pipeline.prepare_message(2))
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    pipeline.show_block(after=31)
    await pipeline.sender.send(await pipeline.prepare_message(3))
    assert pipeline.nodes.posted_to[-1] == FIRST_NODE, "the node is tried again"


async def test_without_fresh_node_nothing_is_sent_or_spent(pipeline: Pipeline) -> None:
    share = await pipeline.prepare_message()
    pipeline.clock.advance(200)
    await pipeline.sender.send(share)
    assert pipeline.nodes.posts == []
    assert pipeline.read_share(1, "state, attempts") == (ShareState.SENT, 0)
    await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 1


@pytest.mark.rule("R8", "N18")
@pytest.mark.parametrize(
    "response", [ACCEPTED_REPLY, refuse_with("an unknown message"), refuse_with("invalid anchor height")]
)
async def test_unconfirmed_after_10_blocks_gets_new_proof_without_attempt(
    pipeline: Pipeline, response: NodeReply
) -> None:
    pipeline.set_replies(response)
    await pipeline.sender.send(await pipeline.prepare_message())
    async with pipeline.run_dispatcher():
        await pipeline.next_block(9)
        assert len({body for _, body in pipeline.nodes.posts}) == 1, "the same bytes"
        assert len(pipeline.prover.started_proofs) == 1, "at most one proof in ten blocks"
        await pipeline.next_block()
        await wait_until(lambda: len({body for _, body in pipeline.nodes.posts}) == 2)
        assert len(pipeline.prover.started_proofs) == 2
        assert pipeline.read_share(1, "attempts") == (0,)


@pytest.mark.rule("R12")
async def test_already_spent_response_does_not_confirm(pipeline: Pipeline) -> None:
    pipeline.set_replies(ALREADY_SPENT)
    await pipeline.sender.send(await pipeline.prepare_message())
    assert pipeline.read_share(1, "state, attempts") == (ShareState.SENT, 0)
    await pipeline.next_block(25)
    assert pipeline.read_share(1, "state, attempts") == (ShareState.SENT, 0)
    assert len(pipeline.prover.started_proofs) == 1, "another proof would not change the result"
    sent = len(pipeline.nodes.posts)
    assert await pipeline.count_on_chain(1)
    assert pipeline.read_share(1) is None
    await pipeline.next_block(12)
    assert len(pipeline.nodes.posts) == sent, "never retried"
    assert (await pipeline.store.count_shares())[create_share(1).round_id] == {ShareState.CONFIRMED: 1}


@pytest.mark.rule("R12")
async def test_share_confirmed_before_its_send_is_not_sent(pipeline: Pipeline) -> None:
    share_id = await pipeline.prepare_message(1)
    await pipeline.count_on_chain(1)
    await pipeline.sender.send(share_id)
    assert pipeline.nodes.posts == []
    assert pipeline.read_share(1) is None


@pytest.mark.rule("R12")
async def test_share_confirmed_during_send_is_done(pipeline: Pipeline) -> None:
    async def count(body: dict[str, Any]) -> httpx.Response:
        await pipeline.count_on_chain(1)
        return await BAD_PROOF_REPLY(body)

    pipeline.nodes.replies[FIRST_NODE] = count
    pipeline.prover.is_valid = False
    share = await pipeline.prepare_message()
    await pipeline.sender.send(share)
    await pipeline.sender.send(share)
    assert (pipeline.read_share(1), len(pipeline.nodes.posts)) == (None, 1)


@pytest.mark.rule("R11")
async def test_proof_failing_own_verification_spends_attempt(pipeline: Pipeline) -> None:
    pipeline.nodes.replies[FIRST_NODE] = BAD_PROOF_REPLY
    pipeline.prover.is_valid = False
    await pipeline.sender.send(await pipeline.prepare_message())
    assert pipeline.read_share(1, "state, attempts, due_ms") == (ShareState.WAITING, 1, (START_TIME + 2) * 1000)
    assert pipeline.prover.verified == [("k10", ANCHOR.root)], "against the root that it was made for"
    assert pipeline.circuits.current == "k10"


async def test_verifier_that_does_not_respond_delays_no_other_share(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helper.reveal.sender.VERIFY_SECONDS", 0.05)
    monkeypatch.setattr(pipeline.prover, "verify", lambda *_: asyncio.Event().wait())
    pipeline.nodes.replies[FIRST_NODE] = BAD_PROOF_REPLY
    await pipeline.prepare_message()
    async with asyncio.timeout(30):
        await pipeline.sender.reconcile()
    assert pipeline.read_share(1, "state, attempts") == (ShareState.SENT, 0)


@pytest.mark.rule("R11")
@pytest.mark.parametrize("reply", [BAD_PROOF_REPLY, reply_with(400, error="validation failed: anchor height is zero")])
async def test_proof_whose_root_is_not_known_is_not_checked_against_another(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, reply: NodeReply
) -> None:
    def create_as_imported(*args: Any) -> RevealRow:
        return create_prepared(*args)._replace(anchor_root=None)

    create_prepared = pipeline.revealer._create_prepared
    monkeypatch.setattr(pipeline.revealer, "_create_prepared", create_as_imported)
    pipeline.set_replies(reply)
    pipeline.prover.is_valid = False
    share = await pipeline.prepare_message()
    for _ in pipeline.endpoints.nodes:
        await pipeline.sender.send(share)
        await pipeline.next_block()
    assert pipeline.prover.verified == []
    assert pipeline.read_share(1, "state, attempts") == (ShareState.SENT, 0), "it is proven again"
    assert (pipeline.circuits.current, pipeline.circuits.refusers) == ("k10", {})
    await pipeline.next_block(REPROVE_BLOCKS)
    assert pipeline.read_share(1, "state, attempts") == (ShareState.WAITING, 0)


async def test_false_height_of_the_only_node_in_sync_keeps_no_later_block_from_naming_the_circuit(
    pipeline: Pipeline,
) -> None:
    share_id = await pipeline.prepare_message()
    liar, honest = pipeline.endpoints.nodes
    pipeline.record_head(liar, BlockHead(CHAIN_ID, 10**9, pipeline.clock.now()))
    for _ in range(2):
        honest.health.record_failed_probe("restarts", has_responded=False, started_at=pipeline.clock.monotonic())
    pipeline.endpoints.apply_probes()
    pipeline.nodes.replies[FIRST_NODE] = BAD_PROOF_REPLY
    await pipeline.sender.send(share_id)
    assert pipeline.circuits.current == "k11"
    assert pipeline.circuits._height == pipeline.height


@pytest.mark.parametrize("reply", [BAD_PROOF_REPLY, reply_with(400, error="validation failed: anchor height is zero")])
async def test_refusal_by_a_node_with_another_root_says_nothing_about_circuit_or_share(
    pipeline: Pipeline, reply: NodeReply
) -> None:
    pipeline.set_replies(reply)
    share = await pipeline.prepare_message()
    (root,) = pipeline.prover.roots.values()
    pipeline.trees.unserved_roots = {(node.name, root) for node in pipeline.endpoints.nodes}
    pipeline.prover.roots.clear()  # as after a restart, or on the host that sends
    for _ in pipeline.endpoints.nodes:
        await pipeline.sender.send(share)
        await pipeline.next_block()
    assert pipeline.read_share(1, "state, attempts") == (ShareState.SENT, 0)
    assert pipeline.read_send_state()[-1] == "BEHIND"
    assert (pipeline.circuits.current, pipeline.circuits.refusers) == ("k10", {})


async def prepare_message_with_root_of_first_node(pipeline: Pipeline) -> int:
    """Prepare a message that all nodes refuse, and whose root the second one does not serve. Returns the share's id."""
    pipeline.set_replies(BAD_PROOF_REPLY)
    pipeline.circuits.select_initial("svote-test", "", "k10")
    share = await pipeline.prepare_message()
    (root,) = pipeline.prover.roots.values()
    pipeline.trees.unserved_roots = {(pipeline.endpoints.nodes[1].name, root)}
    return share


async def test_refused_circuit_is_kept_once_for_a_node_that_checked_with_another_root(pipeline: Pipeline) -> None:
    share = await prepare_message_with_root_of_first_node(pipeline)
    for current in ("k10", "k11"):
        for _ in range(REPROVE_BLOCKS + 2):
            await pipeline.sender.send(share)
            await pipeline.next_block()
            await pipeline.sender.reconcile()
        assert pipeline.read_share(1, "state, attempts") == (ShareState.WAITING, 0)
        assert pipeline.circuits.current == current, "the other node's tree may not have the leaf"
        assert list(pipeline.circuits.refusers) == ["k10"]
        await pipeline.prepare_message()
        pipeline.trees.unserved_roots = {(pipeline.endpoints.nodes[1].name, r) for r in pipeline.prover.roots.values()}


async def test_message_of_a_host_that_does_not_know_of_a_refusal_is_sent(pipeline: Pipeline) -> None:
    share = await pipeline.prepare_message()
    pipeline.circuits.use_other(share, "k10")  # a node has refused an earlier message; the chain counts others since
    await pipeline.sender.send(share)
    assert pipeline.read_share(1) == (ShareState.SENT,)
    assert len(pipeline.nodes.posts) == 1


async def test_circuit_is_kept_for_a_node_with_another_root_also_after_a_full_disk(pipeline: Pipeline) -> None:
    share = await prepare_message_with_root_of_first_node(pipeline)
    await pipeline.sender.send(share)
    pipeline.store.failing_calls.add("requeue")
    for _ in range(REPROVE_BLOCKS + 2):
        await pipeline.next_block()
    pipeline.store.failing_calls.clear()
    await pipeline.next_block(REPROVE_BLOCKS)
    assert pipeline.read_share(1) == (ShareState.WAITING,)
    assert pipeline.circuits.current == "k10"


async def test_share_that_is_never_confirmed_is_proven_at_growing_intervals(pipeline: Pipeline) -> None:
    proven_at: list[int] = []
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        for block in range(8 * REPROVE_BLOCKS):
            await pipeline.settle_dispatcher()
            await wait_until(lambda: not pipeline.dispatcher._tasks)
            proven_at += [block] * (len(pipeline.prover.started_proofs) - len(proven_at))
            await pipeline.next_block()
    intervals = [later - earlier for earlier, later in pairwise(proven_at)]
    assert len(intervals) == 3, intervals
    assert all(interval >= sum(intervals[:number]) for number, interval in enumerate(intervals)), "as long as before"


async def test_full_disk_does_not_postpone_a_new_proof_after_its_end(pipeline: Pipeline) -> None:
    await pipeline.sender.send(await pipeline.prepare_message())
    await pipeline.next_block(REPROVE_BLOCKS - 1)
    pipeline.store.failing_calls = {"requeue", "mark_sending"}
    await pipeline.next_block(3 * REPROVE_BLOCKS)
    assert pipeline.read_share(1) == (ShareState.SENT,)
    pipeline.store.failing_calls.clear()
    for _ in range(REPROVE_BLOCKS // 2):  # it is first sent again
        await pipeline.next_block()
    assert pipeline.read_share(1) == (ShareState.WAITING,)


async def test_circuit_of_a_share_that_one_node_calls_spent_is_kept_for_others(pipeline: Pipeline) -> None:
    pipeline.circuits.select_initial(CHAIN_ID, "", "k10")
    pipeline.nodes.replies = {FIRST_NODE: BAD_PROOF_REPLY, SECOND_NODE: ALREADY_SPENT}
    share = await pipeline.prepare_message()
    for _ in range(3 * REPROVE_BLOCKS):
        if pipeline.read_share(1) == (ShareState.SENT,):
            await pipeline.sender.send(share)
        await pipeline.next_block()
    assert pipeline.read_share(1, "state, attempts") == (ShareState.WAITING, 0), "it is proven anew"
    assert pipeline.circuits.circuit_for("", 1) == "k11"
    assert (pipeline.circuits.current, pipeline.circuits.pause_reason) == ("k10", None)


async def test_refused_valid_proof_is_retried_with_other_circuit(pipeline: Pipeline) -> None:
    async def accept_k11(body: dict[str, Any]) -> httpx.Response:
        pipeline.clock.advance(0.1)
        return await (ACCEPTED_REPLY if pipeline.prover.circuits[-1] == "k11" else BAD_PROOF_REPLY)(body)

    pipeline.set_replies(accept_k11)
    pipeline.circuits.select_initial("svote-test", "", None)
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        await wait_until(lambda: pipeline.query_rows("SELECT last_outcome FROM reveals") == [("BAD_PROOF",)])
        await pipeline.settle_dispatcher()
        assert pipeline.circuits.current == "k10", "a statement of a single node proves nothing"
        await pipeline.next_block()
        await wait_until(lambda: len(pipeline.prover.started_proofs) == 2)
        await pipeline.settle_dispatcher()
        assert len(pipeline.nodes.posts) == 2, "at most one message of a share per height"
        await pipeline.next_block()
        await wait_until(lambda: not pipeline.circuits.is_current_unproven)
    assert pipeline.prover.circuits == ["k10", "k11"]
    assert pipeline.read_share(1, "state, attempts") == (ShareState.SENT, 0)
    assert pipeline.read_send_state()[-1] == "ACCEPTED"


async def test_share_sent_before_restart_waits_for_new_block(pipeline: Pipeline) -> None:
    share = await pipeline.prepare_message()
    await pipeline.sender.send(share)
    await pipeline.store.run(requeue, share, stage="broadcast", note="the chain refuses k10 proofs")
    pipeline.clock.advance(0.1)
    after_restart = pipeline.make_sender()
    assert await pipeline.revealer.prove(await pipeline.claim_due_share())
    await after_restart.send(share)
    assert len(pipeline.nodes.posts) == 1
    pipeline.show_block(after=5)
    await after_restart.send(share)
    assert len(pipeline.nodes.posts) == 2


async def test_reveal_counted_in_an_unread_block_is_not_proven_again(pipeline: Pipeline) -> None:
    pipeline.set_replies(ACCEPTED_REPLY)
    await pipeline.sender.send(await pipeline.prepare_message())
    result = {"hash": "", "height": "101", "code": 0, "log": "", "events": []}
    pipeline.nodes.transactions = {SECOND_NODE: result}
    await pipeline.next_block(3 * REPROVE_BLOCKS)
    assert pipeline.read_share(1, "state") == (ShareState.SENT,)
    pipeline.nodes.transactions = {}
    await pipeline.next_block(4)
    assert pipeline.read_share(1, "state") == (ShareState.WAITING,)


async def test_failure_in_a_block_prevails_over_a_node_that_reports_the_reveal_as_counted(pipeline: Pipeline) -> None:
    await pipeline.sender.send(await pipeline.prepare_message())
    counted = {"hash": "", "height": "101", "code": 0, "log": "", "events": []}
    failed = counted | {"code": 1, "log": "invalid zero-knowledge proof: verification failed"}
    pipeline.nodes.transactions = {FIRST_NODE: counted, SECOND_NODE: failed}
    await pipeline.next_block(REPROVE_BLOCKS + 1)
    assert pipeline.read_share(1, "state, attempts") == (ShareState.WAITING, 0)
    assert pipeline.circuits.current == "k11"


async def test_node_that_withholds_results_delays_no_send_for_long(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = pipeline.endpoints.nodes[0].client
    monkeypatch.setattr(liar, "tx", lambda _: asyncio.Event().wait())
    monkeypatch.setattr(liar, "_send_times", SimpleNamespace(limit=0.01, add=lambda _: None))
    await pipeline.sender.send(await pipeline.prepare_message())
    async with asyncio.timeout(5):
        await pipeline.next_block(REPROVE_BLOCKS + 1)
    assert pipeline.read_share(1, "state, attempts") == (ShareState.WAITING, 0)


async def test_node_without_verdict_does_not_prevent_circuit_switch(pipeline: Pipeline) -> None:
    pipeline.nodes.replies = {FIRST_NODE: BAD_PROOF_REPLY, SECOND_NODE: reply_with(429, error="too many requests")}
    pipeline.circuits.select_initial("svote-test", "", None)
    await pipeline.sender.send(await pipeline.prepare_message())
    await pipeline.next_block(REPROVE_BLOCKS)
    assert pipeline.circuits.current == "k11"
    assert pipeline.read_share(1, "state, attempts") == (ShareState.WAITING, 0)


async def test_circuit_refused_for_confirmed_share_is_switched_although_last_node_is_busy(pipeline: Pipeline) -> None:
    pipeline.nodes.replies = {FIRST_NODE: BAD_PROOF_REPLY, SECOND_NODE: refuse_with("mempool is full")}
    pipeline.circuits.select_initial("svote-test", "", None)
    first = await pipeline.prepare_message(1)
    await pipeline.sender.send(first)
    await pipeline.count_on_chain(1)  # another helper revealed it
    pipeline.sender.forget_confirmed(first)
    await pipeline.sender.send(await pipeline.prepare_message(2))
    await pipeline.next_block(REPROVE_BLOCKS)
    assert pipeline.circuits.current == "k11"
    assert pipeline.read_share(2, "state, attempts") == (ShareState.WAITING, 0)


@pytest.mark.rule("N18")
async def test_accepted_but_unconfirmed_message_goes_to_the_next_node_after_3_blocks(pipeline: Pipeline) -> None:
    pipeline.endpoints.nodes += create_nodes([("http://third", "")], transport=pipeline.nodes)
    pipeline.nodes.replies["third:80"] = ACCEPTED_REPLY
    pipeline.show_block()
    await pipeline.sender.send(await pipeline.prepare_message())
    await pipeline.next_block(7)
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE, "third:80"]


async def test_refused_configured_circuit_pauses_queue_without_attempt(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path / "queue.db", circuit="k11") as pipeline:
        pipeline.set_replies(BAD_PROOF_REPLY)
        async with pipeline.run_dispatcher():
            await pipeline.enqueue(1)
            await wait_until(lambda: pipeline.query_rows("SELECT last_outcome FROM reveals") == [("BAD_PROOF",)])
            await pipeline.settle_dispatcher()
            assert pipeline.circuits.pause_reason is None, "a statement of a single node proves nothing"
            await pipeline.next_block()
            assert pipeline.circuits.pause_reason is not None
            await pipeline.enqueue(2)
            await pipeline.settle_dispatcher()
            assert pipeline.dispatcher.pause_reason is not None
            assert pipeline.prover.positions == [1]
            assert pipeline.read_share(1, "state, attempts") == (ShareState.WAITING, 0)
            assert await pipeline.count_idle_turns() == 0


async def test_queue_paused_by_refusals_tries_one_share_per_block(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path / "queue.db", circuit="k11") as pipeline:
        pipeline.set_replies(BAD_PROOF_REPLY)
        async with pipeline.run_dispatcher():
            await pipeline.enqueue(1, 2, 3)
            await pipeline.settle_dispatcher()
            while pipeline.circuits.pause_reason is None:
                await pipeline.next_block()
                await pipeline.settle_dispatcher()
            refused = len(pipeline.prover.positions)
            for _ in range(2):
                await pipeline.next_block()
                await pipeline.settle_dispatcher()
                assert len(pipeline.prover.positions) <= refused + 2
            assert pipeline.circuits.pause_reason is not None
            pipeline.set_replies(ACCEPTED_REPLY)
            blocks = 0
            while (
                4 not in {state for _, state in pipeline.share_states().items()}
                or pipeline.circuits.pause_reason is not None
            ):
                await pipeline.next_block()
                await pipeline.settle_dispatcher()
                # The shares that the block permitted are proven and sent.
                await wait_until(lambda: not pipeline.dispatcher._tasks)
                blocks += 1
                assert blocks <= 3, "it does not wait for the pause"


@pytest.mark.rule("R15")
async def test_permanently_refused_message_fails_and_is_reported(pipeline: Pipeline) -> None:
    pipeline.set_replies(refuse_with("invalid message field: proposal", 9))
    share = await pipeline.prepare_message()
    with capture_logs() as logs:
        await pipeline.sender.send(share)
        assert pipeline.read_share(1, "state, attempts") == (ShareState.SENT, 0), (
            "a statement of a single node proves nothing"
        )
        await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    assert pipeline.read_share(1, "state, attempts, length(witness)") == (ShareState.FAILED, 0, 704)
    errors = [(e["event"], e["stage"], e["reason"]) for e in logs if e["log_level"] == "error"]
    assert errors == [("share_failed", "broadcast", "invalid message field: proposal")]
    assert pipeline.stats.counts["failed"] == 1
    assert list(pipeline.stats.failures) == [RecentFailure("broadcast", "invalid message field: proposal")]


@pytest.mark.parametrize(
    "refusal", [refuse_with("invalid message field: proposal", 9), BAD_PROOF_REPLY], ids=["fields", "proof"]
)
async def test_node_refusing_all_loses_nothing_while_another_is_healthy(pipeline: Pipeline, refusal: NodeReply) -> None:
    pipeline.nodes.replies[FIRST_NODE] = refusal
    share = await pipeline.prepare_message()
    await pipeline.sender.send(share)
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    assert pipeline.read_share(1, "state, attempts") == (ShareState.SENT, 0)
    assert pipeline.read_send_state()[-1] == "ACCEPTED"
    assert (pipeline.circuits.current, pipeline.circuits.pause_reason) == ("k10", None)


async def test_permanent_refusal_by_only_node_spends_one_attempt(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path / "queue.db", agree=1) as pipeline:
        del pipeline.endpoints.nodes[1]
        pipeline.nodes.replies[FIRST_NODE] = refuse_with("invalid message field: proposal", 9)
        await pipeline.sender.send(await pipeline.prepare_message())
        assert pipeline.read_share(1, "state, attempts") == (ShareState.WAITING, 1)


async def test_permanent_refusal_by_the_only_usable_node_of_two_decides_nothing(pipeline: Pipeline) -> None:
    pipeline.nodes.replies[FIRST_NODE] = refuse_with("invalid message field: proposal", 9)
    pipeline.endpoints.start_backoff(pipeline.endpoints.nodes[1], "away")
    await pipeline.sender.send(await pipeline.prepare_message())
    assert pipeline.read_share(1, "state, attempts") == (ShareState.SENT, 0)
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    assert pipeline.read_send_state()[-1] == "ACCEPTED"


@pytest.mark.rule("R4")
async def test_clock_set_back_before_due_time_sends_nothing(pipeline: Pipeline) -> None:
    share = await pipeline.prepare_message()
    pipeline.clock.set_wall_clock(-60)
    pipeline.show_block()
    await pipeline.sender.send(share)
    await pipeline.next_block()
    assert pipeline.nodes.posts == []
    pipeline.clock.advance(55)
    await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 1


async def test_takeover_waits_for_block_after_other_hosts_send(pipeline: Pipeline) -> None:
    share_id = await pipeline.prepare_message()
    await pipeline.sender.send(share_id)
    await pipeline.next_block()
    assert await pipeline.store.run(
        messages.mark_sending, share_id, height=pipeline.height, endpoint=SECOND_NODE
    )  # by another host
    pipeline.show_block(after=5)
    pipeline.clock.advance(1)
    pipeline.sender.start_term()
    await pipeline.sender.reconcile()
    assert len(pipeline.nodes.posts) == 1
    await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 2


def respond_by_circuit(pipeline: Pipeline, circuit: str, responses: list[str]) -> NodeReply:
    """A node of a chain that accepts this circuit; appends the circuit of each proof to `responses`."""

    async def respond(body: dict[str, Any]) -> httpx.Response:
        share_id = pipeline.query_rows(
            "SELECT id FROM shares WHERE field(witness, 'nullifier') = ?", b64decode(body["share_nullifier"])
        )[0][0]
        (circuit_used,) = pipeline.query_rows("SELECT circuit FROM reveals WHERE share_id = ?", share_id)[0]
        responses.append(circuit_used)
        return await (ACCEPTED_REPLY if circuit_used == circuit else BAD_PROOF_REPLY)(body)

    return respond


@pytest.mark.parametrize("faulty", [FIRST_NODE, SECOND_NODE])
async def test_upgraded_circuit_is_found_although_one_node_refuses_every_message(
    pipeline: Pipeline, faulty: str
) -> None:
    pipeline.circuits.select_initial(CHAIN_ID, "", "k10")
    sent: list[str] = []
    pipeline.set_replies(respond_by_circuit(pipeline, "k11", sent))
    pipeline.nodes.replies[faulty] = refuse_with("invalid message field: enc_share", 8)
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        await wait_until(lambda: len(pipeline.nodes.posts) == 1)
        for _ in range(REPROVE_BLOCKS):
            if "k11" not in sent:
                await pipeline.next_block()
                await pipeline.settle_dispatcher()
                await wait_until(lambda: not pipeline.dispatcher._tasks)
    assert sent == ["k10", "k11"]
    assert pipeline.read_share(1, "state, attempts") == (ShareState.SENT, 0)
    assert pipeline.read_send_state()[-1] == "ACCEPTED"


@pytest.mark.parametrize("liar", [FIRST_NODE, SECOND_NODE])
async def test_share_is_proven_with_each_circuit_in_turn_while_nodes_dispute_them(
    pipeline: Pipeline, liar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    circuits, honest = pipeline.circuits, list[str]()
    circuits.select_initial(CHAIN_ID, "", None)
    circuits.refusers["k10"] = {liar}
    circuits.record_accepted("k11", liar)
    pipeline.set_replies(respond_by_circuit(pipeline, "k10", honest))
    pipeline.nodes.replies[liar] = respond_by_circuit(pipeline, "k11", [])
    record_refused = circuits.record_refused

    def accept_again(*arguments: Any, **named: Any) -> None:
        record_refused(*arguments, **named)
        circuits.record_accepted("k11", liar)  # the proof of another share

    monkeypatch.setattr(circuits, "record_refused", accept_again)
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        for _ in range(2 * REPROVE_BLOCKS):
            await pipeline.next_block()
            await pipeline.settle_dispatcher()
            await wait_until(lambda: not pipeline.dispatcher._tasks)
    assert {"k11", "k10"} == set(honest)
    assert pipeline.read_share(1, "attempts") == (0,)


async def test_circuit_trial_sends_one_reveal_per_node_and_others_wait(pipeline: Pipeline) -> None:
    pipeline.circuits.select_initial(CHAIN_ID, "", None)
    sent: list[str] = []
    pipeline.set_replies(respond_by_circuit(pipeline, "k11", sent))
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(*range(1, 9))
        await wait_until(lambda: sent.count("k11") == 6)
        await pipeline.next_block()  # the refused ones were already sent at this height
        await wait_until(lambda: sent.count("k11") == 8)
    assert sent == ["k10"] * 2 + ["k11"] * 8
    assert pipeline.prover.circuits.count("k10") == 2, "nothing is proven during the pause"
    assert set(pipeline.query_rows("SELECT attempts FROM shares")) == {(0,)}
    assert (pipeline.circuits.current, pipeline.circuits.is_current_unproven) == ("k11", False)


async def test_circuit_trial_without_response_uses_next_share(pipeline: Pipeline) -> None:
    pipeline.circuits.select_initial(CHAIN_ID, "", None)
    heights: list[int] = []

    async def fail_first_send(body: dict[str, Any]) -> httpx.Response:
        heights.append(1)
        return await (reply_with(502, error="no consensus engine") if len(heights) == 1 else ACCEPTED_REPLY)(body)

    pipeline.set_replies(fail_first_send)
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1, 2, 3)
        await wait_until(lambda: len(heights) == 3)
    assert pipeline.circuits.current == "k10"
    assert not pipeline.circuits.is_current_unproven


async def test_prepared_reveals_of_a_refused_circuit_are_not_sent(pipeline: Pipeline) -> None:
    pipeline.circuits.select_initial(CHAIN_ID, "", None)
    sent: list[str] = []
    pipeline.set_replies(respond_by_circuit(pipeline, "k11", sent))
    prepared = [await pipeline.prepare_message(position) for position in (1, 2, 3, 4)]
    await asyncio.gather(*(pipeline.sender.send(share_id) for share_id in prepared))
    assert sent == ["k10"] * 2
    await pipeline.next_block()
    assert sent == ["k10"] * 2
    assert pipeline.query_rows("SELECT DISTINCT state, attempts FROM shares") == [(ShareState.WAITING, 0)]


# ---------------------------------------------------------------- slow nodes and internal errors


async def test_hanging_node_delays_only_sends_in_flight(pipeline: Pipeline) -> None:
    release = asyncio.Event()
    under_way = most = 0

    async def tarpit(body: dict[str, Any]) -> httpx.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await release.wait()
        under_way -= 1
        return await ACCEPTED_REPLY(body)

    pipeline.set_replies(tarpit)
    number = 3 * CONCURRENT_RESENDS
    await pipeline.enqueue(*range(number))
    for queued in await pipeline.store.run(
        claim_due, now=pipeline.clock.now(), limit=number, rounds=[create_share(1).round_id]
    ):
        assert await pipeline.revealer.prove(queued)
    task = asyncio.create_task(pipeline.sender.reconcile())
    await wait_until(lambda: under_way == CONCURRENT_RESENDS)
    release.set()
    await task
    assert (most, len(pipeline.nodes.posts)) == (CONCURRENT_RESENDS, number)


async def test_error_with_one_unconfirmed_reveal_does_not_stop_others(pipeline: Pipeline) -> None:
    pipeline.set_replies(raise_bug)
    await pipeline.prepare_message(1)
    with capture_logs() as logs:
        await pipeline.sender.reconcile()
    assert [entry["event"] for entry in logs] == ["follow_up_failed"]
    pipeline.set_replies(ACCEPTED_REPLY)
    await pipeline.prepare_message(2)
    pipeline.store.failing_calls.add("record_outcome")
    await pipeline.next_block()
    pipeline.store.failing_calls.clear()
    assert len(pipeline.nodes.posts) == 3
    await pipeline.next_block()
    assert [row[0] for row in pipeline.query_rows("SELECT last_outcome FROM reveals")] == ["ACCEPTED"] * 2


async def test_failing_sends_do_not_occupy_slots_of_others(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "MAX_FOLLOW_UPS", 2)
    broken = [await pipeline.prepare_message(position) for position in (1, 2)]
    original = messages.mark_sending

    def mark_sending(tx: Transaction, share_id: int, **details: Any) -> bool:
        if share_id in broken:
            raise RuntimeError("a bug")
        return original(tx, share_id, **details)

    monkeypatch.setattr(messages, "mark_sending", mark_sending)
    await pipeline.prepare_message(3)
    with capture_logs() as logs:
        await pipeline.next_block()
        assert (len(logs), pipeline.nodes.posts) == (2, [])
        await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 1
    broken.clear()
    await pipeline.next_block()
    await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 3


async def test_cancelled_send_is_resent_after_restart(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path / "queue.db") as pipeline:
        held = asyncio.Event()

        async def hold_forever(body: dict[str, Any]) -> httpx.Response:
            await held.wait()
            return await ACCEPTED_REPLY(body)

        pipeline.nodes.replies[FIRST_NODE] = hold_forever
        async with pipeline.run_dispatcher():
            await pipeline.enqueue(1)
            await wait_for_length(pipeline.nodes.posts, 1)
    async with open_pipeline(tmp_path / "queue.db") as pipeline:
        assert await pipeline.store.run_batches(recover) == 0
        await pipeline.sender.reconcile()
        assert pipeline.nodes.posts == [], "the node may have accepted it at this height"
        await pipeline.next_block()
        assert pipeline.nodes.posted_to == [SECOND_NODE]
        assert pipeline.read_send_state()[0] == 2


# ---------------------------------------------------------------- sends without a response


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


async def send_to_stopped_node(pipeline: Pipeline, reply: NodeReply = ACCEPTED_REPLY) -> StoppedNode:
    """Send a share to the first node, until the sender no longer waits for its response."""
    node = pipeline.nodes.replies[FIRST_NODE] = StoppedNode(reply)
    await wait_for_end(pipeline, pipeline.sender.send(await pipeline.prepare_message()))
    return node


async def show_next_block(pipeline: Pipeline) -> None:
    """Process a block while a call to a node gets no response."""
    pipeline.show_block(after=5)
    await wait_for_end(pipeline, pipeline.sender.reconcile())


@pytest.mark.rule("R11")
async def test_send_without_response_goes_to_other_node_at_next_height(pipeline: Pipeline) -> None:
    node = pipeline.nodes.replies[FIRST_NODE] = StoppedNode()
    pipeline.nodes.replies[SECOND_NODE] = refuse_with("mempool is full")
    share = await pipeline.prepare_message()
    await wait_for_end(pipeline, pipeline.sender.send(share))
    assert pipeline.read_send_state()[-2:] == (FIRST_NODE, "AMBIGUOUS"), "the outcome is unknown"
    await pipeline.sender.send(share)
    await pipeline.sender.reconcile()
    assert pipeline.nodes.posted_to == [FIRST_NODE], "not again at the same height"
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    assert pipeline.nodes.posts[0][1] == pipeline.nodes.posts[1][1], "the same bytes"
    assert pipeline.read_send_state()[1:] == (101, 102, SECOND_NODE, "UNAVAILABLE")
    node.continues.set()
    await wait_until(lambda: pipeline.stats.counts["answer_accepted"] == 1)
    await asyncio.sleep(0.01)
    assert pipeline.read_send_state()[-1] == "UNAVAILABLE", "a later send has replaced this one"
    assert pipeline.read_share(1, "state, attempts") == (ShareState.SENT, 0)


async def test_block_produced_during_the_wait_permits_the_next_send(pipeline: Pipeline) -> None:
    pipeline.nodes.replies[FIRST_NODE] = StoppedNode()
    notified: list[int] = []
    pipeline.sender.subscribe(lambda: notified.append(pipeline.height))
    task = asyncio.create_task(pipeline.sender.send(await pipeline.prepare_message()))
    await wait_until(lambda: pipeline.nodes.posts)
    await asyncio.sleep(0)
    pipeline.show_block(after=1)
    await pipeline.sender.reconcile()
    assert pipeline.nodes.posted_to == [FIRST_NODE], "the node still has time to respond"
    pipeline.clock.advance(2)
    await task
    assert notified == [pipeline.height]
    await pipeline.sender.reconcile()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE], "no further block is needed"


async def test_late_acceptance_is_recorded(pipeline: Pipeline) -> None:
    pipeline.circuits.select_initial(CHAIN_ID, "", None)
    node = await send_to_stopped_node(pipeline)
    assert pipeline.circuits.is_current_unproven
    node.continues.set()
    await wait_until(lambda: pipeline.read_send_state()[-1] == "ACCEPTED")
    assert not pipeline.circuits.is_current_unproven
    await pipeline.next_block()
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE], "an accepted message has three blocks"


async def test_late_refusal_of_wrong_proof_spends_an_attempt(pipeline: Pipeline) -> None:
    pipeline.prover.is_valid = False
    node = await send_to_stopped_node(pipeline, BAD_PROOF_REPLY)
    assert pipeline.read_share(1, "attempts") == (0,)
    node.continues.set()
    await wait_until(lambda: pipeline.read_share(1, "attempts") == (1,))


async def test_node_without_response_gets_no_second_copy_for_a_time(pipeline: Pipeline) -> None:
    pipeline.set_replies(StoppedNode())
    await wait_for_end(pipeline, pipeline.sender.send(await pipeline.prepare_message()))
    await show_next_block(pipeline)
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    await pipeline.next_block()
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    pipeline.clock.advance(AVOIDANCE_SECONDS)
    await show_next_block(pipeline)
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE, FIRST_NODE]


async def test_node_without_connection_leaves_send_to_next_node_at_once(pipeline: Pipeline) -> None:
    pipeline.nodes.connecting.add(FIRST_NODE)
    task = asyncio.create_task(pipeline.sender.send(await pipeline.prepare_message()))
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
    other = pipeline.make_sender(lease=lease)
    await wait_for_end(pipeline, other.send(await pipeline.prepare_message()))
    lease.fence += 2  # another host held it in between
    node.continues.set()
    await wait_until(lambda: pipeline.stats.counts["answer_accepted"] == 1)
    await asyncio.sleep(0.01)
    assert pipeline.read_send_state()[-1] == "AMBIGUOUS"
    assert pipeline.circuits.is_current_unproven


async def test_nothing_is_sent_if_the_lease_ends_while_the_send_is_recorded(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fencing token stays the same until a lease is acquired again."""
    lease: Any = SimpleNamespace(is_held=True, fence=1)
    other = pipeline.make_sender(lease=lease)
    run = pipeline.store.run

    async def record_and_lose_lease(operation: Any, *arguments: Any, **options: Any) -> Any:
        result = await run(operation, *arguments, **options)
        lease.is_held = operation is not messages.mark_sending
        return result

    share_id = await pipeline.prepare_message()
    monkeypatch.setattr(pipeline.store, "run", record_and_lose_lease)
    await other.send(share_id)
    assert (lease.is_held, pipeline.nodes.posts) == (False, [])


async def test_error_in_late_response_is_logged(pipeline: Pipeline) -> None:
    node = await send_to_stopped_node(pipeline, raise_bug)
    with capture_logs() as logs:
        node.continues.set()
        await wait_until(lambda: logs)
    assert [entry["event"] for entry in logs] == ["late_response_failed"]
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]


async def test_stop_cancels_calls_without_response(pipeline: Pipeline) -> None:
    node = await send_to_stopped_node(pipeline)
    await pipeline.sender.stop()
    assert node.was_cancelled


async def test_cancelled_send_cancels_its_call(pipeline: Pipeline) -> None:
    node = pipeline.nodes.replies[FIRST_NODE] = StoppedNode()
    task = asyncio.create_task(pipeline.sender.send(await pipeline.prepare_message()))
    await wait_until(lambda: pipeline.nodes.posts)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await wait_until(lambda: node.was_cancelled)


# ---------------------------------------------------------------- nodes that ask to wait


async def warming_reply(body: dict[str, Any]) -> httpx.Response:
    return httpx.Response(503, json={"status": "warming"}, headers={"retry-after": "7"})


async def busy_reply(body: dict[str, Any]) -> httpx.Response:
    return httpx.Response(429, json={"error": "too many requests"}, headers={"retry-after": "60"})


@pytest.mark.rule("N16")
async def test_shares_are_not_sent_to_a_held_node_while_another_accepts(pipeline: Pipeline) -> None:
    pipeline.nodes.replies = {FIRST_NODE: warming_reply, SECOND_NODE: ACCEPTED_REPLY}
    shares = [await pipeline.prepare_message(position) for position in (1, 2, 3)]
    await pipeline.sender.send(shares[0])
    for share in shares[1:]:
        await pipeline.sender.send(share)
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE, SECOND_NODE]
    await pipeline.next_block()  # 5 s later
    assert pipeline.nodes.posted_to[3:] == [SECOND_NODE]
    pipeline.nodes.replies[FIRST_NODE] = ACCEPTED_REPLY
    pipeline.show_block(after=30)
    await pipeline.sender.send(await pipeline.prepare_message(4))
    assert pipeline.nodes.posted_to[4:] == [FIRST_NODE], "its hold has ended"


async def test_one_share_probes_each_held_node_and_the_others_follow_an_accepted_one(pipeline: Pipeline) -> None:
    events: list[int] = []
    pipeline.sender.subscribe(lambda: events.append(len(pipeline.nodes.posts)))
    pipeline.set_replies(busy_reply)
    shares = [await pipeline.prepare_message(position) for position in range(1, 9)]
    for share in shares[:2]:
        await pipeline.sender.send(share)
    assert pipeline.sender.seconds_to_probe == PROBE_SECONDS
    first = len(pipeline.nodes.posts)
    pipeline.show_block(after=PROBE_SECONDS / 2)
    await pipeline.sender.reconcile()
    assert len(pipeline.nodes.posts) == first
    pipeline.clock.advance(PROBE_SECONDS / 2)
    await pipeline.sender.reconcile()
    assert len(pipeline.nodes.posts) == first + 2, "one share for each node"
    pipeline.set_replies(ACCEPTED_REPLY)
    pipeline.show_block(after=PROBE_SECONDS)
    await pipeline.sender.reconcile()
    assert events
    await pipeline.sender.reconcile()
    assert pipeline.query_rows("SELECT count(*) FROM reveals WHERE last_outcome = 'ACCEPTED'") == [(8,)]
    # The other one is still held if the first has accepted before a share was due for it.
    assert any(not node.penalty.is_held(pipeline.clock.monotonic()) for node in pipeline.endpoints.nodes)


@pytest.mark.rule("N16")
@pytest.mark.parametrize("answer", [None, ChainUnavailable("no response")])
async def test_node_is_asked_once_after_its_hold_and_used_unless_it_is_not_ready(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, answer: ChainUnavailable | None
) -> None:
    asked: list[float] = []
    answers: list[str | ChainUnavailable | None] = ["warming"]

    async def unready_reason() -> str | None:
        asked.append(pipeline.clock.monotonic())
        await asyncio.sleep(0)
        if isinstance(answers[-1], ChainUnavailable):
            raise answers[-1]
        return answers[-1]

    monkeypatch.setattr(pipeline.endpoints.nodes[0].client, "unready_reason", unready_reason)
    pipeline.nodes.replies[FIRST_NODE] = warming_reply
    await pipeline.sender.send(await pipeline.prepare_message(1))
    pipeline.nodes.replies[FIRST_NODE] = ACCEPTED_REPLY
    pipeline.show_block(after=31)
    shares = [await pipeline.prepare_message(position) for position in (2, 3, 4)]
    await asyncio.gather(*(pipeline.sender.send(share) for share in shares))
    assert (len(asked), pipeline.nodes.posted_to[1:]) == (1, [SECOND_NODE] * 3)
    answers.append(answer)
    pipeline.show_block(after=30)
    for position in (5, 6):
        await pipeline.sender.send(await pipeline.prepare_message(position))
    assert (len(asked), pipeline.nodes.posted_to[4:]) == (2, [FIRST_NODE] * 2)


# ---------------------------------------------------------------- silent nodes and false heights


def show_heads(pipeline: Pipeline, first: int, second: int | None) -> None:
    """Make the nodes report new blocks of these heights, 5 s later; None is a node that does not respond."""
    pipeline.clock.advance(5)
    for node, height in zip(pipeline.endpoints.nodes, (first, second), strict=True):
        health = node.health
        if height is None or health.head is None:
            health.record_failed_probe("no response", has_responded=False, started_at=pipeline.clock.monotonic())
            continue
        pipeline.record_head(node, health.head)
        pipeline.record_head(node, BlockHead(CHAIN_ID, height, pipeline.clock.now()))
    pipeline.endpoints.apply_probes()


async def test_shares_sent_at_a_false_height_are_all_sent_again_in_turn(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "MAX_FOLLOW_UPS", 2)
    show_heads(pipeline, 160, None)
    for position in range(1, 6):
        await pipeline.sender.send(await pipeline.prepare_message(position))
    assert pipeline.nodes.posted_to == [FIRST_NODE] * 5
    for height in range(102, 110):
        show_heads(pipeline, height, height)
        await pipeline.sender.reconcile()
    resent = [body for node, body in pipeline.nodes.posts if node == SECOND_NODE]
    assert len(set(resent)) == 5
    assert len(pipeline.prover.started_proofs) == 5, "no new proofs"


@pytest.mark.parametrize(("is_busy", "expected"), [(False, "112112"), (True, "112111")])
async def test_node_that_is_the_first_to_report_each_block_does_not_get_every_send(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, is_busy: bool, expected: str
) -> None:
    monkeypatch.setattr(NodePool, "nodes_with_head_since", lambda *_: {FIRST_NODE})
    pipeline.set_replies(reply_with(502, error="lost"))
    if is_busy:
        pipeline.nodes.replies[SECOND_NODE] = busy_reply  # for longer than this test
    await pipeline.sender.send(await pipeline.prepare_message())
    for _ in range(5):
        await pipeline.next_block()
    assert "".join("1" if node == FIRST_NODE else "2" for node in pipeline.nodes.posted_to) == expected


@pytest.mark.parametrize("reply", [ACCEPTED_REPLY, refuse_with("invalid anchor height")], ids=["dropped", "refused"])
async def test_share_is_proven_anew_while_one_of_two_nodes_is_silent(pipeline: Pipeline, reply: NodeReply) -> None:
    pipeline.set_replies(reply)
    await pipeline.sender.send(await pipeline.prepare_message())
    height = pipeline.height
    while pipeline.read_share(1) == (ShareState.SENT,) and height < 120:
        height += 1
        show_heads(pipeline, height, None)
        await pipeline.sender.reconcile()
    assert pipeline.read_share(1) == (ShareState.WAITING,)
    assert 12 <= height - 101 <= 14, "60 s, and until the next decision"
    assert len({body for _, body in pipeline.nodes.posts}) == 1


async def test_counted_shares_delay_no_others_while_one_of_two_nodes_is_silent(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "MAX_FOLLOW_UPS", 2)
    show_heads(pipeline, 102, None)
    pipeline.set_replies(ALREADY_SPENT)
    for position in range(1, 9):
        await pipeline.sender.send(await pipeline.prepare_message(position))
    posts = len(pipeline.nodes.posts)
    for height in range(103, 112):
        show_heads(pipeline, height, None)
        await pipeline.sender.reconcile()
    assert len(pipeline.nodes.posts) == posts, "its word stops resends"
    pipeline.set_replies(reply_with(502, error="lost"))
    await pipeline.sender.send(await pipeline.prepare_message(9))
    show_heads(pipeline, 112, None)
    await pipeline.sender.reconcile()
    assert pipeline.nodes.posts[posts][1] in {body for _, body in pipeline.nodes.posts[posts + 1 :]}, "it goes first"
