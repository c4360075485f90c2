"""Operator operations of the store: audit log, retries, export, import, earlier failures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helper.core.share import ShareState
from helper.store import audit_log, blocks, exported_shares, messages, rounds
from helper.store.audit_log import MAX_ACTIONS, Actor
from helper.store.exported_shares import ExportedShare, ImportedShare, ImportResult
from helper.store.models import HistoryEntry, PurgedShares, QueueFilter
from helper.store.rounds import MAX_REASONS_PER_DAY, OTHER_REASON, RETENTION_DAYS
from helper.store.shares import fail, record_crash, retry, retry_failed
from helper.store.store import Store
from helper.store.table_rows import RevealRow
from tests.support.clock import FakeClock
from tests.unit.store.conformance.backends import Reopen, StoreBackend
from tests.unit.store.conformance.test_chain_data import make_stored_round
from tests.unit.store.fixtures import (
    NOW,
    OTHER_ROUND,
    ROUND,
    claim_all_due,
    confirm_shares,
    enqueue_and_prepare,
    enqueue_shares,
    make_posted_share,
    make_reveal,
    without_sends,
)

ACTOR = Actor(1000, "ann", "socket")
DAY = 86_400
TODAY = int(NOW) // DAY


async def fail_share(store: Store, *numbers: int, stage: str = "proof", note: str = "no") -> list[int]:
    await enqueue_shares(store, *numbers)
    claimed = await claim_all_due(store)
    for queued in claimed:
        await store.run(fail, queued.id, stage=stage, note=note)
    return [queued.id for queued in claimed]


async def retry_matching(
    store: Store,
    ids: list[int],
    filters: QueueFilter | None = None,
    *,
    closed: tuple[bytes, ...] = (),
    dry: bool = False,
) -> dict[str, int]:
    return dict(await store.run(retry_failed, ids, filters or QueueFilter(), closed=closed, note="by ann", dry_run=dry))


# ---------------------------------------------------------------------- the audit log


async def test_operator_action_is_recorded_at_begin_and_shows_interruption(
    reopen: Reopen, store: Store, backend: StoreBackend, clock: FakeClock
) -> None:
    first = await store.run(audit_log.begin_action, ACTOR, "retry", {"round": ROUND.hex(), "named": 3})
    clock.advance(2)
    await store.run(audit_log.end_action, first, {"retried": 3})
    await store.run(audit_log.begin_action, Actor(0, "root", "file"), "purge", {})
    await store.close()

    reopened = await reopen()
    async with backend.open_offline_readers() as offline:
        lists = [await reader.list_actions(limit=5) for reader in (reopened, *offline)]
    for actions in lists:
        cut_off, complete = actions
        assert (complete.uid, complete.who, complete.way) == (ACTOR.uid, ACTOR.name, ACTOR.channel)
        assert (complete.what, complete.wanted) == ("retry", {"round": ROUND.hex(), "named": 3})
        assert (complete.at, complete.ended) == (NOW, NOW + 2)
        assert complete.outcome == {"retried": 3}
        assert (cut_off.who, cut_off.ended, cut_off.outcome) == ("root", None, None)
    assert [action.what for action in await reopened.list_actions(limit=1)] == ["purge"]


async def test_audit_log_is_bounded(store: Store, backend: StoreBackend) -> None:
    await store.run(audit_log.begin_action, ACTOR, "first", {})
    await store.close()
    columns = "id, begun_ms, uid, who, way, what, wanted"
    backend.execute(f"INSERT INTO actions ({columns}) VALUES ({MAX_ACTIONS}, 0, 0, 'x', 'file', 'x', '{{}}')")
    await store.open()
    await store.run(audit_log.begin_action, ACTOR, "last", {})

    assert [action.what for action in await store.list_actions(limit=9)] == ["last", "x"]
    await store.close()


async def test_audit_log_damaged_entry_is_shown_as_damaged(store: Store, backend: StoreBackend) -> None:
    await store.run(audit_log.begin_action, ACTOR, "retry", {"named": 1})
    await store.close()
    backend.execute("UPDATE actions SET wanted = '{\"nam'")
    await store.open()
    assert [action.wanted for action in await store.list_actions(limit=9)] == [{"damaged": True}]
    await store.close()


# ---------------------------------------------------------------------- retries


@pytest.mark.rule("R15")
async def test_retry_failed_keeps_due_time_and_resets_attempts(store: Store, backend: StoreBackend) -> None:
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    await enqueue_shares(store, 1, submit_at=int(NOW) + 5)
    (queued,) = await claim_all_due(store)
    await store.run(record_crash, queued.id, due_ms=queued.due_ms, note="killed")
    (queued,) = await claim_all_due(store)
    await store.run(messages.prepare, queued.id, make_reveal(1))
    await store.run(fail, queued.id, stage="broadcast", note="refused")
    (entry,) = await store.list_shares(QueueFilter(state=ShareState.FAILED), 9)
    assert (entry.stage, entry.note, entry.crashes) == ("broadcast", "refused", 1)

    assert await retry_matching(store, [queued.id], dry=True) == {"retried": 1}
    assert backend.query_rows("SELECT state FROM shares") == [(3,)], "a dry run changes nothing"
    assert await retry_matching(store, [queued.id]) == {"retried": 1}
    assert await retry_matching(store, [queued.id]) == {}

    rows = backend.query_rows("SELECT state, due_ms, attempts, crashes FROM shares")
    assert rows == [(0, (int(NOW) + 5) * 1000, 0, 0)]
    assert backend.query_rows("SELECT * FROM reveals") == [], "the old message is deleted"
    (reclaimed,) = await claim_all_due(store)
    assert reclaimed.share == make_posted_share(1).with_submit_at(int(NOW) + 5).share
    (entry,) = await store.list_shares(QueueFilter(), 9)
    details = await store.get_share_details(entry.ref)
    assert details is not None
    assert ("operator", "by ann") in [(line.stage, line.note) for line in details.history]


async def test_retry_failed_tries_waiting_share_now(store: Store, backend: StoreBackend) -> None:
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    await enqueue_shares(store, 1, 2, submit_at=int(NOW) + 5)
    waiting, claimed = await claim_all_due(store)
    await store.run(retry, waiting.id, due_ms=int(NOW + 6 * 3600) * 1000, stage="proof", note="refused")
    await enqueue_shares(store, 3, submit_at=int(NOW) + 9000)
    ids = [row[0] for row in backend.query_rows("SELECT id FROM shares")]

    assert len(ids) == 3
    assert await retry_matching(store, ids, closed=(ROUND,)) == {"closed": 1}
    assert await retry_matching(store, ids) == {"retried": 1}, "neither claimed nor new shares"

    rows = backend.query_rows(f"SELECT state, due_ms, attempts FROM shares WHERE id = {waiting.id}")
    assert rows == [(0, (int(NOW) + 5) * 1000, 0)], "due as before its first attempt"
    assert [queued.id for queued in await claim_all_due(store)] == [waiting.id]
    assert claimed.attempts == 0


async def test_retry_failed_in_closed_round_leaves_shares_failed(store: Store) -> None:
    await store.run(rounds.save_rounds, [make_stored_round(), make_stored_round(OTHER_ROUND)], NOW)
    ids = await fail_share(store, 1, 2)
    assert await retry_matching(store, ids, closed=(ROUND,)) == {"closed": 2}
    await store.run(rounds.mark_closed, ROUND, NOW)
    assert await retry_matching(store, ids) == {"closed": 2}, "the round's own mark reports it too"
    assert await store.count_shares() == {ROUND: {ShareState.FAILED: 2}}


async def test_retry_failed_retries_only_matching_shares(store: Store) -> None:
    proof = await fail_share(store, 1)
    other = await fail_share(store, 2, stage="broadcast")
    await enqueue_shares(store, 3)
    ids = await store.list_failed_ids(None, after_id=0, limit=9)
    assert ids == proof + other
    assert await store.list_failed_ids(ROUND, after_id=proof[0], limit=9) == other
    assert await store.list_failed_ids(OTHER_ROUND, after_id=0, limit=9) == []
    for query_filter in (
        QueueFilter(stage="tree"),
        QueueFilter(round_id=OTHER_ROUND),
        QueueFilter(due_before_ms=int(NOW * 1000)),
        QueueFilter(state=ShareState.WAITING),
    ):
        assert await retry_matching(store, ids, query_filter) == {}
    assert await retry_matching(store, ids, QueueFilter(stage="broadcast", due_before_ms=int(NOW * 1000) + 1)) == {
        "retried": 1
    }
    assert await store.list_failed_ids(None, after_id=0, limit=9) == proof


async def test_retry_failed_skips_damaged_share(store: Store, backend: StoreBackend) -> None:
    ids = await fail_share(store, 1, 2)
    await store.close()
    backend.execute(f"UPDATE shares SET crashes = crashes + 1 WHERE id = {ids[0]}")
    await store.open()
    assert await retry_matching(store, ids) == {"retried": 1}
    assert len(await store.list_damaged()) == 1
    assert await store.list_failed_ids(None, after_id=0, limit=9) == []
    await store.close()


# ---------------------------------------------------------------------- earlier failures


async def test_purge_keeps_only_failure_counts_by_stage_and_reason(store: Store, backend: StoreBackend) -> None:
    await fail_share(store, 1, 2, note="the node said 00112233445566778899aabbccddeeff")
    await fail_share(store, 3, stage="tree", note="no leaf")
    await enqueue_shares(store, 4)
    assert await store.list_purged_failures() == []
    groups = await store.list_matching_failures(QueueFilter(round_id=ROUND), limit=9)
    assert {(group.stage, group.count) for group in groups} == {("proof", 2), ("tree", 1)}
    assert await store.list_matching_failures(QueueFilter(round_id=OTHER_ROUND), limit=9) == []
    assert await store.list_matching_failures(QueueFilter(state=ShareState.WAITING), limit=9) == []

    await store.run_batches(rounds.purge, ROUND)

    assert await store.list_matching_failures(QueueFilter(), limit=9) == []
    expected = [
        PurgedShares(TODAY * 86_400, "proof", "the node said …", 2),
        PurgedShares(TODAY * 86_400, "tree", "no leaf", 1),
    ]
    assert await store.list_purged_failures() == expected
    async with backend.open_offline_readers() as offline:
        for reader in offline:
            assert await reader.list_purged_failures() == expected


async def test_purged_round_that_nodes_still_list_is_stored_again(store: Store, reopen: Reopen) -> None:
    await enqueue_shares(store, 1)
    await store.run_batches(rounds.purge, ROUND)
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    await enqueue_shares(store, 2)
    await store.close()
    (listed,) = await (await reopen()).list_shares(QueueFilter(round_id=ROUND), limit=9)
    assert listed.state == "received"


async def test_past_failures_are_deleted_after_retention_days(store: Store, clock: FakeClock) -> None:
    await fail_share(store, 1)
    await store.run_batches(rounds.purge, ROUND)
    clock.advance(RETENTION_DAYS * DAY)
    assert await store.run(rounds.delete_old_failure_counts) == 0
    clock.advance(DAY)
    assert await store.run(rounds.delete_old_failure_counts) == 1
    assert await store.list_purged_failures() == []


async def test_past_failures_of_future_days_are_deleted(store: Store, clock: FakeClock) -> None:
    clock.advance(3650 * DAY)
    await fail_share(store, 1)
    await store.run_batches(rounds.purge, ROUND)
    clock.advance(-3650 * DAY)
    assert await store.run(rounds.delete_old_failure_counts) == 1


async def test_past_failures_per_day_are_bounded(store: Store) -> None:
    await enqueue_shares(store, *range(MAX_REASONS_PER_DAY + 3))
    for queued in await claim_all_due(store, limit=1000):
        await store.run(fail, queued.id, stage="proof", note=f"reason {queued.id}")
    await store.run_batches(rounds.purge, ROUND)

    counts = await store.list_purged_failures()
    assert len(counts) == MAX_REASONS_PER_DAY + 1
    assert sum(group.count for group in counts) == MAX_REASONS_PER_DAY + 3
    assert [group.count for group in counts if (group.stage, group.reason) == OTHER_REASON] == [3]


async def test_failure_counts_include_damaged_share_as_damaged(store: Store, backend: StoreBackend) -> None:
    await fail_share(store, 1)
    await store.close()
    backend.execute("UPDATE shares SET note = 'a flipped bit'")
    await store.open()
    await store.run_batches(rounds.purge, ROUND)
    assert [(group.stage, group.count) for group in await store.list_purged_failures()] == [("damaged", 1)]
    await store.close()


# ---------------------------------------------------------------------- small queries


async def test_find_shares_by_name_and_database_size(store: Store) -> None:
    await enqueue_shares(store, *range(9))
    entries = await store.list_shares(QueueFilter(), 9)
    assert [len(await store.find_share_ids(entry.ref)) for entry in entries] == [1] * 9
    assert await store.find_share_ids("ffffff000000") == []
    assert await store.find_share_ids("zz") == []
    await store.run(rounds.save_leaves, ROUND, 5, 0, bytes(96))
    await store.run(rounds.save_leaves, ROUND, 6, 3, bytes(32))
    assert await store.count_leaves() == {ROUND: 4}
    await store.run(rounds.save_rounds, [make_stored_round(OTHER_ROUND)], NOW)
    await store.run(blocks.add_spent, [(ROUND, b"n" * 32), (OTHER_ROUND, b"n" * 32), (ROUND, b"m" * 32)])
    assert sorted(await store.find_rounds_of_nullifier(b"n" * 32)) == sorted([ROUND, OTHER_ROUND])
    assert await store.find_rounds_of_nullifier(b"x" * 32) == []


# ---------------------------------------- import of shares that were exported with `queue export --move`


NOW_MS = int(NOW * 1000)
REMOTE_HISTORY_ENTRY = HistoryEntry(NOW_MS + 5, "proof", "no memory", spent_attempt=True)
"""A history entry that the other machine added."""


def exported_share(number: int, **changes: Any) -> ExportedShare:
    share = replace(make_posted_share(number).share, submit_at=changes.pop("submit_at", 0))
    as_received = ExportedShare(
        share, NOW_MS, ShareState.WAITING, NOW_MS, 4, 1, 88, "proof", "no memory", (REMOTE_HISTORY_ENTRY,)
    )
    return replace(as_received, **changes)


async def import_all(store: Store, *exported: ExportedShare, dry_run: bool = False) -> list[ImportedShare]:
    checked = [(share, make_posted_share(share.share.tree_position - 70_000).nullifier) for share in exported]
    return await store.run(exported_shares.import_shares, checked, note="from there", dry_run=dry_run)


async def import_results(store: Store, *exported: ExportedShare, dry_run: bool = False) -> list[ImportResult]:
    return [result.result for result in await import_all(store, *exported, dry_run=dry_run)]


async def mark_all_moved(store: Store, backend: StoreBackend, *, at_rest: bool = True) -> None:
    marks = backend.query_rows("SELECT id, row_check FROM shares ORDER BY id")
    counts = await store.run(exported_shares.mark_moved, marks, note="gone", idle_only=at_rest)
    assert counts == {"moved": len(marks)}


async def test_import_of_moved_share_requeues_it_at_its_due_time(
    store: Store, backend: StoreBackend, reopen: Reopen
) -> None:
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
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
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 3}}
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
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
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
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    await enqueue_and_prepare(store, 1)
    await enqueue_shares(store, 2, submit_at=int(NOW) + 50)
    await mark_all_moved(store, backend, at_rest=False)
    assert await store.list_unconfirmed() == []
    row = RevealRow(*make_reveal(1)[:6], 3, 105, 110, "there:80", "AMBIGUOUS")
    sent = exported_share(1, state=ShareState.SENT, reveal=row)
    row = RevealRow(*make_reveal(2)[:6], 1, 105, 105, "there:80", None)
    early = exported_share(2, state=ShareState.SENT, reveal=row)

    assert await import_results(store, sent, early) == [ImportResult.RESTORED] * 2

    (message,) = await store.list_unconfirmed()
    assert (without_sends(message.row), message.row.sends, message.row.last_sent_height) == (make_reveal(1), 3, 110)
    assert await claim_all_due(store, now=NOW + 49) == [], "a file with an earlier time does not make a share early"
    assert await confirm_shares(store, 1, height=120) == [message.share_id]


async def test_import_of_moved_share_twice_queues_it_once(store: Store, backend: StoreBackend) -> None:
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
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
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 2}}

    await mark_all_moved(store, backend)
    assert await import_results(store, exported_share(1), exported_share(2)) == [ImportResult.RESTORED] * 2, (
        "moved back and forth again"
    )


async def test_import_of_known_unmoved_shares_reports_each_reason(
    store: Store, backend: StoreBackend, clock: FakeClock
) -> None:
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    await fail_share(store, 1)
    await enqueue_and_prepare(store, 2)
    await enqueue_shares(store, 3, 4, 5)
    await confirm_shares(store, 4, 6, height=9)  # share 6 was revealed by another helper
    await store.close()
    backend.execute(
        f"UPDATE shares SET attempts = 9 WHERE id = {backend.query_rows('SELECT max(id) FROM shares')[0][0]}"
    )
    await store.open()
    await backend.prepare_store(store)

    shares = [exported_share(number) for number in (1, 2, 3, 4, 5, 6)]
    expected = ["failed", "queued", "queued", "confirmed", "damaged", "confirmed"]
    assert await import_results(store, *shares) == expected
    await store.run(rounds.mark_closed, ROUND, clock.now())
    assert await import_results(store, *shares) == ["closed"] * 6
    await store.run_batches(rounds.purge, ROUND)
    assert await import_all(store, exported_share(1)) == [ImportedShare(ImportResult.UNKNOWN, None, ROUND)]
    await store.close()


async def test_import_of_moved_share_confirmed_in_between_stays_confirmed(store: Store, backend: StoreBackend) -> None:
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    await enqueue_shares(store, 1)
    await mark_all_moved(store, backend)
    await confirm_shares(store, 1, height=9)

    assert await import_results(store, exported_share(1)) == [ImportResult.CONFIRMED]
    assert await store.count_shares() == {ROUND: {ShareState.CONFIRMED: 1}}
