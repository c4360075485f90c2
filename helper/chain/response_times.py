"""Time limits of a node's responses, from the node's own recent times. See decision 30."""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache

MIN_LIMIT_SECONDS = 1.0
"""Minimum limit in seconds. A retransmitted packet or a loaded disk can delay a response almost this long."""

LIMIT_FACTOR = 4
"""The limit is this multiple of the longest recent time."""

MIN_RESPONSES = 8
"""Number of recent responses from which the limit is derived; with fewer, the maximum applies."""

MAX_RESPONSES = 64
"""Number of most recent responses that count."""

_IDENTIFIER_PATTERN = re.compile(r"/(?:\d+|[0-9A-Fa-f]{64})(?=/|$)")


class ResponseTimes:
    """Recent response times of one node to one kind of request.

    Args:
        maximum: greatest limit in seconds.
    """

    def __init__(self, maximum: float) -> None:
        self._maximum = maximum
        self._seconds: deque[float] = deque(maxlen=MAX_RESPONSES)

    @property
    def limit(self) -> float:
        """Seconds to wait for the node: the maximum, or less if its recent responses were fast."""
        if len(self._seconds) < MIN_RESPONSES:
            return self._maximum
        return min(self._maximum, max(MIN_LIMIT_SECONDS, LIMIT_FACTOR * max(self._seconds)))

    def add(self, seconds: float) -> None:
        """Add the time of a response."""
        self._seconds.append(seconds)

    def forget(self) -> None:
        """Return to the maximum until the node has responded `MIN_RESPONSES` times.

        For a response that took longer than the limit. The node may be slow and not dead, or this request larger than
        the recent ones, and then a repeated short limit would never let it respond.
        """
        self._seconds.clear()


@lru_cache(256)
def request_kind(path: str) -> str:
    """Return the path without round ids, hashes and heights: such requests take about the same time."""
    return _IDENTIFIER_PATTERN.sub("", path)
