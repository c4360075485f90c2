"""`svote-helper conformance`: exit codes, table, JSON and JUnit XML."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.schemas import assert_conforms
from tests.unit.cli.live_daemon import run_server
from tests.unit.cli.test_main import run_command


class Helper(ThreadingHTTPServer):
    """A helper that has only a status; its CORS headers can be changed."""

    origin = "*"
    status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class StatusHandler(BaseHTTPRequestHandler):
    """Responds to every GET with the status."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, Helper)
        body = b'{"status":"ok"}'
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Access-Control-Allow-Origin", self.server.origin)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.send_error(501)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def helper() -> Iterator[Helper]:
    server = Helper(("127.0.0.1", 0), StatusHandler)
    server.daemon_threads = True
    with run_server(server):
        yield server


def test_conformance_passes_and_prints_table_and_json(
    helper: Helper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("conformance", helper.url, "--only", "STATUS-001", "--only", "cors-001", "--only", "DUP-001")
    report = tmp_path / "result.xml"
    assert run_command(*arguments, "--junit", str(report)) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[0] == "check\tlevel\tverdict\twhat\tsource\tseen"
    assert "STATUS-001\tmust\tpassed\tresponds 200\twallet 5.3.0: readiness\tGET status → 200" in output.out
    assert output.err == "2 passed, 0 failed (0 must, 0 should), 1 skipped\n"
    assert [case.get("name") for case in ElementTree.parse(report).iter("testcase")] == [
        "STATUS-001 responds 200",
        "CORS-001 status allows every origin",
        "DUP-001 a repeat is `duplicate`: the same bytes",
    ]
    assert run_command(*arguments, "--json") == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert_conforms("conformance", result)
    assert output.out.count("\n") == 1
    assert [check["verdict"] for check in result["checks"]] == ["passed", "passed", "skipped"]
    assert result["checks"][2]["seen"] == "needs shares (--devnet or --shares)"


def test_conformance_replaces_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "result.xml"
    report.write_text("of another run")
    assert run_command("conformance", "http://127.0.0.1:1", "--junit", str(report)) == 1
    assert capsys.readouterr().err == f"{report} already exists\n"
    assert report.read_text() == "of another run"
    report.unlink()
    assert run_command("conformance", "http://127.0.0.1:1", "--junit", str(report)) == 6
    assert not report.exists()


def test_conformance_failed_must_check_exits_1(helper: Helper, capsys: pytest.CaptureFixture[str]) -> None:
    helper.origin = "https://only.example"
    assert run_command("conformance", helper.url, "--only", "CORS-001") == 1
    output = capsys.readouterr()
    assert "failed\tstatus allows every origin" in output.out
    assert "1 failed (1 must, 0 should)" in output.err


def test_conformance_without_any_check_that_can_run_exits_1(helper: Helper, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("conformance", helper.url, "--only", "DUP") == 1
    assert capsys.readouterr().err.startswith("0 passed, 0 failed (0 must, 0 should), ")


def test_conformance_failed_should_check_exits_0(helper: Helper, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("conformance", helper.url, "--only", "STATUS-008") == 0
    assert "1 failed (0 must, 1 should)" in capsys.readouterr().err


def test_conformance_unreachable_helper_or_chain_exits_6(helper: Helper, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("conformance", "http://127.0.0.1:1", "--only", "STATUS") == 6
    assert "the helper does not respond: GET /shielded-vote/v1/status: ConnectError" in capsys.readouterr().err
    assert run_command("conformance", helper.url, "--devnet", "http://127.0.0.1:1", "--only", "DUP-001") == 6
    assert "the dev chain http://127.0.0.1:1 does not respond" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("helper",), 2, "not a base URL: helper"),
        (("http://127.0.0.1:1", "--only", "NONE-001"), 2, "no such check or topic: NONE-001"),
        (("http://127.0.0.1:1", "--devnet", "http://127.0.0.1:1", "--shares", "x"), 2, "mutually exclusive"),
        (("http://127.0.0.1:1", "--devnet", "localhost:11317"), 2, "not a base URL: localhost:11317"),
        (("http://127.0.0.1:1", "--devnet", "http://[::1"), 2, "not a base URL: Invalid IPv6 URL"),
        (("http://127.0.0.1:1", "--shares", "/nowhere/shares"), 5, "/nowhere/shares does not exist"),
    ],
)
def test_conformance_refused_command_lines(
    arguments: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("conformance", *arguments) == code
    assert message in capsys.readouterr().err


def test_conformance_shows_progress_on_a_terminal(
    helper: Helper, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert run_command("conformance", helper.url, "--only", "STATUS-001") == 0
    assert "1/1" in capsys.readouterr().err
