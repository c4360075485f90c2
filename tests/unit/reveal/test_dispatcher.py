"""The loop: when a share is dispatched, in which order, and what wakes it."""

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
from tests.support.fakes import OTHER_ROUND, PATIENCE, START, CountingClock, make_round, until, until_length
from tests.support.queue_pipeline import Line, open_line


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    async with open_line(tmp_path / "queue.db") as opened:
        yield opened


def sleeping_again(line: Line, sleeps: int) -> bool:
    return line.clock.sleeps >= sleeps


@pytest.mark.rule("R1", "R4", "R6")
async def test_dispatch_starts_at_the_exact_due_second(line: Line) -> None:
    async with line.running():
        await line.put(1, submit_at=START + 10)
        await line.later(9.875)
        await line.settle()
        assert line.prover.begun == []
        line.clock.advance(0.125)
        await until(lambda: line.prover.begun)
        assert line.prover.begun == [(1, START + 10.0)]


@pytest.mark.rule("R4")
async def test_dispatch_waits_when_due_time_exceeds_block_time_by_tolerance(tmp_path: Path) -> None:
    async with open_line(tmp_path / "queue.db", stale_after=7200.0) as line, line.running():
        for position, ahead in ((1, 100), (2, 120), (3, 121), (4, 1800)):
            await line.put(position, submit_at=START + ahead)
        line.clock.jump(3600)
        await line.settle()
        await until_length(line.nodes.posts, 2)
        await line.settle()
        assert sorted(line.prover.positions) == [1, 2], "nothing later than the chain's newest block and 120 s"
        assert await line.turns_at_rest() == 0
        line.block(time=START + 5.0)
        await line.settle()
        assert line.processor.paused is not None, "a new block shows how far off the clock is"
        assert sorted(line.prover.positions) == [1, 2]
        line.clock.jump(-3600)
        line.clock.advance(121)
        line.block()
        await line.settle()
        await until(lambda: 3 in line.prover.positions)
        assert line.prover.positions[2:] == [3]


@pytest.mark.rule("R4")
async def test_dispatch_pauses_when_clock_set_forward_makes_all_nodes_stale(line: Line) -> None:
    async with line.running():
        await line.put(1, submit_at=START + 600)
        line.clock.jump(3600)
        await line.settle()
        assert str(line.processor.paused) == "no chain node is in sync"
        assert line.prover.begun == []


@pytest.mark.rule("R4")
async def test_dispatch_is_late_and_never_early_when_clock_is_set_back(line: Line) -> None:
    async with line.running():
        await line.put(1, submit_at=START + 10)
        await line.later(9)
        line.clock.jump(-60)
        line.block()
        line.clock.advance(30)
        await line.settle()
        assert line.prover.begun == []
        line.clock.advance(31)
        await until(lambda: line.prover.begun)
        assert line.prover.begun == [(1, START + 10.0)]


@pytest.mark.rule("R5")
async def test_dispatch_uses_keyed_order_and_limits_concurrency_to_slots(line: Line) -> None:
    arrivals = list(range(1, 25))
    async with line.running():
        await line.put(*arrivals, submit_at=START + 5)
        keyed = [row[0] for row in line.rows("SELECT tree_position FROM shares ORDER BY due_ms, rank")]
        await line.later(5)
        await until_length(line.nodes.posts, len(arrivals))
    assert line.prover.positions == keyed
    assert keyed != arrivals
    assert line.prover.most == 2, "two slots, both used"


@pytest.mark.rule("R5")
async def test_dispatch_continues_during_a_slow_proof(line: Line) -> None:
    slow = line.prover.hold(1)
    async with line.running():
        await line.put(1)
        await until(lambda: line.prover.begun)
        for second in range(1, 9):
            await line.put(10 + second, submit_at=START + second)
        for second in range(1, 9):
            await line.later(1)
            await until_length(line.nodes.posts, second)
        assert line.prover.begun[1:] == [(10 + second, float(START + second)) for second in range(1, 9)]
        assert line.row(1) == (ShareState.WITNESSED,)
        slow.set()
        await until_length(line.nodes.posts, 9)


async def test_dispatch_claims_at_most_two_shares_per_prover(line: Line) -> None:
    held = [line.prover.hold(position) for position in range(1, 11)]
    async with line.running():
        await line.put(*range(1, 11))
        await until(lambda: line.prover.running == 2)
        await line.settle()
        assert list(line.states().values()).count(ShareState.WITNESSED) == line.processor.proving == 4
        assert await line.turns_at_rest() == 0
        for event in held:
            event.set()
        await until_length(line.nodes.posts, 10)
    assert line.processor.proving == 0


@pytest.mark.rule("R7")
async def test_loop_runs_alert_purge_dispatch_and_sleep_in_order(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "RUN_PATIENCE", PATIENCE)  # on a busy machine the purge takes its time
    await line.store.save_rounds([make_round(OTHER_ROUND)], START)
    await line.store.mark_closed(OTHER_ROUND, START - 30 * 3600)
    await line.put(1)
    line.store.journal.clear()
    async with line.running():
        await until(lambda: line.nodes.posts)
        assert line.store.journal[:4] == ["mark_alerted", "purge", "next_due_ms", "claim_due"]
    assert line.rounds.forgotten == [OTHER_ROUND]


@pytest.mark.rule("R7")
async def test_loop_sleeps_at_most_30_seconds(line: Line) -> None:
    async with line.running():
        turns = line.turns
        for _ in range(29):
            sleeps = line.clock.sleeps + 1
            line.clock.advance(1)
            await until(partial(sleeping_again, line, sleeps))
        assert line.turns == turns, "it looks at the clock each second, and at nothing else"
        line.clock.advance(1)
        await until(lambda: line.turns > turns)


@pytest.mark.rule("R2", "R8")
async def test_loop_wakes_immediately_for_a_new_share(line: Line) -> None:
    async with line.running():
        await line.put(1)
        await until(lambda: line.nodes.posts)
        assert line.prover.begun == [(1, float(START))], "no time has passed"


@pytest.mark.rule("R8")
async def test_loop_dispatches_a_share_enqueued_while_busy(line: Line) -> None:
    async with line.running():
        arrival: list[asyncio.Task[None]] = []
        line.store.after["next_due_ms"] = lambda: arrival.append(asyncio.create_task(line.put(1)))
        await line.settle()  # the share comes after the loop has looked for what is due, and before it sleeps
        await until(lambda: line.nodes.posts)


@pytest.mark.rule("R8", "R11")
async def test_dispatch_retries_a_share_when_its_delay_ends(line: Line) -> None:
    line.prover.failures[1] = [ProofFailed("the witness does not fit")]
    async with line.running():
        await line.put(1)
        await until(lambda: line.row(1, "attempts") == (1,))
        await line.later(2)
        await until(lambda: line.nodes.posts)
        assert line.prover.begun == [(1, float(START)), (1, START + 2.0)]


@pytest.mark.rule("R4", "R6")
async def test_dispatch_of_a_share_due_just_after_a_claim_is_not_delayed(line: Line) -> None:
    async with line.running():
        await line.put(1, submit_at=START + 10)
        line.clock.advance(9.5)
        line.store.after["next_due_ms"] = lambda: line.clock.advance(0.625)
        await line.settle()
        line.clock.advance(0.001)
        await until(lambda: line.prover.begun)
        assert line.prover.begun[0][1] < START + 10.2


@pytest.mark.rule("R9")
async def test_restart_releases_a_claimed_share_at_its_due_time(tmp_path: Path) -> None:
    clock = CountingClock(float(START))
    async with open_line(tmp_path / "queue.db", clock=clock) as line:
        line.prover.hold(1)
        async with line.running():
            await line.put(1, 2, submit_at=START + 5)
            await line.later(5)
            await until_length(line.nodes.posts, 1)
        assert line.states() == {1: ShareState.WITNESSED, 2: ShareState.BROADCAST}, "cancelled: left as they are"
    async with open_line(tmp_path / "queue.db", clock=clock) as line:
        assert await line.store.recover() == 1
        assert line.row(1, "state, due_ms, attempts") == (ShareState.RECEIVED, (START + 5) * 1000, 0)
        async with line.running():
            await until(lambda: line.nodes.posts)
            assert line.prover.positions == [1], "the other's message is on disk: it is not proven again"


@pytest.mark.parametrize("why", ["nothing due", "paused", "no round", "held back by the chain"])
async def test_loop_sleeps_when_idle(tmp_path: Path, why: str) -> None:
    async with open_line(tmp_path / "queue.db", stale_after=7200.0) as line, line.running():
        await line.put(1, submit_at=START + 600)
        if why == "paused":
            line.circuits.begin("svote-test", "", None)
            line.endpoints.chain_id = "another"
            line.clock.advance(600)
        elif why == "no round":
            line.trees.newest = None
            line.clock.advance(600)
        elif why == "held back by the chain":
            line.clock.jump(1000)
        await line.settle()
        assert line.prover.begun == []
        assert await line.turns_at_rest() == 0


async def test_share_beyond_verified_tree_is_retried_without_spending_an_attempt(line: Line) -> None:
    async with line.running():
        await line.put(5000)
        await until(lambda: line.row(5000, "state, stage") == (ShareState.RECEIVED, "tree"))
        await line.settle()
        assert await line.turns_at_rest() == 0, "not over and over"
        assert line.row(5000, "attempts, due_ms") == (0, (START + 2) * 1000)


@pytest.mark.rule("R8")
async def test_new_share_wakes_loop_only_if_due_before_next_iteration(line: Line) -> None:
    async with line.running():
        await line.put(1, submit_at=START + 20)
        await line.settle()
        turns = line.turns
        await line.put(2, 3, submit_at=START + 25)
        assert await line.turns_at_rest() == 0
        await line.put(4, submit_at=START + 10)
        await until(lambda: line.turns > turns)
        await line.settle()
        line.clock.advance(10)
        await until(lambda: line.prover.begun == [(4, START + 10.0)])
        line.clock.advance(15)
        await until_length(line.prover.begun, 4)
        assert sorted(line.prover.positions) == [1, 2, 3, 4]


@pytest.mark.rule("R8")
async def test_dispatch_waits_until_blocks_since_last_stop_are_read(line: Line) -> None:
    """A share of a restored database may have been counted since the backup."""
    line.listener.arrived = False
    async with line.running():
        await line.put(1, 2)
        await line.settle()
        assert line.prover.begun == []
        assert "last stop" in str(line.processor.paused)
        await line.count_on_chain(1)
        line.listener.arrived = True
        line.processor.wake()
        await until(lambda: line.prover.begun)
        assert line.prover.positions == [2]


async def test_dispatch_pauses_when_the_queue_is_not_writable(line: Line) -> None:
    await line.put(1)
    disk = SimpleNamespace(trouble="no space")
    line.vitals._store = cast(Store, disk)
    async with line.running():
        await line.settle()
        assert line.prover.begun == []
        assert str(line.processor.paused) == "the queue cannot be written"
        disk.trouble = None
        line.processor.wake()
        await until(lambda: line.prover.begun)
