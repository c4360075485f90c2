"""The time at which the shares of all rounds are revealed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.core.drain import MAX_REVEALS_PER_BLOCK, ProofRate, RoundWork, find_slots, forecast_work, simulate_drain

NOW = 1000.0


def test_proof_rate_is_limited_by_block_capacity() -> None:
    fast = ProofRate(seconds_per_proof=0.001, slots=64, block_seconds=5.0)
    assert fast.per_second == MAX_REVEALS_PER_BLOCK / 5
    assert ProofRate(None, 2, 5.0).per_second == MAX_REVEALS_PER_BLOCK / 5
    assert ProofRate(2.0, 4, 1.0).per_second == 2.0


def test_overdue_shares_drain_at_the_rate() -> None:
    (result,) = simulate_drain([RoundWork(NOW + 100, [(NOW - 50, 60), (NOW + 10, 20)])], 2.0, NOW)
    assert (result.work_seconds, result.done_at, result.slack_seconds) == (40, NOW + 40, 60)
    assert (result.unfinished, result.max_backlog) == (0, 40)


def test_round_that_ends_first_is_revealed_first() -> None:
    later, earlier = RoundWork(NOW + 100, [(NOW, 50)]), RoundWork(NOW + 60, [(NOW, 20), (NOW + 40, 10)])
    first, second = simulate_drain([later, earlier], 1.0, NOW)
    assert second.done_at == NOW + 50, "its last share waits for nothing"
    assert first.done_at == NOW + 80
    assert (first.slack_seconds, second.slack_seconds) == (20, 30)


def test_slack_counts_a_pause_now_and_not_the_last_due_time() -> None:
    (result,) = simulate_drain([RoundWork(NOW + 100, [(NOW, 10), (NOW + 98, 2)])], 1.0, NOW)
    assert (result.done_at, result.slack_seconds) == (NOW + 100, 88)


def test_shares_due_too_late_are_unfinished() -> None:
    (result,) = simulate_drain([RoundWork(NOW + 100, [(NOW, 10), (NOW + 90, 25)])], 1.0, NOW)
    assert (result.unfinished, result.done_at, result.slack_seconds) == (15, NOW + 115, -15)


def test_shares_left_at_the_end_do_not_delay_other_rounds() -> None:
    ended, other = RoundWork(NOW - 1, [(NOW, 1000)]), RoundWork(NOW + 100, [(NOW, 10)])
    failed = RoundWork(NOW + 20, [(NOW, 30)])
    results = simulate_drain([ended, failed, other], 1.0, NOW)
    assert [result.unfinished for result in results] == [1000, 10, 0]
    assert results[1].slack_seconds == -10
    assert (results[2].done_at, results[2].slack_seconds) == (NOW + 30, 60)


work = st.lists(
    st.builds(
        RoundWork,
        st.integers(1001, 1500),
        st.lists(st.tuples(st.integers(900, 1500), st.integers(0, 200)), max_size=5),
    ),
    max_size=4,
)


@given(work, st.sampled_from([0.125, 0.5, 1.0, 2.0, 8.0]))  # exact in binary
def test_slack_is_negative_exactly_if_shares_are_left(rounds: list[RoundWork], per_second: float) -> None:
    results = simulate_drain(rounds, per_second, NOW)
    left = sum(result.unfinished for result in results)
    assert any(result.slack_seconds < 0 for result in results) == (left > 0)
    faster = simulate_drain(rounds, per_second * 2, NOW)
    assert sum(result.unfinished for result in faster) <= left


def test_find_slots_is_the_smallest_number_of_provers() -> None:
    rate = ProofRate(0.5, 1, block_seconds=1.0)
    rounds = [RoundWork(NOW + 100, [(NOW, 700)]), RoundWork(NOW - 5, [(NOW, 10_000)])]
    assert find_slots(rounds, rate, NOW) == 4
    assert find_slots([RoundWork(NOW + 100, [(NOW, 1)])], rate, NOW) == 1
    assert find_slots([RoundWork(NOW + 100, [(NOW, 26_000)])], rate, NOW) is None, "256 per block"
    assert find_slots(rounds, ProofRate(None, 1), NOW) is None


def test_forecast_work_groups_shares_by_due_time() -> None:
    work = forecast_work(NOW + 7200, unproven=20, minutes=(5, 0, 3), later=10, now=NOW)
    assert work.due[:3] == [(NOW, 2.0), (NOW, 5.0), (NOW + 120, 3.0)]
    assert work.due[3][0] == NOW + 180
    assert NOW + 7000 < work.due[-1][0] < NOW + 7200
    assert work.shares == pytest.approx(20)


def test_forecast_work_counts_shares_due_after_the_end_as_due_now() -> None:
    work = forecast_work(NOW + 60, unproven=5, minutes=(1, 2), later=2, now=NOW)
    assert work.due == [(NOW, 4.0), (NOW, 1.0)]
    assert simulate_drain([work], 1.0, NOW)[0].unfinished == 0
