"""Remembers what was reported lately, so that a repeated event is logged once. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class RecentKeys:
    """The keys that were noted within some seconds.

    Args:
        seconds: for how long a key is remembered after it was last noted.
        most: how many keys are remembered; the ones noted longest ago are dropped first.
    """

    def __init__(self, seconds: float, *, most: int = 256) -> None:
        self._seconds = seconds
        self._most = most
        self._noted: OrderedDict[Hashable, float] = OrderedDict()

    def note(self, key: Hashable, monotonic: float) -> bool:
        """Note a key; whether it is new, that is, not remembered.

        Args:
            key: what was reported.
            monotonic: the time, in seconds.
        """
        before = self._noted.pop(key, None)
        self._noted[key] = monotonic
        if len(self._noted) > self._most:
            self._noted.popitem(last=False)
        return before is None or monotonic - before > self._seconds
