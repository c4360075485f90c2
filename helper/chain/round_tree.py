"""The commitment tree of one round: what nodes serve of it, what they agree on, loading and storing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import structlog

from helper.chain.models import LeafBlock, Round, TreeState
from helper.chain.rest_client import ChainClient
from helper.errors import ChainResponseError, InvalidResponse, LeavesMissing
from helper.store.store import Store
from proofs import SUBTREE_LEAVES, CommitmentTree, ProofsError

log = structlog.get_logger("helper.chain")

MAX_ANCHORS = 64
"""Maximum number of recent agreed roots in memory, and of roots that proofs were made for."""
_MAX_LEAVES_PER_ROW = 8192
_SUBTREE_BYTES = (SUBTREE_LEAVES - 1) * 32


@dataclass(frozen=True, slots=True)
class Anchor:
    """A root that a node reports at `height`, over the first `size` leaves."""

    height: int
    size: int
    root: bytes


@dataclass(slots=True, eq=False)
class Branch:
    """A tree that one or more nodes serve.

    Attributes:
        tree: the leaves; during a sync it may hold more than `newest` covers.
        next_height: the first height whose leaves are not in the tree.
        newest: the newest root that matched the leaves; None if they are from the store and no node has confirmed them.
    """

    tree: CommitmentTree
    next_height: int
    newest: Anchor | None = None

    async def contains(self, state: TreeState | Anchor) -> bool:
        """Whether a root belongs to this tree."""
        return state.size <= len(self.tree) and await compute_root(self.tree, state.size) == state.root

    def confirm(self, state: TreeState) -> None:
        """Record a root that belongs to this tree."""
        if self.newest is None or state.height > self.newest.height:
            self.newest = Anchor(state.height, state.size, state.root)

    async def extend(self, client: ChainClient, round_id: bytes, state: TreeState) -> None:
        """Append the leaves up to a node's root.

        Raises:
            ChainResponseError: the node's leaves do not match its root; the tree is unchanged.
        """
        before = len(self.tree)
        blocks = await client.leaves(round_id, self.next_height, state.height, max_count=state.size - before)
        try:
            _check_continuity(blocks, before, state)
            await anyio.to_thread.run_sync(self.tree.append, b"".join(block.leaves for block in blocks))
            if await compute_root(self.tree, state.size) != state.root:
                raise ChainResponseError("the leaves do not match the root")
        except (ChainResponseError, ProofsError) as error:
            if len(self.tree) > before:
                self.tree = await truncate_tree(self.tree, before)
            raise ChainResponseError(f"tree of round {round_id.hex()[:8]}: {error}") from None
        self.next_height = blocks[-1].height + 1
        self.confirm(state)


@dataclass(slots=True)
class RoundTree:
    """The commitment tree of one round.

    Attributes:
        trunk: the tree that was followed first; it contains the agreed leaves.
        agreed: the newest agreed root, None before the first. Only its leaves are stored.
        forks: other trees that contain the agreed leaves, by the name of the node that serves it.
        anchors: recent agreed roots, by height.
        used_anchors: recent roots that proofs were made for, by height.
        stored_leaves: number of stored leaves.
        stored_height: the height up to which leaves are stored.
        stored_subtrees: number of stored complete subtrees.
    """

    trunk: Branch
    agreed: Anchor | None = None
    forks: dict[str, Branch] = field(default_factory=dict)
    anchors: dict[int, Anchor] = field(default_factory=dict)
    used_anchors: dict[int, Anchor] = field(default_factory=dict)
    stored_leaves: int = 0
    stored_height: int = 0
    stored_subtrees: int = 0

    @property
    def branches(self) -> list[Branch]:
        """The trunk and the forks."""
        return [self.trunk, *self.forks.values()]

    async def follow(self, known_round: Round, name: str, client: ChainClient, state: TreeState) -> None:
        """Follow a node's newest root: fetch the leaves that are missing, into a fork if they differ from the trunk's.

        Raises:
            ChainResponseError: the root contradicts the agreed tree or the node's own leaves.
        """
        branch = self.forks.get(name, self.trunk)
        for known in dict.fromkeys((self.trunk, branch)):
            if await known.contains(state):
                known.confirm(state)
                if known is self.trunk:
                    self.forks.pop(name, None)
                return
        size = self.agreed.size if self.agreed is not None else 0
        if self.agreed is not None and (state.size <= size or state.height <= self.agreed.height):
            raise ChainResponseError(f"tree: the root at height {state.height} belongs to another tree")
        if state.size > len(branch.tree):
            try:
                await branch.extend(client, known_round.round_id, state)
                return
            except InvalidResponse:
                raise
            except ChainResponseError:
                if len(branch.tree) == size:
                    raise
        # The leaves that are not agreed, or damaged ones from the store, differ from this node's.
        next_height = known_round.created_at_height if self.agreed is None else self.agreed.height + 1
        fork = Branch(await truncate_tree(self.trunk.tree, size), next_height)
        await fork.extend(client, known_round.round_id, state)
        self.forks[name] = fork

    async def agree(self, store: Store, round_id: bytes, anchor: Anchor) -> None:
        """Record a newer agreed root, and drop what contradicts it."""
        for branch in self.branches:
            if await branch.contains(anchor):
                break
        else:
            raise ChainResponseError("tree: no node serves the leaves of the agreed root")
        if branch is not self.trunk and self.agreed is None and self.stored_leaves:
            log.warning(
                "stored_tree_replaced",
                round=round_id.hex()[:8],
                reason="stored leaves do not match the chain's root",
            )
            await store.delete_tree(round_id)
            self.stored_leaves = self.stored_height = self.stored_subtrees = 0
        self.trunk, self.agreed = branch, anchor
        self.forks.clear()
        if len(branch.tree) == anchor.size:
            branch.next_height = anchor.height + 1  # the height in the leaves is the word of one node
        _add_bounded(self.anchors, anchor)

    def note_used(self, anchor: Anchor) -> None:
        """Record that a proof is made for a root."""
        _add_bounded(self.used_anchors, anchor)


def _add_bounded(anchors: dict[int, Anchor], anchor: Anchor) -> None:
    anchors.pop(anchor.height, None)
    anchors[anchor.height] = anchor
    if len(anchors) > MAX_ANCHORS:
        del anchors[next(iter(anchors))]


async def load_tree(store: Store, known_round: Round) -> RoundTree:
    """Load a round's tree, which no node has confirmed yet. A damaged tree is deleted from the store."""
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
    trunk = Branch(tree, max(height + 1, known_round.created_at_height))
    return RoundTree(trunk, stored_leaves=len(leaves) // 32, stored_height=height, stored_subtrees=count)


async def save_tree(store: Store, round_id: bytes, round_tree: RoundTree) -> None:
    """Store the agreed leaves and subtrees. After an error the rest is stored after the next sync."""
    agreed, tree = round_tree.agreed, round_tree.trunk.tree
    if agreed is None:
        return
    while round_tree.stored_leaves < agreed.size:
        start = round_tree.stored_leaves
        end = min(agreed.size, start + _MAX_LEAVES_PER_ROW)
        # Only the last row completes the leaves of the agreed height.
        height = agreed.height if end == agreed.size else round_tree.stored_height
        leaves = b"".join(tree.leaf(index) for index in range(start, end))
        try:
            await store.save_leaves(round_id, height, start, leaves)
        except LeavesMissing as error:  # a standby that lacks the last commits was promoted
            round_tree.stored_leaves = error.stored
            round_tree.stored_subtrees = min(round_tree.stored_subtrees, error.stored // SUBTREE_LEAVES)
            continue
        round_tree.stored_leaves, round_tree.stored_height = end, height
    complete = agreed.size // SUBTREE_LEAVES
    if complete > round_tree.stored_subtrees:
        nodes = b"".join(tree.subtree(index) for index in range(round_tree.stored_subtrees, complete))
        await store.save_subtrees(round_id, round_tree.stored_subtrees, nodes)
        round_tree.stored_subtrees = complete


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
