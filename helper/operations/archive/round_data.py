"""Content of the archive's objects that an audit of a round reads: blocks, documents and results of audits. Pure."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, Final, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from helper.chain.block_reader import HistoryBlock
from helper.chain.json_fields import limit_stored_values
from helper.errors import InvalidResponse, ProofBundleError

Model = TypeVar("Model", bound=BaseModel)

MAX_DOCUMENTS_BYTES: Final = 1 << 28
"""Maximum bytes of a round's documents. A leaf takes 47 bytes, so this allows for 5 million."""
PIECE_BYTES: Final = 8 << 20
"""Maximum bytes of a piece of the compressed documents. A bucket does not read objects of more than 16 MiB."""
BLOCKS_BYTES: Final = 4 << 20
"""Bytes after which the blocks of a part continue in another object. A single block can take 7 MB."""

_ADVICE: Final = "Audit the nodes instead, without --archive."
_Hex32 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Height = Annotated[int, Field(ge=1, le=2**62)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, defer_build=True)


class ArchivedReveal(_StrictModel):
    """A counted reveal in a block: its round, and the hash of the transaction (upper-case hex) in its bundle's name."""

    round: _Hex32
    transaction: Annotated[str, Field(pattern="^[0-9A-F]{64}$")]


class ArchivedTx(_StrictModel):
    """Another transaction that succeeded: its bytes in base64, and its code, None if it is not known."""

    tx: str
    code: Literal[0] | None

    @property
    def raw(self) -> bytes:
        """The bytes.

        Raises:
            ProofBundleError: they are not in base64.
        """
        try:
            return b64decode(self.tx, validate=True)
        except ValueError:
            raise ProofBundleError("the archive has a transaction that is not in base64") from None


class ArchivedBlock(_StrictModel):
    """The voting transactions of a block. `time` is in Unix seconds."""

    height: _Height
    time: float
    reveals: list[ArchivedReveal]
    others: list[ArchivedTx]


class RoundManifest(_StrictModel):
    """Describes the archived documents of a finished round.

    Attributes:
        format: identifies the file format.
        chain_id: the chain.
        round: the round id (hex).
        height: the archive is complete up to this block, which is after the round's tally.
        pieces: number of objects with the documents.
        sha256: hash of the documents (hex).
        missing: why a document is missing, by name.
    """

    format: Literal["svote-helper archive round 2"] = "svote-helper archive round 2"
    chain_id: Annotated[str, Field(min_length=1, max_length=128)]
    round: _Hex32
    height: _Height
    pieces: Annotated[int, Field(ge=1, le=9999)]
    sha256: _Hex32
    missing: dict[str, str]


class StoredCheck(_StrictModel):
    """The result of one check."""

    id: str
    verdict: Literal["passed", "failed", "not_checked"]
    why: str
    count: int


class StoredAudit(_StrictModel):
    """The result of the audit of a finished round. `at` is its time in Unix seconds."""

    format: Literal["svote-helper archive audit 1"] = "svote-helper archive audit 1"
    round: _Hex32
    at: int
    verdict: Literal["passed", "failed", "not_checked"]
    checks: list[StoredCheck]


def encode_block(block: HistoryBlock) -> bytes:
    """Encode a block as one line of JSON."""
    archived = ArchivedBlock(
        height=block.height,
        time=block.time,
        reveals=[
            ArchivedReveal(round=reveal.message.round_id.hex(), transaction=sha256(reveal.raw).hexdigest().upper())
            for reveal in block.reveals
        ],
        others=[ArchivedTx(tx=b64encode(raw).decode(), code=0 if known else None) for raw, known in block.others],
    )
    return archived.model_dump_json().encode() + b"\n"


def group_blocks(lines: Sequence[tuple[int, bytes]]) -> list[tuple[range, bytes]]:
    """Distribute encoded blocks, by height, to objects of limited size. Returns the heights and content of each."""
    groups: list[tuple[range, bytes]] = []
    first, content = 0, bytearray()
    for height, line in lines:
        if not content:
            first = height
        content += line
        if len(content) >= BLOCKS_BYTES or height == lines[-1][0]:
            groups.append((range(first, height + 1), bytes(content)))
            content.clear()
    return groups


def parse_blocks(content: bytes) -> Iterable[ArchivedBlock]:
    """Parse encoded blocks.

    Raises:
        ProofBundleError: a line is invalid.
    """
    for line in content.splitlines():
        yield parse_object(ArchivedBlock, line)


def pack_documents(documents: Mapping[str, bytes]) -> tuple[str, list[bytes]]:
    """Return the SHA-256 (hex) of documents, and the pieces with their compressed content.

    Args:
        documents: the JSON of each document.

    Raises:
        InvalidResponse: they have too many values, so `unpack_documents` would refuse them.
    """
    fragments = {name: orjson.Fragment(document) for name, document in documents.items()}
    content = orjson.dumps(fragments, option=orjson.OPT_SORT_KEYS)
    limit_stored_values(content, "documents")
    packed = zlib.compress(content, 6)
    pieces = [packed[at : at + PIECE_BYTES] for at in range(0, len(packed), PIECE_BYTES)]
    return sha256(content).hexdigest(), pieces


def unpack_documents(pieces: Sequence[bytes], digest: str) -> dict[str, Any]:
    """Return the documents in pieces.

    Raises:
        ProofBundleError: they were altered, or are too large.
    """
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(b"".join(pieces), MAX_DOCUMENTS_BYTES)
    except zlib.error:
        raise ProofBundleError("the archive's documents of the round are not readable", advice=_ADVICE) from None
    if not unpacker.eof or sha256(content).hexdigest() != digest:
        raise ProofBundleError("the archive's documents of the round do not match their hash", advice=_ADVICE)
    try:
        limit_stored_values(content, "documents")
        documents: Any = orjson.loads(content)
    except (InvalidResponse, orjson.JSONDecodeError):
        documents = None
    if not isinstance(documents, dict):
        raise ProofBundleError("the archive's documents of the round are not readable", advice=_ADVICE)
    return documents


def parse_object(model: type[Model], content: bytes) -> Model:
    """Parse an object of the archive.

    Raises:
        ProofBundleError: it is invalid.
    """
    try:
        return model.model_validate_json(content)
    except ValidationError:
        raise ProofBundleError(f"the archive has an invalid object ({model.__name__})", advice=_ADVICE) from None
