"""Interface of the data of a round: documents, and blocks with the round's transactions."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from helper.chain.json_fields import Fields
from helper.errors import AuditError

MAX_LINE_BYTES: Final = 1 << 24
"""Maximum bytes of an encoded block. Chains limit a block to 5 MiB, which base64 makes 7 MiB."""

ROUND: Final = "round"
LEAVES: Final = "leaves"
ROOTS: Final = "roots"
RESULTS: Final = "results"
SUMMARY: Final = "summary"
PARTIALS: Final = "partials"
HEADS: Final = "heads"


def tally_document(proposal_id: int) -> str:
    """Return the name of the document with a proposal's sums."""
    return f"tally/{proposal_id}"


def heads_document(height: int) -> str:
    """Return the name of the document with what nodes report about a block."""
    return f"{HEADS}/{height}"


def parse_heads_name(name: str) -> int | None:
    """The height in the name of such a document, None if it is another document."""
    prefix, _, height = name.partition("/")
    return int(height) if prefix == HEADS else None


class DataMissing(AuditError):
    """A source does not have a document or a block. The message has the reason."""


@dataclass(frozen=True, slots=True)
class AuditTx:
    """A transaction in a block.

    Attributes:
        code: 0 if it succeeded; None if the result is not known.
    """

    raw: bytes
    code: int | None


@dataclass(frozen=True, slots=True)
class AuditBlock:
    """A block with the transactions that may concern the round. `time` is in Unix seconds, None if not known."""

    height: int
    time: float | None
    txs: tuple[AuditTx, ...]


class AuditSource(Protocol):
    """Where the data of a round comes from: nodes or an evidence file.

    Attributes:
        has_all_blocks: whether `blocks` returns all blocks with all transactions; if not, only those of reveals.
    """

    @property
    def has_all_blocks(self) -> bool: ...  # noqa: D102 - documented above

    async def document(self, name: str) -> object:
        """Return a document as JSON.

        Raises:
            DataMissing: the source does not have it.
        """

    def blocks(self, first: int) -> AsyncGenerator[AuditBlock]:
        """Iterate over the blocks from a height on, in order.

        Raises:
            DataMissing: a block is not available.
        """


def encode_document(document: object) -> bytes:
    """Encode a document as JSON.

    Raises:
        DataMissing: it cannot be stored, because its values are nested too deeply.
    """
    try:
        return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        raise DataMissing("its values are nested too deeply") from None


def encode_block(block: AuditBlock) -> bytes:
    """Encode a block as one line of JSON."""
    txs = [{"tx": b64encode(tx.raw).decode(), "code": tx.code} for tx in block.txs]
    return orjson.dumps({"height": block.height, "time": block.time, "txs": txs}) + b"\n"


def decode_block(line: bytes) -> AuditBlock:
    """Decode what `encode_block` encodes.

    Raises:
        ValueError: the line is not JSON.
        InvalidResponse: it is not a block.
    """
    value: Any = orjson.loads(line)
    fields = Fields(value, "block")
    time = value.get("time")
    if not isinstance(time, int | float | None):
        raise fields.invalid_field("time", "expected a number")
    txs = tuple(
        AuditTx(tx.decode("tx", tx.value("tx"), None), tx.uint("code", maximum=2**32) if tx.has("code") else None)
        for tx in fields.children("txs")
    )
    return AuditBlock(fields.uint("height", maximum=2**62), None if time is None else float(time), txs)
