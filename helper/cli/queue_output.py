"""The queue's answers for eyes: the JSON of `helper.server.views` as tables and lines."""

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
    "damaged": "their rows are damaged",
    "closed": "the chain has closed their round",
    "moved": "they were handed over before (`queue retry --stage moved` takes them back)",
}
_NOT_TAKEN = {
    "queued": "they wait here already",
    "failed": "they failed here (`queue retry` tries them again)",
    "damaged": "their rows here are damaged",
    "spent": "confirmed: the chain has counted them",
    "closed": "the chain has closed their round",
    "unknown": "their round is not known here: let the helper read the chain, then import again",
    "invalid": "no wallet could have posted them",
}
_LEFT_SHOWN = 20


def print_list(answer: Mapping[str, Any]) -> None:
    """`queue list`: a line a share; of failed ones first a line a kind of failure."""
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
                format_time(share["submit_at"]) if share["submit_at"] else "at once",
                format_time(share["due"]),
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
        ("round ends", format_time(end) if end is not None else "not known"),
        ("state", _state(answer)),
        ("received", format_time(answer["received"])),
        ("submit at", format_time(answer["submit_at"]) if answer["submit_at"] else "at once"),
        ("due", format_time(answer["due"])),
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
            (format_time(event["at"]), event["stage"], event["note"], "spent" if event["counted"] else "")
            for event in answer["history"]
        ],
    )


def print_stats(answer: Mapping[str, Any]) -> None:
    """`queue stats`: a line a round, the sum, and the daemon's own figures."""
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
                (format_time(one["day"])[:_DATE], one["count"], one["stage"], one["reason"])
                for one in answer["failed_before"]
            ],
        )
    if answer["damaged"]:
        say(f"{len(answer['damaged'])} damaged rows were set aside: see --json")
    service = answer.get("service")
    if service:
        typer.echo("")
        emit_table(("daemon", "value"), list(_flat(service)))


def print_failed(groups: Sequence[Mapping[str, Any]]) -> None:
    """What failed for good: a line a stage and reason."""
    emit_table(
        ("failed", "stage", "why", "latest"),
        [(group["count"], group["stage"], group["note"], format_time(group["latest"])) for group in groups],
    )


def print_retried(answer: Mapping[str, Any]) -> None:
    """`queue retry`."""
    would = "would be" if answer["dry_run"] else "are"
    typer.echo(f"{answer['retried']} failed shares {would} tried again")
    if answer["closed"]:
        say(f"{answer['closed']} stay failed: the chain has closed their round, so they cannot count any more")
    if answer["not_failed"]:
        say(f"{answer['not_failed']} of those that were named have not failed")


def print_purged(answer: Mapping[str, Any]) -> None:
    """`queue purge`: what was there."""
    would = "would be" if answer["dry_run"] else "are"
    shares = ", ".join(f"{answer[state]} {state}" for state in _STATES[:-1] if answer[state])
    typer.echo(f"{shares or 'no shares'} {would} erased with their round")


def print_exported(answer: Mapping[str, Any]) -> None:
    """`queue export`."""
    would = "would be written" if answer["dry_run"] else "written"
    typer.echo(f"{answer['output']}: {answer['shares']} shares {would}")
    if "moved" in answer:
        typer.echo(f"{answer['moved']} are left alone here from now on")
        if answer["stayed"]:
            say(f"{answer['stayed']} were in hand or have changed: they stay here too; the chain counts each once")
    for why, number in answer["left"].items():
        if number:
            say(f"{number} are not in the file: {_LEFT[why]}")


def print_imported(answer: Mapping[str, Any]) -> None:
    """`queue import`."""
    would = "would be" if answer["dry_run"] else "are"
    typer.echo(f"{answer['taken']} shares {would} taken over")
    if answer["revived"]:
        typer.echo(f"{answer['revived']} of them had been handed over from here and {would} tried again")
    for why, text in _NOT_TAKEN.items():
        if answer[why]:
            say(f"{answer[why]} are left: {text}")
    for one in answer["left"][:_LEFT_SHOWN]:
        share = f"share {one['ref']}" if one["ref"] else "share"
        round_ = f" of round {one['round'][:_SHORT]}" if one["round"] else ""
        say(f"  {share}{round_} (number {one['number']} in the file): {one['reason']}")
    if len(answer["left"]) > _LEFT_SHOWN:
        say(f"  and more: --json lists {len(answer['left'])}")


def print_audit(answer: Mapping[str, Any]) -> None:
    """`queue audit`: a line an act."""
    emit_table(
        ("when", "who", "by", "what", "wanted", "outcome"),
        [
            (
                format_time(act["at"]),
                f"{act['who']} ({act['uid']})",
                act["way"],
                act["what"],
                _pairs(act["wanted"]),
                "was cut off, or is under way" if act["outcome"] is None else _pairs(act["outcome"]),
            )
            for act in answer["actions"]
        ],
    )


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {str(value)[:_SHORT] if name == 'round' else value}" for name, value in values.items())


def _state(share: Mapping[str, Any]) -> str:
    return f"{share['state']} (damaged)" if share["damaged"] else str(share["state"])


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, object]]:
    """Nested figures as lines with dotted names; what has a name of its own, or is one measure, on a line each."""
    if value in ({}, []):
        yield name, "-"
    elif isinstance(value, dict) and {"count", "p50_ms", "p99_ms", "max_ms"} <= value.keys():
        yield name, _timing(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and all(isinstance(item, dict) and "name" in item for item in value):
        for item in value:
            yield f"{name}.{item['name']}", _well(item)
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
    half, most, longest = (f"{times[name]:.0f} ms" for name in ("p50_ms", "p99_ms", "max_ms"))
    return f"{times['count']}: half within {half}, 99 % within {most}, none beyond {longest}"


def _well(item: Mapping[str, Any]) -> str:
    """A check or a node: `ok`, or what is wrong, and its figures."""
    wrong = item.get("problem") or item.get("reason")
    figures = [
        f"{key.replace('_', ' ')} {round(value, 1) if isinstance(value, float) else value}"
        for key, value in item.items()
        if key not in {"name", "problem", "reason"} and value is not None
    ]
    return ", ".join([str(wrong or "ok"), *figures])
