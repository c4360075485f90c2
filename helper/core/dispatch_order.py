"""Order in which due shares are proven, within a round and across rounds. Pure.

Without a backlog, shares are proven by due time. In a backlog every helper of a round would then prove the same shares
at the same time, because a wallet gives each share to several helpers. Therefore each helper proves its overdue shares
in an order of its own: by `rank`, a keyed hash whose key never leaves the database.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

OVERDUE_SECONDS: Final = 2.0
"""Default lateness of a round's oldest share, in seconds, from which the round is overdue."""
SHARES_PER_PROVER: Final = 8
"""Default number of due shares per prover from which they are a backlog.

Fewer are proven within seconds. By due time none of them waits longer than that; in another order one could be
overtaken until the delay has passed, for example after a node has stopped responding.
"""
RESERVE_SECONDS: Final = 30.0
"""Seconds of slack below which a round is at risk. A share that fails later than this before the end is not retried."""
RESERVE_FRACTION: Final = 0.1
"""Fraction of the remaining work that is added to the reserve, because the measured pace varies."""


class DueShare(NamedTuple):
    """A share that is due.

    Attributes:
        due_ms: Unix milliseconds.
        rank: position in this helper's own order, see `helper.core.schedule.rank`.
        id: identifies the share in the store.
    """

    due_ms: int
    rank: int
    id: int


@dataclass(frozen=True, slots=True)
class BacklogLimits:
    """Limits from which due shares are a backlog.

    Attributes:
        due_shares: there are more due shares than this.
        overdue_seconds: the oldest of them is later than this.
    """

    due_shares: int
    overdue_seconds: float = OVERDUE_SECONDS


@dataclass(frozen=True, slots=True)
class ProofPace:
    """Measured speed of this helper.

    Attributes:
        proof_seconds: mean duration of a proof.
        fastest_seconds: duration of the fastest recent proof, 0 if unknown.
        shares_per_second: shares that leave the queue per second while all provers work.
    """

    proof_seconds: float
    fastest_seconds: float
    shares_per_second: float


@dataclass(slots=True)
class RoundQueue:
    """The due shares of a round.

    Attributes:
        round_id: 32 bytes.
        end: the round's end, in Unix seconds of the chain.
        waiting: shares of the round that are not begun, due or not.
        oldest_due_ms: due time of the oldest due share, in Unix milliseconds.
        shares: the first due shares, in the order of `share_order`.
    """

    round_id: bytes
    end: float
    waiting: int
    oldest_due_ms: int
    shares: deque[DueShare]


class Selection(NamedTuple):
    """A selected share.

    Attributes:
        share: the share.
        has_priority: whether it is proven before selected shares that are not begun and do not have priority.
    """

    share: DueShare
    has_priority: bool


def share_order(share: DueShare, *, in_backlog: bool) -> tuple[int, ...]:
    """Return the sort key of a due share within its round: the own order in a backlog, else by due time."""
    return (share.rank,) if in_backlog else (share.due_ms, share.rank)


def is_overdue(oldest_due_ms: int, now: float, limits: BacklogLimits) -> bool:
    """Return whether a round is overdue. `now` is in Unix seconds."""
    return now - oldest_due_ms / 1000 > limits.overdue_seconds


def is_backlog(oldest_due_ms: int, due_shares: int, now: float, limits: BacklogLimits) -> bool:
    """Return whether due shares are a backlog.

    Args:
        oldest_due_ms: due time of the oldest, in Unix milliseconds.
        due_shares: their number; it may be capped above `limits.due_shares`.
        now: Unix seconds.
        limits: from which they are one.
    """
    return due_shares > limits.due_shares and is_overdue(oldest_due_ms, now, limits)


def work_seconds(waiting: int, pace: ProofPace) -> float:
    """Return the seconds that all provers need for this number of shares."""
    return waiting / pace.shares_per_second + pace.proof_seconds if waiting else 0.0


def slack_seconds(end: float, waiting: int, chain_time: float, pace: ProofPace) -> float:
    """Return the seconds that remain at the end of a round if all provers work on it only.

    Negative if the round cannot be finished in time.

    Args:
        end: the round's end, in Unix seconds.
        waiting: its shares that are not begun, due or not.
        chain_time: time of the newest block, in Unix seconds.
        pace: the measured pace.
    """
    return end - chain_time - work_seconds(waiting, pace)


def is_at_risk(end: float, waiting: int, chain_time: float, pace: ProofPace) -> bool:
    """Return whether a round would miss its end if others went first, but can still be met."""
    reserve = RESERVE_SECONDS + RESERVE_FRACTION * work_seconds(waiting, pace)
    return 0 <= slack_seconds(end, waiting, chain_time, pace) < reserve


def can_finish_proof(end: float, chain_time: float, fastest_seconds: float) -> bool:
    """Return whether a proof that begins now can be done before the end of its round.

    The fastest recent proof is assumed, and the time of the newest block, which is never later than the block that
    could contain the reveal. Only a proof that is certainly too late is not begun.
    """
    return chain_time + fastest_seconds < end


@dataclass(slots=True)
class RoundTurns:
    """Selects the next share across rounds; remembers when each round had its turn."""

    _turn: int = 0
    _last_turns: dict[bytes, int] = field(default_factory=dict)

    def select(
        self,
        queues: Iterable[RoundQueue],
        *,
        limit: int,
        first_limit: int,
        now: float,
        chain_time: float,
        pace: ProofPace,
        limits: BacklogLimits,
    ) -> list[Selection]:
        """Select shares, and remove them from `queues`.

        1. Rounds at risk have priority, the earliest end first, then the least slack.
        2. Rounds that are not overdue follow, by due time.
        3. The other rounds take turns.

        Args:
            queues: the rounds with due shares.
            limit: maximum number of shares.
            first_limit: maximum number if those above `limit` have priority; not below `limit`.
            now: Unix seconds.
            chain_time: time of the newest block, in Unix seconds.
            pace: the measured pace.
            limits: from which lateness a round is overdue.
        """
        selected: list[Selection] = []
        ready = [queue for queue in queues if queue.shares]
        self._last_turns = {
            queue.round_id: self._last_turns[queue.round_id] for queue in ready if queue.round_id in self._last_turns
        }
        while ready and len(selected) < first_limit:
            queue, has_priority = self._next_queue(ready, now, chain_time, pace, limits)
            if len(selected) >= limit and not has_priority:
                break
            selected.append(Selection(queue.shares.popleft(), has_priority))
            self._turn += 1
            self._last_turns[queue.round_id] = self._turn
            if not queue.shares:
                ready.remove(queue)
        return selected

    def _next_queue(
        self, ready: Sequence[RoundQueue], now: float, chain_time: float, pace: ProofPace, limits: BacklogLimits
    ) -> tuple[RoundQueue, bool]:
        """Return the round whose share is next, and whether that share has priority."""
        at_risk = [queue for queue in ready if is_at_risk(queue.end, queue.waiting, chain_time, pace)]
        if at_risk:
            return min(at_risk, key=lambda queue: (queue.end, -queue.waiting)), True
        on_time = [queue for queue in ready if not is_overdue(queue.oldest_due_ms, now, limits)]
        if on_time:
            return min(on_time, key=lambda queue: share_order(queue.shares[0], in_backlog=False)), True
        return min(ready, key=lambda queue: (self._last_turns.get(queue.round_id, 0), queue.oldest_due_ms)), False
