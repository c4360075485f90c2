"""One round's tree: what was checked of it, how it grows, and how it comes from the disk and goes there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import structlog

from helper.chain.block_cadence import Observation
from helper.chain.models import LeafBlock, Round, TreeState
from helper.errors import ChainAnswerError
from helper.store.store import Store
from proofs import SUBTREE_LEAVES, CommitmentTree, ProofsError

log = structlog.get_logger("helper.chain")

_LEAVES_A_ROW = 8192
_SUBTREE_BYTES = (SUBTREE_LEAVES - 1) * 32


@dataclass(frozen=True, slots=True)
class Anchor:
    """A root that the chain has stored: of the first `size` leaves, at `height`."""

    height: int
    size: int
    root: bytes


@dataclass(slots=True)
class RoundTree:
    """One round's tree.

    `tree` may hold more leaves than `anchor` vouches for while a sync runs; `restored` says that what came
    from the disk has not been checked against the chain yet. `unsaved` are checked blocks that are not on
    disk. `look` is the last good answer about it.
    """

    tree: CommitmentTree
    next_height: int
    anchor: Anchor | None = None
    anchors: dict[int, Anchor] = field(default_factory=dict)
    restored: bool = False
    unsaved: list[LeafBlock] = field(default_factory=list)
    subtrees: int = 0
    look: Observation | None = None

    def vouch(self, state: TreeState) -> None:
        """The tree's root was compared with the chain's."""
        self.anchor = self.anchors[state.height] = Anchor(state.height, state.size, state.root)


async def load(store: Store, known: Round) -> RoundTree:
    """A round's tree as the store has it, not checked yet; one that is damaged there is forgotten."""
    leaves, height = await store.load_leaves(known.round_id)
    subtrees = await store.load_subtrees(known.round_id)
    count = len(subtrees) // _SUBTREE_BYTES
    try:
        tree = await anyio.to_thread.run_sync(CommitmentTree.restore, leaves, subtrees)
    except ProofsError:
        log.warning("stored tree is damaged and is fetched anew", round=known.round_id.hex()[:8])
        await store.drop_tree(known.round_id)
        tree, leaves, height, count = CommitmentTree(), b"", 0, 0
    next_height = max(height + 1, known.created_at_height)
    return RoundTree(tree, next_height, restored=bool(leaves), subtrees=count)


async def save(store: Store, round_id: bytes, kept: RoundTree) -> None:
    """Keep what was checked; what the store refuses is offered again after the next sync."""
    while kept.unsaved:
        # Many blocks become one row: their leaves are consecutive, and one fsync serves them all.
        count, size = 1, len(kept.unsaved[0].leaves)
        while count < len(kept.unsaved) and size < _LEAVES_A_ROW * 32:
            size += len(kept.unsaved[count].leaves)
            count += 1
        batch = kept.unsaved[:count]
        leaves = b"".join(block.leaves for block in batch)
        await store.save_leaves(round_id, batch[-1].height, batch[0].start_index, leaves)
        del kept.unsaved[:count]
    size = kept.anchor.size if kept.anchor else 0
    complete = size // SUBTREE_LEAVES
    if complete > kept.subtrees:
        nodes = b"".join(kept.tree.subtree(index) for index in range(kept.subtrees, complete))
        await store.save_subtrees(round_id, kept.subtrees, nodes)
        kept.subtrees = complete


async def grow(tree: CommitmentTree, blocks: Sequence[LeafBlock], state: TreeState) -> None:
    """Append blocks and compare with the chain's root; `ChainAnswerError` or `ProofsError` when they do not
    fit, possibly after they were appended.
    """
    _check_continuity(blocks, len(tree), state)
    await anyio.to_thread.run_sync(tree.append, b"".join(block.leaves for block in blocks))
    if await root_of(tree, state.size) != state.root:
        raise ChainAnswerError("its leaves do not have its root: this is another tree")


async def first_leaves(tree: CommitmentTree, size: int) -> CommitmentTree:
    """A tree of the first `size` leaves, which were checked before what comes after them."""
    return await anyio.to_thread.run_sync(_first_leaves, tree, size)


async def root_of(tree: CommitmentTree, size: int) -> bytes:
    """The root over the first `size` leaves, hashed in a thread."""
    return await anyio.to_thread.run_sync(tree.root, size)


def _check_continuity(blocks: Sequence[LeafBlock], size: int, state: TreeState) -> None:
    """The blocks must continue a tree of `size` leaves without gap or overlap up to the state's size."""
    height = 0
    for block in blocks:
        if block.height <= height:
            raise ChainAnswerError("the leaves' heights do not rise")
        if block.start_index != size:
            raise ChainAnswerError(f"leaves from {block.start_index} on came where {size} were expected")
        size, height = block.end_index, block.height
    if size != state.size:
        raise ChainAnswerError(f"there are {size} leaves under a root of {state.size}")


def _first_leaves(tree: CommitmentTree, size: int) -> CommitmentTree:
    leaves = b"".join(tree.leaf(position) for position in range(size))
    subtrees = b"".join(tree.subtree(index) for index in range(size // SUBTREE_LEAVES))
    return CommitmentTree.restore(leaves, subtrees)
