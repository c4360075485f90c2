"""The proof of one share, the cost of failures, and the measured pace."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from helper.chain.broadcast_outcome import Verdict
from helper.chain.reveal_transaction import RevealMessage
from helper.core.dispatch_order import rank_fraction
from helper.core.share import ShareState
from helper.errors import HelperError, ProofFailed, ProverCrashed, ProverTimeout
from helper.reveal.revealer import RECENT_PROOFS, ProofTimes
from helper.store import rounds, shares
from helper.store.table_rows import encode_witness
from tests.support.fakes import ANCHOR, ROUND, START_TIME, CountingClock, create_share, nullifier_of, wait_until
from tests.support.queue_pipeline import Pipeline, open_pipeline


async def test_prepared_message_uses_newest_verified_root(pipeline: Pipeline) -> None:
    await pipeline.prepare_message(1)
    ((message, tx_hash, anchor, root, circuit, height),) = pipeline.query_rows(
        "SELECT substr(message, 33), substr(message, 1, 32), anchor_height, anchor_root, circuit, height FROM reveals"
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
    assert (tx_hash, circuit) == (RevealMessage.from_tx(message).tx_hash(), "k10")
    assert (anchor, root) == (ANCHOR.height, ANCHOR.root)
    assert height == pipeline.height
    assert pipeline.read_share(1, "state, attempts, proved_height") == (ShareState.SENT, 0, pipeline.height)
    assert pipeline.nodes.posts == [], "sending is the sender's task"


@pytest.mark.rule("R11")
@pytest.mark.parametrize(("has_tree", "position"), [(False, 1), (True, 1000)])
async def test_share_outside_tree_is_requeued_without_attempt(
    pipeline: Pipeline, has_tree: bool, position: int
) -> None:
    if not has_tree:
        pipeline.trees.newest = None
    assert not await pipeline.revealer.prove(await pipeline.claim_new_share(position))
    expected = (ShareState.WAITING, 0, 0, (START_TIME + 2) * 1000)
    assert pipeline.read_share(position, "state, attempts, crashes, due_ms") == expected
    assert pipeline.prover.started_proofs == []


@pytest.mark.rule("R11")
@pytest.mark.parametrize("error", [ProverTimeout("no proof within 60 s"), ProofFailed("the circuit refused")])
async def test_proof_timeout_or_failure_spends_one_attempt(pipeline: Pipeline, error: HelperError) -> None:
    pipeline.prover.failures[1] = [error]
    assert not await pipeline.revealer.prove(await pipeline.claim_new_share())
    assert pipeline.read_share(1, "state, attempts, due_ms") == (ShareState.WAITING, 1, (START_TIME + 2) * 1000)


@pytest.mark.rule("R11")
@pytest.mark.parametrize("wrong", ["root", "nullifier"])
async def test_proof_of_other_statement_is_discarded(pipeline: Pipeline, wrong: str) -> None:
    queued = await pipeline.claim_new_share()
    if wrong == "root":
        pipeline.prover.root = b"\xff" * 32
    else:
        queued = queued._replace(witness=encode_witness(create_share(2), queued.nullifier, queued.received_ms))
    assert not await pipeline.revealer.prove(queued)
    assert pipeline.read_share(1, "state, attempts") == (ShareState.WAITING, 1)
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
    received = ShareState.WAITING
    assert notes == [
        (received, 1, 0, 0),
        (received, 2, 0, 0),
        (received, 3, 1, 2),
        (received, 4, 2, 4),
        (received, 5, 3, 8),
        (received, 6, 4, 16),
    ]


@pytest.mark.parametrize(
    ("lateness", "left", "is_restarted", "delay"),
    [
        (10, 3600, False, 2),
        (60, 3600, False, 6),
        (7200, 86_400, False, 600),
        (7200, 300, False, 30),
        (7200, 10, False, 2),
        (7200, 3600, True, 2),
    ],
)
async def test_share_whose_leaf_stays_absent_is_retried_ever_less_often(
    pipeline: Pipeline, lateness: int, left: int, delay: int, *, is_restarted: bool
) -> None:
    pipeline.trees.newest = None
    pipeline.rounds.end = START_TIME + lateness + left
    await pipeline.enqueue(1)
    pipeline.show_block(after=lateness)
    revealer = replace(pipeline.revealer) if is_restarted else pipeline.revealer
    assert not await revealer.prove(await pipeline.claim_due_share())
    now_ms = (START_TIME + lateness) * 1000
    assert pipeline.read_share(1, "state, attempts, due_ms") == (ShareState.WAITING, 0, now_ms + delay * 1000)


async def test_share_of_crashed_worker_is_not_claimed_before_attempt_is_recorded(pipeline: Pipeline) -> None:
    pipeline.prover.failures[1] = [ProverCrashed("killed")] * 3
    rows: list[object] = []
    pipeline.store.after_call["crash 3"] = lambda: rows.append(pipeline.read_share(1, "state, attempts, due_ms"))
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        await wait_until(lambda: pipeline.read_share(1, "attempts") == (1,))
        await pipeline.settle_dispatcher()
        assert rows == [(ShareState.WAITING, 0, (START_TIME + 2) * 1000)], "not due before"
        assert len(pipeline.prover.started_proofs) == 3
        assert pipeline.dispatcher.claimed_count == 0


@pytest.mark.rule("R12")
async def test_share_confirmed_during_proof_is_not_prepared(pipeline: Pipeline) -> None:
    proof_may_end = pipeline.prover.block(1)
    proving = asyncio.create_task(pipeline.revealer.prove(await pipeline.claim_new_share()))
    await wait_until(lambda: pipeline.prover.started_proofs)
    await pipeline.count_on_chain(1)
    proof_may_end.set()
    assert not await proving
    assert pipeline.read_share(1) is None
    assert (pipeline.stats.counts["proof_unused"], pipeline.stats.counts["proof_skipped"]) == (1, 0)


@pytest.mark.rule("R12")
async def test_share_confirmed_before_its_proof_begins_is_not_proven(pipeline: Pipeline) -> None:
    queued = await pipeline.claim_new_share()
    await pipeline.count_on_chain(1)
    assert not await pipeline.revealer.prove(queued)
    assert pipeline.prover.started_proofs == []
    assert pipeline.read_share(1) is None
    assert (pipeline.stats.counts["proof_unused"], pipeline.stats.counts["proof_skipped"]) == (0, 1)


async def test_proof_that_would_end_after_the_round_is_not_begun(pipeline: Pipeline) -> None:
    pipeline.proof_times.record(60.0)
    pipeline.rounds.end = START_TIME + 48
    queued = await pipeline.claim_new_share()
    assert not await pipeline.revealer.prove(queued)
    assert pipeline.prover.started_proofs == []
    assert pipeline.read_share(1, "state, attempts, due_ms") == (ShareState.WAITING, 0, START_TIME * 1000)
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
    assert pipeline.stats.lateness_start.summary().max_ms == 250.0
    assert pipeline.stats.lateness_start.count == 1
    assert pipeline.stats.counts["proven"] == 1
    assert pipeline.stats.proving.total_seconds(pipeline.clock.monotonic() + 100) == 0, "no proof is in progress"


async def fail_once(pipeline: Pipeline) -> tuple[int, int, int]:
    """Fail one proof; return state, attempts, and the seconds until the next attempt, as on disk."""
    pipeline.show_block()  # a clock far from the newest block time is not used
    pipeline.prover.failures[1] = [ProofFailed("the circuit refused")]
    assert not await pipeline.revealer.prove(await pipeline.claim_due_share())
    row = pipeline.read_share(1, "state, attempts, due_ms")
    assert row is not None
    return row[0], row[1], row[2] // 1000 - int(pipeline.clock.now())


@pytest.mark.rule("R11", "N27")
async def test_retries_go_on_until_the_round_ends(pipeline: Pipeline) -> None:
    await pipeline.enqueue(1)
    end = pipeline.rounds.end
    fraction = rank_fraction((pipeline.read_share(1, "rank") or (0,))[0])
    attempts_at = []
    while pipeline.clock.now() < end:
        attempts_at.append(pipeline.clock.now())
        state, _, wait = await fail_once(pipeline)
        assert state == ShareState.WAITING
        assert wait > 0
        pipeline.clock.advance(wait + 1)  # the due time has a fraction of a second
    last_attempt = end - 300 - 600 * fraction
    # Not exactly then: two attempts are at least 10 s apart, and this clock adds up to a second to each.
    assert [at for at in attempts_at if abs(at - last_attempt) <= 11], "one is at the time chosen for this share"
    assert end - 60 <= attempts_at[-1] < end
    assert pipeline.read_share(1, "state") == (ShareState.WAITING,), "only the chain ends it"
    await pipeline.store.run_batches(rounds.fail_unconfirmed, ROUND, note="closed")
    assert pipeline.read_share(1, "state, attempts") == (ShareState.FAILED, len(attempts_at))


@pytest.mark.rule("R11", "N27")
async def test_round_extended_after_last_retry_continues_retries(pipeline: Pipeline) -> None:
    await pipeline.enqueue(1)
    pipeline.rounds.end = START_TIME + 100
    for _ in range(6):
        pipeline.clock.advance((await fail_once(pipeline))[2])
    assert (pipeline.read_share(1, "due_ms") or (0,))[0] >= pipeline.rounds.end * 1000, (
        "no attempt is left before the end"
    )
    pipeline.rounds.end = START_TIME + 24 * 3600
    assert (await fail_once(pipeline))[2] == 600, "the seventh failure"


@pytest.mark.rule("R11")
@pytest.mark.parametrize("quick", [1, 3])
async def test_number_of_quick_retries_is_configurable(tmp_path: Path, quick: int) -> None:
    async with open_pipeline(tmp_path / "queue.db", quick_retries=quick) as pipeline:
        await pipeline.enqueue(1)
        for number in range(1, quick + 1):
            assert await fail_once(pipeline) == (ShareState.WAITING, number, 2**number)
            pipeline.clock.advance(64)
        assert await fail_once(pipeline) == (ShareState.WAITING, quick + 1, 60)


@pytest.mark.rule("R11")
async def test_attempts_and_delays_survive_restart(tmp_path: Path) -> None:
    clock = CountingClock(float(START_TIME))
    for number, wait in enumerate((2, 4, 8, 16, 32, 60, 600), start=1):
        async with open_pipeline(tmp_path / "queue.db", clock=clock) as pipeline:
            await pipeline.store.run_batches(shares.recover)
            await pipeline.enqueue(1)  # queued the first time, then a duplicate
            result = await fail_once(pipeline)
            assert result[1] == number
        async with open_pipeline(tmp_path / "queue.db", clock=clock) as pipeline:
            await pipeline.store.run_batches(shares.recover)
            assert (pipeline.read_share(1) or ())[0] == ShareState.WAITING
            assert result[2] == wait
            async with pipeline.run_dispatcher():
                assert pipeline.prover.started_proofs == [], "not before the wait ends, even after a restart"
        clock.advance(wait)


@pytest.mark.rule("R15")
async def test_failure_of_all_quick_retries_is_reported_once(pipeline: Pipeline) -> None:
    await pipeline.enqueue(1)
    with capture_logs() as logs:
        for _ in range(8):
            pipeline.clock.advance((await fail_once(pipeline))[2])
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert [(e["event"], e["stage"], e["reason"], e["attempt"]) for e in errors] == [
        ("quick_retries_failed", "proof", "the circuit refused", 6)
    ]
    assert pipeline.stats.counts == {"failures": 8, "retry_proof": 8, "quick_retries_failed": 1}
    assert await pipeline.store.count_shares() == {ROUND: {ShareState.WAITING: 1}}


@pytest.mark.rule("R4", "R11")
async def test_retry_after_clock_set_back_is_not_before_due_time(pipeline: Pipeline) -> None:
    await pipeline.enqueue(1, submit_at=START_TIME + 100)
    pipeline.clock.advance(100)
    queued = await pipeline.claim_due_share()
    pipeline.clock.set_wall_clock(-90)
    pipeline.prover.failures[1] = [ProofFailed("the circuit refused")]
    assert not await pipeline.revealer.prove(queued)
    assert pipeline.read_share(1, "attempts, due_ms") == (1, (START_TIME + 100) * 1000)


@pytest.mark.rule("R11")
async def test_hour_of_node_outage_spends_no_attempt(pipeline: Pipeline) -> None:
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1, submit_at=START_TIME + 100)
        for _ in range(60):
            await pipeline.advance_when_idle(60)
        assert str(pipeline.dispatcher.pause_reason) == "no chain node is in sync"
        assert pipeline.read_share(1, "state, attempts, due_ms") == (ShareState.WAITING, 0, (START_TIME + 100) * 1000)
        pipeline.show_block()
        pipeline.dispatcher.wake()
        await wait_until(lambda: pipeline.nodes.posts)


@pytest.mark.rule("R12")
async def test_share_confirmed_after_claim_cannot_fail(pipeline: Pipeline) -> None:
    queued = await pipeline.claim_new_share()
    await pipeline.count_on_chain(1)
    for spent in (0, 4, 9):
        await pipeline.retries.spend_attempt(
            queued.id, queued._replace(attempts=spent), "proof", Verdict.BAD_PROOF.value
        )
    await pipeline.retries.fail_share(queued.id, "broadcast", "invalid message field")
    assert pipeline.read_share(1) is None
    assert pipeline.stats.counts["failed"] == 0


async def test_retry_after_clock_years_ahead_is_not_delayed_by_years(pipeline: Pipeline) -> None:
    queued = await pipeline.claim_new_share()
    pipeline.clock.set_wall_clock(10 * 365 * 24 * 3600)
    pipeline.prover.failures[1] = [ProofFailed("the circuit refused")]
    assert not await pipeline.revealer.prove(queued)
    pipeline.clock.set_wall_clock(-10 * 365 * 24 * 3600)
    row = pipeline.read_share(1, "due_ms")
    assert row is not None
    assert row[0] // 1000 - int(pipeline.clock.now()) <= 2


def test_pace_before_first_proof_is_that_of_self_test() -> None:
    assert ProofTimes(4, lambda: 2.0).pace().proof_seconds == 2.0
    assert ProofTimes(4, lambda: 2.0).pace().shares_per_second == 2.0
    assert ProofTimes(4, lambda: None).pace().shares_per_second == 4.0


def test_pace_is_that_of_recent_proofs_and_all_hosts() -> None:
    times = ProofTimes(2, lambda: 50.0)
    for _ in range(10):
        times.record(100.0)
    for _ in range(RECENT_PROOFS // 2):
        times.record(0.5)
        times.record(1.5)
    times.hosts = 3

    pace = times.pace()

    assert (pace.proof_seconds, pace.shares_per_second) == (1.0, 6.0)


def test_pace_is_rate_of_confirmed_shares_if_other_helpers_reveal_more() -> None:
    times = ProofTimes(1, lambda: 1.0)
    for second in range(0, 300, 10):
        assert times.pace().shares_per_second == (1.0 if second <= 20 else 5.0)
        times.record_confirmed(5 * second, float(second))
    for second in range(300, 430, 10):
        times.record_confirmed(1500, float(second))

    assert times.pace().shares_per_second == 1.0, "older counts no longer matter"


@pytest.mark.parametrize(
    ("recorded", "estimate", "seconds_left", "expected"),
    [
        ([], None, 0.001, True),
        ([], 60.0, 31.0, True),
        ([], 60.0, 30.0, False),
        ([60.0, 45.0, 80.0], 10.0, 36.5, True),
        ([60.0, 45.0, 80.0], 10.0, 36.0, False),
        ([60.0], None, 0.0, False),
    ],
)
def test_proof_can_finish_unless_even_a_faster_one_would_be_late(
    recorded: list[float], estimate: float | None, seconds_left: float, expected: bool
) -> None:
    times = ProofTimes(1, lambda: estimate)
    for seconds in recorded:
        times.record(seconds)

    assert times.can_finish_proof(1000.0 + seconds_left, 1000.0) is expected
