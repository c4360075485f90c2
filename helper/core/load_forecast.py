"""How wallets spread shares, when a helper has revealed them, and what a round therefore takes. Pure.

The rules of wallets are those of the wallet library `zcash_voting` 5.3.0: the values of `config` and of the share
delivery. `fraction_due` is the expected value over many voters.

Two limits apply to reveals: the rate of the provers, and the number of reveals that the chain includes in a block. Due
shares of the round that ends first are revealed first, and the shares left at the end of a round are not revealed any
more. The model is a fluid one: shares arrive in groups and are revealed continuously.

The plan of a round counts on no other helper: this helper proves every share that wallets give it. `together_*` is the
result if all helpers have the same cores and share their backlogs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final, Literal

from helper.core.json_records import fact
from helper.core.share import SHARE_COUNT

MAX_HELPERS_PER_SHARE: Final = 10
MAX_WAIT_SECONDS: Final = 100 * 3600
"""Maximum seconds between a vote and the due time of its shares."""
MAX_WINDOW_SECONDS: Final = 6 * 3600
"""Maximum seconds of the last-moment window, otherwise 40 % of the round."""
CLOSING_SECONDS: Final = 60
"""Seconds before the end of a round, at most a tenth of it, in which no vote is assumed to be cast.

A vote is first included in a block, and its shares are revealed in another one."""


class Distribution(StrEnum):
    """When the shares of a round become due.

    Attributes:
        UNIFORM: evenly over the round.
        WALLET: voters vote evenly over the round, and wallets choose the due times of their shares.
        DEADLINE: all voters vote evenly within the last-moment window, so each share is due on arrival.
    """

    UNIFORM = "uniform"
    WALLET = "wallet"
    DEADLINE = "deadline"


def helpers_per_share(helpers: int) -> int:
    """Return the number of helpers that get each share: half of all, rounded up, at most 10."""
    return min(-(-helpers // 2), MAX_HELPERS_PER_SHARE)


def last_moment_start(start: int, end: int) -> int:
    """Return the beginning of the last-moment window of a round. Times are in Unix seconds.

    The window is 40 % of the round, rounded up, and at most 6 h. Shares of votes within it are due at once.
    """
    return end - min(-(-(end - start) * 2 // 5), MAX_WINDOW_SECONDS)


def last_vote_time(start: int, end: int) -> float:
    """Return the Unix time of the last vote that is assumed for a round."""
    return end - min(CLOSING_SECONDS, (end - start) / 10)


def fraction_due(distribution: Distribution, time: float, start: int, end: int, *, at_once: float = 0.0) -> float:
    """Return the expected fraction of a round's shares that are due by a time. Times are in Unix seconds.

    For `WALLET`, a share of a vote at `t` is due by `x` with the probability `(x - t) / min(w - t, 100 h)`, where `w`
    is the beginning of the last-moment window. The result is the mean over all votes, in closed form.

    Args:
        end: its `vote_end_time`, after `start`.
        at_once: fraction of the shares that wallets send without a delay: the first one of a voter and round.
    """
    last, window = last_vote_time(start, end), last_moment_start(start, end)
    first = window if distribution is Distribution.DEADLINE else start
    voted = min(1.0, max(0.0, (time - first) / (last - first)))
    if distribution is not Distribution.WALLET or time >= window or time <= start:
        return voted
    due = _integrate_due(time, start, window) / (last - start)
    return at_once * voted + (1 - at_once) * due


def _integrate_due(time: float, start: int, window: int) -> float:
    """Integrate the probability that a share is due by `time` over the votes cast from `start` to `time`."""
    capped = window - MAX_WAIT_SECONDS  # votes before it choose a time within 100 h, later ones until the window
    total = 0.0
    if start < capped:
        certain = min(max(time - MAX_WAIT_SECONDS, start), capped)
        total += certain - start
        upper = min(time, capped)
        total += ((time - certain) ** 2 - (time - upper) ** 2) / (2 * MAX_WAIT_SECONDS)
    if time > capped:
        lower = max(start, capped)
        total += (time - lower) - (window - time) * math.log((window - lower) / (window - time))
    return total


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


Outlook = Literal["enough", "tight", "short"]
"""Whether there is enough time to reveal the shares of a round; tight: enough only without longer interruptions."""
TIGHT_SLACK_FRACTION: Final = 0.2
"""The time is tight if the slack is less than this fraction of the time left."""


@dataclass(slots=True)
class DrainResult:
    """When a round's shares are revealed.

    Attributes:
        done_at: Unix time at which the last share is revealed. If shares are left at the end of the round, the time
            at which they would be, with no other work after the end.
        waiting: number of due shares that are not revealed yet, during the simulation.
        work_seconds: time to prove all shares of the round, and of the rounds that end before it.
        unfinished: number of shares left at the end of the round.
        slack_seconds: longest pause, beginning now, after which all shares are still revealed before the end. If the
            result is negative, it is too late: minus the seconds that are missing.
        max_backlog: highest number of shares that still wait when the next ones become due.
    """

    work: RoundWork
    done_at: float
    waiting: float = 0.0
    work_seconds: float = 0.0
    unfinished: float = 0.0
    slack_seconds: float = 0.0
    max_backlog: float = 0.0

    def outlook(self, seconds_left: float) -> Outlook:
        """Whether the shares are revealed before the end of the round, in `seconds_left`."""
        if self.slack_seconds < 0:
            return "short"
        return "tight" if self.slack_seconds < TIGHT_SLACK_FRACTION * seconds_left else "enough"


def simulate_drain(rounds: Sequence[RoundWork], per_second: float, now: float) -> list[DrainResult]:
    """Simulate how the shares of all rounds are revealed, and return a result for each round, in the given order.

    Args:
        rounds: the shares that are not proven yet. Groups in the past are due now.
        per_second: reveals per second, above 0 (`ProofRate.per_second`).
        now: Unix seconds.
    """
    results = [DrainResult(work, done_at=now) for work in rounds]
    by_end = sorted(results, key=lambda result: result.work.end)
    arrivals: dict[float, list[tuple[DrainResult, float]]] = {now: []}
    for result in results:
        for time, count in result.work.due:
            arrivals.setdefault(max(now, time), []).append((result, count))
        arrivals.setdefault(max(now, result.work.end), [])
    for begin, finish in pairwise([*sorted(arrivals), float("inf")]):
        for result, count in arrivals[begin]:
            result.max_backlog = max(result.max_backlog, result.waiting)
            result.waiting += count
        _reveal(by_end, begin, finish, per_second)
    shares_before = 0.0
    for result in by_end:
        end, shares = result.work.end, result.work.shares
        result.work_seconds = (shares + (shares_before if end > now else 0)) / per_second
        result.slack_seconds = end - now - result.work_seconds
        if result.unfinished:
            result.slack_seconds = min(result.slack_seconds, end - result.done_at)
        shares_before += shares if end > now else 0
    return results


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


def _reveal(by_end: Sequence[DrainResult], begin: float, finish: float, per_second: float) -> None:
    """Reveal due shares from `begin` to `finish`, those of the round that ends first first."""
    time = begin
    for result in by_end:
        if not result.waiting:
            continue
        if result.work.end <= begin:
            if result.waiting > _NEGLIGIBLE:
                result.unfinished += result.waiting
                result.done_at = begin + result.unfinished / per_second
            result.waiting = 0.0
        elif time < finish:
            revealed = min(result.waiting, (finish - time) * per_second)
            result.waiting -= revealed
            time += revealed / per_second
            result.done_at = time


REFERENCE_PROOF_SECONDS: Final = {"k10": 0.42, "k11": 2.06}
"""Seconds per proof and core, by circuit: measured by `make bench` with a prover on each of two cores."""
SHARED_PROOFS_PER_REVEAL: Final = 1.2
"""Upper limit of the proofs per reveal of helpers that each work on a common backlog in their own order."""
WAITING_SHARE_BYTES: Final = 925
"""Bytes of the database per waiting share: measured with a million. An encrypted one takes a fifth more."""
SPENT_NULLIFIER_BYTES: Final = 44
"""Bytes of the database per nullifier spent on the chain: measured with a million."""
VOTE_BYTES: Final = 128
"""Bytes per vote in the tree, on disk and in memory: two leaves with as many inner nodes, 32 bytes each."""
WAL_BYTES: Final = 64 << 20
"""Largest write-ahead log between two checkpoints: 2,000 changes of up to 31 kB."""
SERVICE_BYTES: Final = 400 << 20
"""Bytes of memory of the service itself, with all connections and bodies at their limits."""
PROVER_BYTES: Final = 128 << 20
"""Bytes of memory of one prover with the keys of both circuits; 65 MB were measured for one circuit."""
_STEPS: Final = 2000
"""Steps of the due times before the last-moment window, and within it."""


@dataclass(frozen=True, slots=True)
class RoundSize:
    """Size of a round.

    Attributes:
        proposals: number of proposals, all of which each voter votes on.
        helpers: number of helpers that wallets know.
        bundles: number of bundles of notes per voter. Each casts its own vote on each proposal.
        seconds: from the creation of the round to its `vote_end_time`.
        distribution: when the shares become due.
    """

    voters: int
    proposals: int
    helpers: int
    bundles: int
    seconds: int
    distribution: Distribution

    @property
    def votes(self) -> int:
        """Number of votes."""
        return self.voters * self.proposals * self.bundles

    @property
    def reveals(self) -> int:
        """Number of reveals in the round, of all helpers."""
        return self.votes * SHARE_COUNT

    @property
    def shares(self) -> int:
        """Expected number of shares that each helper gets, rounded up."""
        return -(-self.reveals * helpers_per_share(self.helpers) // self.helpers)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Result of a plan. Times are in seconds since the beginning of the round."""

    shares: int = fact("Shares that this helper gets.")
    proofs: int = fact("Proofs that it makes.")
    reveals: int = fact("Reveals of the round, by all helpers.")
    proofs_per_second: float = fact("Rate of this helper.")
    cores_needed: int | None = fact(
        "Smallest number of cores with which this helper has proven its shares in time, whether or not the chain "
        "includes them; null if no number is enough, because the round is too short."
    )
    done_seconds: float = fact("When the last of its shares is confirmed, if nothing else delays it.")
    done_before_end: bool = fact("Whether that is before the end.")
    slack_seconds: float = fact("From then to the end of the round; negative if it is later.")
    unfinished: int = fact("Shares that are not revealed at the end.")
    max_backlog: int = fact("Highest number of shares that are due and wait for a prover.")
    limit: str | None = fact(
        'Why shares are late at the end: "chain" if it includes too few reveals per block, else "provers"; null '
        "if no share is."
    )
    together_slack_seconds: float = fact("`slack_seconds` if all helpers have the same cores and share their backlogs.")
    together_done_before_end: bool = fact("Whether that is not negative.")
    disk_bytes: int = fact("For the database, with all shares waiting.")
    memory_bytes: int = fact("For the service and one prover per core.")


def make_plan(size: RoundSize, rate: ProofRate) -> RoundPlan:
    """Plan a round.

    A share counts as revealed one proof and one block after its turn, because it is confirmed by the next block.

    Args:
        rate: of this helper, with one prover per core. `seconds_per_proof` is not None.
    """
    latency = (rate.seconds_per_proof or 0.0) + rate.block_seconds
    held, all_shares = _due_work(size, size.shares, latency), _due_work(size, size.reveals, latency)
    (proven,) = simulate_drain([held], rate.per_second, 0.0)
    (included,) = simulate_drain([all_shares], rate.chain_per_second, 0.0)
    shared = replace(rate, slots=size.helpers * rate.slots).provers_per_second / SHARED_PROOFS_PER_REVEAL
    (together,) = simulate_drain([all_shares], min(rate.chain_per_second, shared), 0.0)
    done = max(proven.done_at, included.done_at) + latency
    together_slack = size.seconds - together.done_at - latency
    return RoundPlan(
        shares=size.shares,
        proofs=size.shares,
        reveals=size.reveals,
        proofs_per_second=rate.per_second,
        cores_needed=find_slots([held], replace(rate, block_seconds=0.0), 0.0),
        done_seconds=done,
        done_before_end=done <= size.seconds,
        slack_seconds=size.seconds - done,
        unfinished=math.ceil(proven.unfinished),
        max_backlog=round(proven.max_backlog),
        limit="chain" if included.unfinished else "provers" if proven.unfinished else None,
        together_slack_seconds=together_slack,
        together_done_before_end=together_slack >= 0,
        disk_bytes=size.shares * WAITING_SHARE_BYTES
        + size.reveals * SPENT_NULLIFIER_BYTES
        + size.votes * VOTE_BYTES
        + WAL_BYTES,
        memory_bytes=SERVICE_BYTES + rate.slots * PROVER_BYTES + size.votes * VOTE_BYTES,
    )


def _due_work(size: RoundSize, shares: int, latency: float) -> RoundWork:
    """Return these shares of the round by due time. They must be proven `latency` seconds before the end."""
    window, last = last_moment_start(0, size.seconds), last_vote_time(0, size.seconds)
    at_once = 1 / (size.proposals * size.bundles * SHARE_COUNT)
    edges = [window * step / _STEPS for step in range(_STEPS)]
    edges += [window + (last - window) * step / _STEPS for step in range(_STEPS + 1)]
    due = [fraction_due(size.distribution, edge, 0, size.seconds, at_once=at_once) for edge in edges]
    groups = [
        ((begin + end) / 2, shares * (after - before))
        for (begin, end), (before, after) in zip(pairwise(edges), pairwise(due), strict=True)
        if after > before
    ]
    return RoundWork(size.seconds - latency, groups)
