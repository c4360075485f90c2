"""`svote-helper queue`: inspects and manages queued shares."""

from __future__ import annotations

from typing import Annotated

import typer

from helper.cli import queue_output
from helper.cli.confirm import DryRunOption, YesOption, confirm_or_exit, require_confirmation
from helper.cli.filters import (
    DueBeforeOption,
    RefsArgument,
    RoundOption,
    StageOption,
    StateOption,
    build_filter_query,
    resolve_round,
)
from helper.cli.operator_api import OperatorApi
from helper.cli.options import ConfigOption, DbOption, JsonOption
from helper.cli.output import ExitCode, emit, map_errors_to_exit_codes
from helper.cli.queue_transfer import export, import_
from helper.cli.queue_watch import watch
from helper.runtime.hardening import harden_process
from helper.server import operator_parameters

app = typer.Typer(help="Inspect and manage queued shares.")

# A string, because the operator API validates the number and reports invalid ones.
LimitOption = Annotated[str, typer.Option(metavar="<int>", help="Maximum number of rows.")]


@app.command("list")
def list_shares(
    *,
    round_id: RoundOption = "",
    state: StateOption = "",
    due_before: DueBeforeOption = "",
    stage: StageOption = "",
    limit: LimitOption = "100",
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List shares in order of due time. With --state failed, show failure reasons first."""
    api = OperatorApi.of(config, db)
    with map_errors_to_exit_codes():
        query = build_filter_query(api, round_id, state, due_before, stage)
        response = api.get("/queue", {**query, "limit": limit})
    emit(response, queue_output.print_list, json=json)


@app.command()
def show(
    ref: Annotated[
        str, typer.Argument(help="Share reference as shown by `queue list`, or a prefix of at least 6 characters.")
    ],
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Show the state and history of a share. Never shows witness data."""
    if not ref.isalnum() or not ref.isascii():  # other characters could change the path
        raise typer.BadParameter("a share reference consists of hex characters", param_hint="REF")
    with map_errors_to_exit_codes():
        response = OperatorApi.of(config, db).get(f"/queue/{ref.lower()}")
    emit(response, queue_output.print_story, json=json)


@app.command()
def stats(config: ConfigOption = None, db: DbOption = None, json: JsonOption = False) -> None:
    """Show shares by round and state, failures, and the state of the helper if it is running."""
    with map_errors_to_exit_codes():
        response = OperatorApi.of(config, db).get("/stats")
    emit(response, queue_output.print_stats, json=json)


app.command()(watch)


@app.command()
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

    A share that waits for its next attempt (see `queue show`) is retried now if it is specified by its reference.
    Shares of closed rounds are not changed. Shares that `queue export --move` moved to another helper are retried only
    with --stage moved; both helpers may then reveal them. Uses the running helper, or the database if no helper is
    running.
    """
    require_confirmation(yes=yes, dry_run=dry_run)
    api, refs = OperatorApi.of(config, db), shares or []
    with map_errors_to_exit_codes():
        filter_query = build_filter_query(api, round_id, state, due_before, stage)
        request = {**filter_query, "refs": refs}
        if not yes and not dry_run:
            number = api.post("/queue/retry", {**request, "dry_run": True})["retried"]
            if number:
                confirm_or_exit(f"Retry {number} failed shares?", yes=yes)
        response = api.post("/queue/retry", {**request, "dry_run": dry_run})
    emit(response, queue_output.print_retried, json=json)
    if (response["closed"] or response["moved"]) and not response["retried"]:
        raise typer.Exit(ExitCode.FAILURE)


app.command()(export)
app.command("import")(import_)


@app.command()
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

    The round must be closed on the chain. Uses the running helper, or the database if no helper is running; in that
    case, the helper must have recorded the round as closed before it stopped.
    """
    require_confirmation(yes=yes, dry_run=dry_run)
    api = OperatorApi.of(config, db)
    with map_errors_to_exit_codes():
        round_id = resolve_round(api, round_id)
        path = f"/rounds/{operator_parameters.parse_round(round_id).hex()}/purge"
    harden_process()

    with map_errors_to_exit_codes():
        if not yes and not dry_run:
            queue_output.print_purged(api.post(path, {"dry_run": True}))
            confirm_or_exit("Delete all data of this round?", yes=yes)
        response = api.post(path, {"dry_run": dry_run})
    emit(response, queue_output.print_purged, json=json)


@app.command()
def audit(
    limit: LimitOption = "50",
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Show the audit log of operator actions, latest first: user, time, action, result."""
    with map_errors_to_exit_codes():
        response = OperatorApi.of(config, db).get("/actions", {"limit": limit})
    emit(response, queue_output.print_audit, json=json)
