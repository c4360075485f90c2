"""When wallets want their shares revealed, and the order of their helpers. The defaults are the library's. No I/O."""

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
        failures_before_pause: failures in a row after which a helper is paused; 0 for never.
        pause_seconds: for how long a helper is paused, and queried last.
        leaves_out_paused: whether it is not queried at all, while there are others.
    """

    def __init__(
        self,
        helpers: Sequence[str],
        rng: random.Random,
        *,
        failures_before_pause: int = 3,
        pause_seconds: float = 30.0,
        leaves_out_paused: bool = False,
    ) -> None:
        self._rng = rng
        self._failures_before_pause = failures_before_pause
        self._pause_seconds = pause_seconds
        self._leaves_out_paused = leaves_out_paused
        self._ranks = dict.fromkeys(helpers, 0)
        self._failures = Counter[str]()
        self._paused_until = dict.fromkeys(helpers, 0.0)

    def set_rank(self, helper: str, rank: int) -> None:
        """Set the rank of a helper; those of a lower rank are queried first."""
        self._ranks[helper] = rank

    def prefer(self, helper: str) -> None:
        """Query this helper first from now on."""
        self._ranks = {known: -1 if known == helper else max(0, rank) for known, rank in self._ranks.items()}

    def record_success(self, helper: str) -> None:
        """Record a success, which ends a row of failures."""
        self._failures[helper] = 0

    def record_failure(self, helper: str, now: float) -> None:
        """Record a failure. After a few in a row, and after each further one, the helper is paused."""
        self._failures[helper] += 1
        if 0 < self._failures_before_pause <= self._failures[helper]:
            self._failures[helper] = self._failures_before_pause - 1
            self._paused_until[helper] = now + self._pause_seconds

    def order(self, now: float) -> list[str]:
        """The helpers in a new random order, sorted by rank; those that are paused are last, or left out."""
        drawn = self._rng.sample(list(self._ranks), len(self._ranks))
        if self._leaves_out_paused:
            drawn = [helper for helper in drawn if self._paused_until[helper] <= now] or drawn
        return sorted(drawn, key=lambda helper: (self._paused_until[helper] > now, self._ranks[helper]))

    def assign(self, shares: int, now: float, *, most: int = MAX_SHARES_AT_ONE_HELPER) -> list[list[str]]:
        """The order of helpers for each share of a vote, such that none is first for more than `most` shares."""
        given = Counter[str]()
        copies = copies_per_share(len(self._ranks))
        orders = []
        for _ in range(shares):
            order = self.order(now)
            order.sort(key=lambda helper: given[helper] >= most)
            given.update(order[:copies])
            orders.append(order)
        return orders
