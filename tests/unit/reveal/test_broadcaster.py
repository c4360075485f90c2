"""From a stored message to a confirmed reveal: send times, nodes, and the effect of each response."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from helper.chain.models import BlockHead
from helper.chain.node_pool import create_nodes
from helper.chain.reveal_transaction import RevealMessage
from helper.core.share import ShareState
from helper.reveal.circuit_selector import CircuitSelector
from helper.reveal.send_policy import REPROVE_BLOCKS
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
    wait_until,
)
from tests.support.queue_pipeline import Pipeline, open_pipeline

ANCHOR_UNKNOWN = refuse_with("invalid zero-knowledge proof: no commitment tree root at height 90")
ALREADY_SPENT = refuse_with("nullifier already spent: …")


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[Pipeline]:
    async with open_pipeline(tmp_path / "queue.db") as opened:
        yield opened


async def test_prepared_message_is_on_disk_before_first_byte_is_sent(pipeline: Pipeline) -> None:
    states: list[tuple[Any, ...]] = []

    async def check_stored(body: dict[str, Any]) -> httpx.Response:
        states.append(
            (
                pipeline.read_share(1),
                pipeline.read_send_state(),
                pipeline.query_rows("SELECT message FROM reveals")[0][0],
            )
        )
        return await ACCEPTED_REPLY(body)

    pipeline.nodes.replies[FIRST_NODE] = check_stored
    await pipeline.broadcaster.send(await pipeline.prepare_message())
    ((state, sending, message),) = states
    assert state == (ShareState.BROADCAST,)
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


async def test_broadcaster_sends_at_most_once_per_height(pipeline: Pipeline) -> None:
    share = await pipeline.prepare_message()
    await asyncio.gather(
        *(pipeline.broadcaster.send(share) for _ in range(5)), pipeline.broadcaster.reconcile(pipeline.height)
    )
    await pipeline.broadcaster.send(share)
    await pipeline.broadcaster.reconcile(pipeline.height)
    assert len(pipeline.nodes.posts) == 1
    pipeline.height -= 5  # the node with the newest block is unreachable: no reason to resend
    pipeline.show_block()
    await pipeline.broadcaster.reconcile(pipeline.height)
    assert len(pipeline.nodes.posts) == 1


async def test_block_existing_at_last_send_causes_no_resend(pipeline: Pipeline) -> None:
    share = await pipeline.prepare_message()
    pipeline.set_replies(reply_with(502, error="lost"))
    pipeline.clock.advance(1)
    await pipeline.broadcaster.send(share)
    pipeline.clock.advance(1)
    pipeline.height += 1
    for endpoint in pipeline.endpoints.nodes:  # the first probe since the send: the block may be older than the send
        head = BlockHead(CHAIN_ID, pipeline.height, pipeline.clock.now())
        endpoint.health.record_probe(
            head, is_syncing=False, started_at=pipeline.clock.monotonic(), ended_at=pipeline.clock.monotonic()
        )
    await pipeline.broadcaster.reconcile(pipeline.height)
    assert len(pipeline.nodes.posts) == 1
    await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 2


async def test_block_reported_late_by_node_causes_no_resend(pipeline: Pipeline) -> None:
    share = await pipeline.prepare_message()
    pipeline.set_replies(reply_with(502, error="lost"))
    pipeline.show_block()
    old, newer = pipeline.clock.now(), pipeline.clock.now() + 1
    pipeline.clock.advance(2)
    await pipeline.broadcaster.send(share)
    # A probe after the send reported the old block, too.
    for height, time in ((pipeline.height, old), (pipeline.height + 1, newer)):
        pipeline.clock.advance(1)
        for endpoint in pipeline.endpoints.nodes:
            head = BlockHead(CHAIN_ID, height, time)
            endpoint.health.record_probe(
                head, is_syncing=False, started_at=pipeline.clock.monotonic(), ended_at=pipeline.clock.monotonic()
            )
    pipeline.height += 1
    await pipeline.broadcaster.reconcile(pipeline.height)
    assert len(pipeline.nodes.posts) == 1
    await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 2


async def test_broadcaster_logs_same_response_once_for_many_shares(pipeline: Pipeline) -> None:
    shares = [await pipeline.prepare_message(number) for number in range(1, 21)]
    pipeline.set_replies(ANCHOR_UNKNOWN)
    with capture_logs() as logs:
        for share in shares:
            await pipeline.broadcaster.send(share)
        pipeline.set_replies(ALREADY_SPENT)
        await pipeline.next_block()
    delays = [(log.get("endpoint"), log["outcome"]) for log in logs if log["event"] == "reveal_not_accepted"]
    assert len(pipeline.nodes.posts) == 40
    assert len(delays) == len(set(delays))
    assert {outcome for _, outcome in delays} == {"BEHIND", "SPENT"}


async def test_refused_connection_tries_next_node_immediately(pipeline: Pipeline) -> None:
    pipeline.nodes.replies[FIRST_NODE] = fail_with(httpx.ConnectError)
    await pipeline.broadcaster.send(await pipeline.prepare_message())
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
    await pipeline.broadcaster.send(await pipeline.prepare_message())
    assert pipeline.nodes.posted_to == [FIRST_NODE], (
        "not to another node at the same height: the first may have accepted it"
    )
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    assert pipeline.nodes.posts[0][1] == pipeline.nodes.posts[1][1]
    assert pipeline.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0)


async def test_node_with_invalid_response_is_not_first_for_next_share(pipeline: Pipeline) -> None:
    pipeline.nodes.replies[FIRST_NODE] = fail_with(httpx.ReadTimeout)
    await pipeline.broadcaster.send(await pipeline.prepare_message(1))
    await pipeline.broadcaster.send(await pipeline.prepare_message(2))
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    pipeline.clock.advance(31)
    pipeline.show_block()
    await pipeline.broadcaster.send(await pipeline.prepare_message(3))
    assert pipeline.nodes.posted_to[-1] == FIRST_NODE, "the node is tried again"


async def test_without_fresh_node_nothing_is_sent_or_spent(pipeline: Pipeline) -> None:
    share = await pipeline.prepare_message()
    pipeline.clock.advance(200)
    await pipeline.broadcaster.send(share)
    assert pipeline.nodes.posts == []
    assert pipeline.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0)
    await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 1


@pytest.mark.rule("N18")
async def test_accepted_but_unconfirmed_message_goes_to_other_node_after_3_blocks(pipeline: Pipeline) -> None:
    await pipeline.broadcaster.send(await pipeline.prepare_message())
    for _ in range(2):
        await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE]
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]


@pytest.mark.rule("R8", "N18")
@pytest.mark.parametrize(
    "response", [ACCEPTED_REPLY, refuse_with("an unknown message"), refuse_with("invalid anchor height")]
)
async def test_unconfirmed_after_10_blocks_gets_new_proof_without_attempt(
    pipeline: Pipeline, response: NodeReply
) -> None:
    pipeline.set_replies(response)
    await pipeline.broadcaster.send(await pipeline.prepare_message())
    async with pipeline.run_dispatcher():
        for _ in range(9):
            await pipeline.next_block()
        assert len({body for _, body in pipeline.nodes.posts}) == 1, "the same bytes"
        assert len(pipeline.prover.started_proofs) == 1, "at most one proof in ten blocks"
        await pipeline.next_block()
        await wait_until(lambda: len({body for _, body in pipeline.nodes.posts}) == 2)
        assert len(pipeline.prover.started_proofs) == 2
        assert pipeline.read_share(1, "attempts") == (0,)


@pytest.mark.rule("R12")
async def test_already_spent_response_does_not_confirm(pipeline: Pipeline) -> None:
    pipeline.set_replies(ALREADY_SPENT)
    await pipeline.broadcaster.send(await pipeline.prepare_message())
    assert pipeline.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0)
    for _ in range(25):
        await pipeline.next_block()
    assert pipeline.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0)
    assert len(pipeline.prover.started_proofs) == 1, "another proof would not change the result"
    sent = len(pipeline.nodes.posts)
    assert await pipeline.count_on_chain(1)
    assert pipeline.read_share(1) is None
    for _ in range(12):
        await pipeline.next_block()
    assert len(pipeline.nodes.posts) == sent, "never retried"
    assert (await pipeline.store.count_shares())[create_share(1).round_id] == {ShareState.SUBMITTED: 1}


@pytest.mark.rule("R12")
async def test_share_confirmed_before_its_send_is_not_sent(pipeline: Pipeline) -> None:
    share_id = await pipeline.prepare_message(1)
    await pipeline.count_on_chain(1)
    await pipeline.broadcaster.send(share_id)
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
    await pipeline.broadcaster.send(share)
    await pipeline.broadcaster.send(share)
    assert (pipeline.read_share(1), len(pipeline.nodes.posts)) == (None, 1)


@pytest.mark.rule("R11")
async def test_proof_failing_own_verification_spends_attempt(pipeline: Pipeline) -> None:
    pipeline.nodes.replies[FIRST_NODE] = BAD_PROOF_REPLY
    pipeline.prover.is_valid = False
    await pipeline.broadcaster.send(await pipeline.prepare_message())
    assert pipeline.read_share(1, "state, attempts, due_ms") == (ShareState.RECEIVED, 1, (START_TIME + 2) * 1000)
    assert pipeline.prover.verified == [("k10", ANCHOR.root)], "against the chain's own root at its anchor"
    assert pipeline.circuits.current == "k10"


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
        key = CircuitSelector.storage_key("svote-test")
        await wait_until(lambda: pipeline.query_rows("SELECT value FROM meta WHERE key = ?", key) == [("k11",)])
    assert pipeline.prover.circuits == ["k10", "k11"]
    assert pipeline.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0)
    assert pipeline.read_send_state()[-1] == "ACCEPTED"


async def test_share_sent_before_restart_waits_for_new_block(pipeline: Pipeline) -> None:
    share = await pipeline.prepare_message()
    await pipeline.broadcaster.send(share)
    await pipeline.store.requeue(share, stage="broadcast", note="the chain refuses k10 proofs")
    pipeline.clock.advance(0.1)
    after_restart = pipeline.make_broadcaster()
    assert await pipeline.revealer.prove(await pipeline.claim_due_share())
    await after_restart.send(share)
    assert len(pipeline.nodes.posts) == 1
    pipeline.clock.advance(5)
    pipeline.show_block()
    await after_restart.send(share)
    assert len(pipeline.nodes.posts) == 2


async def test_reveal_counted_in_an_unread_block_is_not_proven_again(pipeline: Pipeline) -> None:
    pipeline.set_replies(ACCEPTED_REPLY)
    await pipeline.broadcaster.send(await pipeline.prepare_message())
    result = {"hash": "", "height": "101", "code": 0, "log": "", "events": []}
    pipeline.nodes.transactions = {SECOND_NODE: result}
    for _ in range(3 * REPROVE_BLOCKS):
        await pipeline.next_block()
    assert pipeline.read_share(1, "state") == (ShareState.BROADCAST,)
    pipeline.nodes.transactions = {}
    await pipeline.next_block()
    await pipeline.next_block()
    await pipeline.next_block()
    assert pipeline.read_share(1, "state") == (ShareState.RECEIVED,)


async def test_node_without_verdict_does_not_prevent_circuit_switch(pipeline: Pipeline) -> None:
    pipeline.nodes.replies = {FIRST_NODE: BAD_PROOF_REPLY, SECOND_NODE: reply_with(429, error="too many requests")}
    pipeline.circuits.select_initial("svote-test", "", None)
    await pipeline.broadcaster.send(await pipeline.prepare_message())
    for _ in range(REPROVE_BLOCKS):
        await pipeline.next_block()
    assert pipeline.circuits.current == "k11"
    assert pipeline.read_share(1, "state, attempts") == (ShareState.RECEIVED, 0)


async def test_circuit_refused_for_confirmed_share_is_switched_although_last_node_is_busy(pipeline: Pipeline) -> None:
    pipeline.nodes.replies = {FIRST_NODE: BAD_PROOF_REPLY, SECOND_NODE: refuse_with("mempool is full")}
    pipeline.circuits.select_initial("svote-test", "", None)
    first = await pipeline.prepare_message(1)
    await pipeline.broadcaster.send(first)
    await pipeline.count_on_chain(1)  # another helper revealed it
    pipeline.broadcaster.forget_confirmed(first)
    await pipeline.broadcaster.send(await pipeline.prepare_message(2))
    for _ in range(REPROVE_BLOCKS):
        await pipeline.next_block()
    assert {node for node, _ in pipeline.nodes.posts[1:]} == {SECOND_NODE}, "the other node has refused the circuit"
    assert pipeline.circuits.current == "k11"
    assert pipeline.read_share(2, "state, attempts") == (ShareState.RECEIVED, 0)


async def test_nodes_dropping_reveals_do_not_keep_them_from_third_node(pipeline: Pipeline) -> None:
    pipeline.endpoints.nodes += create_nodes(["http://third"], transport=pipeline.nodes)
    pipeline.nodes.replies["third:80"] = ACCEPTED_REPLY
    pipeline.show_block()
    await pipeline.broadcaster.send(await pipeline.prepare_message())
    for _ in range(7):
        await pipeline.next_block()
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
            assert pipeline.read_share(1, "state, attempts") == (ShareState.RECEIVED, 0)
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
        await pipeline.broadcaster.send(share)
        assert pipeline.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0), (
            "a statement of a single node proves nothing"
        )
        await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    assert pipeline.read_share(1, "state, attempts, length(primary_blind)") == (ShareState.FAILED, 0, 32)
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["share_failed"]
    assert pipeline.stats.counts["failed"] == 1
    assert pipeline.stats.summary(0)["recent_failures"] == [
        {"stage": "broadcast", "reason": "invalid message field: proposal"}
    ]


@pytest.mark.parametrize(
    "refusal", [refuse_with("invalid message field: proposal", 9), BAD_PROOF_REPLY], ids=["fields", "proof"]
)
async def test_node_refusing_all_loses_nothing_while_another_is_healthy(pipeline: Pipeline, refusal: NodeReply) -> None:
    pipeline.nodes.replies[FIRST_NODE] = refusal
    share = await pipeline.prepare_message()
    await pipeline.broadcaster.send(share)
    await pipeline.next_block()
    assert pipeline.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    assert pipeline.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0)
    assert pipeline.read_send_state()[-1] == "ACCEPTED"
    assert (pipeline.circuits.current, pipeline.circuits.pause_reason) == ("k10", None)


async def test_permanent_refusal_by_only_node_spends_one_attempt(pipeline: Pipeline) -> None:
    pipeline.nodes.replies[FIRST_NODE] = refuse_with("invalid message field: proposal", 9)
    pipeline.endpoints.start_backoff(pipeline.endpoints.nodes[1], "away")
    share = await pipeline.prepare_message()
    await pipeline.broadcaster.send(share)
    assert pipeline.read_share(1, "state, attempts") == (ShareState.RECEIVED, 1)


@pytest.mark.rule("R4")
async def test_clock_set_back_before_due_time_sends_nothing(pipeline: Pipeline) -> None:
    share = await pipeline.prepare_message()
    pipeline.clock.set_wall_clock(-60)
    pipeline.show_block()
    await pipeline.broadcaster.send(share)
    await pipeline.next_block()
    assert pipeline.nodes.posts == []
    pipeline.clock.advance(55)
    await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 1


@pytest.mark.rule("R4")
async def test_corrected_clock_prevents_early_resend(pipeline: Pipeline) -> None:
    share = await pipeline.prepare_message()
    pipeline.set_replies(reply_with(502, error="lost"))
    await pipeline.broadcaster.send(share)
    assert len(pipeline.nodes.posts) == 1
    pipeline.clock.set_wall_clock(-60)
    for _ in range(3):
        await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 1
    pipeline.clock.advance(60)
    await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 2


async def test_takeover_waits_for_block_after_other_hosts_send(pipeline: Pipeline) -> None:
    share_id = await pipeline.prepare_message()
    await pipeline.broadcaster.send(share_id)
    await pipeline.next_block()
    assert await pipeline.store.mark_sending(share_id, height=pipeline.height, endpoint=SECOND_NODE)  # by another host
    pipeline.clock.advance(5)
    pipeline.show_block()
    pipeline.clock.advance(1)
    pipeline.broadcaster.start_term()
    await pipeline.broadcaster.reconcile(pipeline.height)
    assert len(pipeline.nodes.posts) == 1
    await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 2


def respond_by_circuit(pipeline: Pipeline, circuit: str, responses: list[str]) -> NodeReply:
    """A node of a chain that accepts this circuit; appends the circuit of each proof to `responses`."""

    async def respond(body: dict[str, Any]) -> httpx.Response:
        share_id = pipeline.query_rows("SELECT id FROM shares WHERE nullifier = ?", b64decode(body["share_nullifier"]))[
            0
        ][0]
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
    assert pipeline.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0)
    assert pipeline.read_send_state()[-1] == "ACCEPTED"


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
    assert await pipeline.store.get_meta(CircuitSelector.storage_key(CHAIN_ID)) == "k11"


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
    await asyncio.gather(*(pipeline.broadcaster.send(share_id) for share_id in prepared))
    assert sent == ["k10"] * 2
    assert pipeline.query_rows("SELECT DISTINCT state, attempts FROM shares") == [(ShareState.RECEIVED, 0)]


async def test_sent_reveal_of_a_refused_circuit_is_sent_again_until_it_is_refused(pipeline: Pipeline) -> None:
    pipeline.circuits.select_initial(CHAIN_ID, "", None)
    pipeline.set_replies(ANCHOR_UNKNOWN)
    await pipeline.broadcaster.send(await pipeline.prepare_message())
    pipeline.circuits.record_refused(99, "k10")
    pipeline.set_replies(BAD_PROOF_REPLY)
    for _ in range(3):
        await pipeline.next_block()
    assert pipeline.read_share(1, "state, attempts") == (ShareState.RECEIVED, 0)
