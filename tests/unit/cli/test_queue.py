"""`queue list`, `show` and `stats`: same output from a running helper and from the file."""

from __future__ import annotations

import json
import socket
import socketserver
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helper.cli.terminal import emit_table
from helper.core.json_records import to_json
from helper.errors import StoreCorrupt
from helper.observability.queue_snapshot import QueueSnapshot, RoundSnapshot, ShareCounts, stats_json
from helper.server.operator_json import ShareList, describe_share
from tests.support.service_state import partial_state
from tests.unit.cli.live_daemon import SilentHandler, run_server
from tests.unit.cli.test_main import read_json, run_command
from tests.unit.ingest.admission_fixtures import END, ROUND_ID
from tests.unit.server.test_operator_routes import STORY, make_entry


class FakeDaemon:
    """Listens on the control socket: responses by path; records the requests."""

    def __init__(self, path: Path) -> None:
        self.responses: dict[str, tuple[int, bytes]] = {}
        self.requests: list[str] = []
        daemon = self

        class Handler(SilentHandler):
            def respond(self) -> None:
                daemon.requests.append(self.path)
                self.send_body(*daemon.responses[self.path.partition("?")[0]])

        self.server = socketserver.UnixStreamServer(str(path), Handler)

    def set_response(self, path: str, value: Any, status: int = 200) -> None:
        self.responses[path] = (status, value if isinstance(value, bytes) else json.dumps(value).encode())


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    serving = FakeDaemon(tmp_path / "helper.sock")
    with run_server(serving.server):
        yield serving


ENTRIES = [make_entry(), make_entry(ref="ba9876543210", submit_at=0, damaged=True)]
LIST_RESPONSE = to_json(ShareList(source="daemon", shares=ENTRIES))
SHOW_RESPONSE = to_json(describe_share(STORY, source="daemon"))
COUNTS = ShareCounts(total=3, received=3)
STATS_RESPONSE = stats_json(
    QueueSnapshot(at=0.0, total=COUNTS, rounds=[RoundSnapshot(round_id=ROUND_ID.hex(), counts=COUNTS)]),
    source="daemon",
    service=partial_state(provers={"pids": [7, 8]}),
)


@pytest.mark.parametrize(
    ("arguments", "request_path", "response"),
    [
        (("list", "--state", "failed", "--limit", "5"), "/queue?state=failed&limit=5", LIST_RESPONSE),
        (("show", "012345"), "/queue/012345", SHOW_RESPONSE),
        (("stats",), "/stats", STATS_RESPONSE),
    ],
)
def test_queue_command_prints_response_of_helper(
    daemon: FakeDaemon,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    request_path: str,
    response: dict[str, Any],
) -> None:
    daemon.set_response(request_path.partition("?")[0], response)
    assert run_command("queue", *arguments, "--json") == 0
    assert read_json(capsys) == json.loads(json.dumps(response)), "the JSON is printed as it is"
    assert daemon.requests == [request_path]


def test_queue_list_in_pipe_prints_plain_lines(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    for path, value in (("/queue", LIST_RESPONSE), ("/queue/012345", SHOW_RESPONSE), ("/stats", STATS_RESPONSE)):
        daemon.set_response(path, value)
    assert run_command("queue", "list") == 0
    output = capsys.readouterr()
    lines = [line.split("\t") for line in output.out.splitlines()]
    assert lines[0][0] == "share"
    assert lines[1][:3] == ["0123456789ab", ROUND_ID.hex()[:12], "sent"]
    assert lines[2][2:4] == ["sent (damaged)", "immediately"]
    assert output.err == "2 shares, from the daemon\n"
    assert run_command("queue", "show", "012345") == 0
    shown = capsys.readouterr().out
    assert "transaction hash\t" + "AB" * 32 in shown
    assert "timed out\tspent" in shown
    assert run_command("queue", "stats") == 0
    stats = capsys.readouterr().out
    assert f"{ROUND_ID.hex()[:12]}\t3\t0\t0\t0\t0\t3" in stats
    assert "provers pids\t7, 8" in stats


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (404, to_json(ShareList(source="daemon", shares=[])), 5),
        (400, {"status": "error", "error": "state must be one of"}, 2),
        (500, {"status": "error", "error": "internal error"}, 1),
        (200, b"<html>", 1),
        (200, b"[]", 1),
    ],
)
def test_queue_refused_by_helper_sets_exit_code(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], status: int, body: Any, code: int
) -> None:
    daemon.set_response("/queue", body, status)
    assert run_command("queue", "list", "--json") == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err


@pytest.mark.parametrize(("body", "field"), [({}, "shares"), ({**LIST_RESPONSE, "shares": [{}]}, "ref")])
def test_queue_response_of_other_version_is_reported(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], body: dict[str, Any], field: str
) -> None:
    daemon.set_response("/queue", body)
    assert run_command("queue", "list") == 1
    assert f"another version than this command: its response has no `{field}`" in capsys.readouterr().err


def test_queue_without_helper_and_database_exits_not_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("queue", "list") == 5
    assert "database svote-helper.db does not exist" in capsys.readouterr().err
    assert not Path("svote-helper.db").exists()


def test_queue_list_says_that_there_can_be_more(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("queue", "list", "--limit", "2") == 0
    assert capsys.readouterr().err == "the first 2 shares (--limit), from the file\n"
    assert run_command("queue", "list", "--limit", "4") == 0
    assert capsys.readouterr().err == "3 shares, from the file\n"
    assert database
    assert run_command("queue", "list", "--limit", "1".zfill(5000)) == 2


@pytest.mark.parametrize("ref", ["../stats", "abc def", "ab?x=1", ""])
def test_queue_show_invalid_name_exits_usage(ref: str) -> None:
    assert run_command("queue", "show", ref) == 2


def test_queue_without_helper_reads_file(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("queue", "list", "--json") == 0
    listed = read_json(capsys)
    assert listed["source"] == "file"
    assert len(listed["shares"]) == 3
    assert listed["shares"][0].keys() == LIST_RESPONSE["shares"][0].keys()
    assert {share["state"] for share in listed["shares"]} == {"received"}
    assert run_command("queue", "list", "--db", str(database), "--state", "failed", "--json") == 0
    assert read_json(capsys)["shares"] == []
    assert run_command("queue", "show", listed["shares"][0]["ref"][:6], "--json") == 0
    details = read_json(capsys)
    assert details.keys() == SHOW_RESPONSE.keys()
    assert (details["submit_at"], details["vote_end_time"], details["transaction"]) == (END - 60, END, None)
    assert run_command("queue", "stats", "--json") == 0
    stats = read_json(capsys)
    assert stats["total"]["received"] == 3
    assert stats.keys() == STATS_RESPONSE.keys() - {"service"}


def test_queue_with_stale_socket_reads_file(database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FakeDaemon(tmp_path / "helper.sock").server.server_close()
    assert run_command("queue", "list", "--json") == 0
    assert read_json(capsys)["source"] == "file"


def test_queue_with_unresponsive_helper_is_unreachable(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("helper.cli.operator_api.QUERY_SECONDS", 0.1)
    monkeypatch.setattr("helper.cli.operator_api.ACTION_SECONDS", 0.2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "helper.sock"))
        listener.listen()
        for command in (("list", "--json"), ("retry", "--yes")):
            assert run_command("queue", *command) == 6
            captured = capsys.readouterr()
            assert captured.out == ""
            assert captured.err.startswith("the helper on helper.sock does not respond: no response within 0.1 s\n")


def test_queue_show_unknown_share_exits_not_found(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("queue", "show", "ffffff") == 5
    assert run_command("queue", "list", "--state", "gone") == 2
    assert "state must be one of waiting" in capsys.readouterr().err


def test_queue_damage_found_by_query_is_reported(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with database.open("r+b") as file:  # keep the first page, which has the schema
        file.seek(4096)
        file.write(bytes(database.stat().st_size - 4096))
    assert run_command("queue", "stats", "--json") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("the database is damaged: ")
    assert StoreCorrupt.advice in captured.err


def test_queue_read_only_file_in_read_only_directory_is_read(
    database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database.chmod(0o400)
    tmp_path.chmod(0o500)
    try:
        assert run_command("queue", "stats", "--json") == 0
        assert read_json(capsys)["total"]["received"] == 3
    finally:
        tmp_path.chmod(0o700)


def test_table_cells_have_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    emit_table(("a", "b"), [("\x1b[2J\n", None)])
    assert capsys.readouterr().out == "a\tb\n [2J \t-\n"


def test_table_on_terminal_with_no_color_has_no_escapes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    emit_table(("share", "note"), [("abc", "[red]x[/red]")])
    output = capsys.readouterr().out
    assert "[red]x[/red]" in output
    assert "\t" not in output
    assert "\x1b[3" not in output
