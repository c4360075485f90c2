"""`svote-helper wallet vote`: casts one vote and posts its shares to helpers."""

from __future__ import annotations

import asyncio
import random
from typing import Annotated, Any

import httpx
import typer

from devnet import ballot
from devnet.wallet import CastVote, Wallet, WalletError
from helper.cli.options import JsonOption
from helper.cli.output import ExitCode, emit_json, fail, format_one_line
from helper.clock import SystemClock

app = typer.Typer(help="Act as a wallet on a dev chain.")


@app.callback()
def wallet() -> None:
    """Act as a wallet on a dev chain."""


@app.command()
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
    outcome = _outcome(cast_vote)
    if json:
        emit_json(outcome)
    else:
        for share in outcome["shares"]:
            typer.echo(format_one_line(f"share {share['index']:>2}  submit_at {share['submit_at']}  {share['answer']}"))
        typer.echo(f"weight {outcome['weight']}, position {outcome['position']}")
    if not cast_vote.is_accepted:
        fail("not every share was accepted by a helper", ExitCode.FAILURE)


def _outcome(cast_vote: CastVote) -> dict[str, Any]:
    return {
        "accepted": cast_vote.is_accepted,
        "position": cast_vote.position,
        "weight": cast_vote.ballot.weight,
        "shares": [
            {
                "index": share.index,
                "submit_at": share.submit_at,
                "nullifier": share.nullifier.hex(),
                "answer": share.posts[-1].outcome if share.posts else "not posted",
            }
            for share in cast_vote.shares
        ],
    }
