"""`db encrypt` and `db decrypt`, and the commands that use an encrypted database without a helper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from helper.config.loader import load
from helper.errors import StoreKeyError
from helper.observability import log_config
from helper.store.factory import create_store
from helper.store.sqlite.schema import ENCRYPTED_APPLICATION_ID
from tests.support.clock import FakeClock
from tests.unit.cli.test_main import read_last_json, run_command
from tests.unit.ingest.admission_fixtures import END
from tests.unit.store.fixtures import query_rows


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", "correct horse battery")
    monkeypatch.setattr(log_config, "configure", lambda *_: None)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "store.key"
    file.touch(0o600)
    file.write_text("ab" * 32)
    return file


@pytest.fixture
def encrypted_database(database: Path, key_file: Path) -> Path:
    """The same, encrypted, and settings with its key file."""
    assert run_command("db", "encrypt", "--key-file", str(key_file), "--yes") == 0
    (database.parent / "helper.toml").write_text(f'[store]\nkey_file = "{key_file}"\n')
    return database


def is_encrypted(path: Path) -> bool:
    return query_rows(path, "PRAGMA application_id") == [(ENCRYPTED_APPLICATION_ID,)]


def test_encrypt_and_decrypt(database: Path, key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--key-file", str(key_file))
    assert run_command("db", "encrypt", "--yes") == 2
    assert "no key file" in capsys.readouterr().err
    assert run_command("db", "encrypt", *flags) == 2, "not without confirmation"
    assert run_command("db", "encrypt", *flags, "--dry-run") == 0
    assert "would be encrypted, 3 live shares" in capsys.readouterr().out
    assert not is_encrypted(database)
    for flag in ("--dry-run", "--yes"):
        assert run_command("db", "decrypt", *flags, flag) == 1
        assert "is not encrypted" in capsys.readouterr().err

    assert run_command("db", "encrypt", *flags, "--yes") == 0
    assert "encrypted, 3 live shares, 0 confirmed" in capsys.readouterr().out
    assert is_encrypted(database)
    assert run_command("db", "decrypt", *flags, "--yes", "--json") == 0
    assert read_last_json(capsys) == {
        "database": str(database.name),
        "was_encrypted": True,
        "encrypted": False,
        "live": 3,
        "confirmed": 0,
        "damaged": 0,
        "erased": True,
    }
    assert not is_encrypted(database)


def test_encrypt_is_refused_while_a_helper_runs(
    database: Path, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def try_encrypt() -> int:
        store = create_store(load(None).config, FakeClock())
        await store.open()
        try:
            return await anyio.to_thread.run_sync(run_command, "db", "encrypt", "--key-file", str(key_file), "--yes")
        finally:
            await store.close()

    assert anyio.run(try_encrypt) == 1
    assert "Stop the other helper" in capsys.readouterr().err
    assert not is_encrypted(database)


def test_queue_commands_read_and_change_encrypted_file(
    encrypted_database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("queue", "list", "--json") == 0
    shares = read_last_json(capsys)["shares"]
    assert [share["state"] for share in shares] == ["received"] * 3
    assert run_command("queue", "show", shares[0]["ref"], "--json") == 0
    assert read_last_json(capsys)["submit_at"] == END - 60
    assert run_command("queue", "retry", "--yes", "--json") == 0
    assert run_command("queue", "export", "--output", "shares.age", "--move", "--yes", "--json") == 0
    assert read_last_json(capsys)["shares"] == 3
    assert run_command("queue", "retry", "--stage", "moved", "--yes", "--json") == 0
    assert read_last_json(capsys)["retried"] == 3


def read_database_finding(capsys: pytest.CaptureFixture[str]) -> Any:
    run_command("doctor", "--skip-proof", "--json")
    return next(finding for finding in read_last_json(capsys)["findings"] if finding["subject"] == "database")


def test_doctor_checks_the_key_of_the_database(
    encrypted_database: Path, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = read_database_finding(capsys)
    assert (finding["level"], finding["facts"]["shares"]) == ("ok", 3)
    key_file.write_text("cd" * 32)
    finding = read_database_finding(capsys)
    assert finding["level"] == "fail"
    assert "a key that is not in the key file" in finding["message"]
    key_file.write_text("ab" * 32)
    assert run_command("db", "decrypt", "--yes") == 0
    capsys.readouterr()
    finding = read_database_finding(capsys)
    assert finding["level"] == "fail"
    assert "svote-helper db encrypt" in finding["advice"]


@pytest.mark.parametrize(
    "command", ["queue list", "db check", "db backup --output b.age", "db migrate --no-backup --yes"]
)
def test_commands_without_key_are_refused(
    encrypted_database: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("helper.toml").unlink()
    before = encrypted_database.read_bytes()
    assert run_command(*command.split()) == 1
    error = capsys.readouterr().err
    assert "is encrypted, and [store] key_file is not set" in error
    assert "SVOTE_HELPER_STORE_KEY_FILE" in error
    assert encrypted_database.read_bytes() == before


def test_backup_of_encrypted_file_stays_encrypted(
    encrypted_database: Path, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("db", "backup", "--output", "b.age", "--json") == 0
    assert read_last_json(capsys)["encrypted"] is True
    assert run_command("db", "check", "--backup", "b.age", "--json") == 0
    assert read_last_json(capsys)["live"] == 3
    assert run_command("db", "restore", "b.age", "--db", "restored.db") == 0
    assert is_encrypted(Path("restored.db").absolute())
    assert run_command("queue", "list", "--db", "restored.db", "--json") == 0

    other = key_file.with_name("other.key")
    other.touch(0o600)
    other.write_text("cd" * 32)
    Path("helper.toml").write_text(f'[store]\nkey_file = "{other}"\n')
    capsys.readouterr()
    assert run_command("db", "restore", "b.age", "--db", "again.db") == 1
    assert "encrypted with a key that is not in the key file" in capsys.readouterr().err
    assert not Path("again.db").exists()


def test_unencrypted_backup_is_reported_at_the_restore(
    database: Path, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("db", "backup", "--output", "b.age") == 0
    Path("helper.toml").write_text(f'[store]\nkey_file = "{key_file}"\n')
    assert run_command("db", "restore", "b.age", "--db", "restored.db") == 0
    assert "is not encrypted: run `svote-helper db encrypt`" in capsys.readouterr().err

    with pytest.raises(StoreKeyError, match="is not encrypted"):
        anyio.run(
            create_store(
                load(Path("helper.toml"), {"SVOTE_HELPER_HELPER_DB_PATH": "restored.db"}).config, FakeClock()
            ).open
        )


def test_copy_creates_encrypted_file_with_key_file(
    database: Path, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--key-file", str(key_file), "--yes")
    assert run_command("db", "copy", "--to", "new.db", *flags, "--json") == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["live"] == 3
    assert "[store] key_file and no url" in output.err
    assert is_encrypted(Path("new.db").absolute())
    assert run_command("db", "copy", "--from", "new.db", "--to", str(database), *flags) == 0
    assert "no [store] url and key_file" in capsys.readouterr().err
    assert not is_encrypted(database), "an existing file keeps its form"
