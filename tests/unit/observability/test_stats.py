"""Counters and timings of the running service."""

from __future__ import annotations

import json

import pytest

from helper.observability.stats import RECENT, BusyTime, Stats, Timings, percentile


@pytest.mark.parametrize(
    ("number", "share", "rank"),
    [(100, 0.99, 99), (100, 0.5, 50), (1, 0.99, 1), (10, 0.99, 10), (10, 0.0, 1), (4, 1.0, 4)],
)
def test_a_percentile_is_the_nearest_rank(number: int, share: float, rank: int) -> None:
    samples = [float(value) for value in range(number, 0, -1)]
    assert percentile(samples, share) == rank


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile([], 0.5) is None
    assert Timings().summary() == {"count": 0, "p50_ms": None, "p99_ms": None, "min_ms": None, "max_ms": None}


def test_timings_are_milliseconds_of_the_recent_samples() -> None:
    timings = Timings()
    for hundredth in range(1, 101):
        timings.add(hundredth / 100)
    assert timings.summary() == {"count": 100, "p50_ms": 505.0, "p99_ms": 990.0, "min_ms": 10.0, "max_ms": 1000.0}


def test_timings_keep_no_more_than_the_recent_ones() -> None:
    timings = Timings()
    timings.add(99.0)
    for _ in range(RECENT):
        timings.add(0.001)
    assert timings.summary()["max_ms"] == 1.0
    assert timings.count == RECENT + 1


def test_busy_time_counts_overlapping_jobs_once() -> None:
    busy = BusyTime()
    busy.begin(10.0)
    busy.begin(11.0)
    busy.end(12.0)
    assert busy.seconds(13.0) == 3.0, "one is still under way"
    busy.end(14.0)
    assert busy.seconds(100.0) == 4.0
    busy.begin(100.0)
    assert busy.seconds(100.5) == 4.5


def test_the_summary_is_plain_json_and_keeps_the_latest_failures() -> None:
    stats = Stats()
    stats.count("confirmed", 3)
    for number in range(50):
        stats.failure("proof", f"reason {number}")
    stats.lateness_start.add(0.02)
    summary = json.loads(json.dumps(stats.summary(5.0)))
    assert summary["counts"] == {"confirmed": 3, "failures": 50}
    assert [failure["reason"] for failure in summary["recent_failures"]] == [f"reason {n}" for n in range(30, 50)]
    assert summary["lateness_start"]["max_ms"] == 20.0
    assert summary["proving_seconds"] == 0.0
