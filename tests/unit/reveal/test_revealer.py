"""The proof of one share: inputs, stored message, and the cost of prover failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from helper.chain.reveal_transaction import RevealMessage
from helper.core.share import ShareState
from helper.errors import HelperError, ProofFailed, ProverCrashed, ProverTimeout
from tests.support.fakes import ANCHOR, ROUND, START_TIME, create_share, nullifier_of, wait_until
from tests.support.queue_pipeline import Pipeline, open_pipeline


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[Pipeline]:
    async with open_pipeline(tmp_path / "queue.db") as opened:
        yield opened


async def test_prepared_message_uses_newest_verified_root(pipeline: Pipeline) -> None:
    await pipeline.prepare_message(1)
    ((message, tx_hash, anchor, circuit, height),) = pipeline.query_rows(
        "SELECT message, tx_hash, anchor_height, circuit, height FROM reveals"
    )
    share = create_share(1)
    assert RevealMessage.from_tx(message) == RevealMessage(
        nullifier=nullifier_of(share.primary_blind),
        enc_share=share.c1 + share.c2,
        proposal_id=1,
        vote_decision=1,
        proof=b"proof of 1",
        round_id=ROUND,
        anchor_height=ANCHOR.height,
    )
    assert (tx_hash, anchor, circuit) == (RevealMessage.from_tx(message).tx_hash(), ANCHOR.height, "k10")
    assert height == pipeline.height
    assert pipeline.read_share(1, "state, attempts, proved_height") == (ShareState.BROADCAST, 0, pipeline.height)
    assert pipeline.nodes.posts == [], "sending is the sender's task"


@pytest.mark.rule("R11")
@pytest.mark.parametrize("size", [0, 1])
async def test_share_outside_tree_is_requeued_without_attempt(pipeline: Pipeline, size: int) -> None:
    if size == 0:
        pipeline.trees.newest = None
    await pipeline.enqueue(1000 if size else 1)
    assert not await pipeline.revealer.prove(await pipeline.claim_due_share())
    position = 1000 if size else 1
    expected = (ShareState.RECEIVED, 0, 0, (START_TIME + 2) * 1000)
    assert pipeline.read_share(position, "state, attempts, crashes, due_ms") == expected
    assert pipeline.prover.started_proofs == []


@pytest.mark.rule("R11")
@pytest.mark.parametrize("error", [ProverTimeout("no proof within 60 s"), ProofFailed("the circuit refused")])
async def test_proof_timeout_or_failure_spends_one_attempt(pipeline: Pipeline, error: HelperError) -> None:
    pipeline.prover.failures[1] = [error]
    await pipeline.enqueue(1)
    assert not await pipeline.revealer.prove(await pipeline.claim_due_share())
    assert pipeline.read_share(1, "state, attempts, due_ms") == (ShareState.RECEIVED, 1, (START_TIME + 2) * 1000)


@pytest.mark.rule("R11")
@pytest.mark.parametrize("wrong", ["root", "nullifier"])
async def test_proof_of_other_statement_is_discarded(pipeline: Pipeline, wrong: str) -> None:
    await pipeline.enqueue(1)
    queued = await pipeline.claim_due_share()
    if wrong == "root":
        pipeline.prover.root = b"\xff" * 32
    else:
        queued = type(queued)(queued.id, create_share(2), queued.nullifier, queued.state, queued.due_ms, 0, 0, None)
    assert not await pipeline.revealer.prove(queued)
    assert pipeline.read_share(1, "state, attempts") == (ShareState.RECEIVED, 1)
    assert pipeline.query_rows("SELECT count(*) FROM reveals") == [(0,)]


@pytest.mark.rule("R11")
async def test_worker_crash_spends_attempt_from_third_time(pipeline: Pipeline) -> None:
    pipeline.prover.failures[1] = [ProverCrashed("killed")] * 6
    await pipeline.enqueue(1)
    notes = []
    for _ in range(6):
        assert not await pipeline.revealer.prove(await pipeline.claim_due_share())
        row = pipeline.read_share(1, "state, crashes, attempts, due_ms")
        assert row is not None
        notes.append((*row[:3], row[3] // 1000 - int(pipeline.clock.now())))
        pipeline.clock.advance(max(0, notes[-1][3]))
    received = ShareState.RECEIVED
    assert notes == [
        (received, 1, 0, 0),
        (received, 2, 0, 0),
        (received, 3, 1, 2),
        (received, 4, 2, 4),
        (received, 5, 3, 8),
        (received, 6, 4, 16),
    ]


async def test_share_of_crashed_worker_is_not_claimed_before_attempt_is_recorded(pipeline: Pipeline) -> None:
    pipeline.prover.failures[1] = [ProverCrashed("killed")] * 3
    rows: list[object] = []
    pipeline.store.after_call["crash 3"] = lambda: rows.append(pipeline.read_share(1, "state, attempts, due_ms"))
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        await wait_until(lambda: pipeline.read_share(1, "attempts") == (1,))
        await pipeline.settle_dispatcher()
        assert rows == [(ShareState.RECEIVED, 0, (START_TIME + 2) * 1000)], "not due before"
        assert len(pipeline.prover.started_proofs) == 3
        assert pipeline.dispatcher.claimed_count == 0


@pytest.mark.rule("R12")
async def test_share_confirmed_during_proof_is_not_prepared(pipeline: Pipeline) -> None:
    proof_may_end = pipeline.prover.block(1)
    await pipeline.enqueue(1)
    proving = asyncio.create_task(pipeline.revealer.prove(await pipeline.claim_due_share()))
    await wait_until(lambda: pipeline.prover.started_proofs)
    await pipeline.count_on_chain(1)
    proof_may_end.set()
    assert not await proving
    assert pipeline.read_share(1) is None
    assert (pipeline.stats.counts["proof_unused"], pipeline.stats.counts["proof_skipped"]) == (1, 0)


@pytest.mark.rule("R12")
async def test_share_confirmed_before_its_proof_begins_is_not_proven(pipeline: Pipeline) -> None:
    await pipeline.enqueue(1)
    queued = await pipeline.claim_due_share()
    await pipeline.count_on_chain(1)
    assert not await pipeline.revealer.prove(queued)
    assert pipeline.prover.started_proofs == []
    assert pipeline.read_share(1) is None
    assert (pipeline.stats.counts["proof_unused"], pipeline.stats.counts["proof_skipped"]) == (0, 1)


async def test_proof_that_would_end_after_the_round_is_not_begun(pipeline: Pipeline) -> None:
    pipeline.proof_times.record(60.0)
    pipeline.rounds.end = START_TIME + 48
    await pipeline.enqueue(1)
    queued = await pipeline.claim_due_share()
    assert not await pipeline.revealer.prove(queued)
    assert pipeline.prover.started_proofs == []
    assert pipeline.read_share(1, "state, attempts, due_ms") == (ShareState.RECEIVED, 0, START_TIME * 1000)
    async with pipeline.run_dispatcher():
        assert await pipeline.count_idle_turns() == 0, "its round is no longer dispatched"
    pipeline.rounds.end = START_TIME + 49
    assert await pipeline.revealer.prove(await pipeline.claim_due_share()), "it may be done in time"


async def test_lateness_is_measured_from_submit_at_once(pipeline: Pipeline) -> None:
    pipeline.prover.failures[1] = [ProofFailed("the circuit refused")]
    await pipeline.enqueue(1, submit_at=START_TIME + 5)
    pipeline.clock.advance(5.25)
    assert not await pipeline.revealer.prove(await pipeline.claim_due_share())
    pipeline.clock.advance(2)
    assert await pipeline.revealer.prove(await pipeline.claim_due_share())
    assert pipeline.stats.lateness_start.summary()["max_ms"] == 250.0
    assert pipeline.stats.lateness_start.count == 1
    assert pipeline.stats.counts["proven"] == 1
    assert pipeline.stats.proving.total_seconds(pipeline.clock.monotonic() + 100) == 0, "no proof is in progress"
