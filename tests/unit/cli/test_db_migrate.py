"""`db migrate`: confirmation, output, and that nothing changes without consent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyrage
import pytest

from helper.store.sqlite.file_lock import FileLock
from helper.store.sqlite.schema import latest_version
from helper.store.sqlite.store import SqliteStore
from tests.unit.cli.test_main import read_json, run_command
from tests.unit.store.test_schema import add_migration, fill, read_schema_version

OLD = latest_version()
NEW = OLD + 1


@pytest.fixture
def current(tmp_path: Path) -> Path:
    """A database with this version's schema."""
    path = tmp_path / "queue.db"

    async def write() -> None:
        store = SqliteStore(path)
        await store.open()
        await fill(store)
        await store.close()

    asyncio.run(write())
    return path


@pytest.fixture
def old_database(current: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same database, with a program whose schema is one version newer."""
    add_migration(monkeypatch)
    return current


def test_db_migrate_current_version_makes_no_backup(
    current: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backup = tmp_path / "before.age"
    assert run_command("db", "migrate", "--db", str(current), "--backup", str(backup), "--yes", "--json") == 0
    response = read_json(capsys)
    assert (response["schema"], response["target"], response["migrated"], response["backup"]) == (OLD, OLD, False, None)
    assert not backup.exists()
    assert run_command("db", "migrate", "--db", str(current), "--no-backup", "--yes") == 0
    assert f"schema {OLD} is up to date, 4 live shares" in capsys.readouterr().out


def test_db_migrate_backs_up_first_and_can_be_restored(
    old_database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backup, identity = tmp_path / "before.age", pyrage.x25519.Identity.generate()
    keys = tmp_path / "keys.txt"
    keys.write_text(str(identity))
    sealed_to = ["--backup", str(backup), "--recipient", str(identity.to_public())]
    assert run_command("db", "migrate", "--db", str(old_database), *sealed_to, "--yes", "--json") == 0
    assert read_json(capsys) == {
        "database": str(old_database),
        "schema": OLD,
        "target": NEW,
        "moved": 0,
        "encrypted": False,
        "live": 4,
        "confirmed": 1,
        "damaged": 0,
        "backup": str(backup),
        "migrated": True,
    }
    assert read_schema_version(old_database) == NEW
    assert run_command("db", "migrate", "--db", str(old_database), "--no-backup", "--yes") == 0
    assert f"schema {NEW} is up to date" in capsys.readouterr().out
    other_path = tmp_path / "there.db"
    assert run_command("db", "restore", str(backup), "--identity", str(keys), "--db", str(other_path)) == 0
    assert read_schema_version(other_path) == OLD


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--yes"], 2),
        (["--yes", "--no-backup", "--backup", "b.age", "--recipient", "age1x"], 2),
        (["--no-backup"], 2),  # confirmation requires a terminal
        (["--yes", "--no-backup", "--db", "none.db"], 5),
    ],
)
def test_db_migrate_with_incomplete_options_changes_nothing(
    old_database: Path, arguments: list[str], code: int
) -> None:
    before = old_database.read_bytes()
    assert (
        run_command("db", "migrate", *([] if "--db" in arguments else ["--db", str(old_database)]), *arguments) == code
    )
    assert old_database.read_bytes() == before


def test_db_migrate_with_running_helper_is_refused(old_database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = FileLock(old_database)
    lock.acquire()
    before = old_database.read_bytes()
    assert run_command("db", "migrate", "--db", str(old_database), "--no-backup", "--yes") == 1
    assert "another helper has this database open" in capsys.readouterr().err
    lock.release(clean=True)
    assert old_database.read_bytes() == before


def test_db_migrate_failed_backup_aborts(old_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, recipient = old_database.read_bytes(), str(pyrage.x25519.Identity.generate().to_public())
    unwritable = ["--backup", str(tmp_path / "no" / "b.age"), "--recipient", recipient]
    assert run_command("db", "migrate", "--db", str(old_database), *unwritable, "--yes") == 1
    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", "short")
    assert run_command("db", "migrate", "--db", str(old_database), "--backup", str(tmp_path / "b.age"), "--yes") == 2
    assert old_database.read_bytes() == before
