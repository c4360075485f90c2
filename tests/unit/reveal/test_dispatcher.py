"""The dispatch loop: when and in which order it dispatches, and what wakes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from helper.core.share import ShareState
from helper.errors import ProofFailed
from helper.reveal import retention
from helper.store.store import Store
from tests.support.fakes import (
    OTHER_ROUND,
    START_TIME,
    TIMEOUT_SECONDS,
    CountingClock,
    create_round,
    wait_for_length,
    wait_until,
)
from tests.support.queue_pipeline import Pipeline, open_pipeline


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[Pipeline]:
    async with open_pipeline(tmp_path / "queue.db") as opened:
        yield opened


def has_slept_again(line: Pipeline, sleeps: int) -> bool:
    return line.clock.sleep_count >= sleeps


@pytest.mark.rule("R1", "R4", "R6")
async def test_dispatch_starts_at_the_exact_due_second(line: Pipeline) -> None:
    async with line.run_dispatcher():
        await line.enqueue(1, submit_at=START_TIME + 10)
        await line.advance_when_idle(9.875)
        await line.settle_dispatcher()
        assert line.prover.started_proofs == []
        line.clock.advance(0.125)
        await wait_until(lambda: line.prover.started_proofs)
        assert line.prover.started_proofs == [(1, START_TIME + 10.0)]


@pytest.mark.rule("R4")
async def test_dispatch_waits_when_due_time_exceeds_block_time_by_tolerance(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path / "queue.db", stale_after=7200.0) as line, line.run_dispatcher():
        for position, ahead in ((1, 100), (2, 120), (3, 121), (4, 1800)):
            await line.enqueue(position, submit_at=START_TIME + ahead)
        line.clock.set_wall_clock(3600)
        await line.settle_dispatcher()
        await wait_for_length(line.nodes.posts, 2)
        await line.settle_dispatcher()
        assert sorted(line.prover.positions) == [1, 2], "nothing later than the chain's newest block and 120 s"
        assert await line.count_idle_turns() == 0
        line.show_block(time=START_TIME + 5.0)
        await line.settle_dispatcher()
        assert line.dispatcher.pause_reason is not None, "a new block shows how far off the clock is"
        assert sorted(line.prover.positions) == [1, 2]
        line.clock.set_wall_clock(-3600)
        line.clock.advance(121)
        line.show_block()
        await line.settle_dispatcher()
        await wait_until(lambda: 3 in line.prover.positions)
        assert line.prover.positions[2:] == [3]


@pytest.mark.rule("R4")
async def test_dispatch_pauses_when_clock_set_forward_makes_all_nodes_stale(line: Pipeline) -> None:
    async with line.run_dispatcher():
        await line.enqueue(1, submit_at=START_TIME + 600)
        line.clock.set_wall_clock(3600)
        await line.settle_dispatcher()
        assert str(line.dispatcher.pause_reason) == "no chain node is in sync"
        assert line.prover.started_proofs == []


@pytest.mark.rule("R4")
async def test_dispatch_is_late_and_never_early_when_clock_is_set_back(line: Pipeline) -> None:
    async with line.run_dispatcher():
        await line.enqueue(1, submit_at=START_TIME + 10)
        await line.advance_when_idle(9)
        line.clock.set_wall_clock(-60)
        line.show_block()
        line.clock.advance(30)
        await line.settle_dispatcher()
        assert line.prover.started_proofs == []
        line.clock.advance(31)
        await wait_until(lambda: line.prover.started_proofs)
        assert line.prover.started_proofs == [(1, START_TIME + 10.0)]


@pytest.mark.rule("R5")
async def test_dispatch_uses_keyed_order_and_limits_concurrency_to_slots(line: Pipeline) -> None:
    arrivals = list(range(1, 25))
    async with line.run_dispatcher():
        await line.enqueue(*arrivals, submit_at=START_TIME + 5)
        keyed = [row[0] for row in line.query_rows("SELECT tree_position FROM shares ORDER BY due_ms, rank")]
        await line.advance_when_idle(5)
        await wait_for_length(line.nodes.posts, len(arrivals))
    assert line.prover.positions == keyed
    assert keyed != arrivals
    assert line.prover.max_running == 2, "two slots, both used"


@pytest.mark.rule("R5")
async def test_dispatch_continues_during_a_slow_proof(line: Pipeline) -> None:
    slow = line.prover.block(1)
    async with line.run_dispatcher():
        await line.enqueue(1)
        await wait_until(lambda: line.prover.started_proofs)
        for second in range(1, 9):
            await line.enqueue(10 + second, submit_at=START_TIME + second)
        for second in range(1, 9):
            await line.advance_when_idle(1)
            await wait_for_length(line.nodes.posts, second)
        assert line.prover.started_proofs[1:] == [(10 + second, float(START_TIME + second)) for second in range(1, 9)]
        assert line.read_share(1) == (ShareState.WITNESSED,)
        slow.set()
        await wait_for_length(line.nodes.posts, 9)


async def test_dispatch_claims_at_most_two_shares_per_prover(line: Pipeline) -> None:
    held = [line.prover.block(position) for position in range(1, 11)]
    async with line.run_dispatcher():
        await line.enqueue(*range(1, 11))
        await wait_until(lambda: line.prover.running == 2)
        await line.settle_dispatcher()
        assert list(line.share_states().values()).count(ShareState.WITNESSED) == line.dispatcher.claimed_count == 4
        assert await line.count_idle_turns() == 0
        for event in held:
            event.set()
        await wait_for_length(line.nodes.posts, 10)
    assert line.dispatcher.claimed_count == 0


@pytest.mark.rule("R7")
async def test_loop_runs_alert_purge_dispatch_and_sleep_in_order(
    line: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "RUN_PATIENCE", TIMEOUT_SECONDS)  # on a busy machine the purge takes longer
    await line.store.save_rounds([create_round(OTHER_ROUND)], START_TIME)
    await line.store.mark_closed(OTHER_ROUND, START_TIME - 30 * 3600)
    await line.enqueue(1)
    line.store.calls.clear()
    async with line.run_dispatcher():
        await wait_until(lambda: line.nodes.posts)
        assert line.store.calls[:4] == ["mark_alerted", "purge", "next_due_ms", "claim_due"]
    assert line.rounds.forgotten == [OTHER_ROUND]


@pytest.mark.rule("R7")
async def test_loop_sleeps_at_most_30_seconds(line: Pipeline) -> None:
    async with line.run_dispatcher():
        turns = line.gate_checks
        for _ in range(29):
            sleeps = line.clock.sleep_count + 1
            line.clock.advance(1)
            await wait_until(partial(has_slept_again, line, sleeps))
        assert line.gate_checks == turns, "it looks at the clock each second, and at nothing else"
        line.clock.advance(1)
        await wait_until(lambda: line.gate_checks > turns)


@pytest.mark.rule("R2", "R8")
async def test_loop_wakes_immediately_for_a_new_share(line: Pipeline) -> None:
    async with line.run_dispatcher():
        await line.enqueue(1)
        await wait_until(lambda: line.nodes.posts)
        assert line.prover.started_proofs == [(1, float(START_TIME))], "no time has passed"


@pytest.mark.rule("R8")
async def test_loop_dispatches_a_share_enqueued_while_busy(line: Pipeline) -> None:
    async with line.run_dispatcher():
        arrival: list[asyncio.Task[None]] = []
        line.store.after_call["next_due_ms"] = lambda: arrival.append(asyncio.create_task(line.enqueue(1)))
        # The share is enqueued after the loop has read the next due time, and before it sleeps.
        await line.settle_dispatcher()
        await wait_until(lambda: line.nodes.posts)


@pytest.mark.rule("R8", "R11")
async def test_dispatch_retries_a_share_when_its_delay_ends(line: Pipeline) -> None:
    line.prover.failures[1] = [ProofFailed("the witness does not fit")]
    async with line.run_dispatcher():
        await line.enqueue(1)
        await wait_until(lambda: line.read_share(1, "attempts") == (1,))
        await line.advance_when_idle(2)
        await wait_until(lambda: line.nodes.posts)
        assert line.prover.started_proofs == [(1, float(START_TIME)), (1, START_TIME + 2.0)]


@pytest.mark.rule("R4", "R6")
async def test_dispatch_of_a_share_due_just_after_a_claim_is_not_delayed(line: Pipeline) -> None:
    async with line.run_dispatcher():
        await line.enqueue(1, submit_at=START_TIME + 10)
        line.clock.advance(9.5)
        line.store.after_call["next_due_ms"] = lambda: line.clock.advance(0.625)
        await line.settle_dispatcher()
        line.clock.advance(0.001)
        await wait_until(lambda: line.prover.started_proofs)
        assert line.prover.started_proofs[0][1] < START_TIME + 10.2


@pytest.mark.rule("R9")
async def test_restart_releases_a_claimed_share_at_its_due_time(tmp_path: Path) -> None:
    clock = CountingClock(float(START_TIME))
    async with open_pipeline(tmp_path / "queue.db", clock=clock) as line:
        line.prover.block(1)
        async with line.run_dispatcher():
            await line.enqueue(1, 2, submit_at=START_TIME + 5)
            await line.advance_when_idle(5)
            await wait_for_length(line.nodes.posts, 1)
        assert line.share_states() == {1: ShareState.WITNESSED, 2: ShareState.BROADCAST}, "cancelled: left as they are"
    async with open_pipeline(tmp_path / "queue.db", clock=clock) as line:
        assert await line.store.recover() == 1
        assert line.read_share(1, "state, due_ms, attempts") == (ShareState.RECEIVED, (START_TIME + 5) * 1000, 0)
        async with line.run_dispatcher():
            await wait_until(lambda: line.nodes.posts)
            assert line.prover.positions == [1], "the other's message is on disk: it is not proven again"


@pytest.mark.parametrize("condition", ["nothing due", "paused", "no round", "held back by the chain"])
async def test_loop_sleeps_when_idle(tmp_path: Path, condition: str) -> None:
    async with open_pipeline(tmp_path / "queue.db", stale_after=7200.0) as line, line.run_dispatcher():
        await line.enqueue(1, submit_at=START_TIME + 600)
        if condition == "paused":
            line.circuits.select_initial("svote-test", "", None)
            line.endpoints.chain_id = "another"
            line.clock.advance(600)
        elif condition == "no round":
            line.trees.newest = None
            line.clock.advance(600)
        elif condition == "held back by the chain":
            line.clock.set_wall_clock(1000)
        await line.settle_dispatcher()
        assert line.prover.started_proofs == []
        assert await line.count_idle_turns() == 0


async def test_share_beyond_verified_tree_is_retried_without_spending_an_attempt(line: Pipeline) -> None:
    async with line.run_dispatcher():
        await line.enqueue(5000)
        await wait_until(lambda: line.read_share(5000, "state, stage") == (ShareState.RECEIVED, "tree"))
        await line.settle_dispatcher()
        assert await line.count_idle_turns() == 0, "not over and over"
        assert line.read_share(5000, "attempts, due_ms") == (0, (START_TIME + 2) * 1000)


@pytest.mark.rule("R8")
async def test_new_share_wakes_loop_only_if_due_before_next_iteration(line: Pipeline) -> None:
    async with line.run_dispatcher():
        await line.enqueue(1, submit_at=START_TIME + 20)
        await line.settle_dispatcher()
        turns = line.gate_checks
        await line.enqueue(2, 3, submit_at=START_TIME + 25)
        assert await line.count_idle_turns() == 0
        await line.enqueue(4, submit_at=START_TIME + 10)
        await wait_until(lambda: line.gate_checks > turns)
        await line.settle_dispatcher()
        line.clock.advance(10)
        await wait_until(lambda: line.prover.started_proofs == [(4, START_TIME + 10.0)])
        line.clock.advance(15)
        await wait_for_length(line.prover.started_proofs, 4)
        assert sorted(line.prover.positions) == [1, 2, 3, 4]


@pytest.mark.rule("R8")
async def test_dispatch_waits_until_blocks_since_last_stop_are_read(line: Pipeline) -> None:
    """A share of a restored database may have been counted after the backup."""
    line.listener.is_ready = False
    async with line.run_dispatcher():
        await line.enqueue(1, 2)
        await line.settle_dispatcher()
        assert line.prover.started_proofs == []
        assert "last stop" in str(line.dispatcher.pause_reason)
        await line.count_on_chain(1)
        line.listener.is_ready = True
        line.dispatcher.wake()
        await wait_until(lambda: line.prover.started_proofs)
        assert line.prover.positions == [2]


async def test_dispatch_pauses_when_the_queue_is_not_writable(line: Pipeline) -> None:
    await line.enqueue(1)
    disk = SimpleNamespace(write_error="no space")
    line.health._store = cast(Store, disk)
    async with line.run_dispatcher():
        await line.settle_dispatcher()
        assert line.prover.started_proofs == []
        assert str(line.dispatcher.pause_reason) == "the queue cannot be written"
        disk.write_error = None
        line.dispatcher.wake()
        await wait_until(lambda: line.prover.started_proofs)
