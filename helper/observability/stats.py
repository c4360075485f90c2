"""What the running service counts: totals since its start and recent timings, never anything of one share."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from itertools import accumulate
from math import ceil, inf
from statistics import median
from typing import Any, Final

RECENT = 20_000
"""How many recent samples of a timing are kept."""
BOUNDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Upper bounds, in seconds, of the buckets in which all samples ever are counted."""


def percentile(samples: list[float], share: float) -> float | None:
    """The nearest-rank percentile (share from 0 to 1) of these samples; None of none."""
    if not samples:
        return None
    ordered = sorted(samples)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


class Timings:
    """The most recent samples of one timing, and how many there were ever, by size. Seconds.

    Attributes:
        count: of all samples ever.
        total: their sum.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=RECENT)
        self._sizes = [0] * (len(BOUNDS) + 1)
        self.count = 0
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Note one sample."""
        self._samples.append(seconds)
        self._sizes[bisect_left(BOUNDS, seconds)] += 1
        self.count += 1
        self.total += seconds

    def up_to(self) -> list[tuple[float, int]]:
        """For each bound, and infinity, how many samples were not greater."""
        return list(zip((*BOUNDS, inf), accumulate(self._sizes), strict=True))

    def summary(self) -> dict[str, float | int | None]:
        """Number of samples ever, and p50, p99, least and greatest of the recent ones in milliseconds."""
        recent = list(self._samples)
        return {
            "count": self.count,
            "p50_ms": _ms(median(recent)) if recent else None,
            "p99_ms": _ms(percentile(recent, 0.99)),
            "min_ms": _ms(min(recent, default=None)),
            "max_ms": _ms(max(recent, default=None)),
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


class BusyTime:
    """How long at least one of several jobs was under way; times are a monotonic clock's seconds."""

    def __init__(self) -> None:
        self._jobs = 0
        self._since = 0.0
        self._total = 0.0

    def begin(self, now: float) -> None:
        """A job starts."""
        if self._jobs == 0:
            self._since = now
        self._jobs += 1

    def end(self, now: float) -> None:
        """A job ends."""
        self._jobs -= 1
        if self._jobs == 0:
            self._total += now - self._since

    def seconds(self, now: float) -> float:
        """The time so far."""
        return self._total + (now - self._since if self._jobs else 0.0)


class Stats:
    """Counters by name, and the timings that tell how the service keeps its promises.

    Lateness is measured for shares in their first attempt, from the time they were due; the queue's age whenever shares
    are taken up, of the one that was due first; confirmation from the first byte sent to the block that counted it.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lateness_start = Timings()
        self.lateness_broadcast = Timings()
        self.proof_seconds = Timings()
        self.queue_age = Timings()
        self.confirmation = Timings()
        self.proving = BusyTime()
        self.failures: deque[dict[str, str]] = deque(maxlen=20)

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        self.counts[name] += number

    def failure(self, stage: str, reason: str) -> None:
        """Note a failure by stage and reason, for the operator's list of recent ones."""
        self.count("failures")
        self.failures.append({"stage": stage, "reason": reason})

    def summary(self, now: float) -> dict[str, Any]:
        """All of it as plain JSON values; `now` is the monotonic clock's time."""
        return {
            "counts": dict(self.counts),
            "proving_seconds": round(self.proving.seconds(now), 3),
            "lateness_start": self.lateness_start.summary(),
            "lateness_broadcast": self.lateness_broadcast.summary(),
            "proof": self.proof_seconds.summary(),
            "queue_age": self.queue_age.summary(),
            "confirmation": self.confirmation.summary(),
            "recent_failures": list(self.failures),
        }
