"""Terminals of any width, pipes and shell completion, with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio
import orjson
import pytest

from helper.cli.conventions import emit_json, encode_json_line
from helper.store import rounds
from tests.support.process import TIMEOUT_SECONDS
from tests.support.terminal import run_in_terminal
from tests.unit.ingest.admission_fixtures import ROUND_ID
from tests.unit.operations.action_fixtures import NOW, OperationsHarness
from tests.unit.store.fixtures import enqueue, make_posted_share

SHARE_COUNT = 2000
REF = re.compile(r"[0-9a-f]{12}")
COLOR_ESCAPE = re.compile(rb"\x1b\[[0-9;]*[34][0-7](;[0-9;]*)?m")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with many failed shares."""
    path = tmp_path_factory.mktemp("queue") / "svote-helper.db"

    async def make() -> None:
        harness = OperationsHarness(path)
        await harness.open()
        shares = [make_posted_share(number, round_id=ROUND_ID) for number in range(SHARE_COUNT)]
        await asyncio.gather(*(enqueue(harness.store, posted, now=NOW) for posted in shares))
        await harness.store.run_batches(rounds.fail_unconfirmed, ROUND_ID, note="the node did not answer")
        await harness.store.close()

    anyio.run(make)
    return path


def run_shell(script: str, directory: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a bash script in which `svote-helper` is that of this source tree."""
    command = directory / "bin" / "svote-helper"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m helper "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    clean: Mapping[str, str] = {key: value for key, value in os.environ.items() if not key.startswith("SVOTE_HELPER_")}
    return subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=directory,
        env={**clean, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(Path.cwd()), **env},
        capture_output=True,
        text=True,
        timeout=5 * TIMEOUT_SECONDS,
        check=False,
    )


async def test_narrow_terminal_prints_one_value_per_line(database: Path) -> None:
    options = ("--db", str(database), "--limit", "2")
    async with run_in_terminal("queue", "list", "--state", "failed", *options, columns=40, lines=60) as narrow:
        assert await narrow.wait_for_exit() == 0
    lines = narrow.lines
    assert "failed: 2000" in lines
    assert "reason: the node did not answer" in lines
    assert sum(line.startswith("share: ") and bool(REF.search(line)) for line in lines) == 2
    assert lines.count("state: failed") == 2
    assert not any(line.endswith("…") for line in lines), "nothing is cut off"


async def test_wide_terminal_prints_table(database: Path) -> None:
    options = ("--db", str(database), "--limit", "2")
    async with run_in_terminal("queue", "list", *options, columns=140, lines=40) as wide:
        assert await wide.wait_for_exit() == 0
    assert "┃ share " in wide.text
    assert len(REF.findall(wide.text)) >= 2


async def test_no_color_disables_escapes(database: Path) -> None:
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        async with run_in_terminal("queue", "stats", "--db", str(database), columns=100, lines=40, env=env) as plain:
            assert await plain.wait_for_exit() == 0
        assert "2000" in plain.text
        assert COLOR_ESCAPE.search(plain.raw) is None


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
async def test_watch_restores_the_screen_after_a_signal(database: Path, signal_number: int) -> None:
    async with run_in_terminal("queue", "watch", "--db", str(database)) as screen:
        await screen.wait_for_text("shows its state", lambda text: "no helper is running" in text)
        assert await screen.interrupt(signal_number) == 0
    assert screen.raw.rstrip().endswith(b"\x1b[?25h\x1b[?1049l"), "the cursor and the screen are restored"


def test_pipe_gets_plain_lines_and_may_close_early(database: Path, tmp_path: Path) -> None:
    completed = run_shell(
        f"svote-helper queue list --db {database} --limit {SHARE_COUNT} | head -1; echo ${{PIPESTATUS[1]}} >&2;"
        f" svote-helper queue list --db {database} --limit {SHARE_COUNT} --json | head -c 10 >/dev/null;"
        f" svote-helper queue list --db {database} --limit {SHARE_COUNT} | :",
        tmp_path,
        FORCE_COLOR="1",
    )
    assert completed.stdout == "share\tround\tstate\tsubmit at (UTC)\tdue (UTC)\tattempts\tstage\tnote\n"
    assert "Traceback" not in completed.stderr
    assert "BrokenPipe" not in completed.stderr
    assert "\x1b" not in completed.stdout + completed.stderr


def test_bash_completion_completes_words(tmp_path: Path) -> None:
    offered = {
        "svote-helper que": {"queue"},
        "svote-helper queue re": {"retry"},
        "svote-helper queue ex": {"export"},
        "svote-helper proof ''": {"export", "verify"},
        "svote-helper queue list --sta": {"--state", "--stage"},
        "svote-helper queue list --state ''": {"waiting", "proving", "sent", "failed"},
    }
    script = ["source <(svote-helper completion bash)", "complete -p svote-helper >/dev/null"]
    for line in offered:
        script += [f"COMP_WORDS=({line})", "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))"]
        script += ["_svote_helper_completion svote-helper", 'echo "${COMPREPLY[*]}"']
    completed = run_shell(" && ".join(script), tmp_path)
    assert [set(line.split()) for line in completed.stdout.splitlines()] == list(offered.values())
    assert completed.stderr == ""


def test_other_shells_have_completion_scripts(tmp_path: Path) -> None:
    for shell_name, marker in (("zsh", "#compdef svote-helper"), ("fish", "complete --command svote-helper")):
        completed = run_shell(f"svote-helper completion {shell_name}", tmp_path)
        assert marker in completed.stdout
        assert "_SVOTE_HELPER_COMPLETE" in completed.stdout
    assert run_shell("svote-helper completion csh", tmp_path).returncode == 2
    environment = {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": "svote-helper qu"}
    completed = run_shell("svote-helper", tmp_path, _SVOTE_HELPER_COMPLETE="complete_fish", **environment)
    assert completed.stdout == "queue\tInspect and manage queued shares.\n"


def test_json_line_escapes_control_characters_and_round_trips(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"note": "\x00\x1b[2J\x7f\x9b2J\u2028é𝄞", "count": 3}
    line = encode_json_line(value)
    assert orjson.loads(line) == value
    assert line.isascii()
    assert line.removesuffix("\n").isprintable()

    emit_json({"path": "/tmp/\udcff\x9b", "é": 1.5})
    assert json.loads(capsys.readouterr().out) == {"path": "/tmp/\udcff\x9b", "é": 1.5}
