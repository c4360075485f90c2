"""Features of SQLite files only: offline reads, upgrades, query plans."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from pathlib import Path

import pytest

from helper.core.share import ShareState
from helper.errors import StoreError
from helper.store.models import QueueFilter
from helper.store.sql_files import sqlite_statements
from helper.store.sqlite.reader import open_queue_file
from helper.store.sqlite.store import SqliteStore
from tests.unit.store.fixtures import ROUND, copy_as_crashed, enqueue_shares, read_database_files


async def test_offline_reader_equals_store_and_changes_nothing(store: SqliteStore, path: Path) -> None:
    await enqueue_shares(store, *range(5))
    before = read_database_files(path)
    async with open_queue_file(path) as queue:
        assert await queue.count_shares() == await store.count_shares()
        assert await queue.list_shares(QueueFilter(), 3) == await store.list_shares(QueueFilter(), 3)
        assert await queue.list_damaged() == []

    assert {name: data for name, data in read_database_files(path).items() if not name.endswith("-shm")} == {
        name: data for name, data in before.items() if not name.endswith("-shm")
    }


async def test_offline_reader_after_crash_includes_wal_and_keeps_it(store: SqliteStore, path: Path) -> None:
    copied = await copy_as_crashed(store, path)
    log = Path(f"{copied}-wal").read_bytes()
    assert len(log) > 4096

    async with open_queue_file(copied) as queue:
        assert await queue.count_shares() == {ROUND: {ShareState.WAITING: 2}}

    assert Path(f"{copied}-wal").read_bytes() == log


async def test_offline_reader_cannot_write_or_checkpoint(store: SqliteStore, path: Path) -> None:
    await enqueue_shares(store, 1)
    log = read_database_files(path)["queue.db-wal"]

    with pytest.raises(StoreError, match="readonly"):
        await store._reader.run("UPDATE shares SET state = 1")
    with pytest.raises(StoreError, match=r"readonly|I/O"):
        await store._reader.run("PRAGMA wal_checkpoint(TRUNCATE)")

    assert read_database_files(path)["queue.db-wal"] == log


async def test_cancelled_snapshot_leaves_no_transaction(store: SqliteStore) -> None:
    reader = store._operator_reader
    assert reader._conn is not None
    for iterations in range(12):
        reading = asyncio.create_task(reader.fetch_snapshot([("counts", ())]))
        for _ in range(iterations):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        await reader.fetch("counts")
        assert not reader._conn.in_transaction


async def test_hot_queries_use_an_index_without_sorting(store: SqliteStore, path: Path) -> None:
    await store.close()
    conn = sqlite3.connect(path)
    hot = (
        "due_shares",
        "due_by_time",
        "next_due",
        "list_waiting",
        "load_leaves",
        "load_subtrees",
        "share_ids",
        "find_taken",
        "stored_shares",
        "unconfirmed",
        "follow_ups",
        "doubtful_waits",
        "shares_of_tag",
        "share_by_id",
    )
    for name in hot:
        sql = sqlite_statements()[name]
        params = dict.fromkeys(re.findall(r":(\w+)", sql), 1) or (b"",) * sql.count("?")
        plan = " / ".join(row[3] for row in conn.execute(f"EXPLAIN QUERY PLAN {sql}", params))
        assert "SCAN shares" not in plan, name
        assert "SCAN s " not in f"{plan} ", name
        assert "SCAN reveals" not in plan, name
        assert "TEMP B-TREE" not in plan, name
    conn.close()
