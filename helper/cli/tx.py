"""`svote-helper tx`: shows public transactions of the chain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from helper.cli.options import ConfigOption, JsonOption
from helper.cli.output import ExitCode, emit, emit_fields, fail, map_errors_to_exit_codes
from helper.server.operator_parameters import parse_hex32

if TYPE_CHECKING:
    from helper.chain.block_reader import IncludedTx

app = typer.Typer(help="Show public transactions of the chain.")


@app.callback()
def tx() -> None:
    """Show public transactions of the chain."""


@app.command()
def lookup(
    tx_hash: Annotated[str, typer.Argument(metavar="HASH", help="Transaction hash (64 hex characters).")],
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Show a transaction: block, result code and, if it is a reveal, its fields.

    Sends the hash to the nodes in [chain] endpoints, which can therefore see that someone looked it up.
    """
    with map_errors_to_exit_codes():
        transaction = anyio.run(_look_up, config, parse_hex32("HASH", tx_hash))
    if transaction is None:
        fail("no node has this transaction in a block", ExitCode.NOT_FOUND)
    emit(transaction, _print_transaction, json=json)


def _print_transaction(transaction: dict[str, Any]) -> None:
    fields = {name: value for name, value in transaction.items() if name != "reveal"}
    emit_fields({**fields, **(transaction["reveal"] or {})})


async def _look_up(config: Path | None, tx_hash: bytes) -> dict[str, Any] | None:
    # imported here, so that the help loads no HTTP client
    from helper.chain.block_reader import ChainLookups  # noqa: PLC0415
    from helper.cli.chain_access import open_node_pool  # noqa: PLC0415

    async with open_node_pool(config) as nodes:
        transaction = await ChainLookups(nodes).find_transaction(tx_hash)
        return None if transaction is None else _transaction_json(transaction, tx_hash, nodes.chain_id)


def _transaction_json(transaction: IncludedTx, tx_hash: bytes, chain_id: str | None) -> dict[str, Any]:
    from helper.chain.broadcast_outcome import sanitize_text  # noqa: PLC0415
    from helper.chain.reveal_transaction import parse_reveal  # noqa: PLC0415

    message = None if transaction.raw is None else parse_reveal(transaction.raw)
    reveal = None
    if message is not None:
        reveal = {
            "round": message.round_id.hex(),
            "nullifier": message.nullifier.hex(),
            "proposal_id": message.proposal_id,
            "vote_decision": message.vote_decision,
            "anchor_height": message.anchor_height,
            "proof_bytes": len(message.proof),
        }
    kind = "reveal" if reveal else "other"
    return {
        "hash": tx_hash.hex().upper(),
        "chain_id": chain_id,
        "height": transaction.height,
        "code": transaction.code,
        "log": sanitize_text(transaction.log),
        "kind": None if transaction.raw is None else kind,
        "bytes": None if transaction.raw is None else len(transaction.raw),
        "reveal": reveal,
    }
