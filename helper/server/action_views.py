"""The JSON of rounds and of operators' acts, the same from the running daemon and from the file. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from helper.operations.actions import ImportReport
from helper.server.views import Counts, Source, counts_json
from helper.store.action_rows import Action

STATUSES: Final = {1: "active", 2: "tallying", 3: "finalized", 4: "pending"}
ACTIONS_SHOWN: Final = 50
"""Acts that are told unless asked otherwise."""


@dataclass(frozen=True, slots=True)
class RoundState:
    """What is known of a round.

    Attributes:
        round_id: 32 bytes.
        status: as the chain numbers it.
        vote_end_time: unix second.
        created_at_height: block height.
        tree_size: leaves of its tree that are here.
        closed: whether the chain's own word has closed it.
        frozen: why nothing may be done about it, or None.
    """

    round_id: bytes
    status: int
    vote_end_time: int
    created_at_height: int
    tree_size: int
    closed: bool
    frozen: str | None = None


def rounds_json(rounds: Iterable[RoundState], counts: Counts, *, now: float, source: Source) -> dict[str, Any]:
    """`rounds`: each with what it holds, the one that ends last first; `now` in unix seconds."""
    listed = sorted(rounds, key=lambda one: (-one.vote_end_time, one.round_id))
    return {
        "source": source,
        "now": round(now, 3),
        "rounds": [
            {
                "round": one.round_id.hex(),
                "status": STATUSES.get(one.status, str(one.status)),
                "ends": one.vote_end_time,
                "left": max(0.0, round(one.vote_end_time - now, 3)),
                "created_at_height": one.created_at_height,
                "tree_size": one.tree_size,
                "closed": one.closed,
                "frozen": one.frozen,
                "shares": counts_json(counts.get(one.round_id, {})),
            }
            for one in listed
        ],
    }


def actions_json(actions: Sequence[Action], *, source: Source) -> dict[str, Any]:
    """`queue audit`: what operators did, the latest first; times in unix seconds."""
    return {
        "source": source,
        "actions": [
            {
                "id": act.id,
                "at": act.begun_ms / 1000,
                "ended": None if act.ended_ms is None else act.ended_ms / 1000,
                "uid": act.actor.uid,
                "who": act.actor.name,
                "way": act.actor.way,
                "what": act.what,
                "wanted": act.wanted,
                "outcome": act.outcome,
            }
            for act in actions
        ],
    }


def import_facts(report: ImportReport) -> dict[str, Any]:
    """What an import did, for `act_json`: the counts, and each share that was left with the reason."""
    left = [
        {
            "number": one.number,
            "ref": one.ref,
            "round": None if one.round_id is None else one.round_id.hex(),
            "reason": one.reason.value,
        }
        for one in report.left
    ]
    return {**report.counts, "left": left}


def act_json(facts: Mapping[str, Any], *, dry: bool, source: Source) -> dict[str, Any]:
    """What came of an act, or would come of it."""
    return {"source": source, "dry_run": dry, **facts}
