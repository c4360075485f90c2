"""What an operator means by `--round` and `--due-before`: the words of the tables, made whole."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from helper.cli.target import Target
from helper.errors import NothingThere

_SHORTEST: Final = 6
_LATER: Final = re.compile(r"\+([0-9]{1,9})(s|min|m|h|d)")
_SECONDS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def wanted(target: Target, round_id: str, state: str, due_before: str, stage: str, *, now: float) -> dict[str, str]:
    """The conditions as the daemon takes them.

    Args:
        target: the queue, whose rounds are asked for where a round's beginning is given.
        round_id: 64 hex characters or the first 6 or more; empty for any.
        state: a state's name, which whoever answers looks at.
        due_before: see `parse_due_before`; empty for any.
        stage: as `state`.
        now: unix seconds.

    Raises:
        ValueError: one of them is not that.
        NothingThere: no known round begins so, or there is nobody to ask.
    """
    return {
        "round": resolve_round(target, round_id),
        "state": state,
        "due_before": parse_due_before(due_before, now),
        "stage": stage,
    }


def resolve_round(target: Target, text: str) -> str:
    """The 64 hex characters of the one known round that begins so; a whole id, and nothing, are left as they are."""
    beginning = text.lower()
    if not beginning or len(beginning) >= 64:
        return beginning
    if len(beginning) < _SHORTEST or not re.fullmatch("[0-9a-f]+", beginning):
        raise ValueError(f"round must be 64 hex characters, or the first {_SHORTEST} or more of a round that is known")
    found = [str(one["round"]) for one in target.ask("/rounds")["rounds"] if one["round"].startswith(beginning)]
    if not found:
        raise NothingThere(f"no round is known that begins with {beginning}")
    if len(found) > 1:
        raise ValueError(f"{len(found)} rounds begin with {beginning}: give more of it")
    return found[0]


def parse_due_before(text: str, now: float) -> str:
    """A time as unix seconds: those themselves, `+10min` from now (s, min, h, d), or UTC as tables have it.

    A second that has a fraction is the next one, as *before* includes its beginning.

    Raises:
        ValueError: it is none of these.
    """
    if not text or text.isdecimal():
        return text
    if later := _LATER.fullmatch(text):
        return str(int(now) + int(later[1]) * _SECONDS[later[2]])
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            "due_before must be a time in unix seconds, UTC as in the list (2026-01-31 18:30:00), or +10min"
        ) from None
    return str(-int(-(at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() // 1))
