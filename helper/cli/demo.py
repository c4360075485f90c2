"""`svote-helper demo`: a complete vote on an embedded chain, with real proofs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from devnet.demo.plan import DemoOptions
from devnet.demo.processes import StartError
from devnet.demo.report import is_successful, print_report
from devnet.demo.run import DemoError, run_demo
from devnet.postgres import ClusterError
from helper.cli.options import JsonOption
from helper.cli.output import ExitCode, emit_json, fail
from helper.errors import HelperError

app = typer.Typer()

NODE_SECONDS: Final = 10.0
"""Seconds until the nodes must be usable. Their newest block is initially in the future, at the round's end."""


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
        outcome = asyncio.run(run_demo(options, console, audit=audit_finished_round))
    except (DemoError, StartError, ClusterError, HelperError) as error:
        fail(str(error))
    if json:
        emit_json(outcome)
    elif not keep:
        print_report(outcome, Console())
    if not is_successful(outcome):
        fail("the demo failed: see above", ExitCode.FAILURE)


async def audit_finished_round(chain: Mapping[str, Any], round_id: bytes) -> dict[str, Any]:
    """Audit a round of the demo's chain, as `svote-helper audit` does.

    Args:
        chain: the chain's ready line.
        round_id: 32 bytes.
    """
    from audit.auditor import audit_round  # noqa: PLC0415 - `--help` must not load native code
    from audit.node_source import NodeSource  # noqa: PLC0415
    from helper.chain.node_pool import NodePool, ReadOnlyNodePool, create_nodes  # noqa: PLC0415
    from helper.clock import SystemClock  # noqa: PLC0415
    from helper.observability.log_config import configure  # noqa: PLC0415

    configure("error")
    nodes = [(node["rest"], node["rpc"]) for node in chain["nodes"]]
    clock = SystemClock()
    pool = NodePool(create_nodes([rest for rest, _ in nodes], [rpc for _, rpc in nodes]), clock=clock)
    readers = ReadOnlyNodePool(pool)
    try:
        deadline = clock.monotonic() + NODE_SECONDS
        await pool.probe_all()
        while len(pool.usable_nodes) < len(nodes) and clock.monotonic() < deadline:
            await asyncio.sleep(0.1)
            await pool.probe_all()
        return (await audit_round(NodeSource(readers, round_id), round_id)).result.to_json()
    finally:
        await readers.aclose()
        await pool.aclose()
