"""`svote-helper demo` and `wallet vote`: votes on an embedded chain, with real proofs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import httpx
import typer
from rich.console import Console

from audit.auditor import audit_round
from audit.node_source import NodeSource
from devnet import ballot
from devnet.clients.known_clients import DIRECT_CLIENTS
from devnet.demo.plan import DemoOptions
from devnet.demo.processes import StartError
from devnet.demo.report import is_successful, print_report
from devnet.demo.run import DemoError, run_demo
from devnet.postgres import ClusterError
from devnet.wallet import CastVote, Wallet, WalletError
from helper.chain.node_pool import NodePool, ReadOnlyNodePool, create_nodes
from helper.cli.conventions import ExitCode, JsonOption, emit, emit_json, fail, format_one_line
from helper.clock import SystemClock
from helper.config.settings_file import is_missing
from helper.core.json_records import HEX_32, fact
from helper.errors import HelperError
from helper.observability import log_config

NODE_SECONDS: Final = 10.0
"""Seconds until the nodes must be usable. Their newest block is initially in the future, at the round's end."""


def demo(
    circuit: Annotated[Literal["k10", "k11"], typer.Option(help="Circuit generation of the chain.")] = "k10",
    voters: Annotated[int, typer.Option(min=1, max=1000, help="Number of wallets; each votes on two proposals.")] = 3,
    spread: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds over which wallets spread the due times of their shares.")
    ] = 10.0,
    db: Annotated[
        Path | None,
        typer.Option("--db", help="Queue database to create, which is kept after the demo (default: temporary)."),
    ] = None,
    store: Annotated[
        Literal["sqlite", "postgres"],
        typer.Option(
            help="Queue database; postgres starts a temporary server and one host per role (api, prover, sender)."
        ),
    ] = "sqlite",
    helpers: Annotated[
        int,
        typer.Option(
            min=1,
            max=20,
            help="Number of independent helpers, each with its own queue; wallets give each share to half of them.",
        ),
    ] = 1,
    wallets: Annotated[
        Literal["one", "all"],
        typer.Option(
            help="Simulated wallets; all plays each known client in turn, with at least one voter for each of them."
        ),
    ] = "one",
    keep: Annotated[bool, typer.Option("--keep", help="Keep running afterwards and print the URLs.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of votes and times; keys are always random.")] = None,
    json: JsonOption = False,
) -> None:
    """Run a demo: cast votes and follow their shares until they are confirmed and tallied."""
    if store == "postgres" and db is not None:
        fail("--db is a file and cannot be used with --store postgres", ExitCode.USAGE)
    if helpers > 1 and (store != "sqlite" or db is not None):
        fail("--helpers cannot be used with --db or --store postgres", ExitCode.USAGE)
    if db is not None and not is_missing(db):  # its shares are those of another chain
        fail(f"{db} exists already: the demo creates its database", ExitCode.USAGE)
    plays_clients = wallets == "all"
    if plays_clients and helpers > 1:
        fail("--wallets all cannot be used with --helpers", ExitCode.USAGE)
    voters = max(voters, len(DIRECT_CLIENTS)) if plays_clients else voters
    options = DemoOptions(circuit, voters, spread, db, keep, json, seed, store, helpers, plays_clients)
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
    """Audit a round of the demo's chain, which its ready line describes, as `svote-helper audit` does."""
    log_config.configure("error")
    nodes = [(node["rest"], node["rpc"]) for node in chain["nodes"]]
    clock = SystemClock()
    pool = NodePool(create_nodes(nodes), clock=clock)
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


def vote(
    round_id: Annotated[str, typer.Argument(metavar="ROUND", help="Round id, 64 hex characters.")],
    proposal: Annotated[int, typer.Option(min=1, help="Proposal id.")],
    decision: Annotated[int, typer.Option(min=0, max=7, help="Option index.")],
    helper: Annotated[list[str] | None, typer.Option(help="Base URL of a helper; may be repeated.")] = None,
    chain: Annotated[str, typer.Option(help="REST URL of the dev chain.")] = "http://127.0.0.1:11317",
    base: Annotated[
        str | None,
        typer.Option(help="Common base URL of chain and helper ([gateway] or a proxy), as wallets use it."),
    ] = None,
    weight: Annotated[int | None, typer.Option(min=0, help="Voting power; random by default.")] = None,
    spread: Annotated[
        float,
        typer.Option(min=0, help="Seconds over which the due times are spread; 0 makes all shares due immediately."),
    ] = 0.0,
    token: Annotated[str, typer.Option(help="X-Helper-Token, for helpers that require one.")] = "",
    json: JsonOption = False,
) -> None:
    """Encrypt a vote, submit its commitment to the chain, and post its 16 shares."""
    try:
        round_bytes = bytes.fromhex(round_id)
    except ValueError:
        fail("ROUND must be 64 hex characters", ExitCode.USAGE)
    now = SystemClock().now()
    times = ballot.spread_times(now, spread, random.SystemRandom()) if spread else ballot.immediate_times()

    async def cast() -> CastVote:
        helpers = [base] if base else helper or ["http://127.0.0.1:8090"]
        async with Wallet(base or chain, helpers, uses_control_routes=base is None, token=token) as voter:
            return await voter.cast_vote(round_bytes, proposal, decision, weight=weight, times=times)

    try:
        cast_vote = asyncio.run(cast())
    except (httpx.TransportError, OSError) as error:
        fail(f"the vote could not be cast: {base or chain}: {error or type(error).__name__}", ExitCode.UNREACHABLE)
    except WalletError as error:
        fail(f"the vote could not be cast: {error}")
    emit(_describe_vote(cast_vote), _print_vote, json=json)
    if not cast_vote.is_accepted:
        fail("not every share was accepted by a helper", ExitCode.FAILURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedShare:
    """A share of the vote."""

    index: int = fact("Index of the share, 0 to 15.")
    submit_at: int = fact("`submit_at` of the share in Unix seconds; 0 means immediately.")
    nullifier: str = fact("Nullifier that the reveal publishes, hex.", pattern=HEX_32)
    answer: str = fact("Response of the helper.")


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteOutcome:
    """`wallet vote`, for dev chains only: the output contains secrets of the wallet."""

    accepted: bool = fact("Whether every share was accepted by at least one helper.")
    position: int = fact("Position of the vote commitment in the tree.")
    weight: int = fact("Voting power.")
    shares: Sequence[PostedShare] = fact("The 16 shares.")


def _print_vote(outcome: Mapping[str, Any]) -> None:
    for share in outcome["shares"]:
        typer.echo(format_one_line("share {index:>2}  submit_at {submit_at}  {answer}".format_map(share)))
    typer.echo(f"weight {outcome['weight']}, position {outcome['position']}")


def _describe_vote(cast_vote: CastVote) -> VoteOutcome:
    return VoteOutcome(
        accepted=cast_vote.is_accepted,
        position=cast_vote.position,
        weight=cast_vote.ballot.weight,
        shares=[
            PostedShare(
                index=share.index,
                submit_at=share.submit_at,
                nullifier=share.nullifier.hex(),
                answer=share.posts[-1].outcome if share.posts else "not posted",
            )
            for share in cast_vote.shares
        ],
    )
