"""Rows damaged on disk are quarantined and reported, never processed; others continue."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from helper.core.share import ShareState
from helper.errors import StoreCorrupt
from helper.store import rounds, shares
from helper.store.db_copy.endpoint import SHARES
from helper.store.db_copy.sqlite_endpoint import SqliteEndpoint
from helper.store.messages import mark_sending, prepare
from helper.store.models import DamagedShare, QueueFilter
from helper.store.queue_reader import UNREADABLE_NOTE
from helper.store.row_encryption import SHARE_COLUMNS
from helper.store.sqlite import integrity_check
from helper.store.sqlite.reader import SqliteReader, open_queue_file
from helper.store.sqlite.store import SqliteStore
from helper.store.table_rows import WITNESS_FORMATS, RevealRow, Row, ShareRow, encode_witness, is_sound, with_check
from helper.store.transaction import Params
from tests.support.clock import FakeClock
from tests.unit.store.conformance.test_chain_data import make_stored_round
from tests.unit.store.fixtures import (
    NOW,
    ROUND,
    StoreOpener,
    claim_all_due,
    confirm_shares,
    enqueue_and_prepare,
    enqueue_shares,
    greatest_height,
    make_posted_share,
    make_reveal,
    open_closed_database,
    query_rows,
)

KEY = b"k" * 32


def share_row() -> ShareRow:
    posted, text = make_posted_share(1), "note"
    share = posted.share
    witness = encode_witness(share, posted.nullifier, int(NOW) * 1000)
    return with_check(
        KEY, ShareRow(ROUND, 7, 1, b"m" * 32, witness, 2**62, 0, int(NOW) * 1000, 2, 1, 99, "proof", text)
    )


def reveal_row() -> RevealRow:
    row = RevealRow(7, make_reveal(1).message, b"h" * 32, 100, "k10", 101, 2, 110, 113, "one", "Accepted", 0, b"r" * 32)
    return with_check(KEY, row)


def damaged_values(value: object) -> list[object]:
    """Values of a column after a flipped bit or a changed type."""
    if value in {b"", ""}:
        return ["x", b"x", None, 0]
    if isinstance(value, bytes):
        return [value[:-1] + bytes([value[-1] ^ 1]), bytes([value[0] ^ 128]) + value[1:], value[:-1], value.hex(), None]
    if isinstance(value, str):
        return [value + "x", value.upper(), value.encode(), None]
    assert isinstance(value, int)
    return [value ^ 1, value ^ (1 << 40), -1 - value, 1 << 70, None, float(value), str(value), True]


@pytest.mark.parametrize(
    "row",
    [share_row(), reveal_row()],
    ids=["share", "reveal"],
)
def test_row_check_covers_every_column(row: ShareRow | RevealRow) -> None:
    assert is_sound(KEY, row)
    assert not is_sound(b"another key of this database!!!!", row)

    unseen = [
        (name, other)
        for name, value in zip(row._fields, row, strict=True)
        for other in damaged_values(value)
        if is_sound(KEY, type(row)(*{**row._asdict(), name: other}.values()))
    ]

    assert unseen == []


async def reopen_after_change(opened: StoreOpener, store: SqliteStore, path: Path, change: str) -> SqliteStore:
    """Close the store, change its file with this statement, and reopen it."""
    await store.close()
    with open_closed_database(path) as conn:
        conn.execute("PRAGMA ignore_check_constraints = ON")
        triggers = conn.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            conn.execute(f"DROP TRIGGER {name}")
        conn.execute(change)
        for _, sql in triggers:
            conn.execute(sql)
    return await opened(path)


@pytest.mark.rule("N25")
@pytest.mark.parametrize(
    "change",
    [
        *(f"witness = flip(witness, '{name}')" for name in WITNESS_FORMATS),
        "witness = zeroblob(748)",
        "tag = zeroblob(16)",
        "due_ms = due_ms - 5000",
        "rank = 5",
        "attempts = 4",
    ],
)
async def test_claim_due_reports_and_skips_damaged_row(
    open_sqlite_store: StoreOpener, store: SqliteStore, path: Path, reported: list[DamagedShare], change: str
) -> None:
    await enqueue_shares(store, 1, 2, 3, submit_at=int(NOW) + 3)
    reopened = await reopen_after_change(open_sqlite_store, store, path, f"UPDATE shares SET {change} WHERE id = 2")

    claimed = await reopened.run(shares.claim_due, now=NOW + 10, limit=3, rounds=[ROUND, b"2" * 32])

    assert [queued.share for queued in sorted(claimed, key=lambda queued: queued.id)] == [
        make_posted_share(1, submit_at=int(NOW) + 3).share,
        make_posted_share(3, submit_at=int(NOW) + 3).share,
    ]
    assert [share.state for share in reported] == [0]
    assert await reopened.list_damaged() == reported
    (entry,) = [entry for entry in await reopened.list_shares(QueueFilter(), 9) if entry.damaged]
    assert entry.ref == reported[0].ref
    assert await reopened.next_due_ms([ROUND]) is None
    assert await reopened.run_batches(rounds.fail_unconfirmed, ROUND, note="closed") == 2


@pytest.mark.rule("N25")
@pytest.mark.parametrize(
    "operation",
    [
        lambda store: store.run(shares.requeue, 1, stage="t", note="n"),
        lambda store: store.run(shares.retry, 1, due_ms=0, stage="t", note="n"),
        lambda store: store.run(shares.fail, 1, stage="t", note="n"),
        lambda store: store.run(mark_sending, 1, height=5, endpoint="one"),
        lambda store: store.get_sent_reveal(1),
        lambda store: store.list_unconfirmed(),
    ],
)
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE shares SET witness = flip(witness, 'c2')",
        "UPDATE reveals SET message = zeroblob(77)",
        "DELETE FROM reveals",
    ],
)
async def test_damaged_share_or_message_is_never_sent(
    open_sqlite_store: StoreOpener,
    store: SqliteStore,
    path: Path,
    reported: list[DamagedShare],
    operation: Callable[[SqliteStore], Awaitable[object]],
    change: str,
) -> None:
    await enqueue_and_prepare(store, 1)
    reopened = await reopen_after_change(open_sqlite_store, store, path, change)

    assert not await reopened.run(mark_sending, 1, height=5, endpoint="one")
    assert not await operation(reopened)

    assert [share.state for share in reported] == [ShareState.SENT], "reported once"
    assert await reopened.count_shares() == {ROUND: {ShareState.SENT: 1}}


@pytest.mark.rule("R12")
@pytest.mark.parametrize("change", ["witness = flip(witness, 'c1')", "attempts = 2"])
async def test_damaged_share_with_confirmed_nullifier_becomes_tombstone(
    open_sqlite_store: StoreOpener, store: SqliteStore, path: Path, change: str
) -> None:
    await enqueue_shares(store, 1, 2)
    reopened = await reopen_flipped(open_sqlite_store, store, path, change)

    confirmed = await confirm_shares(reopened, 1, 2, height=5)

    assert confirmed == [1, 2]
    assert await reopened.list_shares(QueueFilter(), 9) == []


async def reopen_flipped(opened: StoreOpener, store: SqliteStore, path: Path, change: str) -> SqliteStore:
    """Close the store, change share 1 without its indexes, and reopen it."""
    await store.close()
    flip_bit(path, change)
    return await opened(path)


def flip_bit(path: Path, change: str) -> None:
    """Change share 1 without its indexes, as a flipped bit does, by removing them from the schema."""
    with open_closed_database(path) as conn:
        schema_rows = conn.execute("SELECT rowid, type, name, tbl_name, rootpage, sql FROM sqlite_schema").fetchall()
        conn.execute("PRAGMA writable_schema = ON")
        conn.execute("DELETE FROM sqlite_schema WHERE tbl_name = 'shares' AND type <> 'table'")
        conn.execute("UPDATE sqlite_schema SET sql = replace(sql, 'NOT NULL UNIQUE', 'NOT NULL') WHERE name = 'shares'")
    with open_closed_database(path) as conn:
        conn.execute("PRAGMA ignore_check_constraints = ON")
        conn.execute(f"UPDATE shares SET {change} WHERE id = 1")
        conn.execute("PRAGMA writable_schema = ON")
        conn.execute("DELETE FROM sqlite_schema")
        conn.executemany(
            "INSERT INTO sqlite_schema (rowid, type, name, tbl_name, rootpage, sql) VALUES (?, ?, ?, ?, ?, ?)",
            schema_rows,
        )


@pytest.mark.parametrize("large", [20_000, 20])
@pytest.mark.parametrize("index", ["shares_due", "shares_tag", "sqlite_autoindex_shares_1"])
async def test_verify_reports_damaged_index_and_rebuilds_it(
    open_sqlite_store: StoreOpener,
    store: SqliteStore,
    path: Path,
    index: str,
    large: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(integrity_check, "LARGE_TABLE_ROWS", large)
    monkeypatch.setattr(integrity_check, "PIECE_ROWS", 7)
    await enqueue_shares(store, *range(30))
    await damage_index(store, path, index)
    reopened = await open_sqlite_store(path)
    assert not reopened.has_found_damage

    assert any(index in problem for problem in await reopened.verify())

    assert reopened.has_found_damage, "operators see it until the next start"
    assert await reopened.verify() == []
    assert len(await claim_all_due(reopened)) == 30
    assert len(await confirm_shares(reopened, *range(30), height=5)) == 30


async def test_verify_lets_deleted_rows_be_erased_between_reads(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity_check, "LARGE_TABLE_ROWS", 20)
    monkeypatch.setattr(integrity_check, "PIECE_ROWS", 7)
    events: list[str] = []
    run, wait_for_erasure = SqliteReader.run, store.wait_for_erasure

    async def read(self: SqliteReader, sql: str, params: Params = ()) -> list[Row]:
        assert self not in {store._reader, store._operator_reader}, "operators and wallets do not wait"
        if "integrity_check" in sql or "AS checked" in sql:
            events.append("read")
        return await run(self, sql, params)

    async def pause() -> None:
        events.append("pause")
        await wait_for_erasure()

    monkeypatch.setattr(SqliteReader, "run", read)
    monkeypatch.setattr(store, "wait_for_erasure", pause)
    await enqueue_shares(store, *range(30))
    assert await store.verify() == []
    assert events.count("read") > 10 + 30 // 7
    assert ("read", "read") not in set(pairwise(events))


@pytest.mark.parametrize("offset", [1, 4, 8, 15])
async def test_claim_due_with_inconsistent_index_continues(
    open_sqlite_store: StoreOpener, store: SqliteStore, path: Path, offset: int
) -> None:
    await enqueue_shares(store, *range(30))
    await damage_index(store, path, "shares_due", offset)
    reopened = await open_sqlite_store(path)

    claimed = []
    with suppress(StoreCorrupt):  # until the indexes are rebuilt
        claimed += await claim_all_due(reopened)
    await reopened.verify()
    claimed += await claim_all_due(reopened)

    assert {queued.share for queued in claimed} == {make_posted_share(n).share for n in range(30)}
    assert len(claimed) == 30


@pytest.mark.rule("R9")
async def test_start_after_rebuild_requeues_shares_that_a_damaged_index_hid(
    open_sqlite_store: StoreOpener, store: SqliteStore, path: Path
) -> None:
    await enqueue_shares(store, *range(6))
    assert len(await claim_all_due(store)) == 6
    ((page,),) = query_rows(path, "SELECT rootpage FROM sqlite_schema WHERE name = 'shares_under_way'")
    await store.close()
    reopened = await open_sqlite_store(path)
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096 + 3)
        file.write(bytes(2))  # no cells
    await reopened._writer.run(lambda tx: tx.conn.execute("PRAGMA shrink_memory").fetchall())

    assert await reopened.run_batches(shares.recover) == 0
    assert "shares_under_way" in " ".join(await reopened.verify())
    assert await reopened.run_batches(shares.recover) == 6
    assert await reopened.count_shares() == {ROUND: {ShareState.WAITING: 6}}


async def test_purge_with_dangling_index_entry_completes_after_rebuild(
    open_sqlite_store: StoreOpener, store: SqliteStore, path: Path
) -> None:
    await enqueue_shares(store, 1, 2, 3)
    await store.close()
    change_without_index(path, "shares_due", "DELETE FROM shares WHERE id = 2")
    reopened = await open_sqlite_store(path)

    async with asyncio.timeout(20):
        with pytest.raises(StoreCorrupt):
            await reopened.run_batches(rounds.purge, ROUND)
        await reopened.verify()
        await reopened.run_batches(rounds.purge, ROUND)

    assert await reopened.count_shares() == {}
    assert await reopened.verify() == []


async def test_migration_of_rows_out_of_order_is_refused(store: SqliteStore, path: Path, clock: FakeClock) -> None:
    await enqueue_shares(store, *range(30))
    await store.close()
    endpoint = SqliteEndpoint(path, clock)
    endpoint.connect_read_only()
    assert len(endpoint.read_page(SHARES, SHARES.start or ())) == 30
    endpoint.close()
    corrupt_cell_count(path)

    endpoint.connect_read_only()
    with pytest.raises(StoreCorrupt, match=r"queue\.db is damaged: rows of shares are out of order"):
        endpoint.read_page(SHARES, SHARES.start or ())
    endpoint.close()


def corrupt_cell_count(path: Path) -> None:
    """Flip a bit in the cell count of the last page of shares: 32 more cells, which all read as rowid 0."""
    data = path.read_bytes()
    count = data.index(make_posted_share(29).share.shares_hash) // 4096 * 4096 + 4
    with path.open("r+b") as file:
        file.seek(count)
        file.write(bytes([data[count] ^ 0x20]))


def change_without_index(path: Path, index: str, change: str) -> None:
    """Change a file without updating one of its indexes."""
    schema = "SELECT type, name, tbl_name, rootpage, sql FROM sqlite_schema WHERE name = ?"
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        (entry,) = conn.execute(schema, (index,)).fetchall()
        conn.execute("PRAGMA writable_schema = ON")
        conn.execute("DELETE FROM sqlite_schema WHERE name = ?", (index,))
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute(change)
        conn.execute("PRAGMA writable_schema = ON")
        conn.execute("INSERT INTO sqlite_schema VALUES (?, ?, ?, ?, ?)", entry)


def overwrite_byte(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\x7f")


@pytest.mark.parametrize(
    "damage",
    [corrupt_cell_count, partial(overwrite_byte, place=0), partial(overwrite_byte, place=100)],
    ids=["rows out of order", "header", "schema"],
)
async def test_background_check_completes_and_reports_damage(
    store: SqliteStore, path: Path, damage: Callable[[Path], None]
) -> None:
    await enqueue_shares(store, *range(31))
    await flush_to_file(store)
    damage(path)

    async with asyncio.timeout(20):
        assert await store.verify() != []


@pytest.mark.parametrize("place", [-2, -1], ids=["key", "row"])
@pytest.mark.parametrize("sent", [False, True], ids=["failed", "sent"])
async def test_paging_through_damaged_index_completes(
    open_sqlite_store: StoreOpener, store: SqliteStore, path: Path, *, sent: bool, place: int
) -> None:
    await enqueue_shares(store, *range(30))
    for queued in await claim_all_due(store):
        if sent:
            await store.run(prepare, queued.id, make_reveal(queued.id))
        else:
            await store.run(shares.fail, queued.id, stage="proof", note="for good")
    await store.close()
    entry = bytes([ShareState.SENT.value if sent else ShareState.FAILED.value, 30, 30])
    data = bytearray(path.read_bytes())
    data[data.index(bytes([8, 5, 1, 1, 9, 1]) + entry) + 9 + place] ^= 16  # the index has 14 for the last
    path.write_bytes(data)
    reopened = await open_sqlite_store(path)

    ids: list[int] = []
    async with asyncio.timeout(20):
        while page := await fetch_page(reopened, ids[-1] if ids else 0, sent=sent):
            assert page[-1] > max(ids, default=0)
            ids += page
    assert set(range(1, 29)) <= set(ids)


async def fetch_page(store: SqliteStore, after: int, *, sent: bool) -> list[int]:
    """Ids of the next seven shares that were sent, or that failed."""
    if sent:
        return [message.share_id for message in await store.list_unconfirmed(limit=7, after_id=after)]
    return await store.list_failed_ids(None, after_id=after, limit=7)


async def damage_index(store: SqliteStore, path: Path, index: str, offset: int = 4) -> None:
    """Close the store and flip a bit in the entry at the end of an index's first page."""
    ((page,),) = query_rows(path, f"SELECT rootpage FROM sqlite_schema WHERE name = '{index}'")
    await store.close()
    data = bytearray(path.read_bytes())
    data[page * 4096 - offset] ^= 1
    path.write_bytes(data)


async def flush_to_file(store: SqliteStore) -> None:
    """Confirm share 30. Afterwards all others are in the file, and none in its WAL or cache."""
    await confirm_shares(store, 30, height=4)
    await store.wait_for_erasure()
    await store._writer.run(lambda tx: tx.conn.execute("PRAGMA shrink_memory").fetchall())


async def make_row_unreadable(store: SqliteStore, path: Path, number: int) -> None:
    """Damage the header of a share's row in the file of a running store."""
    await flush_to_file(store)
    data = path.read_bytes()
    # the row's header: its length (that of the witness's type is 2), the types of id, round and mac
    header = bytes([len(SHARE_COLUMNS) + 2, 0, 9, 12 + 2 * 32])
    with path.open("r+b") as file:
        file.seek(data.rindex(header, 0, data.index(make_posted_share(number).share.shares_hash)))
        file.write(b"\x7f")  # a header with more columns than the table has


async def test_apply_block_quarantines_unreadable_row(
    store: SqliteStore, path: Path, reported: list[DamagedShare]
) -> None:
    await enqueue_shares(store, *range(31))
    await make_row_unreadable(store, path, 7)

    claimed = await claim_all_due(store)
    confirmed = await confirm_shares(store, *range(30), height=5)

    assert {queued.share for queued in claimed} == {make_posted_share(n).share for n in range(30) if n != 7}
    assert len(confirmed) == 29
    assert reported == [DamagedShare("", b"", -1)] == await store.list_damaged()
    assert await greatest_height(store) == 5


async def test_unconfirmed_with_unreadable_row_returns_the_others(
    store: SqliteStore, path: Path, reported: list[DamagedShare]
) -> None:
    await enqueue_shares(store, *range(31))
    for queued in await claim_all_due(store):
        await store.run(prepare, queued.id, make_reveal(queued.id))
    await make_row_unreadable(store, path, 7)

    messages = await store.list_unconfirmed()

    assert len(messages) == 29
    assert make_posted_share(7).nullifier not in {message.nullifier for message in messages}
    assert reported == [DamagedShare("", b"", -1)]


@pytest.mark.rule("N25")
@pytest.mark.parametrize("state", [ShareState.WAITING, ShareState.SENT])
async def test_list_shares_marks_unreadable_row_and_lists_the_others(
    store: SqliteStore, path: Path, state: ShareState
) -> None:
    await enqueue_shares(store, *range(31))
    for queued in await claim_all_due(store) if state is ShareState.SENT else ():
        await store.run(prepare, queued.id, make_reveal(queued.id))
    expected = await store.list_shares(QueueFilter(), 99)
    await make_row_unreadable(store, path, 7)
    with pytest.raises(StoreCorrupt):
        await store.list_shares(QueueFilter(), 99)

    await store.verify()
    listed = await store.list_shares(QueueFilter(state=state), 99)

    intact = [entry for entry in listed if not entry.damaged]
    assert len(intact) == 29
    assert intact == [entry for entry in expected if entry in intact]
    (bad,) = [entry for entry in listed if entry.damaged]
    assert (bad.ref, bad.round, bad.state, bad.note) == ("", "", "received", UNREADABLE_NOTE)
    assert len(await store.list_shares(QueueFilter(state=state), 5)) == 5
    assert await store.list_shares(QueueFilter(stage="proof"), 99) == [bad], "unreadable rows are always reported"
    assert await store.list_shares(QueueFilter(round_id=b"2" * 32), 99) == [bad]


async def test_share_details_with_damaged_end_of_round_are_returned(store: SqliteStore, path: Path) -> None:
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    await enqueue_shares(store, 1)
    await store.close()
    for change in ("replace(sql, ') STRICT', ')')", "sql || ' STRICT'"):
        with open_closed_database(path) as conn:
            if change.startswith("sql"):
                conn.execute("UPDATE rounds SET vote_end_time = 'damaged'")
            conn.execute("PRAGMA writable_schema = ON")
            conn.execute(f"UPDATE sqlite_schema SET sql = {change} WHERE name = 'rounds'")

    async with open_queue_file(path) as queue:
        (entry,) = await queue.list_shares(QueueFilter(), 9)
        details = await queue.get_share_details(entry.ref)

    assert details is not None
    assert details.vote_end_time is None


async def test_enqueue_known_share_with_damaged_index_is_duplicate(
    open_sqlite_store: StoreOpener, store: SqliteStore, path: Path
) -> None:
    await enqueue_shares(store, *range(30))
    await damage_index(store, path, "sqlite_autoindex_shares_1")
    reopened = await open_sqlite_store(path)

    await enqueue_shares(reopened, *range(30))

    assert await reopened.count_shares() == {ROUND: {ShareState.WAITING: 30}}
    assert await reopened.verify() != []
    assert len(await confirm_shares(reopened, *range(30), height=5)) == 30


@pytest.mark.parametrize(
    "change", ["due_ms = due_ms + 99000000", "round_no = 2", "state = 3", "witness = flip(witness, 'c1')"]
)
async def test_background_check_quarantines_damaged_row_before_rebuild(
    open_sqlite_store: StoreOpener, store: SqliteStore, path: Path, reported: list[DamagedShare], change: str
) -> None:
    await enqueue_shares(store, 1, 2)
    reopened = await reopen_flipped(open_sqlite_store, store, path, change)

    await reopened.verify()

    assert len(reported) == 1
    assert query_rows(path, "SELECT share_id FROM damaged") == [(1,)]
    assert [queued.share for queued in await claim_all_due(reopened)] == [make_posted_share(2).share]
    confirmed = await confirm_shares(reopened, 1, 2, height=5)
    assert confirmed == ([2] if change == "round_no = 2" else [1, 2]), "it can be deleted once the indexes match it"
    assert await reopened.verify() == []


async def test_write_that_meets_damaged_index_makes_a_check_due(
    open_sqlite_store: StoreOpener, store: SqliteStore, path: Path
) -> None:
    await enqueue_shares(store, 1, 2)
    reopened = await reopen_flipped(open_sqlite_store, store, path, "due_ms = due_ms - 5000")
    assert not reopened.has_met_damage

    with pytest.raises(StoreCorrupt):
        await confirm_shares(reopened, 1, 2, height=5)

    assert reopened.has_met_damage
    await reopened.verify()
    assert not reopened.has_met_damage, "at most one such check per start"
    assert await confirm_shares(reopened, 1, 2, height=5) == [1, 2]


async def test_background_check_reports_damaged_message(
    open_sqlite_store: StoreOpener, store: SqliteStore, path: Path, reported: list[DamagedShare]
) -> None:
    await enqueue_and_prepare(store, 1)
    reopened = await reopen_after_change(open_sqlite_store, store, path, "UPDATE reveals SET message = zeroblob(77)")

    assert await reopened.verify() == []

    assert [share.state for share in reported] == [ShareState.SENT]


async def test_post_of_share_with_unreadable_row_is_duplicate(store: SqliteStore, path: Path) -> None:
    await enqueue_shares(store, *range(31))
    await make_row_unreadable(store, path, 7)

    await enqueue_shares(store, *range(31))

    assert {queued.share for queued in await claim_all_due(store)} == {
        make_posted_share(n).share for n in range(30) if n != 7
    }
    assert await store.list_damaged() == [DamagedShare("", b"", -1)]
