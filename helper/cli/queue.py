"""`svote-helper queue`: which shares wait and how they stand, and what can be done about them.

Told and done by the daemon where one runs, else on the database.
"""

from __future__ import annotations

from typing import Annotated

import typer

from helper.cli import queue_actions, queue_output, queue_transfer
from helper.cli.arguments import wanted
from helper.cli.exit_codes import map_errors_to_exit_codes
from helper.cli.options import (
    ConfigOption,
    DbOption,
    DueBeforeOption,
    JsonOption,
    RoundOption,
    StageOption,
    StateOption,
)
from helper.cli.output import emit_json
from helper.cli.queue_watch import watch
from helper.cli.target import Target
from helper.clock import SystemClock

app = typer.Typer(help="The waiting shares: how they stand, and what can be done about them.")


@app.command("list")
def list_shares(
    *,
    round_id: RoundOption = "",
    state: StateOption = "",
    due_before: DueBeforeOption = "",
    stage: StageOption = "",
    limit: Annotated[str, typer.Option(help="At most so many.")] = "100",
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List shares, by the time at which they are due; with --state failed, first what failed where and why."""
    target = Target.of(config, db)
    with map_errors_to_exit_codes():
        query = wanted(target, round_id, state, due_before, stage, now=SystemClock().now())
        answer = target.ask("/queue", {**query, "limit": limit})
    if json:
        emit_json(answer)
    else:
        queue_output.print_list(answer)


@app.command()
def show(
    ref: Annotated[str, typer.Argument(help="The share's name as in the list, or its first 6 characters.")],
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Tell one share's whole story. Nothing of its witness is ever shown."""
    if not ref.isalnum() or not ref.isascii():  # anything else could be another path
        raise typer.BadParameter("a share's name is made of hex characters", param_hint="REF")
    with map_errors_to_exit_codes():
        answer = Target.of(config, db).ask(f"/queue/{ref.lower()}")
    if json:
        emit_json(answer)
    else:
        queue_output.print_story(answer)


@app.command()
def stats(config: ConfigOption = None, db: DbOption = None, json: JsonOption = False) -> None:
    """Count shares by round and state, and what failed; with a daemon, how it and its endpoints are."""
    with map_errors_to_exit_codes():
        answer = Target.of(config, db).ask("/stats")
    if json:
        emit_json(answer)
    else:
        queue_output.print_stats(answer)


app.command()(watch)
app.command()(queue_actions.retry)
app.command()(queue_transfer.export)
app.command("import")(queue_transfer.import_)
app.command()(queue_actions.purge)
app.command()(queue_actions.audit)
