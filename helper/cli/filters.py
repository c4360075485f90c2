"""Options that select shares, as query parameters of the operator API."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from helper.cli.operator_api import OperatorApi
from helper.clock import SystemClock
from helper.errors import NotFound

RoundOption = Annotated[
    str,
    typer.Option("--round", help="Only this round (hex, or a prefix of at least 6 characters).", show_default=False),
]
StateOption = Annotated[
    str,
    typer.Option(
        "--state",
        help="Only this state: received, witnessed, broadcast or failed.",
        autocompletion=lambda: ["received", "witnessed", "broadcast", "failed"],
        show_default=False,
    ),
]
DueBeforeOption = Annotated[
    str,
    typer.Option(
        "--due-before",
        help="Only shares due before this time: Unix seconds, a UTC time (2026-01-31 18:30:00), or an offset such as "
        "+10min.",
        show_default=False,
    ),
]
StageOption = Annotated[
    str, typer.Option("--stage", help="Only shares whose last event was in this stage.", show_default=False)
]
RefsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SHARE",
        help="Share references as shown by `queue list`, or prefixes of at least 6 characters.",
        show_default=False,
    ),
]

_MIN_PREFIX_CHARS: Final = 6
_OFFSET: Final = re.compile(r"\+([0-9]{1,9})(s|min|m|h|d)")
UNIT_SECONDS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def build_filter_query(api: OperatorApi, round_id: str, state: str, due_before: str, stage: str) -> dict[str, str]:
    """Return the filter options as query parameters of the operator API.

    Args:
        api: lists the rounds of the queue, to resolve a prefix of a round id.
        round_id: 64 hex characters, or a prefix of at least 6; empty for any.
        state: name of a state, validated by the operator API.
        due_before: see `parse_due_before`; empty for any.
        stage: name of a stage, validated by the operator API.

    Raises:
        ValueError: an option is invalid.
        NotFound: no known round has this prefix, or there is no queue.
    """
    return {
        "round": resolve_round(api, round_id),
        "state": state,
        "due_before": parse_due_before(due_before, SystemClock().now()),
        "stage": stage,
    }


def resolve_round(api: OperatorApi, text: str) -> str:
    """Return the full id of the known round with this prefix. A full id and "" are returned unchanged."""
    prefix = text.lower()
    if not prefix or len(prefix) >= 64:
        return prefix
    if len(prefix) < _MIN_PREFIX_CHARS or not re.fullmatch("[0-9a-f]+", prefix):
        raise ValueError(
            f"round must be 64 hex characters, or a prefix of at least {_MIN_PREFIX_CHARS} of a known round"
        )
    matches = [str(row["round"]) for row in api.get("/rounds")["rounds"] if row["round"].startswith(prefix)]
    if not matches:
        raise NotFound(f"no known round begins with {prefix}")
    if len(matches) > 1:
        raise ValueError(f"{len(matches)} rounds begin with {prefix}: use a longer prefix")
    return matches[0]


def parse_due_before(text: str, now: float) -> str:
    """Parse a time: Unix seconds, `+10min` from now (s, min, h, d), or UTC as in tables.

    Returns:
        Unix seconds. A fraction is rounded up, so that "before" includes the given time.

    Raises:
        ValueError: the format is none of these.
    """
    if not text or text.isdecimal():
        return text
    if offset := _OFFSET.fullmatch(text):
        return str(int(now) + int(offset[1]) * UNIT_SECONDS[offset[2]])
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            "due_before must be Unix seconds, a UTC time (2026-01-31 18:30:00), or an offset such as +10min"
        ) from None
    return str(-int(-(at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() // 1))
