"""A fleet drains a backlog, loses no share when helpers die or come late, and its figures can be reproduced."""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from devnet.clients.known_clients import CLIENTS, IOS, LIBRARY
from helper.core import dispatch_order
from helper.core.load_forecast import last_moment_start
from helper.store import shares
from tests.simulation.fleet import FleetResult, run_fleet
from tests.simulation.fleet_command import add_arguments, create_plan, measure_marginal
from tests.simulation.fleet_plan import (
    FleetHelper,
    FleetPlan,
    FleetVote,
    draw_backlog,
    draw_round,
    select_end_of_round,
    simulate_ideal_fleet,
)
from tests.simulation.wallet_fleet import run_wallet_fleet


def parse_options(text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    add_arguments(parser)
    return parser.parse_args(text.split())


def run(text: str) -> FleetResult:
    result, violations = run_fleet(1, create_plan(parse_options(text)))
    assert violations == []
    assert (result.lost, result.feasible_lost, result.early) == (0, 0, 0)
    return result


def plan_of(*helpers: FleetHelper, end: int = 1000, block_seconds: float = 1.0) -> FleetPlan:
    return FleetPlan(
        helpers=helpers,
        per_share=1,
        provers=2,
        proof_seconds=1.0,
        block_seconds=block_seconds,
        round_seconds=end,
        votes=(),
    )


# The ideal fleet


def test_ideal_fleet_proves_each_share_once_at_full_rate() -> None:
    ideal = simulate_ideal_fleet(plan_of(FleetHelper(proves_from=10), FleetHelper(proves_from=10)), [1.0] * 40)
    assert (ideal.revealed, ideal.finished_at) == (40, 20)


def test_ideal_fleet_has_only_provers_of_running_helpers() -> None:
    helpers = (FleetHelper(dies_at=5), FleetHelper(starts_at=10))
    ideal = simulate_ideal_fleet(plan_of(*helpers), [-1.0] * 40)
    assert (ideal.revealed, ideal.finished_at) == (40, 25)


def test_ideal_fleet_is_limited_by_blocks_and_end_of_round() -> None:
    helpers = [FleetHelper() for _ in range(100)]
    ideal = simulate_ideal_fleet(plan_of(*helpers, end=110, block_seconds=10.0), [-1.0] * 3000)
    assert ideal.revealed == 2560
    late = simulate_ideal_fleet(plan_of(FleetHelper(), end=100), [50.0, 97.4, 98.1])
    assert late.revealed == 2, "the last one would be proven after the last block before the end"


# Votes


def test_round_of_wallets_has_due_times_before_the_last_moment() -> None:
    end = 36_000
    window = last_moment_start(0, end)
    votes = draw_round(200, 2, end, random.Random(1), deadline_fraction=0.25)
    assert len(votes) == 400
    early = [vote for vote in votes if vote.cast_at < window]
    assert 150 < len(early) < 220, "of the voters who do not wait, a fraction votes in the window too"
    assert all(at <= window and due is not None and at - 1 <= due < window for vote in early for at, due in vote.posts)
    assert all(due is None for vote in votes if vote.cast_at >= window for _, due in vote.posts)


def test_end_of_round_has_the_votes_of_its_last_seconds() -> None:
    votes = draw_round(500, 2, 36_000, random.Random(1), deadline_fraction=0.5)
    selected, length = select_end_of_round(votes, 36_000, 1800)
    assert length == 1800
    assert len(selected) == sum(vote.cast_at >= 34_210 for vote in votes) > 50
    assert all(10 <= at < 1800 and due is None for vote in selected for at, due in vote.posts)


def test_backlog_arrives_before_the_first_proof() -> None:
    votes = draw_backlog(20, random.Random(1))
    assert [len(vote.posts) for vote in votes] == [16, 4]
    assert all(due is None for vote in votes for _, due in vote.posts)


# Runs


def test_fleet_drains_backlog_and_gives_same_figures_again() -> None:
    first, second = (run("--helpers 4 --overdue 120") for _ in range(2))
    assert first.shares == first.counted == 120
    assert first.ideal_seconds == pytest.approx(120 * 0.42 / 8)
    assert first.drained_seconds > first.ideal_seconds
    assert {**first.as_json(), "wall_seconds": 0} == {**second.as_json(), "wall_seconds": 0}


def test_own_order_saves_most_proofs_of_oldest_first() -> None:
    backlog = "--helpers 4 --per-share 4 --overdue 120 --proof-seconds 2"
    own, oldest = run(backlog), run(f"{backlog} --oldest-first 4")
    assert own.proofs_per_reveal < 1.6
    assert oldest.proofs_per_reveal > 3
    assert own.drained_seconds < oldest.drained_seconds / 2


def test_helper_with_own_order_adds_more_to_others_that_are_oldest_first() -> None:
    backlog = "--helpers 3 --per-share 3 --overdue 60 --proof-seconds 2 --oldest-first 2"
    figures, violations = measure_marginal(1, create_plan(parse_options(backlog)))
    assert violations == []
    assert figures["added_own_order"] > 0.5
    assert figures["added_own_order"] > figures["added_oldest_first"] + 0.3


def test_fleet_with_dead_and_late_helper_loses_no_share() -> None:
    result = run("--helpers 4 --overdue 120 --dead 1 --late 1")
    assert result.shares == result.counted == 120


def test_wallets_bring_shares_of_a_dead_helper_to_another_one() -> None:
    result = run("--helpers 2 --per-share 1 --overdue 32 --dead 1 --block-seconds 15")
    assert result.counted == 32
    assert result.drained_seconds > 3000, "wallets wait up to an hour"


def test_fleet_runs_a_round_from_start_to_end() -> None:
    result = run("--helpers 3 --voters 8 --deadline 0.5 --round-hours 0.3 --proof-seconds 2 --block-seconds 6")
    assert result.shares == result.counted == 128


def test_fleet_counts_lost_shares_of_a_round_that_is_too_short() -> None:
    plan = FleetPlan(
        helpers=(FleetHelper(),),
        per_share=1,
        provers=1,
        proof_seconds=10.0,
        block_seconds=1.5,
        round_seconds=120,
        votes=(FleetVote(1.0, tuple((10.0, None) for _ in range(16))),),
    )
    result, violations = run_fleet(1, plan)
    assert violations == []
    assert result.shares == 16
    assert result.counted + result.lost == 16
    assert 8 <= result.counted <= 11


def test_fleet_counts_reveals_before_their_due_time(monkeypatch: pytest.MonkeyPatch) -> None:
    due_ms = dispatch_order.due_ms
    monkeypatch.setattr(shares, "due_ms", lambda submit_at, now: due_ms(max(0, submit_at - 5), now))
    options = parse_options("--helpers 1 --voters 6 --deadline 0 --round-hours 0.1 --block-seconds 6")
    result, _ = run_fleet(1, create_plan(options))
    assert result.early > 0


def test_votes_of_every_client_are_counted_without_action_of_the_voter() -> None:
    results, violations = run_wallet_fleet(1, len(CLIENTS), round_seconds=900)
    assert violations == []
    assert {name: asdict(result) for name, result in results.items()} == {
        client.name: {"shares": 16, "counted": 16, "stopped": 0, "given_up": 0} for client in CLIENTS
    }


def test_responses_of_the_original_cost_votes_of_some_clients() -> None:
    results, violations = run_wallet_fleet(1, len(CLIENTS), round_seconds=900, is_original=True)
    assert violations == []
    assert results[IOS.name].counted < 16
    assert results[IOS.name].stopped == 1
    assert results[LIBRARY.name].counted == 16


@pytest.mark.parametrize(
    "text",
    [
        "--helpers 3",
        "--overdue 1 --voters 1",
        "--helpers 3 --overdue 9 --dead 4",
        "--helpers 3 --overdue 9 --dead 2 --late 1",
        "--helpers 3 --overdue 9 --oldest-first -1",
        "--helpers 3 --voters 2 --round-hours 1 --last-minutes 25",
    ],
)
def test_contradicting_options_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"needs either|must be"):
        create_plan(parse_options(text))


def test_command_ends_with_one_line_of_json() -> None:
    arguments = ["--fleet", "--helpers", "2", "--overdue", "20", "--json"]
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    ran = subprocess.run(command, capture_output=True, cwd=Path(__file__).parents[2], check=True)
    assert ran.stdout.count(b"\n") == 1
    figures = json.loads(ran.stdout)
    assert figures["proofs_per_reveal"] == figures["proofs"] / 20
    assert 0 < figures["ideal_seconds"] < figures["drained_seconds"] < math.inf
