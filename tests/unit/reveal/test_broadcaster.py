"""From a message on disk to a counted reveal: when it is sent, to whom, and what each answer leads to."""

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
    ACCEPTS,
    ANCHOR,
    BAD_PROOF,
    CHAIN,
    FIRST,
    SECOND,
    START,
    Answer,
    breaks,
    make_share,
    refuses,
    says,
    until,
)
from tests.support.queue_pipeline import Line, open_line

BEHIND = refuses("invalid zero-knowledge proof: no commitment tree root at height 90")
SPENT = refuses("nullifier already spent: …")


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    async with open_line(tmp_path / "queue.db") as opened:
        yield opened


async def test_everything_is_on_disk_before_the_first_byte_leaves(line: Line) -> None:
    seen: list[tuple[Any, ...]] = []

    async def look(body: dict[str, Any]) -> httpx.Response:
        seen.append((line.row(1), line.sending(), line.rows("SELECT message FROM reveals")[0][0]))
        return await ACCEPTS(body)

    line.nodes.answers[FIRST] = look
    await line.broadcaster.send(await line.prepared())
    ((state, sending, message),) = seen
    assert state == (ShareState.BROADCAST,)
    assert sending == (1, line.height, line.height, FIRST, None)
    body = json.loads(line.nodes.posts[0][1])
    sent = RevealMessage.from_tx(message)
    assert {name: b64decode(body[name]) for name in ("proof", "share_nullifier", "enc_share")} == {
        "proof": sent.proof,
        "share_nullifier": sent.nullifier,
        "enc_share": make_share(1).c1 + make_share(1).c2,
    }
    assert body["vote_comm_tree_anchor_height"] == ANCHOR.height
    assert line.sending()[-1] == "ACCEPTED"


async def test_at_most_one_send_a_height_whoever_asks_for_it(line: Line) -> None:
    share = await line.prepared()
    await asyncio.gather(*(line.broadcaster.send(share) for _ in range(5)), line.broadcaster.reconcile(line.height))
    await line.broadcaster.send(share)
    await line.broadcaster.reconcile(line.height)
    assert len(line.nodes.posts) == 1
    line.height -= 5  # the node with the newest block is gone: no reason to send again
    line.block()
    await line.broadcaster.send(share)
    assert len(line.nodes.posts) == 1


async def test_a_block_that_may_have_been_there_at_the_last_send_is_no_reason_to_send_again(line: Line) -> None:
    share = await line.prepared()
    line.all_nodes(says(502, error="lost"))
    line.clock.advance(1)
    await line.broadcaster.send(share)
    line.clock.advance(1)
    line.height += 1
    for endpoint in line.endpoints.all:  # the first look since: the block may be from before the send
        head = BlockHead(CHAIN, line.height, line.clock.now())
        endpoint.health.saw(head, syncing=False, now=line.clock.now(), began=line.clock.monotonic())
    await line.broadcaster.reconcile(line.height)
    assert len(line.nodes.posts) == 1
    await line.next_block()
    assert len(line.nodes.posts) == 2


async def test_a_block_that_a_node_shows_late_is_no_reason_to_send_again(line: Line) -> None:
    share = await line.prepared()
    line.all_nodes(says(502, error="lost"))
    line.block()
    old, made = line.clock.now(), line.clock.now() + 1
    line.clock.advance(2)
    await line.broadcaster.send(share)
    for height, time in ((line.height, old), (line.height + 1, made)):  # it stood still, when asked since, too
        line.clock.advance(1)
        for endpoint in line.endpoints.all:
            head = BlockHead(CHAIN, height, time)
            endpoint.health.saw(head, syncing=False, now=line.clock.now(), began=line.clock.monotonic())
    line.height += 1
    await line.broadcaster.reconcile(line.height)
    assert len(line.nodes.posts) == 1
    await line.next_block()
    assert len(line.nodes.posts) == 2


async def test_broadcaster_logs_an_answer_of_one_kind_once_for_many_shares(line: Line) -> None:
    shares = [await line.prepared(number) for number in range(1, 21)]
    line.all_nodes(BEHIND)
    with capture_logs() as logs:
        for share in shares:
            await line.broadcaster.send(share)
        line.all_nodes(SPENT)
        await line.next_block()
    delays = [(log.get("endpoint"), log["outcome"]) for log in logs if log["event"] == "reveal_not_accepted"]
    assert len(line.nodes.posts) == 40
    assert len(delays) == len(set(delays))
    assert {outcome for _, outcome in delays} == {"BEHIND", "SPENT"}


async def test_a_refused_connection_goes_on_to_the_next_endpoint_at_once(line: Line) -> None:
    line.nodes.answers[FIRST] = breaks(httpx.ConnectError)
    await line.broadcaster.send(await line.prepared())
    assert line.nodes.asked == [FIRST, SECOND]
    assert [endpoint.name for endpoint in line.endpoints.fresh] == [SECOND], "it rests"
    assert line.stats.counts["broadcast"] == 1
    assert line.sending()[-2:] == (SECOND, "ACCEPTED")


@pytest.mark.rule("R11")
@pytest.mark.parametrize(
    "answer",
    [says(503, error="warming up"), says(502, error="no engine"), breaks(httpx.ReadError), BEHIND],
    ids=["503", "502", "lost reply", "anchor unknown"],
)
async def test_an_outage_costs_nothing_and_sends_the_same_bytes_at_the_next_block_elsewhere(
    line: Line, answer: Answer
) -> None:
    line.nodes.answers[FIRST] = answer
    await line.broadcaster.send(await line.prepared())
    assert line.nodes.asked == [FIRST], "not to another at the same height: it may have been taken"
    await line.next_block()
    assert line.nodes.asked == [FIRST, SECOND]
    assert line.nodes.posts[0][1] == line.nodes.posts[1][1]
    assert line.row(1, "state, attempts") == (ShareState.BROADCAST, 0)


async def test_an_endpoint_that_answers_badly_is_not_the_first_choice_of_the_next_share(line: Line) -> None:
    line.nodes.answers[FIRST] = breaks(httpx.ReadTimeout)
    await line.broadcaster.send(await line.prepared(1))
    await line.broadcaster.send(await line.prepared(2))
    assert line.nodes.asked == [FIRST, SECOND]
    line.clock.advance(31)
    line.block()
    await line.broadcaster.send(await line.prepared(3))
    assert line.nodes.asked[-1] == FIRST, "it gets another chance"


async def test_no_fresh_endpoint_sends_nothing_and_costs_nothing(line: Line) -> None:
    share = await line.prepared()
    line.clock.advance(200)
    await line.broadcaster.send(share)
    assert line.nodes.posts == []
    assert line.row(1, "state, attempts") == (ShareState.BROADCAST, 0)
    await line.next_block()
    assert len(line.nodes.posts) == 1


async def test_an_accepted_message_that_is_not_counted_goes_elsewhere_after_three_blocks(line: Line) -> None:
    await line.broadcaster.send(await line.prepared())
    for _ in range(2):
        await line.next_block()
    assert line.nodes.asked == [FIRST]
    await line.next_block()
    assert line.nodes.asked == [FIRST, SECOND]


@pytest.mark.rule("R8")
@pytest.mark.parametrize("answer", [ACCEPTS, refuses("nothing that we know"), refuses("invalid anchor height")])
async def test_after_ten_blocks_there_is_a_new_proof_at_no_cost_and_at_once(line: Line, answer: Answer) -> None:
    line.all_nodes(answer)
    await line.broadcaster.send(await line.prepared())
    async with line.running():
        for _ in range(9):
            await line.next_block()
        assert len({body for _, body in line.nodes.posts}) == 1, "the same bytes"
        assert len(line.prover.begun) == 1, "not more than one proof in ten blocks"
        await line.next_block()
        await until(lambda: len({body for _, body in line.nodes.posts}) == 2)
        assert len(line.prover.begun) == 2
        assert line.row(1, "attempts") == (0,)


@pytest.mark.rule("R12")
async def test_spent_is_no_more_than_broadcast_until_a_block_has_it(line: Line) -> None:
    line.all_nodes(SPENT)
    await line.broadcaster.send(await line.prepared())
    assert line.row(1, "state, attempts") == (ShareState.BROADCAST, 0)
    for _ in range(25):
        await line.next_block()
    assert line.row(1, "state, attempts") == (ShareState.BROADCAST, 0)
    assert len(line.prover.begun) == 1, "another proof could not change it"
    sent = len(line.nodes.posts)
    assert await line.count_on_chain(1)
    assert line.row(1) is None
    for _ in range(12):
        await line.next_block()
    assert len(line.nodes.posts) == sent, "never retried"
    assert (await line.store.counts())[make_share(1).round_id] == {ShareState.SUBMITTED: 1}


@pytest.mark.rule("R12")
async def test_a_share_that_is_counted_while_it_is_sent_is_done(line: Line) -> None:
    async def count(body: dict[str, Any]) -> httpx.Response:
        await line.count_on_chain(1)
        return await BAD_PROOF(body)

    line.nodes.answers[FIRST] = count
    line.prover.valid = False
    share = await line.prepared()
    await line.broadcaster.send(share)
    await line.broadcaster.send(share)
    assert (line.row(1), len(line.nodes.posts)) == (None, 1)


@pytest.mark.rule("R11")
async def test_a_proof_that_is_wrong_by_our_own_word_costs_an_attempt(line: Line) -> None:
    line.nodes.answers[FIRST] = BAD_PROOF
    line.prover.valid = False
    await line.broadcaster.send(await line.prepared())
    assert line.row(1, "state, attempts, due_ms") == (ShareState.RECEIVED, 1, (START + 2) * 1000)
    assert line.prover.verified == [("k10", ANCHOR.root)], "against the chain's own root at its anchor"
    assert line.circuits.current == "k10"


async def test_a_good_proof_that_is_refused_is_made_with_the_other_circuit_at_no_cost(line: Line) -> None:
    async def takes_k11(body: dict[str, Any]) -> httpx.Response:
        line.clock.advance(0.1)
        return await (ACCEPTS if line.prover.circuits[-1] == "k11" else BAD_PROOF)(body)

    line.all_nodes(takes_k11)
    line.circuits.begin("svote-test", "", None)
    async with line.running():
        await line.put(1)
        await until(lambda: line.rows("SELECT last_outcome FROM reveals") == [("BAD_PROOF",)])
        await line.settle()
        assert line.circuits.current == "k10", "one node's word is not the chain's"
        await line.next_block()
        await until(lambda: len(line.prover.begun) == 2)
        await line.settle()
        assert len(line.nodes.posts) == 2, "one message of a share a height, whichever it is"
        await line.next_block()
        key = CircuitSelector.key("svote-test")
        await until(lambda: line.rows("SELECT value FROM meta WHERE key = ?", key) == [("k11",)])
    assert line.prover.circuits == ["k10", "k11"]
    assert line.row(1, "state, attempts") == (ShareState.BROADCAST, 0)
    assert line.sending()[-1] == "ACCEPTED"


async def test_what_may_have_been_sent_before_the_start_waits_for_a_block_since(line: Line) -> None:
    share = await line.prepared()
    await line.broadcaster.send(share)
    await line.store.requeue(share, stage="broadcast", note="the chain refuses k10 proofs")
    line.clock.advance(0.1)
    after_restart = line.make_broadcaster()
    assert await line.revealer.prove(await line.claim())
    await after_restart.send(share)
    assert len(line.nodes.posts) == 1
    line.clock.advance(5)
    line.block()
    await after_restart.send(share)
    assert len(line.nodes.posts) == 2


async def test_an_endpoint_that_takes_no_stand_does_not_keep_the_other_circuit_from_being_tried(line: Line) -> None:
    line.nodes.answers = {FIRST: BAD_PROOF, SECOND: says(429, error="too many requests")}
    line.circuits.begin("svote-test", "", None)
    await line.broadcaster.send(await line.prepared())
    for _ in range(REPROVE_BLOCKS):
        await line.next_block()
    assert line.circuits.current == "k11"
    assert line.row(1, "state, attempts") == (ShareState.RECEIVED, 0)


async def test_endpoints_that_forget_reveals_do_not_keep_them_from_a_third(line: Line) -> None:
    line.endpoints.all += create_nodes(["http://third"], transport=line.nodes)
    line.nodes.answers["third:80"] = ACCEPTS
    line.block()
    await line.broadcaster.send(await line.prepared())
    for _ in range(7):
        await line.next_block()
    assert line.nodes.asked == [FIRST, SECOND, "third:80"]


async def test_a_circuit_set_by_hand_pauses_the_queue_and_spends_nothing(tmp_path: Path) -> None:
    async with open_line(tmp_path / "queue.db", circuit="k11") as line:
        line.all_nodes(BAD_PROOF)
        async with line.running():
            await line.put(1)
            await until(lambda: line.rows("SELECT last_outcome FROM reveals") == [("BAD_PROOF",)])
            await line.settle()
            assert line.circuits.paused is None, "one node's word is not the chain's"
            await line.next_block()
            assert line.circuits.paused is not None
            await line.put(2)
            await line.settle()
            assert line.processor.paused is not None
            assert line.prover.positions == [1]
            assert line.row(1, "state, attempts") == (ShareState.RECEIVED, 0)
            assert await line.turns_at_rest() == 0


async def test_queue_paused_by_refusals_tries_one_share_a_block_and_resumes_at_the_next(tmp_path: Path) -> None:
    async with open_line(tmp_path / "queue.db", circuit="k11") as line:
        line.all_nodes(BAD_PROOF)
        async with line.running():
            await line.put(1, 2, 3)
            await line.settle()
            while line.circuits.paused is None:
                await line.next_block()
                await line.settle()
            refused = len(line.prover.positions)
            for _ in range(2):
                await line.next_block()
                await line.settle()
                assert len(line.prover.positions) <= refused + 2
            assert line.circuits.paused is not None
            line.all_nodes(ACCEPTS)
            blocks = 0
            while 4 not in {state for _, state in line.states().items()} or line.circuits.paused is not None:
                await line.next_block()
                await line.settle()
                await until(lambda: not line.processor._tasks)  # what the block permitted is proven and sent
                blocks += 1
                assert blocks <= 3, "the pause is not waited for"


@pytest.mark.rule("R15")
async def test_a_message_that_can_never_be_taken_fails_and_is_reported(line: Line) -> None:
    line.all_nodes(refuses("invalid message field: proposal", 9))
    share = await line.prepared()
    with capture_logs() as logs:
        await line.broadcaster.send(share)
        assert line.row(1, "state, attempts") == (ShareState.BROADCAST, 0), "one node's word is not the chain's"
        await line.next_block()
    assert line.nodes.asked == [FIRST, SECOND]
    assert line.row(1, "state, attempts, length(primary_blind)") == (ShareState.FAILED, 0, 32)
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["share_failed"]
    assert line.stats.counts["failed"] == 1
    assert line.stats.summary(0)["recent_failures"] == [
        {"stage": "broadcast", "reason": "invalid message field: proposal"}
    ]


@pytest.mark.parametrize("refusal", [refuses("invalid message field: proposal", 9), BAD_PROOF], ids=["fields", "proof"])
async def test_one_node_that_refuses_all_loses_nothing_while_another_is_well(line: Line, refusal: Answer) -> None:
    line.nodes.answers[FIRST] = refusal
    share = await line.prepared()
    await line.broadcaster.send(share)
    await line.next_block()
    assert line.nodes.asked == [FIRST, SECOND]
    assert line.row(1, "state, attempts") == (ShareState.BROADCAST, 0)
    assert line.sending()[-1] == "ACCEPTED"
    assert (line.circuits.current, line.circuits.paused) == ("k10", None)


async def test_the_only_nodes_refusal_for_good_is_one_attempt_of_five(line: Line) -> None:
    line.nodes.answers[FIRST] = refuses("invalid message field: proposal", 9)
    line.endpoints.rest(line.endpoints.all[1], "away")
    share = await line.prepared()
    await line.broadcaster.send(share)
    assert line.row(1, "state, attempts") == (ShareState.RECEIVED, 1)


@pytest.mark.rule("R4")
async def test_nothing_leaves_when_the_clock_was_set_back_behind_its_time(line: Line) -> None:
    share = await line.prepared()
    line.clock.jump(-60)
    line.block()
    await line.broadcaster.send(share)
    await line.next_block()
    assert line.nodes.posts == []
    line.clock.advance(55)
    await line.next_block()
    assert len(line.nodes.posts) == 1


@pytest.mark.rule("R4")
async def test_nothing_leaves_again_before_its_time_once_a_clock_that_was_ahead_is_right(line: Line) -> None:
    share = await line.prepared()
    line.all_nodes(says(502, error="lost"))
    await line.broadcaster.send(share)
    assert len(line.nodes.posts) == 1
    line.clock.jump(-60)
    for _ in range(3):
        await line.next_block()
    assert len(line.nodes.posts) == 1
    line.clock.advance(60)
    await line.next_block()
    assert len(line.nodes.posts) == 2


async def test_who_takes_over_waits_for_a_block_after_what_another_host_sent_meanwhile(line: Line) -> None:
    share_id = await line.prepared()
    await line.broadcaster.send(share_id)
    await line.next_block()
    assert await line.store.mark_sending(share_id, height=line.height, endpoint=SECOND)  # by another host
    line.clock.advance(5)
    line.block()
    line.clock.advance(1)
    line.broadcaster.took_over()
    await line.broadcaster.reconcile(line.height)
    assert len(line.nodes.posts) == 1
    await line.next_block()
    assert len(line.nodes.posts) == 2


def in_circuit(line: Line, circuit: str, answers: list[str]) -> Answer:
    """A node of a chain that takes this circuit; notes the circuit of each proof in `answers`."""

    async def judge(body: dict[str, Any]) -> httpx.Response:
        share_id = line.rows("SELECT id FROM shares WHERE nullifier = ?", b64decode(body["share_nullifier"]))[0][0]
        (made,) = line.rows("SELECT circuit FROM reveals WHERE share_id = ?", share_id)[0]
        answers.append(made)
        return await (ACCEPTS if made == circuit else BAD_PROOF)(body)

    return judge


async def test_one_reveal_for_each_node_finds_out_the_circuit_and_the_others_wait(line: Line) -> None:
    line.circuits.begin(CHAIN, "", None)
    sent: list[str] = []
    line.all_nodes(in_circuit(line, "k11", sent))
    async with line.running():
        await line.put(*range(1, 9))
        await until(lambda: sent.count("k11") == 6)
        await line.next_block()  # those that were refused were sent at this height already
        await until(lambda: sent.count("k11") == 8)
    assert sent == ["k10"] * 2 + ["k11"] * 8
    assert line.prover.circuits.count("k10") == 2, "nothing is proven in vain meanwhile"
    assert set(line.rows("SELECT attempts FROM shares")) == {(0,)}
    assert await line.store.get_meta(CircuitSelector.key(CHAIN)) == "k11"


async def test_circuit_trial_without_an_answer_is_followed_by_the_next_share(line: Line) -> None:
    line.circuits.begin(CHAIN, "", None)
    asked: list[int] = []

    async def once_away(body: dict[str, Any]) -> httpx.Response:
        asked.append(1)
        return await (says(502, error="no consensus engine") if len(asked) == 1 else ACCEPTS)(body)

    line.all_nodes(once_away)
    async with line.running():
        await line.put(1, 2, 3)
        await until(lambda: len(asked) == 3)
    assert line.circuits.current == "k10"
    assert not line.circuits.is_guess


async def test_prepared_reveals_of_a_refused_circuit_are_not_sent(line: Line) -> None:
    line.circuits.begin(CHAIN, "", None)
    sent: list[str] = []
    line.all_nodes(in_circuit(line, "k11", sent))
    prepared = [await line.prepared(position) for position in (1, 2, 3, 4)]
    await asyncio.gather(*(line.broadcaster.send(share_id) for share_id in prepared))
    assert sent == ["k10"] * 2
    assert line.rows("SELECT DISTINCT state, attempts FROM shares") == [(ShareState.RECEIVED, 0)]


async def test_sent_reveal_of_a_refused_circuit_is_sent_again_until_it_is_refused(line: Line) -> None:
    line.circuits.begin(CHAIN, "", None)
    line.all_nodes(BEHIND)
    await line.broadcaster.send(await line.prepared())
    line.circuits.refused(99, "k10")
    line.all_nodes(BAD_PROOF)
    for _ in range(3):
        await line.next_block()
    assert line.row(1, "state, attempts") == (ShareState.RECEIVED, 0)
