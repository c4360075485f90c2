"""Run simulation seeds: `python -m tests.simulation [--seed N [--story]] [--seeds A-B] [--jobs 2]`.

A failing seed prints its event log. Every run of a seed is identical. With `--fleet`, several helpers run on one chain
instead, see `fleet_command`. The last line on standard output is a JSON summary; everything else goes to standard
error. The exit status is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

from tests.simulation.fleet_command import add_arguments, run_fleet_command
from tests.simulation.runner import run_seeds


def main() -> int:
    """Run the seeds named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Play seeds of the simulation.")
    parser.add_argument("--seed", type=int, help="run one seed")
    parser.add_argument("--seeds", default="0-999", metavar="A-B", help="run these seeds (default: 0-999)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--story", action="store_true", help="print what happened, with the product's own log")
    add_arguments(parser)
    options = parser.parse_args()
    if options.fleet:
        return run_fleet_command(parser, options)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    else:
        first, last = (int(part) for part in options.seeds.split("-"))
        seeds = range(first, last + 1)
    started_at = time.monotonic()
    failures: dict[int, list[str]] = {}
    virtual = 0.0
    for number, result in enumerate(run_seeds(seeds, jobs=options.jobs, verbose=options.story), start=1):
        virtual += result.virtual_seconds
        if result.violations:
            failures[result.seed] = result.violations
        if result.violations or options.story:
            print(f"\n=== seed {result.seed}", *result.lines, *result.violations, sep="\n", file=sys.stderr)
        elif number % 100 == 0:
            print(f"{number} of {len(seeds)} seeds, {len(failures)} failed", file=sys.stderr)
    used = [resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    summary = {
        "seeds": len(seeds),
        "failures": failures,
        "virtual_seconds": round(virtual),
        "wall_seconds": round(time.monotonic() - started_at, 1),
        "cpu_seconds": round(sum(usage.ru_utime + usage.ru_stime for usage in used), 1),
    }
    print(json.dumps(summary))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
