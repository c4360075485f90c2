"""Due times, retry delays, and the order in which due shares are proven. Pure.

Due times chosen by wallets are used exactly. Without a backlog, shares are proven by due time. In a backlog every
helper of a round would then prove the same shares at the same time, because a wallet gives each share to several
helpers. Therefore each helper proves its overdue shares in an order of its own: by `rank`, a keyed hash whose key never
leaves the database.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

MAX_RETRY_SECONDS: Final = 64
RANK_BITS: Final = 63
LONG_RETRY_SECONDS: Final = (60, 600, 3600, 21_600)
"""Delays of the retries after the quick ones; the last one repeats."""
MIN_SPACING_SECONDS: Final = 10
"""Minimum seconds between two attempts after the quick ones."""
LAST_MARGIN_SECONDS: Final = 30
"""Seconds before the end of a round after which a failed share is not tried again."""


def retry_delay(failures: int) -> int:
    """Return the seconds to wait after the `failures`-th failure (from 1): 2, 4, 8, 16, 32, then 64."""
    return int(min(2 ** min(failures, 63), MAX_RETRY_SECONDS))


def last_attempt_time(first_due: float, end: float, fraction: float) -> float:
    """Return the time of a share's last attempt, before the end of its round. Times are in Unix seconds.

    With `left = end - first_due`, it is `min(300, max(30, left / 8))` seconds before the end, and up to
    `min(600, left / 8)` seconds earlier, so that the last attempts of many shares do not coincide.

    Args:
        first_due: when the share was first due.
        end: the round's `vote_end_time`.
        fraction: 0 to 1, selects the time within that interval.
    """
    left = max(0.0, end - first_due)
    return end - min(300.0, max(LAST_MARGIN_SECONDS, left / 8)) - fraction * min(600.0, left / 8)


def retry_time(failures: int, now: float, *, quick_retries: int, last_attempt: float, end: float) -> float:
    """Return the time of the next attempt after the `failures`-th failure (from 1). Times are in Unix seconds.

    The first `quick_retries` delays are those of `retry_delay`, for faults that pass quickly. The delays after them are
    `LONG_RETRY_SECONDS`, but at most half the time to `last_attempt`. If that attempt fails too, the remaining ones
    approach `LAST_MARGIN_SECONDS` before the end in the same way. After that, the result is not before `end`.
    """
    delay: float = retry_delay(failures)
    if failures <= quick_retries:
        return now + delay
    delay = LONG_RETRY_SECONDS[min(failures - quick_retries, len(LONG_RETRY_SECONDS)) - 1]
    for last in (last_attempt, end - LAST_MARGIN_SECONDS):
        left = last - now
        if left >= MIN_SPACING_SECONDS:
            return last if left < 2 * MIN_SPACING_SECONDS else now + min(delay, left / 2)
    return max(end, now + MAX_RETRY_SECONDS)


def due_ms(submit_at: int, now: float) -> int:
    """Return the due time of a share in Unix milliseconds: `submit_at`, or `now` if `submit_at` is 0 or in the past.

    Shares that are due immediately get their arrival time, so they are processed in order of arrival.
    """
    now_ms = int(now * 1000)
    return max(submit_at * 1000, now_ms)


def rank_fraction(rank: int) -> float:
    """Return a rank as a number from 0 to 1."""
    return rank / (1 << RANK_BITS)


def rank(key: bytes, mac: bytes) -> int:
    """Return the position of a share in this helper's own order: 63 bits of a keyed hash.

    The order applies to overdue shares, and to those due in the same millisecond. The key is stored only in the
    database. The order reveals nothing about the order of arrival, and clients cannot influence it.

    Args:
        key: 16 to 64 bytes.
        mac: the HMAC that identifies the share in the store.
    """
    digest = _keyed_hash(key).copy()
    digest.update(mac)
    return int.from_bytes(digest.digest(), "big") >> (64 - RANK_BITS)


@lru_cache(maxsize=4)
def _keyed_hash(key: bytes) -> blake2b:
    """Return the keyed hash state; cached, because creating it is half the cost of `rank`."""
    return blake2b(digest_size=8, key=key, person=b"svote-order")


SHARES_PER_PROVER: Final = 8
"""Default number of due shares per prover from which they are a backlog.

Fewer are proven within seconds. By due time none of them waits longer than that; in another order one could be
overtaken until the delay has passed, for example after a node has stopped responding.
"""
RESERVE_SECONDS: Final = 30.0
"""Seconds of slack below which a round is at risk."""
RESERVE_FRACTION: Final = 0.1
"""Fraction of the remaining work that is added to the reserve, because the measured pace varies."""


DOUBTED_ROUND_INTERVAL: Final = 4
"""Turns between those of rounds that may not exist.

An existing round that a false node omits is revealed too, and an invented one takes a quarter of the proofs at most.
"""


class DueShare(NamedTuple):
    """A share that is due. Without a backlog, shares are proven in the order of these values.

    Attributes:
        due_ms: Unix milliseconds.
        rank: position in this helper's own order, see `helper.core.dispatch_order.rank`.
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
    overdue_seconds: float

    def is_overdue(self, oldest_due_ms: int, now: float) -> bool:
        """Return whether a round is overdue. `now` is in Unix seconds."""
        return now - oldest_due_ms / 1000 > self.overdue_seconds

    def is_backlog(self, oldest_due_ms: int, due_shares: int, now: float) -> bool:
        """Return whether this number of due shares is a backlog; it may be capped above the limit."""
        return due_shares > self.due_shares and self.is_overdue(oldest_due_ms, now)


@dataclass(frozen=True, slots=True)
class ProofPace:
    """Measured speed of this helper.

    Attributes:
        proof_seconds: mean duration of a proof.
        shares_per_second: shares that leave the queue per second while all provers work.
    """

    proof_seconds: float
    shares_per_second: float


@dataclass(slots=True)
class RoundQueue:
    """The due shares of a round.

    Attributes:
        round_id: 32 bytes.
        end: the round's end, in Unix seconds of the chain; infinity if it may not exist.
        waiting: shares of the round that are not begun, due or not.
        oldest_due_ms: due time of the oldest due share, in Unix milliseconds.
        shares: the first due shares, in the order in which they are proven: by due time, in a backlog by rank.
    """

    round_id: bytes
    end: float
    waiting: int
    oldest_due_ms: int
    shares: deque[DueShare]


def is_at_risk(end: float, waiting: int, chain_time: float, pace: ProofPace) -> bool:
    """Return whether a round would miss its end if others went first, but can still be met by all provers together.

    Args:
        end: the round's end, in Unix seconds.
        waiting: its shares that are not begun, due or not.
        chain_time: time of the newest block, in Unix seconds.
    """
    work_seconds = waiting / pace.shares_per_second + pace.proof_seconds if waiting else 0.0
    return 0 <= end - chain_time - work_seconds < RESERVE_SECONDS + RESERVE_FRACTION * work_seconds


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
    ) -> list[tuple[DueShare, bool]]:
        """Select shares, and remove them from `queues`. Each is returned with whether it has priority.

        Shares with priority are proven before selected ones without it that are not begun.
        Rounds that may not exist get what the others leave, and some of the turns. Of the others:

        1. Rounds at risk have priority, the earliest end first, then the least slack.
        2. Rounds that are not overdue follow, by due time.
        3. The other rounds take turns. Each `DOUBTED_ROUND_INTERVAL`th is that of a round that may not exist.

        Args:
            first_limit: maximum number if those above `limit` have priority; not below `limit`.
            now: Unix seconds.
            chain_time: time of the newest block, in Unix seconds.
        """
        selected: list[tuple[DueShare, bool]] = []
        ready = [queue for queue in queues if queue.shares]
        self._last_turns = {
            queue.round_id: self._last_turns[queue.round_id] for queue in ready if queue.round_id in self._last_turns
        }
        while ready and len(selected) < first_limit:
            queue, has_priority = self._next_queue(ready, now, chain_time, pace, limits)
            if len(selected) >= limit and not has_priority:
                break
            selected.append((queue.shares.popleft(), has_priority))
            self._turn += 1
            self._last_turns[queue.round_id] = self._turn
            if not queue.shares:
                ready.remove(queue)
        return selected

    def _next_queue(
        self, ready: Sequence[RoundQueue], now: float, chain_time: float, pace: ProofPace, limits: BacklogLimits
    ) -> tuple[RoundQueue, bool]:
        """Return the round whose share is next, and whether that share has priority."""
        known = [queue for queue in ready if queue.end < math.inf]
        doubted = [queue for queue in ready if queue.end == math.inf]
        ready = known or doubted
        at_risk = [queue for queue in ready if is_at_risk(queue.end, queue.waiting, chain_time, pace)]
        if at_risk:
            return min(at_risk, key=lambda queue: (queue.end, -queue.waiting)), True
        on_time = [queue for queue in ready if not limits.is_overdue(queue.oldest_due_ms, now)]
        if on_time:
            return min(on_time, key=lambda queue: queue.shares[0]), True
        if doubted and (self._turn + 1) % DOUBTED_ROUND_INTERVAL == 0:
            ready = doubted
        return min(ready, key=self._order_of_turns), False

    def _order_of_turns(self, queue: RoundQueue) -> tuple[int, int]:
        return self._last_turns.get(queue.round_id, 0), queue.oldest_due_ms
