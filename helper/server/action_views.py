"""JSON of the rounds and the audit log for operators. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from helper.server.views import Counts, Source, counts_json
from helper.store.action_rows import Action

ROUND_STATUS_NAMES: Final = {1: "active", 2: "tallying", 3: "finalized", 4: "pending"}
DEFAULT_ACTION_LIMIT: Final = 50
"""Default maximum number of actions in a list."""


@dataclass(frozen=True, slots=True)
class RoundState:
    """The known state of a round.

    Attributes:
        round_id: 32 bytes.
        status: the chain's status number.
        vote_end_time: unix seconds.
        created_at_height: block height.
        tree_size: number of known leaves of its tree.
        is_closed: whether the chain has closed it.
        frozen_reason: why its processing is suspended, or None.
    """

    round_id: bytes
    status: int
    vote_end_time: int
    created_at_height: int
    tree_size: int
    is_closed: bool
    frozen_reason: str | None = None


def rounds_json(rounds: Iterable[RoundState], counts: Counts, *, now: float, source: Source) -> dict[str, Any]:
    """`rounds`: each round with its counts, the latest end first; `now` in unix seconds."""
    listed = sorted(rounds, key=lambda state: (-state.vote_end_time, state.round_id))
    return {
        "source": source,
        "now": round(now, 3),
        "rounds": [
            {
                "round": state.round_id.hex(),
                "status": ROUND_STATUS_NAMES.get(state.status, str(state.status)),
                "ends": state.vote_end_time,
                "left": max(0.0, round(state.vote_end_time - now, 3)),
                "created_at_height": state.created_at_height,
                "tree_size": state.tree_size,
                "closed": state.is_closed,
                "frozen": state.frozen_reason,
                "shares": counts_json(counts.get(state.round_id, {})),
            }
            for state in listed
        ],
    }


def actions_json(actions: Sequence[Action], *, source: Source) -> dict[str, Any]:
    """`queue audit`: operator actions, the latest first; times in unix seconds."""
    return {
        "source": source,
        "actions": [
            {
                "id": action.id,
                "at": action.started_ms / 1000,
                "ended": None if action.ended_ms is None else action.ended_ms / 1000,
                "uid": action.actor.uid,
                "who": action.actor.name,
                "way": action.actor.channel,
                "what": action.name,
                "wanted": action.parameters,
                "outcome": action.outcome,
            }
            for action in actions
        ],
    }
