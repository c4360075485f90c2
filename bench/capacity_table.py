"""Extrapolate the measured costs to many hosts: `python -m bench.capacity_table`.

Reads bench/results/ and prints a table. `make bench` stores its rows in `bench/results/capacity.json`, and `make
docs` copies them into docs/performance.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.capacity_model import HOST_CORES, LIMIT_PROOFS, ShareCosts, find_saturation, simulate_cluster

PROVER_COUNTS: Final = (1, 2, 4, 8, 16, 32, 64, 100)
BLOCK_SECONDS: Final = (1.0, 2.0, 6.0)
CIRCUITS: Final = ("k10", "k11")
MEASURED_FIGURES: Final = {
    "host": "shared queue, 8 provers: prover CPU",
    "enqueue_database": "shared queue: enqueuing, server CPU",
    "prove_database": "shared queue, 8 provers: server CPU",
    "sends_per_second": "shared queue: send rate",
    "send_database": "shared queue: sending, server CPU",
    "first_read": "shared queue: applying a reveal, first host",
    "first_read_database": "shared queue: applying a reveal, first host, server CPU",
    "other_read": "shared queue: applying a reveal, every other host",
    "other_read_database": "shared queue: applying a reveal, every other host, server CPU",
}
"""Rows of `bench.table` in milliseconds, `sends_per_second` in reveals per second."""


def compute_costs(figures: Mapping[str, float | None], circuit: str) -> ShareCosts | None:
    """Compute the costs of one share. Returns None if a measurement is missing.

    Args:
        figures: figures by the row names of `bench.table`.
        circuit: the circuit that is proven.
    """
    values = {cost: figures.get(name) for cost, name in MEASURED_FIGURES.items()}
    proofs = figures.get(f"raw proof rate {circuit}")
    known = {cost: value for cost, value in values.items() if value is not None}
    if proofs is None or len(known) < len(values):
        return None
    seconds = {cost: value / 1000 for cost, value in known.items()}
    return ShareCosts(
        proof=HOST_CORES / proofs,
        host=seconds["host"],
        database=seconds["enqueue_database"] + seconds["prove_database"],
        sender=1 / known["sends_per_second"],
        sender_database=seconds["send_database"],
        first_read=seconds["first_read"],
        first_read_database=seconds["first_read_database"],
        other_read=seconds["other_read"],
        other_read_database=seconds["other_read_database"],
    )


def compute_lines(figures: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Compute the rows of the table.

    Each row is `{name, rates, at, breaks}`. `rates` has a rate for each of `PROVER_COUNTS`, and is empty without
    figures. `breaks` is the resource that limits the rate from `at` provers on.
    """
    lines: list[dict[str, Any]] = []
    for circuit in CIRCUITS:
        costs = compute_costs(figures, circuit)
        for seconds in BLOCK_SECONDS:
            line: dict[str, Any] = {"name": f"{circuit}, {seconds:.0f} s", "rates": [], "at": None, "breaks": None}
            if costs is not None:
                line["rates"] = [round(simulate_cluster(costs, provers, seconds).rate, 1) for provers in PROVER_COUNTS]
                line["at"], line["breaks"] = find_saturation(costs, seconds, PROVER_COUNTS[-1]) or (None, LIMIT_PROOFS)
            lines.append(line)
    return lines


def format_table(lines_by_name: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows as Markdown."""
    by_name = {line["name"]: line for line in lines_by_name}
    head = ["blocks", *(f"{provers}" for provers in PROVER_COUNTS), "first limit"]
    rows = [head, ["---"] * len(head)]
    for circuit in CIRCUITS:
        for seconds in BLOCK_SECONDS:
            name = f"{circuit}, {seconds:.0f} s"
            rows.append([name, *_format_line(by_name.get(name))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _format_line(line: Mapping[str, Any] | None) -> list[str]:
    if line is None or not line["rates"]:
        return [*["–"] * len(PROVER_COUNTS), "not measured"]
    at = f"none up to {PROVER_COUNTS[-1]} hosts" if line["at"] is None else f"{line['breaks']}, with {line['at']} hosts"
    return [*(f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}" for rate in line["rates"]), at]


def main() -> None:
    """Print the table."""
    latest = Path(__file__).with_name("results") / "latest.json"
    results = json.loads(latest.read_text()) if latest.exists() else []
    print(format_table(compute_lines({result["name"]: result["figure"] for result in results})))


if __name__ == "__main__":
    main()
