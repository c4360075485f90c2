"""The wallets' choices, the time at which shares are revealed, and what a round takes of one helper."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.core.load_forecast import (
    MAX_REVEALS_PER_BLOCK,
    MAX_WAIT_SECONDS,
    PROVER_BYTES,
    REFERENCE_PROOF_SECONDS,
    SERVICE_BYTES,
    WAITING_SHARE_BYTES,
    Distribution,
    ProofRate,
    RoundSize,
    RoundWork,
    find_slots,
    forecast_work,
    fraction_due,
    helpers_per_share,
    last_moment_start,
    last_vote_time,
    make_plan,
    simulate_drain,
)
from helper.core.share import SHARE_COUNT
from tests.simulation.fleet_plan import MAX_SHARES_OF_VOTE, choose_helpers, choose_submit_at, choose_vote_time

HOUR, DAY = 3600, 86_400


@pytest.mark.parametrize(("helpers", "count"), [(1, 1), (2, 1), (3, 2), (9, 5), (10, 5), (19, 10), (20, 10), (64, 10)])
def test_share_goes_to_half_of_helpers_at_most_ten(helpers: int, count: int) -> None:
    assert helpers_per_share(helpers) == count


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


BENCH_RESULTS = Path(__file__).parents[3] / "bench" / "results" / "latest.json"
SIZE = RoundSize(voters=1000, proposals=2, helpers=10, bundles=1, seconds=7 * DAY, distribution=Distribution.WALLET)
K10 = ProofRate(0.42, 2)


def test_plan_counts_shares_by_the_wallets_rule() -> None:
    assert (SIZE.votes, SIZE.reveals, SIZE.shares) == (2000, 32_000, 16_000)
    assert replace(SIZE, helpers=1).shares == 32_000
    assert replace(SIZE, helpers=40).shares == 8000, "at most ten helpers get a share"
    assert replace(SIZE, bundles=3).shares == 48_000
    plan = make_plan(SIZE, K10)
    assert (plan.shares, plan.proofs, plan.reveals) == (16_000, 16_000, 32_000)


def test_plan_of_a_small_round_is_in_time() -> None:
    plan = make_plan(SIZE, K10)
    assert plan.done_before_end
    assert 0 < plan.slack_seconds < 60
    assert (plan.cores_needed, plan.unfinished, plan.limit) == (1, 0, None)


@pytest.mark.parametrize("distribution", Distribution)
def test_cores_needed_are_just_enough(distribution: Distribution) -> None:
    size = replace(SIZE, voters=20_000, distribution=distribution)
    needed = make_plan(size, K10).cores_needed
    assert needed is not None
    assert make_plan(size, replace(K10, slots=needed)).unfinished == 0
    assert needed == 1 or make_plan(size, replace(K10, slots=needed - 1)).unfinished > 0


def test_later_votes_need_more_cores() -> None:
    needed = [
        make_plan(replace(SIZE, voters=92_500, distribution=distribution), K10).cores_needed
        for distribution in (Distribution.UNIFORM, Distribution.WALLET, Distribution.DEADLINE)
    ]
    assert needed == sorted(needed, key=lambda cores: cores or 0)
    assert len(set(needed)) == 3


def test_saturated_plan_lasts_as_long_as_the_proofs() -> None:
    """All votes of the last 40 s: the first proof begins with the first vote, and the rest follows at the rate."""
    size = RoundSize(75, 1, 2, 1, seconds=100, distribution=Distribution.DEADLINE)
    plan = make_plan(size, ProofRate(0.5, 2, block_seconds=1.0))
    assert plan.shares == 600
    assert plan.done_seconds == pytest.approx(60 + 600 * 0.25 + 1.5, abs=0.5)
    assert plan.done_seconds + plan.slack_seconds == pytest.approx(100)
    assert (plan.done_before_end, plan.limit) == (False, "provers")
    assert plan.unfinished == pytest.approx(600 - (40 - 1.5) * 4, abs=2)
    assert plan.max_backlog == pytest.approx(600 - 30 * 4, abs=25)


def test_plan_reports_the_limit_of_the_chain() -> None:
    size = replace(SIZE, voters=100_000, distribution=Distribution.DEADLINE)
    plan = make_plan(size, ProofRate(0.42, 1000))
    assert (plan.limit, plan.done_before_end) == ("chain", False)
    assert plan.done_seconds == pytest.approx(7 * DAY - 6 * HOUR + 3_200_000 / 256 * 6, rel=0.01)
    assert plan.proofs_per_second == 256 / 6


def test_helpers_together_are_faster_than_one_alone() -> None:
    size = RoundSize(5000, 37, 10, 1, 7 * DAY, Distribution.WALLET)
    plan = make_plan(size, K10)
    assert (plan.done_before_end, plan.together_done_before_end) == (False, True)
    assert plan.slack_seconds < 0 < plan.together_slack_seconds


def test_round_shorter_than_a_block_has_no_number_of_cores() -> None:
    plan = make_plan(replace(SIZE, seconds=60), ProofRate(2.0, 2, block_seconds=6.0))
    assert (plan.cores_needed, plan.done_before_end) == (None, False)


def test_disk_and_memory_grow_with_shares_and_cores() -> None:
    plan, larger = make_plan(SIZE, K10), make_plan(replace(SIZE, voters=2000), replace(K10, slots=4))
    assert larger.disk_bytes - plan.disk_bytes > plan.shares * WAITING_SHARE_BYTES
    assert plan.memory_bytes >= SERVICE_BYTES + 2 * PROVER_BYTES
    assert larger.memory_bytes - plan.memory_bytes >= 2 * PROVER_BYTES


def test_reference_times_are_those_of_the_last_benchmark() -> None:
    figures = {result["name"]: result["figure"] for result in json.loads(BENCH_RESULTS.read_text())}
    for circuit, seconds in REFERENCE_PROOF_SECONDS.items():
        assert seconds == pytest.approx(2 / figures[f"raw proof rate {circuit}"], rel=0.05), "2 cores"
    assert pytest.approx(figures["1,000,000 pending: disk"], rel=0.05) == WAITING_SHARE_BYTES
