"""Shares that were exported with `queue export --move` and are imported again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helper.core.share import ShareState
from helper.store.action_models import ExportedReveal, ExportedShare, ImportedShare, ImportResult
from helper.store.models import HistoryEntry, QueueFilter
from helper.store.store import Store
from tests.support.clock import FakeClock
from tests.unit.store.conformance.backends import Reopen, StoreBackend
from tests.unit.store.conformance.test_chain_data import ChainRound
from tests.unit.store.conformance.test_operator_actions import fail_share
from tests.unit.store.fixtures import (
    NOW,
    ROUND,
    claim_all_due,
    confirm_shares,
    enqueue_and_prepare,
    enqueue_shares,
    make_posted_share,
    make_reveal,
)

NOW_MS = int(NOW * 1000)
REMOTE_HISTORY_ENTRY = HistoryEntry(NOW_MS + 5, "proof", "no memory", spent_attempt=True)
"""A history entry that the other machine added."""


def exported_share(number: int, **changes: Any) -> ExportedShare:
    share = replace(make_posted_share(number).share, submit_at=changes.pop("submit_at", 0))
    as_received = ExportedShare(
        share, NOW_MS, ShareState.RECEIVED, NOW_MS, 4, 1, 88, "proof", "no memory", (REMOTE_HISTORY_ENTRY,)
    )
    return replace(as_received, **changes)


async def import_all(store: Store, *exported: ExportedShare, dry_run: bool = False) -> list[ImportedShare]:
    checked = [(share, make_posted_share(share.share.tree_position - 70_000).nullifier) for share in exported]
    return await store.import_shares(checked, note="from there", dry_run=dry_run)


async def import_results(store: Store, *exported: ExportedShare, dry_run: bool = False) -> list[ImportResult]:
    return [result.result for result in await import_all(store, *exported, dry_run=dry_run)]


async def mark_all_moved(store: Store, backend: StoreBackend, *, at_rest: bool = True) -> None:
    marks = backend.query_rows("SELECT id, row_check FROM shares ORDER BY id")
    counts = await store.mark_moved(marks, note="gone", idle_only=at_rest)
    assert counts == {"moved": len(marks)}


async def test_import_of_moved_share_requeues_it_at_its_due_time(
    store: Store, backend: StoreBackend, reopen: Reopen
) -> None:
    await store.save_rounds([ChainRound()], NOW)
    await enqueue_shares(store, 1, submit_at=int(NOW) + 50)
    await enqueue_shares(store, 2)
    await fail_share(store, 3)
    await mark_all_moved(store, backend)
    entries = {entry.ref for entry in await store.list_shares(QueueFilter(), 9)}
    shares = [
        exported_share(1, due_ms=0),
        exported_share(2, due_ms=2**40 * 1000),
        exported_share(3, state=ShareState.FAILED),
    ]

    assert await import_results(store, *shares, dry_run=True) == [ImportResult.RESTORED] * 3
    assert await store.count_shares() == {ROUND: {ShareState.FAILED: 3}}
    results = await import_all(store, *shares)

    assert [result.result for result in results] == [ImportResult.RESTORED] * 3
    assert {result.ref for result in results} == entries
    assert {result.round_id for result in results} == {ROUND}
    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 3}}
    await store.close()
    reopened = await reopen()
    assert {queued.share.tree_position - 70_000 for queued in await claim_all_due(reopened, now=NOW + 49)} == {2, 3}
    (last,) = await claim_all_due(reopened, now=NOW + 50)
    assert last.share == make_posted_share(1, submit_at=int(NOW) + 50).share, (
        "never before its due time, regardless of the file"
    )
    assert (last.attempts, last.crashes, last.proved_height) == (0, 0, 88)
    assert await reopened.verify() == []


async def test_import_of_moved_share_keeps_the_history_of_both_machines(store: Store, backend: StoreBackend) -> None:
    await store.save_rounds([ChainRound()], NOW)
    await fail_share(store, 1)
    (entry,) = await store.list_shares(QueueFilter(), 9)
    before = await store.get_share_details(entry.ref)  # its first entry is derived from the row, not stored
    assert before is not None
    await mark_all_moved(store, backend)

    await import_results(store, exported_share(1, history=(*before.history[1:], REMOTE_HISTORY_ENTRY)))

    details = await store.get_share_details(entry.ref)
    assert details is not None
    notes = [line.note for line in details.history]
    assert notes == [*(line.note for line in before.history), "gone", "no memory", "from there"]
    assert (details.entry.stage, details.entry.note) == ("import", "from there")


async def test_import_of_moved_share_sent_elsewhere_keeps_that_message(store: Store, backend: StoreBackend) -> None:
    await store.save_rounds([ChainRound()], NOW)
    await enqueue_and_prepare(store, 1)
    await enqueue_shares(store, 2, submit_at=int(NOW) + 50)
    await mark_all_moved(store, backend, at_rest=False)
    assert await store.list_unconfirmed() == []
    sent = exported_share(
        1, state=ShareState.BROADCAST, reveal=ExportedReveal(make_reveal(1), 3, 105, 110, "there:80", "AMBIGUOUS")
    )
    early = exported_share(
        2, state=ShareState.BROADCAST, reveal=ExportedReveal(make_reveal(2), 1, 105, 105, "there:80", None)
    )

    assert await import_results(store, sent, early) == [ImportResult.RESTORED] * 2

    (message,) = await store.list_unconfirmed()
    assert (message.prepared, message.sends, message.last_sent_height) == (make_reveal(1), 3, 110)
    assert await claim_all_due(store, now=NOW + 49) == [], "a file with an earlier time does not make a share early"
    assert await confirm_shares(store, 1, height=120) == [message.share_id]


async def test_import_of_moved_share_twice_queues_it_once(store: Store, backend: StoreBackend) -> None:
    await store.save_rounds([ChainRound()], NOW)
    await enqueue_shares(store, 1, 2)
    await mark_all_moved(store, backend)
    assert await import_results(store, exported_share(1)) == [ImportResult.RESTORED], (
        "interrupted after the first share"
    )

    assert await import_results(store, exported_share(1), exported_share(2)) == [
        ImportResult.QUEUED,
        ImportResult.RESTORED,
    ]
    assert await import_results(store, exported_share(1), exported_share(2)) == [ImportResult.QUEUED] * 2
    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 2}}

    await mark_all_moved(store, backend)
    assert await import_results(store, exported_share(1), exported_share(2)) == [ImportResult.RESTORED] * 2, (
        "moved back and forth again"
    )


async def test_import_of_known_unmoved_shares_reports_each_reason(
    store: Store, backend: StoreBackend, clock: FakeClock
) -> None:
    await store.save_rounds([ChainRound()], NOW)
    await fail_share(store, 1)
    await enqueue_and_prepare(store, 2)
    await enqueue_shares(store, 3, 4, 5)
    await confirm_shares(store, 4, height=9)
    await store.close()
    backend.execute(
        f"UPDATE shares SET attempts = 9 WHERE id = {backend.query_rows('SELECT max(id) FROM shares')[0][0]}"
    )
    await store.open()
    await backend.prepare_store(store)

    shares = [exported_share(number) for number in (1, 2, 3, 4, 5)]
    expected = ["failed", "queued", "queued", "confirmed", "damaged"]
    assert await import_results(store, *shares) == expected
    await store.mark_closed(ROUND, clock.now())
    assert await import_results(store, *shares) == ["closed"] * 5
    await store.purge(ROUND)
    assert await import_all(store, exported_share(1)) == [ImportedShare(ImportResult.UNKNOWN, None, ROUND)]
    await store.close()


async def test_import_of_moved_share_confirmed_in_between_stays_confirmed(store: Store, backend: StoreBackend) -> None:
    await store.save_rounds([ChainRound()], NOW)
    await enqueue_shares(store, 1)
    await mark_all_moved(store, backend)
    await confirm_shares(store, 1, height=9)

    assert await import_results(store, exported_share(1)) == [ImportResult.CONFIRMED]
    assert await store.count_shares() == {ROUND: {ShareState.SUBMITTED: 1}}
