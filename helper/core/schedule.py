"""Due times, retry delays, and the order of shares within a millisecond. Pure functions.

All are deterministic. The due times that wallets chose are used exactly.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Final

LONGEST_RETRY_SECONDS: Final = 64


def retry_delay(failures: int) -> int:
    """Seconds to wait after the `failures`-th failure (1 for the first): 2, 4, 8, 16, 32, then 64.

    Raises:
        ValueError: `failures` is below 1.
    """
    if failures < 1:
        raise ValueError(f"failures must be at least 1, not {failures}")
    return int(min(2 ** min(failures, 63), LONGEST_RETRY_SECONDS))


def due_ms(submit_at: int, now: float) -> int:
    """The due time of a share in unix milliseconds: `submit_at`, or `now` if that is 0 or past.

    Shares that are due at once get their time of arrival, so they are processed in order of arrival.
    """
    now_ms = int(now * 1000)
    return max(submit_at * 1000, now_ms)


def rank(key: bytes, mac: bytes) -> int:
    """Sort key of a share among those due in the same millisecond: 63 bits of a keyed hash of its mac.

    The key is stored only in the database. The order reveals nothing about the order of arrival, and a client cannot
    choose its place.

    Args:
        key: 16 to 64 bytes.
        mac: the HMAC that the store identifies the share by.
    """
    digest = _ranking(key).copy()
    digest.update(mac)
    return int.from_bytes(digest.digest(), "big") >> 1


@lru_cache(maxsize=4)
def _ranking(key: bytes) -> blake2b:
    """The keyed hash state, cached: computing it is half the cost of `rank`."""
    return blake2b(digest_size=8, key=key, person=b"svote-order")
