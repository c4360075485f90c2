"""What a round takes of one helper."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from helper.core.drain import ProofRate
from helper.core.round_plan import (
    PROVER_BYTES,
    REFERENCE_PROOF_SECONDS,
    SERVICE_BYTES,
    WAITING_SHARE_BYTES,
    RoundSize,
    make_plan,
)
from helper.core.wallet_schedule import Distribution

HOUR, DAY = 3600, 86_400
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
