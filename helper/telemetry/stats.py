"""What the running service counts: totals since its start and recent timings, never anything of one share."""

from __future__ import annotations

from collections import Counter, deque
from math import ceil
from statistics import median
from typing import Any

RECENT = 20_000
"""How many recent samples of a timing are kept."""


def percentile(samples: list[float], share: float) -> float | None:
    """The nearest-rank percentile (share from 0 to 1) of these samples; None of none."""
    if not samples:
        return None
    ordered = sorted(samples)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


class Timings:
    """The most recent samples of one timing, in seconds."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=RECENT)
        self.count = 0

    def add(self, seconds: float) -> None:
        """Note one sample."""
        self._samples.append(seconds)
        self.count += 1

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

    Lateness is measured for shares in their first attempt, from the time they were due.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lateness_start = Timings()
        self.lateness_broadcast = Timings()
        self.proof_seconds = Timings()
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
            "recent_failures": list(self.failures),
        }
