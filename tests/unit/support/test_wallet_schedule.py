"""When a wallet of library version 5.3.0 wants its shares revealed, and the order of its helpers."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.support.wallet_schedule import (
    HelperRanking,
    copies_per_share,
    draw_submit_at,
    last_moment_start,
    overdue_seconds,
)

HOUR = 3600
HELPERS = ["https://a.example", "https://b.example", "https://c.example"]


@pytest.mark.parametrize(
    ("created_at", "end", "start"),
    [(0, 100, 60), (0, 101, 60), (0, 15 * HOUR, 9 * HOUR), (0, 16 * HOUR, 10 * HOUR), (0, 1000 * HOUR, 994 * HOUR)],
)
def test_last_moment_window_is_two_fifths_of_the_round_up_to_six_hours(created_at: int, end: int, start: int) -> None:
    assert last_moment_start(created_at, end) == start


def test_submit_at_is_from_now_to_the_window_or_100_hours_and_zero_in_the_window() -> None:
    rng = random.Random(1)
    drawn = [draw_submit_at(57, created_at=0, end=100, rng=rng) for _ in range(200)]
    assert set(drawn) == {57, 58, 59}
    assert draw_submit_at(60, created_at=0, end=100, rng=rng) == 0
    times = [draw_submit_at(1, created_at=0, end=1000 * HOUR, rng=rng) for _ in range(200)]
    assert 90 * HOUR < max(times) <= 100 * HOUR


@pytest.mark.parametrize(("due", "end", "seconds"), [(0, 100, 30), (0, 400, 100), (0, 1_000_000, 3600)])
def test_share_is_overdue_after_a_quarter_of_its_remaining_time(due: int, end: int, seconds: int) -> None:
    assert overdue_seconds(due, end) == seconds


def test_half_of_the_helpers_but_at_most_ten_get_a_share() -> None:
    assert [copies_per_share(count) for count in (1, 2, 3, 10, 30)] == [1, 1, 2, 5, 10]


def test_helper_gets_at_most_12_shares_of_a_vote_first() -> None:
    for seed in range(50):
        orders = HelperRanking(HELPERS[:2], random.Random(seed)).assign(16, 0)
        assert max(Counter(order[0] for order in orders).values()) <= 12
    ranking = HelperRanking(HELPERS[:2], random.Random(0))
    ranking.set_rank(HELPERS[1], 1)
    assert Counter(order[0] for order in ranking.assign(16, 0)) == {HELPERS[0]: 12, HELPERS[1]: 4}
    assert len(HelperRanking(HELPERS[:1], random.Random(0)).assign(16, 0)) == 16


def test_helper_is_asked_last_for_30_seconds_after_three_failures_in_a_row() -> None:
    ranking = HelperRanking(HELPERS, random.Random(2))
    failing = HELPERS[0]
    ranking.record_failure(failing, 0)
    ranking.record_failure(failing, 0)
    ranking.record_success(failing)
    ranking.record_failure(failing, 0)
    ranking.record_failure(failing, 0)
    assert any(ranking.order(0)[0] == failing for _ in range(50))
    ranking.record_failure(failing, 0)
    assert all(ranking.order(29.9)[-1] == failing for _ in range(50))
    assert any(ranking.order(30)[0] == failing for _ in range(50))
    ranking.record_failure(failing, 30)
    assert all(ranking.order(59.9)[-1] == failing for _ in range(50)), "it is back with two failures"
