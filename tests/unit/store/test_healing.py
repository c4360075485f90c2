"""Rows of a file that SQLite cannot read or delete are replaced when their shares are posted again."""

from __future__ import annotations

from pathlib import Path

import pytest

from helper.store.models import DamagedShare, EnqueueResult, QueueFilter
from helper.store.sqlite.store import SqliteStore
from tests.unit.store.fixtures import (
    NOW,
    ROUND,
    StoreOpener,
    claim_all_due,
    enqueue_shares,
    make_posted_share,
    make_reveal,
    open_closed_database,
    query_rows,
)
from tests.unit.store.test_damage import flip_bit, make_row_unreadable

NUMBERS = range(31)
"""Shares of a test; `make_row_unreadable` confirms the last one."""


async def post(store: SqliteStore, number: int) -> EnqueueResult:
    posted = make_posted_share(number)
    return await store.enqueue(posted.share, posted.nullifier, now=NOW)


async def test_post_of_share_with_unreadable_row_stores_it_beside_that_row(
    store: SqliteStore, path: Path, reported: list[DamagedShare]
) -> None:
    await enqueue_shares(store, *NUMBERS)
    await make_row_unreadable(store, path, 7)

    results = [await post(store, 7), await post(store, 7), await post(store, 8), await post(store, 30)]

    assert [result.value for result in results] == ["queued", "duplicate", "duplicate", "duplicate"]
    assert reported == [DamagedShare("", b"", -1)]
    assert {queued.share for queued in await claim_all_due(store)} == {make_posted_share(n).share for n in range(30)}
    refs = [entry.ref for entry in await store.list_shares(QueueFilter(), 99)]
    assert len(refs) == len(set(refs)) == 31, "operators can name both rows"
    assert await store.is_known(make_posted_share(7).share.key)
    confirmed = await store.apply_block(5, [(ROUND, make_posted_share(n).nullifier) for n in range(30)], now=NOW)
    assert len(confirmed) == 30
    assert await post(store, 7) is EnqueueResult.DUPLICATE


async def test_post_of_share_whose_replacement_is_unreadable_too_stores_it_again(
    store: SqliteStore, path: Path
) -> None:
    await enqueue_shares(store, *NUMBERS)
    await make_row_unreadable(store, path, 7)
    assert await post(store, 7) is EnqueueResult.QUEUED
    quarantine_all = (
        "INSERT INTO damaged SELECT id, 0, '', x'', -1 FROM shares WHERE nullifier = ? ON CONFLICT DO NOTHING"
    )
    nullifier = make_posted_share(7).nullifier
    await store._writer.run(lambda tx: tx.conn.execute(quarantine_all, (nullifier,)).fetchall())

    results = [await post(store, 7), await post(store, 7)]

    assert [result.value for result in results] == ["queued", "duplicate"]
    assert make_posted_share(7).share in {queued.share for queued in await claim_all_due(store)}


async def test_post_of_share_with_unreadable_row_keeps_the_message_that_may_have_been_sent(
    store: SqliteStore, path: Path
) -> None:
    await enqueue_shares(store, *(number for number in NUMBERS if number != 7))
    share_id = await enqueue_and_send(store)
    await make_row_unreadable(store, path, 7)

    assert await post(store, 7) is EnqueueResult.QUEUED

    (sent,) = [sent for sent in await store.list_unconfirmed() if sent.nullifier == make_posted_share(7).nullifier]
    assert (sent.share_id != share_id, sent.prepared, sent.sends) == (True, make_reveal(7), 1)
    assert await store.apply_block(5, [(ROUND, sent.nullifier)], now=NOW) == [sent.share_id]


async def enqueue_and_send(store: SqliteStore) -> int:
    """Send share 7; return its id."""
    await enqueue_shares(store, 7)
    (queued,) = [queued for queued in await claim_all_due(store) if queued.share == make_posted_share(7).share]
    await store.prepare(queued.id, make_reveal(7))
    await store.mark_sending(queued.id, height=110, endpoint="one")
    return queued.id


@pytest.mark.parametrize("change", ["due_ms = due_ms - 5000", "state = 3", "mac = zeroblob(32)", "c1 = zeroblob(32)"])
async def test_post_of_share_with_flipped_bit_replaces_its_row(
    open_sqlite_store: StoreOpener, store: SqliteStore, path: Path, reported: list[DamagedShare], change: str
) -> None:
    await enqueue_shares(store, 1, 2)
    await store.close()
    flip_bit(path, change)
    reopened = await open_sqlite_store(path)

    results = [await post(reopened, 1), await post(reopened, 1), await post(reopened, 2)]

    assert [result.value for result in results] == ["queued", "duplicate", "duplicate"]
    assert len(reported) == 1
    assert {queued.share for queued in await claim_all_due(reopened)} == {make_posted_share(n).share for n in (1, 2)}
    assert await reopened.list_damaged() == []
    assert query_rows(path, "SELECT count(*) FROM shares") == [(2,)]
    assert await reopened.verify() == []


async def test_post_of_share_with_row_that_cannot_be_deleted_stores_it_beside_that_row(
    open_sqlite_store: StoreOpener, store: SqliteStore, path: Path
) -> None:
    await enqueue_shares(store, 1, 2)
    await store.close()
    flip_bit(path, "due_ms = due_ms - 5000")
    reopened = await open_sqlite_store(path)
    await reopened._writer.run(lambda tx: setattr(tx, "can_reindex", False))  # as after a rebuild that failed

    results = [await post(reopened, 1), await post(reopened, 1), await post(reopened, 2)]

    assert [result.value for result in results] == ["queued", "duplicate", "duplicate"]
    assert len(await reopened.list_damaged()) == 1
    assert {queued.share for queued in await claim_all_due(reopened)} == {make_posted_share(n).share for n in (1, 2)}


async def test_post_of_share_with_index_entry_of_another_damaged_row_deletes_nothing(
    open_sqlite_store: StoreOpener, store: SqliteStore, path: Path
) -> None:
    await enqueue_shares(store, 1)
    await store.close()
    with open_closed_database(path) as conn:
        conn.execute("UPDATE shares SET nullifier = ?", (b"n" * 32,))
    flip_bit(path, "mac = zeroblob(32)")
    reopened = await open_sqlite_store(path)

    assert await post(reopened, 1) is EnqueueResult.DUPLICATE

    assert query_rows(path, "SELECT count(*) FROM shares") == [(1,)]
