"""`svote-helper chain` and `tx`: blocks to read again, and public transactions of the chain."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import anyio
import typer

from helper.chain.block_reader import ChainLookups
from helper.chain.broadcast_outcome import sanitize_text
from helper.chain.chain_data import TxResult
from helper.chain.node_pool import NodePool, create_node_pool
from helper.chain.reveal_transaction import RevealMessage, parse_reveal
from helper.cli.command_inputs import read_settings
from helper.cli.conventions import (
    ConfigOption,
    ExitCode,
    JsonOption,
    QueueOptions,
    emit,
    fail,
    print_message,
)
from helper.cli.operator_api import OperatorApi
from helper.cli.terminal import emit_fields
from helper.clock import SystemClock
from helper.core.json_records import HEX_32, TX_HASH, fact
from helper.errors import ChainUnavailable
from helper.observability import log_config
from helper.server.operator_parameters import parse_hex32


@asynccontextmanager
async def open_node_pool(config: Path | None) -> AsyncIterator[NodePool]:
    """Create the node pool and check it once.

    Raises:
        ChainUnavailable: no node is usable; the message has the reasons.
    """
    log_config.configure("warning")
    settings = read_settings(config).config
    nodes = create_node_pool(settings, SystemClock())
    try:
        await nodes.probe_all()
        if not nodes.has_usable_node:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in nodes.unusable_reasons().items())
            raise ChainUnavailable(f"no node is usable ({reasons})")
        yield nodes
    finally:
        await nodes.aclose()


POLL_SECONDS: Final = 1.0
"""Interval of queries for the progress."""


def rescan(
    *,
    first: Annotated[
        int | None, typer.Option("--from", metavar="HEIGHT", min=1, help="First block to read again.")
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until the blocks are read.")] = False,
    options: QueueOptions,
) -> None:
    """Read blocks again, from HEIGHT to the newest one read, and wait until that is done.

    Use this after a node served wrong blocks. The running helper reads the blocks in the background while it reveals
    shares. `[chain] agree` says how many must agree on each block. Shares whose reveals are found are
    confirmed and erased, and nullifiers that were missed are stored. Confirmed shares do not change, so this can be
    repeated. If no helper is running, the next one reads the blocks when it starts.

    Without --from, follow the latest rescan. Interrupting this command does not interrupt the rescan. Exit code 3: some
    blocks could not be read, because every node has pruned them.
    """
    api = OperatorApi.of(options)
    response = api.get("/chain/rescan") if first is None else api.post("/chain/rescan", {"from": first})
    if response["source"] == "daemon" and not no_wait:
        response = _follow(api, response)
    emit(response, _print_result, json=options.json, code=ExitCode.DEGRADED if response["pruned"] else ExitCode.OK)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicReveal:
    """Fields of a reveal in a block."""

    round: str = fact("Round id, hex.", pattern=HEX_32)
    nullifier: str = fact("Nullifier of the share, hex.", pattern=HEX_32)
    proposal_id: int = fact("Proposal id.")
    vote_decision: int = fact("Index of the chosen option.")
    anchor_height: int = fact("Height of the tree root that the proof was made against.")
    proof_bytes: int = fact("Size of the proof in bytes.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicTransaction:
    """`tx lookup`."""

    hash: str = fact("Transaction hash, hex.", pattern=TX_HASH)
    chain_id: str | None = fact("Chain id.")
    height: int = fact("Height of the block that contains the transaction.")
    code: int = fact("Result code; 0 means success.")
    log: str = fact("Log of the chain, which explains a failure.")
    kind: Literal["reveal", "other"] | None = fact("Type of the transaction; null if every node has pruned its block.")
    bytes: int | None = fact("Size of the transaction in bytes; null if every node has pruned its block.")
    reveal: PublicReveal | None = fact("Fields of the reveal; null for other transactions.")


def lookup(
    tx_hash: Annotated[str, typer.Argument(metavar="HASH", help="Transaction hash (64 hex characters).")],
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Show a transaction: block, result code and, if it is a reveal, its fields.

    Sends the hash to the nodes in [chain] endpoints, which can therefore see that someone looked it up.
    """
    transaction = anyio.run(_look_up, config, parse_hex32("HASH", tx_hash))
    if transaction is None:
        fail("no node has this transaction in a block", ExitCode.NOT_FOUND)
    emit(transaction, _print_transaction, json=json)


def _print_transaction(transaction: dict[str, Any]) -> None:
    fields = {name: value for name, value in transaction.items() if name != "reveal"}
    emit_fields({**fields, **(transaction["reveal"] or {})})


async def _look_up(config: Path | None, tx_hash: bytes) -> PublicTransaction | None:
    async with open_node_pool(config) as nodes:
        found = await ChainLookups(nodes).find_transaction(tx_hash)
        return None if found is None else _describe_transaction(*found, tx_hash, nodes.reported_chain_id)


def _describe_transaction(
    result: TxResult, raw: bytes | None, tx_hash: bytes, chain_id: str | None
) -> PublicTransaction:
    message = None if raw is None else parse_reveal(raw)
    kind: Literal["reveal", "other"] = "other" if message is None else "reveal"
    return PublicTransaction(
        hash=tx_hash.hex().upper(),
        chain_id=chain_id,
        height=result.height,
        code=result.code,
        log=sanitize_text(result.log),
        kind=None if raw is None else kind,
        bytes=None if raw is None else len(raw),
        reveal=None if message is None else PublicReveal(**reveal_fields(message), proof_bytes=len(message.proof)),
    )


def reveal_fields(message: RevealMessage) -> dict[str, Any]:
    """Return the public fields of a reveal, except its proof."""
    return {
        "round": message.round_id.hex(),
        "nullifier": message.nullifier.hex(),
        "proposal_id": message.proposal_id,
        "vote_decision": message.vote_decision,
        "anchor_height": message.anchor_height,
    }
