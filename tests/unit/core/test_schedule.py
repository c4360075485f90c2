"""Order and times of scheduled events."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.core.schedule import due_ms, last_attempt_time, rank, rank_fraction, retry_delay, retry_time

times = st.floats(0, 4e9, allow_nan=False)


@pytest.mark.rule("R11")
def test_retry_delay_doubles_up_to_64_seconds() -> None:
    assert [retry_delay(n) for n in range(1, 9)] == [2, 4, 8, 16, 32, 64, 64, 64]
    assert retry_delay(10_000) == 64


@pytest.mark.parametrize("failures", [0, -1])
def test_retry_delay_before_first_failure_is_refused(failures: int) -> None:
    with pytest.raises(ValueError, match="failures"):
        retry_delay(failures)


DAY = 86_400.0


def attempt_times(first_due: float, end: float, fraction: float, *, quick_retries: int = 5) -> list[float]:
    """Times of all attempts of a share that always fails immediately."""
    last = last_attempt_time(first_due, end, fraction)
    times = [first_due]
    while times[-1] < end:
        retry = retry_time(len(times), times[-1], quick_retries=quick_retries, last_attempt=last, end=end)
        times.append(retry)
    return times[:-1]


@pytest.mark.rule("R11")
def test_retry_time_is_quick_then_one_and_ten_minutes_then_longer() -> None:
    retries = attempt_times(0.0, 14 * DAY, 0.5)
    delays = [later - earlier for earlier, later in pairwise(retries)]
    assert delays[:9] == [2, 4, 8, 16, 32, 60, 600, 3600, 21_600]
    assert max(delays) == 21_600
    assert len(retries) < 100, "a share that always fails costs a bounded number of proofs"


@pytest.mark.rule("R11")
@pytest.mark.parametrize(("failures", "expected"), [(1, 2), (2, 4), (3, 60), (4, 600)])
def test_retry_time_number_of_quick_retries_is_configurable(failures: int, expected: float) -> None:
    assert retry_time(failures, 0.0, quick_retries=2, last_attempt=DAY, end=DAY + 300) == expected


@pytest.mark.rule("R11", "N27")
@given(
    st.floats(0, 1e6),
    st.one_of(st.floats(200, 4000), st.floats(4000, 60 * DAY)),
    st.floats(0, 1),
    st.integers(1, 50),
)
def test_retries_reach_last_attempt_and_end_before_the_round(
    first_due: float, length: float, fraction: float, quick_retries: int
) -> None:
    end = first_due + length
    last = last_attempt_time(first_due, end, fraction)
    retries = attempt_times(first_due, end, fraction, quick_retries=quick_retries)
    slow = retries[quick_retries:]
    for earlier, later in pairwise(slow):
        assert later - earlier >= 10 - 1e-6
        target = last if last - earlier >= 10 else end - 30
        assert later == target or later - earlier <= (target - earlier) / 2 + 1e-6
    if slow and slow[0] <= last - 10:
        assert last in slow
    if slow and slow[0] <= end - 40:
        assert slow[-1] > end - 41, "the attempts do not stop before the end"
    assert not slow[1:] or slow[-1] <= end - 30


@pytest.mark.parametrize(
    ("length", "latest", "spread"),
    [(14 * DAY, 300, 600), (1600, 200, 200), (80, 30, 10), (0, 30, 0), (-5, 30, 0)],
)
def test_last_attempt_has_margin_and_spread(length: float, latest: float, spread: float) -> None:
    end = 1e6
    assert last_attempt_time(end - length, end, 0.0) == end - latest
    assert last_attempt_time(end - length, end, 1.0) == end - latest - spread


def test_retry_time_in_last_seconds_is_not_before_the_end() -> None:
    assert retry_time(6, 980.0, quick_retries=5, last_attempt=900.0, end=1000.0) == 1044.0
    assert retry_time(6, 900.0, quick_retries=5, last_attempt=900.0, end=1000.0) == 935.0


@pytest.mark.rule("R1", "N10")
@given(st.integers(1, 2**40), times)
def test_due_ms_is_submit_at_and_never_earlier(submit_at: int, now: float) -> None:
    due = due_ms(submit_at, now)

    assert due >= submit_at * 1000
    if submit_at > now:
        assert due == submit_at * 1000


@pytest.mark.rule("R2", "W6")
@given(times, st.integers(0, 10_000))
def test_due_ms_of_zero_or_past_time_is_now(now: float, ago: int) -> None:
    past = max(0, int(now) - ago)

    assert due_ms(0, now) == int(now * 1000)
    assert due_ms(past, now) == int(now * 1000)


@pytest.mark.rule("R6")
def test_schedule_functions_ignore_random_state() -> None:
    values = [due_ms(1_800_000_000, 5.0), retry_delay(3), rank(b"k" * 32, b"m" * 32)]

    random.seed(1)

    assert values == [due_ms(1_800_000_000, 5.0), retry_delay(3), rank(b"k" * 32, b"m" * 32)]


@pytest.mark.rule("R5", "N26")
def test_rank_within_second_is_independent_of_arrival() -> None:
    arrival = list(range(2_000))
    ranks = [rank(b"a key of the database", number.to_bytes(32, "big")) for number in arrival]
    order = sorted(arrival, key=lambda number: ranks[number])
    mean = (len(arrival) - 1) / 2
    spread = sum((n - mean) ** 2 for n in arrival)

    correlation = sum((rank - mean) * (n - mean) for rank, n in enumerate(order)) / spread

    assert abs(correlation) < 0.1
    assert len(set(ranks)) == len(ranks)


@given(st.binary(min_size=32, max_size=32))
def test_rank_fits_sqlite_integer_and_depends_on_key(mac: bytes) -> None:
    assert 0 <= rank(b"k" * 32, mac) < 2**63
    assert 0 <= rank_fraction(rank(b"k" * 32, mac)) <= 1
    assert rank(b"k" * 32, mac) != rank(b"l" * 32, mac)
