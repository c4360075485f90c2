"""What the archive's objects are called, and what its indices say. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from helper.errors import ProofBundleError

PART: Final = 100
"""Blocks a part of an index."""
_ROUND: Final = re.compile(r"[0-9a-f]{64}")
_Hex32 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Entry(_Strict):
    """One counted reveal in an index.

    Attributes:
        height: its block.
        transaction: the transaction's hash, as chains write it.
        nullifier: which counted by it (hex).
        sha256: the bundle's hash (hex).
    """

    height: Annotated[int, Field(ge=1, le=2**62)]
    transaction: Annotated[str, Field(pattern="^[0-9A-F]{64}$")]
    nullifier: _Hex32
    sha256: _Hex32


class Progress(_Strict):
    """Up to where a chain's blocks are in the archive.

    Attributes:
        format: what it is, for who finds it.
        chain_id: the chain.
        next_part: the first part that is not in it.
    """

    format: Literal["svote-helper archive progress 1"] = "svote-helper archive progress 1"
    chain_id: Annotated[str, Field(min_length=1, max_length=128)]
    next_part: Annotated[int, Field(ge=0, le=2**60)]

    def to_bytes(self) -> bytes:
        """The object's content."""
        return self.model_dump_json().encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> Progress:
        """What an object says.

        Raises:
            EvidenceError: it is none.
        """
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            raise ProofBundleError("the archive's progress is not written as it is") from None


def heights_of(part: int) -> range:
    """The blocks of a part; there is no block 0."""
    return range(max(1, part * PART), (part + 1) * PART)


def part_of(height: int) -> int:
    """The part that has this block."""
    return height // PART


def bundle_name(round_id: bytes, transaction: str) -> str:
    """Where a bundle is.

    Args:
        round_id: 32 bytes.
        transaction: the transaction's hash, as chains write it.
    """
    return f"{round_id.hex()}/{transaction}.zip"


def index_folder(round_id: bytes) -> str:
    """Where a round's indices are."""
    return f"{round_id.hex()}/index"


def index_name(round_id: bytes, part: int) -> str:
    """Where a part of a round's index is; names sort as the blocks do."""
    heights = heights_of(part)
    return f"{index_folder(round_id)}/{heights[0]:012d}-{heights[-1]:012d}.jsonl"


def progress_name(chain_id: str) -> str:
    """Where a chain's progress is: the id as far as it can stand in a name, and its hash, as it may not."""
    plain = re.sub(r"[^A-Za-z0-9.-]", "_", chain_id)[:64]
    return f"progress/{plain}-{sha256(chain_id.encode()).hexdigest()[:8]}.json"


def round_of(folder: str) -> bytes | None:
    """The round whose folder this is, None for another folder."""
    return bytes.fromhex(folder) if _ROUND.fullmatch(folder) else None


def write_index(entries: Iterable[Entry]) -> bytes:
    """A part of an index: a line each, by height and transaction, so that the same reveals make the same bytes."""
    ordered = sorted(entries, key=lambda entry: (entry.height, entry.transaction))
    return b"".join(entry.model_dump_json().encode() + b"\n" for entry in ordered)


def find_entry(index: bytes, nullifier: bytes) -> Entry | None:
    """The reveal that made a nullifier count, None when it is not in this part.

    Raises:
        EvidenceError: the line that names it is not written as lines are.
    """
    wanted = nullifier.hex().encode()
    for line in index.splitlines():
        if wanted not in line:
            continue
        try:
            entry = Entry.model_validate_json(line)
        except ValidationError:
            raise ProofBundleError("a line of the archive's index is not written as lines are") from None
        if entry.nullifier == nullifier.hex():
            return entry
    return None
