"""Token buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.server.token_buckets import TokenBuckets

ONE, OTHER = b"one", b"other"


def test_token_buckets_empty_after_burst() -> None:
    buckets = TokenBuckets(burst=3, per_second=2)
    for _ in range(3):
        assert buckets.wait_seconds(ONE, 100.0) == 0
        buckets.charge(ONE, 100.0)
    assert buckets.wait_seconds(ONE, 100.0) == pytest.approx(0.5)
    assert buckets.wait_seconds(ONE, 100.25) == pytest.approx(0.25)
    assert buckets.wait_seconds(ONE, 100.5) == 0
    assert buckets.wait_seconds(OTHER, 100.0) == 0


def test_token_buckets_refill_up_to_burst() -> None:
    buckets = TokenBuckets(burst=2, per_second=1)
    buckets.charge(ONE, 0.0)
    for _ in range(2):
        assert buckets.wait_seconds(ONE, 1000.0) == 0
        buckets.charge(ONE, 1000.0)
    assert buckets.wait_seconds(ONE, 1000.0) == pytest.approx(1.0)


def test_token_buckets_concurrent_charges_become_debt() -> None:
    buckets = TokenBuckets(burst=2, per_second=1)
    for _ in range(5):
        buckets.charge(ONE, 0.0)
    assert buckets.wait_seconds(ONE, 0.0) == pytest.approx(4.0)
    assert buckets.wait_seconds(ONE, 4.0) == 0


@given(
    st.integers(1, 50),
    st.floats(0.1, 1000),
    st.lists(st.floats(0, 30), max_size=200),
)
def test_token_buckets_never_exceed_burst_and_refill(burst: int, per_second: float, pauses: list[float]) -> None:
    buckets = TokenBuckets(burst, per_second)
    now, passed = 0.0, []
    for pause in pauses:
        now += pause
        wait = buckets.wait_seconds(ONE, now)
        if wait == 0:
            buckets.charge(ONE, now)
            passed.append(now)
        else:
            assert buckets.wait_seconds(ONE, now + wait) == 0, "the reported time is correct"
            assert buckets.wait_seconds(ONE, now + wait * 0.99) > 0
    for first, start in enumerate(passed):
        for last, end in enumerate(passed[first:], first):
            assert last - first + 1 <= burst + (end - start) * per_second + 1e-3


def test_token_buckets_evict_full_buckets_first() -> None:
    buckets = TokenBuckets(burst=100, per_second=1, max_clients=10)
    for _ in range(50):
        buckets.charge(b"flooder", 0.0)
    for number in range(9):
        buckets.charge(b"full %d" % number, 1.0)
    buckets.charge(b"newcomer", 10.0)
    assert len(buckets) == 2, "all other buckets are full again"
    for _ in range(100):
        buckets.charge(b"flooder", 10.0)
    assert buckets.wait_seconds(b"flooder", 10.0) > 0


def test_token_buckets_evict_longest_uncharged_client() -> None:
    buckets = TokenBuckets(burst=1, per_second=0.001, max_clients=10)
    names = [b"%d" % number for number in range(11)]
    for name in names[:10]:
        buckets.charge(name, 0.0)
    buckets.charge(names[0], 1.0)
    buckets.charge(names[10], 2.0)
    assert len(buckets) == 9
    expired = [name for name in names if buckets.wait_seconds(name, 2.0) == 0]
    assert expired == [names[1], names[2]]


def test_token_buckets_number_is_limited() -> None:
    buckets = TokenBuckets(burst=800, per_second=50, max_clients=100)
    for number in range(10_000):
        buckets.charge(number.to_bytes(4), number * 1e-6)
        assert len(buckets) <= 100
