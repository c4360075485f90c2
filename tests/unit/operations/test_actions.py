"""Operator actions: audit log, batches, refusals."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path

import pytest

from helper.core.share import ShareState
from helper.errors import ActionRefused, NothingThere, StoreError
from helper.operations.actions import BATCH_SHARES
from helper.store.action_rows import MOVED
from helper.store.operations import shares
from helper.store.rows import Enqueued, QueueFilter
from helper.store.sqlite.store import SqliteStore
from helper.store.transaction import Transaction
from tests.unit.ingest.admission_fixtures import END, ROUND_ID
from tests.unit.operations.action_fixtures import ANN, NOW, Desk, nullifier_of, recorded
from tests.unit.store.fixtures import OTHER_ROUND, posted

ANY = QueueFilter()


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    one = Desk(tmp_path / "queue.db")
    await one.open()
    yield one
    await one.store.close()


async def failed(desk: Desk, *numbers: int, stage: str = "proof") -> list[str]:
    """Enqueue and fail shares; returns their references."""
    for number in numbers:
        one = posted(number, round_id=ROUND_ID)
        await desk.store.enqueue(one.share, one.nullifier, now=NOW)
    for queued in await desk.store.claim_due(now=NOW, limit=len(numbers), rounds=[ROUND_ID]):
        await desk.store.fail(queued.id, stage=stage, note="no", spend_attempt=True)
    return [entry.ref for entry in await desk.store.list_shares(QueueFilter(stage=stage), 99)]


async def test_retry_failed_shares_wakes_dispatcher(desk: Desk) -> None:
    await failed(desk, 1, 2)
    told = await desk.operations.retry(ANN, ANY)
    assert told == {"retried": 2, "closed": 0, "not_failed": 0}
    assert desk.woken == 1
    assert await desk.store.counts() == {ROUND_ID: {ShareState.RECEIVED: 2}}
    (act,) = await desk.store.actions(limit=5)
    assert (act.actor, act.what, act.wanted, act.outcome) == (ANN, "retry", {}, {"retried": 2})


async def test_retry_dry_run_returns_counts_without_change_or_audit_entry(desk: Desk) -> None:
    await failed(desk, 1, 2)
    assert await desk.operations.retry(ANN, ANY, dry=True) == {"retried": 2, "closed": 0, "not_failed": 0}
    assert await desk.store.counts() == {ROUND_ID: {ShareState.FAILED: 2}}
    assert await desk.store.actions(limit=5) == []
    assert desk.woken == 0


async def test_retry_closed_round_skips_its_shares(desk: Desk) -> None:
    await failed(desk, 1, 2)
    desk.judge.closed.add(ROUND_ID)
    assert await desk.operations.retry(ANN, ANY) == {"retried": 0, "closed": 2, "not_failed": 0}
    assert await desk.store.counts() == {ROUND_ID: {ShareState.FAILED: 2}}


async def test_retry_named_shares_keeps_references_out_of_audit_log(desk: Desk) -> None:
    refs = await failed(desk, *range(3))
    other = posted(9, round_id=ROUND_ID)
    await desk.store.enqueue(other.share, other.nullifier, now=NOW)
    waiting = (await desk.store.list_shares(QueueFilter(state=ShareState.RECEIVED), 9))[0].ref

    told = await desk.operations.retry(ANN, QueueFilter(stage="proof"), [refs[0][:6], refs[1], refs[1], waiting])

    assert told == {"retried": 2, "closed": 0, "not_failed": 1}
    (act,) = await desk.store.actions(limit=5)
    assert act.wanted == {"stage": "proof", "named": 4}
    assert not any(ref[:6] in repr(act) for ref in (*refs, waiting))


@pytest.mark.parametrize("ref", ["ffffff", "", "../stats"])
async def test_retry_unknown_reference_raises_before_any_change(desk: Desk, ref: str) -> None:
    await failed(desk, 1)
    with pytest.raises(NothingThere):
        await desk.operations.retry(ANN, ANY, [ref])
    assert await desk.store.actions(limit=5) == []


async def test_retry_other_state_is_refused(desk: Desk) -> None:
    with pytest.raises(ActionRefused, match="only failed"):
        await desk.operations.retry(ANN, QueueFilter(state=ShareState.RECEIVED))


async def test_retry_many_shares_uses_batches_and_accepts_posts_between(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 20,000 shares, no batch exceeds the limit, and each POST waits for at most two batches."""
    await fill_failed(desk, 20_000)
    pieces: list[int] = []
    retry_failed = SqliteStore.retry_failed

    async def noted(
        self: SqliteStore, ids: Sequence[int], wanted: QueueFilter, *, closed: Collection[bytes], note: str, dry: bool
    ) -> Counter[str]:
        pieces.append(len(ids))
        return await retry_failed(self, ids, wanted, closed=closed, note=note, dry=dry)

    monkeypatch.setattr(SqliteStore, "retry_failed", noted)
    act = asyncio.create_task(desk.operations.retry(ANN, ANY))
    waits: list[int] = []
    for number in range(30):
        while len(pieces) < 3 * number + 3:
            await asyncio.sleep(0)
        one, before = posted(100_000 + number, round_id=ROUND_ID), len(pieces)
        assert await desk.store.enqueue(one.share, one.nullifier, now=NOW) is Enqueued.QUEUED
        assert await desk.store.is_known(one.share.key)
        waits.append(len(pieces) - before)
    assert not act.done(), "the posts were made while the act was under way"

    assert (await act)["retried"] == 20_000
    assert max(pieces) == BATCH_SHARES
    assert sum(pieces) == 20_000
    assert max(waits) <= 3


async def fill_failed(desk: Desk, number: int) -> None:
    """Insert a number of failed shares in one transaction."""

    def fill(tx: Transaction) -> None:
        for n in range(number):
            one = posted(n, round_id=ROUND_ID)
            assert shares.enqueue(tx, one.share, one.nullifier, NOW) is Enqueued.QUEUED

    await desk.store._writer.run(fill)
    assert await desk.store.fail_unspent(ROUND_ID, note="failed by the test") == number


async def test_action_failure_is_recorded_with_partial_counts(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await failed(desk, *range(BATCH_SHARES + 5))
    retry_failed = SqliteStore.retry_failed

    async def once(self: SqliteStore, ids: Sequence[int], *rest: QueueFilter, **how: object) -> Counter[str]:
        if len(ids) < BATCH_SHARES:
            raise StoreError("the disk is full")
        return await retry_failed(self, ids, *rest, **how)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(SqliteStore, "retry_failed", once)
    with pytest.raises(StoreError):
        await desk.operations.retry(ANN, ANY)
    (act,) = await desk.store.actions(limit=5)
    assert act.outcome == {"retried": BATCH_SHARES, "error": "the disk is full"}


async def test_action_foreign_error_records_only_its_type(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await failed(desk, 1)

    async def broken(*_: object, **__: object) -> Counter[str]:
        raise RuntimeError("primary_blind is 0011")

    monkeypatch.setattr(SqliteStore, "retry_failed", broken)
    with pytest.raises(RuntimeError):
        await desk.operations.retry(ANN, ANY)
    assert [act.outcome for act in await desk.store.actions(limit=5)] == [{"error": "RuntimeError"}]


async def test_actions_run_one_after_the_other(desk: Desk) -> None:
    await failed(desk, *range(2 * BATCH_SHARES))
    first, second = await asyncio.gather(desk.operations.retry(ANN, ANY), desk.operations.retry(ANN, ANY))
    assert (first["retried"], second["retried"]) == (2 * BATCH_SHARES, 0)


# ---------------------------------------------------------------------- purges


async def test_purge_closed_round_deletes_its_data(desk: Desk) -> None:
    await failed(desk, 1, 2)
    await desk.store.apply_block(9, [(ROUND_ID, posted(1, round_id=ROUND_ID).nullifier)], now=NOW)
    desk.judge.closed.add(ROUND_ID)
    await desk.store.mark_closed(ROUND_ID, NOW)
    await desk.store.mark_alerted(ROUND_ID, NOW)

    rehearsed = await desk.operations.purge(ANN, ROUND_ID, dry=True)
    assert await desk.store.counts() == {ROUND_ID: {ShareState.FAILED: 1, ShareState.SUBMITTED: 1}}
    told = await desk.operations.purge(ANN, ROUND_ID)

    assert told == rehearsed == {"received": 0, "witnessed": 0, "submitted": 1, "failed": 1, "broadcast": 0}
    assert (await desk.store.counts(), await desk.store.rounds()) == ({}, [])
    assert desk.judge.forgotten == [ROUND_ID]
    (act,) = await desk.store.actions(limit=5)
    assert (act.what, act.wanted) == ("purge", {"round": ROUND_ID.hex()})
    assert posted(2, round_id=ROUND_ID).share.primary_blind not in desk.path.read_bytes()


async def test_purge_requires_round_closed_by_chain_and_reported(desk: Desk) -> None:
    await failed(desk, 1)
    desk.clock.advance(400 * 86_400)

    with pytest.raises(NothingThere):
        await desk.operations.purge(ANN, OTHER_ROUND)
    with pytest.raises(ActionRefused, match="chain has not closed"):
        await desk.operations.purge(ANN, ROUND_ID)
    desk.judge.closed.add(ROUND_ID)
    with pytest.raises(ActionRefused, match="not reported yet"):
        await desk.operations.purge(ANN, ROUND_ID)
    await desk.store.mark_alerted(ROUND_ID, NOW)
    desk.judge.odd[ROUND_ID] = "its end changed"
    with pytest.raises(ActionRefused, match="its end changed"):
        await desk.operations.purge(ANN, ROUND_ID)

    assert await desk.store.counts() == {ROUND_ID: {ShareState.FAILED: 1}}
    assert await desk.store.actions(limit=5) == []


# ---------------------------------------------------------------------- handing over


async def marks(desk: Desk) -> list[tuple[int, bytes]]:
    return [(row[0], row[1]) for row in await desk.store._reader.run("SELECT id, row_check FROM shares ORDER BY id")]


@pytest.mark.parametrize("running", [True, False])
async def test_hand_over_leaves_claimed_shares_to_running_daemon(tmp_path: Path, running: bool) -> None:
    desk = Desk(tmp_path / "queue.db", running=running)
    await desk.open()
    share = recorded(0, submit_at=END - 10)
    await desk.store.enqueue(share, nullifier_of(share), now=NOW)
    one = posted(1, round_id=ROUND_ID)
    await desk.store.enqueue(one.share, one.nullifier, now=NOW)
    await desk.store.claim_due(now=NOW, limit=1, rounds=[ROUND_ID])

    told = await desk.operations.hand_over(ANN, ANY, 0, await marks(desk))

    assert told == ({"moved": 1, "stayed": 1} if running else {"moved": 2, "stayed": 0})
    assert len(await desk.store.list_shares(QueueFilter(stage=MOVED), 9)) == told["moved"]
    (act,) = await desk.store.actions(limit=5)
    assert act.what == "move"
    await desk.store.close()


async def test_note_export_adds_audit_entry(desk: Desk) -> None:
    assert await desk.operations.note_export(ANN, QueueFilter(round_id=ROUND_ID, due_before_ms=5000), 2, 7) == {
        "copied": 7
    }
    (act,) = await desk.store.actions(limit=5)
    assert (act.what, act.outcome) == ("export", {"copied": 7})
    assert act.wanted == {"round": ROUND_ID.hex(), "due_before": 5, "named": 2}
