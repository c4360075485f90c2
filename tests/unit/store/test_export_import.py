"""Export and import: content of a file, remaining data, and accepted shares."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from helper.core.share import ShareState
from helper.store import blocks, exported_shares, messages, rounds
from helper.store.exported_shares import ExportedShare, ValidatedShare
from helper.store.models import MOVED, FailedShares, HistoryEntry, QueueFilter
from helper.store.shares import fail, requeue, retry
from helper.store.sqlite.store import SqliteStore
from helper.store.table_rows import RevealRow
from tests.unit.store.conformance.test_chain_data import make_stored_round
from tests.unit.store.conformance.test_operator_actions import retry_matching
from tests.unit.store.fixtures import (
    NOW,
    OTHER_ROUND,
    ROUND,
    StoreOpener,
    claim_all_due,
    confirm_shares,
    enqueue,
    enqueue_shares,
    make_posted_share,
    make_reveal,
    open_closed_database,
    query_rows,
    select_shares,
    without_sends,
)


async def enqueue_one_of_each(store: SqliteStore) -> None:
    """Share 1 was sent, 2 failed, 3 is being proven, 4 is pending; 5 is of another round."""
    await store.run(rounds.save_rounds, [make_stored_round(), make_stored_round(OTHER_ROUND)], NOW)
    await store.run(blocks.set_meta, "chain_id", "chain-1")
    await enqueue_shares(store, 2)
    (failed,) = await claim_all_due(store)
    await store.run(retry, failed.id, due_ms=int(NOW * 1000), stage="proof", note="timed out")
    await store.run(fail, failed.id, stage="proof", note="refused")
    await enqueue_shares(store, 1)
    (queued,) = await claim_all_due(store)
    await store.run(messages.prepare, queued.id, make_reveal(1))
    await store.run(messages.mark_sending, queued.id, height=110, endpoint="node:80")
    await store.run(messages.record_outcome, queued.id, outcome="ACCEPTED")
    await enqueue_shares(store, 3)
    await claim_all_due(store)
    await enqueue_shares(store, 4, submit_at=int(NOW) + 50)
    await enqueue(store, make_posted_share(5, round_id=OTHER_ROUND))


async def test_export_contains_each_share_with_its_state(store: SqliteStore, path: Path) -> None:
    await enqueue_one_of_each(store)

    selection = select_shares(path)

    assert selection.chain_id == "chain-1"
    by_number = {share.share.tree_position - 70_000: share for share in selection.shares}
    assert {number: share.state for number, share in by_number.items()} == {
        1: ShareState.SENT,
        2: ShareState.FAILED,
        3: ShareState.WAITING,
        4: ShareState.WAITING,
        5: ShareState.WAITING,
    }
    assert by_number[1].reveal == RevealRow(*make_reveal(1)[:6], 1, 110, 110, "node:80", "ACCEPTED")
    assert (by_number[2].attempts, by_number[2].stage, by_number[2].note) == (1, "proof", "refused")
    assert [(line.stage, line.spent_attempt) for line in by_number[2].history] == [
        ("proof", True),
        ("proof", False),
    ]
    assert by_number[4] == ExportedShare(
        make_posted_share(4, submit_at=int(NOW) + 50).share,
        int(NOW * 1000),
        ShareState.WAITING,
        (int(NOW) + 50) * 1000,
        0,
        0,
        None,
        "accepted",
        "",
    )
    assert selection.skipped == {}


async def test_export_with_filter_skips_unusable_shares(store: SqliteStore, path: Path) -> None:
    await enqueue_one_of_each(store)
    assert len(select_shares(path, QueueFilter(round_id=OTHER_ROUND)).shares) == 1
    assert len(select_shares(path, QueueFilter(state=ShareState.FAILED)).shares) == 1
    entry = (await store.list_shares(QueueFilter(state=ShareState.SENT), 9))[0]
    (named,) = select_shares(path, None, entry.ref[:6]).shares
    assert named.state is ShareState.SENT

    await store.run(rounds.mark_closed, OTHER_ROUND, NOW)
    assert select_shares(path).skipped == {"closed": 1}
    await store.close()
    with open_closed_database(path) as conn:
        conn.execute("UPDATE shares SET attempts = 9 WHERE state = 3")
        conn.execute("UPDATE reveals SET sends = 2")
    selection = select_shares(path)
    assert selection.skipped == {"closed": 1, "damaged": 1}
    assert {share.state for share in selection.shares} == {ShareState.WAITING}, (
        "a damaged message is discarded and proven again"
    )
    await store.open()
    await store.close()


async def test_moved_shares_are_idle_until_retried_or_confirmed(store: SqliteStore, path: Path) -> None:
    await enqueue_one_of_each(store)
    selection = select_shares(path)
    await enqueue_shares(store, 6)

    counts = await store.run(exported_shares.mark_moved, selection.versions, note="gone", idle_only=True)

    assert counts == {"moved": 3, "stayed": 2}, "shares being proven or sent are in progress"
    assert [queued.share for queued in await claim_all_due(store, now=NOW + 99)] == [make_posted_share(6).share], (
        "only the shares added since"
    )
    assert select_shares(path).skipped == {"moved": 3}
    assert await store.list_matching_failures(QueueFilter(stage=MOVED), limit=9) == [
        FailedShares(MOVED, "gone", 3, NOW)
    ]
    moved_again = await store.run(exported_shares.mark_moved, selection.versions, note="gone", idle_only=True)
    assert moved_again == {"stayed": 5}, "a row that changed after it was read is left unchanged"

    assert await confirm_shares(store, 2, height=9), "confirmed by the other machine's reveal"
    ids = await store.list_failed_ids(None, after_id=0, limit=9)
    assert await retry_matching(store, ids, QueueFilter(stage=MOVED)) == {"retried": 2}


# ---------------------------------------------------------------------- import


def with_nullifiers(exported: list[ExportedShare]) -> list[ValidatedShare]:
    """Each share with the nullifier computed from its hashes."""
    return [
        (share, make_posted_share(share.share.tree_position - 70_000, round_id=share.share.round_id).nullifier)
        for share in exported
    ]


async def count_import_results(
    store: SqliteStore, checked_shares: list[ValidatedShare], *, dry_run: bool = False
) -> dict[str, int]:
    return dict(
        Counter(
            result.result
            for result in await store.run(
                exported_shares.import_shares, checked_shares, note="from there", dry_run=dry_run
            )
        )
    )


@pytest.fixture
async def target_store(open_sqlite_store: StoreOpener, tmp_path: Path) -> SqliteStore:
    """Another machine's store, which follows the same chain."""
    (tmp_path / "there").mkdir()
    other = await open_sqlite_store(tmp_path / "there" / "queue.db")
    await other.run(rounds.save_rounds, [make_stored_round(), make_stored_round(OTHER_ROUND)], NOW)
    return other


async def test_imported_shares_continue_in_their_state(
    store: SqliteStore, path: Path, target_store: SqliteStore
) -> None:
    await enqueue_one_of_each(store)
    shares = with_nullifiers(select_shares(path).shares)

    assert await count_import_results(target_store, shares, dry_run=True) == {"taken": 5}
    assert await target_store.count_shares() == {}
    assert await count_import_results(target_store, shares) == {"taken": 5}
    assert await count_import_results(target_store, shares) == {"queued": 4, "failed": 1}, (
        "a second import changes nothing"
    )

    assert await target_store.count_shares() == {
        ROUND: {ShareState.SENT: 1, ShareState.FAILED: 1, ShareState.WAITING: 2},
        OTHER_ROUND: {ShareState.WAITING: 1},
    }
    (sent,) = await target_store.list_unconfirmed()
    row = sent.row
    assert without_sends(row) == make_reveal(1)
    assert (row.sends, row.last_sent_height, row.last_outcome) == (1, 110, "ACCEPTED")
    assert sent.nullifier == make_posted_share(1).nullifier
    assert sent.is_first_message, "a message that was never sent remains marked as unsent"
    (entry,) = await target_store.list_shares(QueueFilter(state=ShareState.FAILED), 9)
    assert (entry.stage, entry.note, entry.attempts) == ("proof", "refused", 1)
    details = await target_store.get_share_details(entry.ref)
    assert details is not None
    assert [(line.stage, line.note) for line in details.history] == [
        ("accepted", ""),
        ("proof", "timed out"),
        ("proof", "refused"),
        ("import", "from there"),
    ]
    assert {queued.share for queued in await claim_all_due(target_store, now=NOW + 99)} == {
        make_posted_share(3).share,
        make_posted_share(4, submit_at=int(NOW) + 50).share,
    }
    assert await confirm_shares(target_store, 1, height=120) == [sent.share_id]
    assert await target_store.verify() == []
    assert await target_store.list_damaged() == []


@pytest.mark.rule("R4")
async def test_import_never_makes_share_due_early(target_store: SqliteStore, path: Path) -> None:
    in_an_hour = int(NOW) + 3600
    share = make_posted_share(1, submit_at=in_an_hour).share
    early = ExportedShare(share, 0, ShareState.WAITING, 0, 0, 0, None, "accepted", "")
    sent = replace(
        early,
        share=make_posted_share(2, submit_at=in_an_hour).share,
        state=ShareState.SENT,
        reveal=RevealRow(*make_reveal(2)[:6], 1, 5, 5, "node"),
    )
    never_sent = replace(
        sent,
        share=make_posted_share(3).share,
        due_ms=int(NOW * 1000),
        reveal=make_reveal(3),
    )

    assert await count_import_results(target_store, with_nullifiers([early, sent, never_sent])) == {"taken": 3}

    assert await target_store.list_unconfirmed() == [], "a message that is not due or was never sent is proven again"
    assert [queued.share for queued in await claim_all_due(target_store, now=in_an_hour - 1)] == [
        make_posted_share(3).share
    ]
    assert len(await claim_all_due(target_store, now=in_an_hour)) == 2


async def test_import_keeps_long_history(store: SqliteStore, path: Path, target_store: SqliteStore) -> None:
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    await enqueue_shares(store, 1)
    for number in range(60):
        (queued,) = await claim_all_due(store)
        await store.run(requeue, queued.id, stage="tree", note=f"attempt {number}")
    (share,) = select_shares(path).shares
    assert len(share.history) == 50
    await count_import_results(target_store, with_nullifiers([share]))

    (entry,) = await target_store.list_shares(QueueFilter(), 9)
    details = await target_store.get_share_details(entry.ref)
    assert details is not None
    assert details.history[1:-1] == share.history
    assert isinstance(details.history[-1], HistoryEntry)
    assert query_rows(path, "SELECT count(*) FROM shares") == [(1,)]
