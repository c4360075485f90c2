"""`svote-helper queue retry`, `purge` and `audit`."""

from __future__ import annotations

from typing import Annotated

import typer

from helper.cli import queue_output
from helper.cli.arguments import build_filter_query, resolve_round
from helper.cli.confirm import DryRunOption, YesOption, confirm_or_exit, require_confirmation
from helper.cli.operator_api import OperatorApi
from helper.cli.options import (
    ConfigOption,
    DbOption,
    DueBeforeOption,
    JsonOption,
    RoundOption,
    StageOption,
    StateOption,
)
from helper.cli.output import ExitCode, emit_json, map_errors_to_exit_codes, print_message
from helper.clock import SystemClock
from helper.runtime.hardening import harden_process
from helper.server import views

RefsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SHARE", help="Names of shares in the list, or prefixes of at least 6 characters.", show_default=False
    ),
]


def retry(
    *,
    shares: RefsArgument = None,
    round_id: RoundOption = "",
    state: StateOption = "",
    due_before: DueBeforeOption = "",
    stage: StageOption = "",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Retry failed shares, all or selected, at their due times with a full attempt budget.

    Shares of closed rounds are not changed. Uses the running helper, or the database if none runs.
    """
    require_confirmation(yes=yes, dry_run=dry_run)
    api, refs = OperatorApi.of(config, db), shares or []
    with map_errors_to_exit_codes():
        filter_query = build_filter_query(api, round_id, state, due_before, stage, now=SystemClock().now())
        request = {**filter_query, "refs": refs}
        if not yes and not dry_run:
            number = api.post("/queue/retry", {**request, "dry_run": True})["retried"]
            if number:
                confirm_or_exit(f"Retry {number} failed shares?", yes=yes)
        response = api.post("/queue/retry", {**request, "dry_run": dry_run})
    if json:
        emit_json(response)
    else:
        queue_output.print_retried(response)
    if response["closed"] and not response["retried"]:
        raise typer.Exit(ExitCode.FAILURE)


def purge(
    *,
    round_id: Annotated[
        str, typer.Option("--round", help="Round (hex, or a prefix of at least 6 characters).", show_default=False)
    ],
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Delete all data of a closed round before the retention period ends.

    Only for a round that the chain has closed. Uses the running helper, or the database if none runs; then the helper
    must have found the round closed before it stopped.
    """
    require_confirmation(yes=yes, dry_run=dry_run)
    api = OperatorApi.of(config, db)
    with map_errors_to_exit_codes():
        round_id = resolve_round(api, round_id)
        path = f"/rounds/{views.parse_round(round_id).hex()}/purge"
    harden_process()

    with map_errors_to_exit_codes():
        if not yes and not dry_run:
            queue_output.print_purged(api.post(path, {"dry_run": True}))
            confirm_or_exit("Delete all data of this round?", yes=yes)
        response = api.post(path, {"dry_run": dry_run})
    if json:
        emit_json(response)
    else:
        queue_output.print_purged(response)


def audit(
    limit: Annotated[str, typer.Option(help="Maximum number of rows.")] = "50",
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Show the audit log of operator actions, latest first: user, time, action, result."""
    with map_errors_to_exit_codes():
        response = OperatorApi.of(config, db).get("/actions", {"limit": limit})
    if json:
        emit_json(response)
    else:
        queue_output.print_audit(response)
        if not response["actions"]:
            print_message("no actions yet")
