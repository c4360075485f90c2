"""`svote-helper rounds`: the chain's rounds, when they end, and what waits in each."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import typer

from helper.cli.exit_codes import map_errors_to_exit_codes
from helper.cli.options import ConfigOption, DbOption, JsonOption
from helper.cli.output import emit_json, emit_table, say
from helper.cli.target import Target

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
    ends = datetime.fromtimestamp(min(one["ends"], 253_402_300_799), UTC)
    status = (
        one["status"] + (", closed" if one["closed"] else "") + (f", frozen: {one['frozen']}" if one["frozen"] else "")
    )
    return (
        one["round"][:_SHORT],
        status,
        ends.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        ends.strftime("%Y-%m-%d %H:%M:%S"),
        time_left(one["left"]),
        *(one["shares"][state] for state in _STATES),
        one["tree_size"],
    )


def time_left(seconds: float) -> str:
    """A span for eyes: days, hours, minutes, seconds, the greatest two of them."""
    if seconds <= 0:
        return "over"
    whole = int(seconds)
    units = [(whole // 86_400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next((index for index, (number, _) in enumerate(units) if number), len(units) - 1)
    return " ".join(f"{number} {unit}" for number, unit in units[first : first + 2])
