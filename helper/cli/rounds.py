"""`svote-helper rounds`: lists the chain's rounds and their shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import typer

from helper.cli.operator_api import OperatorApi
from helper.cli.options import ConfigOption, DbOption, JsonOption
from helper.cli.output import emit, emit_table, map_errors_to_exit_codes, print_message
from helper.core.round_authentication import RoundAuthentication
from helper.core.text_forms import format_duration, format_time

app = typer.Typer()

_SHORT_CHARS = 12
_AUTHENTICATION_TEXTS: Final = {
    RoundAuthentication.AUTHENTICATED: "yes",
    RoundAuthentication.KEY_MISMATCH: "no: authority key differs from the chain's",
    RoundAuthentication.NO_VALID_SIGNATURE: "no: no valid signature",
    RoundAuthentication.UNSUPPORTED_VERSION: "no: auth_version is not 2",
    RoundAuthentication.NOT_LISTED: "no: not in the configuration",
    RoundAuthentication.UNKNOWN: "unknown",
}
_STATES = ("received", "witnessed", "broadcast", "submitted", "failed")


@app.command()
def rounds(config: ConfigOption = None, db: DbOption = None, json: JsonOption = False) -> None:
    """List known rounds: status, end, time left, shares by state, tree size.

    "authenticated" shows whether the published voting configuration has a valid signature of the round by a trusted
    key. Wallets require it; the helper accepts shares without it.
    """
    with map_errors_to_exit_codes():
        response = OperatorApi.of(config, db).get("/rounds")
    emit(response, _print_rounds, json=json)


def _print_rounds(response: Mapping[str, Any]) -> None:
    columns = ("round", "status", "ends", "ends (UTC)", "left", *_STATES, "tree", "authenticated")
    emit_table(columns, [_format_row(row) for row in response["rounds"]])
    print_message(f"{len(response['rounds'])} rounds, from the {response['source']}")


def _format_row(row: Mapping[str, Any]) -> tuple[object, ...]:
    status = (
        row["status"] + (", closed" if row["closed"] else "") + (f", frozen: {row['frozen']}" if row["frozen"] else "")
    )
    return (
        row["round"][:_SHORT_CHARS],
        status,
        format_time(row["ends"], local=True),
        format_time(row["ends"]),
        format_duration(row["left"]) if row["left"] > 0 else "ended",
        *(row["shares"][state] for state in _STATES),
        row["tree_size"],
        _AUTHENTICATION_TEXTS[row["authentication"]],
    )
