"""How today's wallets choose the helpers and the due time of each share. Pure.

The rules are those of the wallet library `zcash_voting` 5.3.0: the values of `config` and of the share delivery. The
functions with a `random` argument draw one wallet's choices; `fraction_due` is the expected value over many voters.
"""

from __future__ import annotations

import math
from enum import StrEnum
from random import Random
from typing import Final

from helper.core.share import SHARE_COUNT

MAX_HELPERS_PER_SHARE: Final = 10
MAX_SHARES_OF_VOTE: Final = 12
"""Maximum shares of a vote that a wallet first gives to one helper, if there are enough helpers."""
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
    """Return the number of helpers that get each share: half of all, rounded up, at most 10.

    Raises:
        ValueError: `helpers` is below 1.
    """
    if helpers < 1:
        raise ValueError(f"helpers must be at least 1, got {helpers}")
    return min(-(-helpers // 2), MAX_HELPERS_PER_SHARE)


def choose_helpers(helpers: int, random: Random, *, per_share: int | None = None) -> list[tuple[int, ...]]:
    """Choose the helpers (0 to `helpers` - 1) of each of a vote's 16 shares, at random.

    Each share gets `per_share` helpers, by default `helpers_per_share`. A helper with `MAX_SHARES_OF_VOTE` shares is
    chosen only if too few others are left.
    """
    count, held = per_share or helpers_per_share(helpers), [0] * helpers
    chosen = []
    for _ in range(SHARE_COUNT):
        order = random.sample(range(helpers), helpers)
        order.sort(key=lambda helper: held[helper] >= MAX_SHARES_OF_VOTE)  # stable, so the order remains random
        chosen.append(tuple(order[:count]))
        for helper in order[:count]:
            held[helper] += 1
    return chosen


def last_moment_start(start: int, end: int) -> int:
    """Return the beginning of the last-moment window of a round. Times are in Unix seconds.

    The window is 40 % of the round, rounded up, and at most 6 h. Shares of votes within it are due at once.
    """
    return end - min(-(-(end - start) * 2 // 5), MAX_WINDOW_SECONDS)


def choose_submit_at(voted_at: int, start: int, end: int, random: Random) -> int:
    """Choose a share's `submit_at`, as the wallet of a vote that was cast at `voted_at`. Times are in Unix seconds.

    Returns 0 (due on arrival) in the last-moment window, else a time before it, at most 100 h after the vote.
    """
    latest = min(last_moment_start(start, end), voted_at + MAX_WAIT_SECONDS)
    return random.randrange(voted_at, latest) if voted_at < latest else 0


def last_vote_time(start: int, end: int) -> float:
    """Return the Unix time of the last vote that is assumed for a round."""
    return end - min(CLOSING_SECONDS, (end - start) / 10)


def choose_vote_time(distribution: Distribution, start: int, end: int, random: Random) -> float:
    """Choose the Unix time at which a voter votes."""
    first = last_moment_start(start, end) if distribution is Distribution.DEADLINE else start
    return random.uniform(first, last_vote_time(start, end))


def fraction_due(distribution: Distribution, time: float, start: int, end: int, *, at_once: float = 0.0) -> float:
    """Return the expected fraction of a round's shares that are due by a time. Times are in Unix seconds.

    For `WALLET`, a share of a vote at `t` is due by `x` with the probability `(x - t) / min(w - t, 100 h)`, where `w`
    is the beginning of the last-moment window. The result is the mean over all votes, in closed form.

    Args:
        distribution: how the voters vote.
        time: Unix seconds.
        start: beginning of the round.
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
