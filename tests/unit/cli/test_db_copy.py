"""`db copy`: what it asks for, what it tells, how it ends, and that it goes on where it was killed."""

from __future__ import annotations

import json
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

from bench.fill_database import fill as fill_many
from helper.cli import db_copy
from helper.core.share import ShareState
from helper.errors import StoreMoved
from helper.store.sqlite.reader import open_queue_file
from helper.store.sqlite.store import SqliteStore
from tests.support.postgres import Cluster
from tests.support.process import PATIENCE
from tests.support.schemas import conforms
from tests.unit.cli.test_main import run
from tests.unit.store.conformance.backends import SEALS, PostgresPlace, SqlitePlace
from tests.unit.store.fixtures import NOW, ROUND, posted, put
from tests.unit.store.test_migration import everything

MANY = 3000


async def counts_of(path: Path) -> dict[bytes, dict[ShareState, int]]:
    """The shares in a database file."""
    async with open_queue_file(path) as queue:
        return await queue.counts()


class Setting:
    """A folder with settings, a file with some shares, a key, and a schema that is not made yet."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        self.schema = f"test_{token_hex(6)}"
        self.file = folder / "queue.db"
        self.key = folder / "store.key"
        self.key.touch(0o600)
        self.key.write_text(SEALS[0].hex())
        (folder / "helper.toml").write_text(
            f'[helper]\ndb_path = "{self.file}"\n[store]\nkey_file = "{self.key}"\nschema_name = "{self.schema}"\n'
        )

    def everything(self, kind: str) -> dict[str, list[Any]]:
        """All rows at one end."""
        if kind == "sqlite":
            return everything(SqlitePlace(self.folder))
        return everything(PostgresPlace(self.address, self.schema))

    def with_store(self, what: Callable[[SqliteStore], Awaitable[None]]) -> None:
        """Do something while a daemon has the file open."""

        async def go() -> None:
            store = SqliteStore(self.file)
            await store.open()
            try:
                await what(store)
            finally:
                await store.close()

        anyio.run(go)


@pytest.fixture
def here(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SVOTE_HELPER_CONFIG", raising=False)
    monkeypatch.setattr(db_copy, "harden_process", list)  # for good, in the process that runs the tests
    return Setting(tmp_path, cluster.address)


async def some(store: SqliteStore) -> None:
    """A few shares, one of them confirmed."""
    await put(store, 1, 2, 3)
    await store.apply_block(9, [(ROUND, posted(3).nullifier)], now=NOW)


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    answer: dict[str, Any] = json.loads(out)
    conforms("db-copy", answer)
    return answer


def test_there_and_back_with_what_an_operator_is_told(here: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    here.with_store(some)
    before = here.everything("sqlite")
    assert run("db", "copy", "--to", here.address, "--dry-run", "--json") == 0
    planned = told(capsys)
    assert (planned["state"], planned["live"], planned["confirmed"]) == ("planned", 2, 1)

    assert run("db", "copy", "--to", here.address, "--yes") == 0
    said = capsys.readouterr()
    assert "2 live shares, 1 confirmed, compared row by row; the move is finished" in said.out
    assert re.search(r"settings: \[store\] url = \"postgresql://tests@", said.err)
    assert f"db copy --erase --from {here.file}" in said.err
    assert here.everything("postgresql") == before
    assert posted(1).share.shares_hash.hex() not in said.out + said.err

    # the old place says where the queue is to whoever looks there
    with pytest.raises(StoreMoved, match="was moved to postgresql://"):
        here.with_store(some)
    assert run("queue", "list") == 1
    assert "was moved to" in capsys.readouterr().err
    assert run("db", "copy", "--to", here.address, "--yes") == 1
    assert "was moved to" in capsys.readouterr().err

    for after, would in (("--erase", "would be deleted"), ("--undo", "would be used again")):
        assert run("db", "copy", after, "--dry-run") == 0
        plan = capsys.readouterr().out
        assert would in plan
        assert "would be moved" not in plan
        assert run("db", "copy", after, "--dry-run", "--json") == 0
        assert told(capsys)["state"] == "planned"

    assert run("db", "copy", "--erase", "--yes", "--json") == 0
    assert told(capsys)["state"] == "erased"
    assert posted(1).share.shares_hash not in here.file.read_bytes()

    assert run("db", "copy", "--from", here.address, "--to", "sqlite", "--yes", "--json") == 0
    moved = told(capsys)
    assert (moved["state"], moved["live"], moved["confirmed"], moved["damaged"]) == ("moved", 2, 1, [])
    assert here.everything("sqlite") == before
    here.with_store(some)

    assert run("db", "copy", "--undo", "--yes") == 1
    assert "not marked as moved" in capsys.readouterr().err
    assert run("db", "copy", "--undo", "--from", here.address, "--yes", "--json") == 0
    assert told(capsys)["state"] == "undone"


def test_beside_a_running_helper_it_is_only_copied(here: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    async def while_it_runs(store: SqliteStore) -> None:
        await some(store)
        assert run("db", "copy", "--to", here.address, "--yes", "--json") == 3
        said = capsys.readouterr()
        assert json.loads(said.out)["state"] == "copied"
        assert "stop it" in said.err
        await put(store, 4)

    here.with_store(while_it_runs)
    assert run("db", "copy", "--to", here.address, "--yes", "--json") == 0
    answer = told(capsys)
    assert (answer["state"], answer["live"], answer["written"]) == ("moved", 3, 1)


def test_it_waits_for_the_end_of_a_running_helper(
    here: Setting, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_copy, "PAUSE", 0.01)
    monkeypatch.setattr(db_copy, "CATCH_UP_INTERVAL", 2)

    async def go() -> None:
        store = SqliteStore(here.file)
        await store.open()
        await some(store)
        ended: list[int] = []

        async def command() -> None:
            words = ("db", "copy", "--to", here.address, "--yes", "--wait")
            ended.append(await anyio.to_thread.run_sync(run, *words))

        said = ""
        async with anyio.create_task_group() as group:
            group.start_soon(command)
            with anyio.fail_after(PATIENCE):
                while said.count("pass ") < 2:  # one while it waits
                    await anyio.sleep(0.01)
                    said += capsys.readouterr().err
            await put(store, 4)
            await store.close()
        assert ended == [0]
        assert "3 live shares" in capsys.readouterr().out

    anyio.run(go)


def test_killed_in_the_midst_it_goes_on(here: Setting) -> None:
    fill_many(here.file, ROUND, MANY, due=int(NOW))
    before = here.everything("sqlite")
    command = [sys.executable, "-m", "helper", "db", "copy", "--to", here.address, "--yes"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    copying = subprocess.Popen(command, env=environment, cwd=here.folder, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE
    while not (kept := rows_there(here)):
        assert copying.poll() is None
        assert time.monotonic() < deadline
    os.kill(copying.pid, signal.SIGKILL)
    copying.wait(PATIENCE)
    assert 0 < kept < MANY
    anyio.run(counts_of, here.file)  # still the queue

    assert run("db", "copy", "--to", here.address, "--yes") == 0
    assert here.everything("postgresql") == before


def rows_there(here: Setting) -> int:
    """How many shares have arrived."""
    with psycopg.connect(here.address) as conn:
        made = conn.execute("SELECT to_regclass(%s) IS NOT NULL", (f"{here.schema}.shares",)).fetchone()
        if made != (True,):
            return 0
        row = conn.execute(f"SELECT count(*) FROM {here.schema}.shares".encode()).fetchone()
    assert row is not None
    return int(row[0])


WRONG = [
    ((), 2, "give one of --to"),
    (("--to", "mysql://there/db"), 2, "neither postgresql"),
    (("--to", "postgresql"), 2, r"\[store\] url is empty"),
    (("--to", "sqlite"), 1, "onto itself"),
    (("--to", "ADDRESS", "--from", "nowhere.db"), 5, "database nowhere.db does not exist"),
    (("--to", "there.db", "--from", "ADDRESS"), 5, "has no queue"),
    (("--to", "postgresql://db.example/x?sslmode=require"), 1, "does not protect"),
    (("--to", "postgresql:///x?host=/nowhere"), 6, "is unreachable"),
    (("--to", "ADDRESS", "--key-file", "open.key"), 1, "users other than its owner"),
    (("--to", "text.db"), 1, "not a database"),
    (("--undo",), 1, "not marked as moved"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), WRONG)
def test_what_it_refuses_and_how_it_ends(
    here: Setting, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    here.with_store(some)
    (here.folder / "open.key").touch()
    (here.folder / "open.key").chmod(0o644)
    (here.folder / "text.db").write_text("not a database, but some notes of somebody's")
    given = [here.address if word == "ADDRESS" else word for word in arguments]
    assert run("db", "copy", *given, "--yes") == code
    assert re.search(words, capsys.readouterr().err)
    here.with_store(some)


def test_nobody_is_moved_unasked_or_with_other_keys(here: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    here.with_store(some)
    assert run("db", "copy", "--to", here.address) == 2
    assert "--yes" in capsys.readouterr().err
    assert run("db", "copy", "--to", here.address, "--yes") == 0
    here.key.write_text((b"o" * 32).hex())
    assert run("db", "copy", "--from", here.address, "--to", "back.db", "--yes") == 1
    assert "encrypted with a key that this host does not have" in capsys.readouterr().err
    assert not (here.folder / "back.db").exists()


def test_a_queue_of_another_is_not_overwritten(here: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    here.with_store(some)
    assert run("db", "copy", "--to", here.address, "--yes") == 0
    here.file.unlink()
    here.with_store(some)
    assert run("db", "copy", "--to", here.address, "--yes") == 1
    assert "already has another queue" in capsys.readouterr().err
    assert run("db", "copy", "--to", here.address, "--dry-run") == 1
    here.with_store(some)
    assert anyio.run(counts_of, here.file)
