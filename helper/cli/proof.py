"""`svote-helper proof`: evidence that a reveal on the chain was right, and its check by the real verifier."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from helper.cli.arguments import resolve_round
from helper.cli.exit_codes import map_errors_to_exit_codes
from helper.cli.options import ConfigOption, DbOption, JsonOption
from helper.cli.output import emit_json, emit_table, fail, say
from helper.cli.passphrase import permitted
from helper.cli.target import Target
from helper.errors import BucketError, ConfigError, HelperError, NothingThere, ProofBundleError
from helper.runtime.privileges import acting_as_owner

if TYPE_CHECKING:
    from helper.operations.proof_bundle import ProofBundle

app = typer.Typer(help="Evidence that a reveal on the chain was right.")

SHOWN = 12


class Source(StrEnum):
    """Who has what was counted."""

    AUTO = "auto"
    ARCHIVE = "archive"
    CHAIN = "chain"


@dataclass(frozen=True, slots=True)
class Search:
    """What to look for, and where.

    Attributes:
        nullifier: 32 bytes.
        round_ids: the rounds that it may be of, empty for all.
        heights: these blocks alone, None for wherever it is.
        source: whom to ask.
    """

    nullifier: bytes
    round_ids: list[bytes]
    heights: range | None
    source: Source


@app.command()
def export(
    *,
    nullifier: Annotated[str, typer.Argument(help="The public nullifier of a counted reveal (64 hex characters).")],
    output: Annotated[
        Path | None, typer.Option(help="Where to write it (else reveal-NULLIFIER.zip).", show_default=False)
    ] = None,
    round_id: Annotated[
        str,
        typer.Option("--round", help="The round, if known (hex, or its first 6 characters).", show_default=False),
    ] = "",
    from_height: Annotated[int, typer.Option(min=0, help="Search whole blocks from this height on; 0: do not.")] = 0,
    to_height: Annotated[int, typer.Option(min=0, help="Search whole blocks up to this height.")] = 0,
    source: Annotated[
        Source,
        typer.Option("--from", help="Take it from the archive, from the chain, or from who has it, archive first."),
    ] = Source.AUTO,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Write the reveal that the chain counted into a bundle: transaction, proof, public inputs, their hashes.

    No node is asked about the nullifier: the reveals of its round are read (all of them, from a node with an index), or
    whole blocks. A nullifier that is not on the chain is refused. All in a bundle is public; nothing says who revealed.

    Where [archive] place is set the bundle is looked for there first, its hash compared with the index, its proof
    verified. That the chain counted it is the archive's word then: `proof verify --online` asks the chain. Its
    keeper sees which bundle is fetched; --from chain asks nobody by name.
    """
    search = _search(Target.of(config, db), nullifier, round_id, from_height, to_height, source)
    with map_errors_to_exit_codes():
        evidence, source = anyio.run(_find, config, search)
        from helper.operations.proof_bundle import check, pack  # noqa: PLC0415
        from proofs import verify  # noqa: PLC0415

        check(evidence, verify)
        bundle = pack(evidence)
    path = output or Path(f"reveal-{nullifier.lower()[:SHOWN]}.zip")
    with permitted(), acting_as_owner(path) as real:
        try:
            with real.open("xb") as file:
                file.write(bundle)
        except FileExistsError:
            if real.read_bytes() != bundle:
                fail(f"there is something else of this name already: {path}")
    _tell({"output": str(path), "bytes": len(bundle), "source": source.value, **_facts(evidence)}, json=json)


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(readable=False, help="What `proof export` wrote.")],
    online: Annotated[
        bool,
        typer.Option("--online", help="Ask the chain too: whether it counted this, and whether the root is its own."),
    ] = False,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Check a bundle with the real verifier, without any network.

    It shows that the proof holds for the public inputs under the circuit with this fingerprint, and that the
    transaction carries just these. It does not show that the chain counted the transaction, nor that the root is the
    chain's: --online asks the nodes of [chain] endpoints for that, and takes their word.
    """
    from helper.operations import proof_bundle as bundles  # noqa: PLC0415
    from proofs import CIRCUITS  # noqa: PLC0415
    from proofs import verify as real_verifier  # noqa: PLC0415

    with permitted():
        content = bundles.read_bounded(bundle)
    answer: dict[str, Any] = {"bundle": str(bundle), "ok": False, "online": None}
    try:
        evidence = bundles.unpack(content, CIRCUITS)
        bundles.check(evidence, real_verifier)
        answer |= {"ok": True, "reason": None, **_facts(evidence)}
        if online:
            with map_errors_to_exit_codes():
                anyio.run(_ask_chain, config, evidence)
            answer["online"] = True
    except ProofBundleError as error:
        answer |= {"ok": False, "reason": str(error)}
    _tell(answer, json=json)
    if not answer["ok"]:
        fail(f"refused: {answer['reason']}")


def _search(target: Target, nullifier: str, round_id: str, first: int, last: int, source: Source) -> Search:
    """What the arguments ask for; the round, where they do not say it, from what is known here of the chain."""
    from helper.server.views import parse_hex32, parse_round  # noqa: PLC0415

    with map_errors_to_exit_codes():
        wanted = parse_hex32("NULLIFIER", nullifier)
        round_ids = [parse_round(resolve_round(target, round_id))] if round_id else []
        if (first or last) and not 1 <= first <= last:
            raise ValueError("--from-height and --to-height go together, the first not above the last")
        if first and source is Source.ARCHIVE:
            raise ValueError("--from-height searches the chain's blocks, and --from archive asks for none of them")
        if not round_ids:
            try:
                known = target.ask(f"/spent/{wanted.hex()}")["rounds"]
            except (HelperError, PermissionError):
                known = []  # without a helper all rounds of the chain are searched
            round_ids = [bytes.fromhex(one) for one in known]
    return Search(wanted, round_ids, range(first, last + 1) if first else None, source)


async def _find(config: Path | None, search: Search) -> tuple[ProofBundle, Source]:
    """The reveal, and who had it."""
    if search.source is not Source.CHAIN and search.heights is None:
        found = await _in_archive(config, search)
        if found is not None:
            return found, Source.ARCHIVE
        if search.source is Source.ARCHIVE:
            raise NothingThere(
                "the archive does not have this nullifier",
                advice="It may be of another round, or in blocks that are not archived yet: try --from chain.",
            )
    return await _on_chain(config, search), Source.CHAIN


async def _in_archive(config: Path | None, search: Search) -> ProofBundle | None:
    """The reveal as the archive has it; None where it has it not, and where there is no archive.

    Where the chain may be asked instead, an archive that fails is told about and no more.
    """
    import os  # noqa: PLC0415

    from helper.cli.settings import read_settings  # noqa: PLC0415
    from helper.clock import SystemClock  # noqa: PLC0415
    from helper.operations.archive.factory import archive_bucket  # noqa: PLC0415
    from helper.operations.archive.reader import find_bundle  # noqa: PLC0415
    from helper.operations.proof_bundle import check  # noqa: PLC0415
    from proofs import CIRCUITS, verify  # noqa: PLC0415

    must = search.source is Source.ARCHIVE
    try:
        bucket = archive_bucket(read_settings(config).config, SystemClock(), os.environ)
        if bucket is None:
            if must:
                raise ConfigError("[archive] place is not set")
            return None
        found = await find_bundle(bucket, CIRCUITS, search.nullifier, search.round_ids)
        if found is not None:
            check(found[1], verify)
    except (BucketError, ProofBundleError) as error:
        if must:
            raise
        say(f"not from the archive: {error}")
        return None
    return None if found is None else found[1]


async def _on_chain(config: Path | None, search: Search) -> ProofBundle:
    """The reveal as the chain has it."""
    from helper.chain.lookups import ChainLookups  # noqa: PLC0415
    from helper.cli.chain_access import chain_of  # noqa: PLC0415
    from helper.operations.proof_bundle import ProofBundle, circuit_of  # noqa: PLC0415
    from proofs import CIRCUITS  # noqa: PLC0415

    async with chain_of(config) as endpoints:
        chain = ChainLookups(endpoints, told=lambda height: say(f"searched up to block {height}"))
        round_ids = search.round_ids or await chain.rounds()
        counted = await chain.counted_reveal(round_ids, search.nullifier, search.heights)
        if counted is None:
            raise NothingThere(
                "the chain has not counted this nullifier, as far as was searched",
                advice="It may be wrong, not revealed yet, or of another round (--round) or block (--from-height).",
            )
        message = counted.message
        state = await chain.root_at(message.round_id, message.anchor_height)
        if state is None:
            raise ProofBundleError(f"no node has the round's root at the anchor's height {message.anchor_height}")
        return ProofBundle(
            chain_id=endpoints.chain_id or "",
            height=counted.height,
            transaction=counted.raw,
            circuit=circuit_of(CIRCUITS, message.proof),
            root=state.root,
        )


async def _ask_chain(config: Path | None, evidence: ProofBundle) -> None:
    """Raise EvidenceError unless the chain's nodes say the same."""
    from helper.chain.lookups import ChainLookups  # noqa: PLC0415
    from helper.cli.chain_access import chain_of  # noqa: PLC0415

    async with chain_of(config) as endpoints:
        chain, message = ChainLookups(endpoints), evidence.message
        if endpoints.chain_id != evidence.chain_id:
            raise ProofBundleError(f"the bundle is of chain {evidence.chain_id}, the nodes are of {endpoints.chain_id}")
        found = await chain.transaction(bytes.fromhex(evidence.tx_hash))
        if found is None:
            raise ProofBundleError("no node has the transaction in a block")
        if found.code or found.height != evidence.height:
            raise ProofBundleError(f"the nodes have it in block {found.height} with code {found.code}")
        state = await chain.root_at(message.round_id, message.anchor_height)
        if state is None or state.root != evidence.root:
            raise ProofBundleError(f"the nodes have another root at height {message.anchor_height}, or none")


def _facts(evidence: ProofBundle) -> dict[str, Any]:
    message = evidence.message
    return {
        "chain_id": evidence.chain_id,
        "height": evidence.height,
        "transaction": evidence.tx_hash,
        "round": message.round_id.hex(),
        "nullifier": message.nullifier.hex(),
        "proposal_id": message.proposal_id,
        "vote_decision": message.vote_decision,
        "anchor_height": message.anchor_height,
        "root": evidence.root.hex(),
        "circuit": evidence.circuit.name,
        "fingerprint": evidence.circuit.fingerprint,
    }


def _tell(answer: dict[str, Any], *, json: bool) -> None:
    if json:
        emit_json(answer)
    else:
        emit_table(("what", "value"), [(name.replace("_", " "), value) for name, value in answer.items()])
