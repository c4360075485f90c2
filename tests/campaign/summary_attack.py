"""Recovers the choices of votes from public data: the chain, and the `queue-summary` of each helper.

The attacker knows when each vote was cast, to which helper its shares went, and the time and choice of each reveal. For
each vote it polls the summary just before and after the shares arrive. If the buckets differ, it chooses the option
whose reveals fit the new shares of each bucket. Otherwise it compares, hour by hour, how many shares of this helper
became due beyond the expected number with the difference of the reveals for the two options.

The votes are simulated, with wallets that give all shares to one helper: a share that several helpers chosen at random
have says less about the others. The summaries are those of the product, or exact counts, which the attack must recover.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from types import SimpleNamespace
from typing import Any, cast

from devnet.ballot import SHARE_COUNT
from helper.core.share import ShareState
from helper.observability.queue_summary import QueueSummaries, QueueSummary, bucket_seconds, build_summary
from helper.store.models import DueBucket
from tests.support.clock import FakeClock

ROUND = b"\xab" * 32
START = 1_790_000_000 - 1_790_000_000 % 3600 + 600
HOURS = 100
END = START + HOURS * 3600
WINDOW_START = END - 6 * 3600
"""Wallets choose due times before this."""
LAST_VOTE = START + 85 * 3600


@dataclass(frozen=True, slots=True)
class SimulatedVote:
    """A vote for option 0 or 1, whose shares are all at one helper."""

    cast_at: float
    choice: int
    helper: int
    due_times: tuple[float, ...]


class SimulatedQueue:
    """The queue of a helper that reveals each share at its time."""

    def __init__(self, votes: Sequence[SimulatedVote], clock: FakeClock) -> None:
        self.clock = clock
        self.shares = sorted((vote.cast_at, due) for vote in votes for due in vote.due_times)

    def arrived(self, now: float) -> list[tuple[float, float]]:
        return self.shares[: bisect.bisect_right(self.shares, (now, math.inf))]

    async def count_shares(self) -> dict[bytes, dict[ShareState, int]]:
        now = self.clock.now()
        return {ROUND: {ShareState.CONFIRMED: sum(due <= now for _, due in self.arrived(now))}}

    async def count_by_due_bucket(self, _round: bytes, *, start: int, width: int, now: float) -> list[DueBucket]:
        buckets = Counter(int((due - start) // width) for _, due in self.arrived(now) if due > now)
        return [
            DueBucket(ShareState.WAITING, is_due=False, index=index, count=count) for index, count in buckets.items()
        ]


Publisher = Callable[[SimulatedQueue, random.Random], "Summaries"]


class Summaries:
    """The summary of one helper, as the product publishes it."""

    def __init__(self, queue: SimulatedQueue, rng: random.Random) -> None:
        known = SimpleNamespace(round_id=ROUND, vote_end_time=END, created_at_height=1)
        rounds = SimpleNamespace(
            get={ROUND: known}.get, is_agreed=lambda round_id: round_id == ROUND, agreed_rounds=lambda: [known]
        )

        async def read_block_time(_height: int) -> float:
            return float(START)

        self.queue = queue
        self._summaries = QueueSummaries(
            cast(Any, queue), cast(Any, rounds), read_block_time, clock=queue.clock, rng=rng
        )

    async def read(self) -> QueueSummary:
        await self._summaries.refresh()
        summary = self._summaries.get(ROUND)
        assert summary is not None
        return summary


class ExactSummaries(Summaries):
    """Exact counts by due time."""

    async def read(self) -> QueueSummary:
        now = int(self.queue.clock.now())
        shares = await self.queue.count_by_due_bucket(ROUND, start=START, width=bucket_seconds(END - START), now=now)
        counts = {(group.index, "pending_future"): group.count for group in shares}
        return build_summary(ROUND, created=START, end=END, now=now, counted_at=now, counts=cast(Any, counts))


class ExactSums(Summaries):
    """The exact sum of all waiting shares."""

    async def read(self) -> QueueSummary:
        now = int(self.queue.clock.now())
        count = sum(due > now for _, due in self.queue.arrived(now))
        counts = {(HOURS - 1, "pending_future"): count}
        return build_summary(ROUND, created=START, end=END, now=now, counted_at=now, counts=cast(Any, counts))


def recovered_fraction(publish: Publisher, rng: random.Random, *, rounds: int, voters: int, helpers: int) -> float:
    """Fraction of votes whose choice the attack recovers; 0.5 is chance."""
    hits = sum(asyncio.run(_attack_round(publish, rng, voters, helpers)) for _ in range(rounds))
    return hits / (rounds * voters)


async def _attack_round(publish: Publisher, rng: random.Random, voters: int, helpers: int) -> int:
    votes = [_simulate_vote(rng, helpers) for _ in range(voters)]
    clock = FakeClock(START)
    published = [
        publish(SimulatedQueue([vote for vote in votes if vote.helper == helper], clock), rng)
        for helper in range(helpers)
    ]
    hours = [float(START + 3600 * hour) for hour in range(HOURS + 1)]
    polls = {(hour, helper) for hour in hours for helper in range(helpers)}
    polls |= {(vote.cast_at + offset, vote.helper) for vote in votes for offset in (-1, 61)}
    seen: dict[tuple[float, int], QueueSummary] = {}
    for at, helper in sorted(polls):
        clock.advance(at - clock.now())
        seen[at, helper] = await published[helper].read()
    reveals = [sorted(due for vote in votes if vote.choice == choice for due in vote.due_times) for choice in (0, 1)]
    by_hour = [[*map(bisect.bisect_left, repeat(times), hours)] for times in reveals]
    sums = [
        _excess_by_hour([vote for vote in votes if vote.helper == helper], [seen[hour, helper] for hour in hours])
        for helper in range(helpers)
    ]
    hits = 0
    for vote in votes:
        before, after = seen[vote.cast_at - 1, vote.helper], seen[vote.cast_at + 61, vote.helper]
        zero, one = (_bucket_score(before, after, vote.cast_at, times) for times in reveals)
        if zero == one:
            zero, one = 0.0, _sum_score(sums[vote.helper], bisect.bisect_left(hours, vote.cast_at), by_hour)
        hits += vote.choice == (one > zero if zero != one else rng.randrange(2))
    return hits


def _simulate_vote(rng: random.Random, helpers: int) -> SimulatedVote:
    cast_at = rng.uniform(START, LAST_VOTE)
    due_times = tuple(rng.uniform(cast_at, WINDOW_START) for _ in range(SHARE_COUNT))
    return SimulatedVote(cast_at, rng.randrange(2), rng.randrange(helpers), due_times)


def _bucket_score(before: QueueSummary, after: QueueSummary, cast_at: float, reveals: Sequence[float]) -> float:
    """Logarithm of how well the reveals of an option fit the shares that are new in each bucket."""
    score = 0.0
    for old, new in zip(before["buckets"], after["buckets"], strict=True):
        added = new["total"] - old["total"]
        if added > 0:
            first = bisect.bisect_left(reveals, max(cast_at, new["start"]))
            fitting = bisect.bisect_left(reveals, new["end"]) - first
            score += sum(math.log(max(fitting - number, 1e-6)) for number in range(added))
    return score


def _excess_by_hour(votes: Sequence[SimulatedVote], summaries: Sequence[QueueSummary]) -> list[float]:
    """Shares of a helper that became due in each hour, beyond the expected number; 0 if nothing is published."""
    due = list[float]()
    for hour, summary in enumerate(summaries):
        now, waiting = START + 3600 * hour, summary["not_yet_due"]
        cast = [vote.cast_at for vote in votes if vote.cast_at <= now]
        expected = sum(SHARE_COUNT * min(1.0, (now - at) / (WINDOW_START - at)) for at in cast)
        due.append(SHARE_COUNT * len(cast) - waiting - expected if waiting else math.nan)
    return [0.0 if math.isnan(gained := after - before) else gained for before, after in pairwise(due)]


def _sum_score(excess: Sequence[float], first: int, by_hour: Sequence[Sequence[int]]) -> float:
    """Covariance of a helper's excess shares with the reveals for option 1, from an hour on."""
    zeros, ones = ([after - before for before, after in pairwise(times[first:])] for times in by_hour)
    fraction = sum(ones) / max(1, sum(zeros) + sum(ones))
    return sum(
        gained * (one - fraction * (zero + one)) for gained, zero, one in zip(excess[first:], zeros, ones, strict=True)
    )
