"""The command line of the dev chain: `python -m devnet`, and the function behind `svote-helper devnet`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer
import uvloop

from devnet.eras import ERAS, RECORDED
from devnet.journal import JournalError
from devnet.network import Options
from devnet.server import Addresses, run

MAX_PORT: Final = 65_535


class Circuit(StrEnum):
    """The two circuit generations."""

    K10 = "k10"
    K11 = "k11"


class EraName(StrEnum):
    """The eras of the protocol."""

    V0_5 = "0.5"
    V1_4 = "1.4"
    V1_6 = "1.6"


class Duplicates(StrEnum):
    """Handling of a second reveal of a share in the mempool."""

    BOTH = "both"
    FILTER = "filter"


def devnet(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    rest_port: Annotated[int, typer.Option(min=0, max=MAX_PORT, help="REST port; 0 selects a free one.")] = 11317,
    rpc_port: Annotated[
        int, typer.Option(min=0, max=MAX_PORT, help="Consensus RPC port; 0 selects a free one.")
    ] = 36657,
    ready_file: Annotated[Path | None, typer.Option(help="Also write the ready line to this file.")] = None,
    db: Annotated[Path | None, typer.Option(help="Store the chain in this file (default: in memory).")] = None,
    chain_id: Annotated[str, typer.Option(help="Chain id.")] = "svote-devnet-1",
    era: Annotated[
        EraName | None,
        typer.Option(
            help="Chain version whose responses, events, routes and limits the nodes have (default: the recorded ones "
            "of 0.5, with circuit k10)."
        ),
    ] = None,
    circuit: Annotated[
        Circuit | None, typer.Option(help="Circuit that the chain verifies (default: that of the era).")
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="Build version of the nodes (default: that of the era or circuit).")
    ] = None,
    block_seconds: Annotated[float, typer.Option(help="Seconds between blocks; 0: on demand only.")] = 1.0,
    clock_offset: Annotated[float, typer.Option(help="Offset of block times in seconds.")] = 0.0,
    max_reveals_per_block: Annotated[int, typer.Option(min=1, help="Maximum number of reveals per block.")] = 256,
    page_leaves: Annotated[
        int | None,
        typer.Option(min=0, help="Leaves per page, like newer chains; 0: one page (default: that of the era)."),
    ] = None,
    duplicates: Annotated[Duplicates, typer.Option(help="Handling of duplicate reveals.")] = Duplicates.BOTH,
    stand_in_proofs: Annotated[bool, typer.Option(help="Also accept fake proofs.")] = False,
    request_log: Annotated[Path | None, typer.Option(help="Append all requests to this file, as NDJSON.")] = None,
    extra_nodes: Annotated[int, typer.Option(min=0, max=16, help="Additional nodes, on the following ports.")] = 0,
    time_scale: Annotated[
        float, typer.Option(min=1, help="Speed of the chain's clock; block_seconds is in real time.")
    ] = 1.0,
    time_origin: Annotated[float, typer.Option(help="Unix time from which time_scale applies.")] = 0.0,
) -> None:
    """Run an embedded vote chain: blocks, trees, rounds and real proof verification on loopback."""
    if max(rest_port, rpc_port) + extra_nodes > MAX_PORT:
        raise typer.BadParameter(f"the ports of the additional nodes exceed {MAX_PORT}", param_hint="--extra-nodes")
    options = Options(
        chain_id=chain_id,
        era=RECORDED if era is None else ERAS[era],
        circuit=None if circuit is None else circuit.value,
        version=version,
        db=db,
        block_seconds=block_seconds,
        clock_offset_seconds=clock_offset,
        max_reveals=max_reveals_per_block,
        page_leaves=page_leaves,
        duplicates=duplicates.value,
        stand_in=stand_in_proofs,
        request_log=request_log,
        extra_nodes=extra_nodes,
        time_scale=time_scale,
        time_origin=time_origin,
    )
    try:
        uvloop.run(run(options, Addresses(host, rest_port, rpc_port), ready_file))
    except JournalError as error:
        raise SystemExit(str(error)) from None


def main() -> None:
    """Run the dev chain with the arguments of this process."""
    typer.run(devnet)
