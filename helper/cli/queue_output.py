"""Formats responses of the operator API as tables and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from helper.cli.output import emit_table, say
from helper.core.time_text import format_time

_STATES = ("received", "witnessed", "broadcast", "submitted", "failed", "total")
_SHORT = 12
_DATE = len("2026-01-01")
_LEFT = {
    "damaged": "rows damaged",
    "closed": "round closed",
    "moved": "moved to another helper before (`queue retry --stage moved` reactivates them)",
}
_NOT_TAKEN = {
    "queued": "already queued here",
    "failed": "failed here (`queue retry` retries them)",
    "damaged": "rows damaged here",
    "spent": "confirmed on the chain",
    "closed": "round closed",
    "unknown": "round unknown here: let the helper read the chain, then import again",
    "invalid": "invalid",
}
_LEFT_SHOWN = 20


def print_list(answer: Mapping[str, Any]) -> None:
    """Print `queue list`: one row per share; with failed shares, first one row per reason."""
    if answer.get("failed"):
        print_failed(answer["failed"])
        typer.echo("")
    columns = ("share", "round", "state", "submit at", "due", "attempts", "stage", "note")
    emit_table(
        columns,
        [
            (
                share["ref"],
                share["round"][:_SHORT],
                _state(share),
                format_time(share["submit_at"]) if share["submit_at"] else "immediately",
                format_time(share["due"]),
                share["attempts"],
                share["stage"],
                share["note"],
            )
            for share in answer["shares"]
        ],
    )
    say(f"{len(answer['shares'])} shares, from the {answer['source']}")


def print_story(answer: Mapping[str, Any]) -> None:
    """Print `queue show`: the state of a share, then its history."""
    spent = ", ".join(f"{stage} {number}" for stage, number in answer["attempts_by_stage"].items())
    end = answer["vote_end_time"]
    facts = [
        ("share", answer["ref"]),
        ("round", answer["round"]),
        ("round ends", format_time(end) if end is not None else "unknown"),
        ("state", _state(answer)),
        ("received", format_time(answer["received"])),
        ("submit at", format_time(answer["submit_at"]) if answer["submit_at"] else "immediately"),
        ("due", format_time(answer["due"])),
        ("attempts", f"{answer['attempts']} ({spent})" if spent else answer["attempts"]),
        ("prover crashes", answer["crashes"]),
    ]
    if answer["cannot_count"]:
        facts.append(("warning", "due at the end of the round, so it cannot count"))
    for name, value in (answer["transaction"] or {}).items():
        facts.append((f"transaction {name.replace('_', ' ')}", value))
    emit_table(("field", "value"), facts)
    typer.echo("")
    emit_table(
        ("time", "stage", "event", "attempt"),
        [
            (format_time(event["at"]), event["stage"], event["note"], "spent" if event["counted"] else "")
            for event in answer["history"]
        ],
    )


def print_stats(answer: Mapping[str, Any]) -> None:
    """Print `queue stats`: one row per round, the total, and the values of the daemon."""
    rows = [(name[:_SHORT], *(counts[state] for state in _STATES)) for name, counts in answer["rounds"].items()]
    rows.append(("all", *(answer["total"][state] for state in _STATES)))
    emit_table(("round", *_STATES), rows)
    if answer["failed"]:
        typer.echo("")
        print_failed(answer["failed"])
    if answer["failed_before"]:
        typer.echo("")
        emit_table(
            ("purged on", "failed", "stage", "reason"),
            [
                (format_time(row["day"])[:_DATE], row["count"], row["stage"], row["reason"])
                for row in answer["failed_before"]
            ],
        )
    if answer["damaged"]:
        say(f"{len(answer['damaged'])} damaged rows set aside: see --json")
    service = answer.get("service")
    if service:
        typer.echo("")
        emit_table(("daemon", "value"), list(_flat(service)))


def print_failed(groups: Sequence[Mapping[str, Any]]) -> None:
    """Print failed shares: one row per stage and reason."""
    emit_table(
        ("failed", "stage", "reason", "latest"),
        [(group["count"], group["stage"], group["note"], format_time(group["latest"])) for group in groups],
    )


def print_retried(answer: Mapping[str, Any]) -> None:
    """Print the result of `queue retry`."""
    would = "would be" if answer["dry_run"] else "are"
    typer.echo(f"{answer['retried']} failed shares {would} retried")
    if answer["closed"]:
        say(f"{answer['closed']} not retried: round closed")
    if answer["not_failed"]:
        say(f"{answer['not_failed']} of the named shares have not failed")


def print_purged(answer: Mapping[str, Any]) -> None:
    """Print the result of `queue purge`."""
    would = "would be" if answer["dry_run"] else "are"
    shares = ", ".join(f"{answer[state]} {state}" for state in _STATES[:-1] if answer[state])
    typer.echo(f"{shares or 'no shares'} {would} deleted with their round")


def print_exported(answer: Mapping[str, Any]) -> None:
    """Print the result of `queue export`."""
    would = "would be written" if answer["dry_run"] else "written"
    typer.echo(f"{answer['output']}: {answer['shares']} shares {would}")
    if "moved" in answer:
        typer.echo(f"{answer['moved']} are no longer processed here")
        if answer["stayed"]:
            say(f"{answer['stayed']} were being processed or have changed, so they also stay here")
    for reason, number in answer["left"].items():
        if number:
            say(f"{number} not exported: {_LEFT[reason]}")


def print_imported(answer: Mapping[str, Any]) -> None:
    """Print the result of `queue import`."""
    would = "would be" if answer["dry_run"] else "are"
    typer.echo(f"{answer['taken']} shares {would} imported")
    if answer["revived"]:
        typer.echo(f"{answer['revived']} of them had been moved from here and {would} reactivated")
    for reason, text in _NOT_TAKEN.items():
        if answer[reason]:
            say(f"{answer[reason]} not imported: {text}")
    for row in answer["left"][:_LEFT_SHOWN]:
        share = f"share {row['ref']}" if row["ref"] else "share"
        round_ = f" of round {row['round'][:_SHORT]}" if row["round"] else ""
        say(f"  {share}{round_} (number {row['number']} in the file): {row['reason']}")
    if len(answer["left"]) > _LEFT_SHOWN:
        say(f"  … --json lists all {len(answer['left'])}")


def print_audit(answer: Mapping[str, Any]) -> None:
    """Print `queue audit`: one row per action."""
    emit_table(
        ("time", "user", "by", "action", "arguments", "result"),
        [
            (
                format_time(act["at"]),
                f"{act['who']} ({act['uid']})",
                act["way"],
                act["what"],
                _pairs(act["wanted"]),
                "interrupted, or in progress" if act["outcome"] is None else _pairs(act["outcome"]),
            )
            for act in answer["actions"]
        ],
    )


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {str(value)[:_SHORT] if name == 'round' else value}" for name, value in values.items())


def _state(share: Mapping[str, Any]) -> str:
    return f"{share['state']} (damaged)" if share["damaged"] else str(share["state"])


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, object]]:
    """Flatten nested values to dotted names; named items and timings become one row each."""
    if value in ({}, []):
        yield name, "-"
    elif isinstance(value, dict) and {"count", "p50_ms", "p99_ms", "max_ms"} <= value.keys():
        yield name, _timing(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and all(isinstance(item, dict) and "name" in item for item in value):
        for item in value:
            yield f"{name}.{item['name']}", _summarize(item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _flat(item, f"{name}.{number}")
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))
    else:
        yield name, round(value, 3) if isinstance(value, float) else value


def _timing(times: Mapping[str, Any]) -> str:
    if not times["count"]:
        return "none yet"
    median, p99, longest = (f"{times[name]:.0f} ms" for name in ("p50_ms", "p99_ms", "max_ms"))
    return f"{times['count']}: median {median}, p99 {p99}, max {longest}"


def _summarize(item: Mapping[str, Any]) -> str:
    """Format a check or a node: `ok` or the problem, then its values."""
    problem = item.get("problem") or item.get("reason")
    values = [
        f"{key.replace('_', ' ')} {round(value, 1) if isinstance(value, float) else value}"
        for key, value in item.items()
        if key not in {"name", "problem", "reason"} and value is not None
    ]
    return ", ".join([str(problem or "ok"), *values])
