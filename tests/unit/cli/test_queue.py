"""`queue list`, `show` and `stats`: told by the daemon where one answers, else read from the file, alike."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import anyio
import pytest

from helper.cli.output import emit_table
from helper.core.share import ShareState
from helper.errors import StoreCorrupt
from helper.server import views
from helper.store.rows import Enqueued
from helper.store.sqlite.store import SqliteStore
from tests.support.service_state import partial_state
from tests.unit.cli.test_main import run
from tests.unit.ingest.admission_fixtures import END, ROUND_ID, FakeClock, body, make_round, parse_share, payload
from tests.unit.server.test_operator_routes import STORY, make_entry


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory of its own: the default paths are in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SVOTE_HELPER_CONFIG", raising=False)


def last_json(capsys: pytest.CaptureFixture[str]) -> Any:
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


class Daemon:
    """What listens on the control socket: answers by path, and what was asked."""

    def __init__(self, path: Path) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[str] = []
        daemon = self

        class Handler(BaseHTTPRequestHandler):
            def address_string(self) -> str:
                return "control socket"

            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                daemon.asked.append(self.path)
                status, answer = daemon.answers[self.path.partition("?")[0]]
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        self.server = socketserver.UnixStreamServer(str(path), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    def answer(self, path: str, value: Any, status: int = 200) -> None:
        self.answers[path] = (status, value if isinstance(value, bytes) else json.dumps(value).encode())


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    serving = Daemon(tmp_path / "helper.sock")
    serving.thread.start()
    yield serving
    serving.server.shutdown()
    serving.thread.join()
    serving.server.server_close()


LIST = views.list_json([make_entry(), make_entry(ref="ba9876543210", submit_at=0, damaged=True)], source="daemon")
SHOWN = views.story_json(STORY, source="daemon")
STATS = views.stats_json(
    {ROUND_ID: {ShareState.RECEIVED: 3}},
    [],
    source="daemon",
    service=partial_state(paused=None, provers={"pids": [7, 8]}),
)


def test_a_list_is_the_daemons(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("/queue", LIST)
    assert run("queue", "list", "--state", "failed", "--limit", "5", "--json") == 0
    assert last_json(capsys) == LIST
    assert daemon.asked == ["/queue?state=failed&limit=5"]


def test_a_story_is_the_daemons(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("/queue/012345", SHOWN)
    assert run("queue", "show", "012345", "--json") == 0
    assert last_json(capsys) == SHOWN


def test_stats_are_the_daemons(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("/stats", STATS)
    assert run("queue", "stats", "--json") == 0
    assert last_json(capsys) == STATS


def test_in_a_pipe_there_are_plain_lines(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    for path, value in (("/queue", LIST), ("/queue/012345", SHOWN), ("/stats", STATS)):
        daemon.answer(path, value)
    assert run("queue", "list") == 0
    told = capsys.readouterr()
    lines = [line.split("\t") for line in told.out.splitlines()]
    assert lines[0][0] == "share"
    assert lines[1][:3] == ["0123456789ab", ROUND_ID.hex()[:12], "broadcast"]
    assert lines[2][2:4] == ["broadcast (damaged)", "immediately"]
    assert told.err == "2 shares, from the daemon\n"
    assert run("queue", "show", "012345") == 0
    shown = capsys.readouterr().out
    assert "transaction hash\t" + "AB" * 32 in shown
    assert "timed out\tspent" in shown
    assert run("queue", "stats") == 0
    stats = capsys.readouterr().out
    assert f"{ROUND_ID.hex()[:12]}\t3\t0\t0\t0\t0\t3" in stats
    assert "provers.pids\t7, 8" in stats


@pytest.mark.parametrize(
    ("status", "answer", "code"),
    [
        (404, views.list_json([], source="daemon"), 5),
        (400, {"status": "error", "error": "state must be one of"}, 2),
        (500, {"status": "error", "error": "internal error"}, 1),
        (200, b"<html>", 1),
        (200, b"[]", 1),
    ],
)
def test_what_the_daemon_refuses_is_an_exit_code(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], status: int, answer: Any, code: int
) -> None:
    daemon.answer("/queue", answer, status)
    assert run("queue", "list", "--json") == code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err


def test_without_daemon_and_database_nothing_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("queue", "list") == 5
    assert "database svote-helper.db does not exist" in capsys.readouterr().err
    assert not Path("svote-helper.db").exists()


@pytest.mark.parametrize("ref", ["../stats", "abc def", "ab?x=1", ""])
def test_a_name_that_is_none_is_a_usage_error(ref: str) -> None:
    assert run("queue", "show", ref) == 2


async def _fill(path: Path, count: int) -> None:
    store = SqliteStore(path)
    await store.open()
    now = FakeClock().now()
    await store.save_rounds([make_round()], now)
    for index in range(count):
        share = parse_share(body(submit_at=END - 60, enc_share={**payload()["enc_share"], "share_index": index}))
        assert await store.enqueue(share, bytes([index]) * 32, now=now) is Enqueued.QUEUED
    await store.close()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A database with three waiting shares and no daemon."""
    path = tmp_path / "svote-helper.db"
    anyio.run(_fill, path, 3)
    return path


def test_without_a_daemon_the_file_is_read(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("queue", "list", "--json") == 0
    listed = last_json(capsys)
    assert listed["source"] == "file"
    assert len(listed["shares"]) == 3
    assert listed["shares"][0].keys() == LIST["shares"][0].keys()
    assert {share["state"] for share in listed["shares"]} == {"received"}
    assert run("queue", "list", "--db", str(database), "--state", "failed", "--json") == 0
    assert last_json(capsys)["shares"] == []
    assert run("queue", "show", listed["shares"][0]["ref"][:6], "--json") == 0
    story = last_json(capsys)
    assert story.keys() == SHOWN.keys()
    assert (story["submit_at"], story["vote_end_time"], story["transaction"]) == (END - 60, END, None)
    assert run("queue", "stats", "--json") == 0
    stats = last_json(capsys)
    assert stats["total"]["received"] == 3
    assert stats.keys() == STATS.keys() - {"service"}


def test_a_socket_that_a_crash_left_behind_is_not_a_daemon(
    database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Daemon(tmp_path / "helper.sock").server.server_close()
    assert run("queue", "list", "--json") == 0
    assert last_json(capsys)["source"] == "file"


def test_a_daemon_that_does_not_answer_is_unreachable(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("helper.cli.operator_api.QUERY_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "helper.sock"))
        listener.listen()
        assert run("queue", "list", "--json") == 6
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("the daemon on helper.sock does not answer: no response within 0.1 s\n")


def test_what_the_file_does_not_hold_is_not_found(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("queue", "show", "ffffff") == 5
    assert run("queue", "list", "--state", "gone") == 2
    assert "state must be one of received" in capsys.readouterr().err


def test_damage_that_a_query_finds_in_the_file_has_its_message(
    database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with database.open("r+b") as file:  # the first page, with the schema, stays
        file.seek(4096)
        file.write(bytes(database.stat().st_size - 4096))
    assert run("queue", "stats", "--json") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("the database is damaged: ")
    assert StoreCorrupt.advice in captured.err


def test_a_read_only_file_in_a_read_only_directory_is_read(
    database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database.chmod(0o400)
    tmp_path.chmod(0o500)
    try:
        assert run("queue", "stats", "--json") == 0
        assert last_json(capsys)["total"]["received"] == 3
    finally:
        tmp_path.chmod(0o700)


def test_a_cell_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    emit_table(("a", "b"), [("\x1b[2J\n", None)])
    assert capsys.readouterr().out == "a\tb\n [2J \t-\n"


def test_a_table_on_a_terminal_without_colour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    emit_table(("share", "note"), [("abc", "[red]x[/red]")])
    told = capsys.readouterr().out
    assert "[red]x[/red]" in told
    assert "\t" not in told
    assert "\x1b[3" not in told
