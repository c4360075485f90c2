"""`db migrate`: what it asks for, what it tells, and that nothing is done unasked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyrage
import pytest

from helper.cli import db_migrate as migrate_module
from helper.store.sqlite.schema import latest_version
from helper.store.sqlite.store import SqliteStore
from tests.unit.cli.test_main import run
from tests.unit.store.test_schema_upgrade import add_migration, fill, version

OLD = latest_version()
NEW = OLD + 1


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SVOTE_HELPER_CONFIG", raising=False)
    monkeypatch.delenv("SVOTE_HELPER_BACKUP_PASSPHRASE", raising=False)
    # for good, in the process that runs the tests
    monkeypatch.setattr(migrate_module, "harden_process", list)


@pytest.fixture
def current(tmp_path: Path) -> Path:
    """A database of this version."""
    path = tmp_path / "queue.db"

    async def write() -> None:
        store = SqliteStore(path)
        await store.open()
        await fill(store)
        await store.close()

    asyncio.run(write())
    return path


@pytest.fixture
def old(current: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, beside a version whose schema is one version ahead."""
    add_migration(monkeypatch)
    return current


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_a_dry_run_tells_and_changes_nothing(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = old.read_bytes()
    assert run("db", "migrate", "--db", str(old), "--dry-run", "--json") == 0
    assert told(capsys) == {
        "database": str(old),
        "schema": OLD,
        "target": NEW,
        "live": 4,
        "confirmed": 1,
        "damaged": 0,
        "backup": None,
        "migrated": False,
    }
    assert run("db", "migrate", "--db", str(old), "--dry-run") == 0
    assert f"would be migrated from schema {OLD} to {NEW}, 4 live shares" in capsys.readouterr().out
    assert old.read_bytes() == before


def test_a_database_of_this_version_needs_no_migration_and_no_backup(
    current: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backup = tmp_path / "before.age"
    assert run("db", "migrate", "--db", str(current), "--backup", str(backup), "--yes", "--json") == 0
    answer = told(capsys)
    assert (answer["schema"], answer["target"], answer["migrated"], answer["backup"]) == (OLD, OLD, False, None)
    assert not backup.exists()
    assert run("db", "migrate", "--db", str(current), "--no-backup", "--yes") == 0
    assert f"schema {OLD} is up to date, 4 live shares" in capsys.readouterr().out


def test_it_is_backed_up_then_migrated_and_the_way_back_is_there(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backup, identity = tmp_path / "before.age", pyrage.x25519.Identity.generate()
    keys = tmp_path / "keys.txt"
    keys.write_text(str(identity))
    sealed_to = ["--backup", str(backup), "--recipient", str(identity.to_public())]
    assert run("db", "migrate", "--db", str(old), *sealed_to, "--yes", "--json") == 0
    answer = told(capsys)
    assert (answer["migrated"], answer["backup"]) == (True, str(backup))
    assert version(old) == NEW
    assert run("db", "migrate", "--db", str(old), "--no-backup", "--yes") == 0
    assert f"schema {NEW} is up to date" in capsys.readouterr().out
    there = tmp_path / "there.db"
    assert run("db", "restore", str(backup), "--identity", str(keys), "--db", str(there)) == 0
    assert version(there) == OLD


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--yes"], 2),
        (["--yes", "--no-backup", "--backup", "b.age"], 2),
        (["--no-backup"], 2),  # nobody can be asked
        (["--yes", "--no-backup", "--db", "none.db"], 5),
    ],
)
def test_it_does_nothing_half_asked(old: Path, arguments: list[str], code: int) -> None:
    before = old.read_bytes()
    assert run("db", "migrate", *([] if "--db" in arguments else ["--db", str(old)]), *arguments) == code
    assert old.read_bytes() == before


def test_a_backup_that_cannot_be_written_stops_it(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, recipient = old.read_bytes(), str(pyrage.x25519.Identity.generate().to_public())
    nowhere = ["--backup", str(tmp_path / "no" / "b.age"), "--recipient", recipient]
    assert run("db", "migrate", "--db", str(old), *nowhere, "--yes") == 1
    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", "short")
    assert run("db", "migrate", "--db", str(old), "--backup", str(tmp_path / "b.age"), "--yes") == 2
    assert old.read_bytes() == before
