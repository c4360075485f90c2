"""Operator actions: audit log, batches, refusals."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helper.core.share import ShareState
from helper.errors import ActionRefused, NotFound, StoreError
from helper.operations import operator_actions
from helper.operations.operator_actions import BATCH_SHARES
from helper.store import blocks, rounds, shares
from helper.store.models import MOVED, EnqueueResult, QueueFilter
from helper.store.transaction import Transaction
from tests.unit.ingest.admission_fixtures import END, ROUND_ID
from tests.unit.operations.action_fixtures import ANN, NOW, OperationsHarness, nullifier_of, recorded_share
from tests.unit.store.fixtures import OTHER_ROUND, enqueue, make_posted_share

ANY_FILTER = QueueFilter()


async def enqueue_failed(harness: OperationsHarness, *numbers: int, stage: str = "proof") -> list[str]:
    for number in numbers:
        await enqueue(harness.store, make_posted_share(number, round_id=ROUND_ID), now=NOW)
    for queued in await harness.store.run(shares.claim_due, now=NOW, limit=len(numbers), rounds=[ROUND_ID]):
        await harness.store.run(shares.fail, queued.id, stage=stage, note="no")
    return [entry.ref for entry in await harness.store.list_shares(QueueFilter(stage=stage), 99)]


async def test_retry_named_shares_keeps_references_out_of_audit_log(harness: OperationsHarness) -> None:
    refs = await enqueue_failed(harness, *range(3))
    await enqueue(harness.store, make_posted_share(9, round_id=ROUND_ID), now=NOW)
    waiting = (await harness.store.list_shares(QueueFilter(state=ShareState.WAITING), 9))[0].ref

    counts = await harness.operations.retry(ANN, QueueFilter(stage="proof"), [refs[0][:6], refs[1], refs[1], waiting])

    assert counts == {"retried": 2, "closed": 0, "moved": 0, "not_failed": 1}
    (action,) = await harness.store.list_actions(limit=5)
    assert action.wanted == {"stage": "proof", "named": 4}
    assert not any(ref[:6] in repr(action) for ref in (*refs, waiting))


@pytest.mark.parametrize("ref", ["ffffff", "", "../stats"])
async def test_retry_unknown_reference_raises_before_any_change(harness: OperationsHarness, ref: str) -> None:
    await enqueue_failed(harness, 1)
    with pytest.raises(NotFound):
        await harness.operations.retry(ANN, ANY_FILTER, [ref])
    assert await harness.store.list_actions(limit=5) == []


async def test_retry_many_shares_uses_batches_and_accepts_posts_between(
    harness: OperationsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No batch exceeds the limit, and each POST waits for at most two batches."""
    monkeypatch.setattr(operator_actions, "BATCH_SHARES", 20)
    await fill_failed(harness, 2_000)
    batch_sizes: list[int] = []
    retry_failed = shares.retry_failed

    def note_batch(tx: Transaction, ids: Sequence[int], *filters: QueueFilter, **options: Any) -> Counter[str]:
        batch_sizes.append(len(ids))
        return retry_failed(tx, ids, *filters, **options)

    monkeypatch.setattr(operator_actions, "retry_failed", note_batch)
    action = asyncio.create_task(harness.operations.retry(ANN, ANY_FILTER))
    waits: list[int] = []
    for number in range(30):
        while len(batch_sizes) < 3 * number + 3:
            assert not action.done(), "the action has ended before its batches"
            await asyncio.sleep(0)
        posted, before = make_posted_share(100_000 + number, round_id=ROUND_ID), len(batch_sizes)
        assert await enqueue(harness.store, posted, now=NOW) is EnqueueResult.QUEUED
        waits.append(len(batch_sizes) - before)
        assert await harness.store.is_known(posted.share.key)
    assert not action.done(), "the posts happened during the action"

    assert (await action)["retried"] == 2_000
    assert max(batch_sizes) == 20
    assert sum(batch_sizes) == 2_000
    assert max(waits) <= 3


async def fill_failed(harness: OperationsHarness, number: int) -> None:
    """Insert a number of failed shares in one transaction."""

    def fill(tx: Transaction) -> None:
        for n in range(number):
            posted = make_posted_share(n, round_id=ROUND_ID)
            assert shares.EnqueueOperation(posted.share, posted.nullifier, NOW)(tx) is EnqueueResult.QUEUED

    await harness.store._writer.run(fill)
    assert await harness.store.run_batches(rounds.fail_unconfirmed, ROUND_ID, note="failed by the test") == number


async def test_action_failure_is_recorded_with_partial_counts(
    harness: OperationsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enqueue_failed(harness, *range(BATCH_SHARES + 5))
    retry_failed = shares.retry_failed

    def retry_once(tx: Transaction, ids: Sequence[int], *filters: QueueFilter, **options: Any) -> Counter[str]:
        if len(ids) < BATCH_SHARES:
            raise StoreError("the disk is full")
        return retry_failed(tx, ids, *filters, **options)

    monkeypatch.setattr(operator_actions, "retry_failed", retry_once)
    with pytest.raises(StoreError):
        await harness.operations.retry(ANN, ANY_FILTER)
    (action,) = await harness.store.list_actions(limit=5)
    assert action.outcome == {"retried": BATCH_SHARES, "error": "the disk is full"}


async def test_action_foreign_error_records_only_its_type(
    harness: OperationsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enqueue_failed(harness, 1)

    def broken(*_: object, **__: object) -> Counter[str]:
        raise RuntimeError("primary_blind is 0011")

    monkeypatch.setattr(operator_actions, "retry_failed", broken)
    with pytest.raises(RuntimeError):
        await harness.operations.retry(ANN, ANY_FILTER)
    assert [action.outcome for action in await harness.store.list_actions(limit=5)] == [{"error": "RuntimeError"}]


async def test_actions_run_one_after_the_other(harness: OperationsHarness) -> None:
    await enqueue_failed(harness, *range(2 * BATCH_SHARES))
    first, second = await asyncio.gather(
        harness.operations.retry(ANN, ANY_FILTER), harness.operations.retry(ANN, ANY_FILTER)
    )
    assert (first["retried"], second["retried"]) == (2 * BATCH_SHARES, 0)


# ---------------------------------------------------------------------- purges


async def test_purge_closed_round_deletes_its_data(harness: OperationsHarness) -> None:
    await enqueue_failed(harness, 1, 2)
    await harness.store.run(
        blocks.apply_blocks, [(9, 9)], [(ROUND_ID, make_posted_share(1, round_id=ROUND_ID).nullifier)]
    )
    harness.rounds.closed.add(ROUND_ID)
    await harness.store.run(rounds.mark_closed, ROUND_ID, NOW)
    await harness.store.run(rounds.mark_alerted, ROUND_ID, NOW)

    dry_result = await harness.operations.purge(ANN, ROUND_ID, dry_run=True)
    assert await harness.store.count_shares() == {ROUND_ID: {ShareState.FAILED: 1, ShareState.CONFIRMED: 1}}
    counts = await harness.operations.purge(ANN, ROUND_ID)

    assert counts == dry_result == {"received": 0, "witnessed": 0, "submitted": 1, "failed": 1, "broadcast": 0}
    assert (await harness.store.count_shares(), await harness.store.list_rounds()) == ({}, [])
    assert harness.rounds.forgotten == [ROUND_ID]
    (action,) = await harness.store.list_actions(limit=5)
    assert (action.what, action.wanted) == ("purge", {"round": ROUND_ID.hex()})
    assert make_posted_share(2, round_id=ROUND_ID).share.primary_blind not in harness.path.read_bytes()


async def test_purge_requires_round_closed_by_chain_and_reported(harness: OperationsHarness) -> None:
    await enqueue_failed(harness, 1)
    harness.clock.advance(400 * 86_400)

    with pytest.raises(NotFound):
        await harness.operations.purge(ANN, OTHER_ROUND)
    with pytest.raises(ActionRefused, match="chain has not closed"):
        await harness.operations.purge(ANN, ROUND_ID)
    harness.rounds.closed.add(ROUND_ID)
    with pytest.raises(ActionRefused, match="not reported yet"):
        await harness.operations.purge(ANN, ROUND_ID)
    await harness.store.run(rounds.mark_alerted, ROUND_ID, NOW)
    harness.rounds.frozen_reasons[ROUND_ID] = "its end changed"
    with pytest.raises(ActionRefused, match="its end changed"):
        await harness.operations.purge(ANN, ROUND_ID)

    assert await harness.store.count_shares() == {ROUND_ID: {ShareState.FAILED: 1}}
    assert await harness.store.list_actions(limit=5) == []


# ---------------------------------------------------------------------- export


async def read_marks(harness: OperationsHarness) -> list[tuple[int, bytes]]:
    return [(row[0], row[1]) for row in await harness.store._reader.run("SELECT id, row_check FROM shares ORDER BY id")]


@pytest.mark.parametrize("running", [True, False])
async def test_move_leaves_claimed_shares_to_running_helper(tmp_path: Path, running: bool) -> None:
    harness = OperationsHarness(tmp_path / "queue.db", running=running)
    await harness.open()
    share = recorded_share(0, submit_at=END - 10)
    await harness.store.run(shares.EnqueueOperation(share, nullifier_of(share), now=NOW))
    await enqueue(harness.store, make_posted_share(1, round_id=ROUND_ID), now=NOW)
    await harness.store.run(shares.claim_due, now=NOW, limit=1, rounds=[ROUND_ID])

    counts = await harness.operations.move_shares(ANN, ANY_FILTER, 0, await read_marks(harness))

    assert counts == ({"moved": 1, "stayed": 1} if running else {"moved": 2, "stayed": 0})
    assert len(await harness.store.list_shares(QueueFilter(stage=MOVED), 9)) == counts["moved"]
    (action,) = await harness.store.list_actions(limit=5)
    assert action.what == "move"
    await harness.store.close()


async def test_note_export_adds_audit_entry(harness: OperationsHarness) -> None:
    assert await harness.operations.record_export(ANN, QueueFilter(round_id=ROUND_ID, due_before_ms=5000), 2, 7) == {
        "copied": 7
    }
    (action,) = await harness.store.list_actions(limit=5)
    assert (action.what, action.outcome) == ("export", {"copied": 7})
    assert action.wanted == {"round": ROUND_ID.hex(), "due_before": 5, "named": 2}
