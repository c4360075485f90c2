"""Full disks, failed syncs, failing operations, and their effect on other operations of a batch."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from helper.core.share import ShareState
from helper.errors import StoreCorrupt, StoreError, StoreFull
from helper.store import shares
from helper.store.blocks import set_meta
from helper.store.models import EnqueueResult
from helper.store.sqlite.erasure import ERROR_RETRY_SECONDS, scrub_pages
from helper.store.sqlite.errors import (
    LOCATION_CHECK_SECONDS,
    DiskHealth,
    UnreadableRowError,
    is_disk_full,
    is_environment_error,
    translate,
)
from helper.store.sqlite.file_lock import FileLock
from helper.store.sqlite.opening import open_database
from helper.store.sqlite.snapshot import read_contents
from helper.store.sqlite.store import SqliteStore
from helper.store.sqlite.transaction import SqliteTransaction
from tests.support.clock import FakeClock
from tests.support.fakes import wait_until
from tests.unit.store.fixtures import (
    NOW,
    ROUND,
    StoreOpener,
    copy_as_crashed,
    enqueue,
    enqueue_and_claim,
    enqueue_shares,
    make_posted_share,
    read_database_files,
)


def limit_page_count(tx: SqliteTransaction, more: int) -> None:
    """Limit the growth of the file to this many pages."""
    pages = tx.conn.execute("PRAGMA page_count").fetchone()[0]
    tx.conn.execute(f"PRAGMA max_page_count = {pages + more}")


async def test_full_disk_is_reported_and_acknowledged_shares_survive(store: SqliteStore, path: Path) -> None:
    await store._writer.run(partial(limit_page_count, more=3))

    acknowledged = 0
    full: StoreFull | None = None
    while full is None and acknowledged < 199:
        try:
            await enqueue_shares(store, acknowledged)
            acknowledged += 1
        except StoreFull as error:
            full = error

    assert full is not None
    assert acknowledged > 0
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: acknowledged}}
    with pytest.raises(StoreFull):
        await enqueue_shares(store, acknowledged)

    await store._writer.run(partial(limit_page_count, more=1_000))
    await enqueue_shares(store, *range(200))
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 200}}


async def test_full_disk_fails_all_operations_of_batch(store: SqliteStore) -> None:
    await store._writer.run(partial(limit_page_count, more=1))

    outcomes = await asyncio.gather(
        *(enqueue(store, make_posted_share(n)) for n in range(300)),
        return_exceptions=True,
    )

    queued_count = sum(outcome is EnqueueResult.QUEUED for outcome in outcomes)
    assert sum(isinstance(outcome, StoreFull) for outcome in outcomes) == 300 - queued_count
    assert (await store.count_shares()).get(ROUND, {}) == ({ShareState.WAITING: queued_count} if queued_count else {})


async def test_refused_operation_does_not_affect_its_batch(store: SqliteStore) -> None:
    share_id = await enqueue_and_claim(store, 999)
    await store.run(shares.fail, share_id, stage="proof", note="no")
    good = [enqueue(store, make_posted_share(n)) for n in range(20)]
    bad = store.run(shares.requeue, share_id, stage="tree", note="it has failed")

    first, *rest = await asyncio.gather(bad, *good, return_exceptions=True)

    assert isinstance(first, StoreError)
    assert rest == [EnqueueResult.QUEUED] * 20
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 20, ShareState.FAILED: 1}}


async def test_failing_operation_is_rolled_back_and_others_rerun(store: SqliteStore) -> None:
    def half(tx: SqliteTransaction) -> None:
        set_meta(tx, "half", "done")
        tx.adjust_count(tx.ensure_round(ROUND).no, ShareState.WAITING, 1000)
        raise ValueError("half way")

    good = [enqueue(store, make_posted_share(n)) for n in range(20)]
    outcomes = await asyncio.gather(*good[:10], store._writer.run(half), *good[10:], return_exceptions=True)

    failed = outcomes.pop(10)
    assert isinstance(failed, ValueError)
    assert outcomes == [EnqueueResult.QUEUED] * 20
    assert await store.get_meta("half") is None
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 20}}


async def test_share_violating_schema_is_refused_alone(store: SqliteStore) -> None:
    posted = make_posted_share(1)

    results = await asyncio.gather(
        store.run(shares.EnqueueOperation(posted.share, b"short", now=NOW)),
        enqueue(store, make_posted_share(2)),
        return_exceptions=True,
    )

    assert isinstance(results[0], StoreError)
    assert "schema" in str(results[0])
    assert results[1] is EnqueueResult.QUEUED
    assert not await store.is_known(posted.share.key)


async def test_writer_fault_is_reported_and_writer_continues(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(_tx: SqliteTransaction, _share_id: int) -> None:
        raise RuntimeError("a fault")

    def unreadable(_tx: SqliteTransaction) -> None:
        raise UnreadableRowError(1)

    monkeypatch.setattr(store._writer, "_quarantine", fault)
    with pytest.raises(RuntimeError, match="a fault"):
        await store._writer.run(unreadable)

    await enqueue_shares(store, 1)
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 1}}


async def test_cancelled_open_releases_the_file(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    first = SqliteStore(path)
    opening = asyncio.create_task(first.open())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    thread = next((candidate for candidate in threading.enumerate() if candidate.name == "store-writer"), None)
    if thread is not None:
        await asyncio.to_thread(thread.join)

    second = SqliteStore(path)
    await second.open()
    await second.close()


async def test_sqlite_errors_are_mapped_to_store_errors() -> None:
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
    assert not is_environment_error(refused)
    assert type(translate(wrong)) is StoreError
    assert is_environment_error(wrong)
    assert type(translate(damaged)) is StoreCorrupt
    assert translate(other) is other
    assert not is_environment_error(other)


def deny_writes(tx: SqliteTransaction, *, refused: bool) -> None:
    """Deny all writes, like a failing disk, or allow them again."""
    writing = {sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_INSERT, sqlite3.SQLITE_PRAGMA}

    def authorize(action: int, *_: object) -> int:
        return sqlite3.SQLITE_DENY if action in writing else sqlite3.SQLITE_OK

    tx.conn.set_authorizer(authorize if refused else None)


async def test_failing_disk_is_reported_and_probed_until_it_recovers(store: SqliteStore, clock: FakeClock) -> None:
    assert store.write_error is None
    await store._writer.run(partial(deny_writes, refused=True))
    assert store.write_error is None, "nothing is written yet"
    with pytest.raises(StoreError):
        await enqueue_shares(store, 1)
    assert store.write_error is not None

    await store._writer.run(partial(deny_writes, refused=False))
    assert store.write_error is not None, "a transaction without a change is no evidence"
    clock.advance(1)
    await wait_until(lambda: store.write_error is None)
    await enqueue_shares(store, 1)


async def test_disk_probe_writes_and_syncs(store: SqliteStore, path: Path, clock: FakeClock) -> None:
    """An update that changes no value writes nothing: with such a probe, the status was ok on a failing disk."""
    store._writer.disk_health.reason = "no space"
    before = read_database_files(path)["queue.db-wal"]
    clock.advance(1)
    await store._writer.run(lambda _: None)
    await wait_until(lambda: store.write_error is None)
    assert read_database_files(path)["queue.db-wal"] != before


async def test_operation_error_is_not_a_disk_fault(store: SqliteStore) -> None:
    with pytest.raises(StoreError, match="rejected"):
        await store._writer.run(lambda tx: tx.execute("quarantine", (None, None, None, None, None)))
    assert store.write_error is None


def test_disk_full_is_reported_only_for_full_disk() -> None:
    full, io_error = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")
    assert (is_disk_full(full), is_disk_full(io_error), is_disk_full(ValueError())) == (True, False, False)
    for code, is_full in ((sqlite3.SQLITE_IOERR_SHMSIZE, True), (sqlite3.SQLITE_IOERR_FSYNC, False)):
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = code
        assert isinstance(translate(error), StoreFull) is is_full


def test_full_disk_recovers_only_with_room_for_shares(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small commit can succeed when a share would not fit, which would make the status alternate."""
    free = [0]
    stats = SimpleNamespace(f_frsize=4096)
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(**vars(stats), f_bavail=free[0]))
    disk_health = DiskHealth(tmp_path / "queue.db", clock)
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    disk_health.record_failure(full)
    assert not disk_health.is_probe_due
    clock.advance(1)
    assert disk_health.is_probe_due
    disk_health.record_success()
    assert disk_health.reason is not None
    assert not disk_health.is_probe_due, "not immediately again"
    free[0] = 256
    disk_health.record_success()
    assert disk_health.reason is None
    assert disk_health.max_wait(None) == LOCATION_CHECK_SECONDS


# ---------------------------------------- after a failed fsync the page cache may differ from the disk


LEAF_PAGE_HEADER = b"\x0d\x00\x00\x00\x02\x0f\x00\x00"
"""A table leaf with two cells, the first of them at byte 0x0f00."""


def raise_io_error(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EIO, "Input/output error")


def test_scrub_after_failed_sync_zeroes_gaps_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pages"
    path.write_bytes(bytes(4096) + LEAF_PAGE_HEADER + b"stale" + bytes(4083))
    synced: list[int] = []
    with path.open("r+b") as file:
        monkeypatch.setattr(os, "fsync", raise_io_error)
        with pytest.raises(OSError, match="Input"):
            scrub_pages(file.fileno(), {2}, 4096)
        monkeypatch.setattr(os, "fsync", synced.append)
        assert scrub_pages(file.fileno(), {2}, 4096) == 0, "it appears clean"
        assert synced == []
        assert scrub_pages(file.fileno(), {2}, 4096, again=True) == 1
        assert synced == [file.fileno()]


def test_gaps_are_zeroed_again_after_failed_sync_and_blocking_reader(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database(path, clock)
    database.tx.conn.execute("UPDATE meta SET value = value || 'x'")
    database.eraser.record_deletion()
    with monkeypatch.context() as patch:
        patch.setattr("helper.store.sqlite.erasure.scrub_pages", raise_io_error)
        database.eraser.run_due(idle=True)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM meta").fetchall()
    database.tx.conn.execute("UPDATE meta SET value = value || 'x'")
    clock.advance(ERROR_RETRY_SECONDS)
    database.eraser.run_due(idle=True)
    reader.close()

    scrubbed: list[bool] = []
    monkeypatch.setattr("helper.store.sqlite.erasure.scrub_pages", lambda *_, again: scrubbed.append(again))
    database.eraser.run_due(idle=True)

    assert scrubbed == [True]
    assert not database.eraser.is_pending
    database.close()


async def test_open_after_crash_checkpoints_wal_first(store: SqliteStore, path: Path, clock: FakeClock) -> None:
    copied = await copy_as_crashed(store, path)
    opened = open_database(copied, clock)
    assert Path(f"{copied}-wal").stat().st_size == 0
    opened.close()


@pytest.mark.parametrize("mark", ["open\n", "clean\n"])
async def test_open_after_crash_with_failing_sync_is_refused(
    mark: str,
    store: SqliteStore,
    path: Path,
    clock: FakeClock,
    open_sqlite_store: StoreOpener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also after a clean shutdown on a failing disk, which leaves a WAL."""
    copied = await copy_as_crashed(store, path)
    Path(f"{copied}.lock").write_text(mark)
    with monkeypatch.context() as patch:
        patch.setattr("helper.store.sqlite.erasure.scrub_pages", raise_io_error)
        with pytest.raises(StoreError, match="could not be checkpointed"):
            open_database(copied, clock)
    assert await (await open_sqlite_store(copied)).count_shares() == {ROUND: {ShareState.WAITING: 2}}


async def test_open_on_full_disk_succeeds_and_retries_erasure(
    store: SqliteStore, path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    copied = await copy_as_crashed(store, path)
    with monkeypatch.context() as patch:
        patch.setattr("helper.store.sqlite.erasure.scrub_pages", full)
        opened = open_database(copied, clock)
    assert opened.eraser.is_pending
    opened.eraser.run_due(idle=True)
    assert opened.eraser.is_pending, "not immediately"
    clock.advance(1)
    opened.eraser.run_due(idle=True)
    assert not opened.eraser.is_pending
    opened.close()


def test_closed_database_on_full_disk_can_be_backed_up(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_database(path, clock).close()
    original = sqlite3.connect

    def connect(name: Any, *arguments: Any, **options: Any) -> sqlite3.Connection:
        if str(name).endswith("?mode=ro"):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
            raise error
        connection: sqlite3.Connection = original(name, *arguments, **options)
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect)
    assert read_contents(path, clock).live == 0
    lock = FileLock(path)
    lock.acquire()
    with pytest.raises(StoreFull):
        read_contents(path, clock)
    lock.release(clean=False)
