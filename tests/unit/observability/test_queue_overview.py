"""Aggregate state of the queue."""

from __future__ import annotations

from typing import Any

import orjson

from helper.chain.chain_data import Round, RoundStatus
from helper.core.share import ShareState
from helper.observability.queue_overview import build_overview
from helper.store.models import DueForecast, FailureGroup
from tests.support.service_state import partial_state

ROUND, LATER_ROUND = b"\x01" * 32, b"\x02" * 32
TIMING = {"p50_ms": 4.0, "p99_ms": 20.0, "count": 3}
FACTS: Any = {
    "height": 7,
    "circuit": "k10",
    "ready": True,
    "intake_paused": None,
    "paused": "the circuit is refused",
    "in_hand": 1,
    "proof": {"p50_ms": 200.0},
    "lateness_start": TIMING,
    "lateness_broadcast": TIMING,
    "provers": {"workers": 2, "pids": [1, 2], "self_test_seconds": None},
    "endpoints": [{"name": "a:80", "reason": None}, {"name": "b:80", "reason": "stale"}],
}


def test_overview_contains_sums_and_no_single_share() -> None:
    overview = build_overview(
        now=1000.0,
        status=partial_state(**FACTS),
        rounds=[Round(ROUND, RoundStatus.ACTIVE, 2000, (), 1), Round(LATER_ROUND, RoundStatus.PENDING, 3000, (), 2)],
        counts={ROUND: {ShareState.RECEIVED: 10, ShareState.WITNESSED: 2, ShareState.SUBMITTED: 5}},
        due_ahead={ROUND: DueForecast((3, 4, *[0] * 58), 3)},
        failures=[FailureGroup(5000, "broadcast", "the round is over", 4)],
    )
    later, first = overview["rounds"]
    assert later["round_id"] == LATER_ROUND.hex()
    assert first == {
        "round_id": ROUND.hex(),
        "vote_end_time": 2000,
        "status": 1,
        "waiting": 10,
        "proving": 2,
        "broadcast": 0,
        "confirmed": 5,
        "failed": 0,
        "due_per_minute": [3, 4, *[0] * 58],
        "later": 3,
        "seconds_needed": 1.2,
    }
    assert overview["paused"] == "the circuit is refused"
    assert overview["provers"] == {"slots": 2, "busy": 1, "seconds_per_proof": 0.2}
    assert overview["endpoints"][1] == {"name": "b:80", "fresh": False, "reason": "stale"}
    assert overview["failures"] == [{"at": 5.0, "stage": "broadcast", "reason": "the round is over", "count": 4}]
    assert orjson.loads(orjson.dumps(overview)) == overview


def test_overview_busy_provers_never_exceed_slots() -> None:
    overview = build_overview(
        now=1.0, status=partial_state(**{**FACTS, "in_hand": 4}), rounds=[], counts={}, due_ahead={}, failures=[]
    )
    assert overview["provers"]["busy"] == 2, "two of the four wait for a slot"


def test_overview_before_first_proof_omits_time_needed() -> None:
    facts = {**FACTS, "proof": {"p50_ms": None}}
    known = [Round(ROUND, RoundStatus.ACTIVE, 2000, (), 1)]
    overview = build_overview(
        now=1.0, status=partial_state(**facts), rounds=known, counts={}, due_ahead={}, failures=[]
    )
    assert overview["rounds"][0]["seconds_needed"] is None
    assert overview["rounds"][0]["due_per_minute"] == [0] * 60


def test_overview_time_needed_includes_rounds_that_end_earlier() -> None:
    known = [Round(ROUND, RoundStatus.ACTIVE, 2000, (), 1), Round(LATER_ROUND, RoundStatus.ACTIVE, 3000, (), 2)]
    counts = {ROUND: {ShareState.RECEIVED: 100}, LATER_ROUND: {ShareState.RECEIVED: 50}}
    overview = build_overview(
        now=1000.0, status=partial_state(**FACTS), rounds=known, counts=counts, due_ahead={}, failures=[]
    )
    assert [row["seconds_needed"] for row in overview["rounds"]] == [15, 10]


def test_overview_time_needed_exceeds_time_left_if_shares_are_due_too_late() -> None:
    known = [Round(ROUND, RoundStatus.ACTIVE, 1000 + 1200, (), 1)]
    counts = {ROUND: {ShareState.RECEIVED: 700}}
    due_ahead = {ROUND: DueForecast((*[0] * 19, 700, *[0] * 40), 0)}
    overview = build_overview(
        now=1000.0, status=partial_state(**FACTS), rounds=known, counts=counts, due_ahead=due_ahead, failures=[]
    )
    assert overview["rounds"][0]["seconds_needed"] == 1200 + (700 - 60 * 10) / 10
