"""What a fleet of helpers and its wallets do: who runs when, when votes are cast and when their shares are due.

Drawing is pure and precedes the run, as in `scenario`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from helper.core.load_forecast import (
    MAX_REVEALS_PER_BLOCK,
    MAX_WAIT_SECONDS,
    Distribution,
    helpers_per_share,
    last_moment_start,
    last_vote_time,
)
from helper.core.share import SHARE_COUNT

BACKLOG_STARTS_AT = 10.0
"""Loop second at which the first share of a backlog is posted."""
BACKLOG_ARRIVAL_SECONDS = 120.0
"""Seconds over which the shares of a backlog arrive."""
BACKLOG_PROVES_FROM = BACKLOG_STARTS_AT + BACKLOG_ARRIVAL_SECONDS + 2.0
"""Loop second at which the provers are ready: after the last share of a backlog has arrived."""
BACKLOG_ROUND_SECONDS = 30 * 86_400
"""Seconds of the round of a backlog, which ends long after the backlog is drained."""
DEADLINE_FRACTION = 0.3
"""Fraction of the voters of a deadline-heavy round that are added to its last-moment window."""
ROUND_STARTS_AT = 10.0
"""Loop second at which the first vote of a round can be cast."""
RECOVERY_SECONDS = (30.0, 3600.0)
"""Minimum and maximum seconds after a share's due time at which its wallet posts it again."""
MAX_SHARES_OF_VOTE = 12
"""Maximum shares of a vote that a wallet first gives to one helper, if there are enough helpers."""


@dataclass(frozen=True)
class FleetHelper:
    """One helper of a fleet. Times are loop seconds.

    Attributes:
        is_oldest_first: whether it proves a backlog oldest first, as the original helper does.
        dies_at: when it is killed for good; infinity for never.
    """

    is_oldest_first: bool = False
    starts_at: float = 0.0
    proves_from: float = 0.0
    dies_at: float = math.inf

    def can_prove(self, at: float) -> bool:
        return max(self.starts_at, self.proves_from) <= at < self.dies_at


@dataclass(frozen=True)
class FleetVote:
    """A vote and its shares. Times are loop seconds.

    Attributes:
        posts: (when the share is posted at the earliest, when it is due) of each share. A due time of None means
            immediately.
    """

    cast_at: float
    posts: tuple[tuple[float, int | None], ...]


@dataclass(frozen=True)
class FleetPlan:
    """A run of a fleet.

    Attributes:
        per_share: number of helpers to which a wallet gives each share.
        proof_seconds: mean seconds of a proof on one prover.
        round_seconds: loop second at which the round ends.
    """

    helpers: tuple[FleetHelper, ...]
    per_share: int
    provers: int
    proof_seconds: float
    block_seconds: float
    round_seconds: int
    votes: tuple[FleetVote, ...]

    @property
    def share_count(self) -> int:
        return sum(len(vote.posts) for vote in self.votes)

    @property
    def proving_starts_at(self) -> float:
        """Loop second from which the first helper proves."""
        return min(max(helper.starts_at, helper.proves_from) for helper in self.helpers)

    def reveal_rate(self, at: float) -> float:
        """Return the most reveals per second of the fleet at a time, within the limit of the chain's blocks."""
        proving = sum(helper.can_prove(at) for helper in self.helpers)
        return min(proving * self.provers / self.proof_seconds, MAX_REVEALS_PER_BLOCK / self.block_seconds)


@dataclass(frozen=True)
class IdealRun:
    """What an ideal fleet of the same provers does.

    It proves each share once, as soon as the share is due and a prover is free, and the next block counts it.
    """

    revealed: int
    finished_at: float


def simulate_ideal_fleet(plan: FleetPlan, due_times: Sequence[float]) -> IdealRun:
    """Return what an ideal fleet does with shares that are due at these loop seconds."""
    changes = {at for helper in plan.helpers for at in (helper.starts_at, helper.proves_from, helper.dies_at)}
    end = plan.round_seconds - plan.block_seconds
    done_times = [at + plan.proof_seconds for at in due_times]  # at the earliest
    events = [(at, 0) for at in changes if at < end] + [(at, 1) for at in done_times if at < end] + [(end, 0)]
    now = pending = revealed = finished_at = 0.0
    for at, arrived in sorted(events):
        rate = plan.reveal_rate(now)
        proven = min(pending, (at - now) * rate)
        if proven:
            finished_at = now + proven / rate
        revealed, pending, now = revealed + proven, pending - proven + arrived, at
    return IdealRun(round(revealed), finished_at)


def draw_backlog(shares: int, rng: random.Random) -> tuple[FleetVote, ...]:
    """Return votes whose shares all arrive, immediately due, before any prover is ready."""
    times = sorted(BACKLOG_STARTS_AT + rng.random() * BACKLOG_ARRIVAL_SECONDS for _ in range(shares))
    rng.shuffle(times)
    return tuple(
        FleetVote(1.0, tuple((at, None) for at in times[first : first + SHARE_COUNT]))
        for first in range(0, shares, SHARE_COUNT)
    )


def draw_round(
    voters: int, proposals: int, end: int, rng: random.Random, *, deadline_fraction: float
) -> tuple[FleetVote, ...]:
    """Return the votes of a round from loop second 0 to `end`, with due times by the wallets' rule.

    Args:
        voters: number of voters; each votes on every proposal at once.
        deadline_fraction: fraction of the voters that vote inside the last-moment window; the others vote at any time
            of the round.
    """
    return tuple(_draw_votes(voters, proposals, end, rng, deadline_fraction))


def _draw_votes(
    voters: int, proposals: int, end: int, rng: random.Random, deadline_fraction: float
) -> Iterator[FleetVote]:
    for voter in range(voters):
        kind = Distribution.DEADLINE if voter < voters * deadline_fraction else Distribution.WALLET
        at = max(ROUND_STARTS_AT, choose_vote_time(kind, 0, end, rng))
        for _ in range(proposals):
            times = [choose_submit_at(int(at), 0, end, rng) or None for _ in range(SHARE_COUNT)]
            yield FleetVote(at, tuple((at, due) for due in times))


def select_end_of_round(votes: Sequence[FleetVote], end: int, seconds: int) -> tuple[tuple[FleetVote, ...], int]:
    """Return the votes of the last seconds of a round, with times from the beginning of that part, and its length.

    Raises:
        ValueError: the part is not inside the last-moment window. Only there all shares are due on arrival.
    """
    start = end - seconds
    if seconds <= 0 or start < last_moment_start(0, end):
        raise ValueError("--last-minutes must be inside the last-moment window of the round")
    return tuple(
        FleetVote(vote.cast_at - start, tuple((at - start, None) for at, _ in vote.posts))
        for vote in votes
        if vote.cast_at >= start + ROUND_STARTS_AT
    ), seconds


def choose_helpers(helpers: int, rng: random.Random, *, per_share: int | None = None) -> list[tuple[int, ...]]:
    """Choose the helpers (0 to `helpers` - 1) of each of a vote's 16 shares, at random.

    Each share gets `per_share` helpers, by default `helpers_per_share`. A helper with `MAX_SHARES_OF_VOTE` shares is
    chosen only if too few others are left.
    """
    count, held = per_share or helpers_per_share(helpers), [0] * helpers
    chosen = []
    for _ in range(SHARE_COUNT):
        order = rng.sample(range(helpers), helpers)
        order.sort(key=lambda helper: held[helper] >= MAX_SHARES_OF_VOTE)  # stable, so the order remains random
        chosen.append(tuple(order[:count]))
        for helper in order[:count]:
            held[helper] += 1
    return chosen


def choose_submit_at(voted_at: int, start: int, end: int, rng: random.Random) -> int:
    """Choose a share's `submit_at`, as the wallet of a vote that was cast at `voted_at`. Times are in Unix seconds.

    Returns 0 (due on arrival) in the last-moment window, else a time before it, at most 100 h after the vote.
    """
    latest = min(last_moment_start(start, end), voted_at + MAX_WAIT_SECONDS)
    return rng.randrange(voted_at, latest) if voted_at < latest else 0


def choose_vote_time(distribution: Distribution, start: int, end: int, rng: random.Random) -> float:
    """Choose the Unix time at which a voter votes."""
    first = last_moment_start(start, end) if distribution is Distribution.DEADLINE else start
    return rng.uniform(first, last_vote_time(start, end))
