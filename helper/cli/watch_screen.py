"""The screen of `queue watch`: one state as lines that fit, however narrow the terminal. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from helper.cli.output import one_line
from helper.core.time_text import format_duration, format_time

WIDE: Final = 72
"""Columns from which on a round is one line of a table."""
STATUS: Final = {1: "active", 2: "tallying", 3: "finalized", 4: "pending"}
NUMBERS: Final = ("waiting", "proving", "broadcast", "confirmed", "failed")
_HEADS: Final = ("waiting", "proving", "sent", "counted", "failed")
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_ASCII: Final = " .:-=+*#@"
_LABEL: Final = 10
ENDLESS: Final = 1 << 30
LOW: Final = 20
"""Lines from which on there is room for empty ones."""
_SOON: Final = 600
"""Seconds before its end from which on a round is marked."""


@dataclass(frozen=True, slots=True)
class Screen:
    """What is shown now; rich asks it again whenever the terminal's size changes.

    Attributes:
        state: the newest state, None before the first.
        gone: why nobody tells states now, None while somebody does.
    """

    state: Mapping[str, Any] | None
    gone: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """All lines that fit."""
        ascii_only = not (console.encoding or "").lower().startswith("utf")
        room = (options.height or console.height) - 1
        lines = [*self.lines(options.max_width, ascii_only=ascii_only, room=room)]
        if len(lines) > room > 1:
            lines = [*lines[: room - 1], Text(f"({len(lines) - room + 1} more lines: make the window taller)", "dim")]
        for line in lines:
            line.truncate(options.max_width, overflow="crop" if ascii_only else "ellipsis")
            line.no_wrap = True
            yield line

    def lines(self, width: int, *, ascii_only: bool = False, room: int = ENDLESS) -> Iterator[Text]:
        """The lines for a terminal of this width, each of which may still be too long.

        Where there is no room for all, rounds give way (`_fitting`), so that nodes and failures are seen.
        """
        if self.gone is not None:
            yield Text("no helper tells anything; trying again", "bold red")
            yield Text(one_line(self.gone), "red")
        if self.state is None:
            return
        state = self.state
        head = [*_head(state, width, stale=self.gone is not None)]
        rest = [*_service(state, width), *_failures(state, width)]
        gap = [Text("")] if room >= LOW else []
        yield from (*head, *gap)
        taken = len(head) + 2 * len(gap) + len(rest) + (0 if self.gone is None else 2)
        yield from _rounds(state, width, ascii_only=ascii_only, room=room - taken)
        yield from (*gap, *rest)


def _head(state: Mapping[str, Any], width: int, *, stale: bool) -> Iterator[Text]:
    paused = state["paused"]
    how, style = ("paused", "bold red") if paused else ("ready", "bold green")
    if not state["ready"] and not paused:
        how, style = "starting", "bold yellow"
    when = format_time(int(state["at"]))
    height = _or_dash(state["height"])
    rest = f"  height {height}  circuit {state['circuit']}  {when} UTC" if width >= WIDE else f"  {height}  {when[11:]}"
    yield Text.assemble((f"{'was ' if stale else ''}{how}", "dim" if stale else style), rest)
    if paused:
        yield Text(one_line(paused), "red")


# ---------------------------------------------------------------- rounds


@dataclass(slots=True)
class _Shown:
    """A round's lines: its numbers, and when what waits is due."""

    of: Mapping[str, Any]
    numbers: list[Text]
    ahead: list[Text]

    @property
    def quiet(self) -> bool:
        """Whether nothing is to be done in it."""
        return not (self.of["waiting"] or self.of["proving"] or self.of["broadcast"])

    @property
    def order(self) -> tuple[bool, bool, int]:
        """The one that ends soonest first; then those with nothing to do: where something failed, then the latest."""
        end = int(self.of["vote_end_time"])
        return (self.quiet, self.quiet and not self.of["failed"], -end if self.quiet else end)


def _rounds(state: Mapping[str, Any], width: int, *, ascii_only: bool, room: int) -> Iterator[Text]:
    rounds = [one for one in state["rounds"] if one["status"] in (1, 4) or any(one[name] for name in NUMBERS)]
    if not rounds:
        yield Text("no round is open, and none has shares", "dim")
        return
    head = [Text(_row("round", "status", "ends in", _HEADS, "needed"), "bold")] if width >= WIDE else []
    yield from head
    shown = [
        _Shown(one, [*_numbers(one, state["at"], width)], [*_ahead(one, width, ascii_only=ascii_only)])
        for one in rounds
    ]
    yield from _fitting(sorted(shown, key=lambda one: one.order), room - len(head))


def _numbers(one: Mapping[str, Any], now: float, width: int) -> Iterator[Text]:
    left = one["vote_end_time"] - now
    needed = one["seconds_needed"] if one["waiting"] or one["proving"] else None
    style = _urgency(one, left, needed)
    if width < WIDE:
        yield from _narrow(one, left, needed, style)
        return
    numbers = [str(one[name]) for name in NUMBERS]
    status = STATUS.get(one["status"], str(one["status"]))
    yield Text(_row(one["round_id"][:8], status, format_duration(left), numbers, format_duration(needed)), style)


def _fitting(shown: list[_Shown], room: int) -> Iterator[Text]:
    """Rounds in so many lines: without those that have nothing to do, the oldest first; then without the bars of those
    that end last, then without these. One stays, and what is left out is counted.
    """
    left: list[_Shown] = []

    def too_many() -> bool:
        return sum(len(one.numbers) + len(one.ahead) for one in shown) + bool(left) > room

    while too_many() and len(shown) > 1 and shown[-1].quiet:
        left.append(shown.pop())
    for one in reversed(shown):
        if too_many():
            one.ahead = []
    while too_many() and len(shown) > 1:
        left.append(shown.pop())
    for one in shown:
        yield from (*one.numbers, *one.ahead)
    if left:
        waiting, failed = (sum(one.of[name] for one in left) for name in ("waiting", "failed"))
        rounds = f"and {len(left)} more round{'s' if len(left) > 1 else ''}"
        yield Text(f"{rounds}: {waiting} waiting, {failed} failed", "red" if failed else "dim")


def _row(name: str, status: str, ends: str, numbers: Sequence[str], needed: str) -> str:
    return f"{name:<9} {status:<9} {ends:>8} " + "".join(f"{number:>8}" for number in numbers) + f" {needed:>8}"


def _narrow(one: Mapping[str, Any], left: float, needed: float | None, style: str) -> Iterator[Text]:
    status = STATUS.get(one["status"], str(one["status"]))
    yield Text(f"{one['round_id'][:8]} {status}, {format_duration(left)} left", style)
    waiting = f"{one['waiting']} wait" + ("" if needed is None else f", {format_duration(needed)} needed")
    yield Text(f" {waiting}")
    yield Text(f" {one['proving']} proving, {one['broadcast']} sent, {one['confirmed']} counted")
    if one["failed"]:
        yield Text(f" {one['failed']} failed", "red")


def _urgency(one: Mapping[str, Any], left: float, needed: float | None) -> str:
    if one["failed"] or (needed is not None and needed > left):
        return "red"
    open_shares = one["waiting"] or one["proving"] or one["broadcast"]
    return "yellow" if open_shares and left < _SOON else ""


def _ahead(one: Mapping[str, Any], width: int, *, ascii_only: bool) -> Iterator[Text]:
    """When what waits is due: a bar a minute, or a bar for some minutes where that does not fit."""
    minutes, later = one["due_per_minute"], one["later"]
    if not any(minutes) and not later:
        return
    room = max(10, width - _LABEL - 1)
    step = -(-len(minutes) // room)
    sums = [sum(minutes[at : at + step]) for at in range(0, len(minutes), step)]
    yield Text.assemble((f"{'  due':<{_LABEL}}", "dim"), (bars(sums, ascii_only=ascii_only), "cyan"))
    until = "now to " if width >= WIDE else ""
    text = f"{until}{len(minutes)} min, at most {max(sums)} in {'a minute' if step == 1 else f'{step} min'}"
    yield Text(f"{'':<{_LABEL}}{text}" + (f"; {later} later" if later else ""), "dim")


def bars(values: Sequence[int], *, ascii_only: bool = False) -> str:
    """A bar for each value; what is not nothing is seen as more than nothing."""
    signs = _ASCII if ascii_only else _BLOCKS
    most = max(values, default=0)
    return "".join(signs[-(-value * (len(signs) - 1) // most)] if most else signs[0] for value in values)


# ---------------------------------------------------------------- the service


def _service(state: Mapping[str, Any], width: int) -> Iterator[Text]:
    provers, late = state["provers"], state["lateness_ms"]
    each = provers["seconds_per_proof"]
    speed = "" if each is None else f", {each:.2f} s a proof"
    wide = width >= WIDE
    slots = (
        f"{provers['busy']} in hand, {provers['slots']} at once" if wide else f"{provers['busy']} of {provers['slots']}"
    )
    yield _line("provers", f"{slots}{speed}")
    for label, name, text in (("lateness", "start", "begun"), ("", "broadcast", "sent")):
        p50, p99 = _milliseconds(late[name]["p50"]), _milliseconds(late[name]["p99"])
        shown = f"proof {text:<6} half within {p50}, 99 % within {p99}" if wide else f"{text:<5} {p50}, p99 {p99}"
        yield _line(label, shown)
    for number, node in enumerate(state["endpoints"]):
        label = "nodes" if number == 0 else ""
        if node["fresh"]:
            yield _line(label, f"{node['name']} ok")
        else:
            yield from _in_full(label, node["name"], str(node["reason"]), width)


def _failures(state: Mapping[str, Any], width: int) -> Iterator[Text]:
    for number, one in enumerate(state["failures"]):
        when = f"{format_time(int(one['at']))[11:]} {one['stage']}"
        yield from _in_full("failed" if number == 0 else "", when, f"{one['reason']} ({one['count']})", width)


def _in_full(label: str, what: str, why: str, width: int) -> Iterator[Text]:
    """What is not well, and why: on one line, or where that is too narrow for reasons, on as many as it takes."""
    if width >= WIDE:
        yield _line(label, f"{what} {why}", "red")
        return
    yield _line(label, what, "red")
    for line in textwrap.wrap(one_line(why), max(10, width - _LABEL)):
        yield _line("", line, "red")


def _line(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label:<{_LABEL}}", "dim"), (one_line(text), style))


# ---------------------------------------------------------------- for pipes

COLUMNS: Final = ("at", "how", *NUMBERS, "in hand", "nodes of use", "paused")


def cells(state: Mapping[str, Any]) -> tuple[object, ...]:
    """One state as a line of cells under `COLUMNS`."""
    sums = [sum(one[name] for one in state["rounds"]) for name in NUMBERS]
    nodes = state["endpoints"]
    how = "paused" if state["paused"] else "ready" if state["ready"] else "starting"
    use = f"{sum(node['fresh'] for node in nodes)}/{len(nodes)}"
    return (format_time(int(state["at"])), how, *sums, state["provers"]["busy"], use, state["paused"])


def plain(lines: Iterable[Text]) -> str:
    """Lines as they are read, without style."""
    return "\n".join(line.plain for line in lines)


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.0f} s"


def _or_dash(value: object) -> object:
    return "-" if value is None else value
