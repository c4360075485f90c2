"""Votes of the demo and due times of their shares. Pure, except for the random generator that is passed in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from devnet import ballot

PROPOSALS = (
    {"title": "Extend the grants", "options": ["Support", "Oppose", "Abstain"]},
    {"title": "Raise the threshold", "options": ["Support", "Oppose"]},
)
"""Two proposals with different numbers of options."""
DELEGATION_COUNT = 5000
"""Leaves in the round's tree before the first vote."""
VALIDATOR_COUNT = 3
"""Validators of the key ceremony; two of them decrypt the sums together."""
LEAD_SECONDS = 2
"""Seconds from a wallet's POST to the earliest `submit_at`."""
DURATION_FACTOR = 4.0
"""Duration of the round as a multiple of the expected proving time, because the host may be busy."""
MAX_HELPERS_PER_SHARE = 10
"""Most helpers to which real wallets give a share."""
MARGIN_SECONDS = 30
"""Additional seconds, for blocks and other delays."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the demo command.

    Attributes:
        circuit: the chain's circuit generation.
        voters: number of wallets; each votes once on every proposal.
        spread: seconds over which wallets spread the due times of their shares.
        db: path of the queue database; None for a temporary directory.
        keep: continue to run after the report.
        json: print the result as one line of JSON.
        store: "sqlite" for one helper with a file; "postgres" for three, one per role, with a temporary cluster.
        seed: seed of votes and times (keys and blinds always use the system's randomness).
        helpers: number of independent helpers, each with its own queue. Wallets give each share to half of them.
        plays_clients: whether each voter posts his shares as another of the known clients does it.
    """

    circuit: str = "k10"
    voters: int = 3
    spread: float = 10.0
    db: Path | None = None
    keep: bool = False
    json: bool = False
    seed: int | None = None
    store: str = "sqlite"
    helpers: int = 1
    plays_clients: bool = False

    @property
    def share_count(self) -> int:
        """Total number of shares."""
        return self.voters * len(PROPOSALS) * ballot.SHARE_COUNT

    @property
    def helpers_per_share(self) -> int:
        """Number of helpers to which a wallet gives each share: half of all, at most 10."""
        return min(-(-self.helpers // 2), MAX_HELPERS_PER_SHARE)

    @property
    def copy_count(self) -> int:
        """Total number of shares in the queues of all helpers."""
        return self.share_count * self.helpers_per_share


class Timing(Enum):
    """Due times of a vote's 16 shares."""

    SPREAD = "spread over the window"
    SAME_SECOND = "all in one second"
    IMMEDIATE = "immediate"


@dataclass(frozen=True, slots=True)
class PlannedVote:
    """One vote to cast: option `decision` of `proposal` (ids from 1), with `weight` and `timing`."""

    voter: int
    proposal: int
    decision: int
    weight: int
    timing: Timing


def plan_votes(options: DemoOptions, rng: random.Random) -> list[PlannedVote]:
    """The votes of all voters, with alternating timings."""
    timings = list(Timing)
    votes: list[PlannedVote] = []
    for voter in range(options.voters):
        for index, proposal in enumerate(PROPOSALS):
            votes.append(
                PlannedVote(
                    voter=voter,
                    proposal=index + 1,
                    decision=rng.randrange(len(proposal["options"])),
                    weight=rng.randint(1, 1000),
                    timing=timings[len(votes) % len(timings)],
                )
            )
    return votes


def due_times(vote: PlannedVote, now: float, spread: float, rng: random.Random) -> list[int]:
    """The 16 due times of a vote that is posted now."""
    start = now + LEAD_SECONDS
    match vote.timing:
        case Timing.IMMEDIATE:
            return ballot.immediate_times()
        case Timing.SAME_SECOND:
            return ballot.same_second_times(int(start + spread / 2))
        case Timing.SPREAD:
            return ballot.spread_times(start, spread, rng)


def round_seconds(options: DemoOptions, proof_seconds: float, workers: int) -> float:
    """Duration of the round, given the time of a proof on one of `workers` provers of all helpers.

    Every helper may prove each of its shares.
    """
    return (
        MARGIN_SECONDS + LEAD_SECONDS + options.spread + DURATION_FACTOR * options.copy_count * proof_seconds / workers
    )


def expected_tally(cast: Sequence[PlannedVote]) -> dict[tuple[int, int], int]:
    """The expected tally: total weight by (proposal, option), without options that have no votes."""
    totals: Counter[tuple[int, int]] = Counter()
    for vote in cast:
        totals[vote.proposal, vote.decision] += vote.weight
    return dict(totals)
