"""Counters since the start of the service, and recent timings. Aggregates only, no data of a single share."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from itertools import accumulate
from math import ceil
from statistics import median
from typing import Final

from helper.observability.service_state import RecentFailure, TimingSummary

MAX_RECENT_SAMPLES = 20_000
"""Number of recent samples in memory per timing."""
BUCKET_BOUNDS_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


def percentile(samples: list[float], fraction: float) -> float | None:
    """Return the nearest-rank percentile (`fraction` from 0 to 1) of samples, None if there are none."""
    if not samples:
        return None
    ordered = sorted(samples)
    return ordered[max(0, ceil(fraction * len(ordered)) - 1)]


class Timings:
    """Recent samples of a timing in seconds, and a histogram of all samples.

    Attributes:
        count: number of all samples.
        total: sum of all samples.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=MAX_RECENT_SAMPLES)
        self._bucket_counts = [0] * (len(BUCKET_BOUNDS_SECONDS) + 1)
        self.count = 0
        self.total = 0.0

    def add_sample(self, seconds: float) -> None:
        """Add a sample."""
        self._samples.append(seconds)
        self._bucket_counts[bisect_left(BUCKET_BOUNDS_SECONDS, seconds)] += 1
        self.count += 1
        self.total += seconds

    def bucket_counts(self) -> list[tuple[str, int]]:
        """Return the cumulative count of samples for each bound, as Prometheus writes it."""
        bounds = [*(f"{bound:g}" for bound in BUCKET_BOUNDS_SECONDS), "+Inf"]
        return list(zip(bounds, accumulate(self._bucket_counts), strict=True))

    def summary(self) -> TimingSummary:
        """Return the number of all samples, and statistics of the recent ones in milliseconds."""
        recent = list(self._samples)
        return TimingSummary(
            count=self.count,
            p50_ms=_ms(median(recent)) if recent else None,
            p99_ms=_ms(percentile(recent, 0.99)),
            min_ms=_ms(min(recent, default=None)),
            max_ms=_ms(max(recent, default=None)),
        )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


class BusyTime:
    """Total time during which at least one job was running. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._jobs = 0
        self._since = 0.0
        self._total = 0.0

    def begin(self, now: float) -> None:
        """Record the start of a job."""
        if self._jobs == 0:
            self._since = now
        self._jobs += 1

    def end(self, now: float) -> None:
        """Record the end of a job."""
        self._jobs -= 1
        if self._jobs == 0:
            self._total += now - self._since

    def total_seconds(self, now: float) -> float:
        """Return the total so far."""
        return self._total + (now - self._since if self._jobs else 0.0)


class Stats:
    """Counters by name, and timings of the stages of a share, with their names in `ServiceState`.

    Lateness is measured in the first attempt of a share.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lateness_start = Timings()
        self.lateness_broadcast = Timings()
        self.proof = Timings()
        self.queue_age = Timings()
        self.confirmation = Timings()
        self.proving = BusyTime()
        self.failures: deque[RecentFailure] = deque(maxlen=20)
        self._failing_since: dict[str, float] = {}  # by activity: monotonic time of the first of its consecutive errors

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        self.counts[name] += number

    def record_failure(self, stage: str, reason: str) -> None:
        """Record a failure by stage and reason, for the list of recent failures."""
        self.count("failures")
        self.failures.append(RecentFailure(stage, reason))

    def note_attempt(self, activity: str, error: BaseException | None, now: float) -> None:
        """Record an attempt at an activity that no share may make fail: its error, None if it succeeded."""
        if error is None:
            self._failing_since.pop(activity, None)
        else:
            self._failing_since.setdefault(activity, now)

    def find_failing(self, seconds: float, now: float) -> list[str]:
        """Return the activities of which each attempt has failed for this long. Times are monotonic."""
        return [activity for activity, since in self._failing_since.items() if now - since >= seconds]
