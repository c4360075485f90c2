"""Interface of the data of a round: documents, and blocks with the round's transactions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final, Protocol

from helper.errors import AuditError

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
    """A block with the transactions that may concern the round. `time` is in Unix seconds."""

    height: int
    time: float
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
