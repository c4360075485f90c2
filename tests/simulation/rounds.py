"""Simulates rounds of different sizes without faults: lateness of each round, and order of reveals.

One round has a backlog: all its shares become due at once. The shares of the small rounds become due one by one while
it lasts. `python -m tests.simulation.rounds` prints the lateness of each round, together and alone, as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Final
from unittest.mock import patch

from helper.chain.reveal_transaction import RevealMessage
from helper.core.dispatch_order import BacklogLimits
from helper.observability.stats import percentile
from tests.campaign.rank_correlation import rank_correlation
from tests.simulation.node import SimNode
from tests.simulation.run import create_world
from tests.simulation.scenario import FaultEpisode, PlannedPost, PlannedVote, RoundPlan, Scenario, ServiceFault
from tests.simulation.world import seeded_random

SHARES_PER_VOTE: Final = 4
CAST_SECONDS: Final = 240.0
"""Seconds in which all votes are cast."""
BACKLOG_START: Final = 300
"""Loop second at which the shares of the large round become due."""
WORKERS: Final = 2
PROOF_SECONDS: Final = 1.0
"""The simulated prover takes 0.8 to 1.5 times as long."""
MEAN_PROOF_SECONDS: Final = 1.15 * PROOF_SECONDS


@dataclass(frozen=True)
class RoundsResult:
    """Result of a run.

    Attributes:
        lateness: by round, seconds from each share's due time to its first broadcast.
        arrivals: by round, nullifiers in order of acknowledgment.
        broadcasts: by round, nullifiers in order of their first broadcast.
        due_orders: by round, the same nullifiers in order of due time.
    """

    lateness: dict[int, list[float]]
    arrivals: dict[int, list[bytes]]
    broadcasts: dict[int, list[bytes]]
    due_orders: dict[int, list[bytes]]
    confirmed: dict[int, int]
    violations: list[str]


def backlog_seconds(sizes: dict[int, int]) -> float:
    """Return the seconds that the provers need for rounds of these sizes, with a reserve of a fifth."""
    return 1.2 * sum(sizes.values()) * MEAN_PROOF_SECONDS / WORKERS


def simulate_rounds(
    seed: int,
    sizes: dict[int, int],
    *,
    seconds: float,
    ends: dict[int, int] | None = None,
    due_at_once: Collection[int] = (0,),
    outage_seconds: float = 0.0,
) -> RoundsResult:
    """Run rounds of these sizes.

    Args:
        sizes: number of shares by round; a multiple of `SHARES_PER_VOTE`.
        seconds: duration of the run after `BACKLOG_START`.
        ends: loop second at which a round ends, by round; the others end long after the last share.
        due_at_once: rounds whose shares become due at `BACKLOG_START`. The shares of the others become due one by one
            in three quarters of `seconds`.
        outage_seconds: seconds from `BACKLOG_START` for which the service is stopped. The shares that otherwise become
            due at once become due one by one in this time.
    """
    plan = create_plan(seed, sizes, seconds, ends or {}, due_at_once, outage_seconds)
    first_sent: dict[bytes, float] = {}
    with create_world(seed, plan) as world:
        check_broadcast = world.promise_checker.on_broadcast

        def on_broadcast(message: RevealMessage, node: SimNode) -> None:
            first_sent.setdefault(message.nullifier, world.loop.time())
            check_broadcast(message, node)

        for node in world.nodes:
            node.on_broadcast = on_broadcast
        world.loop.run_until_complete(world.run())
    numbers = {round_.round_id: number for number, round_ in enumerate(world.rounds)}
    tracked = world.promise_checker.shares
    by_arrival = sorted(tracked, key=lambda spent: tracked[spent].acknowledged_at or 0.0)
    result = RoundsResult({}, {}, {}, {}, {}, world.event_log.violations)
    for number in sizes:
        in_round = [spent for spent in by_arrival if numbers[tracked[spent].share.round_id] == number]
        sent = sorted((spent for spent in in_round if spent in first_sent), key=lambda spent: first_sent[spent])
        result.arrivals[number], result.broadcasts[number] = in_round, sent
        result.due_orders[number] = sorted(sent, key=lambda spent: tracked[spent].due_at)
        result.confirmed[number] = sum(
            (world.rounds[number].round_id, spent) in world.chain.confirmed for spent in sent
        )
        result.lateness[number] = [first_sent[spent] - tracked[spent].due_at for spent in sent]
    return result


def create_plan(
    seed: int,
    sizes: dict[int, int],
    seconds: float,
    ends: dict[int, int],
    due_at_once: Collection[int],
    outage_seconds: float,
) -> Scenario:
    """Draw the scenario of `simulate_rounds`."""
    rng = seeded_random(seed, "rounds")
    duration = BACKLOG_START + seconds + 60.0
    late_end = int(duration + 3600)
    votes = []
    for number, size in sizes.items():
        for _ in range(size // SHARES_PER_VOTE):
            posts = tuple(
                PlannedPost(
                    index=index,
                    delay=rng.uniform(0, 20),
                    submit_at=BACKLOG_START
                    + int(rng.uniform(0, outage_seconds) if number in due_at_once else rng.uniform(5, 0.75 * seconds)),
                    repost_delay=None,
                    rival_delay=None,
                )
                for index in range(SHARES_PER_VOTE)
            )
            votes.append(PlannedVote(number, rng.uniform(10, CAST_SECONDS), posts))
    return Scenario(
        duration=duration,
        poll_seconds=1.0,
        block_interval=(1.5, 1.5),
        workers=WORKERS,
        proof_seconds=PROOF_SECONDS,
        circuit_setting="k10",
        is_shuffled=True,
        rounds=tuple(
            RoundPlan(0.0, ends.get(number, late_end), requires_all_shares=False) for number in range(max(sizes) + 1)
        ),
        votes=tuple(votes),
        episodes=(FaultEpisode(BACKLOG_START - 5.0, BACKLOG_START + outage_seconds, ServiceFault.STOP),)
        if outage_seconds
        else (),
    )


def p99(samples: list[float]) -> float:
    value = percentile(samples, 0.99)
    assert value is not None
    return value


def main() -> int:
    """Print the lateness of ten rounds, one of them 100 times as large as the others, together and alone."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.rounds", description="Simulate ten rounds.")
    parser.add_argument("--seed", type=int, default=0, help="determines the run (default: 0)")
    parser.add_argument("--shares", type=int, default=24, help="shares of a small round (default: 24)")
    parser.add_argument("--oldest-first", action="store_true", help="claim shares by due time, as without a backlog")
    options = parser.parse_args()
    small = range(1, 10)
    sizes = {0: 100 * options.shares, **dict.fromkeys(small, options.shares)}
    seconds = backlog_seconds(sizes)
    with patch.object(BacklogLimits, "is_overdue", lambda *_: False) if options.oldest_first else nullcontext():
        together = simulate_rounds(options.seed, sizes, seconds=seconds)
    alone = [simulate_rounds(options.seed, {number: options.shares}, seconds=seconds) for number in small]
    violations = [*together.violations, *(violation for result in alone for violation in result.violations)]
    order, arrival = together.broadcasts[0], together.arrivals[0]
    summary = {
        "small_p50": round(median(sample for number in small for sample in together.lateness[number]), 2),
        "small_p50_alone": round(
            median(s for n, result in zip(small, alone, strict=True) for s in result.lateness[n]), 2
        ),
        "small_p99": [round(p99(together.lateness[number]), 2) for number in small],
        "small_p99_alone": [round(p99(r.lateness[n]), 2) for n, r in zip(small, alone, strict=True)],
        "large_sent": len(order),
        "arrival_correlation": round(rank_correlation(arrival, order), 3) if len(order) == len(arrival) else None,
        "violations": violations,
    }
    print(json.dumps(summary))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
