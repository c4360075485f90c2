"""Formats responses of the operator API as tables and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from helper.cli.output import emit_table, print_message
from helper.core.time_text import format_time

_STATES = ("received", "witnessed", "broadcast", "submitted", "failed", "total")
_SHORT_CHARS = 12
_DATE_CHARS = len("2026-01-01")
_NOT_EXPORTED_REASONS = {
    "damaged": "rows damaged",
    "closed": "round closed",
    "moved": "already moved to another helper (if it lost them: `queue retry --stage moved`)",
}
_NOT_IMPORTED_REASONS = {
    "queued": "already queued here",
    "failed": "failed here (`queue retry` retries them)",
    "damaged": "rows damaged here",
    "conflict": "queued here with other content",
    "spent": "confirmed on the chain",
    "closed": "round closed",
    "unknown": "round unknown here: wait until the helper has read the chain, then import again",
    "invalid": "invalid",
}
_MAX_SKIPPED_LISTED = 20
_SHOWN_STATS = frozenset({"source", "total", "rounds", "failed", "failed_before", "damaged", "service"})
"""The parts of `queue stats` that are not shown as a name and a value."""
_STATE_NAMES = {
    "block_age": "seconds since the newest block",
    "clock_skew": "clock minus chain, seconds",
    "confirmation": "time to confirmation",
    "database_skew": "database minus clock, seconds",
    "in_hand": "shares being proven or sent",
    "intake_paused": "accepting paused",
    "lateness_broadcast": "sent after the due time",
    "lateness_start": "begun after the due time",
    "paused": "processing paused",
    "process.core_bytes": "limit of core files, bytes",
    "process.dumpable": "core files and debuggers possible",
    "process.open_files": "limits of open files",
    "process.pid": "process id",
    "proof": "time of a proof",
    "provers.deaths": "unexpected exits of provers",
    "provers.self_test_seconds": "time of the self-test, seconds",
    "provers.timeout_seconds": "timeout of a proof, seconds",
    "queue_age": "time in the queue",
    "tree_lag": "blocks not in the trees yet",
    "unread_blocks": "older blocks not read yet",
}
"""Names of values of the running helper (`ServiceState`). Others are shown with spaces instead of `_` and `.`."""
_STATE_GROUPS = {"checks": "check", "counts": "since the start:", "endpoints": "node", "recent_failures": "failure"}


def print_list(response: Mapping[str, Any]) -> None:
    """Print `queue list`: one row per share; with failed shares, first one row per reason."""
    if response.get("failed"):
        print_failed(response["failed"])
        typer.echo("")
    columns = ("share", "round", "state", "submit at", "due", "attempts", "stage", "note")
    emit_table(
        columns,
        [
            (
                share["ref"],
                share["round"][:_SHORT_CHARS],
                _format_state(share),
                format_time(share["submit_at"]) if share["submit_at"] else "immediately",
                format_time(share["due"]),
                share["attempts"],
                share["stage"],
                share["note"],
            )
            for share in response["shares"]
        ],
    )
    print_message(f"{len(response['shares'])} shares, from the {response['source']}")


def print_story(response: Mapping[str, Any]) -> None:
    """Print `queue show`: the state of a share, then its history."""
    spent = ", ".join(f"{stage} {number}" for stage, number in response["attempts_by_stage"].items())
    end = response["vote_end_time"]
    rows = [
        ("share", response["ref"]),
        ("round", response["round"]),
        ("round ends", format_time(end) if end is not None else "unknown"),
        ("state", _format_state(response)),
        ("received", format_time(response["received"])),
        ("submit at", format_time(response["submit_at"]) if response["submit_at"] else "immediately"),
        ("due", format_time(response["due"])),
        ("attempts", f"{response['attempts']} ({spent})" if spent else response["attempts"]),
        ("prover crashes", response["crashes"]),
    ]
    if response["state"] == "received":
        next_attempt = response["next_attempt"]
        rows.append(
            ("next attempt", "none before the round ends" if next_attempt is None else format_time(next_attempt))
        )
    if response["cannot_count"]:
        rows.append(("warning", "due at the end of the round, so it cannot count"))
    for name, value in (response["transaction"] or {}).items():
        rows.append((f"transaction {name.replace('_', ' ')}", value))
    emit_table(("field", "value"), rows)
    typer.echo("")
    emit_table(
        ("time", "stage", "event", "attempt"),
        [
            (format_time(event["at"]), event["stage"], event["note"], "spent" if event["counted"] else "")
            for event in response["history"]
        ],
    )


def print_stats(response: Mapping[str, Any]) -> None:
    """Print `queue stats`: one row per round, the total, and the state of the running helper."""
    rows = [(name[:_SHORT_CHARS], *(counts[state] for state in _STATES)) for name, counts in response["rounds"].items()]
    rows.append(("all", *(response["total"][state] for state in _STATES)))
    emit_table(("round", *_STATES), rows)
    if response["failed"]:
        typer.echo("")
        print_failed(response["failed"])
    if response["failed_before"]:
        typer.echo("")
        emit_table(
            ("purged on", "failed", "stage", "reason"),
            [
                (format_time(row["day"])[:_DATE_CHARS], row["count"], row["stage"], row["reason"])
                for row in response["failed_before"]
            ],
        )
    if response["damaged"]:
        print_message(f"{len(response['damaged'])} damaged rows quarantined: see --json")
    values = {name: value for name, value in response.items() if name not in _SHOWN_STATS} | response.get("service", {})
    if values:
        typer.echo("")
        emit_table(("daemon", "value"), [(_state_name(name), _format_value(value)) for name, value in _flatten(values)])


def print_failed(groups: Sequence[Mapping[str, Any]]) -> None:
    """Print failed shares: one row per stage and reason."""
    emit_table(
        ("failed", "stage", "reason", "latest"),
        [(group["count"], group["stage"], group["note"], format_time(group["latest"])) for group in groups],
    )


def print_retried(response: Mapping[str, Any]) -> None:
    """Print the result of `queue retry`."""
    would = "would be" if response["dry_run"] else "are"
    typer.echo(f"{response['retried']} failed shares {would} retried")
    if response["closed"]:
        print_message(f"{response['closed']} not retried: round closed")
    if response["moved"]:
        print_message(f"{response['moved']} not retried: {_NOT_EXPORTED_REASONS['moved']}")
    if response["not_failed"]:
        print_message(f"{response['not_failed']} of the specified shares have not failed")


def print_purged(response: Mapping[str, Any]) -> None:
    """Print the result of `queue purge`."""
    would = "would be" if response["dry_run"] else "are"
    shares = ", ".join(f"{response[state]} {state}" for state in _STATES[:-1] if response[state])
    typer.echo(f"{shares or 'no shares'} {would} deleted with their round")


def print_exported(response: Mapping[str, Any]) -> None:
    """Print the result of `queue export`."""
    would = "would be written" if response["dry_run"] else "written"
    typer.echo(f"{response['output']}: {response['shares']} shares {would}")
    if "moved" in response:
        typer.echo(f"{response['moved']} are no longer processed here")
        if response["stayed"]:
            print_message(f"{response['stayed']} are in the file but not moved: being processed, or changed meanwhile")
    print_not_exported(response["left"])


def print_not_exported(left: Mapping[str, int]) -> None:
    """Print how many shares were not exported, by reason."""
    for reason, number in left.items():
        if number:
            print_message(f"{number} not exported: {_NOT_EXPORTED_REASONS[reason]}")


def print_imported(response: Mapping[str, Any]) -> None:
    """Print the result of `queue import`."""
    would = "would be" if response["dry_run"] else "are"
    typer.echo(f"{response['taken']} shares {would} imported")
    if response["revived"]:
        typer.echo(f"{response['revived']} of them had been moved from here and {would} reactivated")
    if response.get("submitted"):
        typer.echo(f"already revealed, without a witness in the file: {response['submitted']}")
    for reason, text in _NOT_IMPORTED_REASONS.items():
        if response[reason]:
            print_message(f"{response[reason]} not imported: {text}")
    for row in response["left"][:_MAX_SKIPPED_LISTED]:
        share = f"share {row['ref']}" if row["ref"] else "share"
        round_ = f" of round {row['round'][:_SHORT_CHARS]}" if row["round"] else ""
        print_message(f"  {share}{round_} (number {row['number']} in the file): {row['reason']}")
    if len(response["left"]) > _MAX_SKIPPED_LISTED:
        print_message(f"  … --json lists all {len(response['left'])}")


def print_audit(response: Mapping[str, Any]) -> None:
    """Print `queue audit`: one row per action."""
    emit_table(
        ("time", "user", "by", "action", "arguments", "result"),
        [
            (
                format_time(action["at"]),
                f"{action['who']} ({action['uid']})",
                action["way"],
                action["what"],
                _format_pairs(action["wanted"]),
                "interrupted, or in progress" if action["outcome"] is None else _format_pairs(action["outcome"]),
            )
            for action in response["actions"]
        ],
    )
    if not response["actions"]:
        print_message("no actions yet")


def _format_pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {str(value)[:_SHORT_CHARS] if name == 'round' else value}" for name, value in values.items()
    )


def _format_state(share: Mapping[str, Any]) -> str:
    return f"{share['state']} (damaged)" if share["damaged"] else str(share["state"])


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, object]]:
    """Flatten nested values to dotted names. Named items and timings become one row each."""
    if value in ({}, []):
        yield name, "-"
    elif isinstance(value, dict) and {"count", "p50_ms", "p99_ms", "max_ms"} <= value.keys():
        yield name, _format_timing(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and all(isinstance(item, dict) and "name" in item for item in value):
        for item in value:
            yield f"{name}.{item['name']}", _summarize(item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _flatten(item, f"{name}.{number}")
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))
    else:
        yield name, round(value, 3) if isinstance(value, float) else value


def _state_name(name: str) -> str:
    """Return the name of a flattened value of the running helper, for people."""
    group, _, item = name.partition(".")
    if group in _STATE_GROUPS and item:
        return f"{_STATE_GROUPS[group]} {item if group == 'endpoints' else _to_words(item)}"
    return _STATE_NAMES.get(name) or _to_words(name)


def _to_words(name: str) -> str:
    return name.replace("_", " ").replace(".", " ")


def _format_value(value: object) -> object:
    return {None: "-", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else value


def _format_timing(times: Mapping[str, Any]) -> str:
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
