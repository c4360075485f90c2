"""Evidence that a reveal was right: one small zip with the transaction, its proof, what it proves, and their hashes.

The same facts always make the same bytes, so a bundle is checked by making it anew: what is not, byte for byte, the
bundle of its own contents is none. Nothing in it tells who revealed the share; all of it is public on the chain.

What a bundle shows by itself: this proof holds for this nullifier, ciphertext, choice, round and root, under the
circuit with this fingerprint, and this transaction carries it. What it can not show: that the root is the chain's at
the anchor's height, and that a block has the transaction. The chain is asked for these.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from helper.chain.reveal_transaction import RevealMessage
from helper.errors import ChainAnswerError, ProofBundleError
from proofs import CircuitInfo, EncodingError, Statement

FORMAT: Final = "svote-helper reveal evidence"
MAX_BUNDLE: Final = 64 << 10
"""Bytes of the largest bundle that is looked at: a real one has less than a quarter."""

TRANSACTION: Final = "transaction.bin"
PROOF: Final = "proof.bin"
INPUTS: Final = "public-inputs.json"
MANIFEST: Final = "manifest.json"
MEMBERS: Final = (TRANSACTION, PROOF, INPUTS, MANIFEST)
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)

Model = TypeVar("Model", bound=BaseModel)
Verify = Callable[[str, bytes, Statement], bool]
_Hex32 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Height = Annotated[int, Field(ge=1, le=2**62)]


@dataclass(frozen=True, slots=True)
class ProofBundle:
    """One counted reveal.

    Attributes:
        chain_id: the chain that counted it.
        height: the block that has its transaction.
        transaction: the transaction's bytes.
        circuit: the circuit of its proof.
        root: the round's commitment tree's root at the proof's anchor, 32 bytes.
    """

    chain_id: str
    height: int
    transaction: bytes
    circuit: CircuitInfo
    root: bytes

    @property
    def message(self) -> RevealMessage:
        """The reveal in the transaction.

        Raises:
            EvidenceError: it is none.
        """
        try:
            message = RevealMessage.from_tx(self.transaction)
        except ChainAnswerError as error:
            raise ProofBundleError(str(error)) from None
        if len(message.enc_share) != 64:
            raise ProofBundleError("transaction: its ciphertext has not 64 bytes")
        return message

    @property
    def tx_hash(self) -> str:
        """The transaction's hash, as chains write it."""
        return sha256(self.transaction).hexdigest().upper()

    @property
    def statement(self) -> Statement:
        """What the proof has to prove."""
        message = self.message
        return Statement(
            nullifier=message.nullifier,
            c1=message.enc_share[:32],
            c2=message.enc_share[32:],
            proposal_id=message.proposal_id,
            vote_decision=message.vote_decision,
            root=self.root,
            round_id=message.round_id,
        )


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Circuit(_Strict):
    name: Annotated[str, Field(max_length=16)]
    fingerprint: _Hex32
    crate: Annotated[str, Field(max_length=64)]


class _Manifest(_Strict):
    format: Literal["svote-helper reveal evidence"]
    version: Literal[1]
    chain_id: Annotated[str, Field(min_length=1, max_length=128)]
    height: _Height
    transaction_hash: Annotated[str, Field(pattern="^[0-9A-F]{64}$")]
    circuit: _Circuit
    sha256: dict[Literal["transaction.bin", "proof.bin", "public-inputs.json"], _Hex32]


class _Inputs(_Strict):
    nullifier: _Hex32
    c1: _Hex32
    c2: _Hex32
    proposal_id: Annotated[int, Field(ge=0, le=2**32 - 1)]
    vote_decision: Annotated[int, Field(ge=0, le=2**32 - 1)]
    root: _Hex32
    round_id: _Hex32
    anchor_height: Annotated[int, Field(ge=0, le=2**63)]


def circuit_of(circuits: Mapping[str, CircuitInfo], proof: bytes) -> CircuitInfo:
    """The circuit generation whose proofs are that long.

    Raises:
        EvidenceError: there is none.
    """
    found = next((info for info in circuits.values() if info.proof_bytes == len(proof)), None)
    if found is None:
        raise ProofBundleError(f"a proof of {len(proof)} bytes is of no circuit that is known here")
    return found


def check(evidence: ProofBundle, verify: Verify) -> None:
    """Check a proof against what it has to prove.

    Args:
        evidence: a reveal.
        verify: the real verifier (`proofs.verify`).

    Raises:
        EvidenceError: it does not hold; says what does not.
    """
    try:
        holds = verify(evidence.circuit.name, evidence.message.proof, evidence.statement)
    except EncodingError as error:
        raise ProofBundleError(f"{error.field}: is not as it is encoded ({error.reason})") from None
    if not holds:
        raise ProofBundleError("the proof does not hold for these public inputs")


def pack(evidence: ProofBundle) -> bytes:
    """The bundle."""
    contents = {TRANSACTION: evidence.transaction, PROOF: evidence.message.proof, INPUTS: _inputs(evidence)}
    manifest = {
        "format": FORMAT,
        "version": 1,
        "chain_id": evidence.chain_id,
        "height": evidence.height,
        "transaction_hash": evidence.tx_hash,
        "circuit": {
            "name": evidence.circuit.name,
            "fingerprint": evidence.circuit.fingerprint,
            "crate": evidence.circuit.crate,
        },
        "sha256": {name: sha256(content).hexdigest() for name, content in contents.items()},
    }
    contents[MANIFEST] = _json(manifest)
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as bundle:
        for name, content in contents.items():
            about = zipfile.ZipInfo(name, _EPOCH)
            about.create_system = 3  # the same bytes whatever machine writes them
            about.external_attr = 0o644 << 16
            bundle.writestr(about, content)
    return written.getvalue()


def _inputs(evidence: ProofBundle) -> bytes:
    statement = evidence.statement
    return _json(
        {
            "nullifier": statement.nullifier.hex(),
            "c1": statement.c1.hex(),
            "c2": statement.c2.hex(),
            "proposal_id": statement.proposal_id,
            "vote_decision": statement.vote_decision,
            "root": statement.root.hex(),
            "round_id": statement.round_id.hex(),
            "anchor_height": evidence.message.anchor_height,
        }
    )


def _json(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n"


def read_bounded(path: Path) -> bytes:
    """A file's bytes, not many more than a bundle may have."""
    with path.open("rb") as file:
        return file.read(MAX_BUNDLE + 1)


def unpack(bundle: bytes, circuits: Mapping[str, CircuitInfo]) -> ProofBundle:
    """What a bundle says, if its parts are what the manifest says of them and belong together; not whether it is true.

    Args:
        bundle: a file's bytes, from whomever.
        circuits: the circuits that are known here.

    Raises:
        EvidenceError: it is no bundle, or its parts are at odds; says which.
    """
    if len(bundle) > MAX_BUNDLE:
        raise ProofBundleError(f"the bundle is larger than {MAX_BUNDLE} bytes")
    contents = _members(bundle)
    manifest = _parse(_Manifest, MANIFEST, contents[MANIFEST])
    for name in (TRANSACTION, PROOF, INPUTS):
        if sha256(contents[name]).hexdigest() != manifest.sha256.get(name):
            raise ProofBundleError(f"{name}: is not what the manifest says (its hash is another)")
    if sha256(contents[TRANSACTION]).hexdigest().upper() != manifest.transaction_hash:
        raise ProofBundleError(f"{MANIFEST}: transaction_hash is not that of the transaction")
    circuit = circuits.get(manifest.circuit.name)
    if circuit is None or circuit.fingerprint != manifest.circuit.fingerprint:
        raise ProofBundleError(f"{MANIFEST}: the circuit is none that is known here")
    inputs = _parse(_Inputs, INPUTS, contents[INPUTS])
    evidence = ProofBundle(
        chain_id=manifest.chain_id,
        height=manifest.height,
        transaction=contents[TRANSACTION],
        circuit=circuit,
        root=bytes.fromhex(inputs.root),
    )
    if evidence.message.proof != contents[PROOF]:
        raise ProofBundleError(f"{PROOF}: is not the proof that the transaction carries")
    if _inputs(evidence) != contents[INPUTS]:
        raise ProofBundleError(f"{INPUTS}: are not those of the transaction")
    if pack(evidence) != bundle:
        raise ProofBundleError("the bundle has something beside its contents, or is not written as bundles are")
    return evidence


def _members(bundle: bytes) -> dict[str, bytes]:
    """The files in a zip that has exactly those of a bundle, each as long as it says and stored as it is."""
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as opened:
            listed = opened.infolist()
            if tuple(about.filename for about in listed) != MEMBERS:
                raise ProofBundleError(f"the bundle does not hold {', '.join(MEMBERS)} and nothing else")
            for about in listed:
                if about.compress_type != zipfile.ZIP_STORED or about.file_size > len(bundle):
                    raise ProofBundleError(f"{about.filename}: is compressed, or longer than the bundle")
            return {about.filename: opened.read(about) for about in listed}
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, ValueError, EOFError, OSError) as error:
        raise ProofBundleError(f"this is not a zip file that can be read ({type(error).__name__})") from None


def _parse(kind: type[Model], name: str, content: bytes) -> Model:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ProofBundleError(f"{name}: {where + ': ' if where else ''}{first['msg']}") from None
