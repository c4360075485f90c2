"""Overview of the queue for the page and `queue watch`."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from helper.chain.chain_data import Round, RoundStatus
from helper.core.share import ShareState
from helper.observability.queue_snapshot import build_overview
from helper.store.models import DueForecast, FailedShares
from tests.support.service_state import partial_state, snapshot_of

pytestmark = pytest.mark.anyio

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


async def overview_of(*queue: Any, now: float = 1000.0, **facts: Any) -> dict[str, Any]:
    """The overview as JSON, of a queue as in `snapshot_of`."""
    overview = build_overview(await snapshot_of(*queue, now=now), partial_state(**{**FACTS, **facts}))
    result: dict[str, Any] = orjson.loads(orjson.dumps(overview))
    return result


async def test_overview_contains_sums_and_no_single_share() -> None:
    overview = await overview_of(
        [Round(ROUND, RoundStatus.ACTIVE, 2000, (), 1), Round(LATER_ROUND, RoundStatus.PENDING, 3000, (), 2)],
        {
            ROUND: {ShareState.WAITING: 10, ShareState.PROVING: 2, ShareState.CONFIRMED: 5},
            b"\x09" * 32: {ShareState.FAILED: 1},
        },
        {ROUND: DueForecast((3, 4, *[0] * 58), 3)},
        [FailedShares("broadcast", "the round is over", 4, 5.0)],
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
        "outlook": "enough",
    }
    assert overview["paused"] == "the circuit is refused"
    assert overview["provers"] == {"slots": 2, "busy": 1, "seconds_per_proof": 0.2}
    assert overview["endpoints"][1] == {"name": "b:80", "fresh": False, "reason": "stale"}
    assert overview["failures"] == [{"at": 5.0, "stage": "broadcast", "reason": "the round is over", "count": 4}]


async def test_overview_busy_provers_never_exceed_slots() -> None:
    assert (await overview_of(in_hand=4))["provers"]["busy"] == 2, "two of the four wait for a slot"


async def test_overview_before_first_proof_omits_time_needed() -> None:
    known = [Round(ROUND, RoundStatus.ACTIVE, 2000, (), 1)]
    (row,) = (await overview_of(known, now=1.0, proof={"p50_ms": None}))["rounds"]
    assert (row["seconds_needed"], row["outlook"], row["due_per_minute"]) == (None, None, [0] * 60)


async def test_overview_time_needed_includes_rounds_that_end_earlier() -> None:
    known = [Round(ROUND, RoundStatus.ACTIVE, 2000, (), 1), Round(LATER_ROUND, RoundStatus.ACTIVE, 3000, (), 2)]
    counts = {ROUND: {ShareState.WAITING: 100}, LATER_ROUND: {ShareState.WAITING: 50}}
    assert [row["seconds_needed"] for row in (await overview_of(known, counts))["rounds"]] == [15, 10]


async def test_overview_time_needed_exceeds_time_left_if_shares_are_due_too_late() -> None:
    known = [Round(ROUND, RoundStatus.ACTIVE, 1000 + 1200, (), 1)]
    due_ahead = {ROUND: DueForecast((*[0] * 19, 700, *[0] * 40), 0)}
    (row,) = (await overview_of(known, {ROUND: {ShareState.WAITING: 700}}, due_ahead))["rounds"]
    assert (row["seconds_needed"], row["outlook"]) == (1200 + (700 - 60 * 10) / 10, "short")


@pytest.mark.parametrize(("waiting", "outlook"), [(0, None), (8000, "enough"), (8001, "tight"), (10_001, "short")])
async def test_overview_outlook(waiting: int, outlook: str | None) -> None:
    known = [Round(ROUND, RoundStatus.ACTIVE, 1000 + 1000, (), 1)]
    (row,) = (await overview_of(known, {ROUND: {ShareState.WAITING: waiting}}))["rounds"]
    assert row["outlook"] == outlook
