"""`svote-helper demo`: a complete vote on an embedded chain, with real proofs."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from devnet.demo.plan import DemoOptions
from devnet.demo.processes import StartError
from devnet.demo.report import is_successful, print_report
from devnet.demo.run import DemoError, run_demo
from devnet.postgres import ClusterError
from helper.cli.options import JsonOption
from helper.cli.output import ExitCode, emit_json, fail

app = typer.Typer()


class Circuit(StrEnum):
    """Circuit generations of the dev chain."""

    K10 = "k10"
    K11 = "k11"


class Engine(StrEnum):
    """Database engines of the queue."""

    SQLITE = "sqlite"
    POSTGRES = "postgres"


@app.command()
def demo(
    circuit: Annotated[Circuit, typer.Option(help="Circuit generation of the chain.")] = Circuit.K10,
    voters: Annotated[int, typer.Option(min=1, max=1000, help="Number of wallets; each votes on two proposals.")] = 3,
    spread: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds over which wallets spread the due times of their shares.")
    ] = 10.0,
    db: Annotated[
        Path | None,
        typer.Option("--db", help="Path of the queue database, which is kept after the demo (default: temporary)."),
    ] = None,
    store: Annotated[
        Engine,
        typer.Option(
            help="Queue database; postgres starts a temporary server and one host per role (api, prover, sender)."
        ),
    ] = Engine.SQLITE,
    helpers: Annotated[
        int,
        typer.Option(
            min=1,
            max=20,
            help="Number of independent helpers, each with its own queue; wallets give each share to half of them.",
        ),
    ] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="Keep running afterwards and print the URLs.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of votes and times; keys are always random.")] = None,
    json: JsonOption = False,
) -> None:
    """Run a demo: cast votes and follow their shares until they are confirmed and tallied."""
    if store is Engine.POSTGRES and db is not None:
        fail("--db is a file and cannot be used with --store postgres", ExitCode.USAGE)
    if helpers > 1 and (store is not Engine.SQLITE or db is not None):
        fail("--helpers cannot be used with --db or --store postgres", ExitCode.USAGE)
    options = DemoOptions(circuit.value, voters, spread, db, keep, json, seed, store.value, helpers)
    console = Console(stderr=True)
    try:
        outcome = asyncio.run(run_demo(options, console))
    except (DemoError, StartError, ClusterError) as error:
        fail(str(error))
    if json:
        emit_json(outcome)
    elif not keep:
        print_report(outcome, Console())
    if not is_successful(outcome):
        fail("the demo failed: see above", ExitCode.FAILURE)
