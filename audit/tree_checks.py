"""Rebuilds the commitment tree of a round and compares it with transactions and published roots (D1, D2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from audit.verdicts import Findings
from helper.chain.models import LeafBlock
from proofs import CommitmentTree, ProofsError


class TreeChecks:
    """The tree of the published leaves.

    Args:
        blocks: the published leaves, by block.
        findings: findings of all checks by id.

    Attributes:
        roots: the recomputed root of each height that appended leaves.
    """

    def __init__(self, blocks: Sequence[LeafBlock], findings: Mapping[str, Findings]) -> None:
        self._leaves: dict[int, bytes] = {}
        self._findings = findings
        self.roots: dict[int, bytes] = {}
        tree = CommitmentTree()
        last_height = 0
        for block in blocks:
            if block.height <= last_height or block.start_index != len(tree):
                findings["D1"].add_problem(f"published leaves of block {block.height} are out of order")
                return
            try:
                tree.append(block.leaves)
            except ProofsError as error:
                findings["D1"].add_problem(f"published leaves of block {block.height}: {error}")
                return
            last_height = block.height
            if not block.leaves:  # the chain has no root for such a block
                continue
            self._leaves[block.height] = block.leaves
            self.roots[block.height] = tree.root()

    def check_roots(self, published: Mapping[int, bytes]) -> None:
        """Compare the published roots with the recomputed ones (D2)."""
        findings = self._findings["D2"]
        for height in sorted(self.roots.keys() | published.keys()):
            findings.count += 1
            if height not in published:
                findings.add_problem(f"no root is published for block {height}, which appended leaves")
            elif published[height] != self.roots.get(height):
                findings.add_problem(f"the root published for block {height} does not match the leaves")

    def check_block(self, height: int, derived: bytes) -> None:
        """Compare the leaves that a block's transactions append with the published ones (D1)."""
        published = self._leaves.pop(height, b"")
        self._findings["D1"].count += len(published) // 32
        if derived != published:
            self._findings["D1"].add_problem(
                f"block {height}: its transactions append {len(derived) // 32} leaves, "
                f"{len(published) // 32} are published, and they differ"
            )

    def skip_block(self, height: int) -> None:
        """Ignore the leaves of a block whose transactions have an unknown encoding."""
        self._leaves.pop(height, None)

    def check_rest(self, heights: range) -> None:
        """Report leaves of blocks that do not belong to the vote (D1).

        Args:
            heights: the blocks that do, or that could not be read.
        """
        for height in sorted(height for height in self._leaves if height not in heights):
            self._findings["D1"].add_problem(f"leaves are published for block {height}, outside the vote")
