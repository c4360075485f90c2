"""`queue retry`, `purge`, `audit`, `export` and `import`, with a running helper and on the file."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from helper.cli.conventions import confirm_or_exit
from helper.cli.operator_api import OperatorApi
from helper.core.share import ShareState
from helper.store import rounds, shares
from tests.support.schemas import assert_conforms
from tests.unit.cli.live_daemon import DATABASE, LiveDaemon, create_queue_file, run_live_daemon
from tests.unit.cli.test_main import read_json, run_command
from tests.unit.ingest.admission_fixtures import END, ROUND_ID
from tests.unit.operations.action_fixtures import NOW, OperationsHarness, nullifier_of, recorded_share

PASSPHRASE = "correct horse battery"


pytestmark = pytest.mark.usefixtures("captured_logs")


@pytest.fixture(autouse=True)
def _passphrase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", PASSPHRASE)


async def fill_queue(harness: OperationsHarness, *, fail: int = 2) -> None:
    """Enqueue four real shares and fail some of them."""
    for index in range(4):
        share = recorded_share(index, submit_at=0 if index < fail else END - 10)
        await harness.store.run(shares.EnqueueOperation(share, nullifier_of(share), now=NOW))
    for queued in await harness.store.run(shares.claim_due, now=NOW, limit=fail, rounds=[ROUND_ID]):
        await harness.store.run(shares.fail, queued.id, stage="proof", note="no")


@pytest.fixture(params=["daemon", "file"])
def source(request: pytest.FixtureRequest) -> Iterator[str]:
    """Four shares, two of them failed, in a running helper or in a file."""
    create_queue_file(fill=fill_queue)
    if request.param == "file":
        yield "file"
        return
    with run_live_daemon(DATABASE.absolute()):
        yield "daemon"


@pytest.fixture
def daemon_with_shares() -> Iterator[LiveDaemon]:
    with run_live_daemon(DATABASE.absolute()) as daemon:
        daemon.run(fill_queue)
        yield daemon


def read_states(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, int]:
    capsys.readouterr()
    assert run_command("queue", "stats", "--json", *options) == 0
    total = read_json(capsys)["total"]
    return {state: number for state, number in total.items() if number and state != "total"}


def read_refs(capsys: pytest.CaptureFixture[str], *options: str) -> set[str]:
    capsys.readouterr()
    assert run_command("queue", "list", "--json", *options) == 0
    return {share["ref"] for share in read_json(capsys)["shares"]}


# ---------------------------------------------------------------------- retries


def test_retry_requeues_failed_shares_and_is_audited(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("queue", "retry", "--dry-run", "--json") == 0
    dry_result = read_json(capsys)
    assert run_command("queue", "retry", "--yes", "--json") == 0
    expected = {"source": source, "retried": 2, "closed": 0, "moved": 0, "not_failed": 0}
    assert dry_result == {**expected, "dry_run": True}
    assert read_json(capsys) == {**expected, "dry_run": False}
    assert read_states(capsys) == {"received": 4}

    assert run_command("queue", "audit", "--json") == 0
    (action,) = read_json(capsys)["actions"]
    assert (action["uid"], action["way"], action["what"]) == (
        os.getuid(),
        {"daemon": "socket"}.get(source, "file"),
        "retry",
    )
    assert run_command("queue", "audit") == 0
    assert "\tretry\t\tretried 2" in capsys.readouterr().out


def test_retry_accepts_names_and_filters(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("queue", "list", "--state", "failed", "--json") == 0
    listed = read_json(capsys)
    assert [(kind["stage"], kind["count"]) for kind in listed["failed"]] == [("proof", 2)]
    assert run_command("queue", "retry", "--stage", "tree", "--yes") == 0
    assert "0 failed shares are retried" in capsys.readouterr().out
    assert run_command("queue", "retry", listed["shares"][0]["ref"][:6], "--round", ROUND_ID.hex(), "--yes") == 0
    assert read_states(capsys) == {"received": 3, "failed": 1}


def test_named_database_is_used_although_a_helper_has_another_one_in_its_directory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    create_queue_file(Path("old.db"), fill_queue)
    Path("empty.db").touch()
    with run_live_daemon(DATABASE.absolute()) as daemon:
        daemon.run(partial(fill_queue, fail=1))
        assert read_states(capsys, "--db", "old.db") == {"received": 2, "failed": 2}
        assert run_command("queue", "retry", "--db", "old.db", "--yes", "--json") == 0
        assert read_json(capsys)["source"] == "file"
        assert read_states(capsys) == read_states(capsys, "--db", str(DATABASE)) == {"received": 3, "failed": 1}
        for name in ("missing.db", "empty.db"):
            assert run_command("queue", "retry", "--db", name, "--yes") == 5
    assert Path("empty.db").stat().st_size == 0


def test_retry_in_closed_round_fails_with_reason(
    daemon_with_shares: LiveDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon_with_shares.harness.rounds.closed.add(ROUND_ID)
    assert run_command("queue", "retry", "--yes") == 1
    assert "2 not retried: round closed" in capsys.readouterr().err
    assert run_command("queue", "retry", "--dry-run", "--json") == 1
    assert read_json(capsys)["closed"] == 2


REFUSED_ACTIONS = [
    (("retry",), 2, "--yes"),
    (("purge", "--round", "00" * 32), 2, "--yes"),
    (("import", "x.age"), 2, "--yes"),
    (("export", "--output", "x.age", "--move"), 2, "--yes"),
    (("retry", "--state", "received", "--yes"), 1, "only failed"),
    (("retry", "--state", "gone", "--yes"), 2, "state must be"),
    (("retry", "--due-before", "soon", "--yes"), 2, "due_before"),
    (("retry", "ffffff", "--yes"), 5, "no share matches"),
    (("purge", "--round", "00" * 32, "--yes"), 5, "no data is stored"),
    (("purge", "--round", "xyz", "--yes"), 2, "64 hex"),
    (("purge", "--round", ROUND_ID.hex(), "--yes"), 1, "chain has not closed"),
    (("purge", "--round", ROUND_ID.hex(), "--dry-run"), 1, "chain has not closed"),
    (("audit", "--limit", "0"), 2, "limit"),
    (("export", "--output", "x.age", "--stage", "tree"), 5, "no matching share to export"),
    (("export", "x?", "--output", "x.age"), 2, "a share reference must be"),
    (("import", "none.age", "--yes"), 5, "none.age"),
    (("import", str(DATABASE), "--yes"), 1, "not a backup or export"),
]


def test_refused_action_states_reason_and_changes_nothing(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, message in REFUSED_ACTIONS:
        assert run_command("queue", *arguments) == code, arguments
        output = capsys.readouterr()
        assert message in " ".join(output.err.split())
        assert output.out == ""
    assert read_states(capsys) == {"received": 2, "failed": 2}
    assert run_command("queue", "audit", "--json") == 0
    assert read_json(capsys)["actions"] == []


def test_action_on_terminal_asks_for_confirmation(
    source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    questions: list[str] = []
    for reply, code in ((False, 1), (True, 0)):

        def confirm(text: str, reply: bool = reply, **_: Any) -> bool:
            questions.append(text)
            return reply

        monkeypatch.setattr("typer.confirm", confirm)
        assert run_command("queue", "retry") == code
    assert questions == ["Retry 2 failed shares?"] * 2
    assert "nothing was changed" in capsys.readouterr().err
    assert run_command("queue", "retry") == 0
    assert len(questions) == 2, "nothing failed, so no confirmation is requested"


def test_action_without_helper_and_database_exits_not_found(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("retry", "--yes"), ("export", "--output", "x.age"), ("audit",)):
        assert run_command("queue", *arguments) == 5
        assert "does not exist" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_action_on_locked_file_is_refused(daemon_with_shares: LiveDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    """The command does not know the helper's socket; the file lock excludes it."""
    Path("helper.toml").write_text('[operator]\nsocket = "elsewhere.sock"\n')
    assert run_command("queue", "retry", "--yes") == 1
    assert "another helper has this database open" in capsys.readouterr().err
    assert daemon_with_shares.run(lambda harness: harness.store.count_shares())[ROUND_ID][ShareState.FAILED] == 2


# ---------------------------------------------------------------------- purges


def test_purge_closed_round_deletes_it(
    daemon_with_shares: LiveDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def close(harness: OperationsHarness) -> None:
        harness.rounds.closed.add(ROUND_ID)
        await harness.store.run_batches(rounds.fail_unconfirmed, ROUND_ID, note="closed")
        await harness.store.run(rounds.mark_alerted, ROUND_ID, NOW)

    daemon_with_shares.run(close)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    for options, code in ((["--dry-run"], 0), ([], 1)):
        assert run_command("queue", "purge", "--round", ROUND_ID.hex(), *options) == code
        assert capsys.readouterr().out == "4 failed would be deleted with their round\n"
    assert run_command("queue", "purge", "--round", ROUND_ID.hex().upper(), "--yes", "--json") == 0
    assert read_json(capsys)["failed"] == 4
    assert read_states(capsys) == {}
    assert run_command("queue", "stats") == 0
    assert "2026-11-21\t2\tproof\tno" in capsys.readouterr().out


# ---------------------------------------------------------------------- export and import


@pytest.fixture
def target_machine() -> str:
    """Another machine's database, which knows the round."""

    create_queue_file(Path("there.db"))
    return "there.db"


def test_export_copy_is_importable_and_source_keeps_shares(
    source: str, target_machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("queue", "export", "--output", "x.age", "--json") == 0
    result = read_json(capsys)
    assert (result["shares"], result["copied"], result["source"]) == (4, 4, source)
    assert result["bytes"] == Path("x.age").stat().st_size
    assert stat.S_IMODE(Path("x.age").stat().st_mode) == 0o600
    assert run_command("queue", "export", "--output", "x.age") == 1
    assert "the file exists already" in capsys.readouterr().err

    for number, code in ((4, 0), (0, 3)):
        # with a control socket on which no helper listens
        options = ("--db", f"{Path().absolute()}/{target_machine}", *use_other_machine())
        assert run_command("queue", "import", "x.age", "--yes", "--json", *options) == code
        result = read_json(capsys)
        assert_conforms("queue-import", result)
        assert (result["source"], result["taken"], result["revived"], result["known"]) == (
            "file",
            number,
            0,
            4 - number,
        )
    assert (result["queued"], result["failed"]) == (2, 2)
    assert sorted(entry["reason"] for entry in result["left"]) == ["failed", "failed", "queued", "queued"]
    assert {entry["number"] for entry in result["left"]} == {1, 2, 3, 4}
    assert {entry["round"] for entry in result["left"]} == {ROUND_ID.hex()}
    refs = read_refs(capsys, "--db", target_machine, *use_other_machine())
    assert {entry["ref"] for entry in result["left"]} == refs
    expected = {"received": 2, "failed": 2}
    assert read_states(capsys) == read_states(capsys, "--db", target_machine, *use_other_machine()) == expected

    assert run_command("queue", "import", "x.age", "--yes", *options) == 3
    printed = capsys.readouterr()
    assert "0 shares are imported" in printed.out
    assert "2 not imported: already queued here" in printed.err
    for ref in refs:
        assert f"share {ref} of round {ROUND_ID.hex()[:12]} (number " in printed.err


def use_other_machine() -> tuple[str, str]:
    """Write settings with another control socket path."""
    Path("there.toml").write_text('[operator]\nsocket = "there.sock"\n')
    return "--config", "there.toml"


def test_export_move_idles_shares_until_retried(
    source: str, target_machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("queue", "export", "--output", "x.age", "--move", "--yes") == 0
    assert "4 are no longer processed here" in capsys.readouterr().out
    assert read_states(capsys) == {"failed": 4}
    assert run_command("queue", "export", "--output", "y.age") == 5, "nothing is left to export"
    messages = capsys.readouterr().err
    assert "4 not exported: already moved" in messages
    assert run_command("queue", "import", "x.age", "--db", target_machine, "--yes", *use_other_machine()) == 0
    assert read_states(capsys, "--db", target_machine, *use_other_machine()) == {"received": 2, "failed": 2}

    ref = min(read_refs(capsys))
    for selector in ((), ("--round", ROUND_ID.hex()), ("--state", "failed"), (ref,)):
        assert run_command("queue", "retry", *selector, "--yes") == 1, "the other helper has these shares"
        assert f"{1 if ref in selector else 4} not retried: already moved" in (err := capsys.readouterr().err)
        assert "--stage moved" in err
        assert run_command("queue", "retry", *selector, "--dry-run", "--json") == 1
        result = read_json(capsys)
        assert_conforms("queue-retry", result)
        assert (result["retried"], result["not_failed"]) == (0, 0)
    assert read_states(capsys) == {"failed": 4}
    assert run_command("queue", "retry", "--stage", "moved", "--yes") == 0
    assert read_states(capsys) == {"received": 4}


def test_export_of_shares_that_another_export_moves_meanwhile_leaves_no_file(
    source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def move_first(*_: object, **__: object) -> None:
        monkeypatch.setattr("helper.cli.queue_transfer.confirm_or_exit", confirm_or_exit)
        assert run_command("queue", "export", "--output", "first.age", "--move", "--yes") == 0

    monkeypatch.setattr("helper.cli.queue_transfer.confirm_or_exit", move_first)
    assert run_command("queue", "export", "--output", "x.age", "--move", "--yes") == 5
    assert "4 not exported: already moved" in capsys.readouterr().err
    assert [file.name for file in Path().glob("*.age")] == ["first.age"]
    assert list(Path().glob(".*.partial")) == []


def test_export_of_shared_queue_without_running_helper_is_refused_before_reading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = '[store]\nurl = "postgresql:///x?host=/nowhere"\nkey_file = "store.key"\n'
    Path("helper.toml").write_text(store)
    assert run_command("queue", "export", "--output", "x.age", "--move", "--yes") == 5
    assert "the queue is in a shared database\nRun this on a host with a running helper" in capsys.readouterr().err
    assert not Path("x.age").exists()


def test_refused_export_leaves_no_file(
    daemon_with_shares: LiveDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> dict[str, Any]:
        assert Path("x.age").stat().st_size > 0, "no share may be marked as moved without its file"
        raise PermissionError("the socket may not be used by this user")

    monkeypatch.setattr(OperatorApi, "post", refuse)
    assert run_command("queue", "export", "--output", "x.age") == 4
    assert "may not be used" in capsys.readouterr().err
    assert list(Path().glob("*x.age*")) == []
    assert run_command("queue", "export", "--output", "x.age", "--move", "--yes") == 4
    assert "keep this file" in capsys.readouterr().err
    assert [file.name for file in Path().glob("*x.age*")] == ["x.age"]


def test_import_with_wrong_passphrase_is_refused(
    daemon_with_shares: LiveDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command("queue", "export", "--output", "x.age") == 0
    sealed = Path("x.age").read_bytes()
    assert sealed.startswith(b"age-encryption.org/v1\n-> scrypt ")
    for index in range(4):
        witness = recorded_share(index)
        assert base64.b64encode(witness.primary_blind) not in sealed
        assert ROUND_ID.hex().encode() not in sealed
    assert run_command("queue", "import", "x.age", "--dry-run") == 3, "the file opens; its shares are queued here"
    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", "quite another one")
    assert run_command("queue", "import", "x.age", "--yes") == 4
    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", "short")
    assert run_command("queue", "export", "--output", "y.age") == 2
    assert not Path("y.age").exists()


def test_import_with_unknown_round_exits_degraded(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def make() -> None:
        harness = OperationsHarness(Path("there.db"))
        await harness.store.open()
        await harness.store.close()

    anyio.run(make)
    assert run_command("queue", "export", "--output", "x.age") == 0
    assert run_command("queue", "import", "x.age", "--db", "there.db", "--yes", *use_other_machine()) == 3
    assert "wait until the helper has read the chain" in capsys.readouterr().err
