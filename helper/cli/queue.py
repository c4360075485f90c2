"""`svote-helper queue`: inspects and manages queued shares."""

from __future__ import annotations

from typing import Annotated

import typer

from helper.cli import queue_actions, queue_output, queue_transfer
from helper.cli.arguments import build_filter_query
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
from helper.cli.output import emit_json, map_errors_to_exit_codes
from helper.cli.queue_watch import watch
from helper.clock import SystemClock

app = typer.Typer(help="Inspect and manage queued shares.")


@app.command("list")
def list_shares(
    *,
    round_id: RoundOption = "",
    state: StateOption = "",
    due_before: DueBeforeOption = "",
    stage: StageOption = "",
    limit: Annotated[str, typer.Option(help="Maximum number of rows.")] = "100",
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List shares in order of due time. With --state failed, show failure reasons first."""
    api = OperatorApi.of(config, db)
    with map_errors_to_exit_codes():
        query = build_filter_query(api, round_id, state, due_before, stage, now=SystemClock().now())
        response = api.get("/queue", {**query, "limit": limit})
    if json:
        emit_json(response)
    else:
        queue_output.print_list(response)


@app.command()
def show(
    ref: Annotated[str, typer.Argument(help="Name of the share in the list, or a prefix of at least 6 characters.")],
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Show the state and history of a share. Never shows witness data."""
    if not ref.isalnum() or not ref.isascii():  # other characters could change the path
        raise typer.BadParameter("a share's name consists of hex characters", param_hint="REF")
    with map_errors_to_exit_codes():
        response = OperatorApi.of(config, db).get(f"/queue/{ref.lower()}")
    if json:
        emit_json(response)
    else:
        queue_output.print_story(response)


@app.command()
def stats(config: ConfigOption = None, db: DbOption = None, json: JsonOption = False) -> None:
    """Show shares by round and state, failures, and the state of the helper if it runs."""
    with map_errors_to_exit_codes():
        response = OperatorApi.of(config, db).get("/stats")
    if json:
        emit_json(response)
    else:
        queue_output.print_stats(response)


app.command()(watch)
app.command()(queue_actions.retry)
app.command()(queue_transfer.export)
app.command("import")(queue_transfer.import_)
app.command()(queue_actions.purge)
app.command()(queue_actions.audit)
