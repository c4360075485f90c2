"""When things happen: due times, retry delays, the next wake-up, and the order within a second. Pure.

No function here knows chance: what is asked twice is answered alike. The wallets' times are kept exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Final

LONGEST_RETRY_SECONDS: Final = 64
LONGEST_WAIT_SECONDS: Final = 30.0


def retry_delay(failures: int) -> int:
    """Seconds to wait after the `failures`-th failure (1 for the first): 2 4 8 16 32, and 64 from then on.

    Raises:
        ValueError: when nothing has failed yet.
    """
    if failures < 1:
        raise ValueError(f"a delay after {failures} failures was asked for")
    return int(min(2 ** min(failures, 63), LONGEST_RETRY_SECONDS))


def due_ms(submit_at: int, now: float) -> int:
    """The millisecond at which a share may be worked on: its own second, or now when that is 0 or past.

    A share that is due at once gets the moment of its arrival, so such shares go in order of arrival.
    """
    now_ms = int(now * 1000)
    return max(submit_at * 1000, now_ms)


def next_wake(now: float, candidates: Iterable[float | None], longest: float = LONGEST_WAIT_SECONDS) -> float:
    """Seconds to wait from `now` until the earliest of `candidates` (unix seconds; None is "never").

    Never negative and never more than `longest`, so that a jump of the wall clock is noticed.
    """
    earliest = min((at for at in candidates if at is not None), default=None)
    if earliest is None:
        return longest
    return min(max(0.0, earliest - now), longest)


def rank(key: bytes, mac: bytes) -> int:
    """Place of a share among those due in the same millisecond: 63 bits of a keyed hash of its mac.

    With a key that only the database knows, the order says nothing about the order of arrival, and nobody
    outside can choose a place.

    Args:
        key: 16 to 64 bytes.
        mac: the share's name as the store keeps it.
    """
    digest = _ranking(key).copy()
    digest.update(mac)
    return int.from_bytes(digest.digest(), "big") >> 1


@lru_cache(maxsize=4)
def _ranking(key: bytes) -> blake2b:
    """The hash that ranks, begun with its key: half of what one costs."""
    return blake2b(digest_size=8, key=key, person=b"svote-order")
