"""JSON output of every command: one line in the documented shape, last on standard output."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from helper.chain.chain_data import TxResult
from helper.cli.chain import _describe_transaction
from helper.core.json_records import to_json
from helper.core.share import ShareState
from helper.observability import log_config
from helper.store import audit_log, messages, rounds, shares
from helper.store.models import QueueFilter
from helper.store.table_rows import RevealRow
from tests.recorded.test_proof_bundle import BUNDLE, FIRST_EVIDENCE
from tests.support.schemas import assert_conforms
from tests.unit.cli.live_daemon import LiveDaemon, create_queue_file, run_live_daemon
from tests.unit.cli.test_main import run_command
from tests.unit.cli.test_queue_actions import fill_queue
from tests.unit.ingest.admission_fixtures import END, ROUND_ID
from tests.unit.operations.action_fixtures import ANN, NOW, OperationsHarness, nullifier_of, recorded_share
from tests.unit.operations.test_import_queue import sent_share

KEY = bytes(range(1, 33))


def secrets_of(index: int) -> list[str]:
    """Encodings of a recorded share's witness to search for."""
    share = recorded_share(index)
    fields = [share.shares_hash, share.primary_blind, share.c1, share.c2, nullifier_of(share)]
    fields += [share.share_comms[start : start + 32] for start in range(0, 512, 32)]
    return [encoded for field in fields for encoded in (field.hex(), base64.b64encode(field).decode())]


SECRETS = [secret for index in (0, 1, 2, 3, 9) for secret in secrets_of(index)]


@pytest.fixture
def run_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run a command with `--json` and return its output; asserts the documented shape."""
    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", "correct horse battery")
    monkeypatch.setattr(log_config, "configure", lambda *_: None)

    def run_json(name: str, *arguments: str, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        with capture_logs():
            assert run_command(*name.split(), *arguments, "--json") == code
        output = capsys.readouterr().out
        assert output.endswith("\n")
        assert output.count("\n") == 1
        if not name.startswith("proof"):  # `proof` prints public data
            assert not any(secret in output for secret in SECRETS), "no command prints any part of a witness"
        result: dict[str, Any] = json.loads(output)
        assert_conforms(name.replace(" ", "-"), result)
        return result

    return run_json


RunJson = Callable[..., dict[str, Any]]


async def enqueue_mixed(harness: OperationsHarness) -> None:
    """Enqueue shares in every state, and purge a round."""
    await fill_queue(harness)
    share = recorded_share(9)
    await harness.store.run(shares.EnqueueOperation(share, nullifier_of(share), now=NOW))
    (queued,) = await harness.store.run(shares.claim_due, now=NOW, limit=1, rounds=[ROUND_ID])
    exported_reveal = sent_share(9).reveal
    assert exported_reveal is not None
    await harness.store.run(messages.prepare, queued.id, RevealRow(*exported_reveal[:6]))
    await harness.store.run(messages.mark_sending, queued.id, height=5, endpoint="node:80")
    await harness.operations.record_export(ANN, QueueFilter(), 0, 3)
    await harness.store.run(audit_log.begin_action, ANN, "retry", {})


def test_json_output_of_queue_commands_with_helper(run_json: RunJson, tmp_path: Path) -> None:
    with run_live_daemon(tmp_path / "svote-helper.db") as live:
        live.run(enqueue_mixed)
        check_queue_commands(run_json, live, "daemon")


def test_json_output_of_queue_commands_without_helper(run_json: RunJson) -> None:
    create_queue_file(fill=enqueue_mixed)
    check_queue_commands(run_json, None, "file")


def check_queue_commands(run_json: RunJson, live: LiveDaemon | None, source: str) -> None:
    listed = run_json("queue list")
    assert (listed["source"], len(listed["shares"])) == (source, 5)
    assert run_json("queue list", "--state", "failed")["failed"]
    sent = next(share for share in listed["shares"] if share["state"] == "broadcast")
    assert run_json("queue show", sent["ref"])["transaction"]["sends"] == 1
    stats = run_json("queue stats")
    assert stats["total"]["broadcast"] == 1
    assert ("service" in stats) is (live is not None)
    assert len(run_json("queue audit")["actions"]) == 2
    assert run_json("rounds")["rounds"][0]["shares"]["total"] == 5
    assert run_json("queue retry", "--dry-run")["retried"] == 2
    assert run_json("queue export", "--output", "x.age", "--dry-run")["shares"] == 5
    copied = run_json("queue export", "--output", "x.age")
    assert (copied["copied"], copied["source"]) == (5, source)
    assert run_json("queue import", "x.age", "--yes", code=3)["known"] == 5
    assert run_json("queue export", "--output", "y.age", "--move", "--yes")["moved"] == (4 if live else 5)
    assert run_json("queue retry", "--stage", "moved", "--yes")["retried"] == (4 if live else 5)
    if live is not None:
        live.harness.rounds.closed.add(ROUND_ID)
        live.run(lambda harness: harness.store.run(rounds.mark_alerted, ROUND_ID, END))
        purged = run_json("queue purge", "--round", ROUND_ID.hex(), "--yes")
        assert sum(purged[state.json_name] for state in ShareState) == 5


def test_json_output_of_db_commands(run_json: RunJson, tmp_path: Path) -> None:
    create_queue_file()
    run_json("db backup", "--output", "b.age")
    run_json("db check")
    key = tmp_path / "store.key"
    key.touch(0o600)
    key.write_text("ab" * 32)
    assert run_json("db encrypt", "--key-file", str(key), "--yes")["encrypted"] is True
    assert run_json("db decrypt", "--key-file", str(key), "--yes")["encrypted"] is False
    assert run_json("db migrate", "--no-backup", "--yes")["migrated"] is False
    run_json("db check", "--backup", "b.age")
    assert run_json("db restore", "b.age", "--force")["set_aside"]


def test_json_output_of_config_and_health(run_json: RunJson) -> None:
    assert run_json("version")["circuits"].keys() == {"k10", "k11"}
    run_json("config show")
    run_json("config show", "--origin")
    run_json("config init", "--endpoint", "http://127.0.0.1:9")
    run_json("config validate")
    Path("wrong.toml").write_text("[helper]\nprot = 1\n")
    assert run_json("config validate", "wrong.toml", code=1)["problems"]
    Path("helper.toml").write_text('[chain]\nendpoints = ["http://127.0.0.1:9"]\n')
    assert run_json("config validate", "--online", code=6)["online"]
    assert run_json("healthcheck", code=6)["status"] == "unreachable"


def test_json_output_of_admin_commands(run_json: RunJson, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("key").write_text(KEY.hex())
    row = {"operator_address": "sv1x", "url": "", "moniker": "m", "requested_at": 1, "expires_at": 2}
    answers = [{"status": "registered"}, {"status": "pending", "expires_at": 1_795_872_800}, [row]]

    async def respond(*_: object) -> httpx.Response:
        return httpx.Response(200, json=answers.pop(0))

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", respond)
    for _ in range(2):
        run_json("admin register", "--key-file", "key", "--moniker", "m")
    assert run_json("admin pending")["pending"]


def test_untrusted_text_on_stderr_has_no_control_characters(
    run_json: RunJson, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "\x1b[2J\x07 all is well"
    Path(name).write_bytes(BUNDLE[:-1])
    assert "all is well" in run_json("proof verify", name, code=1)["bundle"]
    assert run_command("proof", "verify", f"{name}, too") == 5
    output = capsys.readouterr()
    assert "all is well" in output.err
    assert not [char for char in output.out + output.err if not char.isprintable() and char not in "\t\n"]


def test_json_output_of_proof_bundle_and_tx(run_json: RunJson, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("good.zip").write_bytes(BUNDLE)
    Path("bad.zip").write_bytes(BUNDLE[:-1])
    run_json("proof verify", "good.zip")
    assert run_json("proof verify", "bad.zip", code=1)["reason"]

    async def find(*_: object) -> object:
        return FIRST_EVIDENCE, "chain"

    monkeypatch.setattr("helper.cli.proof._find", find)
    run_json("proof export", "ab" * 32, "--output", "b.zip")

    for result, raw in (
        (TxResult(0, 5, ""), FIRST_EVIDENCE.transaction),
        (TxResult(1, 5, "no"), b"\x05x"),
        (TxResult(0, 5, ""), None),
    ):
        assert_conforms("tx-lookup", to_json(_describe_transaction(result, raw, b"\xab" * 32, "chain-1")))
