"""How many vote for what, and when their shares are due. Pure but for the dice that it is given."""

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
"""What is voted on: two proposals of a different number of options."""
DELEGATIONS = 5000
"""Leaves in the round's tree before the first vote."""
LEAD_SECONDS = 2
"""Seconds from a wallet's POST to the first of the times that it may choose."""
HEADROOM = 4.0
"""The round stays open this many times as long as proving should take: the machine may be busy with other things."""
SPARE_SECONDS = 30
"""Seconds beyond that, for blocks and whatever else comes."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line asked for.

    Attributes:
        circuit: the chain's circuit generation.
        voters: wallets; each votes once on every proposal.
        spread: seconds over which wallets spread the times of their shares.
        db: where the queue database is kept; None: in a folder that goes at the end.
        keep: go on running after the report.
        json: print the result as one line of JSON.
        store: "sqlite": one helper, its queue in a file; "postgres": three, one a role, on a cluster of their own.
        seed: of the votes and times (keys and blinds are always the system's).
    """

    circuit: str = "k10"
    voters: int = 3
    spread: float = 10.0
    db: Path | None = None
    keep: bool = False
    json: bool = False
    seed: int | None = None
    store: str = "sqlite"

    @property
    def shares(self) -> int:
        """How many shares there will be."""
        return self.voters * len(PROPOSALS) * ballot.SHARES


class Timing(Enum):
    """How a vote's 16 shares are timed."""

    SPREAD = "spread over the window"
    SAME_SECOND = "all in one second"
    IMMEDIATE = "at once"


@dataclass(frozen=True, slots=True)
class Choice:
    """One vote to be cast: option `decision` of `proposal` (ids from 1), with `weight`, timed as said."""

    voter: int
    proposal: int
    decision: int
    weight: int
    timing: Timing


def choices(options: DemoOptions, dice: random.Random) -> list[Choice]:
    """Every voter's votes; the three timings take turns."""
    timings = list(Timing)
    made: list[Choice] = []
    for voter in range(options.voters):
        for index, proposal in enumerate(PROPOSALS):
            made.append(
                Choice(
                    voter=voter,
                    proposal=index + 1,
                    decision=dice.randrange(len(proposal["options"])),
                    weight=dice.randint(1, 1000),
                    timing=timings[len(made) % len(timings)],
                )
            )
    return made


def times(choice: Choice, now: float, spread: float, dice: random.Random) -> list[int]:
    """The 16 times of a vote that is posted now."""
    start = now + LEAD_SECONDS
    match choice.timing:
        case Timing.IMMEDIATE:
            return ballot.immediate()
        case Timing.SAME_SECOND:
            return ballot.same_second(int(start + spread / 2))
        case Timing.SPREAD:
            return ballot.spread(start, spread, dice)


def round_seconds(options: DemoOptions, proof_seconds: float, workers: int) -> float:
    """How long the round must stay open, given what one proof takes here with one of `workers` provers."""
    return SPARE_SECONDS + LEAD_SECONDS + options.spread + HEADROOM * options.shares * proof_seconds / workers


def expected_tally(cast: Sequence[Choice]) -> dict[tuple[int, int], int]:
    """What the chain must count: total weight by (proposal, option), options without votes left out."""
    totals: Counter[tuple[int, int]] = Counter()
    for choice in cast:
        totals[choice.proposal, choice.decision] += choice.weight
    return dict(totals)
