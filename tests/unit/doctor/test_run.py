"""The doctor as a whole: with nothing, with what is broken, and with what hangs. It always answers, a line each."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helper.clock import SystemClock
from helper.config import find_file
from helper.doctor import run as run_module
from helper.doctor.daemon import (
    Daemon,
    judge_archive,
    judge_daemon,
    judge_failures,
    judge_sender,
    waiting_of,
)
from helper.doctor.result import CheckResult, Level
from helper.doctor.run import examine
from helper.doctor.settings import read_settings
from helper.store.sqlite.store import SqliteStore
from tests.support.process import free_port
from tests.unit.ingest.admission_fixtures import make_round

pytestmark = pytest.mark.anyio

Found = dict[str, CheckResult]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory of its own, and a test process that stays as it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_module, "harden_process", list)
    monkeypatch.setattr("helper.doctor.settings.find_file", lambda explicit, env: find_file(explicit, env, ()))


async def findings(config: str | None = None) -> Found:
    """The findings by subject, without a proof; the chain is at a port where nobody listens."""
    path = None
    if config is not None:
        path = Path("helper.toml")
        path.write_text(config)
        path.chmod(0o600)
    report = await examine(path, {}, SystemClock(), skip_proof=True)
    assert not report.has_hung_checks
    for finding in report.findings:
        assert finding.message
        assert bool(finding.advice) is (finding.level is not Level.OK), finding
    return {finding.subject: finding for finding in report.findings}


def with_node(more: str = "") -> str:
    return f'{more}\n[chain]\nendpoints = ["http://127.0.0.1:{free_port()}"]\n'


async def test_with_nothing_at_all_there_is_a_line_for_each() -> None:
    found = await findings()
    assert found["settings"].level is Level.WARN
    assert found["helper"].level is Level.WARN
    assert found["database"].level is Level.WARN
    assert found["chain"].level is Level.FAIL
    assert found["backlog"].level is Level.OK
    assert found["prover"].message == "not tried (--skip-proof)"


async def test_each_mistake_in_the_settings_is_a_line_and_the_rest_counts(tmp_path: Path) -> None:
    config = with_node(f'[helper]\nprot = 3\nport = "x"\ndb_path = "{tmp_path}/none/queue.db"\napi_token = "weak"')
    report = await examine(_written(config), {"SVOTE_HELPER_LOG_LEVEL": "loud"}, SystemClock(), skip_proof=True)
    settings = [finding for finding in report.findings if finding.subject == "settings"]
    assert {finding.facts["key"] for finding in settings} == {"helper.prot", "helper.port", "log.level"}
    assert all(finding.level is Level.FAIL for finding in settings)
    found = {finding.subject: finding for finding in report.findings}
    assert found["database"].message == f"there is no directory {tmp_path}/none"
    assert found["api_token"].level is Level.WARN
    assert "weak" not in repr([finding for finding in report.findings if finding.subject != "api_token"])


def _written(text: str) -> Path:
    path = Path("helper.toml")
    path.write_text(text)
    return path


async def test_settings_that_cannot_be_read_ask_no_node() -> None:
    found = await findings("[helper\n")
    assert found["settings"].level is Level.FAIL
    assert "helper.toml:1" in found["settings"].message
    assert found["nodes"].level is Level.WARN
    assert not [subject for subject in found if subject.startswith("node ")]
    missing = await examine(Path("gone.toml"), {}, SystemClock(), skip_proof=True)
    assert missing.findings[0].level is Level.FAIL
    assert "gone.toml: cannot be read" in missing.findings[0].message


async def test_a_dead_chain_is_named() -> None:
    found = await findings(with_node())
    (node,) = [finding for subject, finding in found.items() if subject.startswith("node ")]
    assert (node.level, node.message) == (Level.FAIL, "unreachable (ConnectError)")
    assert found["clock"].level is Level.WARN


async def test_a_database_is_told_and_looked_through(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "svote-helper.db")
    await store.open()
    await store.save_rounds([make_round()], SystemClock().now())
    await store.close()
    found = await findings(with_node())
    assert found["database"].message.startswith("svote-helper.db: 0 shares in 1 rounds")
    assert found["integrity"].message == "SQLite finds no damage"
    assert found["file modes"].level is Level.OK


@pytest.mark.parametrize(
    ("ui", "level", "said"),
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
async def test_doctor_with_addresses_for_browser_wallets_judges_them(ui: str, level: Level, said: str) -> None:
    found = (await findings(with_node(f"[ui]\n{ui}\n")))["published addresses"]
    assert found.level is level
    assert said in found.message
    assert "hidden" not in repr(found)


async def test_a_bucket_s_keys_that_lie_open_are_named(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("[default]\n")
    (tmp_path / "keys").chmod(0o644)
    found = await findings(with_node(f'[s3]\ncredentials_file = "{tmp_path / "keys"}"\n'))
    assert found["file modes"].level is Level.WARN
    assert str(tmp_path / "keys") in found["file modes"].message


def _overwrite(text: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(4096)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_overwrite(b"not a database at all"), "not a database"),
        (_overwrite(b"SQLite format 3\0" + bytes(100)), "not a database"),
        (_flip, "damaged"),
    ],
)
async def test_a_damaged_database_is_a_line_and_no_traceback(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "svote-helper.db"
    store = SqliteStore(path)
    await store.open()
    await store.close()
    damage(path)
    report = await examine(_written(with_node()), {}, SystemClock(), skip_proof=True)
    bad = [finding for finding in report.findings if finding.level is Level.FAIL and finding.subject == "database"]
    assert bad, report.findings
    assert any(message in finding.message for finding in bad), bad


async def test_an_empty_file_is_one_that_the_first_start_fills(tmp_path: Path) -> None:
    (tmp_path / "svote-helper.db").touch(0o600)
    assert (await findings(with_node()))["database"].message == "svote-helper.db is empty: the first start fills it"


async def test_what_hangs_is_told_and_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not answer holds up neither the other checks nor the end."""
    released = threading.Event()
    monkeypatch.setattr(run_module, "_FILES", 0.2)
    monkeypatch.setattr("helper.doctor.disk.measure", lambda *_: released.wait())
    try:
        began = time.monotonic()
        report = await examine(_written(with_node()), {}, SystemClock(), skip_proof=True)
        assert time.monotonic() - began < run_module.LONGEST
        assert report.has_hung_checks
        found = {finding.subject: finding for finding in report.findings}
        assert "nothing could be found out within" in found["fsync"].message
        assert found["backlog"].level is Level.OK
    finally:
        released.set()


async def test_a_check_that_fails_itself_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("helper.doctor.tokens.judge_tokens", broken)
    monkeypatch.setattr("helper.doctor.disk.measure", broken)
    report = await examine(_written(with_node()), {}, SystemClock(), skip_proof=True)
    found = {finding.subject: finding for finding in report.findings}
    for subject in ("tokens", "fsync"):
        assert found[subject].level is Level.FAIL
        assert "ZeroDivisionError" in found[subject].message
        assert "secret" not in found[subject].message


async def test_a_daemon_that_listens_and_says_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.doctor.daemon.PATIENCE", 0.3)
    with listening(tmp_path / "helper.sock"):
        report = await examine(_written(with_node()), {}, SystemClock(), skip_proof=True)
    (line,) = [finding for finding in report.findings if finding.subject == "helper"]
    assert (line.level, line.message) == (Level.FAIL, "it listens and does not answer: no response within 0.3 s")
    assert not report.has_hung_checks


async def test_what_is_no_daemon_is_told(tmp_path: Path) -> None:
    with listening(tmp_path / "helper.sock", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"):
        found = await findings(with_node())
    assert "does not answer: /stats: HTTP 200 not what a helper answers" in found["helper"].message


@contextlib.contextmanager
def listening(path: Path, says: bytes = b"") -> Iterator[None]:
    """Somebody on a control socket who says this to the first who asks, or takes the question and says nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(says)

        answering = threading.Thread(target=answer)
        if says:
            answering.start()
        yield
        if says:
            answering.join()


# What the daemon says


def service(**changes: Any) -> Daemon:
    facts = {"checks": [{"name": "chain", "problem": None}], "paused": None, "ready": True, "height": 7}
    return Daemon(True, stats={"service": {**facts, "process": {"pid": 9}, **changes}, "total": {}, "damaged": []})


def test_a_ready_daemon_is_one_line() -> None:
    (line,) = judge_daemon(service(), Path("helper.sock"))
    assert (line.level, line.message) == (Level.OK, "it runs (pid 9), and is ready at height 7")


def test_each_check_that_fails_is_a_line_with_what_to_do() -> None:
    checks = [{"name": name, "problem": f"no {name}"} for name in ("store", "clock", "new one")]
    lines = judge_daemon(service(checks=checks, paused="no store"), Path("helper.sock"))
    assert [line.subject for line in lines] == ["helper: store", "helper: clock", "helper: new one"]
    assert all(line.advice for line in lines)
    (line,) = judge_daemon(service(paused="no node"), Path("helper.sock"))
    assert (line.subject, line.level) == ("helper: dispatch", Level.FAIL)


def test_a_socket_of_somebody_else() -> None:
    (line,) = judge_daemon(Daemon(True, problem="not this user's", forbidden=True), Path("helper.sock"))
    assert line.level is Level.WARN


def test_who_sends_is_a_line_where_there_are_several_hosts_and_that_nobody_does_is_a_warning() -> None:
    assert judge_sender(service()) == judge_sender(Daemon(False)) == []
    (line,) = judge_sender(service(role="prover", sends=False, sender="vote-1", database_skew=0.0))
    assert (line.level, line.message) == (Level.OK, "the host 'vote-1' sends; this one's role is prover")
    (line,) = judge_sender(service(role="sender", sends=True, sender="vote-1", database_skew=0.0))
    assert (line.level, line.message) == (Level.OK, "this host sends (role sender)")
    (line,) = judge_sender(service(role="api", sends=False, sender="", database_skew=0.0))
    assert (line.level, line.message) == (Level.WARN, "no host sends now: what is proven waits")
    assert judge_sender(service(role="api", sends=False, sender=None, database_skew=0.0)) == [], "not asked yet"
    assert judge_sender(service(role="all", sends=False, sender="")) == [], "a file's lease is a check of its own"


def test_how_far_the_archive_is_is_a_line_where_there_is_one() -> None:
    assert judge_archive(service()) == judge_archive(Daemon(False)) == []
    (line,) = judge_archive(service(archive={"through": 0, "behind": None, "problem": None}))
    assert (line.level, line.message) == (Level.OK, "not begun yet")
    (line,) = judge_archive(service(archive={"through": 1099, "behind": 7, "problem": None}))
    assert (line.level, line.message) == (Level.OK, "it has all blocks up to 1099, 7 behind")
    (line,) = judge_archive(service(archive={"through": 1099, "behind": 7, "problem": "the store is away"}))
    assert (line.level, bool(line.advice)) == (Level.WARN, True)
    assert line.message.startswith("the store is away; ")


def test_failed_and_damaged_shares_are_told() -> None:
    assert judge_failures({"failed": 0}, []) == []
    failed, damaged = judge_failures({"failed": 3}, ["a row"])
    assert (failed.level, damaged.level) == (Level.WARN, Level.FAIL)


def test_what_waits_is_taken_from_the_overview() -> None:
    one = {"round_id": "ab", "vote_end_time": 5, "waiting": 3, "proving": 1, "broadcast": 2}
    (waiting,) = waiting_of({"rounds": [{**one, "due_per_minute": [3], "later": 0}]})
    assert (waiting.left, waiting.unconfirmed, waiting.end, waiting.minutes) == (4, 2, 5.0, (3,))
    assert waiting_of({}) == []


def test_settings_that_are_wrong_count_as_not_set(tmp_path: Path) -> None:
    path = _written('[helper]\nport = 70000\nhost = "127.0.0.2"\n[chain]\nrpc = ["http://a:1"]\nendpoints = []\n')
    settings = read_settings(path, {})
    assert (settings.config.helper.port, settings.config.helper.host) == (8090, "127.0.0.2")
    assert settings.config.chain.rpc == ()
    assert settings.readable
    assert tmp_path.samefile(path.resolve().parent)
