"""`svote-helper proof`: exports and verifies proof bundles of confirmed reveals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import typer

from helper.chain.block_reader import ChainLookups
from helper.cli.chain import open_node_pool, reveal_fields
from helper.cli.command_inputs import read_settings
from helper.cli.conventions import (
    ConfigOption,
    JsonOption,
    QueueOptions,
    emit,
    fail,
    new_file,
    print_message,
)
from helper.cli.operator_api import OperatorApi, resolve_round
from helper.cli.terminal import emit_fields
from helper.clock import SystemClock
from helper.core.json_records import HEX_32, TX_HASH, fact, to_json
from helper.errors import BucketError, HelperError, NotFound, ProofBundleError, UsageError
from helper.operations.archive_reader import find_bundle, open_archive_bucket
from helper.operations.proof_bundle import (
    MAX_BUNDLE_BYTES,
    ProofBundle,
    find_circuit,
    pack_bundle,
    unpack_bundle,
    verify_bundle,
)
from helper.runtime.process_security import acting_as_owner
from helper.server.operator_parameters import parse_hex32
from helper.store.models import MIN_REF_CHARS

FILE_NAME_CHARS = 12
"""Characters of the nullifier in the default file name."""

SearchSource = Literal["auto", "archive", "chain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFields:
    """The contents of a bundle."""

    chain_id: str = fact("Chain id in the bundle.")
    height: int = fact("Block height in the bundle.")
    transaction: str = fact("Transaction hash, hex.", pattern=TX_HASH)
    round: str = fact("Round id, hex.", pattern=HEX_32)
    nullifier: str = fact("Nullifier of the share, hex. It is public once the reveal is on the chain.", pattern=HEX_32)
    proposal_id: int = fact("Proposal id.")
    vote_decision: int = fact("Index of the chosen option.")
    anchor_height: int = fact("Height of the tree root that the proof was made against.")
    root: str = fact("Tree root at the anchor height, hex.", pattern=HEX_32)
    circuit: str = fact("Name of the circuit.")
    fingerprint: str = fact("Fingerprint of the circuit's verifying key, hex.", pattern=HEX_32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedBundle(BundleFields):
    """`proof export`."""

    output: str = fact("Path of the bundle.")
    bytes: int = fact("Size of the bundle in bytes.")
    source: str = fact("Where the reveal was found: archive or chain.")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedBundle:
    """`proof verify`, with the contents of the bundle if it can be read."""

    bundle: str = fact("Path of the bundle.")
    ok: bool = fact("Whether the bundle is valid.")
    reason: str | None = fact("Why the bundle is invalid; null if it is valid.")
    online: bool | None = fact(
        "true if the chain nodes confirm the bundle; null without --online, or if `ok` is false."
    )


def export(
    *,
    nullifier: Annotated[
        str, typer.Argument(metavar="NULLIFIER", help="Public nullifier of a confirmed reveal (64 hex characters).")
    ],
    output: Annotated[Path | None, typer.Option(help="File to write (default: reveal-NULLIFIER.zip).")] = None,
    round_id: Annotated[
        str,
        typer.Option("--round", help=f"Round, if known (hex, or a prefix of at least {MIN_REF_CHARS} characters)."),
    ] = "",
    from_height: Annotated[
        int, typer.Option(min=0, help="First height of a block search; 0: all since the rounds were created.")
    ] = 0,
    to_height: Annotated[int, typer.Option(min=0, help="Last height of a block search.")] = 0,
    source: Annotated[
        SearchSource,
        typer.Option("--from", help="Search the archive, the chain, or the archive first and then the chain."),
    ] = "auto",
    options: QueueOptions,
) -> None:
    """Write a bundle for a confirmed reveal: transaction, proof, public inputs and their hashes.

    No request to a node contains the nullifier: the command reads complete blocks, the newest first. It rejects a
    nullifier that is not on the chain. A bundle contains only public data, and does not show who sent the reveal.

    If [archive] place is set, the archive is searched first; the bundle's hash and proof are verified. Only `proof
    verify --online` checks that the chain confirmed it. The operator of the archive can see which bundle is fetched;
    with --from chain, no one can.
    """
    nullifier_bytes = parse_hex32("NULLIFIER", nullifier)
    if (from_height or to_height) and not 1 <= from_height <= to_height:
        raise UsageError("--from-height and --to-height must be given together, in ascending order")
    if from_height and source == "archive":
        raise UsageError("--from-height searches the chain and cannot be used with --from archive")
    heights = range(from_height, to_height + 1) if from_height else None
    round_ids = _find_rounds(OperatorApi.of(options), nullifier_bytes, round_id)
    proof_bundle, source = anyio.run(_find, options.config, nullifier_bytes, round_ids, heights, source)
    verify_bundle(proof_bundle)
    bundle = pack_bundle(proof_bundle)
    path = output or Path(f"reveal-{nullifier.lower()[:FILE_NAME_CHARS]}.zip")
    with acting_as_owner(path) as real:
        is_written = real.is_file() and real.read_bytes() == bundle
    if not is_written:
        with new_file(path) as file:
            file.write(bundle)
    result = ExportedBundle(output=str(path), bytes=len(bundle), source=source, **_bundle_fields(proof_bundle))
    emit(result, emit_fields, json=options.json)


def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", readable=False, help="Bundle written by `proof export`.")],
    online: Annotated[
        bool,
        typer.Option(
            "--online", help="Also check with the nodes that the reveal is confirmed and the root is correct."
        ),
    ] = False,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Verify a bundle offline with the chain's verifier.

    This shows that the proof is valid for the public inputs and the circuit with this fingerprint, and that the
    transaction contains exactly these inputs. It does not show that the chain confirmed the transaction or that the
    root is the chain's. --online asks the nodes in [chain] endpoints for both, and trusts their responses.
    """
    with bundle.open("rb") as file:
        content = file.read(MAX_BUNDLE_BYTES + 1)
    fields: dict[str, Any] = {}
    confirmed: bool | None = None
    reason: str | None = None
    try:
        proof_bundle = unpack_bundle(content)
        verify_bundle(proof_bundle)
        fields = _bundle_fields(proof_bundle)
        if online:
            anyio.run(_verify_online, config, proof_bundle)
            confirmed = True
    except ProofBundleError as error:
        reason = str(error)
    result = VerifiedBundle(bundle=str(bundle), ok=reason is None, reason=reason, online=confirmed)
    emit({**to_json(result), **fields}, emit_fields, json=json)
    if reason is not None:
        fail(f"rejected: {reason}")


def _find_rounds(api: OperatorApi, nullifier: bytes, round_id: str) -> list[bytes]:
    """Return the rounds to search: the given one, or those that the helper knows; an empty list means all."""
    if round_id:
        return [parse_hex32("round", resolve_round(api, round_id))]
    try:
        return [bytes.fromhex(round_hex) for round_hex in api.get(f"/spent/{nullifier.hex()}")["rounds"]]
    except (HelperError, PermissionError):
        return []  # without a helper, search all rounds of the chain


async def _find(
    config: Path | None, nullifier: bytes, round_ids: Sequence[bytes], heights: range | None, source: SearchSource
) -> tuple[ProofBundle, SearchSource]:
    """Find the reveal; returns its bundle and source. Only the chain is searched if there are `heights`."""
    if source != "chain" and heights is None:
        bundle = await _search_archive(config, nullifier, round_ids, is_required=source == "archive")
        if bundle is not None:
            return bundle, "archive"
    return await _search_chain(config, nullifier, round_ids, heights), "chain"


async def _search_archive(
    config: Path | None, nullifier: bytes, round_ids: Sequence[bytes], *, is_required: bool
) -> ProofBundle | None:
    """Search the archive. Unless that is required, an error is only printed, and no archive or bundle is None."""
    settings = read_settings(config).config
    if not is_required and not settings.archive.place:
        return None
    try:
        bundle = await find_bundle(open_archive_bucket(settings, SystemClock()), nullifier, round_ids)
        if bundle is not None:
            verify_bundle(bundle)
    except (BucketError, ProofBundleError) as error:
        if is_required:
            raise
        print_message(f"archive not usable: {error}")
        return None
    if bundle is None and is_required:
        raise NotFound(
            "the archive has no bundle of this nullifier",
            advice="It may be in another round, or in blocks that are not archived yet: try --from chain.",
        )
    return bundle


async def _search_chain(
    config: Path | None, nullifier: bytes, round_ids: Sequence[bytes], heights: range | None
) -> ProofBundle:
    async with open_node_pool(config) as nodes:
        chain = ChainLookups(nodes, on_progress=lambda height: print_message(f"searched to block {height}"))
        counted = await chain.find_reveal(round_ids, nullifier, heights)
        if counted is None:
            raise NotFound(
                "no confirmed reveal with this nullifier in the searched range",
                advice="It may be wrong, not revealed yet, or in another round (--round) or block (--from-height).",
            )
        message = counted.message
        state = await chain.root_at(message.round_id, message.anchor_height)
        if state is None:
            raise ProofBundleError(f"no node has the round's root at anchor height {message.anchor_height}")
        return ProofBundle(
            chain_id=nodes.reported_chain_id or "",
            height=counted.height,
            transaction=counted.raw,
            circuit=find_circuit(message.proof),
            root=state.root,
        )


async def _verify_online(config: Path | None, proof_bundle: ProofBundle) -> None:
    """Raise ProofBundleError unless the chain's nodes confirm the bundle."""
    async with open_node_pool(config) as nodes:
        chain, message = ChainLookups(nodes), proof_bundle.message
        if nodes.reported_chain_id != proof_bundle.chain_id:
            raise ProofBundleError(
                f"the bundle is from chain {proof_bundle.chain_id}, the nodes are on {nodes.reported_chain_id}"
            )
        found = await chain.find_transaction(bytes.fromhex(proof_bundle.tx_hash))
        if found is None:
            raise ProofBundleError("no node has the transaction in a block")
        if not await chain.is_counted_in_block(proof_bundle.transaction, proof_bundle.height):
            raise ProofBundleError(f"the nodes report block {found[0].height} and code {found[0].code}")
        state = await chain.root_at(message.round_id, message.anchor_height)
        if state is None or state.root != proof_bundle.root:
            raise ProofBundleError(f"the nodes report a different root, or none, at height {message.anchor_height}")


def _bundle_fields(proof_bundle: ProofBundle) -> dict[str, Any]:
    return {
        "chain_id": proof_bundle.chain_id,
        "height": proof_bundle.height,
        "transaction": proof_bundle.tx_hash,
        **reveal_fields(proof_bundle.message),
        "root": proof_bundle.root.hex(),
        "circuit": proof_bundle.circuit.name,
        "fingerprint": proof_bundle.circuit.fingerprint,
    }
