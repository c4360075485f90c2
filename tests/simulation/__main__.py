"""Run simulation seeds: `python -m tests.simulation [--seed N [--story]] [--seeds A-B] [--jobs 2]`.

A failing seed prints its event log. Every run of a seed is identical. With `--liar ahead,swallow --nodes 3`, one of
three nodes tells these lies (`any`: one or two at a time, drawn), and another one has faults. With `--fleet`, several
helpers run on one chain instead, see `fleet_command`; with `--wallets`, all clients vote, see `wallet_fleet`. The last
line on standard output is a JSON summary; everything else goes to standard error. The exit status is 1 if a promise
was broken.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter

from tests.simulation import wallet_fleet
from tests.simulation.fleet_command import add_arguments, run_fleet_command
from tests.simulation.liar import Lie
from tests.simulation.runner import run_seeds
from tests.simulation.scenario import LiarPlan


def main() -> int:
    """Run the seeds named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Play seeds of the simulation.")
    parser.add_argument("--seed", type=int, help="run one seed")
    parser.add_argument("--seeds", default="0-999", metavar="A-B", help="run these seeds (default: 0-999)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--story", action="store_true", help="print what happened, with the product's own log")
    parser.add_argument(
        "--liar", type=_parse_lies, metavar="LIES", help="lies of one node, such as ahead,swallow, or any"
    )
    parser.add_argument("--nodes", type=int, choices=(1, 2, 3), default=2, help="with --liar: nodes (default: 2)")
    add_arguments(parser)
    wallet_fleet.add_arguments(parser)
    options = parser.parse_args()
    if options.wallets:
        return wallet_fleet.run_wallets_command(options)
    if options.fleet:
        return run_fleet_command(parser, options)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    else:
        first, last = (int(part) for part in options.seeds.split("-"))
        seeds = range(first, last + 1)
    started_at = time.monotonic()
    liar = None if options.liar is None else LiarPlan(options.liar, options.nodes)
    failures: dict[int, list[str]] = {}
    counts, broken = Counter[str](), Counter[str]()
    virtual = 0.0
    for number, result in enumerate(run_seeds(seeds, jobs=options.jobs, verbose=options.story, liar=liar), 1):
        virtual += result.virtual_seconds
        counts.update(result.counts)
        broken.update(result.broken)
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
        "acknowledged": counts["acknowledged"],
        "counted": counts["counted"],
        "broken": dict(broken),
        "virtual_seconds": round(virtual),
        "wall_seconds": round(time.monotonic() - started_at, 1),
        "cpu_seconds": round(sum(usage.ru_utime + usage.ru_stime for usage in used), 1),
    }
    print(json.dumps(summary))
    return 1 if failures else 0


def _parse_lies(text: str) -> tuple[Lie, ...]:
    """Parse the names of lies; "any" is none of them."""
    if text == "any":
        return ()
    try:
        return tuple(Lie[name.upper().replace("-", "_")] for name in text.split(","))
    except KeyError as error:
        names = ", ".join(lie.name.lower() for lie in Lie)
        raise argparse.ArgumentTypeError(f"unknown lie {error}; choose from any, {names}") from None


if __name__ == "__main__":
    sys.exit(main())
