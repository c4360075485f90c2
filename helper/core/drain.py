"""When the shares of all rounds are revealed at a given rate. Pure.

Two limits apply: the rate of the provers, and the number of reveals that the chain includes in a block. Due shares of
the round that ends first are revealed first, and the shares left at the end of a round are not revealed any more. The
model is a fluid one: shares arrive in groups and are revealed continuously.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

MAX_REVEALS_PER_BLOCK: Final = 256
"""Reveals that newer chains include in one block (protocol)."""
MAX_BLOCK_SECONDS: Final = 6.0
"""Seconds between two blocks if not measured: the longest interval of the chain."""
_MINUTE_SECONDS: Final = 60.0
_LATER_GROUPS: Final = 60
"""Maximum number of groups for the shares whose due time is not known to the minute."""
_NEGLIGIBLE: Final = 1e-6
"""Number of shares up to which a remainder is a rounding error."""


@dataclass(frozen=True, slots=True)
class ProofRate:
    """Rate at which shares can be revealed.

    Attributes:
        seconds_per_proof: of one prover; None if not measured.
        slots: number of provers.
        block_seconds: interval between two blocks.
    """

    seconds_per_proof: float | None
    slots: int
    block_seconds: float = MAX_BLOCK_SECONDS

    @property
    def chain_per_second(self) -> float:
        """Reveals per second that the chain includes, of all helpers together."""
        return MAX_REVEALS_PER_BLOCK / max(self.block_seconds, 0.001)

    @property
    def provers_per_second(self) -> float:
        """Proofs per second of all provers; infinite if the time of a proof is not measured."""
        if self.seconds_per_proof is None:
            return math.inf
        return max(1, self.slots) / max(self.seconds_per_proof, 0.001)

    @property
    def per_second(self) -> float:
        """Reveals per second."""
        return min(self.chain_per_second, self.provers_per_second)


DueGroup = tuple[float, float]
"""Time in Unix seconds, and the number of shares that become due then."""


@dataclass(frozen=True, slots=True)
class RoundWork:
    """Shares of a round that are not proven yet: its `vote_end_time` in Unix seconds, and the shares by due time."""

    end: float
    due: Sequence[DueGroup]

    @property
    def shares(self) -> float:
        """Number of shares."""
        return sum(count for _, count in self.due)


def forecast_work(end: float, unproven: int, minutes: Sequence[int], later: int, now: float) -> RoundWork:
    """Return the work of a round from the forecast of its due times (`helper.store.models.DueForecast`).

    Shares that are being proven are due now. So are, as an upper limit of the work, those due after the end: their last
    attempt has failed, and faster proofs do not help them.

    Args:
        end: the round's `vote_end_time`, Unix seconds.
        unproven: all shares that are not proven yet, including those being proven.
        minutes: number of waiting shares due in each of the next minutes; the first includes overdue shares.
        later: number of shares due after these minutes. They are spread evenly until the end of the round.
        now: Unix seconds.
    """
    starts = [now + minute * _MINUTE_SECONDS for minute in range(len(minutes) + 1)]
    by_minute = [(time, count) for time, count in zip(starts, minutes, strict=False) if count and time < end]
    later = later if starts[-1] < end else 0
    at_once = unproven - sum(count for _, count in by_minute) - later
    due: list[DueGroup] = [(now, max(0, at_once)), *by_minute]
    if later:
        groups = max(1, min(_LATER_GROUPS, int((end - starts[-1]) / _MINUTE_SECONDS)))
        step = (end - starts[-1]) / groups
        due += [(starts[-1] + number * step, later / groups) for number in range(groups)]
    return RoundWork(end, due)


@dataclass(frozen=True, slots=True)
class DrainResult:
    """When a round's shares are revealed.

    Attributes:
        work_seconds: time to prove all shares of the round, and of the rounds that end before it.
        done_at: Unix time at which the last share is revealed. If shares are left at the end of the round, the time
            at which they would be, with no other work after the end.
        unfinished: number of shares left at the end of the round.
        slack_seconds: longest pause, beginning now, after which all shares are still revealed before the end. If the
            result is negative, it is too late: minus the seconds that are missing.
        max_backlog: highest number of shares that still wait when the next ones become due.
    """

    work_seconds: float
    done_at: float
    unfinished: float
    slack_seconds: float
    max_backlog: float


@dataclass(slots=True)
class _Progress:
    """Simulated state of a round."""

    work: RoundWork
    left: float = 0.0
    done_at: float = 0.0
    unfinished: float = 0.0
    max_backlog: float = 0.0


def simulate_drain(rounds: Sequence[RoundWork], per_second: float, now: float) -> list[DrainResult]:
    """Simulate how the shares of all rounds are revealed, and return a result for each round, in the given order.

    Args:
        rounds: the shares that are not proven yet. Groups in the past are due now.
        per_second: reveals per second, above 0 (`ProofRate.per_second`).
        now: Unix seconds.
    """
    progress = [_Progress(work, done_at=now) for work in rounds]
    by_end = sorted(progress, key=lambda item: item.work.end)
    arrivals: dict[float, list[tuple[_Progress, float]]] = {now: []}
    for item in progress:
        for time, count in item.work.due:
            arrivals.setdefault(max(now, time), []).append((item, count))
        arrivals.setdefault(max(now, item.work.end), [])
    for begin, finish in pairwise([*sorted(arrivals), float("inf")]):
        for item, count in arrivals[begin]:
            item.max_backlog = max(item.max_backlog, item.left)
            item.left += count
        _reveal(by_end, begin, finish, per_second)
    results: dict[int, DrainResult] = {}
    shares_before = 0.0
    for item in by_end:
        shares = item.work.shares + (shares_before if item.work.end > now else 0)
        slack = item.work.end - now - shares / per_second
        if item.unfinished:
            slack = min(slack, item.work.end - item.done_at)
        results[id(item)] = DrainResult(shares / per_second, item.done_at, item.unfinished, slack, item.max_backlog)
        shares_before += item.work.shares if item.work.end > now else 0
    return [results[id(item)] for item in progress]


def find_slots(rounds: Sequence[RoundWork], rate: ProofRate, now: float) -> int | None:
    """Return the smallest number of provers with which all rounds that have not ended are finished before their ends.

    Returns None if no number of provers is enough: the chain does not include more reveals per block, the shares become
    due too late, or the time of a proof is not known.
    """
    rounds = [work for work in rounds if work.end > now]
    if rate.seconds_per_proof is None:
        return None

    def is_enough(slots: int) -> bool:
        per_second = replace(rate, slots=slots).per_second
        return all(result.slack_seconds >= 0 for result in simulate_drain(rounds, per_second, now))

    enough = max(1, math.ceil(rate.chain_per_second * rate.seconds_per_proof))
    return bisect_left(range(1, enough), x=True, key=is_enough) + 1 if is_enough(enough) else None


def _reveal(by_end: Sequence[_Progress], begin: float, finish: float, per_second: float) -> None:
    """Reveal due shares from `begin` to `finish`, those of the round that ends first first."""
    time = begin
    for item in by_end:
        if not item.left:
            continue
        if item.work.end <= begin:
            if item.left > _NEGLIGIBLE:
                item.unfinished += item.left
                item.done_at = begin + item.unfinished / per_second
            item.left = 0.0
        elif time < finish:
            revealed = min(item.left, (finish - time) * per_second)
            item.left -= revealed
            time += revealed / per_second
            item.done_at = time
