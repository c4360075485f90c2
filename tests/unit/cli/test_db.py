"""`db backup`, `db restore` and `db check`: key sources, output, exit codes."""

from __future__ import annotations

import stat
from pathlib import Path

import anyio
import pyrage
import pytest

from helper.store.sqlite.schema import latest_version
from helper.store.sqlite.store import SqliteStore
from tests.unit.cli.test_main import read_json, run_command
from tests.unit.store.fixtures import enqueue_shares, open_closed_database

PASSPHRASE = "correct horse battery"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "queue.db"
    anyio.run(create_database, path, 1, 2)
    return path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "passphrase"
    file.write_text(f"{PASSPHRASE}\n")
    return file


async def create_database(path: Path, *numbers: int) -> None:
    store = SqliteStore(path)
    await store.open()
    await enqueue_shares(store, *numbers)
    await store.close()


def file_names() -> set[str]:
    """The files here, without the WAL and shared memory that a reader creates."""
    return {path.name for path in Path().iterdir() if not path.name.endswith(("-wal", "-shm"))}


def test_backup_and_restore_with_passphrase(
    database: Path, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, restored_path = tmp_path / "b.age", tmp_path / "new.db"
    assert (
        run_command("db", "backup", "--db", str(database), "--output", str(output), "--passphrase-file", str(key)) == 0
    )
    assert "2 live shares" in capsys.readouterr().out
    assert stat.S_IMODE(output.stat().st_mode) == 0o600

    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", PASSPHRASE)
    assert run_command("db", "restore", str(output), "--db", str(restored_path), "--json") == 0
    assert read_json(capsys) == {
        "database": str(restored_path),
        "set_aside": None,
        "schema": latest_version(),
        "live": 2,
        "moved": 0,
        "confirmed": 0,
        "damaged": 0,
        "encrypted": False,
    }
    assert run_command("db", "restore", str(output), "--db", str(restored_path)) == 1
    assert "already" in capsys.readouterr().err
    assert run_command("db", "restore", str(output), "--db", str(restored_path), "--force", "--json") == 0
    assert read_json(capsys)["set_aside"] == f"{restored_path}.before-restore-1"
    assert run_command("db", "check", "--db", str(restored_path), "--json") == 0
    assert read_json(capsys)["ok"] is True


def test_restore_counts_moved_shares_apart(
    database: Path, key: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup from before the shares came back: both machines hold them as moved, and nobody reveals them."""
    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", PASSPHRASE)
    flags = ("--db", str(database))
    assert run_command("queue", "export", "--output", "moved.age", "--move", "--yes", *flags) == 0
    assert run_command("db", "backup", "--output", "b.age", *flags) == 0
    assert "2 live shares (2 of them moved to another machine)" in capsys.readouterr().out
    assert run_command("queue", "retry", "--stage", "moved", "--yes", *flags) == 0  # as an import does
    assert run_command("db", "restore", "b.age", "--force", *flags) == 0
    printed = capsys.readouterr()
    assert "2 live shares (2 of them moved to another machine)" in printed.out
    assert "`svote-helper queue retry --stage moved`" in printed.err
    for command, other in (
        ("queue import b.age --yes", "db restore"),
        ("db restore moved.age --force", "queue import"),
        ("db check --backup moved.age", "queue import"),
    ):
        assert run_command(*command.split(), *flags) == 1
        assert f"`svote-helper {other}`" in capsys.readouterr().err
    assert run_command("queue", "retry", "--stage", "moved", "--yes", *flags) == 0
    capsys.readouterr()
    assert run_command("db", "check", "--json", *flags) == 0
    assert read_json(capsys)["moved"] == 0


def test_backup_and_restore_with_recipient(database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identity = pyrage.x25519.Identity.generate()
    keys, output = tmp_path / "keys.txt", tmp_path / "b.age"
    keys.write_text(f"# created: today\n{identity}\n")
    recipient = str(identity.to_public())
    assert (
        run_command("db", "backup", "--db", str(database), "--output", str(output), "--recipient", recipient, "--json")
        == 0
    )
    facts = read_json(capsys)
    assert (facts["live"], facts["bytes"]) == (2, output.stat().st_size)
    assert pyrage.decrypt(output.read_bytes(), [identity]).startswith(b"SQLite format 3\x00")
    assert run_command("db", "check", "--backup", str(output), "--identity", str(keys), "--json") == 0
    assert read_json(capsys)["live"] == 2
    assert run_command("db", "restore", str(output), "--db", str(tmp_path / "new.db")) == 2
    assert "--identity" in capsys.readouterr().err
    with open_closed_database(database) as conn:
        conn.execute("UPDATE shares SET due_ms = due_ms + 1 WHERE id = 1")
    assert run_command("db", "check", "--db", str(database)) == 3
    assert "2 live shares, 0 confirmed, 1 damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("backup", "--output", "b.age"), 2, "no passphrase"),
        (("backup", "--output", "b.age", "--passphrase-file", "short"), 2, "shorter than 12"),
        (("backup", "--output", "b.age", "--passphrase-file", "nowhere"), 5, "nowhere"),
        (("backup", "--output", "b.age", "--recipient", "age1x", "--passphrase-file", "short"), 2, "not both"),
        (("migrate", "--backup", "b.age", "--recipient", "age1x", "--passphrase-file", "short"), 2, "not both"),
        (("backup", "--output", "b.age", "--recipient", "age1x"), 1, "recipients"),
        (("backup", "--output", "queue.db", "--passphrase-file", "passphrase"), 1, "exists already"),
        (("backup", "--output", "queue.db", "--passphrase-file", "passphrase", "--force"), 1, "not a backup or export"),
        (("restore", "nowhere.age", "--passphrase-file", "passphrase"), 5, "nowhere.age"),
        (("restore", "huge", "--passphrase-file", "passphrase"), 1, "not a backup or export"),
        (("backup", "--output", "b.age", "--passphrase-file", "binary"), 2, "binary is not a text file"),
        (("check", "--db", "none.db"), 5, "database none.db does not exist Start the helper, or"),
        (("check", "--db", "passphrase"), 1, "not a database"),
    ],
)
def test_db_command_failure_states_reason(
    arguments: tuple[str, ...], code: int, message: str, database: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("short").write_text("short\n")
    Path("binary").write_bytes(b"\xff")
    with Path("huge").open("wb") as file:
        file.truncate(1 << 42)  # more than fits into memory
    options = () if "--db" in arguments else ("--db", str(database))
    before = file_names()
    assert run_command("db", *arguments, *options) == code
    assert message in " ".join(capsys.readouterr().err.split())
    assert file_names() == before


def test_restore_with_wrong_passphrase_exits_not_authorised(
    database: Path, key: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("db", "backup", "--db", str(database), "--output", "b.age", "--passphrase-file", str(key)) == 0
    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", "quite another one")
    assert run_command("db", "restore", "b.age", "--db", "new.db") == 4
    assert "could not be decrypted" in capsys.readouterr().err
    assert not Path("new.db").exists()
