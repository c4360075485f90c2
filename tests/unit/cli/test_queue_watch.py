"""`queue watch`: a screen for terminals, lines for pipes, JSON lines with `--json`."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from rich.console import Console
from rich.text import Text

from helper.cli.operator_api import OperatorApi
from helper.cli.queue_watch import (
    PIPE_COLUMNS,
    Screen,
    bar_chart,
    parse_state,
    pipe_cells,
    stream_states,
)
from helper.config.sections import Config, HelperSection
from helper.server.control_client import (
    DaemonNotRunningError,
    DaemonUnresponsiveError,
    request_control_socket,
    stream_control_socket,
)
from tests.unit.cli.live_daemon import SilentHandler, run_server
from tests.unit.cli.test_main import run_command

NOW = 1_795_268_000
ROUND: dict[str, Any] = {
    "round_id": "3fa2c9d1" + "0" * 56,
    "vote_end_time": NOW + 51 * 60,
    "status": 1,
    "waiting": 412,
    "proving": 2,
    "broadcast": 3,
    "confirmed": 1020,
    "failed": 0,
    "due_per_minute": [1, 0, 8, *[2] * 57],
    "later": 120,
    "seconds_needed": 2280.0,
    "outlook": "enough",
}
STATE: dict[str, Any] = {
    "at": NOW + 0.5,
    "height": 1234,
    "circuit": "k10",
    "ready": True,
    "paused": None,
    "rounds": [ROUND],
    "lateness_ms": {"start": {"p50": 12.0, "p99": 40.0}, "broadcast": {"p50": None, "p99": 25_000.0}},
    "provers": {"slots": 2, "busy": 3, "seconds_per_proof": 0.184},
    "endpoints": [
        {"name": "a.example:1317", "fresh": True, "reason": None},
        {"name": "b.example:1317", "fresh": False, "reason": "newest block is 120 s old\x1b[2J"},
    ],
    "failures": [{"at": NOW - 10.0, "stage": "proof", "reason": "timed\nout", "count": 3}],
}


def changed_state(**changes: Any) -> dict[str, Any]:
    return {**STATE, **changes}


def to_plain_text(lines: Iterable[Text]) -> str:
    return "\n".join(line.plain for line in lines)


def create_screen(state: dict[str, Any] | None, lost_reason: str | None = None) -> Screen:
    return Screen(None if state is None else parse_state(state), lost_reason)


def render(state: dict[str, Any] | None, width: int = 80, lost_reason: str | None = None) -> str:
    return to_plain_text(create_screen(state, lost_reason).lines(width))


def test_render_wide_screen_has_one_line_per_round() -> None:
    lines = render(STATE).splitlines()
    assert lines[0].startswith("ready  height 1234  circuit k10  2026-11-21")
    text = "\n".join(lines[1:7])
    assert "3 in progress, 2 concurrent, 0.18 s per proof" in text
    assert "proof start  median 12 ms, p99 40 ms" in text
    assert "proof sent   median -, p99 25 s" in text
    assert "a.example:1317 ok" in text
    assert "b.example:1317 newest block is 120 s old [2J" in text, "no output moves the cursor"
    assert "13:33:10 proof timed out (3)" in text
    assert lines[7] == ""
    assert " ".join(lines[8].split()) == "round status ends in waiting proving sent conf. failed needed"
    assert " ".join(lines[9].split()) == "3fa2c9d1 active 51 min 412 2 3 1020 0 38 min"
    assert lines[10].startswith("  due     ▁ █▂▂")
    assert lines[11].strip() == "now to 60 min, at most 8 in 1 min; 120 later"


def test_render_narrow_screen_has_a_sentence_per_round() -> None:
    lines = render(STATE, 40).splitlines()
    assert lines[-3:] == [
        "3fa2c9d1 active, 51 min: 412 waiting, 2 proving, 3 sent, 1020 conf., 0 failed, 38 min needed",
        lines[-2],
        " " * 10 + "now to 60 min, at most 9 in 3 min; 120 later",
    ]
    assert len(lines[-2]) <= 40


@pytest.mark.parametrize("width", [20, 40, 72, 80, 200])
@pytest.mark.parametrize("height", [3, 10, 50])
def test_render_never_exceeds_terminal_size(width: int, height: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, no_color=True, legacy_windows=False)
    state = changed_state(rounds=[ROUND] * 7, paused="a reason that is longer than any terminal is wide " * 5)
    console.print(create_screen(state, "not reachable. " * 20))
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert len(lines) < height
    assert all(len(strip_escapes(line)) <= width for line in lines)
    if height == 10:
        assert "more lines" in lines[-1] or width == 20


def strip_escapes(line: str) -> str:
    return "".join(
        itertools.chain.from_iterable(
            part.partition("m")[2:] if number else [part] for number, part in enumerate(line.split("\x1b["))
        )
    )


def test_render_shows_pause_reason_first() -> None:
    assert render(changed_state(paused="no chain node is in sync")).splitlines()[:2] == [
        "paused  height 1234  circuit k10  2026-11-21 13:33:20 UTC",
        "no chain node is in sync",
    ]
    assert render(changed_state(ready=False)).startswith("starting")
    lost = render(STATE, lost_reason="no response on helper.sock").splitlines()
    assert lost[:2] == ["helper not reachable; retrying", "no response on helper.sock"]
    assert lost[2].startswith("was ready")
    assert render(None, lost_reason="x").splitlines()[1:] == ["x"]


def test_render_shows_rounds_with_open_shares_first() -> None:
    quiet = {"waiting": 0, "proving": 0, "broadcast": 0, "due_per_minute": [0] * 60, "later": 0, "status": 3}
    old = [
        {**ROUND, **quiet, "round_id": f"{number:064x}", "vote_end_time": NOW - 3600 * number, "failed": number == 9}
        for number in range(1, 10)
    ]
    later = {**ROUND, "round_id": "ee" * 32, "vote_end_time": NOW + 90 * 60}
    lines = render(changed_state(rounds=[later, *old, ROUND])).splitlines()
    assert [line.split()[0] for line in lines[9:16:3]] == ["3fa2c9d1", "eeeeeeee", "00000000"], "the next end is first"
    assert lines[15].split()[7] == "1", "rounds with failures come before rounds without"
    assert [line.split()[2] for line in lines[15:]] == ["ended"] * 9


@pytest.mark.parametrize(
    ("changed", "color"),
    [({}, None), ({"outlook": "tight"}, "33"), ({"outlook": "short"}, "31"), ({"failed": 1}, "31")],
)
def test_render_colors_rounds_by_outlook(changed: dict[str, Any], color: str | None) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, height=30, force_terminal=True, color_system="standard")
    console.print(create_screen(changed_state(rounds=[{**ROUND, **changed}])))
    (line,) = [line for line in out.getvalue().splitlines() if "3fa2c9d1" in line and "active" in line]
    assert (f"\x1b[{color}m" in line) if color else ("\x1b[3" not in line)


def test_render_omits_closed_rounds_without_shares() -> None:
    empty = {**ROUND, **dict.fromkeys(("waiting", "proving", "broadcast", "confirmed", "failed", "later"), 0)}
    over = {**empty, "status": 3, "due_per_minute": [0] * 60}
    assert "no open rounds" in render(changed_state(rounds=[over]))
    tallied = {**over, "confirmed": 5, "seconds_needed": None, "vote_end_time": NOW - 5}
    assert "finalized    ended" in render(changed_state(rounds=[tallied]))
    assert "1 failed" in render(changed_state(rounds=[{**over, "failed": 1}]), 40)


@pytest.mark.parametrize(
    ("values", "text"), [([], ""), ([0, 0], "  "), ([1, 100, 50], "▁█▄"), ([3], "█"), ([1, 8], "▁█")]
)
def test_render_progress_bars(values: list[int], text: str) -> None:
    assert bar_chart(values) == text
    assert bar_chart(values, ascii_only=True).isascii()


def test_render_state_as_cells() -> None:
    cells = dict(zip(PIPE_COLUMNS, pipe_cells(parse_state(STATE)), strict=True))
    assert cells["status"] == "ready"
    assert (cells["waiting"], cells["confirmed"], cells["usable nodes"]) == (412, 1020, "1/2")
    assert dict(zip(PIPE_COLUMNS, pipe_cells(parse_state(changed_state(paused="why"))), strict=True))["paused"] == "why"


# The event stream

HELPER = OperatorApi(Config())


class FakeFeed:
    """A control socket that streams these states and then ends."""

    def __init__(self, path: Path) -> None:
        self.states: list[dict[str, Any]] = []
        self.status = 200
        feed = self

        class Handler(SilentHandler):
            def respond(self) -> None:
                self.send_response(feed.status)
                self.end_headers()
                for number, state in enumerate(feed.states):
                    self.wfile.write(
                        b": ping\n\nid: run-%d\nevent: state\ndata: %b\n\n" % (number, orjson.dumps(state))
                    )

        self.server = ThreadingUnixStreamServer(str(path), Handler)


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[FakeFeed]:
    serving = FakeFeed(tmp_path / "helper.sock")
    with run_server(serving.server):
        yield serving


class ExpectedOutputError(Exception):
    """Raised once the test has seen the expected output."""


def stop_watch(_seconds: float) -> None:
    raise ExpectedOutputError


def replace_sleep(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]) -> None:
    """Replace the sleep between two connection attempts."""
    monkeypatch.setattr("helper.cli.queue_watch.time", SimpleNamespace(sleep=sleep))


def test_watch_yields_states_and_end_of_stream(feed: FakeFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    feed.states = [STATE, changed_state(height=1235)]
    replace_sleep(monkeypatch, stop_watch)
    stream = stream_states(HELPER)
    assert list(itertools.islice(stream, 3)) == [
        {"event": "state", "state": STATE},
        {"event": "state", "state": changed_state(height=1235)},
        {"event": "gone", "reason": "the helper ended the stream"},
    ]
    with pytest.raises(ExpectedOutputError):
        next(stream)


def test_watch_reconnects_repeatedly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    replace_sleep(monkeypatch, slept.append)
    stream = stream_states(OperatorApi(Config(helper=HelperSection(db_path=str(tmp_path / "queue.db")))))
    lost = {"event": "gone", "reason": f"no helper is listening on {tmp_path}/helper.sock"}
    assert list(itertools.islice(stream, 3)) == [lost] * 3
    assert len(slept) == 2


def test_watch_of_named_database_ignores_helper_on_another(
    feed: FakeFeed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_sleep(monkeypatch, raise_interrupt)
    feed.states = [STATE]
    assert run_command("queue", "watch", "--db", "other.db", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"event": "gone", "reason": "no helper is running on other.db"}


def test_watch_treats_invalid_response_as_lost(feed: FakeFeed) -> None:
    feed.status = 503
    assert next(stream_states(HELPER)) == {"event": "gone", "reason": "HTTP 503"}
    with pytest.raises(DaemonNotRunningError):
        request_control_socket(Path("no.sock"), "/")
    with pytest.raises(DaemonUnresponsiveError, match="HTTP 503"):
        next(stream_control_socket(Path("helper.sock"), "/events"))


def test_watch_json_prints_one_object_per_line(
    feed: FakeFeed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_sleep(monkeypatch, raise_interrupt)
    feed.states = [STATE, changed_state(at=NOW + 1.5), changed_state(at=NOW + 2.5, height=1235)]
    assert run_command("queue", "watch", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["state", "state", "gone"]
    assert [event["state"]["height"] for event in events[:2]] == [1234, 1235]
    assert events[2] == {"event": "gone", "reason": "the helper ended the stream"}


def raise_interrupt(_seconds: float) -> None:
    raise KeyboardInterrupt


def test_watch_in_pipe_prints_one_line_per_change(
    feed: FakeFeed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_sleep(monkeypatch, raise_interrupt)
    feed.states = [STATE, STATE, changed_state(paused="x")]
    assert run_command("queue", "watch") == 0
    output = capsys.readouterr()
    lines = [line.split("\t") for line in output.out.splitlines()]
    assert lines[0] == list(PIPE_COLUMNS)
    assert [line[1] for line in lines[1:]] == ["ready", "paused"]
    assert output.err == "the helper ended the stream\n"


def test_watch_of_helper_of_other_version_says_so(feed: FakeFeed, capsys: pytest.CaptureFixture[str]) -> None:
    feed.states = [{name: value for name, value in STATE.items() if name != "provers"}]
    assert run_command("queue", "watch") == 1
    assert "another version than this command: `provers`" in capsys.readouterr().err


def test_watch_ends_silently_when_reader_closes_pipe(feed: FakeFeed, tmp_path: Path) -> None:
    feed.states = [changed_state(height=number) for number in range(5000)]
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "helper", "queue", "watch", "--json"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("SVOTE_HELPER_")}
    env["SVOTE_HELPER_HELPER_DB_PATH"] = str(tmp_path / "queue.db")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b'{"event":"state"')
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""
