"""Due times, retry delays, and the order of shares due in the same millisecond. Pure.

All functions are deterministic. Due times chosen by wallets are used exactly.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Final

MAX_RETRY_SECONDS: Final = 64
RANK_BITS: Final = 63
LONG_RETRY_SECONDS: Final = (60, 600, 3600, 21_600)
"""Delays of the retries after the quick ones; the last one repeats."""
MIN_SPACING_SECONDS: Final = 10
"""Minimum seconds between two attempts after the quick ones."""
LAST_MARGIN_SECONDS: Final = 30
"""Seconds before the end of a round after which a failed share is not tried again."""


def retry_delay(failures: int) -> int:
    """Return the seconds to wait after the `failures`-th failure (from 1): 2, 4, 8, 16, 32, then 64.

    Raises:
        ValueError: `failures` is below 1.
    """
    if failures < 1:
        raise ValueError(f"failures must be at least 1, got {failures}")
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

    Raises:
        ValueError: `failures` is below 1.
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
    """Return the sort key of a share as a number from 0 to 1."""
    return rank / (1 << RANK_BITS)


def rank(key: bytes, mac: bytes) -> int:
    """Return the sort key of a share among those due in the same millisecond: 63 bits of a keyed hash.

    The key is stored only in the database. The order reveals nothing about the order of arrival, and clients cannot
    influence it.

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
