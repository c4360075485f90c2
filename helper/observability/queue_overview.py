"""Aggregate state of the queue, as shown by the page and `queue watch`. Pure.

It contains no data of a single share: no reference, no due time, no witness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from helper.chain.chain_data import Round
from helper.core.load_forecast import DrainResult
from helper.core.share import ShareState
from helper.observability.backlog_forecast import Counts, forecast_rounds, measured_rate
from helper.observability.service_state import ServiceState, TimingSummary
from helper.store.models import DueForecast, FailureGroup


class Percentiles(TypedDict):
    """Percentiles in milliseconds; None without samples."""

    p50: float | None
    p99: float | None


class Lateness(TypedDict):
    """Time since the due time of a share, at the start of its proof and at its broadcast."""

    start: Percentiles
    broadcast: Percentiles


class ProverOverview(TypedDict):
    """Number of provers, how many of them are busy, and the median time of a proof."""

    slots: int
    busy: int
    seconds_per_proof: float | None


class NodeOverview(TypedDict):
    """A node, and why it is not used."""

    name: str
    fresh: bool
    reason: str | None


class FailureOverview(TypedDict):
    """Permanent failures with one stage and reason; `at` is the latest."""

    at: float
    stage: str
    reason: str
    count: int


class RoundOverview(TypedDict):
    """Shares of a round: counts by state, and due counts for each of the next 60 minutes and later.

    `seconds_needed` is the time to the end of the round minus the slack of `helper.core.load_forecast`: above the time
    that is left if the shares cannot be proven before the end. None while the time of a proof is not known.
    """

    round_id: str
    vote_end_time: int
    status: int
    waiting: int
    proving: int
    broadcast: int
    confirmed: int
    failed: int
    due_per_minute: list[int]
    later: int
    seconds_needed: float | None


class Overview(TypedDict):
    """The state of the queue: data of an event `state`, and the response to `GET /overview`."""

    at: float
    height: int | None
    circuit: str
    ready: bool
    paused: str | None
    rounds: list[RoundOverview]
    lateness_ms: Lateness
    provers: ProverOverview
    endpoints: list[NodeOverview]
    failures: list[FailureOverview]


def build_overview(
    *,
    now: float,
    status: ServiceState,
    rounds: Sequence[Round],
    counts: Counts,
    due_ahead: Mapping[bytes, DueForecast],
    failures: Sequence[FailureGroup],
) -> Overview:
    """Build the state as plain JSON values.

    Args:
        now: Unix seconds.
        status: state of the running service.
        rounds: all known rounds.
        counts: shares by round and state.
        due_ahead: waiting shares by round and minute.
        failures: permanent failures by stage and reason.
    """
    provers = status["provers"]
    seconds = status["proof"]["p50_ms"]
    per_proof = None if seconds is None else seconds / 1000
    rate = measured_rate(status)
    forecasts = {} if rate.seconds_per_proof is None else forecast_rounds(rounds, counts, due_ahead, rate, now)
    return {
        "at": now,
        "height": status["height"],
        "circuit": status["circuit"],
        "ready": status["ready"],
        "paused": status["intake_paused"] or status["paused"],
        "rounds": [
            _round_overview(
                known,
                counts.get(known.round_id, {}),
                due_ahead.get(known.round_id),
                forecasts.get(known.round_id),
                now,
            )
            for known in sorted(rounds, key=lambda known: -known.vote_end_time)
        ],
        "lateness_ms": {
            "start": _percentiles(status["lateness_start"]),
            "broadcast": _percentiles(status["lateness_broadcast"]),
        },
        "provers": {
            "slots": provers["workers"],
            # The dispatcher claims more shares than there are provers, so that no prover is idle.
            "busy": min(status["in_hand"], provers["workers"]),
            "seconds_per_proof": per_proof,
        },
        "endpoints": [
            {"name": node["name"], "fresh": node["reason"] is None, "reason": node["reason"]}
            for node in status["endpoints"]
        ],
        "failures": [
            {"at": group.at_ms / 1000, "stage": group.stage, "reason": group.note, "count": group.count}
            for group in failures
        ],
    }


def _round_overview(
    known: Round,
    counts: Mapping[ShareState, int],
    due_ahead: DueForecast | None,
    forecast: DrainResult | None,
    now: float,
) -> RoundOverview:
    waiting, proving = counts.get(ShareState.RECEIVED, 0), counts.get(ShareState.WITNESSED, 0)
    return {
        "round_id": known.round_id.hex(),
        "vote_end_time": known.vote_end_time,
        "status": int(known.status),
        "waiting": waiting,
        "proving": proving,
        "broadcast": counts.get(ShareState.BROADCAST, 0),
        "confirmed": counts.get(ShareState.SUBMITTED, 0),
        "failed": counts.get(ShareState.FAILED, 0),
        "due_per_minute": list(due_ahead.minutes) if due_ahead else [0] * 60,
        "later": due_ahead.later if due_ahead else 0,
        "seconds_needed": None if forecast is None else round(known.vote_end_time - now - forecast.slack_seconds, 1),
    }


def _percentiles(timing: TimingSummary) -> Percentiles:
    return {"p50": timing["p50_ms"], "p99": timing["p99_ms"]}
