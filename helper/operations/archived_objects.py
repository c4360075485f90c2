"""Objects of the archive in an object store: proof bundles, and the data for audits. Pure.

The archive contains all confirmed reveals of the chain, so that it does not show which of them this helper sent.

    ROUND/TRANSACTION.zip           a proof bundle, by round id and transaction hash
    ROUND/index/FIRST-LAST.jsonl    reveals in these blocks: height, transaction, nullifier, hash of the bundle
    blocks/CHAIN/FIRST-LAST.jsonl   all these blocks: time, hashes of the reveals, other voting transactions
    progress/CHAIN.json             the first part of the chain that is not archived
    ROUND/documents/NUMBER.zlib     nodes' data about a finished round, in pieces
    rounds/ROUND.json               manifest of these documents
    audits/ROUND.json               result of the audit of a finished round

Blocks and an index part are written after their bundles, and the progress after all index parts. A manifest is written
after its pieces.
"""

from __future__ import annotations

import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, Final, Literal, TypeVar

import orjson
from pydantic import BaseModel, Field, ValidationError

from helper.chain.block_reader import HistoryBlock
from helper.chain.chain_data import Round
from helper.chain.json_fields import limit_stored_values
from helper.errors import InvalidResponse, ProofBundleError
from helper.operations.proof_bundle import ChainId, Height, Hex32, StrictModel, TxHash

PART_BLOCKS: Final = 100
"""Blocks per index part."""
MANIFESTS: Final = "rounds"
"""Directory of the manifests of finished rounds."""
AUDITS: Final = "audits"
"""Directory of the results of audits."""
_ROUND_DIRECTORY: Final = re.compile(r"[0-9a-f]{64}")
_ROUND_OBJECT: Final = re.compile(r"(?:rounds|audits)/([0-9a-f]{64})\.json")
_BLOCKS_OBJECT: Final = re.compile(r"[0-9]{12,19}-[0-9]{12,19}\.jsonl")


class _StoredModel(StrictModel):
    def to_line(self) -> bytes:
        """Encode as one line of JSON."""
        return self.model_dump_json().encode() + b"\n"


class IndexEntry(_StoredModel):
    """One confirmed reveal in an index."""

    height: Height
    transaction: TxHash
    nullifier: Hex32
    sha256: Hex32


class Progress(_StoredModel):
    """Progress of the archive of a chain.

    Attributes:
        next_part: the first part that is not archived.
    """

    format: Literal["svote-helper archive progress 2"] = "svote-helper archive progress 2"
    chain_id: ChainId
    next_part: Annotated[int, Field(ge=0, le=2**60)]


def part_heights(part: int) -> range:
    """The block heights of a part. Heights start at 1."""
    return range(max(1, part * PART_BLOCKS), (part + 1) * PART_BLOCKS)


def part_of_height(height: int) -> int:
    """The part that contains this block."""
    return height // PART_BLOCKS


def bundle_name(round_id: bytes, transaction: str) -> str:
    """Object name of a bundle.

    Args:
        transaction: the transaction's hash, upper-case hex.
    """
    return f"{round_id.hex()}/{transaction}.zip"


def index_directory(round_id: bytes) -> str:
    """Directory of a round's index parts."""
    return f"{round_id.hex()}/index"


def index_name(round_id: bytes, part: int) -> str:
    """Object name of an index part. Names sort by height."""
    heights = part_heights(part)
    return f"{index_directory(round_id)}/{heights[0]:012d}-{heights[-1]:012d}.jsonl"


def progress_name(chain_id: str) -> str:
    """Object name of a chain's progress."""
    return f"progress/{_chain_name(chain_id)}.json"


def blocks_directory(chain_id: str) -> str:
    """Directory of a chain's blocks."""
    return f"blocks/{_chain_name(chain_id)}"


def blocks_name(chain_id: str, heights: range) -> str:
    """Object name of some blocks. Names sort by height."""
    return f"{blocks_directory(chain_id)}/{heights[0]:012d}-{heights[-1]:012d}.jsonl"


def parse_blocks_name(name: str) -> range | None:
    """The heights in the name of an object of blocks, None for any other object."""
    file_name = name.rpartition("/")[2]
    if not _BLOCKS_OBJECT.fullmatch(file_name):
        return None
    first, _, last = file_name.removesuffix(".jsonl").partition("-")
    return range(int(first), int(last) + 1)


def _chain_name(chain_id: str) -> str:
    """Sanitized chain id and, to keep it unique, hash of the id."""
    plain = re.sub(r"[^A-Za-z0-9.-]", "_", chain_id)[:64]
    return f"{plain}-{sha256(chain_id.encode()).hexdigest()[:8]}"


def manifest_name(round_id: bytes) -> str:
    """Object name of a finished round's manifest."""
    return f"{MANIFESTS}/{round_id.hex()}.json"


def documents_name(round_id: bytes, number: int) -> str:
    """Object name of a piece of a finished round's documents."""
    return f"{round_id.hex()}/documents/{number:04d}.zlib"


def audit_name(round_id: bytes) -> str:
    """Object name of the result of a round's audit."""
    return f"{AUDITS}/{round_id.hex()}.json"


def parse_round_object(name: str) -> bytes | None:
    """The round id in the name of a manifest or audit, None for any other object."""
    match = _ROUND_OBJECT.fullmatch(name)
    return bytes.fromhex(match[1]) if match else None


def parse_round_directory(directory: str) -> bytes | None:
    """The round id of a round's directory, None for any other directory."""
    return bytes.fromhex(directory) if _ROUND_DIRECTORY.fullmatch(directory) else None


def encode_index(entries: Iterable[IndexEntry]) -> bytes:
    """Encode an index part as JSON lines. Sorted by height and transaction, so the encoding is deterministic."""
    ordered = sorted(entries, key=lambda entry: (entry.height, entry.transaction))
    return b"".join(entry.to_line() for entry in ordered)


Model = TypeVar("Model", bound=BaseModel)

MAX_DOCUMENTS_BYTES: Final = 1 << 28
"""Maximum bytes of a round's documents. A leaf takes 47 bytes, so this allows for 5 million."""
PIECE_BYTES: Final = 8 << 20
"""Maximum bytes of a piece of the compressed documents. A bucket does not read objects of more than 16 MiB."""
BLOCKS_BYTES: Final = 4 << 20
"""Bytes after which the blocks of a part continue in another object. A single block can take 7 MB."""

_ADVICE: Final = "Use the nodes instead: `audit` without --archive, `proof export` with --from chain."


class ArchivedReveal(_StoredModel):
    """A counted reveal in a block: its round, and the hash of the transaction (upper-case hex) in its bundle's name."""

    round: Hex32
    transaction: TxHash


class ArchivedTx(_StoredModel):
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


class ArchivedBlock(_StoredModel):
    """The voting transactions of a block. `time` is in Unix seconds."""

    height: Height
    time: float
    reveals: list[ArchivedReveal]
    others: list[ArchivedTx]


class RoundManifest(_StoredModel):
    """Describes the archived documents of a finished round.

    Attributes:
        height: the archive is complete up to this block, which is after the round's tally.
        pieces: number of objects with the documents.
        sha256: hash of the documents (hex).
        missing: why a document is missing, by name.
    """

    format: Literal["svote-helper archive round 2"] = "svote-helper archive round 2"
    chain_id: ChainId
    round: Hex32
    height: Height
    pieces: Annotated[int, Field(ge=1, le=9999)]
    sha256: Hex32
    missing: dict[str, str]


class StoredCheck(_StoredModel):
    """The result of one check."""

    id: str
    verdict: Literal["passed", "failed", "not_checked"]
    why: str
    count: int


class StoredAudit(_StoredModel):
    """The result of the audit of a finished round.

    Attributes:
        at: its time in Unix seconds.
        result: `digest_result` of what was audited; None if the round's document has it in no known form.
    """

    format: Literal["svote-helper archive audit 1"] = "svote-helper archive audit 1"
    round: Hex32
    at: int
    verdict: Literal["passed", "failed", "not_checked"]
    checks: list[StoredCheck]
    result: Hex32 | None = None


def digest_result(known: Round, totals: Mapping[tuple[int, int], int]) -> str:
    """Return the SHA-256 (hex) of what is shown of a finished round: titles, labels and totals, 0 if missing."""
    shown = [
        [
            proposal.id,
            proposal.title,
            [
                [option, label, totals.get((proposal.id, option), 0)]
                for option, label in zip(proposal.options, proposal.labels, strict=True)
            ],
        ]
        for proposal in known.proposals
    ]
    return sha256(orjson.dumps(shown)).hexdigest()


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
    return archived.to_line()


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


def pack_documents(documents: Mapping[str, bytes]) -> tuple[str, list[bytes]]:
    """Return the SHA-256 (hex) of documents, and the pieces with their compressed content.

    Raises:
        InvalidResponse: they are too long or have too many values, so `unpack_documents` would refuse them.
    """
    fragments = {name: orjson.Fragment(document) for name, document in documents.items()}
    content = orjson.dumps(fragments, option=orjson.OPT_SORT_KEYS)
    if len(content) > MAX_DOCUMENTS_BYTES:
        raise InvalidResponse(f"the documents of the round have more than {MAX_DOCUMENTS_BYTES} bytes")
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


def parse_lines(model: type[Model], content: bytes, *, containing: bytes = b"") -> Iterator[Model]:
    """Parse lines of JSON, of which each is an object, or those that contain a text.

    Raises:
        ProofBundleError: a line is invalid.
    """
    return (parse_object(model, line) for line in content.splitlines() if containing in line)
