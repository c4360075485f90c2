"""What failures cost: waits that double, on disk before they are waited for, and an end that is reported."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from helper.chain.verdicts import Verdict
from helper.core.share import ShareState
from helper.errors import ProofFailed
from tests.support.fakes import ROUND, START, CountingClock, until
from tests.support.queue_pipeline import Line, open_line


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    async with open_line(tmp_path / "queue.db") as opened:
        yield opened


async def fail_once(line: Line) -> tuple[int, int, int]:
    """One failed proof; state, attempts, and the seconds until the next try as they are on disk."""
    line.prover.failures[1] = [ProofFailed("the circuit refused")]
    assert not await line.revealer.prove(await line.claim())
    row = line.row(1, "state, attempts, due_ms")
    assert row is not None
    return row[0], row[1], row[2] // 1000 - int(line.clock.now())


@pytest.mark.rule("R11")
async def test_the_waits_double_and_the_fifth_failure_is_final(line: Line) -> None:
    await line.put(1)
    for number, wait in ((1, 2), (2, 4), (3, 8), (4, 16)):
        assert await fail_once(line) == (ShareState.RECEIVED, number, wait)
        line.clock.advance(wait - 1)
        assert await line.store.claim_due(now=line.clock.now(), limit=1, rounds=[ROUND]) == []
        line.clock.advance(1)
    assert (await fail_once(line))[:2] == (ShareState.FAILED, 5)


@pytest.mark.rule("R11")
@pytest.mark.parametrize("maximum", [1, 3])
async def test_which_failure_is_final_is_a_setting(tmp_path: Path, maximum: int) -> None:
    async with open_line(tmp_path / "queue.db", maximum=maximum) as line:
        await line.put(1)
        for number in range(1, maximum):
            assert (await fail_once(line))[:2] == (ShareState.RECEIVED, number)
            line.clock.advance(64)
        assert (await fail_once(line))[:2] == (ShareState.FAILED, maximum)


@pytest.mark.rule("R11")
async def test_failures_are_counted_and_waits_kept_across_restarts(tmp_path: Path) -> None:
    clock = CountingClock(float(START))
    for number, wait in ((1, 2), (2, 4), (3, 8), (4, 16), (5, 0)):
        async with open_line(tmp_path / "queue.db", clock=clock) as line:
            await line.store.recover()
            await line.put(1)  # the first time it is taken, after that it is a duplicate
            told = await fail_once(line)
            assert told[1] == number
        async with open_line(tmp_path / "queue.db", clock=clock) as line:
            await line.store.recover()
            state = ShareState.FAILED if number == 5 else ShareState.RECEIVED
            assert (line.row(1) or ())[0] == state
            if number < 5:
                assert told[2] == wait
                async with line.running():
                    assert line.prover.begun == [], "not before its wait is over, restarted or not"
            clock.advance(wait)


@pytest.mark.rule("R15")
async def test_the_end_is_reported_with_its_reason_and_keeps_the_witness(line: Line) -> None:
    await line.put(1)
    with capture_logs() as logs:
        for _ in range(5):
            await fail_once(line)
            line.clock.advance(64)
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert [(e["event"], e["stage"], e["reason"]) for e in errors] == [("share_failed", "proof", "the circuit refused")]
    assert line.stats.counts == {"failed": 1, "failures": 5, "retry_proof": 4}
    assert await line.store.counts() == {ROUND: {ShareState.FAILED: 1}}
    assert line.row(1, "length(primary_blind), length(share_comms)") == (32, 512)


@pytest.mark.rule("R4", "R11")
async def test_a_retry_by_a_clock_that_was_set_back_does_not_come_before_the_share_is_due(line: Line) -> None:
    await line.put(1, submit_at=START + 100)
    line.clock.advance(100)
    queued = await line.claim()
    line.clock.jump(-90)
    line.prover.failures[1] = [ProofFailed("the circuit refused")]
    assert not await line.revealer.prove(queued)
    assert line.row(1, "attempts, due_ms") == (1, (START + 100) * 1000)


@pytest.mark.rule("R11")
async def test_an_outage_of_a_whole_hour_costs_nothing(line: Line) -> None:
    async with line.running():
        await line.put(1, submit_at=START + 100)
        for _ in range(60):
            await line.later(60)
        assert str(line.processor.paused) == "no chain node is in sync"
        assert line.row(1, "state, attempts, due_ms") == (ShareState.RECEIVED, 0, (START + 100) * 1000)
        line.block()
        line.processor.wake()
        await until(lambda: line.nodes.posts)


@pytest.mark.rule("R12")
async def test_a_share_counted_meanwhile_cannot_fail_any_more(line: Line) -> None:
    await line.put(1)
    queued = await line.claim()
    await line.count_on_chain(1)
    for spent in (0, 4):
        await line.attempts.spend(queued.id, spent, "proof", Verdict.BAD_PROOF.value, not_before_ms=0)
    assert line.row(1) is None
    assert line.stats.counts["failed"] == 0


async def test_a_failure_while_the_clock_is_years_ahead_waits_no_years(line: Line) -> None:
    await line.put(1)
    queued = await line.claim()
    line.clock.jump(10 * 365 * 24 * 3600)
    line.prover.failures[1] = [ProofFailed("the circuit refused")]
    assert not await line.revealer.prove(queued)
    line.clock.jump(-10 * 365 * 24 * 3600)
    row = line.row(1, "due_ms")
    assert row is not None
    assert row[0] // 1000 - int(line.clock.now()) <= 2
