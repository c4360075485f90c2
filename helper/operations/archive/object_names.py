"""Names of the archive's objects, and the content of index and progress. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from helper.errors import ProofBundleError

PART_BLOCKS: Final = 100
"""Blocks per index part."""
MANIFESTS: Final = "rounds"
"""Directory of the manifests of finished rounds."""
AUDITS: Final = "audits"
"""Directory of the results of audits."""
_ROUND_DIRECTORY: Final = re.compile(r"[0-9a-f]{64}")
_ROUND_OBJECT: Final = re.compile(r"(?:rounds|audits)/([0-9a-f]{64})\.json")
_BLOCKS_OBJECT: Final = re.compile(r"[0-9]{12,19}-[0-9]{12,19}\.jsonl")
_Hex32 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, defer_build=True)


class IndexEntry(_StrictModel):
    """One confirmed reveal in an index.

    Attributes:
        height: height of its block.
        transaction: the transaction's hash, upper-case hex.
        nullifier: the share's nullifier (hex).
        sha256: hash of the bundle (hex).
    """

    height: Annotated[int, Field(ge=1, le=2**62)]
    transaction: Annotated[str, Field(pattern="^[0-9A-F]{64}$")]
    nullifier: _Hex32
    sha256: _Hex32


class Progress(_StrictModel):
    """Progress of the archive of a chain.

    Attributes:
        format: identifies the format of the archive.
        chain_id: the chain.
        next_part: the first part that is not archived.
    """

    format: Literal["svote-helper archive progress 2"] = "svote-helper archive progress 2"
    chain_id: Annotated[str, Field(min_length=1, max_length=128)]
    next_part: Annotated[int, Field(ge=0, le=2**60)]

    def to_bytes(self) -> bytes:
        """Encode the progress object."""
        return self.model_dump_json().encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> Progress:
        """Decode a progress object.

        Raises:
            ProofBundleError: the content is invalid.
        """
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            raise ProofBundleError("the archive's progress object is invalid") from None


def part_heights(part: int) -> range:
    """The block heights of a part. Heights start at 1."""
    return range(max(1, part * PART_BLOCKS), (part + 1) * PART_BLOCKS)


def part_of_height(height: int) -> int:
    """The part that contains this block."""
    return height // PART_BLOCKS


def bundle_name(round_id: bytes, transaction: str) -> str:
    """Object name of a bundle.

    Args:
        round_id: 32 bytes.
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
    return b"".join(entry.model_dump_json().encode() + b"\n" for entry in ordered)


def parse_index(index: bytes) -> list[IndexEntry]:
    """Parse an index part.

    Raises:
        ProofBundleError: a line is invalid.
    """
    try:
        return [IndexEntry.model_validate_json(line) for line in index.splitlines()]
    except ValidationError:
        raise ProofBundleError("the archive's index has an invalid line") from None


def find_entry(index: bytes, nullifier: bytes) -> IndexEntry | None:
    """Find the reveal of a nullifier in an index part; None without a match.

    Raises:
        ProofBundleError: the line with the nullifier is invalid.
    """
    nullifier_hex = nullifier.hex().encode()
    for line in index.splitlines():
        if nullifier_hex not in line:
            continue
        try:
            entry = IndexEntry.model_validate_json(line)
        except ValidationError:
            raise ProofBundleError("the archive's index has an invalid line") from None
        if entry.nullifier == nullifier.hex():
            return entry
    return None
