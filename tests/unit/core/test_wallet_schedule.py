"""The wallets' choice of helpers and due times."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.core.share import SHARE_COUNT
from helper.core.wallet_schedule import (
    MAX_SHARES_OF_VOTE,
    MAX_WAIT_SECONDS,
    Distribution,
    choose_helpers,
    choose_submit_at,
    choose_vote_time,
    fraction_due,
    helpers_per_share,
    last_moment_start,
    last_vote_time,
)

HOUR, DAY = 3600, 86_400


@pytest.mark.parametrize(("helpers", "count"), [(1, 1), (2, 1), (3, 2), (9, 5), (10, 5), (19, 10), (20, 10), (64, 10)])
def test_share_goes_to_half_of_helpers_at_most_ten(helpers: int, count: int) -> None:
    assert helpers_per_share(helpers) == count


def test_share_without_helpers_is_refused() -> None:
    with pytest.raises(ValueError, match="helpers"):
        helpers_per_share(0)


@given(st.integers(1, 64), st.integers())
def test_each_share_goes_to_different_helpers(helpers: int, seed: int) -> None:
    chosen = choose_helpers(helpers, Random(seed))
    assert len(chosen) == SHARE_COUNT
    assert all(len(set(share)) == helpers_per_share(helpers) for share in chosen)
    assert {helper for share in chosen for helper in share} <= set(range(helpers))


@pytest.mark.parametrize("helpers", [2, 10])
def test_vote_gives_each_helper_at_most_twelve_shares(helpers: int) -> None:
    for seed in range(500):
        held = Counter(helper for share in choose_helpers(helpers, Random(seed)) for helper in share)
        assert max(held.values()) <= MAX_SHARES_OF_VOTE


def test_only_helper_gets_all_shares() -> None:
    assert choose_helpers(1, Random(1)) == [(0,)] * SHARE_COUNT


def test_share_goes_to_given_number_of_helpers() -> None:
    assert all(len(set(share)) == 3 for share in choose_helpers(3, Random(1), per_share=3))


def test_helpers_get_equal_parts_over_many_votes() -> None:
    random, held = Random(1), Counter[int]()
    for _ in range(1000):
        held.update(helper for share in choose_helpers(10, random) for helper in share)
    assert all(abs(count - 8000) < 400 for count in held.values())


@pytest.mark.parametrize(("length", "window"), [(3600, 1440), (101, 41), (15 * HOUR, 6 * HOUR), (7 * DAY, 6 * HOUR)])
def test_last_moment_window_is_two_fifths_and_at_most_six_hours(length: int, window: int) -> None:
    assert last_moment_start(1000, 1000 + length) == 1000 + length - window


@given(st.integers(60, 30 * DAY), st.floats(0, 1), st.randoms(use_true_random=False))
def test_submit_at_is_before_window_or_zero_within(length: int, fraction: float, random: Random) -> None:
    voted_at = 1000 + int(length * fraction)
    submit_at = choose_submit_at(voted_at, 1000, 1000 + length, random)
    window = last_moment_start(1000, 1000 + length)
    if voted_at >= window:
        assert submit_at == 0
    else:
        assert voted_at <= submit_at < min(window, voted_at + MAX_WAIT_SECONDS)


@pytest.mark.parametrize("distribution", Distribution)
@pytest.mark.parametrize("length", [600, 5 * HOUR, 3 * DAY, 12 * DAY])
def test_expected_fraction_is_that_of_many_wallets(distribution: Distribution, length: int) -> None:
    random, start, end = Random(length), 1000, 1000 + length
    due = []
    for _ in range(4000):
        voted_at = choose_vote_time(distribution, start, end, random)
        follows_rule = distribution is not Distribution.UNIFORM
        due.append((choose_submit_at(int(voted_at), start, end, random) if follows_rule else 0) or voted_at)
    due.sort()
    for tenth in range(1, 10):
        time = start + length * tenth / 10
        drawn = bisect_right(due, time) / len(due)
        assert fraction_due(distribution, time, start, end) == pytest.approx(drawn, abs=0.035)


@pytest.mark.parametrize("distribution", Distribution)
def test_all_shares_are_due_by_the_last_vote(distribution: Distribution) -> None:
    start, end = 0, 10 * DAY
    assert fraction_due(distribution, start, start, end) == 0
    assert fraction_due(distribution, last_vote_time(start, end), start, end) == 1
    assert last_vote_time(start, end) == end - 60
    assert last_vote_time(0, 100) == 90


def test_shares_sent_at_once_are_due_with_their_votes() -> None:
    start, end = 0, 10 * DAY
    assert fraction_due(Distribution.WALLET, DAY, start, end, at_once=1.0) == pytest.approx(DAY / (end - 60))
    half = fraction_due(Distribution.WALLET, DAY, start, end, at_once=0.5)
    assert fraction_due(Distribution.WALLET, DAY, start, end) < half < DAY / (end - 60)
