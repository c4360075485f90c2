"""`svote-helper demo`: the main job from beginning to end, on an embedded chain, with real proofs."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from devnet.demo.plan import DemoOptions
from devnet.demo.processes import StartError
from devnet.demo.report import show, succeeded
from devnet.demo.run import DemoError, demonstrate
from devnet.postgres import ClusterError
from helper.cli.output import Exit, emit_json, fail
from helper.cli.settings import JsonOption

app = typer.Typer()


class Circuit(StrEnum):
    """The circuit generations that the chain can run."""

    K10 = "k10"
    K11 = "k11"


class Engine(StrEnum):
    """What the queue can be kept in."""

    SQLITE = "sqlite"
    POSTGRES = "postgres"


@app.command()
def demo(
    circuit: Annotated[Circuit, typer.Option(help="The chain's circuit generation.")] = Circuit.K10,
    voters: Annotated[int, typer.Option(min=1, max=1000, help="Wallets; each votes on two proposals.")] = 3,
    spread: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds over which wallets spread their shares.")
    ] = 10.0,
    db: Annotated[Path | None, typer.Option("--db", help="Keep the queue database here.")] = None,
    store: Annotated[
        Engine, typer.Option(help="postgres: a database of its own, and a host for each role: api, prover, sender.")
    ] = Engine.SQLITE,
    keep: Annotated[bool, typer.Option("--keep", help="Go on running afterwards and print the addresses.")] = False,
    seed: Annotated[int | None, typer.Option(help="Of the votes and times; keys are always the system's.")] = None,
    json: JsonOption = False,
) -> None:
    """Let wallets vote, and show every share accepted, proven, broadcast, confirmed and tallied."""
    if store is Engine.POSTGRES and db is not None:
        fail("--db names a file, and --store postgres keeps the queue in a database", Exit.USAGE)
    options = DemoOptions(circuit.value, voters, spread, db, keep, json, seed, store.value)
    tell = Console(stderr=True)
    try:
        outcome = asyncio.run(demonstrate(options, tell))
    except (DemoError, StartError, ClusterError) as error:
        fail(str(error))
    if json:
        emit_json(outcome)
    elif not keep:
        show(outcome, Console())
    if not succeeded(outcome):
        fail("the demonstration did not end as it should: see above", Exit.FAILURE)
