"""What only a file has: reading it without a daemon, bringing it up to date, the plans of its queries."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from helper.core.share import ShareState
from helper.errors import StoreError, StoreForeign
from helper.store.rows import QueueFilter
from helper.store.sql_files import queries
from helper.store.sqlite.reader import open_queue_file
from helper.store.sqlite.store import SqliteStore
from tests.unit.store.fixtures import ROUND, files, hands_on, put


async def test_the_file_alone_tells_the_same_and_is_not_changed_by_looking(store: SqliteStore, path: Path) -> None:
    await put(store, *range(5))
    before = files(path)
    async with open_queue_file(path) as queue:
        assert await queue.counts() == await store.counts()
        assert await queue.list_shares(QueueFilter(), 3) == await store.list_shares(QueueFilter(), 3)
        assert await queue.damaged() == []

    assert {name: data for name, data in files(path).items() if not name.endswith("-shm")} == {
        name: data for name, data in before.items() if not name.endswith("-shm")
    }


async def test_a_file_left_by_a_crash_is_read_with_its_log_and_the_log_stays(
    store: SqliteStore, path: Path, tmp_path: Path
) -> None:
    await put(store, *range(5))
    copy = tmp_path / "copy" / path.name
    copy.parent.mkdir()
    for suffix in ("", "-wal"):
        Path(f"{copy}{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
    log = Path(f"{copy}-wal").read_bytes()
    assert len(log) > 4096

    async with open_queue_file(copy) as queue:
        assert await queue.counts() == {ROUND: {ShareState.RECEIVED: 5}}

    assert Path(f"{copy}-wal").read_bytes() == log


async def test_a_reader_can_neither_write_nor_checkpoint(store: SqliteStore, path: Path) -> None:
    await put(store, 1)
    log = files(path)["queue.db-wal"]

    with pytest.raises(StoreError, match="readonly"):
        await store._reader.run("UPDATE shares SET state = 1")
    with pytest.raises(StoreError, match=r"readonly|I/O"):
        await store._reader.run("PRAGMA wal_checkpoint(TRUNCATE)")

    assert files(path)["queue.db-wal"] == log


async def test_the_file_alone_is_only_read_when_it_is_ours(store: SqliteStore, path: Path, tmp_path: Path) -> None:
    await store.close()
    with hands_on(path) as conn:
        conn.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreForeign):
        async with open_queue_file(path):
            pass

    foreign = tmp_path / "foreign.db"
    conn = sqlite3.connect(foreign)
    conn.execute("CREATE TABLE songs (title TEXT)")
    conn.close()
    with pytest.raises(StoreForeign):
        async with open_queue_file(foreign):
            pass
    with pytest.raises(StoreError):
        async with open_queue_file(tmp_path / "none.db"):
            pass


async def test_the_hot_queries_walk_an_index_and_never_sort(store: SqliteStore, path: Path) -> None:
    await store.close()
    conn = sqlite3.connect(path)
    hot = ("due_shares", "next_due", "are_taken", "unconfirmed", "follow_ups", "shares_of_nullifier", "share_by_id")
    for name in hot:
        sql = queries()[name]
        names = {"round_no": 1, "now_ms": 1, "limit": 1, "mac": b"", "nullifier": b"", "after": 0, "height": 1}
        params = names if ":" in sql else (b"",) * sql.count("?")
        plan = " / ".join(row[3] for row in conn.execute(f"EXPLAIN QUERY PLAN {sql}", params))
        assert "SCAN shares" not in plan, name
        assert "SCAN s " not in f"{plan} ", name
        assert "SCAN reveals" not in plan, name
        if name != "shares_of_nullifier":
            assert "TEMP B-TREE" not in plan, name
    conn.close()


@pytest.mark.parametrize("name", queries())
def test_no_comment_swallows_the_end_of_a_query(name: str) -> None:
    assert "--" not in queries()[name]
