"""Rate limits for routes that cost much or could be used to guess a token: token buckets."""

from __future__ import annotations

from typing import Final

MAX_CLIENTS: Final = 1 << 16
"""Maximum number of buckets; about 10 MB."""
_RETAINED_FRACTION: Final = 0.9
"""Fraction of the buckets that an eviction retains, so that not every new client causes an eviction."""
_ROUNDING_SECONDS: Final = 1e-6
"""Rounding error of sums of times, in seconds."""


class TokenBuckets:
    """A token bucket for each client. The time is a parameter, in seconds of a monotonic clock.

    A bucket is stored as the time at which it will be full again; a client without an entry has a full bucket.

    Args:
        burst: tokens of a full bucket.
        per_second: tokens refilled per second.
        max_clients: maximum number of buckets. Above it, full buckets are evicted, then those whose client was charged
            longest ago.
    """

    def __init__(self, burst: int, per_second: float, max_clients: int = MAX_CLIENTS) -> None:
        self._seconds_per_token = 1 / per_second
        self._last_token_refill = (burst - 1) / per_second  # a bucket needs longer than this only if it is empty
        self._max_clients = max_clients
        self._full_at: dict[bytes, float] = {}  # in order of the latest charge

    def __len__(self) -> int:
        """Number of buckets."""
        return len(self._full_at)

    def wait_seconds(self, client: bytes, now: float) -> float:
        """Seconds until this client has a token; 0 if it has one."""
        missing = self._full_at.get(client, now) - now - self._last_token_refill
        return missing if missing > _ROUNDING_SECONDS else 0.0

    def charge(self, client: bytes, now: float) -> None:
        """Take a token. The balance may become negative, because a client may have several concurrent requests."""
        full_at = self._full_at.pop(client, now)
        self._full_at[client] = max(full_at, now) + self._seconds_per_token
        if len(self._full_at) > self._max_clients:
            self._evict_buckets(now)

    def _evict_buckets(self, now: float) -> None:
        retained = [(client, full_at) for client, full_at in self._full_at.items() if full_at > now]
        self._full_at = dict(retained[-max(1, int(self._max_clients * _RETAINED_FRACTION)) :])
