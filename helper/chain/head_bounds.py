"""Decides whether the height that a node reports is plausible. Pure.

The reported height is not signed, so a single wrong response could move the block follower far ahead of the chain. A
height is accepted if another node reports nearly the same, or if the chain can have made that many blocks since an
accepted height.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from helper.chain.models import BlockHead

MIN_BLOCK_SECONDS: Final = 0.1
"""Minimum mean block interval of any supported chain, in seconds."""
SLACK_BLOCKS: Final = 100
"""Blocks by which two heads may differ regardless of their times."""
_EARLIEST_CHAIN: Final = 1_546_300_800.0
"""Unix time (2019) before which no supported chain started; the bound if nothing else is known."""


def can_share_chain(first: BlockHead, second: BlockHead) -> bool:
    """Whether two heads can belong to the same chain, given the difference of their times."""
    return abs(first.height - second.height) <= SLACK_BLOCKS + abs(first.time - second.time) / MIN_BLOCK_SECONDS


class HeadBounds:
    """Checks the heads of all nodes against each other and the newest accepted head.

    Args:
        nodes: number of configured nodes.

    Attributes:
        stored_cursor: the stored cursor at start, 0 without one. A node below it does not make others implausible.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._anchor: BlockHead | None = None
        self._is_agreed = False
        self.stored_cursor = 0

    def update(self, heads: Mapping[str, BlockHead]) -> None:
        """Update the bounds with the newest heads of nodes without other problems, by node."""
        values = [head for head in heads.values() if self._is_possible(head)]
        agreed = [a for i, a in enumerate(values) for j, b in enumerate(values) if i != j and can_share_chain(a, b)]
        if agreed:
            # Only agreement moves the anchor: a lone node could move it ahead step by step.
            newest = max(agreed, key=lambda head: head.height)
            self._anchor = min((head for head in agreed if can_share_chain(head, newest)), key=lambda head: head.height)
            self._is_agreed = True
        elif self._nodes == 1:
            reachable = [head for head in values if self._is_reachable(head)]
            self._anchor = max([*reachable, *filter(None, [self._anchor])], key=lambda h: h.height, default=None)
        elif not self._is_agreed and values:
            # Without agreement the lowest is accepted: a cursor that is too low is moved later, so nothing is lost.
            candidates = [*values, *filter(None, [self._anchor])]
            self._anchor = min(self._above_floor(candidates), key=lambda head: head.height)

    def implausible_reason(self, name: str, head: BlockHead, heads: Mapping[str, BlockHead]) -> str | None:
        """Why a node's head is implausible, None if it is plausible. `heads` as in `update`."""
        if self._is_possible(head):
            others = [other for node, other in heads.items() if node != name]
            if self._is_reachable(head) or any(can_share_chain(head, other) for other in others):
                return None
        known = f"known height is {self._anchor.height}" if self._anchor is not None else "the chain cannot be that old"
        return f"height {head.height} is implausible: {known}"

    def _above_floor(self, heads: Collection[BlockHead]) -> Collection[BlockHead]:
        return [head for head in heads if head.height >= self.stored_cursor - SLACK_BLOCKS] or heads

    def _is_possible(self, head: BlockHead) -> bool:
        """Whether a supported chain can have this many blocks at the block's time."""
        return head.height <= max(0.0, head.time - _EARLIEST_CHAIN) / MIN_BLOCK_SECONDS + SLACK_BLOCKS

    def _is_reachable(self, head: BlockHead) -> bool:
        """Whether the chain can have reached this head since the newest accepted head."""
        anchor = self._anchor
        return anchor is None or head.height <= anchor.height or can_share_chain(head, anchor)
