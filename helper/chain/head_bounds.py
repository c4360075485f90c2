"""Bounds on the height that a node may show as its newest block. Pure.

A block's height is not signed where it is read, so a single wrong answer could move everything that follows the chain
far ahead of it. A height is believed if another node shows nearly the same, or if the chain can have made that many
blocks since a height that was believed before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from helper.chain.models import BlockHead

MIN_BLOCK_SECONDS: Final = 0.1
"""Shortest mean time between two blocks of any chain that is followed."""
SLACK_BLOCKS: Final = 100
"""Blocks by which two heads may differ whatever their times are."""
_EARLIEST_CHAIN: Final = 1_546_300_800.0
"""Unix time (2019) before which no chain that is followed began: the bound where nothing else is known."""


def max_distance(first: BlockHead, second: BlockHead) -> float:
    """The number of blocks by which two heads of one chain can differ, by their times."""
    return SLACK_BLOCKS + abs(first.time - second.time) / MIN_BLOCK_SECONDS


def are_near(first: BlockHead, second: BlockHead) -> bool:
    """Whether two heads can be of the same chain."""
    return abs(first.height - second.height) <= max_distance(first, second)


class HeadBounds:
    """Judges heads of several nodes by each other and by the newest head that was believed.

    Args:
        nodes: number of configured nodes.

    Attributes:
        floor: the height that was reached before the start, 0 if none. A node below it does not make the others
            implausible.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._anchor: BlockHead | None = None
        self._is_agreed = False
        self.floor = 0

    def update(self, heads: Mapping[str, BlockHead]) -> None:
        """Take in the newest heads of the nodes that are otherwise well, by node."""
        values = [head for head in heads.values() if self._is_possible(head)]
        agreed = [a for i, a in enumerate(values) for j, b in enumerate(values) if i != j and are_near(a, b)]
        if agreed:
            # Only agreement moves the anchor: a lone node could move it ahead step by step.
            newest = max(agreed, key=lambda head: head.height)
            self._anchor = min((head for head in agreed if are_near(head, newest)), key=lambda head: head.height)
            self._is_agreed = True
        elif self._nodes == 1:
            reachable = [head for head in values if self._is_reachable(head)]
            self._anchor = max([*reachable, *filter(None, [self._anchor])], key=lambda h: h.height, default=None)
        elif not self._is_agreed and values:
            # Without agreement the lowest is believed, as nothing is lost by it; a cursor too low is moved on later.
            seen = [*values, *filter(None, [self._anchor])]
            self._anchor = min(self._above_floor(seen), key=lambda head: head.height)

    def problem(self, name: str, head: BlockHead, heads: Mapping[str, BlockHead]) -> str | None:
        """Why a node's head cannot be right, None if it can; `heads` as in `update`."""
        if self._is_possible(head):
            others = [other for node, other in heads.items() if node != name]
            if self._is_reachable(head) or any(are_near(head, other) for other in others):
                return None
        known = f"{self._anchor.height} is known" if self._anchor is not None else "no chain is that old"
        return f"its height {head.height} is implausible: {known}"

    def _above_floor(self, heads: Collection[BlockHead]) -> Collection[BlockHead]:
        return [head for head in heads if head.height >= self.floor - SLACK_BLOCKS] or heads

    def _is_possible(self, head: BlockHead) -> bool:
        """Whether any chain can have so many blocks by the block's own time."""
        return head.height <= max(0.0, head.time - _EARLIEST_CHAIN) / MIN_BLOCK_SECONDS + SLACK_BLOCKS

    def _is_reachable(self, head: BlockHead) -> bool:
        """Whether the chain can have got to this head since the newest head that was believed."""
        anchor = self._anchor
        return anchor is None or head.height <= anchor.height or are_near(head, anchor)
