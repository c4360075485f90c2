"""Limits how often an event or a persistent problem is logged. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class LoggedProblem:
    """Logs a persistent problem only at its start and when its reason changes."""

    def __init__(self) -> None:
        self._reason: Hashable | None = None

    def note(self, reason: Hashable = "") -> bool:
        """Record that the problem persists. Returns whether to log it, because it is new or its reason has changed."""
        is_new = reason != self._reason
        self._reason = reason
        return is_new

    def clear(self) -> bool:
        """Record that there is no problem. Returns whether there was one."""
        was_noted, self._reason = self._reason is not None, None
        return was_noted


class RecentKeys:
    """Set of recently recorded keys.

    Args:
        seconds: how long a key is remembered after it was last recorded.
        max_keys: maximum number of keys; the oldest are dropped first.
    """

    def __init__(self, seconds: float, *, max_keys: int = 256) -> None:
        self._seconds = seconds
        self._max_keys = max_keys
        self._seen_at: OrderedDict[Hashable, float] = OrderedDict()

    def remember(self, key: Hashable, monotonic: float) -> bool:
        """Record a key at a monotonic time. Returns whether it was not remembered yet."""
        before = self._seen_at.pop(key, None)
        self._seen_at[key] = monotonic
        while len(self._seen_at) > self._max_keys or monotonic - next(iter(self._seen_at.values())) > self._seconds:
            self._seen_at.popitem(last=False)
        return before is None or monotonic - before > self._seconds
