"""`svote-helper queue` and `rounds`: inspects and manages queued shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Final

import typer

from helper.chain.chain_data import RoundAuthentication
from helper.cli.conventions import (
    ChangeOptions,
    ExitCode,
    QueueOptions,
    confirm_or_exit,
    emit,
    print_message,
    require_confirmation,
)
from helper.cli.operator_api import OperatorApi, RefsArgument, Selection, resolve_round
from helper.cli.terminal import emit_table
from helper.core.share import ShareState
from helper.core.text_forms import format_duration, format_time
from helper.runtime.process_security import harden_process
from helper.server import operator_parameters
from helper.store.models import MIN_REF_CHARS, QueueEntry

# A string, because the operator API validates the number and reports invalid ones.
LimitOption = Annotated[str, typer.Option(metavar="<int>", help="Maximum number of rows.")]


def list_shares(
    *,
    selection: Selection,
    limit: LimitOption = str(operator_parameters.DEFAULT_LIST_LIMIT),
    options: QueueOptions,
) -> None:
    """List shares in order of due time. With --state failed, show failure reasons first."""
    api = OperatorApi.of(options)
    response = api.get("/queue", {**selection.to_query(api), "limit": limit})
    emit(response, lambda listed: print_list(listed, limit), json=options.json)


def show(
    ref: Annotated[
        str,
        typer.Argument(
            metavar="SHARE",
            help=f"Share reference as shown by `queue list`, or a prefix of at least {MIN_REF_CHARS} characters.",
        ),
    ],
    options: QueueOptions,
) -> None:
    """Show the state and history of a share. Never shows witness data."""
    if not ref.isalnum() or not ref.isascii():  # other characters could change the path
        raise typer.BadParameter("a share reference consists of hex characters", param_hint="SHARE")
    response = OperatorApi.of(options).get(f"/queue/{ref.lower()}")
    emit(response, print_share, json=options.json)


def stats(options: QueueOptions) -> None:
    """Show shares by round and state, failures, and the state of the helper if it is running."""
    response = OperatorApi.of(options).get("/stats")
    emit(response, print_stats, json=options.json)


def retry(*, shares: RefsArgument = None, selection: Selection, options: ChangeOptions) -> None:
    """Retry failed shares, all or selected, at their due times. The count of attempts starts again at 0.

    --state accepts only failed. A share that waits for its next attempt (see `queue show`) is retried now if it is
    specified by its reference. Shares of closed rounds are not changed. Shares that `queue export --move` moved to
    another helper are retried only with --stage moved; both helpers may then reveal them. Uses the running helper, or
    the database if no helper is running.
    """
    require_confirmation(yes=options.yes, dry_run=options.dry_run)
    api, refs = OperatorApi.of(options), shares or []
    request = {**selection.to_query(api), "refs": refs}
    if not options.yes and not options.dry_run:
        number = api.post("/queue/retry", {**request, "dry_run": True})["retried"]
        if number:
            confirm_or_exit(f"Retry {number} failed shares?", yes=options.yes)
    response = api.post("/queue/retry", {**request, "dry_run": options.dry_run})
    is_refused = (response["closed"] or response["moved"]) and not response["retried"]
    emit(response, print_retried, json=options.json, code=ExitCode.FAILURE if is_refused else ExitCode.OK)


def purge(
    *,
    round_id: Annotated[
        str, typer.Option("--round", help=f"Round (hex, or a prefix of at least {MIN_REF_CHARS} characters).")
    ],
    options: ChangeOptions,
) -> None:
    """Delete all data of a closed round before the retention period ends.

    The round must be closed on the chain. Uses the running helper, or the database if no helper is running; in that
    case, the helper must have recorded the round as closed before it stopped.
    """
    require_confirmation(yes=options.yes, dry_run=options.dry_run)
    api = OperatorApi.of(options)
    round_id = resolve_round(api, round_id)
    path = f"/rounds/{operator_parameters.parse_hex32('round', round_id).hex()}/purge"
    harden_process()

    if not options.yes and not options.dry_run:
        print_purged(api.post(path, {"dry_run": True}))
        confirm_or_exit("Delete all data of this round?", yes=options.yes)
    response = api.post(path, {"dry_run": options.dry_run})
    emit(response, print_purged, json=options.json)


def audit(*, limit: LimitOption = str(operator_parameters.DEFAULT_ACTION_LIMIT), options: QueueOptions) -> None:
    """Show the audit log of operator actions, latest first: user, time, action, result."""
    response = OperatorApi.of(options).get("/actions", {"limit": limit})
    emit(response, print_audit, json=options.json)


_AUTHENTICATION_TEXTS: Final = {
    RoundAuthentication.AUTHENTICATED: "yes",
    RoundAuthentication.KEY_MISMATCH: "no: authority key differs from the chain's",
    RoundAuthentication.NO_VALID_SIGNATURE: "no: no valid signature",
    RoundAuthentication.UNSUPPORTED_VERSION: "no: auth_version is not 2",
    RoundAuthentication.NOT_LISTED: "no: not in the configuration",
    RoundAuthentication.UNKNOWN: "unknown",
}


def rounds(options: QueueOptions) -> None:
    """List known rounds: status, end, time left, shares by state, tree size.

    "authenticated" shows whether the published voting configuration has a valid signature of the round by a trusted
    key. Wallets require it; the helper accepts shares without it. None of the shares of a "frozen" round is accepted,
    revealed or purged, because nodes no longer list it, or list it with wrong data.
    """
    response = OperatorApi.of(options).get("/rounds")
    emit(response, _print_rounds, json=options.json)


def _print_rounds(response: Mapping[str, Any]) -> None:
    columns = ("round", "status", "ends", "ends (UTC)", "left", *_SHARE_STATES, "tree", "authenticated")
    emit_table(columns, [_format_round(row) for row in response["rounds"]])
    print_message(f"{len(response['rounds'])} rounds, from the {response['source']}")


def _format_round(row: Mapping[str, Any]) -> tuple[object, ...]:
    status = (
        row["status"] + (", closed" if row["closed"] else "") + (f", frozen: {row['frozen']}" if row["frozen"] else "")
    )
    return (
        row["round"][:ROUND_CHARS],
        status,
        format_time(row["ends"], local=True),
        format_time(row["ends"]),
        format_duration(row["left"]) if row["left"] > 0 else "ended",
        *(row["shares"][key] for key in _SHARE_STATES.values()),
        row["tree_size"],
        _AUTHENTICATION_TEXTS.get(row["authentication"], row["authentication"]),
    )


_SHARE_STATES = {
    state.label: state.json_name
    for state in (ShareState.WAITING, ShareState.PROVING, ShareState.SENT, ShareState.CONFIRMED, ShareState.FAILED)
}
"""The columns of tables of counts, with their keys."""
ROUND_CHARS = 12
_DATE_CHARS = len("2026-01-01")
MOVED_TEXT = "already moved to another helper (if it lost them: `queue retry --stage moved`)"
_SHOWN_STATS = frozenset({"source", "total", "rounds", "failed", "failed_before", "damaged", "service"})
"""The parts of `queue stats` that are not shown as a name and a value."""
_SHOWN_FIELDS = frozenset({"ref", "round", "state", "submit_at", "due", "attempts", "stage", "note", "damaged"})
"""The same for the fields of a share in `queue show`."""
_VALUE_NAMES = {
    "block_age": "seconds since the newest block",
    "clock_skew": "clock minus chain, seconds",
    "confirmation": "time to confirmation",
    "crashes": "prover crashes",
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
"""Names of values of a share (`QueueEntry`) and of the running helper (`ServiceState`).

Others are shown with spaces instead of `_` and `.`.
"""
_VALUE_GROUPS = {"checks": "check", "counts": "since the start:", "endpoints": "node", "recent_failures": "failure"}


def print_list(response: Mapping[str, Any], limit: str) -> None:
    """Print `queue list`: one row per share; with failed shares, first one row per reason."""
    if response.get("failed"):
        print_failed(response["failed"])
        typer.echo("")
    columns = ("share", "round", "state", "submit at (UTC)", "due (UTC)", "attempts", "stage", "note")
    emit_table(
        columns,
        [
            (
                share["ref"],
                share["round"][:ROUND_CHARS],
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
    number = str(len(response["shares"]))
    shown = f"the first {number} shares (--limit)" if number == limit else f"{number} shares"
    print_message(f"{shown}, from the {response['source']}")


def print_share(response: Mapping[str, Any]) -> None:
    """Print `queue show`: the state of a share, then its history."""
    spent = ", ".join(f"{stage} {number}" for stage, number in response["attempts_by_stage"].items())
    end = response["vote_end_time"]
    rows = [
        ("share", response["ref"]),
        ("round", response["round"]),
        ("round ends (UTC)", format_time(end) if end is not None else "unknown"),
        ("state", _format_state(response)),
        ("received (UTC)", format_time(response["received"])),
        ("submit at (UTC)", format_time(response["submit_at"]) if response["submit_at"] else "immediately"),
        ("due (UTC)", format_time(response["due"])),
        ("attempts", f"{response['attempts']} ({spent})" if spent else response["attempts"]),
        *(
            (_value_name(each.name), _format_value(response[each.name]))
            for each in fields(QueueEntry)
            if each.name not in _SHOWN_FIELDS
        ),
    ]
    if response["state"] == ShareState.WAITING.json_name:
        next_attempt = response["next_attempt"]
        rows.append(
            ("next attempt (UTC)", "none before the round ends" if next_attempt is None else format_time(next_attempt))
        )
    if response["cannot_count"]:
        rows.append(("warning", "due at the end of the round, so it cannot count"))
    for name, value in (response["transaction"] or {}).items():
        rows.append((f"transaction {name.replace('_', ' ')}", value))
    emit_table(("field", "value"), rows)
    typer.echo("")
    emit_table(
        ("time (UTC)", "stage", "event", "attempt"),
        [
            (format_time(event["at"]), event["stage"], event["note"], "spent" if event["counted"] else "")
            for event in response["history"]
        ],
    )


def print_stats(response: Mapping[str, Any]) -> None:
    """Print `queue stats`: one row per round, the total, and the state of the running helper."""
    keys = (*_SHARE_STATES.values(), "total")
    rows = [(name[:ROUND_CHARS], *(counts[key] for key in keys)) for name, counts in response["rounds"].items()]
    rows.append(("all", *(response["total"][key] for key in keys)))
    emit_table(("round", *_SHARE_STATES, "total"), rows)
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
        emit_table(("daemon", "value"), [(_value_name(name), _format_value(value)) for name, value in _flatten(values)])


def print_failed(groups: Sequence[Mapping[str, Any]]) -> None:
    """Print failed shares: one row per stage and reason."""
    emit_table(
        ("failed", "stage", "reason", "latest (UTC)"),
        [(group["count"], group["stage"], group["note"], format_time(group["latest"])) for group in groups],
    )


def print_retried(response: Mapping[str, Any]) -> None:
    """Print the result of `queue retry`."""
    would = "would be" if response["dry_run"] else "are"
    typer.echo(f"{response['retried']} failed shares {would} retried")
    if response["closed"]:
        print_message(f"{response['closed']} not retried: round closed")
    if response["moved"]:
        print_message(f"{response['moved']} not retried: {MOVED_TEXT}")
    if response["not_failed"]:
        print_message(f"{response['not_failed']} of the specified shares have not failed")


def print_purged(response: Mapping[str, Any]) -> None:
    """Print the result of `queue purge`."""
    would = "would be" if response["dry_run"] else "are"
    shares = ", ".join(f"{response[key]} {label}" for label, key in _SHARE_STATES.items() if response[key])
    typer.echo(f"{shares or 'no shares'} {would} deleted with their round")


def print_audit(response: Mapping[str, Any]) -> None:
    """Print `queue audit`: one row per action."""
    emit_table(
        ("time (UTC)", "user", "by", "action", "arguments", "result"),
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
        f"{name} {str(value)[:ROUND_CHARS] if name == 'round' else value}" for name, value in values.items()
    )


def _format_state(share: Mapping[str, Any]) -> str:
    label = ShareState.parse(share["state"]).label
    return f"{label} (damaged)" if share["damaged"] else label


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


def _value_name(name: str) -> str:
    """Return the name of a value of a share, or a flattened one of the running helper, for people."""
    group, _, item = name.partition(".")
    if group in _VALUE_GROUPS and item:
        return f"{_VALUE_GROUPS[group]} {item if group == 'endpoints' else _to_words(item)}"
    return _VALUE_NAMES.get(name) or _to_words(name)


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
