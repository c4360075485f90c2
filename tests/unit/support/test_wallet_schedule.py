"""When a wallet of library version 5.3.0 wants its shares revealed, and the order of its helpers."""

from __future__ import annotations

import random
from collections import Counter

from devnet.clients.schedule import (
    HelperRanking,
    copies_per_share,
    draw_submit_at,
    last_moment_start,
    overdue_seconds,
)

HOUR = 3600
HELPERS = ["https://a.example", "https://b.example", "https://c.example"]


def test_times_and_copies_are_those_of_the_library() -> None:
    ends = {100: 60, 101: 60, 15 * HOUR: 9 * HOUR, 16 * HOUR: 10 * HOUR, 1000 * HOUR: 994 * HOUR}
    assert {end: last_moment_start(0, end) for end in ends} == ends, "two fifths of a round, up to six hours"
    assert [overdue_seconds(0, end) for end in (100, 400, 1_000_000)] == [30, 100, 3600]
    assert [copies_per_share(count) for count in (1, 2, 3, 10, 30)] == [1, 1, 2, 5, 10]
    rng = random.Random(1)
    assert {draw_submit_at(57, created_at=0, end=100, rng=rng) for _ in range(200)} == {57, 58, 59}
    assert draw_submit_at(60, created_at=0, end=100, rng=rng) == 0
    times = [draw_submit_at(1, created_at=0, end=1000 * HOUR, rng=rng) for _ in range(200)]
    assert 90 * HOUR < max(times) <= 100 * HOUR


def test_helper_gets_at_most_12_shares_of_a_vote_first() -> None:
    for seed in range(50):
        orders = HelperRanking(HELPERS[:2], random.Random(seed)).assign(16, 0)
        assert max(Counter(order[0] for order in orders).values()) <= 12
    ranking = HelperRanking(HELPERS[:2], random.Random(0))
    ranking.set_rank(HELPERS[1], 1)
    assert Counter(order[0] for order in ranking.assign(16, 0)) == {HELPERS[0]: 12, HELPERS[1]: 4}
    assert len(HelperRanking(HELPERS[:1], random.Random(0)).assign(16, 0)) == 16


def test_helper_is_asked_last_for_30_seconds_after_three_failures_in_a_row() -> None:
    ranking, failing = HelperRanking(HELPERS, random.Random(2)), HELPERS[0]

    def fail(now: float, times: int = 1) -> None:
        for _ in range(times):
            ranking.record_failure(failing, now)

    fail(0, times=2)
    ranking.record_success(failing)
    fail(0, times=2)
    assert any(ranking.order(0)[0] == failing for _ in range(50))
    fail(0)
    assert all(ranking.order(29.9)[-1] == failing for _ in range(50))
    assert any(ranking.order(30)[0] == failing for _ in range(50))
    fail(30)
    assert all(ranking.order(59.9)[-1] == failing for _ in range(50)), "it is back with two failures"
