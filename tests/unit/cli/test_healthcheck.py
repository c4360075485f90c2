"""`healthcheck`: control socket, then the wallet API port; exit codes; few imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import HTTPServer
from pathlib import Path
from socketserver import BaseServer, UnixStreamServer

import pytest

from helper.cli.healthcheck import find_addresses
from helper.observability.service_state import Check, format_checks
from tests.support.process import find_free_port
from tests.support.schemas import assert_conforms
from tests.unit.cli.live_daemon import SilentHandler, run_server
from tests.unit.cli.test_main import run_command

REPO_ROOT = Path(__file__).parents[3]
READY_STATUS = (200, format_checks([Check("store"), Check("chain")]))
DEGRADED_STATUS = (503, format_checks([Check("store"), Check("chain", "no node")]))


@pytest.fixture(autouse=True)
def _unused_port(tmp_path: Path) -> None:
    (tmp_path / "helper.toml").write_text(f"[helper]\nport = {find_free_port()}\n")


class FakeHelperHandler(SilentHandler):
    """Sends the configured response."""

    response = READY_STATUS

    def respond(self) -> None:
        assert self.path == "/readyz?verbose"
        status, text = self.response
        self.send_body(status, text.encode())


@pytest.fixture
def socket_server(tmp_path: Path) -> Iterator[BaseServer]:
    with run_server(UnixStreamServer(str(tmp_path / "helper.sock"), FakeHelperHandler)) as server:
        yield server


@pytest.fixture
def port_server() -> Iterator[HTTPServer]:
    with run_server(HTTPServer(("127.0.0.1", 0), FakeHelperHandler)) as server:
        yield server


@pytest.mark.parametrize(("expected", "code", "status"), [(READY_STATUS, 0, "ready"), (DEGRADED_STATUS, 3, "degraded")])
def test_healthcheck_exit_code_follows_helper_status(
    socket_server: BaseServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    expected: tuple[int, str],
    code: int,
    status: str,
) -> None:
    monkeypatch.setattr(FakeHelperHandler, "response", expected)
    assert run_command("healthcheck") == code
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "" if code == 0 else "chain: no node\nRun `svote-helper doctor`.\n")
    assert run_command("healthcheck", "--json") == code
    result = json.loads(capsys.readouterr().out)
    assert_conforms("healthcheck", result)
    assert (result["status"], result["asked"]) == (status, "helper.sock")
    assert result["checks"][1] == {"name": "chain", "problem": None if code == 0 else "no node", "note": None}


def test_healthcheck_without_socket_uses_api_port(port_server: HTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    port = port_server.server_port
    assert run_command("healthcheck", "--url", f"http://127.0.0.1:{port}/") == 0
    Path("helper.toml").write_text(f'[helper]\nhost = "0.0.0.0"\nport = {port}\n')
    assert run_command("healthcheck", "--json") == 0
    assert json.loads(capsys.readouterr().out)["asked"] == f"http://127.0.0.1:{port}"


def test_healthcheck_with_unix_socket_uses_it_instead_of_port(
    port_server: HTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wallets.sock"
    Path("helper.toml").write_text(f'[helper]\nport = {port_server.server_port}\n[server]\nunix_socket = "{path}"\n')
    assert run_command("healthcheck") == 6
    assert f"no helper is listening on {path}" in capsys.readouterr().err
    with run_server(UnixStreamServer(str(path), FakeHelperHandler)):
        assert run_command("healthcheck", "--json") == 0
        assert json.loads(capsys.readouterr().out)["asked"] == str(path)
        assert run_command("healthcheck", "--url", f"unix:{path}") == 0


def test_healthcheck_without_helper_is_unreachable(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("healthcheck") == 6
    assert "no helper is listening on helper.sock" in capsys.readouterr().err
    assert run_command("healthcheck", "--json") == 6
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert (result["status"], result["checks"], len(result["problems"])) == ("unreachable", [], 2)
    assert output.err == ""
    for url in ("nonsense", "https://127.0.0.1:1", "http://"):
        assert run_command("healthcheck", "--url", url) == 6


def test_healthcheck_of_other_server_is_unreachable(socket_server: BaseServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeHelperHandler, "response", (200, "<html>"))
    assert run_command("healthcheck") == 6


def test_healthcheck_with_missing_settings_asks_no_other_helper(
    socket_server: BaseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("healthcheck", "--config", "missing.toml") == 6
    assert capsys.readouterr().err.startswith("missing.toml cannot be read: ")
    Path("bad.toml").write_text("[helper\n")
    assert run_command("healthcheck", "--config", "bad.toml") == 6
    assert capsys.readouterr().err.startswith("bad.toml cannot be read: ")


@pytest.mark.skipif(os.geteuid() != 0, reason="creates a file of another user")
def test_healthcheck_with_settings_of_another_user_asks_no_other_helper(
    socket_server: BaseServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o1777)
    os.chown("helper.toml", 65534, -1)
    assert run_command("healthcheck", "--json") == 6
    assert "belongs to user 65534" in json.loads(capsys.readouterr().out)["problems"][0]
    assert run_command("healthcheck", "--url", "unix:helper.sock") == 0, "it needs no settings"


def test_healthcheck_of_slow_response_ends_in_time(
    socket_server: BaseServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()

    def respond_slowly(handler: SilentHandler) -> None:
        with suppress(BrokenPipeError):
            while not ended.wait(0.05):
                handler.wfile.write(b"H")

    monkeypatch.setattr(FakeHelperHandler, "respond", respond_slowly)
    assert run_command("healthcheck", "--url", "unix:helper.sock", "--timeout", "0.2") == 6
    ended.set()
    assert capsys.readouterr().err == "unix:helper.sock: no response within 0.2 s\nRun `svote-helper doctor`.\n"


def test_healthcheck_imports_no_heavy_modules(tmp_path: Path) -> None:
    (tmp_path / "helper.toml").touch()
    code = (
        "import sys\n"
        "from helper.cli.main import main\n"
        f"try: main(['healthcheck', '--config', '{tmp_path}/helper.toml'])\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = ('httpx', 'helper.config.loader', 'uvicorn', 'starlette', 'proofs', 'structlog', 'asyncio', 'rich')\n"
        "print(code, [name for name in heavy if name in sys.modules])"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO_ROOT)
    assert completed.stdout == "6 []\n"


def test_healthcheck_needs_no_config_validation(tmp_path: Path) -> None:
    path = tmp_path / "helper.toml"
    path.write_text('[helper]\ndb_path = "/srv/queue.db"\nport = "x"\nnonsense = 1\n')
    assert find_addresses(path, {"SVOTE_HELPER_HELPER_HOST": "::1"}) == ("/srv/helper.sock", "http://[::1]:8090")
    path.unlink()
    assert find_addresses(None, {}) == ("helper.sock", "http://127.0.0.1:8090")
    assert find_addresses(None, {"SVOTE_HELPER_OPERATOR_SOCKET": "/run/x.sock"})[0] == "/run/x.sock"
