"""`svote-helper queue watch`: live view of the queue, as a screen, lines or JSON.

Follows the stream of queue states from the service, and reconnects whenever it is interrupted.
"""

from __future__ import annotations

import json as jsonlib
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer
from pydantic import TypeAdapter
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from helper.chain.chain_data import RoundStatus
from helper.cli.conventions import (
    ConfigOption,
    DbOption,
    ExitCode,
    discard_output,
    encode_json_line,
    fail,
    format_one_line,
    print_message,
)
from helper.cli.operator_api import OperatorApi
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
UNLIMITED_LINES: Final = 1 << 30
MIN_SPACED_LINES: Final = 20
"""Minimum terminal height for empty lines."""
_ENDING_SOON_SECONDS: Final = 600
"""Seconds before its end from which a round is highlighted."""


def parse_state(state: Mapping[str, Any]) -> Overview:
    """Parse the data of an event `state`."""
    return _OVERVIEW.validate_python(state)


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
        """Yield the lines that fit on the terminal."""
        ascii_only = not (console.encoding or "").lower().startswith("utf")
        room = (options.height or console.height) - 1
        lines = [*self.lines(options.max_width, ascii_only=ascii_only, max_lines=room)]
        if len(lines) > room > 1:
            lines = [*lines[: room - 1], Text(f"({len(lines) - room + 1} more lines: make the window taller)", "dim")]
        for line in lines:
            line.truncate(options.max_width, overflow="crop" if ascii_only else "ellipsis")
            line.no_wrap = True
            yield line

    def lines(self, width: int, *, ascii_only: bool = False, max_lines: int = UNLIMITED_LINES) -> Iterator[Text]:
        """Yield the lines for this width. The terminal crops lines that are still too long.

        If there are too few lines, rounds are omitted (`_fit_rounds`), so that nodes and failures stay visible.
        """
        if self.lost_reason is not None:
            yield Text("helper not reachable; retrying", "bold red")
            yield Text(format_one_line(self.lost_reason), "red")
        if self.state is None:
            return
        state = self.state
        head = [*_header_lines(state, width, stale=self.lost_reason is not None)]
        rest = [*_service_lines(state, width), *_failure_lines(state, width)]
        gap = [Text("")] if max_lines >= MIN_SPACED_LINES else []
        yield from (*head, *gap)
        taken = len(head) + 2 * len(gap) + len(rest) + (0 if self.lost_reason is None else 2)
        yield from _round_lines(state, width, ascii_only=ascii_only, max_lines=max_lines - taken)
        yield from (*gap, *rest)


def _header_lines(state: Overview, width: int, *, stale: bool) -> Iterator[Text]:
    paused = state.paused
    status, style = ("paused", "bold red") if paused else ("ready", "bold green")
    if not state.ready and not paused:
        status, style = "starting", "bold yellow"
    when = format_time(int(state.at))
    height = format_one_line(state.height)
    rest = (
        f"  height {height}  circuit {state.circuit}  {when} UTC"
        if width >= MIN_WIDE_COLUMNS
        else f"  {height}  {when[11:]}"
    )
    yield Text.assemble((f"{'was ' if stale else ''}{status}", "dim" if stale else style), rest)
    if paused:
        yield Text(format_one_line(paused), "red")


# ---------------------------------------------------------------- rounds


@dataclass(slots=True)
class _RoundLines:
    """Lines of a round: its numbers, and the due times of waiting shares."""

    round: RoundOverview
    numbers: list[Text]
    due_chart: list[Text]

    @property
    def is_idle(self) -> bool:
        """Report whether the round has no open shares."""
        return not (self.round.waiting or self.round.proving or self.round.broadcast)

    @property
    def sort_key(self) -> tuple[bool, bool, int]:
        """Sort key: rounds with open shares by end, then rounds with failures, then the others, latest first."""
        end = int(self.round.vote_end_time)
        return (self.is_idle, self.is_idle and not self.round.failed, -end if self.is_idle else end)


def _round_lines(state: Overview, width: int, *, ascii_only: bool, max_lines: int) -> Iterator[Text]:
    rounds = [row for row in state.rounds if row.status in (1, 4) or any(_counts(row))]
    if not rounds:
        yield Text("no open rounds, no shares", "dim")
        return
    head = (
        [Text(_format_row("round", "status", "ends in", _COUNT_HEADINGS, "needed"), "bold")]
        if width >= MIN_WIDE_COLUMNS
        else []
    )
    yield from head
    shown = [
        _RoundLines(row, [*_number_lines(row, state.at, width)], [*_due_chart_lines(row, width, ascii_only=ascii_only)])
        for row in rounds
    ]
    yield from _fit_rounds(sorted(shown, key=lambda lines: lines.sort_key), max_lines - len(head))


def _counts(row: RoundOverview) -> tuple[int, ...]:
    """Return the counts of `COUNT_KEYS`."""
    return tuple(getattr(row, name) for name in COUNT_KEYS)


def _number_lines(row: RoundOverview, now: float, width: int) -> Iterator[Text]:
    left = row.vote_end_time - now
    needed = row.seconds_needed if row.waiting or row.proving else None
    style = _urgency_style(row, left, needed)
    if width < MIN_WIDE_COLUMNS:
        yield from _narrow_lines(row, left, needed, style)
        return
    numbers = [str(number) for number in _counts(row)]
    status = enum_name(RoundStatus, row.status)
    yield Text(_format_row(row.round_id[:8], status, format_duration(left), numbers, format_duration(needed)), style)


def _fit_rounds(shown: list[_RoundLines], max_lines: int) -> Iterator[Text]:
    """Yield rounds in at most `max_lines` lines.

    Omits rounds without open shares first, the oldest first; then the bars of the rounds that end last; then these
    rounds. At least one round is shown. A line states how many are omitted.
    """
    omitted: list[_RoundLines] = []

    def is_too_long() -> bool:
        return sum(len(lines.numbers) + len(lines.due_chart) for lines in shown) + bool(omitted) > max_lines

    while is_too_long() and len(shown) > 1 and shown[-1].is_idle:
        omitted.append(shown.pop())
    for lines in reversed(shown):
        if is_too_long():
            lines.due_chart = []
    while is_too_long() and len(shown) > 1:
        omitted.append(shown.pop())
    for lines in shown:
        yield from (*lines.numbers, *lines.due_chart)
    if omitted:
        waiting = sum(lines.round.waiting for lines in omitted)
        failed = sum(lines.round.failed for lines in omitted)
        rounds = f"and {len(omitted)} more round{'s' if len(omitted) > 1 else ''}"
        yield Text(f"{rounds}: {waiting} waiting, {failed} failed", "red" if failed else "dim")


def _format_row(name: str, status: str, ends: str, numbers: Sequence[str], needed: str) -> str:
    return f"{name:<9} {status:<9} {ends:>8} " + "".join(f"{number:>8}" for number in numbers) + f" {needed:>8}"


def _narrow_lines(row: RoundOverview, left: float, needed: float | None, style: str) -> Iterator[Text]:
    status = enum_name(RoundStatus, row.status)
    time_left = "ended" if left < 0 else f"{format_duration(left)} left"
    yield Text(f"{row.round_id[:8]} {status}, {time_left}", style)
    waiting = f"{row.waiting} waiting" + ("" if needed is None else f", {format_duration(needed)} needed")
    yield Text(f" {waiting}")
    yield Text(f" {row.proving} proving, {row.broadcast} sent, {row.confirmed} confirmed")
    if row.failed:
        yield Text(f" {row.failed} failed", "red")


def _urgency_style(row: RoundOverview, left: float, needed: float | None) -> str:
    if row.failed or (needed is not None and needed > left):
        return "red"
    open_shares = row.waiting or row.proving or row.broadcast
    return "yellow" if open_shares and left < _ENDING_SOON_SECONDS else ""


def _due_chart_lines(row: RoundOverview, width: int, *, ascii_only: bool) -> Iterator[Text]:
    """Yield a bar chart of due shares, one bar per minute. A bar covers more minutes on a narrow terminal."""
    minutes, later = row.due_per_minute, row.later
    if not any(minutes) and not later:
        return
    room = max(10, width - _LABEL_WIDTH - 1)
    step = -(-len(minutes) // room)
    sums = [sum(minutes[at : at + step]) for at in range(0, len(minutes), step)]
    yield Text.assemble((f"{'  due':<{_LABEL_WIDTH}}", "dim"), (bar_chart(sums, ascii_only=ascii_only), "cyan"))
    until = "now to " if width >= MIN_WIDE_COLUMNS else ""
    text = f"{until}{len(minutes)} min, at most {max(sums)} in {'1 min' if step == 1 else f'{step} min'}"
    yield Text(f"{'':<{_LABEL_WIDTH}}{text}" + (f"; {later} later" if later else ""), "dim")


def bar_chart(values: Sequence[int], *, ascii_only: bool = False) -> str:
    """Return one bar per value; values above zero are always visible."""
    symbols = _ASCII_SYMBOLS if ascii_only else _BLOCK_SYMBOLS
    most = max(values, default=0)
    return "".join(symbols[-(-value * (len(symbols) - 1) // most)] if most else symbols[0] for value in values)


# ---------------------------------------------------------------- the service


def _service_lines(state: Overview, width: int) -> Iterator[Text]:
    provers, late = state.provers, state.lateness_ms
    each = provers.seconds_per_proof
    speed = "" if each is None else f", {each:.2f} s per proof"
    wide = width >= MIN_WIDE_COLUMNS
    slots = f"{provers.busy} in progress, {provers.slots} concurrent" if wide else f"{provers.busy} of {provers.slots}"
    yield _labelled_line("provers", f"{slots}{speed}")
    for label, times, text in (("lateness", late.start, "start"), ("", late.broadcast, "sent")):
        p50, p99 = _milliseconds(times.p50), _milliseconds(times.p99)
        shown = f"proof {text:<6} median {p50}, p99 {p99}" if wide else f"{text:<5} {p50}, p99 {p99}"
        yield _labelled_line(label, shown)
    for number, node in enumerate(state.endpoints):
        label = "nodes" if number == 0 else ""
        if node.fresh:
            yield _labelled_line(label, f"{node.name} ok")
        else:
            yield from _problem_lines(label, node.name, str(node.reason), width)


def _failure_lines(state: Overview, width: int) -> Iterator[Text]:
    for number, failure in enumerate(state.failures):
        when = f"{format_time(int(failure.at))[11:]} {failure.stage}"
        yield from _problem_lines("failed" if number == 0 else "", when, f"{failure.reason} ({failure.count})", width)


def _problem_lines(label: str, subject: str, reason: str, width: int) -> Iterator[Text]:
    """Yield a problem and its reason, on one line or wrapped on a narrow terminal."""
    if width >= MIN_WIDE_COLUMNS:
        yield _labelled_line(label, f"{subject} {reason}", "red")
        return
    yield _labelled_line(label, subject, "red")
    for line in textwrap.wrap(format_one_line(reason), max(10, width - _LABEL_WIDTH)):
        yield _labelled_line("", line, "red")


def _labelled_line(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label:<{_LABEL_WIDTH}}", "dim"), (format_one_line(text), style))


# ---------------------------------------------------------------- output in pipes

PIPE_COLUMNS: Final = ("time", "status", *COUNT_KEYS, "busy provers", "usable nodes", "paused")


def pipe_cells(state: Overview) -> tuple[object, ...]:
    """Return a state as cells of `PIPE_COLUMNS`."""
    sums = [sum(numbers) for numbers in zip(*map(_counts, state.rounds), strict=True)] or [0] * len(COUNT_KEYS)
    nodes = state.endpoints
    status = "paused" if state.paused else "ready" if state.ready else "starting"
    usable = f"{sum(node.fresh for node in nodes)}/{len(nodes)}"
    return (format_time(int(state.at)), status, *sums, state.provers.busy, usable, state.paused)


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
    api = OperatorApi.of(config, db)
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
        fail(f"no permission to use {api.socket}", ExitCode.NOT_AUTHORISED)
    except BrokenPipeError:
        discard_output()
        raise typer.Exit(ExitCode.OK) from None


# ---------------------------------------------------------------- the stream


@dataclass(frozen=True, slots=True)
class StateEvent:
    """A queue state: `helper.observability.queue_snapshot.Overview` as JSON."""

    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The stream is interrupted, and why."""

    reason: str


def stream_states(api: OperatorApi) -> Iterator[StateEvent | StreamLost]:
    """Yield the states of the service endlessly. Reconnects whenever the stream is interrupted.

    Raises:
        PermissionError: no permission to access the socket.
    """
    while True:
        try:
            if not api.may_use_socket:
                raise DaemonNotRunningError(f"no helper is running on {api.database}")
            lines = stream_control_socket(api.socket, "/events", timeout=SILENCE_TIMEOUT_SECONDS)
            yield from map(StateEvent, _parse_states(lines))
            yield StreamLost("the helper ended the stream")
        except (DaemonNotRunningError, DaemonUnresponsiveError) as error:
            yield StreamLost(str(error))
        time.sleep(RECONNECT_PAUSE_SECONDS)


def _parse_states(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Parse states from server-sent events, each on one line."""
    for line in lines:
        if line.startswith(_DATA_PREFIX):
            state = jsonlib.loads(line[len(_DATA_PREFIX) :])
            if isinstance(state, dict):
                yield state


def _filter_changes(stream: Iterator[StateEvent | StreamLost]) -> Iterator[StateEvent | StreamLost]:
    """Yield events that differ from the previous one."""
    previous: object = None
    for event in stream:
        # each state has another time
        current: object = {**event.state, "at": None} if isinstance(event, StateEvent) else event
        if current != previous:
            previous = current
            yield event


# ---------------------------------------------------------------- output


def _print_json_lines(stream: Iterator[StateEvent | StreamLost]) -> None:
    for event in _filter_changes(stream):
        if isinstance(event, StreamLost):
            record: dict[str, Any] = {"event": "gone", "reason": event.reason}
        else:
            record = {"event": "state", "state": event.state}
        sys.stdout.write(encode_json_line(record))
        sys.stdout.flush()


def _print_text_lines(stream: Iterator[StateEvent | StreamLost]) -> None:
    sys.stdout.write("\t".join(PIPE_COLUMNS) + "\n")
    for event in _filter_changes(stream):
        if isinstance(event, StreamLost):
            print_message(event.reason)
        else:
            cells = pipe_cells(parse_state(event.state))
            sys.stdout.write("\t".join(map(format_one_line, cells)) + "\n")
        sys.stdout.flush()


def _show_screen(stream: Iterator[StateEvent | StreamLost]) -> None:
    console = Console()
    screen = Screen(None, "waiting for the helper")
    with Live(screen, console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        for event in stream:
            screen = (
                Screen(parse_state(event.state))
                if isinstance(event, StateEvent)
                else Screen(screen.state, event.reason)
            )
            live.update(screen, refresh=True)
