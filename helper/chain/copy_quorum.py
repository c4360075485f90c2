"""Records on which blocks the nodes do not agree.

A share that is erased by mistake is lost, while one that is confirmed late is resent without harm. So a block counts
once enough nodes report the same reveals in it, also if it is empty (`helper.chain.agreement`). It waits for them
without limit.
"""

from __future__ import annotations

import structlog

from helper.errors import ChainError, ChainResponseError, ChainUnavailable

log = structlog.get_logger("helper.chain")


class BlockNotAgreedError(ChainError):
    """Too few nodes report the same reveals in a block yet."""


class BlockDisputedError(BlockNotAgreedError, ChainResponseError):
    """Nodes report different reveals in a block."""


class SecondCopyMissingError(BlockNotAgreedError, ChainUnavailable):
    """No second node has reported the block yet."""


class Disputes:
    """The disputed blocks; each is logged once.

    Attributes:
        heights: heights at which nodes report different reveals.
    """

    def __init__(self) -> None:
        self.heights: set[int] = set()

    def note_agreement(self, height: int) -> None:
        """Record that nodes agree on a block."""
        if height in self.heights:
            log.info("block_dispute_resolved", height=height)
            self.heights.discard(height)

    def note_dispute(self, height: int, names: str) -> None:
        """Record that nodes report different reveals in a block."""
        if height not in self.heights:
            log.error(
                "block_disputed",
                height=height,
                endpoint=names,
                reason="these nodes report different reveals in this block; none of its shares is confirmed",
                advice="Find out which node is wrong and remove it from [chain] endpoints.",
            )
        self.heights.add(height)

    def forget_heights(self, height: int) -> None:
        """Forget the heights up to this one: their blocks are not read any more."""
        self.heights = {disputed for disputed in self.heights if disputed > height}
