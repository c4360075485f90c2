"""Counters and timings of the running service."""

from __future__ import annotations

import pytest

from helper.observability.service_state import TimingSummary
from helper.observability.stats import MAX_RECENT_SAMPLES, BusyTime, Stats, Timings, percentile


@pytest.mark.parametrize(
    ("number", "share", "rank"),
    [(100, 0.99, 99), (100, 0.5, 50), (1, 0.99, 1), (10, 0.99, 10), (10, 0.0, 1), (4, 1.0, 4)],
)
def test_percentile_is_nearest_rank(number: int, share: float, rank: int) -> None:
    samples = [float(value) for value in range(number, 0, -1)]
    assert percentile(samples, share) == rank


def test_percentile_of_no_samples_is_none() -> None:
    assert percentile([], 0.5) is None
    assert Timings().summary() == TimingSummary()


def test_timings_are_in_milliseconds() -> None:
    timings = Timings()
    for hundredth in range(1, 101):
        timings.add_sample(hundredth / 100)
    assert timings.summary() == TimingSummary(count=100, p50_ms=505.0, p99_ms=990.0, min_ms=10.0, max_ms=1000.0)


def test_timings_keep_only_recent_samples() -> None:
    timings = Timings()
    timings.add_sample(99.0)
    for _ in range(MAX_RECENT_SAMPLES):
        timings.add_sample(0.001)
    assert timings.summary().max_ms == 1.0
    assert timings.count == MAX_RECENT_SAMPLES + 1


def test_busy_time_counts_overlapping_jobs_once() -> None:
    busy = BusyTime()
    busy.begin(10.0)
    busy.begin(11.0)
    busy.end(12.0)
    assert busy.total_seconds(13.0) == 3.0, "one operation is still in progress"
    busy.end(14.0)
    assert busy.total_seconds(100.0) == 4.0
    busy.begin(100.0)
    assert busy.total_seconds(100.5) == 4.5


def test_stats_keep_latest_failures() -> None:
    stats = Stats()
    stats.count("confirmed", 3)
    for number in range(50):
        stats.record_failure("proof", f"reason {number}")
    assert stats.counts == {"confirmed": 3, "failures": 50}
    assert [failure.reason for failure in stats.failures] == [f"reason {n}" for n in range(30, 50)]
