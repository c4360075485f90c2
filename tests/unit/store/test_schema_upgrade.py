"""Upgrades of an older database: nothing is lost, and a failure changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from helper.clock import SystemClock
from helper.core.share import ShareState
from helper.errors import StoreError
from helper.store.sqlite.opening import open_database
from helper.store.sqlite.schema import latest_version, migrations
from helper.store.sqlite.snapshot import take_snapshot
from helper.store.sqlite.store import SqliteStore
from tests.unit.store.fixtures import (
    NOW,
    ROUND,
    StoreOpener,
    claim_all_due,
    confirm_shares,
    enqueue_and_prepare,
    enqueue_shares,
    make_posted_share,
    open_closed_database,
    query_rows,
    retry_as_operator,
)

NEXT = "CREATE TABLE more (n INTEGER);"
"""A migration only of these tests, which makes this version's database an older one."""
OLD_STATE_COUNTS = {ShareState.RECEIVED: 2, ShareState.BROADCAST: 1, ShareState.FAILED: 1, ShareState.SUBMITTED: 1}


async def fill(store: SqliteStore) -> int:
    """Enqueue shares in every state; return the id of the failed one."""
    await enqueue_and_prepare(store, 3)
    await confirm_shares(store, 3, height=1)
    await enqueue_and_prepare(store, 4)
    await enqueue_shares(store, 5)
    (failed,) = await claim_all_due(store)
    await store.fail(failed.id, stage="proof", note="invalid")
    await enqueue_shares(store, 1, 2)
    return failed.id


def add_migration(monkeypatch: pytest.MonkeyPatch, step: str = NEXT) -> None:
    steps = (*migrations(), step)
    monkeypatch.setattr("helper.store.sqlite.schema.migrations", lambda: steps)


@pytest.fixture
async def failed_id(store: SqliteStore) -> int:
    """Fill and close the database; return the id of the failed share."""
    share_id = await fill(store)
    await store.close()
    return share_id


@pytest.fixture
def old_database(path: Path, failed_id: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database whose schema is one version behind."""
    assert failed_id
    add_migration(monkeypatch)
    return path


def read_schema_version(path: Path) -> int:
    with open_closed_database(path) as conn:
        return int(conn.execute("PRAGMA user_version").fetchone()[0])


async def test_start_upgrades_the_schema_and_keeps_the_shares(
    old_database: Path, failed_id: int, open_sqlite_store: StoreOpener
) -> None:
    assert read_schema_version(old_database) == latest_version() - 1
    store = await open_sqlite_store(old_database)
    assert await store.count_shares() == {ROUND: OLD_STATE_COUNTS}
    await enqueue_shares(store, 1, 3)  # known: share 1 is pending, share 3 is confirmed
    assert await store.count_shares() == {ROUND: OLD_STATE_COUNTS}
    assert await retry_as_operator(store, failed_id) == 1
    assert {queued.share for queued in await claim_all_due(store, now=NOW + 100)} == {
        make_posted_share(number).share for number in (1, 2, 5)
    }
    await store.close()
    assert read_schema_version(old_database) == latest_version()
    assert query_rows(old_database, "SELECT * FROM more") == []


async def test_failed_upgrade_changes_nothing(path: Path, failed_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed_id
    before = query_rows(path, "SELECT * FROM shares")
    with monkeypatch.context() as newer:
        add_migration(newer, f"{NEXT} DELETE FROM shares; INSERT INTO nowhere VALUES (1);")
        with pytest.raises(StoreError, match="nowhere"):
            open_database(path, SystemClock())
    open_database(path, SystemClock()).close()
    assert query_rows(path, "SELECT * FROM shares") == before


async def test_damaged_row_stays_damaged_and_is_reported(old_database: Path) -> None:
    with open_closed_database(old_database) as conn:
        conn.execute(
            "UPDATE shares SET submit_at = submit_at + 1 WHERE tree_position = ?",
            (make_posted_share(1).share.tree_position,),
        )
    assert take_snapshot(old_database, SystemClock()).contents.damaged == 1
    open_database(old_database, SystemClock()).close()
    assert take_snapshot(old_database, SystemClock()).contents.damaged == 1
