"""`svote-helper tx`: look at a transaction that is public on the chain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from helper.cli.exit_codes import map_errors_to_exit_codes
from helper.cli.options import ConfigOption, JsonOption
from helper.cli.output import Exit, emit_json, emit_table, fail
from helper.server.views import parse_hex32

if TYPE_CHECKING:
    from helper.chain.lookups import FoundTx

app = typer.Typer(help="Look at transactions that are public on the chain.")


@app.callback()
def tx() -> None:
    """Look at transactions that are public on the chain."""


@app.command()
def lookup(
    tx_hash: Annotated[str, typer.Argument(metavar="HASH", help="The transaction's hash (64 hex characters).")],
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Tell what the chain knows of a transaction: its block, whether it went through, and what it says.

    It asks the nodes of [chain] endpoints, by the hash: the one that is asked learns that somebody wants to know.
    """
    with map_errors_to_exit_codes():
        answer = anyio.run(_look_up, config, parse_hex32("HASH", tx_hash))
    if answer is None:
        fail("no node has this transaction in a block", Exit.NOT_FOUND)
    if json:
        emit_json(answer)
        return
    facts = {**{name: value for name, value in answer.items() if name != "reveal"}, **(answer["reveal"] or {})}
    emit_table(("what", "value"), [(name.replace("_", " "), value) for name, value in facts.items()])


async def _look_up(config: Path | None, tx_hash: bytes) -> dict[str, Any] | None:
    # loaded here, so that the help loads no client
    from helper.chain.lookups import ChainLookups  # noqa: PLC0415
    from helper.cli.chain_access import chain_of  # noqa: PLC0415

    async with chain_of(config) as endpoints:
        found = await ChainLookups(endpoints).transaction(tx_hash)
        return None if found is None else _told(found, tx_hash, endpoints.chain_id)


def _told(found: FoundTx, tx_hash: bytes, chain_id: str | None) -> dict[str, Any]:
    from helper.chain.lookups import reveal_in  # noqa: PLC0415
    from helper.chain.verdicts import presentable  # noqa: PLC0415

    message = None if found.raw is None else reveal_in(found.raw)
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
        "height": found.height,
        "code": found.code,
        "log": presentable(found.log),
        "kind": None if found.raw is None else kind,
        "bytes": None if found.raw is None else len(found.raw),
        "reveal": reveal,
    }
