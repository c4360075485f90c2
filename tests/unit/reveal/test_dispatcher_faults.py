"""Internal errors: no share is lost, no other share waits, the loop continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from helper.core.share import ShareState
from helper.errors import ProofFailed, ProverCrashed, StoreError
from tests.support.fakes import OTHER_ROUND, ROUND, START_TIME, create_round, wait_for_length, wait_until
from tests.support.queue_pipeline import Pipeline, open_pipeline


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[Pipeline]:
    async with open_pipeline(tmp_path / "queue.db") as opened:
        yield opened


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), StoreError("the disk is full")])
async def test_error_in_one_share_releases_it_and_blocks_no_other(pipeline: Pipeline, fault: Exception) -> None:
    pipeline.prover.failures[1] = [fault]
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1, *range(2, 12))
        await wait_for_length(pipeline.nodes.posts, 10)
        assert pipeline.read_share(1, "state, attempts") == (ShareState.WITNESSED, 0), "delayed for a moment"
        await pipeline.advance_when_idle(2)
        await wait_for_length(pipeline.nodes.posts, 11)
        assert pipeline.read_share(1, "state, attempts, due_ms") == (ShareState.BROADCAST, 0, START_TIME * 1000)


async def test_share_with_internal_error_is_not_retried_in_tight_loop(pipeline: Pipeline) -> None:
    pipeline.prover.failures[1] = [RuntimeError("a bug")] * 5
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        for tries, wait in enumerate((2, 4, 8, 16), start=1):
            await wait_for_length(pipeline.prover.started_proofs, tries)
            await wait_until(lambda: pipeline.dispatcher.claimed_count == 0)
            await pipeline.settle_dispatcher()
            assert await pipeline.count_idle_turns() == 0
            await pipeline.advance_when_idle(wait)
            pipeline.show_block()
        await wait_for_length(pipeline.prover.started_proofs, 5)
        assert pipeline.read_share(1, "attempts") == (0,)


async def test_cancelled_work_is_released(pipeline: Pipeline) -> None:
    event = pipeline.prover.block(1)
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        await wait_until(lambda: pipeline.prover.running == 1)
        (task,) = [task for task in asyncio.all_tasks() if "_reveal" in repr(task.get_coro())]
        task.cancel()
        event.set()
        await wait_until(lambda: pipeline.dispatcher.claimed_count == 0)
        await pipeline.advance_when_idle(2)
        await wait_until(lambda: pipeline.nodes.posts)


async def test_dispatch_resumes_after_database_outage(pipeline: Pipeline) -> None:
    pipeline.prover.failures[1] = [RuntimeError("a bug")]
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        await wait_until(lambda: pipeline.dispatcher.claimed_count == 0 and pipeline.prover.started_proofs)
        pipeline.store.failing_calls |= {"claim_due", "release_claim"}
        with capture_logs() as logs:
            await pipeline.enqueue(2)
            for _ in range(5):
                await pipeline.advance_when_idle(1)
            await pipeline.settle_dispatcher()
        errors = [entry["error"] for entry in logs if entry["event"] == "dispatch_failed"]
        assert errors == ["claim_due failed"], "logged once, not every second"
        assert pipeline.stats.find_failing(5, pipeline.clock.monotonic()) == ["claiming due shares"]
        assert "release_claim" in pipeline.store.calls
        assert await pipeline.count_idle_turns() == 0
        pipeline.store.failing_calls.clear()
        await pipeline.advance_when_idle(1)
        await wait_for_length(pipeline.nodes.posts, 2)
        assert not pipeline.stats.find_failing(0, pipeline.clock.monotonic())


async def test_readiness_is_told_of_errors_in_several_shares(pipeline: Pipeline) -> None:
    def failing() -> list[str]:
        return pipeline.stats.find_failing(0, pipeline.clock.monotonic())

    pipeline.prover.failures = {number: [RuntimeError("a bug")] for number in (1, 2)}
    async with pipeline.run_dispatcher():
        for number, expected in enumerate(([], ["revealing claimed shares"], []), start=1):
            await pipeline.enqueue(number)
            await wait_for_length(pipeline.prover.started_proofs, number)
            await wait_until(lambda: not pipeline.dispatcher._tasks)
            assert failing() == expected


async def test_loop_survives_unexpected_errors(pipeline: Pipeline) -> None:
    def raise_bug() -> None:
        raise RuntimeError("a bug")

    async with pipeline.run_dispatcher():
        pipeline.store.after_call["next_due_ms"] = raise_bug
        with capture_logs() as logs:
            await pipeline.settle_dispatcher()
        assert [entry["event"] for entry in logs] == ["dispatch_failed"]
        await pipeline.enqueue(1)
        await wait_until(lambda: pipeline.nodes.posts)


@pytest.mark.parametrize("fault", [None, ProofFailed("no"), ProverCrashed("killed")])
async def test_proof_finished_after_round_closed_is_no_error(pipeline: Pipeline, fault: Exception | None) -> None:
    slow = pipeline.prover.block(1)
    if fault is not None:
        pipeline.prover.failures[1] = [fault]
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        await wait_until(lambda: pipeline.prover.started_proofs)
        await pipeline.store.fail_unspent(ROUND, note="the round closed")
        with capture_logs() as logs:
            slow.set()
            await wait_until(lambda: pipeline.dispatcher.claimed_count == 0)
            await pipeline.settle_dispatcher()
    assert [entry for entry in logs if entry["log_level"] in ("warning", "error")] == []
    assert pipeline.read_share(1, "state, attempts, crashes") == (ShareState.FAILED, 0, 0)
    assert pipeline.nodes.posts == []


async def test_slow_node_or_large_purge_does_not_delay_due_share(pipeline: Pipeline) -> None:
    pipeline.rounds.closing_blocked = asyncio.Event()
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        await wait_until(lambda: pipeline.nodes.posts)
        await pipeline.enqueue(2)
        await wait_for_length(pipeline.nodes.posts, 2)
        pipeline.rounds.closing_blocked.set()


async def test_retention_error_does_not_stop_dispatch(pipeline: Pipeline) -> None:
    pipeline.store.failing_calls.add("mark_alerted")
    await pipeline.store.save_rounds([create_round(OTHER_ROUND)], START_TIME)
    await pipeline.store.mark_closed(OTHER_ROUND, START_TIME)
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        await wait_until(lambda: pipeline.nodes.posts)
    assert "mark_alerted" in pipeline.store.calls
