"""Extrapolate the measured costs to many hosts: `python -m bench.capacity_table`.

Reads bench/results/ and prints a table. `make bench` stores its rows in `bench/results/carried.json`, and `make
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
    "host": "shared queue, 8 provers: CPU of a prover",
    "taken": "shared queue: taking in, the server's CPU",
    "kept": "shared queue, 8 provers: the server's CPU",
    "sender": "shared queue: sending",
    "sent": "shared queue: sending, the server's CPU",
    "counted": "shared queue: a reveal in a block, the first host",
    "counted_database": "shared queue: a reveal in a block, the first host, the server's CPU",
    "again": "shared queue: a reveal in a block, each other host",
    "again_database": "shared queue: a reveal in a block, each other host, the server's CPU",
}
"""Rows of `bench.table` in milliseconds; those of the sender in reveals per second."""


def compute_costs(figures: Mapping[str, float | None], circuit: str) -> ShareCosts | None:
    """Compute the costs of one share. Returns None if a measurement is missing.

    Args:
        figures: figures by the row names of `bench.table`.
        circuit: the circuit that is proven.
    """
    found = {what: figures.get(name) for what, name in MEASURED_FIGURES.items()}
    proofs = figures.get(f"raw proofs {circuit}")
    known = {what: value for what, value in found.items() if value is not None}
    if proofs is None or len(known) < len(found):
        return None
    ms = {what: value / 1000 for what, value in known.items()}
    return ShareCosts(
        proof=HOST_CORES / proofs,
        host=ms["host"],
        database=ms["taken"] + ms["kept"],
        sender=1 / known["sender"],
        sender_database=ms["sent"],
        first_read=ms["counted"],
        first_read_database=ms["counted_database"],
        other_read=ms["again"],
        other_read_database=ms["again_database"],
    )


def compute_lines(figures: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Compute the rows of the table.

    Each row is `{circuit, block_seconds, rates, limits, breaks, at}`. The last four are null or absent if there are
    no figures. `rates` and `limits` are keyed by the number of provers.
    """
    found: list[dict[str, Any]] = []
    for circuit in CIRCUITS:
        costs = compute_costs(figures, circuit)
        for seconds in BLOCK_SECONDS:
            line: dict[str, Any] = {"name": f"{circuit}, {seconds:.0f} s", "rates": [], "at": None, "breaks": None}
            if costs is not None:
                line["rates"] = [round(simulate_cluster(costs, provers, seconds).rate, 1) for provers in PROVER_COUNTS]
                line["at"], line["breaks"] = find_saturation(costs, seconds, PROVER_COUNTS[-1]) or (None, LIMIT_PROOFS)
            found.append(line)
    return found


def format_table(lines_by_name: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows as Markdown."""
    by_name = {line["name"]: line for line in lines_by_name}
    head = ["blocks", *(f"{provers}" for provers in PROVER_COUNTS), "what breaks first"]
    rows = [head, ["---"] * len(head)]
    for circuit in CIRCUITS:
        for seconds in BLOCK_SECONDS:
            name = f"{circuit}, {seconds:.0f} s"
            rows.append([name, *_format_line(by_name.get(name))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _format_line(line: Mapping[str, Any] | None) -> list[str]:
    if line is None or not line["rates"]:
        return [*["–"] * len(PROVER_COUNTS), "not measured"]
    at = (
        f"nothing up to {PROVER_COUNTS[-1]} provers"
        if line["at"] is None
        else f"{line['breaks']}, with {line['at']} provers"
    )
    return [*(f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}" for rate in line["rates"]), at]


def main() -> None:
    """Print the table."""
    latest = Path(__file__).with_name("results") / "latest.json"
    kept = json.loads(latest.read_text()) if latest.exists() else []
    print(format_table(compute_lines({one["name"]: one["figure"] for one in kept})))


if __name__ == "__main__":
    main()
