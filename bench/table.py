"""The figures and their goals: which measure they come from, and whether they hold. Pure.

A goal is for a machine with two cores like the one that docs/performance.md names; ratios are for any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log10
from statistics import median
from typing import Any

Run = Mapping[str, float]
MILLION = 1_000_000


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what it is.
        measure: the measure that it is taken from, a name in `MEASURES`.
        of: the figure in each of the measure's runs.
        goal: "≥ 0.95" or "≤ 30"; empty where a figure is only told.
        unit: of the figure.
    """

    name: str
    measure: str
    of: Callable[[Sequence[Run]], list[float]]
    goal: str = ""
    unit: str = ""

    def figure(self, runs: Sequence[Run]) -> dict[str, Any]:
        """The line as it is kept: `{name, goal, figure, unit, holds, runs[]}`; `holds` null without a goal."""
        values = [round(value, 4) for value in self.of(runs)]
        middle = median(values) if values else None
        return {
            "name": self.name,
            "goal": self.goal,
            "figure": middle,
            "unit": self.unit,
            "holds": None if middle is None or not self.goal else holds(middle, self.goal),
            "runs": values,
        }


def holds(value: float, goal: str) -> bool:
    """Whether a value meets a goal."""
    sign, _, limit = goal.partition(" ")
    number = float(limit.replace(",", ""))
    return value >= number if sign == "≥" else value <= number


def each(key: str, **which: float) -> Callable[[Sequence[Run]], list[float]]:
    """A figure of every run of a certain kind."""
    return lambda runs: [run[key] for run in runs if _is(run, which)]


def largest(key: str) -> Callable[[Sequence[Run]], list[float]]:
    """A figure of the runs of the largest size."""

    def of(runs: Sequence[Run]) -> list[float]:
        most = max(run["size"] for run in runs)
        return [run[key] for run in runs if run["size"] == most]

    return of


def against_empty(key: str) -> Callable[[Sequence[Run]], list[float]]:
    """A figure of the runs of the largest size, as a part of what it was with an empty queue beside each."""

    def of(runs: Sequence[Run]) -> list[float]:
        return [full / empty for full, empty in zip(largest(key)(runs), each(key, size=0)(runs), strict=True)]

    return of


def of_two(key: str) -> Callable[[Sequence[Run]], list[float]]:
    """A figure of the runs with two processes, as a part of what it is with one."""

    def of(runs: Sequence[Run]) -> list[float]:
        alone = each(key, processes=1)(runs)
        return [value / median(alone) for value in each(key, processes=2)(runs)] if alone else []

    return of


def by_hosts(key: str) -> Callable[[Sequence[Run]], list[float]]:
    """A figure of the runs with hosts that prove, however many."""
    return lambda runs: [run[key] for run in runs if run["size"] > 0]


def exponent(key: str, power: int = 1) -> Callable[[Sequence[Run]], list[float]]:
    """The growth of a figure (or of its inverse, with `power` -1) with the size: the slope of a line through the
    medians, both in logarithms. 0: it does not grow, 1: in proportion.
    """

    def of(runs: Sequence[Run]) -> list[float]:
        points = curve(runs, key)
        if len(points) < 2:
            return []
        xs, ys = [log10(size) for size, _ in points], [power * log10(max(value, 1e-9)) for _, value in points]
        mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
        spread = sum((x - mean_x) ** 2 for x in xs)
        return [sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread]

    return of


def curve(runs: Sequence[Run], key: str) -> list[tuple[float, float]]:
    """Sizes above 0 with the medians of a figure."""
    sizes = sorted({run["size"] for run in runs if run["size"] > 0})
    return [(size, median(run[key] for run in runs if run["size"] == size)) for size in sizes]


def _is(run: Run, which: Mapping[str, float]) -> bool:
    return all(run.get(name) == value for name, value in which.items())


MEASURES: Mapping[str, tuple[str, ...]] = {
    "backlog-k10": ("bench.service", "backlog", "--circuit", "k10"),
    "backlog-k11": ("bench.service", "backlog", "--circuit", "k11"),
    "accept": ("bench.accept",),
    "posts": ("bench.service", "posts", "--circuit", "k10"),
    "lone": ("bench.service", "lone", "--circuit", "k10"),
    "queue": ("bench.queue",),
    "tree": ("bench.tree",),
    "awaiting": ("bench.awaiting",),
    "cluster": ("bench.cluster",),
}
"""The measures, in the order in which they are taken."""

_IN_BLOCK = "shared queue: a reveal in a block"


def _provers(hosts: int) -> str:
    return f"shared queue, {hosts} {'prover' if hosts == 1 else 'provers'}"


ROWS: Sequence[Row] = (
    Row("revealing k10, of what raw proofs allow", "backlog-k10", each("ratio"), "≥ 0.95"),
    Row("revealing k10", "backlog-k10", each("revealed_per_second"), "", "shares/s"),
    Row("raw proofs k10", "backlog-k10", each("raw_proofs_per_second"), "", "proofs/s"),
    Row("revealing k11, of what raw proofs allow", "backlog-k11", each("ratio"), "≥ 0.95"),
    Row("revealing k11", "backlog-k11", each("revealed_per_second"), "", "shares/s"),
    Row("raw proofs k11", "backlog-k11", each("raw_proofs_per_second"), "", "proofs/s"),
    Row("accepting, 64 connections", "accept", each("per_second"), "≥ 5,400", "shares/s"),
    Row("accepting, 64 connections, p99", "accept", each("p99_ms"), "≤ 30", "ms"),
    Row("accepting, of a bare route that parses the body", "accept", each("ratio"), "≥ 0.35"),
    Row("the bare route, 64 connections", "accept", each("bare_per_second"), "", "shares/s"),
    Row("accepting, 1 connection, p50", "accept", each("one_p50_ms"), "≤ 1", "ms"),
    Row("accepting while both cores prove, p99", "posts", each("p99_ms"), "≤ 50", "ms"),
    Row("revealing at 20 posts/s, of its rate without", "posts", each("kept"), "≥ 0.9"),
    Row("lone share: its time to the proof's start, p99", "lone", each("p99_ms"), "≤ 20", "ms"),
    Row("idle CPU between deadlines", "lone", each("idle_percent"), "≤ 0.5", "%"),
    Row("1,000,000 pending: accepting, of an empty queue's", "queue", against_empty("accept_per_second"), "≥ 0.8"),
    Row("1,000,000 pending: dispatch, of an empty queue's", "queue", against_empty("dispatch_per_second"), "≥ 0.8"),
    Row("1,000,000 pending: lateness, to an empty queue's", "queue", against_empty("lone_p50_ms"), "≤ 1.2"),
    Row("1,000,000 pending: start to ready", "queue", largest("start_ready_s"), "≤ 10", "s"),
    Row("1,000,000 pending: start to right answers", "queue", largest("start_answers_s"), "≤ 4", "s"),
    Row("1,000,000 pending: after a crash, to ready", "queue", largest("crash_ready_s"), "≤ 10", "s"),
    Row("1,000,000 pending: after a crash, to right answers", "queue", largest("crash_answers_s"), "≤ 4", "s"),
    Row("1,000,000 pending: memory without provers", "queue", largest("memory_mb"), "≤ 300", "MB"),
    Row("1,000,000 pending: disk", "queue", largest("bytes_each"), "≤ 1,500", "B/share"),
    Row("500,000 leaves: sync", "tree", largest("sync_leaves_per_second"), "≥ 20,000", "leaves/s"),
    Row("500,000 leaves: restart", "tree", largest("restore_seconds"), "≤ 3", "s"),
    Row("500,000 leaves: path", "tree", largest("path_ms"), "≤ 1", "ms"),
    Row("10,000 awaiting: CPU that they add", "awaiting", largest("added_percent"), "≤ 1", "% of a core"),
    Row("10,000 awaiting: reveals sent in a block", "awaiting", largest("sent_in_a_block"), "≤ 64", "requests"),
    *(
        row
        for hosts in (1, 2, 4, 8)
        for row in (
            Row(f"{_provers(hosts)}: CPU of a prover", "cluster", each("prove_cpu", size=hosts), "", "ms/share"),
            Row(f"{_provers(hosts)}: the server's CPU", "cluster", each("prove_server", size=hosts), "", "ms/share"),
            Row(f"{_provers(hosts)}: round trips", "cluster", each("prove_trips", size=hosts), "", "a share"),
        )
    ),
    Row("shared queue: taking in, the server's CPU", "cluster", by_hosts("take_server"), "", "ms/share"),
    Row("shared queue: sending", "cluster", by_hosts("send_per_second"), "", "shares/s"),
    Row("shared queue: sending, CPU of the sender", "cluster", by_hosts("send_cpu"), "", "ms/share"),
    Row("shared queue: sending, the server's CPU", "cluster", by_hosts("send_server"), "", "ms/share"),
    Row("shared queue: sending, round trips", "cluster", by_hosts("send_trips"), "", "a share"),
    *(
        row
        for who, key in (("the first host", "count"), ("each other host", "again"))
        for row in (
            Row(f"{_IN_BLOCK}, {who}", "cluster", by_hosts(f"{key}_seconds"), "", "ms/share"),
            Row(f"{_IN_BLOCK}, {who}, the server's CPU", "cluster", by_hosts(f"{key}_server"), "", "ms/share"),
            Row(f"{_IN_BLOCK}, {who}, round trips", "cluster", by_hosts(f"{key}_trips"), "", "a share"),
        )
    ),
    Row("shared queue: accepting, 1 process", "cluster", each("per_second", processes=1), "", "shares/s"),
    Row("shared queue: accepting, 2 processes", "cluster", each("per_second", processes=2), "", "shares/s"),
    Row("shared queue: accepting, 2 processes, of one's", "cluster", of_two("per_second")),
    Row("shared queue: accepting, 2 processes, their CPU", "cluster", each("host_ms", processes=2), "", "ms/share"),
    Row(
        "shared queue: accepting, 2 processes, the server's CPU",
        "cluster",
        each("server_ms", processes=2),
        "",
        "ms/share",
    ),
    Row("growth with the queue: accepting", "queue", exponent("accept_per_second", -1), "≤ 0.1", "exponent"),
    Row("growth with the queue: dispatch", "queue", exponent("dispatch_per_second", -1), "≤ 0.1", "exponent"),
    Row("growth with the queue: start to ready", "queue", exponent("start_ready_s"), "", "exponent"),
    Row("growth with the tree: path", "tree", exponent("path_ms"), "≤ 0.1", "exponent"),
    Row("growth with the tree: restart", "tree", exponent("restore_seconds"), "", "exponent"),
    Row("growth with what awaits: CPU of a block", "awaiting", exponent("cpu_percent"), "≤ 0.1", "exponent"),
    Row("growth with the provers: CPU of a prover", "cluster", exponent("prove_cpu"), "≤ 0.1", "exponent"),
    Row("growth with the provers: the server's CPU", "cluster", exponent("prove_server"), "≤ 0.1", "exponent"),
)
"""The lines, in the issue's order."""

CURVES: Sequence[tuple[str, str, str, int]] = (
    ("accepting a share", "queue", "accept_per_second", -1),
    ("dispatching a share", "queue", "dispatch_per_second", -1),
    ("start to ready", "queue", "start_ready_s", 1),
    ("path in the tree", "tree", "path_ms", 1),
    ("a block with shares that wait for it", "awaiting", "cpu_percent", 1),
)
"""What the plot of growth shows: a label, a measure, a figure, and -1 where it is a rate."""


def told(figure: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A line as people read it: name, goal, figure with its spread, and whether it holds."""
    unit = f" {figure['unit']}" if figure["unit"] else ""
    if figure["figure"] is None:
        return figure["name"], figure["goal"] + unit, "not measured", "–"
    runs = figure["runs"]
    spread = f" ({number(min(runs))} – {number(max(runs))})" if len(runs) > 1 else ""
    mark = {None: "", True: "yes", False: "no"}[figure["holds"]]
    return (
        figure["name"],
        figure["goal"] + unit if figure["goal"] else "",
        f"{number(figure['figure'])}{unit}{spread}",
        mark,
    )


def number(value: float) -> str:
    """A number with as many digits as it is worth."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
