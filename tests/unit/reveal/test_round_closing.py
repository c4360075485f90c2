"""The end of a round: closed by the chain, then reported, then purged with all its data."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3

import pytest
from structlog.testing import capture_logs

from helper.chain.round_registry import to_stored_round
from helper.core.share import ShareState
from helper.errors import StoreError
from helper.store import shares
from helper.store.models import EnqueueResult, StoredRound
from helper.store.rounds import mark_alerted, mark_closed, save_rounds
from tests.support.fakes import (
    HOUR_SECONDS,
    OTHER_ROUND,
    ROUND,
    START_TIME,
    create_round,
    create_share,
    nullifier_of,
    wait_until,
)
from tests.support.queue_pipeline import Pipeline


async def check_after_block(pipeline: Pipeline) -> None:
    """Check the rounds after a new block, a second or more after the last check."""
    pipeline.rounds.revision += 1
    await check_after_second(pipeline)


async def check_after_second(pipeline: Pipeline) -> None:
    """Check the rounds a second later, without a new block."""
    pipeline.clock.advance(1)
    await pipeline.closing.run_once()


async def enqueue_mixed(pipeline: Pipeline) -> None:
    """Four shares of one round: pending, sent, failed, confirmed."""
    for position in (2, 3, 4):
        await pipeline.enqueue(position)
        queued = await pipeline.claim_due_share()
        if position == 3:
            await pipeline.retries.fail_share(queued.id, "broadcast", "invalid message field")
        else:
            await pipeline.revealer.prove(queued)
    await pipeline.enqueue(1, submit_at=START_TIME + 3600)
    await pipeline.count_on_chain(4)
    assert pipeline.share_states() == {1: ShareState.WAITING, 2: ShareState.SENT, 3: ShareState.FAILED}


async def close_mixed(pipeline: Pipeline) -> None:
    """Close the round of these shares, and check it."""
    await enqueue_mixed(pipeline)
    pipeline.rounds.closed.add(ROUND)
    await check_after_block(pipeline)


async def check_closed_long_ago(pipeline: Pipeline) -> None:
    await pipeline.store.run(mark_closed, ROUND, START_TIME - 25 * HOUR_SECONDS)
    await check_after_block(pipeline)


async def test_round_is_closed_only_by_the_chain(pipeline: Pipeline) -> None:
    await enqueue_mixed(pipeline)
    before = pipeline.share_states()
    pipeline.clock.set_wall_clock(400 * 24 * HOUR_SECONDS)
    for _ in range(3):
        await check_after_block(pipeline)
    assert pipeline.share_states() == before, "neither the local clock nor the end of the vote closes, fails or purges"
    assert pipeline.rounds.forgotten == []
    assert [stored.closed_at for stored in await pipeline.store.list_rounds()] == [None]


@pytest.mark.rule("R15")
async def test_closed_round_fails_unconfirmed_shares_reports_once_and_keeps_witnesses(pipeline: Pipeline) -> None:
    await enqueue_mixed(pipeline)
    pipeline.rounds.closed.add(ROUND)
    with capture_logs() as logs:
        for _ in range(3):
            await check_after_block(pipeline)
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert [(e["event"], e["shares"], e["round"]) for e in errors] == [
        ("round_closed_with_unconfirmed_shares", 3, ROUND.hex())
    ]
    assert pipeline.share_states() == {1: ShareState.FAILED, 2: ShareState.FAILED, 3: ShareState.FAILED}
    assert await pipeline.store.count_shares() == {ROUND: {ShareState.FAILED: 3, ShareState.CONFIRMED: 1}}
    assert pipeline.stats.counts["expired"] == 2, "the third share had failed before"
    assert pipeline.query_rows("SELECT length(witness) FROM shares") == [(704,)] * 3


@pytest.mark.rule("R15")
async def test_unconfirmed_shares_are_reported_when_stored_counts_are_zero(pipeline: Pipeline) -> None:
    await enqueue_mixed(pipeline)
    with contextlib.closing(sqlite3.connect(pipeline.store.path, isolation_level=None)) as conn:
        conn.execute("UPDATE counters SET n = 0")
    pipeline.rounds.closed.add(ROUND)
    with capture_logs() as logs:
        await check_after_block(pipeline)
    assert [entry["shares"] for entry in logs if entry["log_level"] == "error"] == [2]


async def test_round_with_all_shares_confirmed_closes_without_error(pipeline: Pipeline) -> None:
    await pipeline.enqueue(1)
    await pipeline.count_on_chain(1)
    pipeline.rounds.closed.add(ROUND)
    with capture_logs() as logs:
        await check_after_block(pipeline)
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("round_closed", "info")]


@pytest.mark.rule("R12")
async def test_late_block_confirms_a_share_failed_by_round_close(pipeline: Pipeline) -> None:
    await close_mixed(pipeline)
    assert await pipeline.count_on_chain(1)
    assert sorted(pipeline.share_states()) == [2, 3]


@pytest.mark.rule("R7", "R14")
async def test_purge_after_retention_deletes_all_data_of_the_round(pipeline: Pipeline) -> None:
    await close_mixed(pipeline)
    pipeline.clock.advance(24 * HOUR_SECONDS - 2)
    await check_after_second(pipeline)
    assert pipeline.store.calls.count("purge") == 0
    await check_after_second(pipeline)
    calls = dict.fromkeys(name for name in pipeline.store.calls if name in {"mark_alerted", "purge"})
    assert list(calls) == ["mark_alerted", "purge"]
    assert pipeline.rounds.forgotten == [ROUND]
    for table in ("shares", "reveals", "history", "tombstones", "spent", "round_keys", "rounds"):
        assert pipeline.query_rows(f"SELECT count(*) FROM {table}") == [(0,)], table


@pytest.mark.rule("R14")
async def test_purge_deletes_the_tombstone_key(pipeline: Pipeline) -> None:
    share = create_share(4)
    nullifier = nullifier_of(share.primary_blind)
    await enqueue_mixed(pipeline)
    assert (
        await pipeline.store.run(shares.EnqueueOperation(share, nullifier, now=START_TIME)) is EnqueueResult.DUPLICATE
    )
    (before,) = pipeline.query_rows("SELECT mac_key FROM round_keys")
    await check_closed_long_ago(pipeline)
    await pipeline.store.run(save_rounds, [to_stored_round(create_round(ROUND))], START_TIME)
    assert await pipeline.store.run(shares.EnqueueOperation(share, nullifier, now=START_TIME)) is EnqueueResult.QUEUED
    (after,) = pipeline.query_rows("SELECT mac_key FROM round_keys")
    assert before != after, "share keys cannot be matched against an old backup"


async def test_purge_does_not_change_other_rounds(pipeline: Pipeline) -> None:
    await enqueue_mixed(pipeline)
    await pipeline.store.run(save_rounds, [to_stored_round(create_round(OTHER_ROUND))], START_TIME)
    other = create_share(7, round_id=OTHER_ROUND)
    await pipeline.store.run(shares.EnqueueOperation(other, nullifier_of(other.primary_blind), now=START_TIME))
    await check_closed_long_ago(pipeline)
    assert await pipeline.store.count_shares() == {OTHER_ROUND: {ShareState.WAITING: 1}}
    assert pipeline.rounds.forgotten == [ROUND]


@pytest.mark.rule("R7")
async def test_loop_reports_then_purges_and_repeats_what_failed(pipeline: Pipeline) -> None:
    await pipeline.store.run(mark_closed, ROUND, START_TIME - 30 * HOUR_SECONDS)
    pipeline.store.failing_calls.add("mark_alerted")
    pipeline.store.calls.clear()
    task = asyncio.create_task(pipeline.closing.run())
    with capture_logs() as logs:
        pipeline.closing.wake_if_due()
        await wait_until(lambda: pipeline.store.calls[-1:] == ["mark_alerted"])
        assert pipeline.rounds.forgotten == []
        pipeline.store.failing_calls.clear()
        pipeline.closing.wake_if_due()
        await wait_until(lambda: pipeline.rounds.forgotten)
        task.cancel()
    assert pipeline.store.calls[-2:] == ["mark_alerted", "purge"]
    assert "round_closing_failed" in [entry["event"] for entry in logs]


async def test_rounds_are_not_read_without_chain_change_or_due_purge(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    await close_mixed(pipeline)
    await check_after_block(pipeline)
    rounds, reads = pipeline.store.list_rounds, 0

    async def counted() -> list[StoredRound]:
        nonlocal reads
        reads += 1
        return await rounds()

    monkeypatch.setattr(pipeline.store, "list_rounds", counted)
    for _ in range(50):
        await check_after_second(pipeline)
    assert reads == 0
    await check_after_block(pipeline)
    assert reads == 1


async def test_error_with_one_round_does_not_stop_others(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    process = pipeline.closing._process_round
    await pipeline.store.run(save_rounds, [to_stored_round(create_round(OTHER_ROUND))], START_TIME)
    processed: list[bytes] = []

    async def fail_first(stored: StoredRound) -> float:
        processed.append(stored.round_id)
        if len(processed) == 1:
            raise StoreError("damaged")
        return await process(stored)

    monkeypatch.setattr(pipeline.closing, "_process_round", fail_first)
    with pytest.raises(StoreError):
        await check_after_block(pipeline)
    assert sorted(processed) == sorted([ROUND, OTHER_ROUND])


@pytest.mark.rule("R14")
async def test_frozen_round_is_neither_failed_nor_purged(pipeline: Pipeline) -> None:
    await enqueue_mixed(pipeline)
    pipeline.rounds.closed.add(ROUND)
    pipeline.rounds.freeze_reasons[ROUND] = "no longer listed"
    before = pipeline.share_states()
    await check_after_block(pipeline)
    assert pipeline.share_states() == before
    del pipeline.rounds.freeze_reasons[ROUND]
    await check_after_block(pipeline)
    pipeline.rounds.freeze_reasons[ROUND] = "no longer listed"
    pipeline.clock.advance(25 * HOUR_SECONDS)
    await check_after_block(pipeline)
    await check_after_block(pipeline)
    assert pipeline.rounds.forgotten == []
    del pipeline.rounds.freeze_reasons[ROUND]
    await check_after_block(pipeline)
    assert pipeline.rounds.forgotten == [ROUND]


async def test_clock_set_years_ahead_purges_nothing(pipeline: Pipeline) -> None:
    await close_mixed(pipeline)
    (stored,) = await pipeline.store.list_rounds()
    assert stored.closed_at is not None
    assert abs(stored.closed_at - pipeline.clock.now()) < 10
    pipeline.clock.set_wall_clock(10 * 365 * 24 * HOUR_SECONDS)
    for _ in range(3):
        await check_after_block(pipeline)
    assert pipeline.rounds.forgotten == []
    pipeline.clock.advance(24 * HOUR_SECONDS)
    await check_after_block(pipeline)
    assert pipeline.rounds.forgotten == [ROUND]


async def test_round_closed_while_clock_is_years_ahead_is_purged_on_time(pipeline: Pipeline) -> None:
    await enqueue_mixed(pipeline)
    pipeline.clock.set_wall_clock(10 * 365 * 24 * HOUR_SECONDS)
    pipeline.rounds.closed.add(ROUND)
    await check_after_block(pipeline)
    pipeline.clock.set_wall_clock(-10 * 365 * 24 * HOUR_SECONDS)
    pipeline.clock.advance(24 * HOUR_SECONDS)
    await check_after_block(pipeline)
    assert pipeline.rounds.forgotten == [ROUND]


@pytest.mark.parametrize(("hours", "is_purged"), [(None, False), (0.0, False), (23.9, False), (24.0, True)])
async def test_reported_round_is_purged_by_the_chains_time(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, hours: float | None, is_purged: bool
) -> None:
    await pipeline.store.run(mark_closed, ROUND, START_TIME)
    await pipeline.store.run(mark_alerted, ROUND, START_TIME)
    chain_now = None if hours is None else START_TIME + hours * HOUR_SECONDS
    monkeypatch.setattr(pipeline.rounds, "chain_now", lambda: chain_now)
    await check_after_block(pipeline)
    assert pipeline.rounds.forgotten == [ROUND] * is_purged
