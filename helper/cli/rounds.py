"""`svote-helper rounds`: the chain's rounds, when they end, and what waits in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from helper.cli.exit_codes import map_errors_to_exit_codes
from helper.cli.options import ConfigOption, DbOption, JsonOption
from helper.cli.output import emit_json, emit_table, say
from helper.cli.target import Target
from helper.core.time_text import format_duration, format_time

app = typer.Typer()

_SHORT = 12
_STATES = ("received", "witnessed", "broadcast", "submitted", "failed")


@app.command()
def rounds(config: ConfigOption = None, db: DbOption = None, json: JsonOption = False) -> None:
    """List the rounds that the helper knows: status, end, time left, shares by state, size of the tree."""
    with map_errors_to_exit_codes():
        answer = Target.of(config, db).ask("/rounds")
    if json:
        emit_json(answer)
        return
    columns = ("round", "status", "ends", "ends (UTC)", "left", *_STATES, "tree")
    emit_table(columns, [_row(one) for one in answer["rounds"]])
    say(f"{len(answer['rounds'])} rounds, told by the {answer['source']}")


def _row(one: Mapping[str, Any]) -> tuple[object, ...]:
    status = (
        one["status"] + (", closed" if one["closed"] else "") + (f", frozen: {one['frozen']}" if one["frozen"] else "")
    )
    return (
        one["round"][:_SHORT],
        status,
        format_time(one["ends"], local=True),
        format_time(one["ends"]),
        format_duration(one["left"]) if one["left"] > 0 else "ended",
        *(one["shares"][state] for state in _STATES),
        one["tree_size"],
    )
