"""The commitment tree of each active round, kept in step with the chain and never trusted before its root
was checked.

A sync asks for the newest root, fetches the leaves that are missing, and appends them; only when the root
over them equals the chain's does the new part count: it can be read, it is kept on disk, and its root is an
anchor. Leaves that contradict their root are taken out again and the node that gave them is set aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio
import structlog

from helper.chain.endpoint import Endpoint
from helper.chain.failover import Endpoints
from helper.chain.models import LeafBlock, Round, TreeState
from helper.errors import ChainAnswerError
from helper.rounds import RoundBook
from helper.store.base import ChainStore
from proofs import SUBTREE_LEAVES, CommitmentTree, ProofsError

_LEAVES_A_ROW = 8192


@dataclass(frozen=True, slots=True)
class Anchor:
    """A root that the chain has stored: of the first `size` leaves, at `height`."""

    height: int
    size: int
    root: bytes


@dataclass(slots=True)
class _Kept:
    """One round's tree.

    `tree` may hold more leaves than `anchor` vouches for while a sync runs; `restored` says that what came
    from the disk has not been checked against the chain yet. `unsaved` are checked blocks that are not on
    disk.
    """

    tree: CommitmentTree
    next_height: int
    anchor: Anchor | None = None
    anchors: dict[int, Anchor] = field(default_factory=dict)
    restored: bool = False
    unsaved: list[LeafBlock] = field(default_factory=list)
    subtrees: int = 0

    def vouch(self, state: TreeState) -> None:
        """The tree's root was compared with the chain's."""
        self.anchor = self.anchors[state.height] = Anchor(state.height, state.size, state.root)


class TreeKeeper:
    """The trees of all active rounds.

    Attributes:
        synced_height: the chain's height that the trees are in step with, 0 before the first sync.
    """

    def __init__(self, store: ChainStore, endpoints: Endpoints, rounds: RoundBook) -> None:
        self._store = store
        self._endpoints = endpoints
        self._rounds = rounds
        self._log = structlog.get_logger("helper.chain")
        self._kept: dict[bytes, _Kept] = {}
        self._begun = 0  # syncs begun and, of those that went well, the newest
        self._done = 0
        self._finished = anyio.Event()
        self.synced_height = 0

    # Reading: only what was checked

    def anchor(self, round_id: bytes) -> Anchor | None:
        """The newest checked root of a round; None while there is none."""
        kept = self._kept.get(round_id)
        return kept.anchor if kept else None

    def size(self, round_id: bytes) -> int:
        """How many leaves of a round are checked."""
        anchor = self.anchor(round_id)
        return anchor.size if anchor else 0

    def leaf(self, round_id: bytes, position: int) -> bytes | None:
        """A checked leaf; None beyond the tree."""
        if not 0 <= position < self.size(round_id):
            return None
        return self._kept[round_id].tree.leaf(position)

    def anchor_at(self, round_id: bytes, height: int) -> Anchor | None:
        """The root that was checked at a height since the start; None when none was."""
        kept = self._kept.get(round_id)
        return kept.anchors.get(height) if kept else None

    async def path(self, round_id: bytes, position: int, anchor: Anchor) -> bytes:
        """The 24 siblings of a leaf under an anchor's root, leaf level first. `KeyError` for a round
        without a tree.
        """
        return await anyio.to_thread.run_sync(self._kept[round_id].tree.path, position, anchor.size)

    async def wait_next_sync(self, timeout: float) -> bool:
        """Wait until a regular sync that begins after this call has ended well; False when `timeout`
        seconds pass first.

        It only waits: no question is asked because of it.
        """
        begun = self._begun
        with anyio.move_on_after(timeout):
            while self._done <= begun:
                await self._finished.wait()
            return True
        return False

    # In step

    async def restore(self) -> None:
        """Take the trees of the active rounds back from the store; each is checked in its first sync."""
        for known in self._rounds.active():
            await self._load(known)

    async def sync(self, head: int = 0) -> None:
        """Bring every active round's tree up to the chain's. `head`: the height that the answers should know.

        Raises `ChainUnavailable` when no endpoint gave a tree that fits its root, `StoreError` when it
        cannot be kept.
        """
        self._begun += 1
        begun = self._begun
        active = self._rounds.active()
        for known in active:
            if known.round_id not in self._kept:
                await self._load(known)
            await self._endpoints.call_endpoint(partial(self._follow, known), min_height=head)
            await self._save(known.round_id)
        open_ = {known.round_id for known in self._rounds.open()}
        for round_id in [r for r in self._kept if r not in open_]:
            del self._kept[round_id]
        self._end(begun, head)

    def in_step(self, head: int) -> None:
        """There is nothing new to sync: counts as a sync that went well."""
        self._begun += 1
        self._end(self._begun, head)

    def _end(self, begun: int, head: int) -> None:
        self._done = max(self._done, begun)
        self.synced_height = max(self.synced_height, head)
        finished, self._finished = self._finished, anyio.Event()
        finished.set()

    async def _follow(self, known: Round, endpoint: Endpoint) -> None:
        """Follow an endpoint's word about one tree, or raise `ChainAnswerError` with everything as it was."""
        kept = self._kept[known.round_id]
        state = await endpoint.client.tree_latest(known.round_id)
        if state is None:
            if kept.anchor is not None:
                self._must_lag(endpoint, kept.anchor.height, "has no leaves")
            return
        if kept.anchor is not None and state.height <= kept.anchor.height:
            await self._compare(kept, kept.anchor, state)
            return
        if state.size < len(kept.tree):
            self._must_lag(endpoint, kept.next_height - 1, f"has {state.size} leaves, not {len(kept.tree)}")
            return
        blocks = await endpoint.client.leaves(known.round_id, kept.next_height, state.height)
        before = len(kept.tree)
        try:
            _check_continuity(blocks, before, state)
            await _extend(kept.tree, blocks, state)
        except (ChainAnswerError, ProofsError) as error:
            if kept.restored:
                await self._start_over(endpoint, known, state)
                return
            if len(kept.tree) > before:
                kept.tree = await anyio.to_thread.run_sync(_first_leaves, kept.tree, before)
            raise ChainAnswerError(f"tree of round {known.round_id.hex()[:8]}: {error}") from None
        kept.vouch(state)
        kept.next_height = state.height + 1
        kept.restored = False
        kept.unsaved += blocks

    async def _compare(self, kept: _Kept, anchor: Anchor, state: TreeState) -> None:
        """A root that we should know already must be ours."""
        fits = state.size == anchor.size if state.height == anchor.height else state.size < anchor.size
        if not fits or await _root(kept.tree, state.size) != state.root:
            raise ChainAnswerError(f"tree: the root at height {state.height} is of another tree")

    def _must_lag(self, endpoint: Endpoint, height: int, problem: str) -> None:
        """A node may only know less than we do when its newest block is before ours."""
        head = endpoint.health.head
        if head is None or head.height > height:
            raise ChainAnswerError(f"tree: {problem} at a height where it had them")

    async def _start_over(self, endpoint: Endpoint, known: Round, state: TreeState) -> None:
        """What came from our disk does not fit: if the node's own leaves alone fit its root, ours were
        damaged.
        """
        tree = CommitmentTree()
        blocks = await endpoint.client.leaves(known.round_id, known.created_at_height, state.height)
        try:
            _check_continuity(blocks, 0, state)
            await _extend(tree, blocks, state)
        except (ChainAnswerError, ProofsError) as error:
            await self._load(known)
            raise ChainAnswerError(f"tree of round {known.round_id.hex()[:8]}: {error}") from None
        self._log.warning("stored tree did not fit and was fetched anew", round=known.round_id.hex()[:8])
        await self._store.drop_tree(known.round_id)
        anew = _Kept(tree, state.height + 1, unsaved=blocks)
        anew.vouch(state)
        self._kept[known.round_id] = anew

    # The disk

    async def _load(self, known: Round) -> None:
        leaves, height = await self._store.load_leaves(known.round_id)
        subtrees = await self._store.load_subtrees(known.round_id)
        count = len(subtrees) // _SUBTREE_BYTES
        try:
            tree = await anyio.to_thread.run_sync(CommitmentTree.restore, leaves, subtrees)
        except ProofsError:
            self._log.warning("stored tree is damaged and is fetched anew", round=known.round_id.hex()[:8])
            await self._store.drop_tree(known.round_id)
            tree, leaves, height, count = CommitmentTree(), b"", 0, 0
        next_height = max(height + 1, known.created_at_height)
        self._kept[known.round_id] = _Kept(tree, next_height, restored=bool(leaves), subtrees=count)

    async def _save(self, round_id: bytes) -> None:
        """Keep what was checked; what the store refuses is offered again after the next sync."""
        kept = self._kept[round_id]
        while kept.unsaved:
            # Many blocks become one row: their leaves are consecutive, and one fsync serves them all.
            count, size = 1, len(kept.unsaved[0].leaves)
            while count < len(kept.unsaved) and size < _LEAVES_A_ROW * 32:
                size += len(kept.unsaved[count].leaves)
                count += 1
            batch = kept.unsaved[:count]
            leaves = b"".join(block.leaves for block in batch)
            await self._store.save_leaves(round_id, batch[-1].height, batch[0].start_index, leaves)
            del kept.unsaved[:count]
        size = kept.anchor.size if kept.anchor else 0
        complete = size // SUBTREE_LEAVES
        if complete > kept.subtrees:
            nodes = b"".join(kept.tree.subtree(index) for index in range(kept.subtrees, complete))
            await self._store.save_subtrees(round_id, kept.subtrees, nodes)
            kept.subtrees = complete


_SUBTREE_BYTES = (SUBTREE_LEAVES - 1) * 32


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


async def _extend(tree: CommitmentTree, blocks: Sequence[LeafBlock], state: TreeState) -> None:
    """Append and compare with the chain's root; `ChainAnswerError` or `ProofsError` when it does not fit."""
    await anyio.to_thread.run_sync(tree.append, b"".join(block.leaves for block in blocks))
    if await _root(tree, state.size) != state.root:
        raise ChainAnswerError("its leaves do not have its root: this is another tree")


def _first_leaves(tree: CommitmentTree, size: int) -> CommitmentTree:
    """A tree of the first `size` leaves, which were checked before what comes after them."""
    leaves = b"".join(tree.leaf(position) for position in range(size))
    subtrees = b"".join(tree.subtree(index) for index in range(size // SUBTREE_LEAVES))
    return CommitmentTree.restore(leaves, subtrees)


async def _root(tree: CommitmentTree, size: int) -> bytes:
    return await anyio.to_thread.run_sync(tree.root, size)
