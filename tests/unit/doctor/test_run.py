"""All checks together: without dependencies, with defects, and with hanging calls. A report is always returned."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import orjson
import pytest

from helper.chain.round_registry import to_stored_round
from helper.clock import SystemClock
from helper.core.share import ShareState
from helper.doctor import CheckResult, Level
from helper.doctor import run as run_module
from helper.doctor.database import read_database
from helper.doctor.run import Doctor
from helper.doctor.running_helper import (
    DaemonReport,
    evaluate_archive,
    evaluate_daemon,
    evaluate_failures,
    evaluate_sender,
    query_daemon,
)
from helper.observability.queue_snapshot import (
    DamagedRow,
    HelperSnapshot,
    QueueSnapshot,
    RoundSnapshot,
    ShareCounts,
)
from helper.observability.service_state import ServiceState
from helper.runtime.process_security import get_process_limits
from helper.store import shares
from helper.store.models import FailedShares, RetryingShares
from helper.store.rounds import save_rounds
from helper.store.sqlite.store import SqliteStore
from tests.support.process import find_free_port
from tests.support.service_state import partial_state, snapshot_of
from tests.unit.cli.test_permissions import deny_status
from tests.unit.ingest.admission_fixtures import ROUND_ID, make_round
from tests.unit.store.fixtures import enqueue, make_posted_share

pytestmark = pytest.mark.anyio

Results = dict[str, CheckResult]


@pytest.fixture(autouse=True)
def _working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a temporary working directory, and do not harden the test process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_module, "harden_process", list)
    monkeypatch.setattr("helper.config.settings_file.DEFAULT_FILES", ())


async def run_checks(config: str | None = None) -> Results:
    """Results by subject, without the self-test proof; the node's port is closed."""
    path = None
    if config is not None:
        path = Path("helper.toml")
        path.write_text(config)
        path.chmod(0o600)
    checks = Doctor(path, {}, SystemClock(), skip_proof=True)
    findings = await checks.run_all()
    assert not checks.has_hung_checks
    for finding in findings:
        assert finding.message
        assert bool(finding.advice) is (finding.level is not Level.OK), finding
    return {finding.subject: finding for finding in findings}


def config_with_node(more: str = "") -> str:
    return f'{more}\n[chain]\nendpoints = ["http://127.0.0.1:{find_free_port()}"]\n'


async def test_examine_without_anything_reports_each_subject() -> None:
    results = await run_checks()
    assert results["settings"].level is Level.WARN
    assert results["helper"].level is Level.WARN
    assert results["database"].level is Level.WARN
    assert results["chain"].level is Level.FAIL
    assert "no node is configured" in results["chain"].message
    assert results["backlog"].level is Level.OK
    assert results["prover"].message == "skipped (--skip-proof)"


async def test_examine_reports_each_invalid_setting_and_uses_valid_ones(tmp_path: Path) -> None:
    config = config_with_node(
        f'[helper]\nprot = 3\nport = "x"\ndb_path = "{tmp_path}/none/queue.db"\napi_token = "weak"'
    )
    findings = await Doctor(
        write_config(config), {"SVOTE_HELPER_LOG_LEVEL": "loud"}, SystemClock(), skip_proof=True
    ).run_all()
    settings = [finding for finding in findings if finding.subject == "settings"]
    assert {finding.facts["key"] for finding in settings} == {"helper.prot", "helper.port", "log.level"}
    assert all(finding.level is Level.FAIL for finding in settings)
    results = {finding.subject: finding for finding in findings}
    assert results["database"].message == f"directory {tmp_path}/none does not exist"
    assert results["api_token"].level is Level.WARN
    assert "weak" not in repr([finding for finding in findings if finding.subject != "api_token"])


def write_config(text: str) -> Path:
    path = Path("helper.toml")
    path.write_text(text)
    return path


async def test_examine_with_unreadable_settings_queries_no_node() -> None:
    results = await run_checks("[helper\n")
    assert results["settings"].level is Level.FAIL
    assert "helper.toml:1" in results["settings"].message
    assert results["nodes"].level is Level.WARN
    assert not [subject for subject in results if subject.startswith("node ")]
    missing = await Doctor(Path("gone.toml"), {}, SystemClock(), skip_proof=True).run_all()
    assert missing[0].level is Level.FAIL
    assert "gone.toml: cannot be read" in missing[0].message


async def test_examine_without_permission_to_read_the_settings_says_who_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError(13, "Permission denied")))
    monkeypatch.setattr("os.access", lambda *_: False)
    result = (await run_checks("[helper]\n"))["settings"]
    assert (result.level, "such as root" in result.advice) == (Level.FAIL, True)
    assert "does not start" not in result.advice, "systemd passes it the settings"


async def test_examine_reports_unreachable_node() -> None:
    results = await run_checks(config_with_node())
    (node,) = [finding for subject, finding in results.items() if subject.startswith("node ")]
    assert (node.level, node.message) == (Level.FAIL, "unreachable (ConnectError)")
    assert results["clock"].level is Level.WARN


async def test_examine_reads_and_checks_database(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "svote-helper.db")
    await store.open()
    await store.run(save_rounds, [to_stored_round(make_round())], SystemClock().now())
    await store.close()
    results = await run_checks(config_with_node())
    assert results["database"].message.startswith("svote-helper.db: 0 shares in 1 rounds")
    assert "db_path is relative (svote-helper.db)" in results["settings"].message
    assert results["integrity"].message == "SQLite finds no damage"
    assert results["file modes"].level is Level.OK


@pytest.mark.parametrize(
    ("ui", "level", "message"),
    [
        ("", Level.OK, "no credentials"),
        ("enable = true", Level.WARN, "browser wallets cannot add the chain"),
        ('chain_rest = "https://user:hidden@node.example.org"', Level.WARN, "[ui] chain_rest contains credentials"),
        ('chain_rpc = "https://node.example.org/?key=hidden"', Level.WARN, "[ui] chain_rpc contains credentials"),
        (
            'enable = true\nchain_rest = "https://node.example.org/v1"\nchain_rpc = "https://rpc.example.org"',
            Level.OK,
            "no credentials",
        ),
    ],
)
async def test_examine_evaluates_published_addresses(ui: str, level: Level, message: str) -> None:
    results = (await run_checks(config_with_node(f"[ui]\n{ui}\n")))["published addresses"]
    assert results.level is level
    assert message in results.message
    assert "hidden" not in repr(results)


async def test_examine_checks_voting_config_only_if_configured() -> None:
    setting = f'config_url = "http://127.0.0.1:{find_free_port()}/hidden?key=hidden"'
    results = await run_checks(config_with_node(f"[admin]\n{setting}\n"))
    assert results["voting config"].message == "cannot be fetched: fetch failed: ConnectError"
    assert "hidden" not in repr(results)
    for admin in ("", f"disable = true\n{setting}"):
        assert "voting config" not in await run_checks(config_with_node(f"[admin]\n{admin}\n"))


async def test_examine_checks_public_url_only_if_configured() -> None:
    url = f"http://127.0.0.1:{find_free_port()}"
    assert "public URL" not in await run_checks(config_with_node())
    result = (await run_checks(config_with_node(f'[admin]\npublic_url = "{url}"')))["public URL"]
    assert (result.level, result.message) == (Level.FAIL, f"{url}: no response (All connection attempts failed)")


async def test_examine_reports_readable_credentials_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("[default]\n")
    (tmp_path / "keys").chmod(0o644)
    results = await run_checks(config_with_node(f'[s3]\ncredentials_file = "{tmp_path / "keys"}"\n'))
    assert results["file modes"].level is Level.WARN
    assert str(tmp_path / "keys") in results["file modes"].message


def overwrite_bytes(text: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(4096)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (overwrite_bytes(b"not a database at all"), "not a database"),
        (overwrite_bytes(b"SQLite format 3\0" + bytes(100)), "not a database"),
        (flip_bit, "damaged"),
    ],
)
async def test_examine_with_damaged_database_reports_it(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "svote-helper.db"
    store = SqliteStore(path)
    await store.open()
    await store.close()
    damage(path)
    findings = await Doctor(write_config(config_with_node()), {}, SystemClock(), skip_proof=True).run_all()
    bad = [finding for finding in findings if finding.level is Level.FAIL and finding.subject == "database"]
    assert bad, findings
    assert any(message in finding.message for finding in bad), bad


async def test_examine_says_what_shares_in_retry_backoff_wait_for(tmp_path: Path) -> None:
    clock = SystemClock()
    now = clock.now()
    store = SqliteStore(tmp_path / "svote-helper.db", clock=clock)
    await store.open()
    await store.run(save_rounds, [to_stored_round(replace(make_round(), vote_end_time=int(now) + 3600))], now)
    await enqueue(store, make_posted_share(1, round_id=ROUND_ID), now=now)
    (queued,) = await store.run(shares.claim_due, now=now + 1, limit=1, rounds=[ROUND_ID])
    await store.run(shares.retry, queued.id, due_ms=int(now + 3590) * 1000, stage="proof", note="no memory for a proof")
    await store.close()

    results = await run_checks(config_with_node())

    backlog = results[f"round {ROUND_ID.hex()[:8]}"]
    assert backlog.level is Level.OK
    assert "; 1 of them waiting for a retry, the next in " in backlog.message
    assert backlog.message.endswith(" (after proof: no memory for a proof)")
    assert "failed shares" not in results


async def test_examine_reports_failed_shares_of_shared_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = DaemonReport(True, queue=QueueSnapshot(at=1.0, total=ShareCounts(failed=3)))
    monkeypatch.setattr("helper.doctor.running_helper.query_daemon", lambda _, **__: daemon)
    monkeypatch.setattr("helper.doctor.database.connect_shared_database", lambda _: None)
    results = await run_checks(config_with_node('[store]\nurl = "postgresql://db.example/votes"'))
    assert results["failed shares"].message == "3 shares failed"


async def test_read_file_without_permission_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "svote-helper.db"
    path.write_bytes(b"SQLite format 3\0")
    monkeypatch.setattr("helper.doctor.database.os.access", lambda _path, _mode: False)
    finding, _ = await read_database(path, "", now=0.0)
    assert (finding.level, finding.message) == (Level.WARN, f"no permission to read {path}")
    monkeypatch.undo()
    monkeypatch.setattr(Path, "stat", deny_status)
    results = await run_checks(config_with_node('[helper]\ndb_path = "hidden/q.db"'))
    finding = results["database"]
    assert (finding.level, finding.message) == (Level.WARN, "no permission to read hidden/q.db")
    assert "backlog" not in results, "it is not known"


async def test_examine_with_empty_database_file_is_ok(tmp_path: Path) -> None:
    (tmp_path / "svote-helper.db").touch(0o600)
    assert (await run_checks(config_with_node()))[
        "database"
    ].message == "svote-helper.db is empty: the first start creates the schema"


@pytest.mark.parametrize(
    ("more", "subject", "message"),
    [
        (
            'rpc = ["http://127.0.0.1:1", "http://127.0.0.1:1"]',
            "nodes",
            "a node is listed twice: [chain] rpc, 127.0.0.1:1",
        ),
        ('[store]\nkey_file = "none"', "database", "none cannot be read: No such file or directory"),
        ('[prover]\nrequire_verified = true\nrelease_manifest = "none"\nallowed_signers = "none"', "release", "none"),
    ],
)
async def test_examine_reports_what_the_start_refuses(more: str, subject: str, message: str) -> None:
    result = (await run_checks(f'[chain]\nendpoints = ["http://127.0.0.1:1", "http://127.0.0.1:2"]\n{more}'))[subject]
    assert result.level is Level.FAIL
    assert message in result.message
    assert "internal error" not in result.message


async def test_examine_with_hanging_check_reports_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging disk blocks neither the other checks nor the report."""
    released = threading.Event()
    monkeypatch.setattr(run_module, "_FILES_SECONDS", 0.2)
    monkeypatch.setattr("helper.doctor.database.measure_fsync", lambda *_: released.wait())
    try:
        checks = Doctor(write_config(config_with_node()), {}, SystemClock(), skip_proof=True)
        results = {finding.subject: finding for finding in await checks.run_all()}
        assert checks.has_hung_checks
        assert "check timed out after" in results["fsync"].message
        assert results["backlog"].level is Level.OK
    finally:
        released.set()


async def test_examine_with_exception_in_check_reports_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("helper.doctor.publication.evaluate_tokens", broken)
    monkeypatch.setattr("helper.doctor.database.measure_fsync", broken)
    findings = await Doctor(write_config(config_with_node()), {}, SystemClock(), skip_proof=True).run_all()
    results = {finding.subject: finding for finding in findings}
    for subject in ("tokens", "fsync"):
        assert results[subject].level is Level.FAIL
        assert "ZeroDivisionError" in results[subject].message
        assert "secret" not in results[subject].message


async def test_examine_with_unresponsive_helper_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.doctor.running_helper.TIMEOUT_SECONDS", 0.3)
    with run_fake_helper(tmp_path / "helper.sock"):
        checks = Doctor(write_config(config_with_node()), {}, SystemClock(), skip_proof=True)
        findings = await checks.run_all()
    (line,) = [finding for finding in findings if finding.subject == "helper"]
    assert (line.level, line.message) == (
        Level.FAIL,
        "it accepts connections but does not respond: no response within 0.3 s",
    )
    assert not checks.has_hung_checks


async def test_examine_with_unexpected_response_of_helper_fails(tmp_path: Path) -> None:
    with run_fake_helper(tmp_path / "helper.sock", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"):
        results = await run_checks(config_with_node())
    assert "does not respond: /snapshot: HTTP 200 unexpected response" in results["helper"].message


@contextlib.contextmanager
def run_fake_helper(path: Path, response: bytes = b"") -> Iterator[None]:
    """Listen on a control socket; send `response` to the first client, or never respond."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def respond() -> None:
            with listener.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(response)

        responder = threading.Thread(target=respond)
        if response:
            responder.start()
        yield
        if response:
            responder.join()


# Assessment of the helper's state


def service_status(**changes: Any) -> DaemonReport:
    process = {"pid": 9, "core_bytes": 0, "dumpable": False, "open_files": []}
    checks = [{"name": "chain", "problem": None}]
    facts = {"checks": checks, "paused": None, "ready": True, "height": 7, "process": process}
    return DaemonReport(True, service=partial_state(**{**facts, **changes}))


def test_evaluate_daemon_ready_helper_is_one_result() -> None:
    (line,) = evaluate_daemon(service_status())
    assert (line.level, line.message) == (Level.OK, "running (pid 9), ready at height 7")


def test_evaluate_daemon_failed_health_checks_have_advice() -> None:
    checks = [{"name": name, "problem": f"no {name}"} for name in ("store", "clock", "new one")]
    lines = evaluate_daemon(service_status(checks=checks, paused="no store"))
    assert [line.subject for line in lines] == ["helper: store", "helper: clock", "helper: new one"]
    assert all(line.advice for line in lines)
    noted = [{"name": "store", "note": "the database was damaged: see the log"}]
    (line,) = evaluate_daemon(service_status(checks=noted))
    assert (line.subject, line.level) == ("helper: store", Level.WARN)
    assert "restart the helper" in str(line.advice)
    unread = service_status(checks=[{"name": "blocks", "note": "7 older blocks"}], unread_blocks=7)
    (line,) = evaluate_daemon(unread)
    assert (line.subject, line.level, line.message) == ("helper: blocks", Level.WARN, "7 older blocks")
    no_prover = [{"name": "provers", "problem": "no prover is ready"}]
    for deaths, is_memory_suspected in (({}, False), ({"died": 1}, True)):
        status = service_status(checks=no_prover, provers={"deaths": deaths})
        (line,) = evaluate_daemon(status)
        assert ("out-of-memory" in str(line.advice)) is is_memory_suspected
    (line,) = evaluate_daemon(service_status(paused="no node"))
    assert (line.subject, line.level) == ("helper: dispatch", Level.FAIL)


@pytest.mark.parametrize(
    ("problem", "advice"),
    [
        ("the queue cannot be written", "Free space"),
        ("the database file is no longer at its path", "Move the helper's own file back"),
        ("the database's write-ahead log is no longer at its path", "Move the helper's own file back"),
    ],
)
def test_advice_about_the_store_matches_the_failure(problem: str, advice: str) -> None:
    status = service_status(checks=[{"name": "store", "problem": problem}])
    (line,) = evaluate_daemon(status)
    assert str(line.advice).startswith(advice)


def test_query_daemon_without_permission_is_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.doctor.running_helper.request_control_socket", Mock(side_effect=PermissionError))
    (line,) = evaluate_daemon(query_daemon(Path("helper.sock")))
    assert line.level is Level.WARN


def test_evaluate_sender_names_sender_and_warns_without_one() -> None:
    assert evaluate_sender(service_status()) == evaluate_sender(DaemonReport(False)) == []
    (line,) = evaluate_sender(service_status(role="prover", sends=False, sender="vote-1", database_skew=0.0))
    assert (line.level, line.message) == (
        Level.OK,
        "host 'vote-1' holds the sender lease; the role of this host is prover",
    )
    (line,) = evaluate_sender(service_status(role="sender", sends=True, sender="vote-1", database_skew=0.0))
    assert (line.level, line.message) == (Level.OK, "this host holds the sender lease (role sender)")
    (line,) = evaluate_sender(service_status(role="api", sends=False, sender="", database_skew=0.0))
    assert (line.level, line.message) == (Level.WARN, "no host holds the sender lease: proven shares are waiting")
    assert evaluate_sender(service_status(role="api", sends=False, sender=None, database_skew=0.0)) == [], (
        "not queried yet"
    )
    assert evaluate_sender(service_status(role="all", sends=False, sender="")) == [], (
        "the lease of a file has its own check"
    )


def test_evaluate_archive_reports_progress_if_configured() -> None:
    assert evaluate_archive(service_status()) == evaluate_archive(DaemonReport(False)) == []
    (line,) = evaluate_archive(service_status(archive={"through": 0, "behind": None, "problem": None}))
    assert (line.level, line.message) == (Level.OK, "not started yet")
    (line,) = evaluate_archive(service_status(archive={"through": 1099, "behind": 7, "problem": None}))
    assert (line.level, line.message) == (Level.OK, "complete up to block 1099, 7 behind")
    (line,) = evaluate_archive(service_status(archive={"through": 1099, "behind": 7, "problem": "the store is away"}))
    assert (line.level, bool(line.advice)) == (Level.WARN, True)
    assert line.message.startswith("the store is away; ")


def test_evaluate_failures_reports_failed_and_damaged_shares() -> None:
    assert evaluate_failures(QueueSnapshot(at=10.0)) == []
    counts = ShareCounts(failed=2)
    rounds = [
        RoundSnapshot(round_id="aa", status=1, vote_end_time=9, counts=counts),
        RoundSnapshot(round_id="bb", status=2, vote_end_time=99, counts=counts),
        RoundSnapshot(round_id="cc", status=1, vote_end_time=99, counts=counts),
        RoundSnapshot(round_id="dd", counts=counts),
    ]
    damaged_row = DamagedRow("ab", "cc", "failed")
    queue = QueueSnapshot(at=10.0, total=ShareCounts(failed=8), rounds=rounds, damaged=[damaged_row])
    failed, lost, damaged = evaluate_failures(queue)
    assert (failed.level, lost.level, damaged.level) == (Level.WARN, Level.WARN, Level.FAIL)
    assert failed.message == "4 shares failed"
    assert lost.message == "4 shares failed in rounds that have ended, and can no longer count"
    assert "queue retry" in str(failed.advice)
    assert "queue retry" not in str(lost.advice), "it would refuse them"


def respond_with(response: object, monkeypatch: pytest.MonkeyPatch, status: int = 200) -> DaemonReport:
    """Query a helper that sends this response."""
    body = json.dumps(response).encode()
    monkeypatch.setattr("helper.doctor.running_helper.request_control_socket", lambda *_, **__: (status, body))
    return query_daemon(Path("helper.sock"))


def test_query_daemon_of_another_version_uses_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"service": {"ready": True, "new": {}}, "queue": {"at": 5, "total": {"failed": 2}, "new": []}}
    queue = QueueSnapshot(at=5, total=ShareCounts(failed=2))
    assert respond_with(known, monkeypatch) == DaemonReport(True, service=ServiceState(ready=True), queue=queue)
    assert respond_with({}, monkeypatch) == DaemonReport(True)


async def test_query_daemon_reads_every_value_that_a_helper_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    service = replace(
        partial_state(height=7, archive={"through": 9}, endpoints=[{"name": "a:80"}]), process=get_process_limits()
    )
    queue = replace(
        await snapshot_of(
            [make_round()], {ROUND_ID: {ShareState.WAITING: 2}}, {}, [FailedShares("proof", "x", 1, 0.005)]
        ),
        retries=[RetryingShares(ROUND_ID.hex(), "proof", "no memory", 1, 3, 5.5)],
        damaged=[DamagedRow("ab", "cc", "9")],
    )
    served = orjson.dumps(HelperSnapshot(service=service, queue=queue))
    daemon = respond_with(json.loads(served), monkeypatch)
    assert orjson.dumps(HelperSnapshot(service=daemon.service, queue=daemon.queue)) == served


@pytest.mark.parametrize("response", [{"queue": {}}, {"queue": {"at": 1, "total": []}}, {"service": [1]}])
def test_query_daemon_with_unexpected_json_reports_a_problem(
    response: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = respond_with(response, monkeypatch)
    assert daemon.is_running
    assert ": unexpected response: " in evaluate_daemon(daemon)[0].message


def test_query_daemon_reports_error_of_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = respond_with({"status": "error", "error": "the disk is away"}, monkeypatch, status=503)
    assert evaluate_daemon(daemon)[0].message.endswith(": /snapshot: HTTP 503 the disk is away")


def test_helper_without_snapshot_is_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = respond_with({"status": "error", "error": "not found"}, monkeypatch, status=404)
    (result,) = evaluate_daemon(daemon)
    assert (result.level, result.advice) == (Level.WARN, "Restart it.")
    assert result.message.endswith("the running helper has another version than this command")


def test_read_settings_replaces_invalid_values_by_defaults(tmp_path: Path) -> None:
    path = write_config('[helper]\nport = 70000\nhost = "127.0.0.2"\n[chain]\nrpc = ["http://a:1"]\nendpoints = []\n')
    doctor = Doctor(path, {}, SystemClock())
    assert (doctor.config.helper.port, doctor.config.helper.host) == (8090, "127.0.0.2")
    assert doctor.config.chain.rpc == ()
    assert doctor.are_settings_readable
    assert tmp_path.samefile(path.resolve().parent)
