"""Rounds of different sizes: fairness, rounds at risk, and the order of a backlog."""

from __future__ import annotations

import pytest

from helper.core import dispatch_order
from helper.core.dispatch_order import BacklogLimits
from tests.campaign.rank_correlation import chance_bound, rank_correlation
from tests.simulation.rounds import BACKLOG_START, RoundsResult, backlog_seconds, p99, simulate_rounds

SMALL_ROUNDS = range(1, 10)
SMALL_SIZE = 4
TEN_ROUNDS = {0: 100 * SMALL_SIZE, **dict.fromkeys(SMALL_ROUNDS, SMALL_SIZE)}
TIGHT_END = BACKLOG_START + 130
"""End of a round of 160 shares, which takes 92 s if its shares go first, and twice as long in turns."""


def simulate_backlog_after_outage() -> RoundsResult:
    return simulate_rounds(5, {0: 200}, seconds=300, outage_seconds=100)


def simulate_tight_round() -> RoundsResult:
    return simulate_rounds(6, {0: 160, 1: 160}, seconds=300, ends={1: TIGHT_END}, due_at_once=(0, 1))


def test_small_rounds_are_at_most_twice_as_late_as_alone() -> None:
    seconds = backlog_seconds(TEN_ROUNDS)

    together = simulate_rounds(4, TEN_ROUNDS, seconds=seconds)

    assert together.violations == []
    assert {number: len(sent) for number, sent in together.broadcasts.items()} == TEN_ROUNDS
    alone = min(
        p99(simulate_rounds(4, {number: SMALL_SIZE}, seconds=seconds).lateness[number]) for number in SMALL_ROUNDS[:2]
    )
    late = {number: p99(together.lateness[number]) for number in SMALL_ROUNDS}
    assert {number: lateness for number, lateness in late.items() if lateness > 2 * alone} == {}


def test_backlog_after_outage_is_sent_independently_of_arrival_and_due_time() -> None:
    result = simulate_backlog_after_outage()

    assert result.violations == []
    sent = result.broadcasts[0]
    assert result.confirmed[0] == len(sent) == 200
    assert abs(rank_correlation(result.arrivals[0], sent)) <= chance_bound(200)
    assert abs(rank_correlation(result.due_orders[0], sent)) <= chance_bound(200)


def test_correlation_with_due_time_is_found_if_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BacklogLimits, "is_overdue", lambda *_: False)

    result = simulate_backlog_after_outage()

    assert rank_correlation(result.due_orders[0], result.broadcasts[0]) > 0.9


def test_round_at_risk_is_finished_before_its_end() -> None:
    result = simulate_tight_round()

    assert result.violations == []
    assert result.confirmed == {0: 160, 1: 160}


def test_round_at_risk_is_not_finished_if_rounds_only_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_order, "is_at_risk", lambda *_: False)

    assert simulate_tight_round().confirmed[1] < 150
