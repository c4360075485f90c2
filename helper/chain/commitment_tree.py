"""The commitment tree of each round, kept in step with the chain while the round takes votes, and never
trusted before its root was checked.

A sync asks for the newest root, fetches the leaves that are missing, and appends them; only when the root
over them equals the chain's does the new part count: it can be read, it is kept on disk, and its root is an
anchor. Leaves that contradict their root are taken out again and the node that gave them is set aside.

Trees stay until their round is purged: a share that comes again after its round must be told from a new one.
A round whose tree cannot be followed holds up no other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from functools import partial

import anyio
import structlog

from helper.chain.block_cadence import ShareArrival, next_observation, proves_absence
from helper.chain.models import Round, RoundStatus, TreeState
from helper.chain.node import Node
from helper.chain.node_pool import NodePool
from helper.chain.rest_client import LEAF_WINDOW
from helper.chain.round_registry import RoundRegistry
from helper.chain.round_tree import Anchor, RoundTree, first_leaves, grow, load, root_of, save
from helper.errors import ChainAnswerError, ChainError, ChainUnavailable, InvalidAnswer
from helper.store.store import Store
from proofs import CommitmentTree, ProofsError

__all__ = ["Anchor", "CommitmentTreeSync"]

_LONGEST_REST = 30.0

# Contradictions in a row after which nothing is done by a tree: one may come of a node that shows a block before it has
# executed it, or of two nodes behind one address.
_CONTRADICTIONS = 2


@dataclass(slots=True)
class _Trouble:
    """A round whose tree could not be followed: how often in a row, and when it is tried again."""

    reason: str = ""
    failures: int = 0
    retry_at: float = 0.0

    def rest(self, monotonic: float) -> None:
        """Leave it alone for 1, 2, 4 … 30 s."""
        self.retry_at = monotonic + min(_LONGEST_REST, 2.0 ** min(self.failures, 10))
        self.failures += 1


class CommitmentTreeSync:
    """The trees of all rounds that are not purged.

    Attributes:
        synced_height: the chain's height that the trees are in step with, 0 before the first sync.
    """

    def __init__(self, store: Store, endpoints: NodePool, rounds: RoundRegistry) -> None:
        self._store = store
        self._endpoints = endpoints
        self._rounds = rounds
        self._log = structlog.get_logger("helper.chain")
        self._kept: dict[bytes, RoundTree] = {}
        self._trouble: dict[bytes, _Trouble] = {}
        self._contradicted: Counter[bytes] = Counter()  # answers in a row that cannot be, by round
        self._begun = 0  # syncs begun and, of those that went well, the newest
        self._done = 0
        self._finished = asyncio.Event()
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

    def unchecked_leaf(self, round_id: bytes, position: int) -> bytes | None:
        """A leaf as it came from the disk, while its tree is not checked; None when there is none."""
        kept = self._kept.get(round_id)
        if kept is None or not kept.restored or not 0 <= position < len(kept.tree):
            return None
        return kept.tree.leaf(position)

    def anchor_at(self, round_id: bytes, height: int) -> Anchor | None:
        """The root that was checked at a height since the start; None when none was."""
        kept = self._kept.get(round_id)
        return kept.anchors.get(height) if kept else None

    def contradicted(self, round_id: bytes) -> str | None:
        """Why nothing of a round may be taken or revealed now, or None: whatever node was asked lately showed a tree
        that cannot be.
        """
        if self._contradicted[round_id] < _CONTRADICTIONS:
            return None
        return "no node shows the round's tree as it should be"

    async def path(self, round_id: bytes, position: int, anchor: Anchor) -> bytes:
        """The 24 siblings of a leaf under an anchor's root, leaf level first. `KeyError` for a round
        without a tree.
        """
        return await anyio.to_thread.run_sync(self._kept[round_id].tree.path, position, anchor.size)

    # What is not there

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

    def arrival(self) -> ShareArrival:
        """The present moment as the arrival of a share whose round or leaf is missing."""
        endpoints = self._endpoints
        return ShareArrival(endpoints.clock.now(), endpoints.newest_height, endpoints.smallest_offset)

    def lacks(self, round_id: bytes, arrival: ShareArrival) -> bool:
        """Whether the chain certainly lacked a round, or a leaf of it, that is missing here.

        Args:
            round_id: the round, known or not.
            arrival: when a share of it was first posted.
        """
        known = self._rounds.get(round_id)
        kept = self._kept.get(round_id)
        follows_tree = known is not None and known.status is RoundStatus.ACTIVE
        look = (kept.look if kept else None) if follows_tree else self._rounds.look
        return proves_absence(look, arrival, self._endpoints.smallest_offset)

    # In step

    async def restore(self) -> None:
        """Take the trees of all rounds back from the store; those of active ones are checked in the first
        sync.
        """
        for known in self._rounds.all():
            try:
                self._kept[known.round_id] = await load(self._store, known)
            except Exception as error:  # one that cannot be read must not keep the others from their votes
                self._log.error("stored tree was not read", round=known.round_id.hex()[:8], reason=str(error))

    async def sync(self, head: int = 0) -> None:
        """Bring every active round's tree up to the chain's. `head`: the height that the answers should know.

        Rounds that could not be followed are logged. Raises what went wrong with the first of them when none
        could: `ChainUnavailable` when no endpoint gave a tree that fits its root, `StoreError` when it cannot
        be kept.
        """
        self._begun += 1
        begun = self._begun
        self._forget_purged()
        followed = 0
        problems: list[Exception] = []
        # Those that failed last go last: a node may give no answer to them and rest, and others need it.
        for known in sorted(self._rounds.active(), key=lambda known: known.round_id in self._trouble):
            trouble = self._trouble.get(known.round_id)
            if trouble is not None and self._endpoints.clock.monotonic() < trouble.retry_at:
                problems.append(ChainUnavailable(trouble.reason))
                continue
            try:
                await self._sync_one(known, head)
            except Exception as error:  # of whatever kind: other rounds go on
                problems.append(error)
            else:
                followed += 1
        if problems and not followed:
            raise problems[0]
        self._done = max(self._done, begun)
        self.in_step(head)
        finished, self._finished = self._finished, asyncio.Event()
        finished.set()

    def in_step(self, head: int) -> None:
        """The newest block is still `head`, whose trees are here. Nothing was asked, so it is no sync."""
        self.synced_height = max(self.synced_height, head)

    def _forget_purged(self) -> None:
        there = {known.round_id for known in self._rounds.all()}
        for round_id in [round_id for round_id in self._kept if round_id not in there]:
            del self._kept[round_id]
            self._trouble.pop(round_id, None)
            self._contradicted.pop(round_id, None)

    async def _sync_one(self, known: Round, head: int) -> None:
        """One round's tree; what goes wrong is noted, told once, and raised."""
        if not self._endpoints.usable:
            raise ChainUnavailable("no endpoint could be asked")  # another round's failure: none of this one's
        try:
            if known.round_id not in self._kept:
                self._kept[known.round_id] = await load(self._store, known)
            await self._endpoints.call_endpoint(partial(self._look_at, known), min_height=head)
            await save(self._store, known.round_id, self._kept[known.round_id])
        except Exception as error:
            self._note(known, error)
            raise
        self._contradicted.pop(known.round_id, None)
        if self._trouble.pop(known.round_id, None) is not None:
            self._log.info("tree is followed again", round=known.round_id.hex()[:8])

    def _note(self, known: Round, error: Exception) -> None:
        trouble = self._trouble.setdefault(known.round_id, _Trouble())
        reason = str(error) or type(error).__name__
        if reason != trouble.reason:
            self._log.warning("tree not followed", round=known.round_id.hex()[:8], reason=reason)
        trouble.reason = reason
        if isinstance(error, ChainError):
            trouble.rest(self._endpoints.clock.monotonic())

    async def _look_at(self, known: Round, endpoint: Node) -> None:
        """Follow a node's tree, and note which blocks its answer covers."""
        head, began = endpoint.health.head, self._endpoints.clock.monotonic()
        try:
            await self._follow(known, endpoint)
        except InvalidAnswer:
            raise  # it shows no tree
        except ChainAnswerError:
            self._contradicted[known.round_id] += 1
            raise
        if head is not None:
            kept = self._kept[known.round_id]
            kept.look = next_observation(kept.look, endpoint.name, head, began)

    async def _follow(self, known: Round, endpoint: Node) -> None:
        """Follow an endpoint's word about one tree, or raise `ChainAnswerError` with everything as it was."""
        kept = self._kept[known.round_id]
        state = await endpoint.client.tree_latest(known.round_id)
        if state is None:
            if kept.anchor is not None:
                _must_lag(endpoint, kept.anchor.height, "has no leaves")
            return
        if kept.anchor is not None and state.height <= kept.anchor.height:
            await _compare(kept, kept.anchor, state)
            return
        head = endpoint.health.head
        if head is not None and state.height > head.height + LEAF_WINDOW:
            # Its leaves would be looked for in every block up to that height.
            raise ChainAnswerError(f"tree: a root at height {state.height}, the newest block is {head.height}")
        if state.size < len(kept.tree):
            _must_lag(endpoint, kept.next_height - 1, f"has {state.size} leaves, not {len(kept.tree)}")
            return
        before = len(kept.tree)
        # What came from the disk may be wrong: whether the leaves continue it is found out below.
        most = state.size if kept.restored else state.size - before
        blocks = await endpoint.client.leaves(known.round_id, kept.next_height, state.height, most=most)
        try:
            await grow(kept.tree, blocks, state)
        except (ChainAnswerError, ProofsError) as error:
            if kept.restored:
                await self._start_over(endpoint, known, state)
                return
            if len(kept.tree) > before:
                kept.tree = await first_leaves(kept.tree, before)
            raise ChainAnswerError(f"tree of round {known.round_id.hex()[:8]}: {error}") from None
        kept.vouch(state)
        kept.next_height = state.height + 1
        kept.restored = False
        kept.unsaved += blocks

    async def _start_over(self, endpoint: Node, known: Round, state: TreeState) -> None:
        """What came from our disk does not fit: if the node's own leaves alone fit its root, ours were
        damaged.
        """
        tree = CommitmentTree()
        blocks = await endpoint.client.leaves(known.round_id, known.created_at_height, state.height, most=state.size)
        try:
            await grow(tree, blocks, state)
        except (ChainAnswerError, ProofsError) as error:
            self._kept[known.round_id] = await load(self._store, known)
            raise ChainAnswerError(f"tree of round {known.round_id.hex()[:8]}: {error}") from None
        self._log.warning("stored tree did not fit and was fetched anew", round=known.round_id.hex()[:8])
        await self._store.drop_tree(known.round_id)
        anew = RoundTree(tree, state.height + 1, unsaved=blocks)
        anew.vouch(state)
        self._kept[known.round_id] = anew


async def _compare(kept: RoundTree, anchor: Anchor, state: TreeState) -> None:
    """A root that we should know already must be ours."""
    if (state.height, state.size, state.root) == (anchor.height, anchor.size, anchor.root):
        return
    fits = state.height < anchor.height and state.size < anchor.size
    if not fits or await root_of(kept.tree, state.size) != state.root:
        raise ChainAnswerError(f"tree: the root at height {state.height} is of another tree")


def _must_lag(endpoint: Node, height: int, problem: str) -> None:
    """A node may only know less than we do when its newest block is before ours."""
    head = endpoint.health.head
    if head is None or head.height > height:
        raise ChainAnswerError(f"tree: {problem} at a height where it had them")
