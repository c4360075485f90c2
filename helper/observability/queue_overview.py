"""Aggregate state of the queue, as shown by the page and `queue watch`. Pure.

It contains no data of a single share: no reference, no due time, no witness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from helper.chain.models import Round
from helper.core.share import ShareState
from helper.store.rows import DueAhead, FailureGroup

Counts = Mapping[bytes, Mapping[ShareState, int]]


def overview(
    *,
    now: float,
    facts: Mapping[str, Any],
    rounds: Sequence[Round],
    counts: Counts,
    ahead: Mapping[bytes, DueAhead],
    failures: Sequence[FailureGroup],
) -> dict[str, Any]:
    """Build the state as plain JSON values.

    Args:
        now: Unix seconds.
        facts: state of the running service (`Service.facts`).
        rounds: all known rounds.
        counts: shares by round and state.
        ahead: waiting shares by round and minute.
        failures: permanent failures by stage and reason.
    """
    provers = facts["provers"]
    seconds = facts["proof"]["p50_ms"]
    per_proof = None if seconds is None else seconds / 1000
    return {
        "at": now,
        "height": facts["height"],
        "circuit": facts["circuit"],
        "ready": facts["ready"],
        "paused": facts["intake_paused"] or facts["paused"],
        "rounds": [
            _round(known, counts.get(known.round_id, {}), ahead.get(known.round_id), per_proof, provers["workers"])
            for known in sorted(rounds, key=lambda known: -known.vote_end_time)
        ],
        "lateness_ms": {
            "start": _percentiles(facts["lateness_start"]),
            "broadcast": _percentiles(facts["lateness_broadcast"]),
        },
        "provers": {
            "slots": provers["workers"],
            # The dispatcher claims more shares than there are provers, so that no prover is idle.
            "busy": min(facts["in_hand"], provers["workers"]),
            "seconds_per_proof": per_proof,
        },
        "endpoints": [
            {"name": node["name"], "fresh": node["reason"] is None, "reason": node["reason"]}
            for node in facts["endpoints"]
        ],
        "failures": [
            {"at": group.at_ms / 1000, "stage": group.stage, "reason": group.note, "count": group.count}
            for group in failures
        ],
    }


def _round(
    known: Round,
    counts: Mapping[ShareState, int],
    ahead: DueAhead | None,
    per_proof: float | None,
    slots: int,
) -> dict[str, Any]:
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
        "due_per_minute": list(ahead.minutes) if ahead else [0] * 60,
        "later": ahead.later if ahead else 0,
        "seconds_needed": None if per_proof is None else round((waiting + proving) * per_proof / max(1, slots), 1),
    }


def _percentiles(timing: Mapping[str, Any]) -> dict[str, Any]:
    return {"p50": timing["p50_ms"], "p99": timing["p99_ms"]}
