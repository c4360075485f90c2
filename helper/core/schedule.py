"""Due times, retry delays, and the order of shares due in the same millisecond. Pure.

All functions are deterministic. Due times chosen by wallets are used exactly.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Final

MAX_RETRY_SECONDS: Final = 64


def retry_delay(failures: int) -> int:
    """Return the seconds to wait after the `failures`-th failure (from 1): 2, 4, 8, 16, 32, then 64.

    Raises:
        ValueError: `failures` is below 1.
    """
    if failures < 1:
        raise ValueError(f"failures must be at least 1, got {failures}")
    return int(min(2 ** min(failures, 63), MAX_RETRY_SECONDS))


def due_ms(submit_at: int, now: float) -> int:
    """Return the due time of a share in Unix milliseconds: `submit_at`, or `now` if `submit_at` is 0 or in the past.

    Shares that are due immediately get their arrival time, so they are processed in order of arrival.
    """
    now_ms = int(now * 1000)
    return max(submit_at * 1000, now_ms)


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
    return int.from_bytes(digest.digest(), "big") >> 1


@lru_cache(maxsize=4)
def _keyed_hash(key: bytes) -> blake2b:
    """Return the keyed hash state; cached, because creating it is half the cost of `rank`."""
    return blake2b(digest_size=8, key=key, person=b"svote-order")
