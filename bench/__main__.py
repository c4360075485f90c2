"""Run the benchmarks and compare the figures with their goals: `python -m bench [--quick] [--only MEASURE …]`.

Each measure runs in its own process, one after the other. The table goes to standard output. The results are written
to bench/results/, and `make docs` copies them into docs/performance.md:

- `latest.json`: a list of `{name, goal, figure, unit, holds, runs[]}`; a figure is the median of its runs
- `growth.json`: the points of the growth plot
- `capacity.json`: the costs of several hosts, extrapolated to many (`bench.capacity_table`)

Figures of measures that did not run are retained. `--quick` measures smaller sizes than the row names state, and
writes nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.capacity_table import compute_lines
from bench.table import CURVES, MEASURES, ROWS, format_row, median_by_size

RESULTS = Path(__file__).with_name("results")
LATEST = RESULTS / "latest.json"
GROWTH = RESULTS / "growth.json"
CAPACITY = RESULTS / "capacity.json"


def run_measure(name: str, *, quick: bool) -> list[dict[str, Any]] | None:
    """Run one measure. Returns its runs, or None if it failed."""
    started_at = time.monotonic()
    flags = ("--quick",) if quick else ()
    command = [sys.executable, "-m", *MEASURES[name], *flags]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    print(f"{name}: {time.monotonic() - started_at:.0f} s", file=sys.stderr)
    if result.returncode:
        return None
    runs: list[dict[str, Any]] = json.loads(result.stdout.splitlines()[-1])["runs"]
    return runs


def print_table(figures: list[dict[str, Any]]) -> None:
    """Print the table."""
    lines = [("", "goal", "figure (range)", "met"), *map(format_row, figures)]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def load_results(path: Path) -> dict[str, dict[str, Any]]:
    """Load the results of earlier runs, by name."""
    return {result["name"]: result for result in json.loads(path.read_text())} if path.exists() else {}


def save_results(path: Path, results: list[dict[str, Any]], order: list[str]) -> None:
    """Save new results together with the earlier ones, in this order."""
    merged = load_results(path) | {result["name"]: result for result in results}
    lines = [json.dumps(merged[name], ensure_ascii=False) for name in order if name in merged]
    path.parent.mkdir(exist_ok=True)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def main() -> None:
    """Run the measures, then print and save the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MEASURES), nargs="+", default=list(MEASURES))
    parser.add_argument("--quick", action="store_true", help="one run with smaller sizes; takes about five minutes")
    options = parser.parse_args()
    selected = [name for name in MEASURES if name in options.only]
    measured = {name: runs for name in selected if (runs := run_measure(name, quick=options.quick)) is not None}
    figures = [row.figure(measured[row.measure]) for row in ROWS if row.measure in measured]
    print_table(figures)
    if not options.quick:
        save_results(LATEST, figures, [row.name for row in ROWS])
        growth = [
            {"name": label, "power": power, "points": median_by_size(measured[measure], key)}
            for label, measure, key, power in CURVES
            if measure in measured
        ]
        save_results(GROWTH, growth, [label for label, *_ in CURVES])
        capacity = compute_lines({name: result["figure"] for name, result in load_results(LATEST).items()})
        save_results(CAPACITY, capacity, [line["name"] for line in capacity])
    failed = [name for name in selected if name not in measured]
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
