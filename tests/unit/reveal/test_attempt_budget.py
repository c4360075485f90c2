"""Cost of failures: growing delays, persisted before waiting, until the end of the round."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from helper.chain.verdicts import Verdict
from helper.core.schedule import rank_fraction
from helper.core.share import ShareState
from helper.errors import ProofFailed
from tests.support.fakes import ROUND, START_TIME, CountingClock, wait_until
from tests.support.queue_pipeline import Pipeline, open_pipeline


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[Pipeline]:
    async with open_pipeline(tmp_path / "queue.db") as opened:
        yield opened


async def fail_once(pipeline: Pipeline) -> tuple[int, int, int]:
    """Fail one proof; return state, attempts, and the seconds until the next attempt, as on disk."""
    pipeline.show_block()  # a clock far from the newest block time is not used
    pipeline.prover.failures[1] = [ProofFailed("the circuit refused")]
    assert not await pipeline.revealer.prove(await pipeline.claim_due_share())
    row = pipeline.read_share(1, "state, attempts, due_ms")
    assert row is not None
    return row[0], row[1], row[2] // 1000 - int(pipeline.clock.now())


@pytest.mark.rule("R11", "N27")
async def test_retries_are_quick_then_slower_and_no_failure_is_final(pipeline: Pipeline) -> None:
    await pipeline.enqueue(1)
    delays = (2, 4, 8, 16, 32, 60, 600, 3600, 21_600)
    for number, wait in enumerate(delays, start=1):
        assert await fail_once(pipeline) == (ShareState.RECEIVED, number, wait)
        pipeline.clock.advance(wait - 1)
        assert await pipeline.store.claim_due(now=pipeline.clock.now(), limit=1, rounds=[ROUND]) == []
        pipeline.clock.advance(1)
    assert pipeline.stats.counts["failed"] == 0


@pytest.mark.rule("R11", "N27")
async def test_retries_go_on_until_the_round_ends(pipeline: Pipeline) -> None:
    await pipeline.enqueue(1)
    end = pipeline.rounds.end
    fraction = rank_fraction((pipeline.read_share(1, "rank") or (0,))[0])
    attempts_at = []
    while pipeline.clock.now() < end:
        attempts_at.append(pipeline.clock.now())
        state, _, wait = await fail_once(pipeline)
        assert state == ShareState.RECEIVED
        assert wait > 0
        pipeline.clock.advance(wait + 1)  # the due time has a fraction of a second
    last_attempt = end - 300 - 600 * fraction
    # Not exactly then: two attempts are at least 10 s apart, and this clock adds up to a second to each.
    assert [at for at in attempts_at if abs(at - last_attempt) <= 11], "one is at the time chosen for this share"
    assert end - 60 <= attempts_at[-1] < end
    assert pipeline.read_share(1, "state") == (ShareState.RECEIVED,), "only the chain ends it"
    await pipeline.store.fail_unspent(ROUND, note="closed")
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
            assert await fail_once(pipeline) == (ShareState.RECEIVED, number, 2**number)
            pipeline.clock.advance(64)
        assert await fail_once(pipeline) == (ShareState.RECEIVED, quick + 1, 60)


@pytest.mark.rule("R11")
async def test_attempts_and_delays_survive_restart(tmp_path: Path) -> None:
    clock = CountingClock(float(START_TIME))
    for number, wait in enumerate((2, 4, 8, 16, 32, 60, 600), start=1):
        async with open_pipeline(tmp_path / "queue.db", clock=clock) as pipeline:
            await pipeline.store.recover()
            await pipeline.enqueue(1)  # queued the first time, then a duplicate
            result = await fail_once(pipeline)
            assert result[1] == number
        async with open_pipeline(tmp_path / "queue.db", clock=clock) as pipeline:
            await pipeline.store.recover()
            assert (pipeline.read_share(1) or ())[0] == ShareState.RECEIVED
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
    assert await pipeline.store.count_shares() == {ROUND: {ShareState.RECEIVED: 1}}


@pytest.mark.rule("R15")
async def test_permanent_failure_is_reported_and_keeps_witness(pipeline: Pipeline) -> None:
    await pipeline.enqueue(1)
    queued = await pipeline.claim_due_share()
    with capture_logs() as logs:
        await pipeline.attempts.fail_share(queued.id, "broadcast", "invalid message field")
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert [(e["event"], e["stage"], e["reason"]) for e in errors] == [
        ("share_failed", "broadcast", "invalid message field")
    ]
    assert pipeline.stats.counts == {"failed": 1, "failures": 1}
    assert await pipeline.store.count_shares() == {ROUND: {ShareState.FAILED: 1}}
    assert pipeline.read_share(1, "length(primary_blind), length(share_comms)") == (32, 512)


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
        assert pipeline.read_share(1, "state, attempts, due_ms") == (ShareState.RECEIVED, 0, (START_TIME + 100) * 1000)
        pipeline.show_block()
        pipeline.dispatcher.wake()
        await wait_until(lambda: pipeline.nodes.posts)


@pytest.mark.rule("R12")
async def test_share_confirmed_after_claim_cannot_fail(pipeline: Pipeline) -> None:
    await pipeline.enqueue(1)
    queued = await pipeline.claim_due_share()
    await pipeline.count_on_chain(1)
    for spent in (0, 4, 9):
        await pipeline.attempts.spend_attempt(
            queued.id, replace(queued, attempts=spent), "proof", Verdict.BAD_PROOF.value
        )
    await pipeline.attempts.fail_share(queued.id, "broadcast", "invalid message field")
    assert pipeline.read_share(1) is None
    assert pipeline.stats.counts["failed"] == 0


async def test_retry_after_clock_years_ahead_is_not_delayed_by_years(pipeline: Pipeline) -> None:
    await pipeline.enqueue(1)
    queued = await pipeline.claim_due_share()
    pipeline.clock.set_wall_clock(10 * 365 * 24 * 3600)
    pipeline.prover.failures[1] = [ProofFailed("the circuit refused")]
    assert not await pipeline.revealer.prove(queued)
    pipeline.clock.set_wall_clock(-10 * 365 * 24 * 3600)
    row = pipeline.read_share(1, "due_ms")
    assert row is not None
    assert row[0] // 1000 - int(pipeline.clock.now()) <= 2
