"""What programs read of every command: one line, in the documented shape, the last on standard output."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from structlog.testing import capture_logs

from helper.chain.lookups import FoundTx
from helper.cli import db as db_module
from helper.cli import db_migrate, queue_actions, queue_transfer
from helper.cli.proof import Source
from helper.cli.tx import _as_json
from helper.core.share import ShareState
from helper.observability import log_config
from helper.store.rows import QueueFilter
from helper.store.sqlite.store import SqliteStore
from tests.recorded.test_proof_bundle import BUNDLE, FIRST, restated
from tests.support.schemas import conforms
from tests.unit.cli.live_daemon import Live, live_daemon
from tests.unit.cli.test_main import run
from tests.unit.cli.test_queue_actions import fill
from tests.unit.ingest.admission_fixtures import END, ROUND_ID
from tests.unit.operations.action_fixtures import ANN, NOW, Desk, nullifier_of, recorded
from tests.unit.operations.test_import_queue import sent

KEY = bytes(range(1, 33))


def secrets_of(index: int) -> list[str]:
    """What a recorded share's witness looks like in any spelling."""
    share = recorded(index)
    fields = [share.shares_hash, share.primary_blind, share.c1, share.c2, nullifier_of(share)]
    fields += [share.share_comms[start : start + 32] for start in range(0, 512, 32)]
    return [spelt for field in fields for spelt in (field.hex(), base64.b64encode(field).decode())]


SECRETS = [secret for index in (0, 1, 2, 3, 9) for secret in secrets_of(index)]


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """Runs a command with `--json`, and gives what it printed if that has its documented shape."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SVOTE_HELPER_CONFIG", raising=False)
    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", "correct horse battery")
    for module in (
        queue_actions,
        queue_transfer,
        db_module,
        db_migrate,
    ):  # for good, in the process that runs the tests
        monkeypatch.setattr(module, "harden_process", list)
    monkeypatch.setattr(log_config, "configure", lambda *_: None)
    monkeypatch.setattr("helper.cli.chain_access.configure", lambda *_: None)
    monkeypatch.setattr("os.nice", lambda by: by)

    def asked(name: str, *arguments: str, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        with capture_logs():
            assert run(*name.split(), *arguments, "--json") == code
        told = capsys.readouterr().out
        assert told.endswith("\n")
        assert told.count("\n") == 1
        if not name.startswith("proof"):  # which is about what is public
            assert not any(secret in told for secret in SECRETS), "no command prints anything of a witness"
        answer: dict[str, Any] = json.loads(told)
        conforms(name.replace(" ", "-"), answer)
        return answer

    return asked


Machine = Callable[..., dict[str, Any]]


async def mixed(desk: Desk) -> None:
    """Shares in every state, and a round that was purged."""
    await fill(desk)
    share = recorded(9)
    await desk.store.enqueue(share, nullifier_of(share), now=NOW)
    (queued,) = await desk.store.claim_due(now=NOW, limit=1, rounds=[ROUND_ID])
    carried = sent(9).reveal
    assert carried is not None
    await desk.store.prepare(queued.id, carried.prepared)
    await desk.store.mark_sending(queued.id, height=5, endpoint="node:80")
    await desk.operations.note_export(ANN, QueueFilter(), 0, 3)
    await desk.store.begin_action(ANN, "retry", {})


def test_the_queue_told_by_a_daemon(machine: Machine, tmp_path: Path) -> None:
    with live_daemon(tmp_path / "svote-helper.db") as live:
        live.run(mixed)
        the_queue(machine, live, "daemon")


def test_the_queue_read_from_the_file(machine: Machine, tmp_path: Path) -> None:
    async def make() -> None:
        desk = Desk(tmp_path / "svote-helper.db")
        await desk.open()
        await mixed(desk)
        await desk.store.close()

    anyio.run(make)
    the_queue(machine, None, "file")


def the_queue(machine: Machine, live: Live | None, source: str) -> None:
    """Every command about it."""
    listed = machine("queue list")
    assert (listed["source"], len(listed["shares"])) == (source, 5)
    assert machine("queue list", "--state", "failed")["failed"]
    sent = next(share for share in listed["shares"] if share["state"] == "broadcast")
    assert machine("queue show", sent["ref"])["transaction"]["sends"] == 1
    stats = machine("queue stats")
    assert stats["total"]["broadcast"] == 1
    assert ("service" in stats) is (live is not None)
    assert len(machine("queue audit")["actions"]) == 2
    assert machine("rounds")["rounds"][0]["shares"]["total"] == 5
    assert machine("queue retry", "--dry-run")["retried"] == 2
    assert machine("queue export", "--output", "x.age", "--dry-run")["shares"] == 5
    copied = machine("queue export", "--output", "x.age")
    assert (copied["copied"], copied["source"]) == (5, source)
    assert machine("queue import", "x.age", "--yes", code=3)["known"] == 5
    assert machine("queue export", "--output", "y.age", "--move", "--yes")["moved"] == (4 if live else 5)
    assert machine("queue retry", "--yes")["retried"] == (4 if live else 5)
    if live is not None:
        live.desk.judge.closed.add(ROUND_ID)
        live.run(lambda desk: desk.store.mark_alerted(ROUND_ID, END))
        purged = machine("queue purge", "--round", ROUND_ID.hex(), "--yes")
        assert sum(purged[state.name.lower()] for state in ShareState) == 5


def test_the_database(machine: Machine, tmp_path: Path) -> None:
    async def make() -> None:
        store = SqliteStore(tmp_path / "svote-helper.db")
        await store.open()
        await store.close()

    anyio.run(make)
    machine("db backup", "--output", "b.age")
    machine("db check")
    assert machine("db migrate", "--dry-run")["migrated"] is False
    machine("db check", "--backup", "b.age")
    assert machine("db restore", "b.age", "--force")["set_aside"]


def test_settings_and_health(machine: Machine, tmp_path: Path) -> None:
    assert machine("version")["circuits"].keys() == {"k10", "k11"}
    machine("config show")
    machine("config show", "--origin")
    machine("config init")
    machine("config validate")
    Path("wrong.toml").write_text("[helper]\nprot = 1\n")
    assert machine("config validate", "wrong.toml", code=1)["problems"]
    Path("helper.toml").write_text('[chain]\nendpoints = ["http://127.0.0.1:9"]\n')
    assert machine("config validate", "--online", code=6)["online"]
    assert machine("healthcheck", code=6)["status"] == "unreachable"


def test_validators(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("key").write_text(KEY.hex())
    row = {"operator_address": "sv1x", "url": "", "moniker": "m", "requested_at": 1, "expires_at": 2}
    for answer in ({"status": "registered"}, {"status": "pending", "expires_at": 1_795_872_800}):
        monkeypatch.setattr(
            httpx.HTTPTransport, "handle_request", lambda *_, answer=answer: httpx.Response(200, json=answer)
        )
        machine("admin register", "--key-file", "key", "--moniker", "m")
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda *_: httpx.Response(200, json=[row]))
    assert machine("admin pending")["pending"]


def test_words_of_others_in_what_a_person_is_told_move_no_cursor(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.zip").write_bytes(restated(**{"\x1b[2J\x07 all is well": 1}))
    assert "all is well" in machine("proof verify", "bad.zip", code=1)["reason"]
    assert run("proof", "verify", "bad.zip") == 1
    said = capsys.readouterr()
    assert "all is well" in said.err
    assert not [char for char in said.out + said.err if not char.isprintable() and char not in "\t\n"]


def test_evidence_and_transactions(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("good.zip").write_bytes(BUNDLE)
    Path("bad.zip").write_bytes(BUNDLE[:-1])
    machine("proof verify", "good.zip")
    assert machine("proof verify", "bad.zip", code=1)["reason"]

    async def find(*_: object) -> object:
        return FIRST, Source.CHAIN

    monkeypatch.setattr("helper.cli.proof._find", find)
    machine("proof export", "ab" * 32, "--output", "b.zip")

    for found in (FoundTx(5, 0, "", FIRST.transaction), FoundTx(5, 1, "no", b"\x05x"), FoundTx(5, 0, "", None)):
        conforms("tx-lookup", _as_json(found, b"\xab" * 32, "chain-1"))
