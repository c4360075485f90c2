"""`serve` before the service runs: a second helper on one database, or an unusable database, is refused."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helper.clock import SystemClock
from helper.store import factory
from helper.store.sqlite.file_lock import FileLock, refuse_locked
from helper.store.sqlite.opening import open_database
from tests.support.command import run_refused_serve
from tests.unit.cli.test_main import run_command
from tests.unit.runtime.test_systemd import UNREACHABLE_NODE_CONFIG


def write_config(directory: Path, text: str = "", chain: str = UNREACHABLE_NODE_CONFIG) -> Path:
    file = directory / "helper.toml"
    file.write_text(f'[helper]\nport = 0\ndb_path = "{directory}/q.db"\n{text}\n{chain}')
    return file


def test_serve_second_helper_is_refused_before_loading(tmp_path: Path) -> None:
    """Loading takes a second of CPU time or more, which the second helper must not spend."""
    lock = FileLock(tmp_path / "q.db")
    lock.acquire()
    lock.mark_open()
    loaded, messages = run_refused_serve(write_config(tmp_path), "helper.app.service", "uvicorn", "httpx", "uvloop")
    lock.release(clean=False)
    assert loaded == "[]"
    assert "another helper has this database open" in messages
    assert "set another db_path" in messages
    refuse_locked(tmp_path / "q.db")
    assert not lock.acquire(), "the crash of the first helper is still visible"
    lock.release(clean=False)


def test_serve_when_disabled_prints_reason_and_exits(tmp_path: Path) -> None:
    disabled = write_config(tmp_path, "disable = true\n[admin]\ndisable = true\n[gateway]\nenable = false\n")
    arguments = [sys.executable, "-m", "helper", "serve", "--config", str(disabled)]
    completed = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "disabled" in completed.stderr


def test_serve_invalid_sentry_dsn_is_refused_before_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, 'sentry_dsn = "http://127.0.0.1/nothing"')
    assert run_command("serve", "--config", str(config)) == 1
    assert "sentry_dsn is not a valid Sentry DSN" in capsys.readouterr().err
    assert not (tmp_path / "q.db").exists()


@pytest.mark.parametrize("command", ["serve", "audit 00", "config validate"])
def test_command_without_a_node_is_refused_and_says_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Nothing may listen on a default address: its answers would decide which votes count."""
    config = write_config(tmp_path, chain="")
    assert run_command(*command.replace("00", "0" * 64).split(), "--config", str(config)) == 1
    printed = capsys.readouterr()
    assert "no node is configured" in printed.out + printed.err
    assert "[chain] endpoints" in printed.out + printed.err
    assert not (tmp_path / "q.db").exists()


def test_serve_on_a_network_file_system_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nshare {tmp_path} virtiofs rw 0 0\n")
    monkeypatch.setattr(factory, "MOUNTS_FILE", mounts)
    assert run_command("serve", "--config", str(write_config(tmp_path))) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path} is on virtiofs" in error
    assert "Put the database on a local disk" in error
    assert not (tmp_path / "q.db").exists()


def damage_pages(path: Path) -> None:
    open_database(path, SystemClock()).close()
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xa5" * (len(content) - 4096))


def truncate_file(path: Path) -> None:
    open_database(path, SystemClock()).close()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2 // 4096 * 4096])


def write_foreign_database(path: Path) -> None:
    """Create the database of another program."""
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE recipes (name TEXT)")
    file.close()
    path.chmod(0o644)


def write_newer_version(path: Path) -> None:
    open_database(path, SystemClock()).close()
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 9999")
    file.close()


def write_text_file(path: Path) -> None:
    path.write_text("buy milk\n" * 1000)


def read_directory(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Return mode and content of each entry."""
    return {
        path.name: (path.stat().st_mode, path.read_bytes() if path.is_file() else b"") for path in directory.iterdir()
    }


@pytest.mark.parametrize(
    ("damage_file", "error", "advises"),
    [
        (damage_pages, "damaged", "backup"),
        (truncate_file, "damaged", "backup"),
        (write_foreign_database, "another program", "db_path"),
        (write_newer_version, "newer version", "version"),
        (write_text_file, "not a database", "db_path"),
        (Path.mkdir, "not a file", "db_path"),
    ],
)
def test_serve_with_unusable_database_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage_file: Callable[[Path], None],
    error: str,
    advises: str,
) -> None:
    database = tmp_path / "q.db"
    damage_file(database)
    config = write_config(tmp_path)
    before = read_directory(tmp_path)
    assert run_command("serve", "--config", str(config)) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert error in printed.err
    assert advises in printed.err.splitlines()[-1], "the last line is the advice"
    assert read_directory(tmp_path) == before, "nothing is changed or created"
