"""Rows of the benchmark table, with their sources and goals. Pure.

Absolute goals apply to the two-core machine described in docs/performance.md; ratios apply to any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log10
from statistics import median
from typing import Any

RunFigures = Mapping[str, float]


@dataclass(frozen=True)
class TableRow:
    """One row of the table.

    Attributes:
        name: name of the row.
        measure: source of the figure, a name in `MEASURES`.
        extract: returns the figure of each run of the measure.
        goal: "≥ 0.95" or "≤ 30"; empty if the figure has no goal.
        unit: unit of the figure.
    """

    name: str
    measure: str
    extract: Callable[[Sequence[RunFigures]], list[float]]
    goal: str = ""
    unit: str = ""

    def figure(self, runs: Sequence[RunFigures]) -> dict[str, Any]:
        """Return the stored form: `{name, goal, figure, unit, holds, runs[]}`. `holds` is null without a goal."""
        values = [round(value, 4) for value in self.extract(runs)]
        middle = median(values) if values else None
        return {
            "name": self.name,
            "goal": self.goal,
            "figure": middle,
            "unit": self.unit,
            "holds": None if middle is None or not self.goal else meets_goal(middle, self.goal),
            "runs": values,
        }


def meets_goal(value: float, goal: str) -> bool:
    """Return whether a value meets a goal."""
    sign, _, limit = goal.partition(" ")
    number = float(limit.replace(",", ""))
    return value >= number if sign == "≥" else value <= number


def figures_of_runs(key: str, **filters: float) -> Callable[[Sequence[RunFigures]], list[float]]:
    """Extract a figure from every run of a given kind that has it."""
    return lambda runs: [run[key] for run in runs if key in run and _matches(run, filters)]


def of_largest_size(key: str) -> Callable[[Sequence[RunFigures]], list[float]]:
    """Extract a figure from the runs at the largest size."""

    def extract(runs: Sequence[RunFigures]) -> list[float]:
        largest = max(run["size"] for run in runs)
        return [run[key] for run in runs if run["size"] == largest]

    return extract


def relative_to_empty(key: str) -> Callable[[Sequence[RunFigures]], list[float]]:
    """Extract a figure at the largest size, relative to the adjacent run with an empty queue."""

    def extract(runs: Sequence[RunFigures]) -> list[float]:
        return [
            full / empty
            for full, empty in zip(of_largest_size(key)(runs), figures_of_runs(key, size=0)(runs), strict=True)
        ]

    return extract


def relative_to_one_process(key: str) -> Callable[[Sequence[RunFigures]], list[float]]:
    """Extract a figure of the runs with two processes, relative to one process."""

    def extract(runs: Sequence[RunFigures]) -> list[float]:
        alone = figures_of_runs(key, processes=1)(runs)
        return [value / median(alone) for value in figures_of_runs(key, processes=2)(runs)] if alone else []

    return extract


def of_all_host_runs(key: str) -> Callable[[Sequence[RunFigures]], list[float]]:
    """Extract a figure from the runs with any number of prover hosts."""
    return lambda runs: [run[key] for run in runs if run["size"] > 0]


def growth_exponent(key: str, power: int = 1) -> Callable[[Sequence[RunFigures]], list[float]]:
    """Return the growth exponent of a figure (or of its inverse, with `power` -1).

    It is the slope of a line fitted to the medians on logarithmic axes: 0 is constant, 1 is proportional to the
    size.
    """

    def extract(runs: Sequence[RunFigures]) -> list[float]:
        points = median_by_size(runs, key)
        if len(points) < 2:
            return []
        xs, ys = [log10(size) for size, _ in points], [power * log10(max(value, 1e-9)) for _, value in points]
        mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
        spread = sum((x - mean_x) ** 2 for x in xs)
        return [sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread]

    return extract


def median_by_size(runs: Sequence[RunFigures], key: str) -> list[tuple[float, float]]:
    """Return the medians of a figure by size, for sizes above 0."""
    sizes = sorted({run["size"] for run in runs if run["size"] > 0})
    return [(size, median(run[key] for run in runs if run["size"] == size)) for size in sizes]


def _matches(run: RunFigures, filters: Mapping[str, float]) -> bool:
    return all(run.get(name) == value for name, value in filters.items())


MEASURES: Mapping[str, tuple[str, ...]] = {
    "backlog-k10": ("bench.service", "backlog", "--circuit", "k10"),
    "backlog-k11": ("bench.service", "backlog", "--circuit", "k11"),
    "accept": ("bench.accept",),
    "connections": ("bench.connections",),
    "known-shares": ("bench.known_shares",),
    "posts": ("bench.service", "posts", "--circuit", "k10"),
    "lone": ("bench.service", "lone", "--circuit", "k10"),
    "start": ("bench.service", "start", "--circuit", "k10"),
    "queue": ("bench.queue",),
    "tree": ("bench.tree",),
    "awaiting": ("bench.awaiting",),
    "cluster": ("bench.cluster",),
    "audit": ("bench.audit",),
}
"""The measures, in the order in which they run."""

_APPLYING = "shared queue: applying a reveal"


def _provers_label(hosts: int) -> str:
    return f"shared queue, {hosts} {'prover' if hosts == 1 else 'provers'}"


ROWS: Sequence[TableRow] = (
    TableRow("reveal rate k10 / raw proof rate", "backlog-k10", figures_of_runs("ratio"), "≥ 0.95"),
    TableRow("reveal rate k10", "backlog-k10", figures_of_runs("revealed_per_second"), "", "shares/s"),
    TableRow("raw proof rate k10", "backlog-k10", figures_of_runs("raw_proofs_per_second"), "", "proofs/s"),
    TableRow("reveal rate k11 / raw proof rate", "backlog-k11", figures_of_runs("ratio"), "≥ 0.95"),
    TableRow("reveal rate k11", "backlog-k11", figures_of_runs("revealed_per_second"), "", "shares/s"),
    TableRow("raw proof rate k11", "backlog-k11", figures_of_runs("raw_proofs_per_second"), "", "proofs/s"),
    TableRow("accept rate, 64 connections", "accept", figures_of_runs("per_second"), "≥ 5,400", "shares/s"),
    TableRow("accept latency, 64 connections, p99", "accept", figures_of_runs("p99_ms"), "≤ 30", "ms"),
    TableRow("accept rate / rate of a bare route that parses the body", "accept", figures_of_runs("ratio"), "≥ 0.35"),
    TableRow("bare route rate, 64 connections", "accept", figures_of_runs("bare_per_second"), "", "shares/s"),
    TableRow("accept latency, 1 connection, p50", "accept", figures_of_runs("one_p50_ms"), "≤ 1", "ms"),
    *(
        row
        for route, key, rate, latency in (
            ("direct", "direct", "≥ 1,000", "≤ 200"),
            ("nginx with TLS", "nginx", "≥ 400", "≤ 200"),
            ("nginx, resumed sessions", "nginx_resumed", "", ""),
            ("Caddy with TLS", "caddy", "", ""),
            ("Caddy, resumed sessions", "caddy_resumed", "", ""),
        )
        for row in (
            TableRow(
                f"a new connection for each share, {route}: accept rate",
                "connections",
                figures_of_runs(f"{key}_per_second"),
                rate,
                "shares/s",
            ),
            TableRow(
                f"a new connection for each share, {route}: latency, p99",
                "connections",
                figures_of_runs(f"{key}_p99_ms"),
                latency,
                "ms",
            ),
        )
    ),
    TableRow("response time of a known share / of a new one, medians", "known-shares", figures_of_runs("ratio"), ""),
    TableRow("accept latency while both cores prove, p99", "posts", figures_of_runs("p99_ms"), "≤ 50", "ms"),
    TableRow("reveal rate with 20 POSTs/s / without", "posts", figures_of_runs("ratio"), "≥ 0.9"),
    TableRow("single share: due time to proof start, p99", "lone", figures_of_runs("p99_ms"), "≤ 20", "ms"),
    TableRow("idle CPU between deadlines", "lone", figures_of_runs("idle_percent"), "≤ 0.5", "%"),
    TableRow("start to the proof of a due share", "start", figures_of_runs("proof_seconds"), "≤ 2.5", "s"),
    TableRow("start to its reveal at the node", "start", figures_of_runs("reveal_seconds"), "", "s"),
    TableRow("start to its reveal: CPU of the service", "start", figures_of_runs("service_cpu_seconds"), "", "s"),
    TableRow("start to its reveal: CPU of a prover", "start", figures_of_runs("prover_cpu_seconds"), "", "s"),
    TableRow(
        "1,000,000 pending: accept rate / that of an empty queue",
        "queue",
        relative_to_empty("accept_per_second"),
        "≥ 0.8",
    ),
    TableRow(
        "1,000,000 pending: dispatch rate / that of an empty queue",
        "queue",
        relative_to_empty("dispatch_per_second"),
        "≥ 0.8",
    ),
    TableRow(
        "1,000,000 pending: lateness / that of an empty queue", "queue", relative_to_empty("lone_p50_ms"), "≤ 1.2"
    ),
    TableRow("1,000,000 pending: start to ready", "queue", of_largest_size("start_ready_s"), "≤ 10", "s"),
    TableRow(
        "1,000,000 pending: start to first correct responses", "queue", of_largest_size("start_answers_s"), "≤ 4", "s"
    ),
    TableRow("1,000,000 pending: start after a crash to ready", "queue", of_largest_size("crash_ready_s"), "≤ 10", "s"),
    TableRow(
        "1,000,000 pending: start after a crash to first correct responses",
        "queue",
        of_largest_size("crash_answers_s"),
        "≤ 4",
        "s",
    ),
    TableRow("1,000,000 pending: memory without provers", "queue", of_largest_size("memory_mb"), "≤ 300", "MB"),
    TableRow("1,000,000 pending: disk", "queue", of_largest_size("bytes_each"), "≤ 1,500", "B/share"),
    TableRow("500,000 leaves: sync", "tree", of_largest_size("sync_leaves_per_second"), "≥ 20,000", "leaves/s"),
    TableRow("500,000 leaves: restart", "tree", of_largest_size("restore_seconds"), "≤ 3", "s"),
    TableRow("500,000 leaves: path", "tree", of_largest_size("path_ms"), "≤ 1", "ms"),
    TableRow("10,000 unconfirmed: additional CPU", "awaiting", of_largest_size("added_percent"), "≤ 1", "% of a core"),
    TableRow(
        "10,000 unconfirmed: reveals sent per block", "awaiting", of_largest_size("sent_in_a_block"), "≤ 64", "requests"
    ),
    *(
        row
        for hosts in (1, 2, 4, 8)
        for row in (
            TableRow(
                f"{_provers_label(hosts)}: prover CPU",
                "cluster",
                figures_of_runs("prove_cpu", size=hosts),
                "",
                "ms/share",
            ),
            TableRow(
                f"{_provers_label(hosts)}: server CPU",
                "cluster",
                figures_of_runs("prove_server", size=hosts),
                "",
                "ms/share",
            ),
            TableRow(
                f"{_provers_label(hosts)}: round trips",
                "cluster",
                figures_of_runs("prove_trips", size=hosts),
                "",
                "per share",
            ),
        )
    ),
    TableRow("shared queue: enqueuing, server CPU", "cluster", of_all_host_runs("enqueue_server"), "", "ms/share"),
    TableRow("shared queue: send rate", "cluster", of_all_host_runs("send_per_second"), "", "shares/s"),
    TableRow("shared queue: sending, sender CPU", "cluster", of_all_host_runs("send_cpu"), "", "ms/share"),
    TableRow("shared queue: sending, server CPU", "cluster", of_all_host_runs("send_server"), "", "ms/share"),
    TableRow("shared queue: sending, round trips", "cluster", of_all_host_runs("send_trips"), "", "per share"),
    TableRow("audit of 100,000 reveals / raw verification rate", "audit", figures_of_runs("ratio"), "≥ 0.9"),
    TableRow("audit of 100,000 reveals / raw verification, by CPU time", "audit", figures_of_runs("cpu_ratio")),
    TableRow("audit of 100,000 reveals", "audit", figures_of_runs("audit_per_second"), "", "reveals/s"),
    TableRow("raw verification rate k10, in batches", "audit", figures_of_runs("raw_per_second"), "", "proofs/s"),
    TableRow("audit of 100,000 reveals: memory", "audit", figures_of_runs("peak_mb"), "≤ 300", "MB"),
    *(
        row
        for reader, key in (("first host", "first_read"), ("every other host", "other_read"))
        for row in (
            TableRow(f"{_APPLYING}, {reader}", "cluster", of_all_host_runs(f"{key}_seconds"), "", "ms/share"),
            TableRow(
                f"{_APPLYING}, {reader}, server CPU", "cluster", of_all_host_runs(f"{key}_server"), "", "ms/share"
            ),
            TableRow(
                f"{_APPLYING}, {reader}, round trips", "cluster", of_all_host_runs(f"{key}_trips"), "", "per share"
            ),
        )
    ),
    TableRow(
        "shared queue: accept rate, 1 process", "cluster", figures_of_runs("per_second", processes=1), "", "shares/s"
    ),
    TableRow(
        "shared queue: accept rate, 2 processes", "cluster", figures_of_runs("per_second", processes=2), "", "shares/s"
    ),
    TableRow("shared queue: accept rate, 2 processes / 1 process", "cluster", relative_to_one_process("per_second")),
    TableRow(
        "shared queue: accepting, 2 processes, process CPU",
        "cluster",
        figures_of_runs("host_ms", processes=2),
        "",
        "ms/share",
    ),
    TableRow(
        "shared queue: accepting, 2 processes, server CPU",
        "cluster",
        figures_of_runs("server_ms", processes=2),
        "",
        "ms/share",
    ),
    TableRow(
        "growth with the queue: accepting", "queue", growth_exponent("accept_per_second", -1), "≤ 0.1", "exponent"
    ),
    TableRow(
        "growth with the queue: dispatch", "queue", growth_exponent("dispatch_per_second", -1), "≤ 0.1", "exponent"
    ),
    TableRow("growth with the queue: start to ready", "queue", growth_exponent("start_ready_s"), "", "exponent"),
    TableRow("growth with the tree: path", "tree", growth_exponent("path_ms"), "≤ 0.1", "exponent"),
    TableRow("growth with the tree: restart", "tree", growth_exponent("restore_seconds"), "", "exponent"),
    TableRow(
        "growth with unconfirmed reveals: CPU per block",
        "awaiting",
        growth_exponent("cpu_percent"),
        "≤ 0.1",
        "exponent",
    ),
    TableRow("growth with the provers: prover CPU", "cluster", growth_exponent("prove_cpu"), "≤ 0.1", "exponent"),
    TableRow("growth with the provers: server CPU", "cluster", growth_exponent("prove_server"), "≤ 0.1", "exponent"),
)
"""The rows of the table, in order."""

CURVES: Sequence[tuple[str, str, str, int]] = (
    ("accepting a share", "queue", "accept_per_second", -1),
    ("dispatching a share", "queue", "dispatch_per_second", -1),
    ("start to ready", "queue", "start_ready_s", 1),
    ("path in the tree", "tree", "path_ms", 1),
    ("a block with unconfirmed reveals", "awaiting", "cpu_percent", 1),
)
"""Curves of the growth plot: label, measure, figure, and -1 for a rate."""


def format_row(figure: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Format a row: name, goal, figure with its range, and whether the goal is met."""
    unit = f" {figure['unit']}" if figure["unit"] else ""
    if figure["figure"] is None:
        return figure["name"], figure["goal"] + unit, "not measured", "–"
    runs = figure["runs"]
    spread = f" ({format_number(min(runs))} – {format_number(max(runs))})" if len(runs) > 1 else ""
    mark = {None: "", True: "yes", False: "no"}[figure["holds"]]
    return (
        figure["name"],
        figure["goal"] + unit if figure["goal"] else "",
        f"{format_number(figure['figure'])}{unit}{spread}",
        mark,
    )


def format_number(value: float) -> str:
    """Format a number with its significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
