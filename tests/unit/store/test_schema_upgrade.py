"""An older version's database is upgraded: at the start of the daemon, or by an operator after a trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from helper.clock import SystemClock
from helper.core.share import ShareState
from helper.errors import StoreCorrupt, StoreError, StoreForeign, StoreLocked
from helper.store.sqlite.opening import open_database
from helper.store.sqlite.schema import compare_schema, latest_version, migrations
from helper.store.sqlite.schema_upgrade import migrate, refuse_running, try_migration
from helper.store.sqlite.store import SqliteStore
from tests.unit.store.fixtures import (
    NOW,
    ROUND,
    Opener,
    broadcast_one,
    claim,
    files,
    hands_on,
    operator_retry,
    posted,
    put,
    rows,
)

NEXT = "CREATE TABLE more (n INTEGER);"
"""A migration that only these tests have: with it, the database of this version is an older one."""
HELD = {ShareState.RECEIVED: 2, ShareState.BROADCAST: 1, ShareState.FAILED: 1, ShareState.SUBMITTED: 1}


async def fill(store: SqliteStore) -> int:
    """Shares in every state; the id of the failed one."""
    await broadcast_one(store, 3)
    await store.apply_block(1, [(ROUND, posted(3).nullifier)], now=NOW)
    await broadcast_one(store, 4)
    await put(store, 5)
    (failed,) = await claim(store)
    await store.fail(failed.id, stage="proof", note="invalid", spend_attempt=True)
    await put(store, 1, 2)
    return failed.id


def add_migration(monkeypatch: pytest.MonkeyPatch, step: str = NEXT) -> None:
    """Add a migration to those of this version."""
    steps = (*migrations(), step)
    monkeypatch.setattr("helper.store.sqlite.schema.migrations", lambda: steps)


@pytest.fixture
async def failed_id(store: SqliteStore) -> int:
    """Fills the database and closes it; the id of the failed share."""
    share_id = await fill(store)
    await store.close()
    return share_id


@pytest.fixture
def old(path: Path, failed_id: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database whose schema is one version behind."""
    assert failed_id
    add_migration(monkeypatch)
    return path


def version(path: Path) -> int:
    with hands_on(path) as conn:
        return int(conn.execute("PRAGMA user_version").fetchone()[0])


async def test_a_start_upgrades_the_schema_and_continues_with_the_shares(
    old: Path, failed_id: int, opened: Opener
) -> None:
    assert version(old) == latest_version() - 1
    store = await opened(old)
    assert await store.counts() == {ROUND: HELD}
    await put(store, 1, 3)  # known, the one waiting and the other confirmed
    assert await store.counts() == {ROUND: HELD}
    assert await operator_retry(store, failed_id) == 1
    assert {one.share for one in await claim(store, now=NOW + 100)} == {posted(number).share for number in (1, 2, 5)}
    await store.close()
    assert version(old) == latest_version()
    assert rows(old, "SELECT * FROM more") == []


async def test_a_trial_changes_nothing_and_a_migration_loses_nothing(old: Path, opened: Opener) -> None:
    before = old.read_bytes()
    trial = try_migration(old, SystemClock())
    assert (trial.needed, trial.target) == (True, latest_version())
    contents = trial.before
    assert (contents.schema, contents.live, contents.confirmed, contents.damaged) == (latest_version() - 1, 4, 1, 0)
    assert old.read_bytes() == before

    migrate(old, SystemClock())
    with hands_on(old) as conn:
        compare_schema(conn, str(old))
    assert not try_migration(old, SystemClock()).needed
    assert await (await opened(old)).counts() == {ROUND: HELD}


async def test_the_backup_that_was_made_first_is_the_old_database(old: Path, tmp_path: Path) -> None:
    image = try_migration(old, SystemClock()).image
    copy = tmp_path / "copy.db"
    copy.write_bytes(image)
    assert version(copy) == latest_version() - 1


def test_a_new_database_needs_no_migration(path: Path) -> None:
    open_database(path, SystemClock()).close()
    trial = try_migration(path, SystemClock())
    assert (trial.needed, trial.before.schema) == (False, latest_version())


async def test_a_running_daemon_is_not_disturbed(store: SqliteStore, path: Path) -> None:
    with pytest.raises(StoreLocked):
        refuse_running(path)
    with pytest.raises(StoreLocked):
        migrate(path, SystemClock())
    await put(store, 1)


async def test_a_migration_that_cannot_work_is_reported_before_anything_is_touched(
    path: Path, failed_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failed_id
    add_migration(monkeypatch, f"{NEXT} INSERT INTO nowhere VALUES (1);")
    before = files(path)
    with pytest.raises(StoreError, match="nowhere"):
        try_migration(path, SystemClock())
    assert files(path)[path.name] == before[path.name]


async def test_a_migration_that_would_lose_a_share_is_refused(
    path: Path, failed_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failed_id
    add_migration(monkeypatch, "DELETE FROM shares WHERE state = 0;")
    with pytest.raises(StoreCorrupt, match="would have other contents after the migration: live"):
        try_migration(path, SystemClock())


def test_what_is_no_old_database_is_refused(path: Path) -> None:
    with hands_on(path) as conn:
        conn.execute("CREATE TABLE songs (title TEXT)")
    with pytest.raises(StoreForeign):
        try_migration(path, SystemClock())


async def test_a_damaged_row_stays_one_and_is_reported(old: Path) -> None:
    with hands_on(old) as conn:
        conn.execute(
            "UPDATE shares SET submit_at = submit_at + 1 WHERE tree_position = ?", (posted(1).share.tree_position,)
        )
    trial = try_migration(old, SystemClock())
    assert trial.before.damaged == 1
    migrate(old, SystemClock())
    assert try_migration(old, SystemClock()).before.damaged == 1
