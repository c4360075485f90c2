"""The dispatch loop: times and order, the events that wake it, and internal errors."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from structlog.testing import capture_logs

from helper.core.share import ShareState
from helper.errors import ProofFailed, ProverCrashed, StoreError
from helper.store import rounds, shares
from helper.store.store import Store
from tests.support.fakes import ROUND, START_TIME, CountingClock, wait_for_length, wait_until
from tests.support.queue_pipeline import Pipeline, open_pipeline


def has_slept_again(pipeline: Pipeline, sleeps: int) -> bool:
    return pipeline.clock.sleep_count >= sleeps


@pytest.mark.rule("R1", "R4", "R6", "N10")
async def test_dispatch_starts_at_the_exact_due_second(pipeline: Pipeline) -> None:
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1, submit_at=START_TIME + 10)
        await pipeline.advance_when_idle(9.875)
        await pipeline.settle_dispatcher()
        assert pipeline.prover.started_proofs == []
        pipeline.clock.advance(0.125)
        await wait_until(lambda: pipeline.prover.started_proofs)
        assert pipeline.prover.started_proofs == [(1, START_TIME + 10.0)]


@pytest.mark.rule("R4")
async def test_dispatch_waits_when_due_time_exceeds_block_time_by_tolerance(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path / "queue.db", stale_after=7200.0) as pipeline, pipeline.run_dispatcher():
        for position, ahead in ((1, 100), (2, 120), (3, 121), (4, 1800)):
            await pipeline.enqueue(position, submit_at=START_TIME + ahead)
        pipeline.clock.advance(3600)
        await pipeline.settle_dispatcher()
        await wait_for_length(pipeline.nodes.posts, 2)
        await pipeline.settle_dispatcher()
        assert sorted(pipeline.prover.positions) == [1, 2], "no share due more than 120 s after the newest block"
        assert await pipeline.count_idle_turns() == 0
        turns = pipeline.gate_checks
        pipeline.clock.advance(0.5)
        assert (await pipeline.count_idle_turns(), pipeline.gate_checks) == (0, turns), "it waits for the next block"
        pipeline.clock.advance(-3600.5)
        pipeline.clock.set_wall_clock(3600)
        await pipeline.settle_dispatcher()
        assert pipeline.dispatcher.pause_reason is not None, "the clock's error is known before the next block"
        assert sorted(pipeline.prover.positions) == [1, 2]
        pipeline.clock.set_wall_clock(-3600)
        pipeline.show_block(after=121)
        await pipeline.settle_dispatcher()
        await wait_until(lambda: 3 in pipeline.prover.positions)
        assert pipeline.prover.positions[2:] == [3]


@pytest.mark.rule("R4")
async def test_dispatch_pauses_when_clock_set_forward_makes_all_nodes_stale(pipeline: Pipeline) -> None:
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1, submit_at=START_TIME + 600)
        pipeline.clock.set_wall_clock(3600)
        await pipeline.settle_dispatcher()
        assert str(pipeline.dispatcher.pause_reason) == "this machine's clock differs too much from the chain's"
        assert pipeline.prover.started_proofs == []


@pytest.mark.rule("R4")
async def test_dispatch_is_late_and_never_early_when_clock_is_set_back(pipeline: Pipeline) -> None:
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1, submit_at=START_TIME + 10)
        await pipeline.advance_when_idle(9)
        pipeline.clock.set_wall_clock(-60)
        pipeline.show_block()
        pipeline.clock.advance(30)
        await pipeline.settle_dispatcher()
        assert pipeline.prover.started_proofs == []
        pipeline.clock.advance(31)
        await wait_until(lambda: pipeline.prover.started_proofs)
        assert pipeline.prover.started_proofs == [(1, START_TIME + 10.0)]


@pytest.mark.rule("R5")
async def test_dispatch_uses_keyed_order_and_limits_concurrency_to_slots(pipeline: Pipeline) -> None:
    arrivals = list(range(1, 25))
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(*arrivals, submit_at=START_TIME + 5)
        keyed = [
            row[0]
            for row in pipeline.query_rows("SELECT field(witness, 'tree_position') FROM shares ORDER BY due_ms, rank")
        ]
        await pipeline.advance_when_idle(5)
        await wait_for_length(pipeline.nodes.posts, len(arrivals))
    assert pipeline.prover.positions == keyed
    assert keyed != arrivals
    assert pipeline.prover.max_running == 2, "two slots, both used"


@pytest.mark.rule("R5")
async def test_dispatch_of_overdue_shares_is_in_own_order_over_all_of_them(pipeline: Pipeline) -> None:
    for position in range(1, 31):
        await pipeline.enqueue(position, submit_at=START_TIME + position)
    keyed = [row[0] for row in pipeline.query_rows("SELECT field(witness, 'tree_position') FROM shares ORDER BY rank")]
    pipeline.show_block(after=60)
    held = pipeline.prover.block(keyed[0])
    async with pipeline.run_dispatcher():
        await wait_until(lambda: len(pipeline.nodes.posts) >= 27)
        held.set()
        await wait_for_length(pipeline.nodes.posts, 30)
    # The last two are no longer more than the provers.
    assert pipeline.prover.positions[:28] == keyed[:28]
    assert keyed != sorted(keyed)


async def test_shares_claimed_in_a_backlog_are_proven_although_the_next_read_fails(pipeline: Pipeline) -> None:
    await pipeline.enqueue(*range(1, 9))
    pipeline.show_block(after=60)
    pipeline.store.after_call["claim_listed"] = lambda: pipeline.store.failing_calls.add("next_due_ms")
    async with pipeline.run_dispatcher():
        await wait_for_length(pipeline.nodes.posts, 4)
        pipeline.store.failing_calls.clear()
        await pipeline.advance_when_idle(1)
        await wait_for_length(pipeline.nodes.posts, 8)


@pytest.mark.rule("R5")
async def test_dispatch_continues_during_a_slow_proof(pipeline: Pipeline) -> None:
    slow = pipeline.prover.block(1)
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        await wait_until(lambda: pipeline.prover.started_proofs)
        for second in range(1, 9):
            await pipeline.enqueue(10 + second, submit_at=START_TIME + second)
        for second in range(1, 9):
            await pipeline.advance_when_idle(1)
            await wait_for_length(pipeline.nodes.posts, second)
        assert pipeline.prover.started_proofs[1:] == [
            (10 + second, float(START_TIME + second)) for second in range(1, 9)
        ]
        assert pipeline.read_share(1) == (ShareState.PROVING,)
        slow.set()
        await wait_for_length(pipeline.nodes.posts, 9)


@pytest.mark.parametrize("is_backlog", [False, True])
async def test_dispatch_claims_at_most_two_shares_per_prover_and_does_not_spin(
    pipeline: Pipeline, is_backlog: bool
) -> None:
    held = [pipeline.prover.block(position) for position in range(1, 11)]
    await pipeline.enqueue(*range(1, 11))
    if is_backlog:
        pipeline.show_block(after=60)
    async with pipeline.run_dispatcher():
        await wait_until(lambda: pipeline.prover.running == 2)
        await pipeline.settle_dispatcher()
        assert (
            list(pipeline.share_states().values()).count(ShareState.PROVING) == pipeline.dispatcher.claimed_count == 4
        )
        assert await pipeline.count_idle_turns() == 0
        for event in held:
            event.set()
        await wait_for_length(pipeline.nodes.posts, 10)
    assert pipeline.dispatcher.claimed_count == 0


@pytest.mark.rule("R7")
async def test_loop_sleeps_at_most_30_seconds(pipeline: Pipeline) -> None:
    async with pipeline.run_dispatcher():
        turns = pipeline.gate_checks
        for _ in range(29):
            sleeps = pipeline.clock.sleep_count + 1
            pipeline.clock.advance(1)
            await wait_until(partial(has_slept_again, pipeline, sleeps))
        assert pipeline.gate_checks == turns, "it only reads the clock once per second"
        pipeline.clock.advance(1)
        await wait_until(lambda: pipeline.gate_checks > turns)


@pytest.mark.rule("R2", "R8")
async def test_loop_wakes_immediately_for_a_new_share(pipeline: Pipeline) -> None:
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        await wait_until(lambda: pipeline.nodes.posts)
        assert pipeline.prover.started_proofs == [(1, float(START_TIME))], "no time has passed"


@pytest.mark.rule("R8")
async def test_loop_dispatches_a_share_enqueued_while_busy(pipeline: Pipeline) -> None:
    async with pipeline.run_dispatcher():
        arrival: list[asyncio.Task[None]] = []
        pipeline.store.after_call["next_due_ms"] = lambda: arrival.append(asyncio.create_task(pipeline.enqueue(1)))
        # The share is enqueued after the loop has read the next due time, and before it sleeps.
        await pipeline.settle_dispatcher()
        await wait_until(lambda: pipeline.nodes.posts)


@pytest.mark.rule("R8", "R11")
async def test_dispatch_retries_a_share_when_its_delay_ends(pipeline: Pipeline) -> None:
    pipeline.prover.failures[1] = [ProofFailed("the witness does not fit")]
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        await wait_until(lambda: pipeline.read_share(1, "attempts") == (1,))
        await pipeline.advance_when_idle(2)
        await wait_until(lambda: pipeline.nodes.posts)
        assert pipeline.prover.started_proofs == [(1, float(START_TIME)), (1, START_TIME + 2.0)]


@pytest.mark.rule("R4", "R6")
async def test_dispatch_of_a_share_due_just_after_a_claim_is_not_delayed(pipeline: Pipeline) -> None:
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1, submit_at=START_TIME + 10)
        pipeline.clock.advance(9.5)
        pipeline.store.after_call["next_due_ms"] = lambda: pipeline.clock.advance(0.625)
        await pipeline.settle_dispatcher()
        pipeline.clock.advance(0.001)
        await wait_until(lambda: pipeline.prover.started_proofs)
        assert pipeline.prover.started_proofs[0][1] < START_TIME + 10.2


@pytest.mark.rule("R9")
async def test_restart_releases_a_claimed_share_at_its_due_time(tmp_path: Path) -> None:
    clock = CountingClock(float(START_TIME))
    async with open_pipeline(tmp_path / "queue.db", clock=clock) as pipeline:
        pipeline.prover.block(1)
        async with pipeline.run_dispatcher():
            await pipeline.enqueue(1, 2, submit_at=START_TIME + 5)
            await pipeline.advance_when_idle(5)
            await wait_for_length(pipeline.nodes.posts, 1)
        assert pipeline.share_states() == {1: ShareState.PROVING, 2: ShareState.SENT}, "cancelled: left unchanged"
    async with open_pipeline(tmp_path / "queue.db", clock=clock) as pipeline:
        assert await pipeline.store.run_batches(shares.recover) == 1
        assert pipeline.read_share(1, "state, due_ms, attempts") == (ShareState.WAITING, (START_TIME + 5) * 1000, 0)
        async with pipeline.run_dispatcher():
            await wait_until(lambda: pipeline.nodes.posts)
            assert pipeline.prover.positions == [1], "the other share's message is on disk and not proven again"


@pytest.mark.parametrize("condition", ["nothing due", "paused", "no round", "held back by the chain"])
async def test_loop_sleeps_when_idle(tmp_path: Path, condition: str) -> None:
    async with open_pipeline(tmp_path / "queue.db", stale_after=7200.0) as pipeline, pipeline.run_dispatcher():
        await pipeline.enqueue(1, submit_at=START_TIME + 600)
        if condition == "paused":
            pipeline.circuits.select_initial("svote-test", "", None)
            pipeline.endpoints.chain_id = "another"
            pipeline.clock.advance(600)
        elif condition == "no round":
            pipeline.trees.newest = None
            pipeline.clock.advance(600)
        elif condition == "held back by the chain":
            pipeline.clock.set_wall_clock(1000)
        await pipeline.settle_dispatcher()
        assert pipeline.prover.started_proofs == []
        assert await pipeline.count_idle_turns() == 0


@pytest.mark.rule("R8")
async def test_new_share_wakes_loop_only_if_due_before_next_iteration(pipeline: Pipeline) -> None:
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1, submit_at=START_TIME + 20)
        await pipeline.settle_dispatcher()
        turns = pipeline.gate_checks
        await pipeline.enqueue(2, 3, submit_at=START_TIME + 25)
        assert await pipeline.count_idle_turns() == 0
        await pipeline.enqueue(4, submit_at=START_TIME + 10)
        await wait_until(lambda: pipeline.gate_checks > turns)
        await pipeline.advance_when_idle(10)
        await wait_until(lambda: pipeline.prover.started_proofs == [(4, START_TIME + 10.0)])
        await pipeline.advance_when_idle(15)
        await wait_for_length(pipeline.prover.started_proofs, 4)
        assert sorted(pipeline.prover.positions) == [1, 2, 3, 4]


@pytest.mark.rule("R8")
async def test_dispatch_waits_until_blocks_since_last_stop_are_read(pipeline: Pipeline) -> None:
    """A share of a restored database may have been confirmed after the backup."""
    pipeline.listener.is_ready = False
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1, 2)
        await pipeline.settle_dispatcher()
        assert pipeline.prover.started_proofs == []
        assert "last shutdown" in str(pipeline.dispatcher.pause_reason)
        await pipeline.count_on_chain(1)
        pipeline.listener.is_ready = True
        pipeline.dispatcher.wake()
        await wait_until(lambda: pipeline.prover.started_proofs)
        assert pipeline.prover.positions == [2]


async def test_dispatch_pauses_when_the_queue_is_not_writable(pipeline: Pipeline) -> None:
    await pipeline.enqueue(1)
    disk = SimpleNamespace(write_error="no space")
    pipeline.gates.store = cast(Store, disk)
    async with pipeline.run_dispatcher():
        await pipeline.settle_dispatcher()
        assert pipeline.prover.started_proofs == []
        assert str(pipeline.dispatcher.pause_reason) == "the queue cannot be written"
        disk.write_error = None
        pipeline.dispatcher.wake()
        await wait_until(lambda: pipeline.prover.started_proofs)


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), StoreError("the disk is full")])
async def test_error_in_one_share_releases_it_and_blocks_no_other(pipeline: Pipeline, fault: Exception) -> None:
    pipeline.prover.failures[1] = [fault]
    async with pipeline.run_dispatcher():
        await pipeline.enqueue(1, *range(2, 12))
        await wait_for_length(pipeline.nodes.posts, 10)
        assert pipeline.read_share(1, "state, attempts") == (ShareState.PROVING, 0), "delayed for a moment"
        await pipeline.advance_when_idle(2)
        await wait_for_length(pipeline.nodes.posts, 11)
        assert pipeline.read_share(1, "state, attempts, due_ms") == (ShareState.SENT, 0, START_TIME * 1000)


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
        await pipeline.store.run_batches(rounds.fail_unconfirmed, ROUND, note="the round closed")
        with capture_logs() as logs:
            slow.set()
            await wait_until(lambda: pipeline.dispatcher.claimed_count == 0)
            await pipeline.settle_dispatcher()
    assert [entry for entry in logs if entry["log_level"] in ("warning", "error")] == []
    assert pipeline.read_share(1, "state, attempts, crashes") == (ShareState.FAILED, 0, 0)
    assert pipeline.nodes.posts == []
