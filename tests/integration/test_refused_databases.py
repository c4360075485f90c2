"""A damaged, foreign or newer database is refused unmodified, with advice."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helper.clock import SystemClock
from helper.store.sqlite.opening import open_database


def damage_pages(path: Path) -> None:
    """Overwrite every page after the first."""
    open_database(path, SystemClock()).close()
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xa5" * (len(content) - 4096))


def truncate_file(path: Path) -> None:
    """Remove the second half."""
    open_database(path, SystemClock()).close()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2 // 4096 * 4096])


def write_foreign_database(path: Path) -> None:
    """Create the database of another program."""
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE recipes (name TEXT)")
    file.close()


def write_newer_version(path: Path) -> None:
    """Set the version of a newer release."""
    open_database(path, SystemClock()).close()
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 9999")
    file.close()


def write_text_file(path: Path) -> None:
    """Write a text file."""
    path.write_text("buy milk\n" * 1000)


@pytest.mark.parametrize(
    ("damage_file", "error", "advises"),
    [
        (damage_pages, "damaged", "backup"),
        (truncate_file, "damaged", "backup"),
        (write_foreign_database, "another program", "db_path"),
        (write_newer_version, "newer version", "version"),
        (write_text_file, "not a database", "db_path"),
    ],
)
def test_serve_with_unusable_database_is_refused(
    tmp_path: Path, damage_file: Callable[[Path], None], error: str, advises: str
) -> None:
    database = tmp_path / "queue.db"
    damage_file(database)
    before = database.read_bytes()
    config = tmp_path / "helper.toml"
    config.write_text(f'[helper]\nport = 0\ndb_path = "{database}"\n[chain]\nendpoints = ["http://127.0.0.1:1"]\n')
    completed = subprocess.run(
        [sys.executable, "-m", "helper", "serve", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == 1
    assert completed.stdout == ""
    assert error in completed.stderr
    assert advises in completed.stderr.splitlines()[-1], "the last line is the advice"
    assert "Traceback" not in completed.stderr
    assert database.read_bytes() == before, "the file is unchanged"
