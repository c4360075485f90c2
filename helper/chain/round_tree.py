"""The commitment tree of one round: verification, growth, loading and storing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import structlog

from helper.chain.absence_proof import Observation
from helper.chain.models import LeafBlock, Round, TreeState
from helper.errors import ChainResponseError, LeavesMissing
from helper.store.store import Store
from proofs import SUBTREE_LEAVES, CommitmentTree, ProofsError

log = structlog.get_logger("helper.chain")

_MAX_LEAVES_PER_ROW = 8192
_SUBTREE_BYTES = (SUBTREE_LEAVES - 1) * 32


@dataclass(frozen=True, slots=True)
class Anchor:
    """A root that the chain has stored at `height`, over the first `size` leaves."""

    height: int
    size: int
    root: bytes


@dataclass(slots=True)
class RoundTree:
    """The commitment tree of one round.

    Attributes:
        tree: the leaves; during a sync it may hold more than `anchor` covers.
        next_height: the first height whose leaves are not in the tree.
        anchor: the newest verified root, None before the first.
        anchors: all roots verified since the start, by height.
        is_unverified: whether the tree was loaded from the store and is not verified yet.
        unsaved_blocks: verified blocks of leaves that are not stored yet.
        stored_subtrees: number of stored complete subtrees.
        observation: the last valid response about the tree.
    """

    tree: CommitmentTree
    next_height: int
    anchor: Anchor | None = None
    anchors: dict[int, Anchor] = field(default_factory=dict)
    is_unverified: bool = False
    unsaved_blocks: list[LeafBlock] = field(default_factory=list)
    stored_subtrees: int = 0
    observation: Observation | None = None

    def set_anchor(self, state: TreeState) -> None:
        """Record a root that was compared with the chain's as the newest anchor."""
        self.anchor = self.anchors[state.height] = Anchor(state.height, state.size, state.root)


async def load_tree(store: Store, known_round: Round) -> RoundTree:
    """Load a round's tree, which is not verified yet. A damaged tree is deleted from the store."""
    leaves, height = await store.load_leaves(known_round.round_id)
    subtrees = await store.load_subtrees(known_round.round_id)
    count = len(subtrees) // _SUBTREE_BYTES
    try:
        tree = await anyio.to_thread.run_sync(CommitmentTree.restore, leaves, subtrees)
    except ProofsError:
        log.warning(
            "stored_tree_dropped",
            round=known_round.round_id.hex()[:8],
            reason="the stored tree is damaged and will be fetched again",
        )
        await store.delete_tree(known_round.round_id)
        tree, leaves, height, count = CommitmentTree(), b"", 0, 0
    next_height = max(height + 1, known_round.created_at_height)
    return RoundTree(tree, next_height, is_unverified=bool(leaves), stored_subtrees=count)


async def save_tree(store: Store, round_id: bytes, round_tree: RoundTree) -> None:
    """Store the verified leaves and subtrees. After an error the rest is stored after the next sync."""
    while round_tree.unsaved_blocks:
        # Combine consecutive blocks into one row, so that they need one fsync.
        count, size = 1, len(round_tree.unsaved_blocks[0].leaves)
        while count < len(round_tree.unsaved_blocks) and size < _MAX_LEAVES_PER_ROW * 32:
            size += len(round_tree.unsaved_blocks[count].leaves)
            count += 1
        batch = round_tree.unsaved_blocks[:count]
        leaves = b"".join(block.leaves for block in batch)
        try:
            await store.save_leaves(round_id, batch[-1].height, batch[0].start_index, leaves)
        except LeavesMissing as error:  # a standby that lacks the last commits was promoted
            lost = b"".join(round_tree.tree.leaf(index) for index in range(error.stored, batch[0].start_index))
            await store.save_leaves(round_id, batch[0].height - 1, error.stored, lost)
            round_tree.stored_subtrees = min(round_tree.stored_subtrees, error.stored // SUBTREE_LEAVES)
            continue
        del round_tree.unsaved_blocks[:count]
    size = round_tree.anchor.size if round_tree.anchor else 0
    complete = size // SUBTREE_LEAVES
    if complete > round_tree.stored_subtrees:
        nodes = b"".join(round_tree.tree.subtree(index) for index in range(round_tree.stored_subtrees, complete))
        await store.save_subtrees(round_id, round_tree.stored_subtrees, nodes)
        round_tree.stored_subtrees = complete


async def append_leaves(tree: CommitmentTree, blocks: Sequence[LeafBlock], state: TreeState) -> None:
    """Append blocks of leaves and compare the root with the chain's.

    Raises:
        ChainResponseError: they do not match; they may have been appended.
        ProofsError: a leaf is invalid.
    """
    _check_continuity(blocks, len(tree), state)
    await anyio.to_thread.run_sync(tree.append, b"".join(block.leaves for block in blocks))
    if await compute_root(tree, state.size) != state.root:
        raise ChainResponseError("the leaves do not match the root")


async def truncate_tree(tree: CommitmentTree, size: int) -> CommitmentTree:
    """Create a tree of the first `size` leaves."""
    return await anyio.to_thread.run_sync(_truncate_tree, tree, size)


async def compute_root(tree: CommitmentTree, size: int) -> bytes:
    """Compute the root over the first `size` leaves in a thread."""
    return await anyio.to_thread.run_sync(tree.root, size)


def _check_continuity(blocks: Sequence[LeafBlock], size: int, state: TreeState) -> None:
    """Check that blocks continue a tree without gap or overlap.

    The tree has `size` leaves; the blocks must end at the state's size.
    """
    height = 0
    for block in blocks:
        if block.height <= height:
            raise ChainResponseError("leaf heights are not in ascending order")
        if block.start_index != size:
            raise ChainResponseError(f"leaves start at index {block.start_index}, expected {size}")
        size, height = block.end_index, block.height
    if size != state.size:
        raise ChainResponseError(f"got {size} leaves, but the root covers {state.size}")


def _truncate_tree(tree: CommitmentTree, size: int) -> CommitmentTree:
    leaves = b"".join(tree.leaf(position) for position in range(size))
    subtrees = b"".join(tree.subtree(index) for index in range(size // SUBTREE_LEAVES))
    return CommitmentTree.restore(leaves, subtrees)
