"""Command line of the fleet: `python -m tests.simulation --fleet --helpers 10 --per-share 5 --overdue 10000 --json`.

With `--overdue`, all shares wait when the first prover is ready. With `--voters`, wallets vote throughout a round and
choose due times by their own rule. `--last-minutes` runs only the end of a round that is too large to be simulated as
a whole, with the load and the speed of the whole round.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from helper.core.load_forecast import helpers_per_share
from tests.simulation.fleet import FleetResult, run_fleet
from tests.simulation.fleet_plan import (
    BACKLOG_PROVES_FROM,
    BACKLOG_ROUND_SECONDS,
    DEADLINE_FRACTION,
    FleetHelper,
    FleetPlan,
    draw_backlog,
    draw_round,
    select_end_of_round,
)
from tests.simulation.world import seeded_random

K10_PROOF_SECONDS = 0.42
"""Seconds of a k10 proof on one of two provers of the reference machine (docs/performance.md)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    fleet = parser.add_argument_group("fleet", "several helpers on one chain, instead of seeds")
    fleet.add_argument("--fleet", action="store_true", help="run a fleet; --seed selects its seed (default: 1)")
    fleet.add_argument("--helpers", type=int, default=10, help="number of helpers (default: 10)")
    fleet.add_argument("--per-share", type=int, help="helpers of each share (default: half of all, at most 10)")
    fleet.add_argument("--overdue", type=int, help="shares that are overdue at the start; or use --voters")
    fleet.add_argument("--voters", type=int, help="voters of a round that is simulated from its start to its end")
    fleet.add_argument("--proposals", type=int, default=1, help="proposals on which each voter votes (default: 1)")
    fleet.add_argument("--round-hours", type=float, default=72.0, help="length of the round (default: 72)")
    fleet.add_argument(
        "--deadline",
        type=float,
        default=DEADLINE_FRACTION,
        metavar="FRACTION",
        help=f"fraction of the voters that vote in the last-moment window (default: {DEADLINE_FRACTION:g})",
    )
    fleet.add_argument(
        "--last-minutes",
        type=float,
        metavar="MINUTES",
        help="run only the end of the round, inside its last-moment window",
    )
    fleet.add_argument("--oldest-first", type=int, default=0, help="helpers that prove a backlog oldest first")
    fleet.add_argument("--dead", type=int, default=0, help="helpers that die when half of the time has passed")
    fleet.add_argument("--late", type=int, default=0, help="helpers that prove only after a quarter of the time")
    fleet.add_argument("--provers", type=int, default=2, help="provers of each helper (default: 2)")
    fleet.add_argument(
        "--proof-seconds",
        type=float,
        default=K10_PROOF_SECONDS,
        help=f"seconds of a proof (default: {K10_PROOF_SECONDS:g}, k10)",
    )
    fleet.add_argument("--block-seconds", type=float, default=1.5, help="seconds between blocks (default: 1.5)")
    fleet.add_argument(
        "--marginal",
        action="store_true",
        help="measure what the last helper adds to the fleet, with its own order and oldest first",
    )
    fleet.add_argument("--json", action="store_true", help="print only one line of JSON")


def create_plan(options: argparse.Namespace) -> FleetPlan:
    """Create the plan of the options."""
    if (options.overdue is None) == (options.voters is None):
        raise ValueError("a fleet needs either --overdue or --voters")
    for name in ("oldest_first", "dead", "late"):
        if not 0 <= getattr(options, name) <= options.helpers:
            raise ValueError(f"--{name.replace('_', '-')} must be from 0 to the number of helpers")
    if options.dead + options.late >= options.helpers:
        raise ValueError("one helper must be neither --dead nor --late")
    rng = seeded_random(options.seed or 1, "fleet plan")
    if options.overdue is not None:
        start, end = BACKLOG_PROVES_FROM, BACKLOG_ROUND_SECONDS
        votes = draw_backlog(options.overdue, rng)
        duration = options.overdue * options.proof_seconds / (options.provers * options.helpers)
    else:
        start, end = 0.0, int(options.round_hours * 3600)
        votes = draw_round(options.voters, options.proposals, end, rng, deadline_fraction=options.deadline)
        if options.last_minutes:
            votes, end = select_end_of_round(votes, end, int(options.last_minutes * 60))
        duration = end
    late_at, dead_at = start + duration / 4, start + duration / 2
    helpers = [FleetHelper(proves_from=start) for _ in range(options.helpers)]
    for number in range(options.oldest_first):
        helpers[number] = replace(helpers[number], is_oldest_first=True)
    for number in range(options.dead):
        helpers[-1 - number] = replace(helpers[-1 - number], dies_at=dead_at)
    for number in range(options.dead, options.dead + options.late):
        helpers[-1 - number] = replace(helpers[-1 - number], proves_from=late_at)
    return FleetPlan(
        helpers=tuple(helpers),
        per_share=options.per_share or helpers_per_share(options.helpers),
        provers=options.provers,
        proof_seconds=options.proof_seconds,
        block_seconds=options.block_seconds,
        round_seconds=end,
        votes=votes,
    )


def measure_marginal(seed: int, plan: FleetPlan) -> tuple[dict[str, float], list[str]]:
    """Measure what the last helper adds to the rate at which a fleet reveals a backlog.

    Three runs have the same shares and the same other helpers: the last helper has its own order, is oldest first, or
    dies before it proves. A figure of 1 means that the fleet is faster by everything that this helper can prove.
    """
    *others, last = plan.helpers
    variants = {
        "own_order": replace(last, is_oldest_first=False),
        "oldest_first": replace(last, is_oldest_first=True),
        "without": replace(last, dies_at=plan.proving_starts_at - 0.5),
    }
    results: dict[str, FleetResult] = {}
    violations: list[str] = []
    for name, helper in variants.items():
        results[name], errors = run_fleet(seed, replace(plan, helpers=(*others, helper)))
        violations += errors
    rates = {name: result.reveals_per_second for name, result in results.items()}
    capacity = plan.provers / plan.proof_seconds
    figures = {f"reveals_per_second_{name}": rate for name, rate in rates.items()}
    figures |= {f"drained_seconds_{name}": result.drained_seconds for name, result in results.items()}
    for name in ("own_order", "oldest_first"):
        figures[f"added_{name}"] = (rates[name] - rates["without"]) / capacity
    return {name: round(value, 3) for name, value in figures.items()}, violations


def run_fleet_command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the fleet of the options and print its figures; the exit status is 1 if a promise was broken."""
    try:
        plan = create_plan(options)
    except ValueError as error:
        parser.error(str(error))
    seed = options.seed or 1
    figures: dict[str, float]
    if options.marginal:
        figures, violations = measure_marginal(seed, plan)
    else:
        result, violations = run_fleet(seed, plan)
        figures = result.as_json()
        if result.early:
            violations.append(f"{result.early} reveals were sent before their due time")
        if result.feasible_lost:
            violations.append(f"{result.feasible_lost} shares that could have been counted were lost")
    print(*violations, sep="\n", end="\n" if violations else "", file=sys.stderr)
    facts = {"helpers": len(plan.helpers), "per_share": plan.per_share, "seed": seed}
    if not options.json:
        for name, value in (facts | figures).items():
            print(f"{name:24} {value:>12g}", file=sys.stderr)
    print(json.dumps(facts | figures))
    return 1 if violations else 0
