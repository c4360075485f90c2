"""`svote-helper queue`: which shares wait and how they stand, told by the daemon or read from the file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from helper.cli import queue_text
from helper.cli.output import Exit, emit_json, fail
from helper.cli.queue_source import NotThereError, ask
from helper.cli.settings import ConfigOption, JsonOption, read_settings

app = typer.Typer(help="The waiting shares.")

DbOption = Annotated[
    Path | None,
    typer.Option("--db", help="Database to read, instead of [helper] db_path.", show_default=False),
]


@app.command("list")
def list_shares(
    *,
    round_id: Annotated[str, typer.Option("--round", help="Of this round only (hex).")] = "",
    state: Annotated[str, typer.Option(help="In this state only.")] = "",
    due_before: Annotated[str, typer.Option(help="Due before this unix second only.")] = "",
    stage: Annotated[str, typer.Option(help="Whose latest note is of this stage only.")] = "",
    limit: Annotated[str, typer.Option(help="At most so many.")] = "100",
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List shares, by the time at which they are due."""
    query = {"round": round_id, "state": state, "due_before": due_before, "stage": stage, "limit": limit}
    answer = _ask("/queue", {name: value for name, value in query.items() if value}, config, db)
    if json:
        emit_json(answer)
    else:
        queue_text.print_list(answer)


@app.command()
def show(
    ref: Annotated[str, typer.Argument(help="The share's name as in the list, or its first 6 characters.")],
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Tell one share's whole story. Nothing of its witness is ever shown."""
    answer = _ask(f"/queue/{_clean(ref)}", {}, config, db)
    if json:
        emit_json(answer)
    else:
        queue_text.print_story(answer)


@app.command()
def stats(config: ConfigOption = None, db: DbOption = None, json: JsonOption = False) -> None:
    """Count shares by round and state; with a daemon, how it and its endpoints are."""
    answer = _ask("/stats", {}, config, db)
    if json:
        emit_json(answer)
    else:
        queue_text.print_stats(answer)


def _clean(ref: str) -> str:
    """A share's name is hex; anything else could be another path."""
    if not ref.isalnum() or not ref.isascii():
        raise typer.BadParameter("a share's name is made of hex characters", param_hint="REF")
    return ref.lower()


def _ask(path: str, query: dict[str, str], config: Path | None, db: Path | None) -> dict[str, Any]:
    """The answer, or the exit that fits."""
    settings = read_settings(config, {"helper.db_path": str(db) if db else None}).config
    try:
        return ask(settings.socket_path, settings.db_path, path, query)
    except NotThereError as error:
        fail(str(error), Exit.NOT_FOUND)
    except PermissionError as error:
        fail(str(error), Exit.NOT_AUTHORISED)
    except ValueError as error:
        fail(str(error), Exit.USAGE)
