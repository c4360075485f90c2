"""Proof bundle of a confirmed reveal: a zip of transaction, proof, public inputs and their hashes.

The encoding is deterministic. A reader therefore checks a bundle by packing its contents again and comparing all bytes.
A bundle contains only data that is public on the chain, and does not show who revealed the share.

A bundle shows that the proof is valid for this nullifier, ciphertext, choice, round and root, under the circuit with
this fingerprint, and that this transaction contains it. It cannot show that the root is the chain's at the anchor
height or that a block contains the transaction. These are checked against a node.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from helper.chain.reveal_transaction import RevealMessage
from helper.circuits import GENERATIONS, circuit_of_proof, get_generation
from helper.core.json_records import HEX_32, TX_HASH, first_error
from helper.errors import ChainResponseError, ProofBundleError
from proofs import CircuitInfo, EncodingError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT: Final = "svote-helper reveal evidence"
MAX_BUNDLE_BYTES: Final = 64 << 10
"""Maximum bytes of a bundle. A real bundle needs less than a quarter of it."""

TRANSACTION: Final = "transaction.bin"
PROOF: Final = "proof.bin"
INPUTS: Final = "public-inputs.json"
MANIFEST: Final = "manifest.json"
MEMBERS: Final = (TRANSACTION, PROOF, INPUTS, MANIFEST)
_ZIP_EPOCH: Final = (1980, 1, 1, 0, 0, 0)

Model = TypeVar("Model", bound=BaseModel)
Hex32 = Annotated[str, Field(pattern=HEX_32)]
TxHash = Annotated[str, Field(pattern=TX_HASH)]
Height = Annotated[int, Field(ge=1, le=2**62)]
ChainId = Annotated[str, Field(min_length=1, max_length=128)]


@dataclass(frozen=True, slots=True)
class ProofBundle:
    """One confirmed reveal.

    Attributes:
        height: height of the block that contains the transaction.
        root: root of the round's commitment tree at the anchor height, 32 bytes.
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
            ProofBundleError: the transaction is not a valid reveal.
        """
        try:
            message = RevealMessage.from_tx(self.transaction)
        except ChainResponseError as error:
            raise ProofBundleError(str(error)) from None
        length = get_generation(self.circuit.name).enc_share_bytes
        if len(message.enc_share) != length:
            raise ProofBundleError(f"transaction: ciphertext must be {length} bytes")
        return message

    @property
    def tx_hash(self) -> str:
        """The transaction's hash in upper-case hexadecimal."""
        return sha256(self.transaction).hexdigest().upper()

    @property
    def statement(self) -> DataclassInstance:
        """The public inputs of the proof."""
        return get_generation(self.circuit.name).create_statement(self.message, self.root)


class StrictModel(BaseModel):
    """An object of untrusted JSON: values are not converted, unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, defer_build=True)


class _Circuit(StrictModel):
    name: str
    fingerprint: str


class _Manifest(StrictModel):
    """The fields from which a bundle can be packed again. All others follow from the transaction."""

    format: Literal["svote-helper reveal evidence"]
    version: Literal[1]
    chain_id: ChainId
    height: Height
    circuit: _Circuit


class _Inputs(StrictModel):
    """The only public input that the transaction does not contain."""

    root: Hex32


def find_circuit(proof: bytes) -> CircuitInfo:
    """Return the circuit with this proof length.

    Raises:
        ProofBundleError: no circuit has it.
    """
    circuit = circuit_of_proof(proof)
    if circuit is None:
        raise ProofBundleError(f"no known circuit has proofs of {len(proof)} bytes")
    return circuit


def verify_bundle(proof_bundle: ProofBundle) -> None:
    """Verify the proof of a bundle against its public inputs.

    Raises:
        ProofBundleError: the proof is invalid.
    """
    try:
        generation = get_generation(proof_bundle.circuit.name)
        is_valid = generation.verify(proof_bundle.message.proof, proof_bundle.statement)
    except EncodingError as error:
        raise ProofBundleError(f"{error.field}: invalid encoding ({error.reason})") from None
    if not is_valid:
        raise ProofBundleError("the proof is not valid for these public inputs")


def pack_bundle(proof_bundle: ProofBundle) -> bytes:
    """Encode a bundle as a zip file. Equal bundles give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as bundle:
        for name, content in _create_members(proof_bundle).items():
            bundle.writestr(create_zip_entry(name, zipfile.ZIP_STORED), content)
    return buffer.getvalue()


def _create_members(proof_bundle: ProofBundle) -> dict[str, bytes]:
    contents = {
        TRANSACTION: proof_bundle.transaction,
        PROOF: proof_bundle.message.proof,
        INPUTS: _encode_inputs(proof_bundle),
    }
    manifest = {
        "format": FORMAT,
        "version": 1,
        "chain_id": proof_bundle.chain_id,
        "height": proof_bundle.height,
        "transaction_hash": proof_bundle.tx_hash,
        "circuit": {
            "name": proof_bundle.circuit.name,
            "fingerprint": proof_bundle.circuit.fingerprint,
            "crate": proof_bundle.circuit.crate,
        },
        "sha256": {name: sha256(content).hexdigest() for name, content in contents.items()},
    }
    return {**contents, MANIFEST: _encode_json(manifest)}


def create_zip_entry(name: str, method: int) -> zipfile.ZipInfo:
    """Create the entry of a member with a fixed date and mode, so that equal content gives equal files."""
    info = zipfile.ZipInfo(name, _ZIP_EPOCH)
    info.compress_type = method
    info.create_system = 3  # Unix; by default it depends on the platform
    info.external_attr = 0o644 << 16
    return info


def _encode_inputs(proof_bundle: ProofBundle) -> bytes:
    inputs = {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in asdict(proof_bundle.statement).items()
    }
    return _encode_json({**inputs, "anchor_height": proof_bundle.message.anchor_height})


def _encode_json(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n"


def unpack_bundle(bundle: bytes) -> ProofBundle:
    """Decode a bundle and check that its parts are consistent. Does not verify the proof.

    Args:
        bundle: the zip file; untrusted.

    Raises:
        ProofBundleError: it is not a bundle, or its parts contradict each other. The error names the part.
    """
    if len(bundle) > MAX_BUNDLE_BYTES:
        raise ProofBundleError(f"the bundle is larger than {MAX_BUNDLE_BYTES} bytes")
    contents = _read_members(bundle)
    manifest = _parse_model(_Manifest, MANIFEST, contents[MANIFEST])
    generation = GENERATIONS.get(manifest.circuit.name)
    if generation is None or generation.info.fingerprint != manifest.circuit.fingerprint:
        raise ProofBundleError(f"{MANIFEST}: unknown circuit")
    proof_bundle = ProofBundle(
        chain_id=manifest.chain_id,
        height=manifest.height,
        transaction=contents[TRANSACTION],
        circuit=generation.info,
        root=bytes.fromhex(_parse_model(_Inputs, INPUTS, contents[INPUTS]).root),
    )
    for name, expected in _create_members(proof_bundle).items():
        if contents[name] != expected:
            raise ProofBundleError(f"{name}: does not match the transaction")
    if pack_bundle(proof_bundle) != bundle:
        raise ProofBundleError("the bundle contains additional data or is not canonically encoded")
    return proof_bundle


def _read_members(bundle: bytes) -> dict[str, bytes]:
    """Read the members of the zip. Rejects other members and compression, to bound the memory used."""
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as opened:
            members = opened.infolist()
            if tuple(info.filename for info in members) != MEMBERS:
                raise ProofBundleError(f"the bundle must contain exactly {', '.join(MEMBERS)}")
            for info in members:
                if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(bundle):
                    raise ProofBundleError(f"{info.filename}: is compressed or larger than the bundle")
            return {info.filename: opened.read(info) for info in members}
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, ValueError, EOFError, OSError) as error:
        raise ProofBundleError(f"unreadable zip file ({type(error).__name__})") from None


def _parse_model(kind: type[Model], name: str, content: bytes) -> Model:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        field, reason = first_error(error)
        raise ProofBundleError(f"{name}: {field + ': ' if field else ''}{reason}") from None
