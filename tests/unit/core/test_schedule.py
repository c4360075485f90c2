"""Order and times of scheduled events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.core.schedule import due_ms, rank, retry_delay

times = st.floats(0, 4e9, allow_nan=False)


@pytest.mark.rule("R11")
def test_retry_delay_doubles_up_to_64_seconds() -> None:
    assert [retry_delay(n) for n in range(1, 9)] == [2, 4, 8, 16, 32, 64, 64, 64]
    assert retry_delay(10_000) == 64


@pytest.mark.parametrize("failures", [0, -1])
def test_retry_delay_before_first_failure_is_refused(failures: int) -> None:
    with pytest.raises(ValueError, match="failures"):
        retry_delay(failures)


@pytest.mark.rule("R1")
@given(st.integers(1, 2**40), times)
def test_due_ms_is_submit_at_and_never_earlier(submit_at: int, now: float) -> None:
    due = due_ms(submit_at, now)

    assert due >= submit_at * 1000
    if submit_at > now:
        assert due == submit_at * 1000


@pytest.mark.rule("R2")
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


@pytest.mark.rule("R5")
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
    assert rank(b"k" * 32, mac) != rank(b"l" * 32, mac)
