"""Refused starts, and the modes of new files."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from helper.core.share import ShareState
from helper.errors import StoreCorrupt, StoreError, StoreForeign, StoreFull
from helper.store.sqlite import opening
from helper.store.sqlite.file_lock import FileLock
from helper.store.sqlite.store import SqliteStore
from helper.store.sqlite.transaction import SqliteTransaction
from tests.support.clock import FakeClock
from tests.unit.store.fixtures import ROUND, StoreOpener, enqueue_shares, open_closed_database, read_database_files


def pragma(tx: SqliteTransaction, name: str) -> object:
    """The value of a setting of the writing connection."""
    value: object = tx.conn.execute(f"PRAGMA {name}").fetchone()[0]
    return value


async def expect_refusal(path: Path, error: type[StoreError], match: str) -> StoreError:
    """Open the file and expect a refusal; return the error. Asserts that the file stays unchanged and unlocked."""
    before = path.read_bytes()
    with pytest.raises(error, match=match) as caught:
        await SqliteStore(path).open()
    assert path.read_bytes() == before
    assert caught.value.advice
    return caught.value


async def test_open_creates_private_files_under_any_umask(path: Path) -> None:
    before = os.umask(0)
    try:
        store = SqliteStore(path)
        await store.open()
        await enqueue_shares(store, 1)
        modes = {name: stat.S_IMODE((path.parent / name).stat().st_mode) for name in read_database_files(path)}
        await store.close()
    finally:
        os.umask(before)

    assert modes == dict.fromkeys(["queue.db", "queue.db-shm", "queue.db-wal", "queue.db.lock"], 0o600)


async def test_open_of_readable_file_restricts_its_mode(open_sqlite_store: StoreOpener, path: Path) -> None:
    first = await open_sqlite_store(path)
    await first.close()
    path.chmod(0o644)

    store = await open_sqlite_store(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await store.close()


async def test_open_sets_pragmas_for_durability_and_erasure(store: SqliteStore) -> None:
    names = ["journal_mode", "synchronous", "secure_delete", "temp_store", "foreign_keys", "wal_autocheckpoint"]

    values = [await store._writer.run(partial(pragma, name=name)) for name in names]

    assert values == ["wal", 2, 1, 2, 1, 0]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
async def test_open_on_full_disk_names_the_disk(
    open_sqlite_store: StoreOpener, path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fail(_lock: FileLock, _text: bytes) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(FileLock, "_write", fail)
    with pytest.raises(StoreFull, match="no space left on the disk of") as caught:
        await open_sqlite_store(path)
    assert str(path) in str(caught.value)
    assert f"df -h {path.parent}" in caught.value.advice


async def test_open_large_database_checks_only_its_end(
    store: SqliteStore, path: Path, open_sqlite_store: StoreOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "CHECKED_AT_START", 1)
    await enqueue_shares(store, *range(50))
    await store.close()
    original = path.read_bytes()
    with open_closed_database(path) as conn:
        (page,) = conn.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'shares_tag'").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 16)

    await (await open_sqlite_store(path)).close()
    with monkeypatch.context() as small:
        small.setattr(opening, "CHECKED_AT_START", 64 << 20)
        await expect_refusal(path, StoreCorrupt, "damaged")

    path.write_bytes(original[: len(original) // 2])
    await expect_refusal(path, StoreCorrupt, "it is truncated")


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite_page_headers(path: Path) -> None:
    with path.open("r+b") as file:
        for page in range(2, path.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(b"\xff" * 16)


def flip_bit(path: Path, piece: bytes, offset: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(piece) + offset] ^= 1 << bit
    path.write_bytes(data)


HEADER = b"SQLite format 3"


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (cut_in_half, StoreCorrupt),
        (overwrite_page_headers, StoreCorrupt),
        (partial(flip_bit, piece=HEADER, offset=4, bit=1), StoreForeign),
        (partial(flip_bit, piece=HEADER, offset=18, bit=0), StoreCorrupt),
        (partial(flip_bit, piece=HEADER, offset=60, bit=3), StoreForeign),
        (partial(flip_bit, piece=b"CHECK (length(", offset=8, bit=0), StoreCorrupt),
    ],
    ids=["truncated", "pages", "magic", "format", "version", "schema"],
)
async def test_open_damaged_database_is_refused_with_restore_advice(
    store: SqliteStore, path: Path, damage: Callable[[Path], None], kind: type[StoreError]
) -> None:
    await enqueue_shares(store, *range(50))
    await store.close()
    damage(path)

    error = await expect_refusal(path, kind, "not a database|damaged|newer version")

    assert "restore the newest backup" in error.advice


async def test_open_without_its_key_is_refused(store: SqliteStore, path: Path) -> None:
    await store.close()
    with open_closed_database(path) as conn:
        conn.execute("UPDATE meta SET value = 'abc' WHERE key = 'key.rows'")

    await expect_refusal(path, StoreCorrupt, "key")


async def test_open_missing_directory_or_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file") as caught:
        await SqliteStore(tmp_path / "none" / "queue.db").open()
    assert "directory" in caught.value.advice
    (tmp_path / "queue.db").mkdir()
    with pytest.raises(StoreError, match="not a file"):
        await SqliteStore(tmp_path / "queue.db").open()


async def test_closed_store_raises_store_closed(path: Path, clock: FakeClock) -> None:
    store = SqliteStore(path, clock=clock)
    with pytest.raises(StoreError, match="not open"):
        await enqueue_shares(store, 1)
    await store.open()
    await store.close()
    with pytest.raises(StoreError, match="not open"):
        await store.get_ledger()
    with pytest.raises(StoreError, match="not open"):
        await enqueue_shares(store, 1)
    await store.close()


async def test_close_finishes_pending_writes(open_sqlite_store: StoreOpener, path: Path) -> None:
    store = await open_sqlite_store(path)
    tasks = [asyncio.create_task(enqueue_shares(store, number)) for number in range(100)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*tasks)

    reopened = await open_sqlite_store(path)
    assert await reopened.count_shares() == {ROUND: {ShareState.WAITING: 100}}


async def test_pulse_succeeds_only_while_writer_thread_responds(store: SqliteStore) -> None:
    await store.ping_writer()
    holding, resume = threading.Event(), threading.Event()

    def hold(_tx: SqliteTransaction) -> None:
        holding.set()
        resume.wait(30)

    held = asyncio.create_task(store._writer.run(hold))
    await asyncio.to_thread(holding.wait, 30)
    ping = asyncio.create_task(store.ping_writer())
    await asyncio.sleep(0.05)
    assert not ping.done()
    resume.set()
    await ping
    await held
