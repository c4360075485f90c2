"""Full disks, operations that fail, and what a failure of one does to the others of its batch."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from helper.core.share import ShareState
from helper.errors import StoreCorrupt, StoreError, StoreFull
from helper.store.disk_health import LOCATION_EVERY, DiskHealth
from helper.store.operations.chain_facts import set_meta
from helper.store.rows import Enqueued
from helper.store.sqlite.errors import UnreadableRowError, is_environment, is_full, translate
from helper.store.sqlite.store import SqliteStore
from helper.store.sqlite.transaction import SqliteTransaction
from tests.support.clock import FakeClock
from tests.unit.store.fixtures import NOW, ROUND, claim_one, files, posted, put


def limit_pages(tx: SqliteTransaction, more: int) -> None:
    """Let the file grow by so many pages and no further."""
    pages = tx.conn.execute("PRAGMA page_count").fetchone()[0]
    tx.conn.execute(f"PRAGMA max_page_count = {pages + more}")


async def test_a_full_disk_is_told_and_what_was_answered_before_is_kept(store: SqliteStore, path: Path) -> None:
    await store._writer.run(partial(limit_pages, more=3))

    answered = 0
    full: StoreFull | None = None
    while full is None and answered < 199:
        try:
            await put(store, answered)
            answered += 1
        except StoreFull as error:
            full = error

    assert full is not None
    assert full.retryable
    assert answered > 0
    assert await store.counts() == {ROUND: {ShareState.RECEIVED: answered}}
    with pytest.raises(StoreFull):
        await put(store, answered)

    await store._writer.run(partial(limit_pages, more=1_000))
    await put(store, *range(200))
    assert await store.counts() == {ROUND: {ShareState.RECEIVED: 200}}


async def test_on_a_full_disk_a_whole_batch_fails_and_nothing_of_it_is_kept(store: SqliteStore) -> None:
    await store._writer.run(partial(limit_pages, more=1))

    outcomes = await asyncio.gather(
        *(store.enqueue(posted(n).share, posted(n).nullifier, now=NOW) for n in range(300)), return_exceptions=True
    )

    kept = sum(outcome is Enqueued.QUEUED for outcome in outcomes)
    assert sum(isinstance(outcome, StoreFull) for outcome in outcomes) == 300 - kept
    assert (await store.counts()).get(ROUND, {}) == ({ShareState.RECEIVED: kept} if kept else {})


async def test_one_refused_operation_does_not_harm_the_others_of_its_batch(store: SqliteStore) -> None:
    share_id = await claim_one(store, 999)
    await store.fail(share_id, stage="proof", note="no", spend_attempt=False)
    good = [store.enqueue(posted(n).share, posted(n).nullifier, now=NOW) for n in range(20)]
    bad = store.requeue(share_id, stage="tree", note="it has failed")

    first, *rest = await asyncio.gather(bad, *good, return_exceptions=True)

    assert isinstance(first, StoreError)
    assert rest == [Enqueued.QUEUED] * 20
    assert await store.counts() == {ROUND: {ShareState.RECEIVED: 20, ShareState.FAILED: 1}}


async def test_an_operation_that_fails_half_way_is_undone_and_the_others_run_again(store: SqliteStore) -> None:
    def half(tx: SqliteTransaction) -> None:
        set_meta(tx, "half", "done")
        tx.count(tx.need_round(ROUND).no, ShareState.RECEIVED, 1000)
        raise ValueError("half way")

    good = [store.enqueue(posted(n).share, posted(n).nullifier, now=NOW) for n in range(20)]
    outcomes = await asyncio.gather(*good[:10], store._writer.run(half), *good[10:], return_exceptions=True)

    failed = outcomes.pop(10)
    assert isinstance(failed, ValueError)
    assert outcomes == [Enqueued.QUEUED] * 20
    assert await store.get_meta("half") is None
    assert await store.counts() == {ROUND: {ShareState.RECEIVED: 20}}


async def test_a_share_that_the_schema_refuses_is_refused_alone(store: SqliteStore) -> None:
    one = posted(1)

    results = await asyncio.gather(
        store.enqueue(one.share, b"short", now=NOW),
        store.enqueue(posted(2).share, posted(2).nullifier, now=NOW),
        return_exceptions=True,
    )

    assert isinstance(results[0], StoreError)
    assert "schema" in str(results[0])
    assert results[1] is Enqueued.QUEUED
    assert not await store.is_known(one.share.key)


async def test_a_fault_of_the_writer_itself_is_told_and_does_not_end_it(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(_tx: SqliteTransaction, _loop: object, _share_id: int) -> None:
        raise RuntimeError("a fault")

    def unreadable(_tx: SqliteTransaction) -> None:
        raise UnreadableRowError(1)

    monkeypatch.setattr(store._writer, "_set_aside", fault)
    with pytest.raises(RuntimeError, match="a fault"):
        await store._writer.run(unreadable)

    await put(store, 1)
    assert await store.counts() == {ROUND: {ShareState.RECEIVED: 1}}


async def test_an_opening_that_is_cancelled_lets_go_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    first = SqliteStore(path)
    opening = asyncio.create_task(first.open())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    thread = next((one for one in threading.enumerate() if one.name == "store-writer"), None)
    if thread is not None:
        await asyncio.to_thread(thread.join)

    second = SqliteStore(path)
    await second.open()
    await second.close()


async def test_errors_become_those_of_the_house() -> None:
    def error_of(sql: str) -> sqlite3.Error:
        conn = sqlite3.connect(":memory:")
        try:
            conn.executescript(sql)
        except sqlite3.Error as error:
            return error
        finally:
            conn.close()
        raise AssertionError

    refused = error_of("CREATE TABLE t (a CHECK (a > 0)); INSERT INTO t VALUES (0);")
    wrong = error_of("SELECT * FROM nowhere")
    damaged = sqlite3.DatabaseError("malformed")
    damaged.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    other = ValueError("not of SQLite")

    assert type(translate(refused)) is StoreError
    assert not is_environment(refused)
    assert type(translate(wrong)) is StoreError
    assert is_environment(wrong)
    assert type(translate(damaged)) is StoreCorrupt
    assert translate(other) is other
    assert not is_environment(other)


def refuse_writes(tx: SqliteTransaction, *, refused: bool) -> None:
    """Let no statement write, as a disk that fails; or let it again."""
    writing = {sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_INSERT, sqlite3.SQLITE_PRAGMA}

    def judge(action: int, *_: object) -> int:
        return sqlite3.SQLITE_DENY if action in writing else sqlite3.SQLITE_OK

    tx.conn.set_authorizer(judge if refused else None)


async def test_a_disk_that_fails_is_told_without_being_asked_and_tried_until_it_works(
    store: SqliteStore, clock: FakeClock
) -> None:
    assert store.trouble is None
    await store._writer.run(partial(refuse_writes, refused=True))
    assert store.trouble is None, "nothing was written yet"
    with pytest.raises(StoreError):
        await put(store, 1)
    assert store.trouble is not None

    await store._writer.run(partial(refuse_writes, refused=False))
    assert store.trouble is not None, "a transaction without a change proves nothing"
    clock.advance(1)
    async with asyncio.timeout(10):
        while store.trouble is not None:
            await asyncio.sleep(0.01)
    await put(store, 1)


async def test_the_probe_writes_and_syncs(store: SqliteStore, path: Path, clock: FakeClock) -> None:
    """An update that changes nothing does not: under it the status said ok on a disk that failed."""
    store._writer.trouble.reason = "no space"
    before = files(path)["queue.db-wal"]
    clock.advance(1)
    await store._writer.run(lambda _: None)
    async with asyncio.timeout(10):
        while store.trouble is not None:
            await asyncio.sleep(0.01)
    assert files(path)["queue.db-wal"] != before


async def test_what_one_operation_does_wrong_is_no_trouble_of_the_disk(store: SqliteStore) -> None:
    with pytest.raises(StoreError, match="refuses"):
        await store._writer.run(lambda tx: tx.run("set_aside", (None, None, None, None, None)))
    assert store.trouble is None


def test_only_a_full_disk_is_full() -> None:
    full, broken = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")
    assert (is_full(full), is_full(broken), is_full(ValueError())) == (True, False, False)


def test_a_full_disk_is_well_again_only_with_room_for_shares(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small commit fits where shares do not: the status would waver."""
    free = [0]
    about = SimpleNamespace(f_frsize=4096)
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(**vars(about), f_bavail=free[0]))
    trouble = DiskHealth(tmp_path / "queue.db", clock)
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    trouble.note(full)
    assert not trouble.probe_due
    clock.advance(1)
    assert trouble.probe_due
    trouble.written()
    assert trouble.reason is not None
    assert not trouble.probe_due, "not at once again"
    free[0] = 256
    trouble.written()
    assert trouble.reason is None
    assert trouble.patience(None) == LOCATION_EVERY
