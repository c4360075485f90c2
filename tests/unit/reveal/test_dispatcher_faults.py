"""What goes wrong inside the service: no share is lost to it, no other share waits for it, the loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from helper.core.share import ShareState
from helper.errors import ProofFailed, ProverDied, StoreError
from tests.support.fakes import OTHER_ROUND, ROUND, START, make_round, until, until_length
from tests.support.queue_pipeline import Line, open_line


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    async with open_line(tmp_path / "queue.db") as opened:
        yield opened


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), StoreError("the disk is full")])
async def test_an_error_in_one_share_puts_it_back_and_holds_up_no_other(line: Line, fault: Exception) -> None:
    line.prover.failures[1] = [fault]
    async with line.running():
        await line.put(1, *range(2, 12))
        await until_length(line.nodes.posts, 10)
        assert line.row(1, "state, attempts") == (ShareState.WITNESSED, 0), "kept out of the way for a moment"
        await line.later(2)
        await until_length(line.nodes.posts, 11)
        assert line.row(1, "state, attempts, due_ms") == (ShareState.BROADCAST, 0, START * 1000)


async def test_a_share_that_fails_each_time_by_our_own_fault_is_not_tried_in_a_tight_loop(line: Line) -> None:
    line.prover.failures[1] = [RuntimeError("a bug")] * 5
    async with line.running():
        await line.put(1)
        for tries, wait in enumerate((2, 4, 8, 16), start=1):
            await until_length(line.prover.begun, tries)
            await until(lambda: line.processor.proving == 0)
            await line.settle()
            assert await line.turns_at_rest() == 0
            await line.later(wait)
            line.block()
        await until_length(line.prover.begun, 5)
        assert line.row(1, "attempts") == (0,)


async def test_work_that_is_cancelled_from_elsewhere_is_put_back(line: Line) -> None:
    event = line.prover.hold(1)
    async with line.running():
        await line.put(1)
        await until(lambda: line.prover.running == 1)
        (task,) = [task for task in asyncio.all_tasks() if "_reveal" in repr(task.get_coro())]
        task.cancel()
        event.set()
        await until(lambda: line.processor.proving == 0)
        await line.later(2)
        await until(lambda: line.nodes.posts)


async def test_the_database_may_be_away_for_a_while(line: Line) -> None:
    line.prover.failures[1] = [RuntimeError("a bug")]
    async with line.running():
        await line.put(1)
        await until(lambda: line.processor.proving == 0 and line.prover.begun)
        line.store.broken |= {"claim_due", "release_claim"}
        with capture_logs() as logs:
            await line.put(2)
            for _ in range(5):
                await line.later(1)
            await line.settle()
        told = [entry["error"] for entry in logs if entry["event"] == "dispatch_failed"]
        assert told == ["claim_due failed"], "told once, not once a second"
        assert "release_claim" in line.store.journal
        assert await line.turns_at_rest() == 0
        line.store.broken.clear()
        await line.later(1)
        await until_length(line.nodes.posts, 2)


async def test_the_loop_outlives_errors_that_nobody_thought_of(line: Line) -> None:
    def surprise() -> None:
        raise RuntimeError("a bug")

    async with line.running():
        line.store.after["next_due_ms"] = surprise
        with capture_logs() as logs:
            await line.settle()
        assert [entry["event"] for entry in logs] == ["dispatch_failed"]
        await line.put(1)
        await until(lambda: line.nodes.posts)


@pytest.mark.parametrize("fault", [None, ProofFailed("no"), ProverDied("killed")])
async def test_a_proof_that_ends_after_its_round_was_closed_is_nobodys_fault(
    line: Line, fault: Exception | None
) -> None:
    slow = line.prover.hold(1)
    if fault is not None:
        line.prover.failures[1] = [fault]
    async with line.running():
        await line.put(1)
        await until(lambda: line.prover.begun)
        await line.store.fail_unspent(ROUND, note="the round closed")
        with capture_logs() as logs:
            slow.set()
            await until(lambda: line.processor.proving == 0)
            await line.settle()
    assert [entry for entry in logs if entry["log_level"] in ("warning", "error")] == []
    assert line.row(1, "state, attempts, crashes") == (ShareState.FAILED, 0, 0)
    assert line.nodes.posts == []


async def test_neither_a_slow_node_nor_a_great_purge_holds_up_a_due_share(line: Line) -> None:
    line.rounds.hold = asyncio.Event()
    async with line.running():
        await line.put(1)
        await until(lambda: line.nodes.posts)
        await line.put(2)
        await until_length(line.nodes.posts, 2)
        line.rounds.hold.set()


async def test_an_error_while_rounds_are_tended_stops_no_dispatch(line: Line) -> None:
    line.store.broken.add("mark_alerted")
    await line.store.save_rounds([make_round(OTHER_ROUND)], START)
    await line.store.mark_closed(OTHER_ROUND, START)
    async with line.running():
        await line.put(1)
        await until(lambda: line.nodes.posts)
    assert "mark_alerted" in line.store.journal
