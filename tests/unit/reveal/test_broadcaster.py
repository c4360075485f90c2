"""From a stored message to a counted reveal: send times, nodes, and the effect of each response."""

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
from helper.reveal.resend_policy import REPROVE_BLOCKS
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
async def line(tmp_path: Path) -> AsyncIterator[Pipeline]:
    async with open_pipeline(tmp_path / "queue.db") as opened:
        yield opened


async def test_prepared_message_is_on_disk_before_first_byte_is_sent(line: Pipeline) -> None:
    seen: list[tuple[Any, ...]] = []

    async def check_stored(body: dict[str, Any]) -> httpx.Response:
        seen.append((line.read_share(1), line.read_send_state(), line.query_rows("SELECT message FROM reveals")[0][0]))
        return await ACCEPTED_REPLY(body)

    line.nodes.replies[FIRST_NODE] = check_stored
    await line.broadcaster.send(await line.prepare_message())
    ((state, sending, message),) = seen
    assert state == (ShareState.BROADCAST,)
    assert sending == (1, line.height, line.height, FIRST_NODE, None)
    body = json.loads(line.nodes.posts[0][1])
    sent = RevealMessage.from_tx(message)
    assert {name: b64decode(body[name]) for name in ("proof", "share_nullifier", "enc_share")} == {
        "proof": sent.proof,
        "share_nullifier": sent.nullifier,
        "enc_share": create_share(1).c1 + create_share(1).c2,
    }
    assert body["vote_comm_tree_anchor_height"] == ANCHOR.height
    assert line.read_send_state()[-1] == "ACCEPTED"


async def test_broadcaster_sends_at_most_once_per_height(line: Pipeline) -> None:
    share = await line.prepare_message()
    await asyncio.gather(*(line.broadcaster.send(share) for _ in range(5)), line.broadcaster.reconcile(line.height))
    await line.broadcaster.send(share)
    await line.broadcaster.reconcile(line.height)
    assert len(line.nodes.posts) == 1
    line.height -= 5  # the node with the newest block is unreachable: no reason to resend
    line.show_block()
    await line.broadcaster.send(share)
    assert len(line.nodes.posts) == 1


async def test_block_existing_at_last_send_causes_no_resend(line: Pipeline) -> None:
    share = await line.prepare_message()
    line.set_replies(reply_with(502, error="lost"))
    line.clock.advance(1)
    await line.broadcaster.send(share)
    line.clock.advance(1)
    line.height += 1
    for endpoint in line.endpoints.nodes:  # the first probe since the send: the block may be older than the send
        head = BlockHead(CHAIN_ID, line.height, line.clock.now())
        endpoint.health.record_probe(head, is_syncing=False, now=line.clock.now(), started_at=line.clock.monotonic())
    await line.broadcaster.reconcile(line.height)
    assert len(line.nodes.posts) == 1
    await line.next_block()
    assert len(line.nodes.posts) == 2


async def test_block_shown_late_by_node_causes_no_resend(line: Pipeline) -> None:
    share = await line.prepare_message()
    line.set_replies(reply_with(502, error="lost"))
    line.show_block()
    old, newer = line.clock.now(), line.clock.now() + 1
    line.clock.advance(2)
    await line.broadcaster.send(share)
    # A probe after the send showed the old block, too.
    for height, time in ((line.height, old), (line.height + 1, newer)):
        line.clock.advance(1)
        for endpoint in line.endpoints.nodes:
            head = BlockHead(CHAIN_ID, height, time)
            endpoint.health.record_probe(
                head, is_syncing=False, now=line.clock.now(), started_at=line.clock.monotonic()
            )
    line.height += 1
    await line.broadcaster.reconcile(line.height)
    assert len(line.nodes.posts) == 1
    await line.next_block()
    assert len(line.nodes.posts) == 2


async def test_broadcaster_logs_same_response_once_for_many_shares(line: Pipeline) -> None:
    shares = [await line.prepare_message(number) for number in range(1, 21)]
    line.set_replies(ANCHOR_UNKNOWN)
    with capture_logs() as logs:
        for share in shares:
            await line.broadcaster.send(share)
        line.set_replies(ALREADY_SPENT)
        await line.next_block()
    delays = [(log.get("endpoint"), log["outcome"]) for log in logs if log["event"] == "reveal_not_accepted"]
    assert len(line.nodes.posts) == 40
    assert len(delays) == len(set(delays))
    assert {outcome for _, outcome in delays} == {"BEHIND", "SPENT"}


async def test_refused_connection_tries_next_node_immediately(line: Pipeline) -> None:
    line.nodes.replies[FIRST_NODE] = fail_with(httpx.ConnectError)
    await line.broadcaster.send(await line.prepare_message())
    assert line.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    assert [endpoint.name for endpoint in line.endpoints.usable_nodes] == [SECOND_NODE], "it rests"
    assert line.stats.counts["broadcast"] == 1
    assert line.read_send_state()[-2:] == (SECOND_NODE, "ACCEPTED")


@pytest.mark.rule("R11")
@pytest.mark.parametrize(
    "answer",
    [
        reply_with(503, error="warming up"),
        reply_with(502, error="no engine"),
        fail_with(httpx.ReadError),
        ANCHOR_UNKNOWN,
    ],
    ids=["503", "502", "lost reply", "anchor unknown"],
)
async def test_outage_resends_same_bytes_to_other_node_at_next_block(line: Pipeline, answer: NodeReply) -> None:
    line.nodes.replies[FIRST_NODE] = answer
    await line.broadcaster.send(await line.prepare_message())
    assert line.nodes.posted_to == [FIRST_NODE], "not to another at the same height: it may have been taken"
    await line.next_block()
    assert line.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    assert line.nodes.posts[0][1] == line.nodes.posts[1][1]
    assert line.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0)


async def test_node_with_bad_response_is_not_first_for_next_share(line: Pipeline) -> None:
    line.nodes.replies[FIRST_NODE] = fail_with(httpx.ReadTimeout)
    await line.broadcaster.send(await line.prepare_message(1))
    await line.broadcaster.send(await line.prepare_message(2))
    assert line.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    line.clock.advance(31)
    line.show_block()
    await line.broadcaster.send(await line.prepare_message(3))
    assert line.nodes.posted_to[-1] == FIRST_NODE, "it gets another chance"


async def test_without_fresh_node_nothing_is_sent_or_spent(line: Pipeline) -> None:
    share = await line.prepare_message()
    line.clock.advance(200)
    await line.broadcaster.send(share)
    assert line.nodes.posts == []
    assert line.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0)
    await line.next_block()
    assert len(line.nodes.posts) == 1


async def test_accepted_but_unconfirmed_message_goes_to_other_node_after_3_blocks(line: Pipeline) -> None:
    await line.broadcaster.send(await line.prepare_message())
    for _ in range(2):
        await line.next_block()
    assert line.nodes.posted_to == [FIRST_NODE]
    await line.next_block()
    assert line.nodes.posted_to == [FIRST_NODE, SECOND_NODE]


@pytest.mark.rule("R8")
@pytest.mark.parametrize(
    "answer", [ACCEPTED_REPLY, refuse_with("nothing that we know"), refuse_with("invalid anchor height")]
)
async def test_unconfirmed_after_10_blocks_gets_new_proof_without_attempt(line: Pipeline, answer: NodeReply) -> None:
    line.set_replies(answer)
    await line.broadcaster.send(await line.prepare_message())
    async with line.run_dispatcher():
        for _ in range(9):
            await line.next_block()
        assert len({body for _, body in line.nodes.posts}) == 1, "the same bytes"
        assert len(line.prover.started_proofs) == 1, "not more than one proof in ten blocks"
        await line.next_block()
        await wait_until(lambda: len({body for _, body in line.nodes.posts}) == 2)
        assert len(line.prover.started_proofs) == 2
        assert line.read_share(1, "attempts") == (0,)


@pytest.mark.rule("R12")
async def test_already_spent_response_does_not_confirm(line: Pipeline) -> None:
    line.set_replies(ALREADY_SPENT)
    await line.broadcaster.send(await line.prepare_message())
    assert line.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0)
    for _ in range(25):
        await line.next_block()
    assert line.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0)
    assert len(line.prover.started_proofs) == 1, "another proof could not change it"
    sent = len(line.nodes.posts)
    assert await line.count_on_chain(1)
    assert line.read_share(1) is None
    for _ in range(12):
        await line.next_block()
    assert len(line.nodes.posts) == sent, "never retried"
    assert (await line.store.count_shares())[create_share(1).round_id] == {ShareState.SUBMITTED: 1}


@pytest.mark.rule("R12")
async def test_share_confirmed_during_send_is_done(line: Pipeline) -> None:
    async def count(body: dict[str, Any]) -> httpx.Response:
        await line.count_on_chain(1)
        return await BAD_PROOF_REPLY(body)

    line.nodes.replies[FIRST_NODE] = count
    line.prover.is_valid = False
    share = await line.prepare_message()
    await line.broadcaster.send(share)
    await line.broadcaster.send(share)
    assert (line.read_share(1), len(line.nodes.posts)) == (None, 1)


@pytest.mark.rule("R11")
async def test_proof_failing_own_verification_spends_attempt(line: Pipeline) -> None:
    line.nodes.replies[FIRST_NODE] = BAD_PROOF_REPLY
    line.prover.is_valid = False
    await line.broadcaster.send(await line.prepare_message())
    assert line.read_share(1, "state, attempts, due_ms") == (ShareState.RECEIVED, 1, (START_TIME + 2) * 1000)
    assert line.prover.verified == [("k10", ANCHOR.root)], "against the chain's own root at its anchor"
    assert line.circuits.current == "k10"


async def test_refused_valid_proof_is_retried_with_other_circuit(line: Pipeline) -> None:
    async def accept_k11(body: dict[str, Any]) -> httpx.Response:
        line.clock.advance(0.1)
        return await (ACCEPTED_REPLY if line.prover.circuits[-1] == "k11" else BAD_PROOF_REPLY)(body)

    line.set_replies(accept_k11)
    line.circuits.select_initial("svote-test", "", None)
    async with line.run_dispatcher():
        await line.enqueue(1)
        await wait_until(lambda: line.query_rows("SELECT last_outcome FROM reveals") == [("BAD_PROOF",)])
        await line.settle_dispatcher()
        assert line.circuits.current == "k10", "one node's word is not the chain's"
        await line.next_block()
        await wait_until(lambda: len(line.prover.started_proofs) == 2)
        await line.settle_dispatcher()
        assert len(line.nodes.posts) == 2, "one message of a share a height, whichever it is"
        await line.next_block()
        key = CircuitSelector.storage_key("svote-test")
        await wait_until(lambda: line.query_rows("SELECT value FROM meta WHERE key = ?", key) == [("k11",)])
    assert line.prover.circuits == ["k10", "k11"]
    assert line.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0)
    assert line.read_send_state()[-1] == "ACCEPTED"


async def test_share_sent_before_restart_waits_for_new_block(line: Pipeline) -> None:
    share = await line.prepare_message()
    await line.broadcaster.send(share)
    await line.store.requeue(share, stage="broadcast", note="the chain refuses k10 proofs")
    line.clock.advance(0.1)
    after_restart = line.make_broadcaster()
    assert await line.revealer.prove(await line.claim_due_share())
    await after_restart.send(share)
    assert len(line.nodes.posts) == 1
    line.clock.advance(5)
    line.show_block()
    await after_restart.send(share)
    assert len(line.nodes.posts) == 2


async def test_node_without_verdict_does_not_prevent_circuit_switch(line: Pipeline) -> None:
    line.nodes.replies = {FIRST_NODE: BAD_PROOF_REPLY, SECOND_NODE: reply_with(429, error="too many requests")}
    line.circuits.select_initial("svote-test", "", None)
    await line.broadcaster.send(await line.prepare_message())
    for _ in range(REPROVE_BLOCKS):
        await line.next_block()
    assert line.circuits.current == "k11"
    assert line.read_share(1, "state, attempts") == (ShareState.RECEIVED, 0)


async def test_nodes_dropping_reveals_do_not_keep_them_from_third_node(line: Pipeline) -> None:
    line.endpoints.nodes += create_nodes(["http://third"], transport=line.nodes)
    line.nodes.replies["third:80"] = ACCEPTED_REPLY
    line.show_block()
    await line.broadcaster.send(await line.prepare_message())
    for _ in range(7):
        await line.next_block()
    assert line.nodes.posted_to == [FIRST_NODE, SECOND_NODE, "third:80"]


async def test_refused_configured_circuit_pauses_queue_without_attempt(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path / "queue.db", circuit="k11") as line:
        line.set_replies(BAD_PROOF_REPLY)
        async with line.run_dispatcher():
            await line.enqueue(1)
            await wait_until(lambda: line.query_rows("SELECT last_outcome FROM reveals") == [("BAD_PROOF",)])
            await line.settle_dispatcher()
            assert line.circuits.pause_reason is None, "one node's word is not the chain's"
            await line.next_block()
            assert line.circuits.pause_reason is not None
            await line.enqueue(2)
            await line.settle_dispatcher()
            assert line.dispatcher.pause_reason is not None
            assert line.prover.positions == [1]
            assert line.read_share(1, "state, attempts") == (ShareState.RECEIVED, 0)
            assert await line.count_idle_turns() == 0


async def test_queue_paused_by_refusals_tries_one_share_per_block(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path / "queue.db", circuit="k11") as line:
        line.set_replies(BAD_PROOF_REPLY)
        async with line.run_dispatcher():
            await line.enqueue(1, 2, 3)
            await line.settle_dispatcher()
            while line.circuits.pause_reason is None:
                await line.next_block()
                await line.settle_dispatcher()
            refused = len(line.prover.positions)
            for _ in range(2):
                await line.next_block()
                await line.settle_dispatcher()
                assert len(line.prover.positions) <= refused + 2
            assert line.circuits.pause_reason is not None
            line.set_replies(ACCEPTED_REPLY)
            blocks = 0
            while (
                4 not in {state for _, state in line.share_states().items()} or line.circuits.pause_reason is not None
            ):
                await line.next_block()
                await line.settle_dispatcher()
                # The shares that the block permitted are proven and sent.
                await wait_until(lambda: not line.dispatcher._tasks)
                blocks += 1
                assert blocks <= 3, "the pause is not waited for"


@pytest.mark.rule("R15")
async def test_permanently_refused_message_fails_and_is_reported(line: Pipeline) -> None:
    line.set_replies(refuse_with("invalid message field: proposal", 9))
    share = await line.prepare_message()
    with capture_logs() as logs:
        await line.broadcaster.send(share)
        assert line.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0), "one node's word is not the chain's"
        await line.next_block()
    assert line.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    assert line.read_share(1, "state, attempts, length(primary_blind)") == (ShareState.FAILED, 0, 32)
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["share_failed"]
    assert line.stats.counts["failed"] == 1
    assert line.stats.summary(0)["recent_failures"] == [
        {"stage": "broadcast", "reason": "invalid message field: proposal"}
    ]


@pytest.mark.parametrize(
    "refusal", [refuse_with("invalid message field: proposal", 9), BAD_PROOF_REPLY], ids=["fields", "proof"]
)
async def test_node_refusing_all_loses_nothing_while_another_is_healthy(line: Pipeline, refusal: NodeReply) -> None:
    line.nodes.replies[FIRST_NODE] = refusal
    share = await line.prepare_message()
    await line.broadcaster.send(share)
    await line.next_block()
    assert line.nodes.posted_to == [FIRST_NODE, SECOND_NODE]
    assert line.read_share(1, "state, attempts") == (ShareState.BROADCAST, 0)
    assert line.read_send_state()[-1] == "ACCEPTED"
    assert (line.circuits.current, line.circuits.pause_reason) == ("k10", None)


async def test_permanent_refusal_by_only_node_spends_one_attempt(line: Pipeline) -> None:
    line.nodes.replies[FIRST_NODE] = refuse_with("invalid message field: proposal", 9)
    line.endpoints.start_backoff(line.endpoints.nodes[1], "away")
    share = await line.prepare_message()
    await line.broadcaster.send(share)
    assert line.read_share(1, "state, attempts") == (ShareState.RECEIVED, 1)


@pytest.mark.rule("R4")
async def test_clock_set_back_before_due_time_sends_nothing(line: Pipeline) -> None:
    share = await line.prepare_message()
    line.clock.set_wall_clock(-60)
    line.show_block()
    await line.broadcaster.send(share)
    await line.next_block()
    assert line.nodes.posts == []
    line.clock.advance(55)
    await line.next_block()
    assert len(line.nodes.posts) == 1


@pytest.mark.rule("R4")
async def test_corrected_clock_prevents_early_resend(line: Pipeline) -> None:
    share = await line.prepare_message()
    line.set_replies(reply_with(502, error="lost"))
    await line.broadcaster.send(share)
    assert len(line.nodes.posts) == 1
    line.clock.set_wall_clock(-60)
    for _ in range(3):
        await line.next_block()
    assert len(line.nodes.posts) == 1
    line.clock.advance(60)
    await line.next_block()
    assert len(line.nodes.posts) == 2


async def test_takeover_waits_for_block_after_other_hosts_send(line: Pipeline) -> None:
    share_id = await line.prepare_message()
    await line.broadcaster.send(share_id)
    await line.next_block()
    assert await line.store.mark_sending(share_id, height=line.height, endpoint=SECOND_NODE)  # by another host
    line.clock.advance(5)
    line.show_block()
    line.clock.advance(1)
    line.broadcaster.start_term()
    await line.broadcaster.reconcile(line.height)
    assert len(line.nodes.posts) == 1
    await line.next_block()
    assert len(line.nodes.posts) == 2


def answer_for_circuit(line: Pipeline, circuit: str, answers: list[str]) -> NodeReply:
    """A node of a chain that accepts this circuit; appends the circuit of each proof to `answers`."""

    async def judge(body: dict[str, Any]) -> httpx.Response:
        share_id = line.query_rows("SELECT id FROM shares WHERE nullifier = ?", b64decode(body["share_nullifier"]))[0][
            0
        ]
        (circuit_used,) = line.query_rows("SELECT circuit FROM reveals WHERE share_id = ?", share_id)[0]
        answers.append(circuit_used)
        return await (ACCEPTED_REPLY if circuit_used == circuit else BAD_PROOF_REPLY)(body)

    return judge


async def test_circuit_trial_sends_one_reveal_per_node_and_others_wait(line: Pipeline) -> None:
    line.circuits.select_initial(CHAIN_ID, "", None)
    sent: list[str] = []
    line.set_replies(answer_for_circuit(line, "k11", sent))
    async with line.run_dispatcher():
        await line.enqueue(*range(1, 9))
        await wait_until(lambda: sent.count("k11") == 6)
        await line.next_block()  # the refused ones were already sent at this height
        await wait_until(lambda: sent.count("k11") == 8)
    assert sent == ["k10"] * 2 + ["k11"] * 8
    assert line.prover.circuits.count("k10") == 2, "nothing is proven in vain meanwhile"
    assert set(line.query_rows("SELECT attempts FROM shares")) == {(0,)}
    assert await line.store.get_meta(CircuitSelector.storage_key(CHAIN_ID)) == "k11"


async def test_circuit_trial_without_response_uses_next_share(line: Pipeline) -> None:
    line.circuits.select_initial(CHAIN_ID, "", None)
    heights: list[int] = []

    async def once_away(body: dict[str, Any]) -> httpx.Response:
        heights.append(1)
        return await (reply_with(502, error="no consensus engine") if len(heights) == 1 else ACCEPTED_REPLY)(body)

    line.set_replies(once_away)
    async with line.run_dispatcher():
        await line.enqueue(1, 2, 3)
        await wait_until(lambda: len(heights) == 3)
    assert line.circuits.current == "k10"
    assert not line.circuits.is_current_unproven


async def test_prepared_reveals_of_a_refused_circuit_are_not_sent(line: Pipeline) -> None:
    line.circuits.select_initial(CHAIN_ID, "", None)
    sent: list[str] = []
    line.set_replies(answer_for_circuit(line, "k11", sent))
    prepared = [await line.prepare_message(position) for position in (1, 2, 3, 4)]
    await asyncio.gather(*(line.broadcaster.send(share_id) for share_id in prepared))
    assert sent == ["k10"] * 2
    assert line.query_rows("SELECT DISTINCT state, attempts FROM shares") == [(ShareState.RECEIVED, 0)]


async def test_sent_reveal_of_a_refused_circuit_is_sent_again_until_it_is_refused(line: Pipeline) -> None:
    line.circuits.select_initial(CHAIN_ID, "", None)
    line.set_replies(ANCHOR_UNKNOWN)
    await line.broadcaster.send(await line.prepare_message())
    line.circuits.record_refused(99, "k10")
    line.set_replies(BAD_PROOF_REPLY)
    for _ in range(3):
        await line.next_block()
    assert line.read_share(1, "state, attempts") == (ShareState.RECEIVED, 0)
