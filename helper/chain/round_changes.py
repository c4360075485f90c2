"""Counts which nodes report a change of a round, until enough of them agree. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

CONFIRMING_NODES: Final = 2
"""Nodes that must report the same change where at least as many are configured."""
CONFIRMING_BLOCKS: Final = 10
"""Blocks for which the only configured node must report the same change."""


@dataclass(frozen=True, slots=True)
class _Report:
    """The value that a node reports, and the node's height when it first did."""

    value: int
    since_height: int


class ReportedChanges:
    """Changes of one kind, such as another end, by round and node. Kept in memory: a restart begins anew."""

    def __init__(self) -> None:
        self._reports: dict[bytes, dict[str, _Report]] = {}

    def note(self, round_id: bytes, node: str, value: int, height: int) -> None:
        """Note that a node at a height reports this value."""
        reports = self._reports.setdefault(round_id, {})
        known = reports.get(node)
        if known is None or known.value != value:
            reports[node] = _Report(value, height)

    def retract(self, round_id: bytes, node: str) -> None:
        """Note that a node reports no change of this round (any more)."""
        self._reports.get(round_id, {}).pop(node, None)

    def forget(self, round_id: bytes) -> None:
        """Drop all reports about a round."""
        self._reports.pop(round_id, None)

    def confirmed(self, round_id: bytes, heights: Mapping[str, int]) -> int | None:
        """The value that enough nodes report, None while too few do or while they report several.

        Args:
            round_id: the round.
            heights: the present height of every configured node, by name.
        """
        reports = {node: report for node, report in self._reports.get(round_id, {}).items() if node in heights}
        if len(heights) < CONFIRMING_NODES:
            lasting = [r.value for node, r in reports.items() if heights[node] >= r.since_height + CONFIRMING_BLOCKS]
            return lasting[0] if lasting else None
        agreed = [v for v, count in Counter(r.value for r in reports.values()).items() if count >= CONFIRMING_NODES]
        return agreed[0] if len(agreed) == 1 else None
