"""An old version's database, brought up to date: by the daemon's start, or by hand after a trial."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from helper.clock import SystemClock
from helper.core.share import ShareState
from helper.errors import StoreCorrupt, StoreError, StoreForeign, StoreLocked
from helper.store.sql_files import migrations
from helper.store.sqlite.opening import compare_schema
from helper.store.sqlite.schema_upgrade import migrate, refuse_running, try_migration
from helper.store.sqlite.store import SqliteStore
from tests.unit.store.fixtures import NOW, ROUND, Opener, claim, files, hands_on, posted, put

OLD = Path(__file__).with_name("old") / "schema-1.db.gz"
HELD = {ShareState.RECEIVED: 2, ShareState.BROADCAST: 1, ShareState.SUBMITTED: 1}


@pytest.fixture
def old(path: Path) -> Path:
    """The old database, where a store expects its own."""
    path.write_bytes(gzip.decompress(OLD.read_bytes()))
    path.chmod(0o600)
    return path


def version(path: Path) -> int:
    with hands_on(path) as conn:
        return int(conn.execute("PRAGMA user_version").fetchone()[0])


def test_the_old_database_is_older() -> None:
    assert len(migrations()) > 1


async def test_a_start_brings_it_up_to_date_and_goes_on_with_its_shares(old: Path, opened: Opener) -> None:
    store = await opened(old)
    assert await store.counts() == {ROUND: HELD}
    await put(store, 1, 3)  # known, the one waiting and the other confirmed
    assert await store.counts() == {ROUND: HELD}
    assert {one.share.tree_position for one in await claim(store, now=NOW + 100)} == {
        posted(number).share.tree_position for number in (1, 2)
    }
    await store.close()
    assert version(old) == len(migrations())


async def test_a_trial_changes_nothing_and_a_migration_loses_nothing(old: Path, opened: Opener) -> None:
    before = old.read_bytes()
    trial = try_migration(old, SystemClock())
    assert (trial.needed, trial.target) == (True, len(migrations()))
    assert (trial.before.schema, trial.before.live, trial.before.confirmed, trial.before.damaged) == (1, 3, 1, 0)
    assert old.read_bytes() == before

    migrate(old, SystemClock())
    with hands_on(old) as conn:
        compare_schema(conn)
    assert not try_migration(old, SystemClock()).needed
    assert await (await opened(old)).counts() == {ROUND: HELD}


async def test_the_backup_that_was_made_first_is_the_old_database(old: Path, tmp_path: Path) -> None:
    image = try_migration(old, SystemClock()).image
    copy = tmp_path / "copy.db"
    copy.write_bytes(image)
    assert version(copy) == 1


async def test_a_running_daemon_is_not_disturbed(store: SqliteStore, path: Path) -> None:
    with pytest.raises(StoreLocked):
        refuse_running(path)
    with pytest.raises(StoreLocked):
        migrate(path, SystemClock())
    await put(store, 1)


def test_a_migration_that_cannot_work_is_told_before_anything_is_touched(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = (*migrations(), "CREATE TABLE more (n INTEGER); INSERT INTO nowhere VALUES (1);")
    for module in ("opening", "snapshot", "schema_upgrade"):
        monkeypatch.setattr(f"helper.store.sqlite.{module}.migrations", lambda: steps)
    before = files(old)
    with pytest.raises(StoreError, match="nowhere"):
        try_migration(old, SystemClock())
    assert files(old)[old.name] == before[old.name]


def test_a_migration_that_would_lose_a_share_is_refused(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (*migrations(), "DELETE FROM shares WHERE state = 0;")
    for module in ("opening", "snapshot", "schema_upgrade"):
        monkeypatch.setattr(f"helper.store.sqlite.{module}.migrations", lambda: steps)
    with pytest.raises(StoreCorrupt, match="would have other contents after the migration: live"):
        try_migration(old, SystemClock())


def test_what_is_no_old_database_is_refused(path: Path) -> None:
    with hands_on(path) as conn:
        conn.execute("CREATE TABLE songs (title TEXT)")
    with pytest.raises(StoreForeign):
        try_migration(path, SystemClock())


def test_a_damaged_row_stays_one_and_is_told(old: Path) -> None:
    with hands_on(old) as conn:
        conn.execute(
            "UPDATE shares SET submit_at = submit_at + 1 WHERE tree_position = ?", (posted(1).share.tree_position,)
        )
    trial = try_migration(old, SystemClock())
    assert trial.before.damaged == 1
    migrate(old, SystemClock())
    assert try_migration(old, SystemClock()).before.damaged == 1
