"""`svote-helper queue watch`: live view of the queue, as a screen, lines or JSON.

Follows the stream of queue states from the service, and reconnects whenever it is interrupted.
"""

from __future__ import annotations

import json as jsonlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from helper.chain.chain_data import RoundStatus
from helper.cli.conventions import (
    ConfigOption,
    DbOption,
    ExitCode,
    QueueOptions,
    discard_output,
    encode_json_line,
    fail,
    format_one_line,
    print_message,
)
from helper.cli.operator_api import OperatorApi, other_version
from helper.core.json_records import first_error
from helper.core.text_forms import format_duration, format_time
from helper.observability.queue_snapshot import Overview, RoundOverview, enum_name
from helper.server.control_client import DaemonNotRunningError, DaemonUnresponsiveError, stream_control_socket

_OVERVIEW: Final = TypeAdapter(Overview)

MIN_WIDE_COLUMNS: Final = 72
"""Minimum terminal width for one table row per round."""
COUNT_KEYS: Final = ("waiting", "proving", "broadcast", "confirmed", "failed")
_COUNT_HEADINGS: Final = ("waiting", "proving", "sent", "conf.", "failed")
_BLOCK_SYMBOLS: Final = " ▁▂▃▄▅▆▇█"
_ASCII_SYMBOLS: Final = " .:-=+*#@"
_LABEL_WIDTH: Final = 10
_ENDING_SOON_SECONDS: Final = 600
"""Seconds before its end from which a round is highlighted."""


def parse_state(state: Mapping[str, Any]) -> Overview:
    """Parse the data of an event `state`.

    Raises:
        HelperError: the service has another version.
    """
    try:
        return _OVERVIEW.validate_python(state)
    except ValidationError as error:
        field, _ = first_error(error)
        raise other_version(f"`{field}` in its state is missing or not valid") from None


@dataclass(frozen=True, slots=True)
class Screen:
    """The current screen; rich renders it again whenever the terminal's size changes.

    Attributes:
        state: the latest state, None before the first.
        lost_reason: why the stream is interrupted, None while it is not.
    """

    state: Overview | None
    lost_reason: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines that fit on the terminal. Rounds are last, those without open shares after the others."""
        ascii_only = not (console.encoding or "").lower().startswith("utf")
        width, room = options.max_width, (options.height or console.height) - 1
        lines = [part for line in self.lines(width, ascii_only=ascii_only) for part in line.wrap(console, width)]
        if len(lines) > room > 1:
            more = Text(f"({len(lines) - room + 1} more lines: make the window taller)", "dim")
            more.truncate(width)
            lines = [*lines[: room - 1], more]
        yield from lines

    def lines(self, width: int, *, ascii_only: bool = False) -> Iterator[Text]:
        """Yield the lines. The terminal wraps those that are longer than this width."""
        if self.lost_reason is not None:
            yield Text("helper not reachable; retrying", "bold red")
            yield Text(format_one_line(self.lost_reason), "red")
        if self.state is not None:
            yield from _header_lines(self.state, stale=self.lost_reason is not None)
            yield from _service_lines(self.state)
            yield from _failure_lines(self.state)
            yield from _round_lines(self.state, width, ascii_only=ascii_only)


def _header_lines(state: Overview, *, stale: bool) -> Iterator[Text]:
    status = _status(state)
    style = {"paused": "bold red", "ready": "bold green", "starting": "bold yellow"}[status]
    rest = f"  height {format_one_line(state.height)}  circuit {state.circuit}  {format_time(int(state.at))} UTC"
    yield Text.assemble((f"{'was ' if stale else ''}{status}", "dim" if stale else style), rest)
    if state.paused:
        yield Text(format_one_line(state.paused), "red")


def _status(state: Overview) -> str:
    return "paused" if state.paused else "ready" if state.ready else "starting"


# ---------------------------------------------------------------- the service


def _service_lines(state: Overview) -> Iterator[Text]:
    provers, late = state.provers, state.lateness_ms
    each = provers.seconds_per_proof
    speed = "" if each is None else f", {each:.2f} s per proof"
    yield _labelled_line("provers", f"{provers.busy} in progress, {provers.slots} concurrent{speed}")
    for label, times, text in (("lateness", late.start, "start"), ("", late.broadcast, "sent")):
        p50, p99 = _milliseconds(times.p50), _milliseconds(times.p99)
        yield _labelled_line(label, f"proof {text:<6} median {p50}, p99 {p99}")
    for number, node in enumerate(state.endpoints):
        label = "nodes" if number == 0 else ""
        yield _labelled_line(label, f"{node.name} {'ok' if node.fresh else node.reason}", "" if node.fresh else "red")


def _failure_lines(state: Overview) -> Iterator[Text]:
    for number, failure in enumerate(state.failures):
        when = format_time(int(failure.at))[11:]
        text = f"{when} {failure.stage} {failure.reason} ({failure.count})"
        yield _labelled_line("failed" if number == 0 else "", text, "red")


def _labelled_line(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label:<{_LABEL_WIDTH}}", "dim"), (format_one_line(text), style))


# ---------------------------------------------------------------- rounds


def _round_lines(state: Overview, width: int, *, ascii_only: bool) -> Iterator[Text]:
    yield Text("")
    rounds = [row for row in state.rounds if row.status in (1, 4) or any(_counts(row))]
    if not rounds:
        yield Text("no open rounds, no shares", "dim")
        return
    is_wide = width >= MIN_WIDE_COLUMNS
    if is_wide:
        yield Text(_format_row("round", "status", "ends in", _COUNT_HEADINGS, "needed"), "bold")
    for row in sorted(rounds, key=_sort_key):
        yield _number_line(row, state.at, is_wide=is_wide)
        yield from _due_chart_lines(row, width, ascii_only=ascii_only)


def _counts(row: RoundOverview) -> tuple[int, ...]:
    """Return the counts of `COUNT_KEYS`."""
    return tuple(getattr(row, name) for name in COUNT_KEYS)


def _is_open(row: RoundOverview) -> bool:
    return bool(row.waiting or row.proving or row.broadcast)


def _sort_key(row: RoundOverview) -> tuple[bool, bool, int]:
    """Sort key: rounds with open shares by end, then rounds with failures, then the others, latest first."""
    end, is_idle = int(row.vote_end_time), not _is_open(row)
    return (is_idle, is_idle and not row.failed, -end if is_idle else end)


def _number_line(row: RoundOverview, now: float, *, is_wide: bool) -> Text:
    left = row.vote_end_time - now
    needed = row.seconds_needed if row.waiting or row.proving else None
    numbers = [str(number) for number in _counts(row)]
    status, ends = enum_name(RoundStatus, row.status), format_duration(left)
    if is_wide:
        text = _format_row(row.round_id[:8], status, ends, numbers, format_duration(needed))
    else:
        counts = ", ".join(f"{number} {name}" for name, number in zip(_COUNT_HEADINGS, numbers, strict=True))
        text = f"{row.round_id[:8]} {status}, {ends}: {counts}, {format_duration(needed)} needed"
    return Text(text, _urgency_style(row, left))


def _format_row(name: str, status: str, ends: str, numbers: Sequence[str], needed: str) -> str:
    return f"{name:<9} {status:<9} {ends:>8} " + "".join(f"{number:>8}" for number in numbers) + f" {needed:>8}"


def _urgency_style(row: RoundOverview, left: float) -> str:
    if row.failed or row.outlook == "short":
        return "red"
    return "yellow" if row.outlook == "tight" or (_is_open(row) and left < _ENDING_SOON_SECONDS) else ""


def _due_chart_lines(row: RoundOverview, width: int, *, ascii_only: bool) -> Iterator[Text]:
    """Yield a bar chart of due shares, one bar per minute. A bar covers more minutes on a narrow terminal."""
    minutes, later = row.due_per_minute, row.later
    if not any(minutes) and not later:
        return
    room = max(10, width - _LABEL_WIDTH - 1)
    step = -(-len(minutes) // room)
    sums = [sum(minutes[at : at + step]) for at in range(0, len(minutes), step)]
    yield Text.assemble((f"{'  due':<{_LABEL_WIDTH}}", "dim"), (bar_chart(sums, ascii_only=ascii_only), "cyan"))
    text = f"now to {len(minutes)} min, at most {max(sums)} in {'1 min' if step == 1 else f'{step} min'}"
    yield Text(f"{'':<{_LABEL_WIDTH}}{text}" + (f"; {later} later" if later else ""), "dim")


def bar_chart(values: Sequence[int], *, ascii_only: bool = False) -> str:
    """Return one bar per value; values above zero are always visible."""
    symbols = _ASCII_SYMBOLS if ascii_only else _BLOCK_SYMBOLS
    most = max(values, default=0)
    return "".join(symbols[-(-value * (len(symbols) - 1) // most)] if most else symbols[0] for value in values)


# ---------------------------------------------------------------- output in pipes

PIPE_COLUMNS: Final = ("time", "status", *COUNT_KEYS, "busy provers", "usable nodes", "paused")


def pipe_cells(state: Overview) -> tuple[object, ...]:
    """Return a state as cells of `PIPE_COLUMNS`."""
    sums = [sum(numbers) for numbers in zip(*map(_counts, state.rounds), strict=True)] or [0] * len(COUNT_KEYS)
    nodes = state.endpoints
    usable = f"{sum(node.fresh for node in nodes)}/{len(nodes)}"
    return (format_time(int(state.at)), _status(state), *sums, state.provers.busy, usable, state.paused)


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.0f} s"


JsonLinesOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per line for each change (NDJSON).")
]

SILENCE_TIMEOUT_SECONDS: Final = 10.0
"""Seconds without data after which the service is unreachable; it sends a state every second."""
RECONNECT_PAUSE_SECONDS: Final = 1.0
"""Seconds between two connection attempts."""

_DATA_PREFIX: Final = b"data: "
_DUMB_TERMINALS: Final = frozenset({"", "dumb", "unknown"})


def watch(config: ConfigOption = None, db: DbOption = None, json: JsonLinesOption = False) -> None:
    """Watch the queue until Ctrl-C: rounds, due shares, provers, lateness, nodes, failures. Shows only totals."""
    api = OperatorApi.of(QueueOptions(config=config, db=db))
    stream = stream_states(api)
    try:
        if json:
            _print_json_lines(stream)
        elif sys.stdout.isatty() and os.environ.get("TERM", "") not in _DUMB_TERMINALS:
            _show_screen(stream)
        else:
            _print_text_lines(stream)
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.OK) from None
    except PermissionError:
        fail(f"no permission to use {api.settings.socket_path}", ExitCode.NOT_AUTHORIZED)
    except BrokenPipeError:
        discard_output()
        raise typer.Exit(ExitCode.OK) from None


# ---------------------------------------------------------------- the stream


def stream_states(api: OperatorApi) -> Iterator[dict[str, Any]]:
    """Yield what `--json` prints, endlessly: each state of the service, and why the stream is interrupted.

    Raises:
        PermissionError: no permission to access the socket.
    """
    while True:
        reason = "the helper ended the stream"
        try:
            if not api.may_use_socket:
                raise DaemonNotRunningError(f"no helper is running on {api.settings.db_path}")
            for line in stream_control_socket(api.settings.socket_path, "/events", timeout=SILENCE_TIMEOUT_SECONDS):
                # server-sent events, each on one line
                if line.startswith(_DATA_PREFIX) and isinstance(
                    state := jsonlib.loads(line[len(_DATA_PREFIX) :]), dict
                ):
                    yield {"event": "state", "state": state}
        except (DaemonNotRunningError, DaemonUnresponsiveError) as error:
            reason = str(error)
        yield {"event": "gone", "reason": reason}
        time.sleep(RECONNECT_PAUSE_SECONDS)


def _filter_changes(stream: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield records that differ from the previous one."""
    previous: object = None
    for record in stream:
        # each state has another time
        current = {**record, "state": {**record.get("state", {}), "at": None}}
        if current != previous:
            previous = current
            yield record


# ---------------------------------------------------------------- output


def _print_json_lines(stream: Iterator[dict[str, Any]]) -> None:
    for record in _filter_changes(stream):
        sys.stdout.write(encode_json_line(record))
        sys.stdout.flush()


def _print_text_lines(stream: Iterator[dict[str, Any]]) -> None:
    sys.stdout.write("\t".join(PIPE_COLUMNS) + "\n")
    for record in _filter_changes(stream):
        if record["event"] == "gone":
            print_message(record["reason"])
        else:
            cells = pipe_cells(parse_state(record["state"]))
            sys.stdout.write("\t".join(map(format_one_line, cells)) + "\n")
        sys.stdout.flush()


def _show_screen(stream: Iterator[dict[str, Any]]) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the terminal's own screen is restored, as after Ctrl-C
    console = Console()
    screen = Screen(None, "waiting for the helper")
    with Live(screen, console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        for record in stream:
            is_lost = record["event"] == "gone"
            screen = Screen(screen.state, record["reason"]) if is_lost else Screen(parse_state(record["state"]))
            live.update(screen, refresh=True)
