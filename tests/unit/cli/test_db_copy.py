"""`db copy`: confirmation, output, exit codes, and resuming after a kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from secrets import token_hex
from typing import Any

import anyio
import psycopg
import pytest

from bench.fill_database import insert_shares as fill_many
from helper.core.share import ShareState
from helper.errors import StoreMoved
from helper.store.sqlite.reader import open_queue_file
from helper.store.sqlite.store import SqliteStore
from tests.support.postgres import Cluster
from tests.support.process import TIMEOUT_SECONDS
from tests.unit.cli.test_main import read_json, run_command
from tests.unit.store.conformance.backends import SEALING_KEYS, PostgresBackend, SqliteBackend
from tests.unit.store.fixtures import NOW, ROUND, confirm_shares, enqueue_shares, make_posted_share
from tests.unit.store.test_migration import read_all_rows

MANY_SHARES = 3000


async def read_counts(path: Path) -> dict[bytes, dict[ShareState, int]]:
    async with open_queue_file(path) as queue:
        return await queue.count_shares()


class CopySetup:
    """A directory with settings, a database with some shares, a key, and a schema that does not exist yet."""

    def __init__(self, directory: Path, address: str) -> None:
        self.directory = directory
        self.address = address
        self.schema = f"test_{token_hex(6)}"
        self.file = directory / "queue.db"
        self.key = directory / "store.key"
        self.key.touch(0o600)
        self.key.write_text(SEALING_KEYS[0].hex())
        (directory / "helper.toml").write_text(
            f'[helper]\ndb_path = "{self.file}"\n[store]\nkey_file = "{self.key}"\nschema_name = "{self.schema}"\n'
        )

    def read_all_rows(self, kind: str) -> dict[str, list[Any]]:
        if kind == "sqlite":
            return read_all_rows(SqliteBackend(self.directory))
        return read_all_rows(PostgresBackend(self.address, self.schema))

    def with_store(self, what: Callable[[SqliteStore], Awaitable[None]]) -> None:
        """Run a function on the open store, as in a running helper."""

        async def run_copy() -> None:
            store = SqliteStore(self.file)
            await store.open()
            try:
                await what(store)
            finally:
                await store.close()

        anyio.run(run_copy)


@pytest.fixture
def copy_setup(cluster: Cluster, tmp_path: Path) -> CopySetup:
    return CopySetup(tmp_path, cluster.url)


async def enqueue_some(store: SqliteStore) -> None:
    """Enqueue some shares and confirm one of them."""
    await enqueue_shares(store, 1, 2, 3)
    await confirm_shares(store, 3, height=9)


def test_db_copy_round_trip_prints_result(copy_setup: CopySetup, capsys: pytest.CaptureFixture[str]) -> None:
    copy_setup.with_store(enqueue_some)
    before = copy_setup.read_all_rows("sqlite")
    assert run_command("db", "copy", "--to", copy_setup.address, "--dry-run", "--json") == 0
    planned = read_json(capsys, "db-copy")
    assert (planned["state"], planned["live"], planned["confirmed"]) == ("planned", 2, 1)

    assert run_command("db", "copy", "--to", copy_setup.address, "--yes") == 0
    output = capsys.readouterr()
    assert "2 live shares, 1 confirmed, compared row by row; the move is finished" in output.out
    assert re.search(r"settings: \[store\] url = \"postgresql://tests@", output.err)
    assert f"db copy --erase --from {copy_setup.file}" in output.err
    assert copy_setup.read_all_rows("postgresql") == before
    assert make_posted_share(1).share.shares_hash.hex() not in output.out + output.err

    # The source names the new location of the queue in its error.
    with pytest.raises(StoreMoved, match="was moved to postgresql://"):
        copy_setup.with_store(enqueue_some)
    assert run_command("queue", "list") == 1
    assert "was moved to" in capsys.readouterr().err
    assert run_command("db", "copy", "--to", copy_setup.address, "--yes") == 1
    assert "was moved to" in capsys.readouterr().err

    for after, effect in (("--erase", "would be deleted"), ("--undo", "would be used again")):
        assert run_command("db", "copy", after, "--dry-run") == 0
        plan = capsys.readouterr().out
        assert effect in plan
        assert "would be moved" not in plan
        assert run_command("db", "copy", after, "--dry-run", "--json") == 0
        assert read_json(capsys, "db-copy")["state"] == "planned"

    assert run_command("db", "copy", "--erase", "--yes", "--json") == 0
    assert read_json(capsys, "db-copy")["state"] == "erased"
    assert make_posted_share(1).share.shares_hash not in copy_setup.file.read_bytes()
    for consent in ("--dry-run", "--yes"):
        assert run_command("db", "copy", "--undo", consent) == 1
        assert "was erased after the queue had been moved" in capsys.readouterr().err

    assert run_command("db", "copy", "--from", copy_setup.address, "--to", "sqlite", "--yes", "--json") == 0
    moved = read_json(capsys, "db-copy")
    assert (moved["state"], moved["live"], moved["confirmed"], moved["damaged"]) == ("moved", 2, 1, [])
    assert copy_setup.read_all_rows("sqlite") == before
    copy_setup.with_store(enqueue_some)

    assert run_command("db", "copy", "--undo", "--yes") == 1
    assert "not marked as moved" in capsys.readouterr().err
    assert run_command("db", "copy", "--undo", "--from", copy_setup.address, "--yes", "--json") == 0
    assert read_json(capsys, "db-copy")["state"] == "undone"


def test_db_copy_with_running_helper_is_refused(copy_setup: CopySetup, capsys: pytest.CaptureFixture[str]) -> None:
    async def copy_meanwhile(store: SqliteStore) -> None:
        await enqueue_some(store)
        assert run_command("db", "copy", "--to", copy_setup.address, "--yes", "--json") == 1
        assert run_command("db", "copy", "--to", copy_setup.address, "--dry-run") == 0

    copy_setup.with_store(copy_meanwhile)
    output = capsys.readouterr()
    assert "Stop the other helper first" in output.err
    assert "not finished" not in output.err
    assert "would be moved" in output.out
    assert run_command("db", "copy", "--to", copy_setup.address, "--yes", "--json") == 0
    result = read_json(capsys, "db-copy")
    assert (result["state"], result["live"]) == ("moved", 2)


def test_db_copy_begins_again_after_kill(copy_setup: CopySetup) -> None:
    fill_many(copy_setup.file, ROUND, MANY_SHARES, due=int(NOW))
    before = copy_setup.read_all_rows("sqlite")
    command = [sys.executable, "-m", "helper", "db", "copy", "--to", copy_setup.address, "--yes"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    copying = subprocess.Popen(command, env=environment, cwd=copy_setup.directory, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (copied := count_target_rows(copy_setup)):
        assert copying.poll() is None
        assert time.monotonic() < deadline
    os.kill(copying.pid, signal.SIGKILL)
    copying.wait(TIMEOUT_SECONDS)
    assert 0 < copied < MANY_SHARES
    anyio.run(read_counts, copy_setup.file)  # the source is still usable

    assert run_command("db", "copy", "--to", copy_setup.address, "--yes") == 0
    assert copy_setup.read_all_rows("postgresql") == before


def count_target_rows(setup: CopySetup) -> int:
    with psycopg.connect(setup.address) as conn:
        row_exists = conn.execute("SELECT to_regclass(%s) IS NOT NULL", (f"{setup.schema}.shares",)).fetchone()
        if row_exists != (True,):
            return 0
        row = conn.execute(f"SELECT count(*) FROM {setup.schema}.shares".encode()).fetchone()
    assert row is not None
    return int(row[0])


INVALID_CALLS = [
    ((), 2, "use exactly one of --to"),
    (("--to", "mysql://there/db"), 2, "not a postgresql:// URL"),
    (("--to", "postgresql"), 2, r"\[store\] url is empty"),
    (("--to", "sqlite"), 1, "onto itself"),
    (("--to", "ADDRESS", "--from", "nowhere.db"), 5, "database nowhere.db does not exist"),
    (("--to", "there.db", "--from", "ADDRESS"), 5, "has no queue"),
    (("--to", "postgresql://db.example/x?sslmode=require"), 1, "does not protect"),
    (("--to", "postgresql:///x?host=/nowhere"), 6, "is unreachable"),
    (("--to", "ADDRESS", "--key-file", "open.key"), 1, "users other than its owner"),
    (("--to", "text.db"), 1, "not a database"),
    (("--to", "loop.db"), 1, "Too many levels of symbolic links"),
    (("--undo",), 1, "not marked as moved"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), INVALID_CALLS)
def test_db_copy_invalid_call_exit_code(
    copy_setup: CopySetup, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    copy_setup.with_store(enqueue_some)
    (copy_setup.directory / "open.key").touch()
    (copy_setup.directory / "open.key").chmod(0o644)
    (copy_setup.directory / "text.db").write_text("not a database, only some notes")
    (copy_setup.directory / "loop.db").symlink_to("loop.db")
    resolved = [copy_setup.address if argument == "ADDRESS" else argument for argument in arguments]
    assert run_command("db", "copy", *resolved, "--yes") == code
    assert re.search(message, capsys.readouterr().err)
    copy_setup.with_store(enqueue_some)


def test_db_copy_requires_confirmation_and_same_keys(copy_setup: CopySetup, capsys: pytest.CaptureFixture[str]) -> None:
    copy_setup.with_store(enqueue_some)
    assert run_command("db", "copy", "--to", copy_setup.address) == 2
    assert "--yes" in capsys.readouterr().err
    assert run_command("db", "copy", "--to", copy_setup.address, "--yes") == 0
    copy_setup.key.write_text((b"o" * 32).hex())
    assert run_command("db", "copy", "--from", copy_setup.address, "--to", "back.db", "--yes") == 1
    assert "encrypted with a key that this host does not have" in capsys.readouterr().err
    assert not (copy_setup.directory / "back.db").exists()


def test_db_copy_over_other_queue_is_refused(copy_setup: CopySetup, capsys: pytest.CaptureFixture[str]) -> None:
    copy_setup.with_store(enqueue_some)
    assert run_command("db", "copy", "--to", copy_setup.address, "--yes") == 0
    copy_setup.file.unlink()
    copy_setup.with_store(enqueue_some)
    assert run_command("db", "copy", "--to", copy_setup.address, "--yes") == 1
    assert "already contains another queue" in capsys.readouterr().err
    assert run_command("db", "copy", "--to", copy_setup.address, "--dry-run") == 1
    copy_setup.with_store(enqueue_some)
    assert anyio.run(read_counts, copy_setup.file)
