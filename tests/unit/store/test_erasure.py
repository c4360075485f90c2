"""After a confirmation or a purge, no data of the share is in any file."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from helper.core.share import ShareState
from helper.store import blocks, messages, rounds, shares
from helper.store.sqlite import erasure
from helper.store.sqlite.erasure import note_stale, scrub_pages
from helper.store.sqlite.opening import open_database
from helper.store.sqlite.store import SqliteStore
from proofs import page_gap
from tests.support.clock import FakeClock
from tests.unit.store.fixtures import (
    NOW,
    OTHER_ROUND,
    ROUND,
    PostedShare,
    StoreOpener,
    claim_all_due,
    confirm_shares,
    enqueue,
    enqueue_and_prepare,
    enqueue_shares,
    make_posted_share,
    make_reveal,
    query_rows,
    read_database_files,
)

PAGE_BYTES = 4096


def witness_fragments(posted: PostedShare) -> list[bytes]:
    """Data that must be erased: both ends of every field, because a partial overwrite may leave either."""
    share = posted.share
    fields = [share.shares_hash, share.share_comms, share.primary_blind, share.c1, share.c2]
    return [part for field in fields for part in (field[:12], field[-12:])]


def count_occurrences(path: Path, canaries: list[bytes]) -> dict[str, int]:
    counted = {name: sum(data.count(canary) for canary in canaries) for name, data in read_database_files(path).items()}
    return {name: count for name, count in counted.items() if count}


@pytest.mark.rule("R14")
async def test_confirmation_erases_all_but_the_spent_nullifier(store: SqliteStore, path: Path) -> None:
    await enqueue_and_prepare(store, 1)
    await enqueue_shares(store, 2)
    posted, sent = make_posted_share(1), make_reveal(1)
    message = [sent.message[50:62], sent.message[-12:], sent.tx_hash]
    assert count_occurrences(path, witness_fragments(posted))
    assert count_occurrences(path, message)
    assert count_occurrences(path, [posted.nullifier])

    await confirm_shares(store, 1, height=9)
    await store.wait_for_erasure()

    assert count_occurrences(path, witness_fragments(posted)) == {}
    assert count_occurrences(path, message) == {}
    assert count_occurrences(path, [posted.nullifier]) == {"queue.db": 1}
    assert read_database_files(path)["queue.db-wal"] == b""
    assert count_occurrences(path, witness_fragments(make_posted_share(2))), "the search finds existing data"


@pytest.mark.rule("R14")
async def test_own_spent_nullifiers_are_stored_like_all_others(store: SqliteStore, path: Path) -> None:
    await enqueue_shares(store, 1)
    await confirm_shares(store, 1, 99, height=9)
    await store.close()

    conn = sqlite3.connect(path)
    try:
        columns = [row[1] for row in conn.execute("PRAGMA table_info(spent)")]
        spent = conn.execute("SELECT * FROM spent").fetchall()
        tombstones = conn.execute("SELECT * FROM tombstones").fetchall()
    finally:
        conn.close()
    assert columns == ["round_no", "nullifier"]
    assert sorted(spent) == sorted((1, make_posted_share(number).nullifier) for number in (1, 99))
    assert [(no, len(mac)) for no, mac in tombstones] == [(1, 32)]


@pytest.mark.rule("R14")
async def test_confirmation_of_some_of_many_shares_erases_every_page(store: SqliteStore, path: Path) -> None:
    """Uses enough rows and changes that pages are rebalanced and retain old bytes."""
    source = random.Random(1)
    await enqueue_shares(store, *range(500))
    ids: dict[int, int] = {}
    for _ in range(3):
        claimed = await claim_all_due(store, limit=500)
        ids |= {queued.share.tree_position - 70_000: queued.id for queued in claimed}
        for queued in claimed:
            note = "x" * source.randrange(200)
            await store.run(
                shares.requeue, queued.id, due_ms=int(NOW) * 1000 - source.randrange(10**6), stage="t", note=note
            )
    removed = source.sample(sorted(ids), 250)

    await store.run(blocks.add_spent, [(ROUND, make_posted_share(number).nullifier) for number in removed])
    await store.wait_for_erasure()

    assert (
        count_occurrences(
            path, [canary for number in removed for canary in witness_fragments(make_posted_share(number))]
        )
        == {}
    )
    occurrences = count_occurrences(path, [make_posted_share(number).nullifier for number in removed])
    assert occurrences == {"queue.db": len(removed)}
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 250, ShareState.CONFIRMED: 250}}


@pytest.mark.rule("R14")
async def test_purge_erases_its_round_and_keeps_others(store: SqliteStore, path: Path) -> None:
    for number in range(300):
        await enqueue_shares(store, number)
    await enqueue(store, make_posted_share(5, round_id=OTHER_ROUND))
    await store.run(rounds.save_leaves, ROUND, 3, 0, b"leaf" * 8 * 40)
    await store.run(rounds.save_subtrees, ROUND, 0, b"node" * 8 * 1023)
    await confirm_shares(store, *range(20), height=9)
    for queued in await claim_all_due(store, limit=3):
        await store.run(messages.prepare, queued.id, make_reveal(1))
    ((key,),) = query_rows(path, "SELECT mac_key FROM round_keys WHERE no = 1")

    assert await store.run_batches(rounds.purge, ROUND) == 300
    await store.wait_for_erasure()

    all_rows = [
        canary
        for n in range(300)
        for canary in [*witness_fragments(make_posted_share(n)), make_posted_share(n).nullifier]
    ]
    assert count_occurrences(path, [*all_rows, make_reveal(1).tx_hash, ROUND, key, b"leaf" * 3, b"node" * 3]) == {}
    assert await store.count_shares() == {OTHER_ROUND: {ShareState.WAITING: 1}}
    assert not await store.is_known(make_posted_share(1).share.key)
    assert not await store.is_spent(ROUND, make_posted_share(1).nullifier)
    assert await store.run_batches(rounds.purge, ROUND) == 0


async def test_long_reader_delays_erasure_and_does_not_block_writer(
    store: SqliteStore, path: Path, clock: FakeClock
) -> None:
    await enqueue_shares(store, 1)
    reader = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM shares").fetchone()

    await confirm_shares(store, 1, height=9)
    await enqueue_shares(store, 2)  # a commit while the reader still sees the old state
    assert count_occurrences(path, witness_fragments(make_posted_share(1)))
    clock.advance(40)
    assert (store.erasure_pending_seconds, store.wal_bytes > 0) == (40, True)
    reader.execute("COMMIT")
    reader.close()
    await store.wait_for_erasure()
    assert (store.erasure_pending_seconds, store.wal_bytes) == (0, 0)

    assert count_occurrences(path, witness_fragments(make_posted_share(1))) == {}


async def test_close_finishes_erasure(store: SqliteStore, path: Path) -> None:
    await enqueue_shares(store, 1)
    await confirm_shares(store, 1, height=9)

    await store.close()

    assert count_occurrences(path, witness_fragments(make_posted_share(1))) == {}
    assert sorted(read_database_files(path)) == ["queue.db", "queue.db.lock"]


def rewrite_rows(conn: sqlite3.Connection) -> list[bytes]:
    """Fill and change a table of texts until SQLite has left copies behind; return the deleted rows' contents."""
    source = random.Random(2)
    conn.execute("PRAGMA secure_delete = ON")
    contents = {f"{number}": source.randbytes(150).hex() for number in range(1500)}
    conn.executemany("INSERT INTO meta VALUES (?, ?, zeroblob(8))", contents.items())
    for _ in range(4000):
        key = f"{source.randrange(1500)}"
        conn.execute("UPDATE meta SET value = ? WHERE key = ?", (contents[key] + "x" * source.randrange(120), key))
    removed = source.sample(sorted(contents), 700)
    conn.executemany("DELETE FROM meta WHERE key = ?", [(key,) for key in removed])
    conn.commit()
    return [part.encode() for key in removed for part in (contents[key][:24], contents[key][-24:])]


def leave_remains_of_crash(path: Path, clock: FakeClock) -> list[bytes]:
    """Create the database of a helper that was killed before it erased the rows with these contents."""
    open_database(path, clock).close()
    conn = sqlite3.connect(path)
    deleted = rewrite_rows(conn)
    conn.close()
    assert count_occurrences(path, deleted)
    Path(f"{path}.lock").write_bytes(b"open\n")
    return deleted


def test_scrub_removes_stale_copies_in_page_gaps_only(path: Path) -> None:
    conn = sqlite3.connect(path)
    conn.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT, row_check BLOB) WITHOUT ROWID")
    deleted = rewrite_rows(conn)
    meta_rows = conn.execute("SELECT * FROM meta ORDER BY key").fetchall()
    conn.close()
    assert count_occurrences(path, deleted), "if SQLite leaves no remains, scrubbing is unnecessary"
    pages = path.stat().st_size // 4096

    with path.open("r+b") as file:
        assert scrub_pages(file.fileno(), range(1, pages + 1), 4096) > 0
        assert scrub_pages(file.fileno(), range(1, pages + 1), 4096) == 0

    assert count_occurrences(path, deleted) == {}
    conn = sqlite3.connect(path)
    assert conn.execute("SELECT * FROM meta ORDER BY key").fetchall() == meta_rows
    assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    conn.close()


def test_open_after_crash_scrubs_complete_file(path: Path, clock: FakeClock) -> None:
    deleted = leave_remains_of_crash(path, clock)
    lock = Path(f"{path}.lock")
    lock.write_bytes(b"clean\n")
    open_database(path, clock).close()
    assert count_occurrences(path, deleted), "after a clean shutdown nothing is searched"

    lock.write_bytes(b"open\n")
    open_database(path, clock).close()
    assert count_occurrences(path, deleted) == {}


async def test_open_after_crash_scrubs_large_file_in_background(
    path: Path, clock: FakeClock, open_sqlite_store: StoreOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "PAGES_AT_ONCE", 1)
    monkeypatch.setattr(erasure, "SLICE", 2)
    deleted = leave_remains_of_crash(path, clock)

    store = await open_sqlite_store(path)
    assert count_occurrences(path, deleted), "the start did not wait for the scrub"
    await enqueue_shares(store, 1)
    await store.wait_for_erasure()

    assert count_occurrences(path, deleted) == {}
    await store.close()
    assert Path(f"{path}.lock").read_bytes() == b"clean\n"


def test_background_scrub_under_load_uses_a_tenth_of_the_time(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "PAGES_AT_ONCE", 1)
    monkeypatch.setattr(erasure, "SLICE", 1)
    leave_remains_of_crash(path, clock)
    database = open_database(path, clock)
    conn, eraser = database.tx.conn, database.eraser
    slices = []

    def scrub(_fd: int, pages: set[int], _size: int, *, again: bool) -> int:
        clock.advance(0.1)
        slices.append(pages)
        return int(again)

    monkeypatch.setattr(erasure, "scrub_pages", scrub)

    def write_and_run_eraser() -> int:
        conn.execute("UPDATE meta SET row_check = randomblob(8) WHERE key = (SELECT min(key) FROM meta)")
        eraser.run_due(idle=True)
        return len(slices)

    assert write_and_run_eraser() == 1
    assert write_and_run_eraser() == 1
    clock.advance(0.8)
    assert write_and_run_eraser() == 1
    clock.advance(0.2)
    assert write_and_run_eraser() == 2
    eraser.run_due(idle=True)
    eraser.run_due(idle=True)
    assert len(slices) == 4, "no caller waits for the writer"
    database.close()


async def test_open_after_unfinished_scrub_starts_again(
    path: Path, clock: FakeClock, open_sqlite_store: StoreOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "PAGES_AT_ONCE", 1)
    monkeypatch.setattr(erasure, "SLICE", 1)
    monkeypatch.setattr(erasure, "SLICE_PAUSE", 3600.0)
    leave_remains_of_crash(path, clock)

    store = await open_sqlite_store(path)
    await store.close()

    assert Path(f"{path}.lock").read_bytes() == b"open\n"


def build_leaf_page(content: bytes = b"", *, gap: bytes = b"") -> bytes:
    """A b-tree leaf page without cells: `content` at its end, `gap` before that."""
    head = b"\x0d\x00\x00\x00\x00" + (PAGE_BYTES - len(content)).to_bytes(2, "big") + b"\x00"
    return head + bytes(PAGE_BYTES - len(head) - len(content) - len(gap)) + gap + content


def test_note_stale_uses_newest_copy_of_page(tmp_path: Path) -> None:
    clean, stale = build_leaf_page(b"row"), build_leaf_page(b"row", gap=b"old")
    frames = [(2, stale), (3, clean), (4, stale), (2, clean), (5, bytes(PAGE_BYTES)), *[(9, clean)] * 20, (6, stale)]
    wal = tmp_path / "wal"
    wal.write_bytes(bytes(32) + b"".join(number.to_bytes(4, "big") + bytes(20) + page for number, page in frames))

    stale_pages = {3, 7}
    note_stale(stale_pages, wal, range(3), PAGE_BYTES)
    assert stale_pages == {2, 4, 7}
    note_stale(stale_pages, wal, range(3, len(frames)), PAGE_BYTES)
    assert stale_pages == {4, 6, 7}
    with pytest.raises(OSError, match="shorter"):
        note_stale(stale_pages, wal, range(len(frames), len(frames) + 1), PAGE_BYTES)
    with pytest.raises(OSError, match="No such file"):
        note_stale(stale_pages, tmp_path / "none", range(1), PAGE_BYTES)


@pytest.mark.rule("R14")
@pytest.mark.parametrize("in_between", [False, True])
def test_scrubbed_bytes_are_not_restored_from_cache(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, *, in_between: bool
) -> None:
    """Gaps are also scrubbed while nothing is deleted, and the connection keeps using its cached pages."""
    monkeypatch.setattr(erasure, "PAGES_PER_SCRUB", 1)
    database = open_database(path, clock)
    conn, eraser = database.tx.conn, database.eraser
    conn.execute("BEGIN IMMEDIATE")
    deleted = rewrite_rows(conn)
    if in_between:
        monkeypatch.setattr(erasure, "CHANGES_PER_CHECKPOINT", 1)
        eraser.run_due(idle=False)
        assert list(count_occurrences(path, deleted)) == ["queue.db-wal"]
    eraser.record_deletion()
    eraser.run_due(idle=True)
    assert not eraser.is_pending
    assert count_occurrences(path, deleted) == {}

    conn.execute("UPDATE meta SET row_check = x'0102030405060708'")  # rewrites every page
    conn.execute("PRAGMA wal_checkpoint(PASSIVE)")

    assert count_occurrences(path, deleted) == {}
    database.close()


def test_scrub_with_unreadable_wal_checks_all_pages(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database(path, clock)
    conn, eraser = database.tx.conn, database.eraser

    def fail(*_: object) -> None:
        raise OSError("no")

    with monkeypatch.context() as patched:
        patched.setattr(erasure, "note_stale", fail)
        conn.execute("BEGIN IMMEDIATE")
        deleted = rewrite_rows(conn)
        eraser.record_deletion()
        eraser.run_due(idle=True)
    clock.advance(erasure.ERROR_RETRY_SECONDS)
    conn.execute("INSERT INTO meta VALUES ('new', '', zeroblob(8))")  # restarts the WAL
    while eraser.is_pending:
        eraser.run_due(idle=True)

    assert count_occurrences(path, deleted) == {}
    database.close()


def test_scrub_leaves_other_page_types_unchanged() -> None:
    assert page_gap(bytes(PAGE_BYTES), 7) is None
    assert page_gap(b"\x0d" + bytes(PAGE_BYTES - 1), 7) is None, "content from 65536 on is outside the page"
    assert page_gap(b"\x0d", 7) is None, "not a complete header"
    page = bytearray(PAGE_BYTES)
    page[0:8] = b"\x0d\x00\x00\x00\x02\x0f\x00\x00"
    assert page_gap(bytes(page), 7) == (12, 0x0F00)
    first = bytes(100) + bytes(page[: PAGE_BYTES - 100])
    assert page_gap(first, 1) == (112, 0x0F00)
    page[0] = 5
    assert page_gap(bytes(page), 7) == (16, 0x0F00), "an interior page's header is longer"
    page[5:7] = b"\x00\x04"
    assert page_gap(bytes(page), 7) is None, "cells overlap the pointers: a damaged page"
