"""The queue's answers for eyes: the JSON of `helper.api.views` as tables and lines."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import typer

from helper.cli.output import emit_table, say

_STATES = ("received", "witnessed", "broadcast", "submitted", "failed", "total")
_SHORT = 12


def print_list(answer: Mapping[str, Any]) -> None:
    """`queue list`: a line a share."""
    columns = ("share", "round", "state", "submit at", "due", "attempts", "stage", "note")
    emit_table(
        columns,
        [
            (
                share["ref"],
                share["round"][:_SHORT],
                _state(share),
                moment(share["submit_at"]) if share["submit_at"] else "at once",
                moment(share["due"]),
                share["attempts"],
                share["stage"],
                share["note"],
            )
            for share in answer["shares"]
        ],
    )
    say(f"{len(answer['shares'])} shares, told by the {answer['source']}")


def print_story(answer: Mapping[str, Any]) -> None:
    """`queue show`: what is so, then what happened."""
    spent = ", ".join(f"{stage} {number}" for stage, number in answer["attempts_by_stage"].items())
    end = answer["vote_end_time"]
    facts = [
        ("share", answer["ref"]),
        ("round", answer["round"]),
        ("round ends", moment(end) if end is not None else "not known"),
        ("state", _state(answer)),
        ("received", moment(answer["received"])),
        ("submit at", moment(answer["submit_at"]) if answer["submit_at"] else "at once"),
        ("due", moment(answer["due"])),
        ("attempts", f"{answer['attempts']} ({spent})" if spent else answer["attempts"]),
        ("prover crashes", answer["crashes"]),
    ]
    if answer["cannot_count"]:
        facts.append(("warning", "its time is the round's end, so it cannot count"))
    for name, value in (answer["transaction"] or {}).items():
        facts.append((f"transaction {name.replace('_', ' ')}", value))
    emit_table(("what", "value"), facts)
    typer.echo("")
    emit_table(
        ("when", "stage", "what", "attempt"),
        [
            (moment(event["at"]), event["stage"], event["note"], "spent" if event["counted"] else "")
            for event in answer["history"]
        ],
    )


def print_stats(answer: Mapping[str, Any]) -> None:
    """`queue stats`: a line a round, the sum, and the daemon's own figures."""
    rows = [(name[:_SHORT], *(counts[state] for state in _STATES)) for name, counts in answer["rounds"].items()]
    rows.append(("all", *(answer["total"][state] for state in _STATES)))
    emit_table(("round", *_STATES), rows)
    if answer["damaged"]:
        say(f"{len(answer['damaged'])} damaged rows were set aside: see --json")
    service = answer.get("service")
    if service:
        typer.echo("")
        emit_table(("daemon", "value"), list(_flat(service)))


def moment(seconds: float) -> str:
    """A unix time as UTC, to the millisecond where there are any; as a number when no calendar has it."""
    try:
        at = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return str(seconds)
    return at.strftime("%Y-%m-%d %H:%M:%S") + (f".{at.microsecond // 1000:03d}" if at.microsecond else "")


def _state(share: Mapping[str, Any]) -> str:
    return f"{share['state']} (damaged)" if share["damaged"] else str(share["state"])


def _flat(value: Any, name: str = "") -> list[tuple[str, object]]:
    """Nested figures as lines with dotted names."""
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and value:
        items = {str(number): item for number, item in enumerate(value)}.items()
    else:
        return [(name, "-" if value in ({}, []) else value)]
    return [line for key, item in items for line in _flat(item, f"{name}.{key}" if name else str(key))]
