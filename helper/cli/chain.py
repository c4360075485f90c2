"""`svote-helper chain`: controls what the helper reads from the chain."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from helper.cli.operator_api import OperatorApi
from helper.cli.options import ConfigOption, DbOption, JsonOption
from helper.cli.output import ExitCode, emit, fail, map_errors_to_exit_codes, print_message

app = typer.Typer(help="Control what the helper reads from the chain.")

POLL_SECONDS: Final = 1.0
"""Interval of queries for the progress."""


@app.callback()
def chain() -> None:
    """Control what the helper reads from the chain."""


@app.command()
def rescan(
    *,
    first: Annotated[
        int | None,
        typer.Option("--from", metavar="HEIGHT", min=1, help="First block to read again.", show_default=False),
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until the blocks are read.")] = False,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Read blocks again, from HEIGHT to the newest one read, and wait until that is done.

    Use this after a node served wrong blocks. The running helper reads the blocks in the background while it reveals
    shares. `[chain] agree` says how many must agree on each block. Shares whose reveals are found are
    confirmed and erased, and nullifiers that were missed are stored. Confirmed shares do not change, so this can be
    repeated. If no helper is running, the next one reads the blocks when it starts.

    Without --from, follow the latest rescan. Interrupting this command does not interrupt the rescan. Exit code 3: some
    blocks could not be read, because every node has pruned them.
    """
    api = OperatorApi.of(config, db)
    with map_errors_to_exit_codes():
        response = api.get("/chain/rescan") if first is None else api.post("/chain/rescan", {"from": first})
        if response["source"] == "daemon" and not no_wait:
            response = _follow(api, response)
    emit(response, _print_result, json=json)
    if response["pruned"]:
        raise typer.Exit(ExitCode.DEGRADED)


def _follow(api: OperatorApi, response: dict[str, Any]) -> dict[str, Any]:
    """Show the progress until no block is left. Returns the last response."""
    shown = ""
    try:
        while response["left"]:
            line = f"{response['left']} of {response['blocks']} blocks left"
            problem = _find_problem(api) if line == shown.partition(":")[0] else None
            line += f": {problem}" if problem else ""
            if line != shown:
                print_message(line)
                shown = line
            time.sleep(POLL_SECONDS)
            response = api.get("/chain/rescan")
            if response["source"] == "file":
                fail("the helper has stopped; the rescan continues when it starts again", ExitCode.UNREACHABLE)
    except KeyboardInterrupt:
        print_message("the helper continues in the background; `svote-helper chain rescan` shows the progress")
        raise
    return response


def _find_problem(api: OperatorApi) -> str | None:
    """Return why the helper cannot read blocks, None if it can."""
    checks = api.get("/stats").get("service", {}).get("checks", [])
    return next((check["problem"] for check in checks if check["name"] == "blocks"), None)


def _print_result(response: Mapping[str, Any]) -> None:
    if not response["blocks"]:
        typer.echo("no block to read: no stored round has blocks from this height on")
        return
    typer.echo(
        f"blocks {response['from']} to {response['to']}: {response['read']} read again, "
        f"{response['added']} nullifiers added, {response['confirmed']} shares confirmed"
    )
    if response["left"] and response["source"] == "file":
        typer.echo(f"no helper is running: it reads {response['left']} blocks when it starts")
    elif response["left"]:
        typer.echo(f"{response['left']} blocks are left; the helper reads them in the background")
    if response["pruned"]:
        ranges = ", ".join(f"{low}" if low == high else f"{low} to {high}" for low, high in response["pruned_blocks"])
        typer.echo(
            f"{response['pruned']} blocks could not be read, because every node has pruned them: {ranges}\n"
            "Add a node that has them to [chain] endpoints, restart the helper and repeat this command."
        )
