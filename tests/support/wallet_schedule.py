"""When a wallet of library version 5.3.0 wants its shares revealed, and which helpers it gives them to. No I/O."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Final

LAST_MOMENT_PART: Final = 0.4
"""Part of a round before its end in which a wallet asks for its shares to be revealed immediately."""
MAX_LAST_MOMENT_SECONDS: Final = 6 * 3600
MAX_SPREAD_SECONDS: Final = 100 * 3600
"""Maximum seconds between a vote and the time of its last share."""
OVERDUE_PART: Final = 0.25
"""Part of the time from a share's time to the round's end after which an unconfirmed share is overdue."""
OVERDUE_SECONDS: Final = (30.0, 3600.0)
"""Minimum and maximum of that time."""
MAX_COPIES: Final = 10
MAX_SHARES_AT_ONE_HELPER: Final = 12
"""Maximum number of a vote's shares that one helper gets at first, if there are others."""
FAILURES_BEFORE_PAUSE: Final = 3
PAUSE_SECONDS: Final = 30.0
"""Seconds for which a helper that failed is queried last."""


def last_moment_start(created_at: int, end: int) -> int:
    """The Unix second at which the last-moment window of a round begins."""
    return end - min(math.ceil((end - created_at) * LAST_MOMENT_PART), MAX_LAST_MOMENT_SECONDS)


def draw_submit_at(now: int, *, created_at: int, end: int, rng: random.Random) -> int:
    """Draw the `submit_at` of a share. 0, immediately, in the last-moment window."""
    stop = min(last_moment_start(created_at, end), now + MAX_SPREAD_SECONDS)
    return rng.randrange(now, stop) if now < stop else 0


def overdue_seconds(due_time: float, end: float) -> float:
    """Seconds after a share's time at which it is overdue."""
    shortest, longest = OVERDUE_SECONDS
    return min(max((end - due_time) * OVERDUE_PART, shortest), longest)


def copies_per_share(helpers: int) -> int:
    """The number of helpers that get each share at first."""
    return min(math.ceil(helpers / 2), MAX_COPIES)


class HelperRanking:
    """The order in which helpers are queried.

    Args:
        helpers: base URLs, those that responded first before the others.
    """

    def __init__(self, helpers: Sequence[str], rng: random.Random) -> None:
        self._rng = rng
        self._ranks = dict.fromkeys(helpers, 0)
        self._failures = Counter[str]()
        self._paused_until = dict.fromkeys(helpers, 0.0)

    def set_rank(self, helper: str, rank: int) -> None:
        """Set the rank of a helper; those of a lower rank are queried first."""
        self._ranks[helper] = rank

    def record_success(self, helper: str) -> None:
        self._failures[helper] = 0

    def record_failure(self, helper: str, now: float) -> None:
        """Record a failure. After three in a row, and after each further one, the helper is queried last for 30 s."""
        self._failures[helper] += 1
        if self._failures[helper] >= FAILURES_BEFORE_PAUSE:
            self._failures[helper] = FAILURES_BEFORE_PAUSE - 1
            self._paused_until[helper] = now + PAUSE_SECONDS

    def order(self, now: float) -> list[str]:
        """All helpers in a new random order, sorted by rank; those that failed are last."""
        drawn = self._rng.sample(list(self._ranks), len(self._ranks))
        return sorted(drawn, key=lambda helper: (self._paused_until[helper] > now, self._ranks[helper]))

    def assign(self, shares: int, now: float) -> list[list[str]]:
        """The order of helpers for each share of a vote, such that none is first for too many."""
        given = Counter[str]()
        copies = copies_per_share(len(self._ranks))
        orders = []
        for _ in range(shares):
            order = self.order(now)
            order.sort(key=lambda helper: given[helper] >= MAX_SHARES_AT_ONE_HELPER)
            given.update(order[:copies])
            orders.append(order)
        return orders
