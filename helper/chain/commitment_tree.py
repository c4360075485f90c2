"""Synchronizes the commitment tree of each round with the nodes.

A sync reads a node's newest root, fetches the missing leaves and compares them with the root. Leaves that do not match
are removed, and the node that returned them goes into backoff. If the root is not agreed yet, further nodes are asked
for theirs, and a node that is ahead for its root at the height of the other.

Only agreed leaves are stored, and only they can prove that a share is invalid. While nodes differ, or only one of them
responds, the trees that they serve are held in memory: to accept a share and to prove it needs nobody else's word.

A tree is retained until its round is purged, because it is needed to recognize a share that is posted again after the
round's end. A round whose tree cannot be synchronized does not delay others.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio
import structlog

from helper.chain.agreement import agreed
from helper.chain.limited_gather import gather_limited
from helper.chain.models import Round, TreeState
from helper.chain.node import Node
from helper.chain.node_pool import NodePool
from helper.chain.rest_client import LEAF_WINDOW_BLOCKS
from helper.chain.round_registry import RoundRegistry
from helper.chain.round_tree import Anchor, RoundTree, load_tree, save_tree
from helper.core.pause import PauseCause, PauseReason
from helper.errors import ChainError, ChainResponseError, ChainUnavailable, InvalidResponse
from helper.store.store import Store

__all__ = ["Anchor", "CommitmentTreeSync"]

CONCURRENT_ROUNDS = 16
"""Maximum number of trees that are synchronized concurrently: the trees of 500 rounds take seconds one by one."""
_MAX_BACKOFF_SECONDS = 30.0

# Consecutive contradictions after which a tree is not used. A single one may be caused by a node that reports a
# block before it has executed it, or by two nodes behind one URL.
_MAX_CONTRADICTIONS = 2


@dataclass(slots=True)
class _Failure:
    """Consecutive sync failures of a round, and the time of the next attempt."""

    reason: str = ""
    count: int = 0
    retry_at: float = 0.0

    def start_backoff(self, monotonic: float) -> None:
        """Start a backoff of 1, 2, 4 … 30 s."""
        self.retry_at = monotonic + min(_MAX_BACKOFF_SECONDS, 2.0 ** min(self.count, 10))
        self.count += 1


class CommitmentTreeSync:
    """The commitment trees of all rounds that are not purged.

    Attributes:
        synced_height: the height up to which the trees are synchronized, 0 before the first sync.
    """

    def __init__(self, store: Store, node_pool: NodePool, rounds: RoundRegistry) -> None:
        self._store = store
        self._node_pool = node_pool
        self._rounds = rounds
        self._log = structlog.get_logger("helper.chain")
        self._trees: dict[bytes, RoundTree] = {}
        self._failures: dict[bytes, _Failure] = {}
        self._contradictions: Counter[bytes] = Counter()  # consecutive contradictory responses, by round
        self._finished = asyncio.Event()
        self.synced_height = 0

    # ------------------------------------------------------------------ reading

    def anchor(self, round_id: bytes) -> Anchor | None:
        """The newest root of a round, agreed or not; None before the first."""
        round_tree = self._trees.get(round_id)
        return round_tree.trunk.newest if round_tree else None

    def size(self, round_id: bytes) -> int:
        """Number of leaves of a round that a node has confirmed since the start."""
        anchor = self.anchor(round_id)
        return anchor.size if anchor else 0

    def last_size(self, round_id: bytes) -> int:
        """Last known number of leaves of a round, from the store if none is confirmed since the start."""
        round_tree = self._trees.get(round_id)
        return self.size(round_id) or (round_tree.stored_leaves if round_tree else 0)

    def leaf(self, round_id: bytes, position: int) -> bytes | None:
        """An agreed leaf, None if there is none at this position."""
        round_tree = self._trees.get(round_id)
        if round_tree is None or round_tree.agreed is None or not 0 <= position < round_tree.agreed.size:
            return None
        return round_tree.trunk.tree.leaf(position)

    def stored_leaf(self, round_id: bytes, position: int) -> bytes | None:
        """A leaf that was agreed before the last start, None if there is none at this position."""
        round_tree = self._trees.get(round_id)
        if round_tree is None or not 0 <= position < round_tree.stored_leaves:
            return None
        return round_tree.trunk.tree.leaf(position)

    def find_anchor(self, round_id: bytes, position: int, get_leaf: Callable[[], bytes]) -> Anchor | None:
        """A root under which a leaf can be proven: the newest agreed one, otherwise one that a node serves.

        If several trees contain the leaf, the choice depends on the height: a later proof may use another root, since
        the node that accepts the first one may be false.

        Args:
            round_id: the round.
            position: the leaf's position.
            get_leaf: computes the leaf; called if no agreed root covers the position.
        """
        round_tree = self._trees.get(round_id)
        if round_tree is None:
            return None
        if round_tree.agreed is not None and position < round_tree.agreed.size:
            return round_tree.agreed
        covering = [b for b in round_tree.branches if b.newest is not None and position < b.newest.size]
        leaf = get_leaf() if covering else b""
        roots = [branch.newest for branch in covering if branch.tree.leaf(position) == leaf]
        choice = zlib.crc32(b"%d %d" % (position, self._node_pool.greatest_height))
        return roots[choice % len(roots)] if roots else None

    def anchor_at(self, round_id: bytes, height: int) -> Anchor | None:
        """A recent root at a height, None if there is none: one that a proof was made for, or an agreed one."""
        round_tree = self._trees.get(round_id)
        return (round_tree.used_anchors.get(height) or round_tree.anchors.get(height)) if round_tree else None

    def contradiction_reason(self, round_id: bytes) -> PauseReason | None:
        """Why no share of a round may be accepted or revealed now, None if they may.

        The reason is that every node that has responded contradicts the agreed tree or its own root.
        """
        if self._contradictions[round_id] < _MAX_CONTRADICTIONS:
            return None
        return PauseCause.ROUND_TREE_CONTRADICTED.reason()

    async def path(self, round_id: bytes, position: int, anchor: Anchor) -> bytes:
        """The 24 siblings of a leaf under an anchor's root, leaf level first.

        Raises:
            KeyError: the round has no tree with this root.
        """
        round_tree = self._trees[round_id]
        for branch in round_tree.branches:
            if await branch.contains(anchor):
                round_tree.note_used(anchor)
                return await anyio.to_thread.run_sync(branch.tree.path, position, anchor.size)
        raise KeyError(anchor)

    async def wait_next_sync(self, timeout: float) -> bool:
        """Wait until a scheduled sync, also one that is running, has succeeded. False after `timeout` seconds.

        It sends no request: a request caused by a share would reveal its arrival to the node.
        """
        with anyio.move_on_after(timeout):
            await self._finished.wait()
            return True
        return False

    # ------------------------------------------------------------------ synchronizing

    async def restore(self) -> None:
        """Load the trees of all rounds from the store. The first sync compares those of active rounds with a node's."""
        for known_round in self._rounds.all_rounds():
            try:
                self._trees[known_round.round_id] = await load_tree(self._store, known_round)
            except Exception as error:  # An unreadable tree must not block other rounds.
                self._log.error("stored_tree_unreadable", round=known_round.round_id.hex()[:8], reason=str(error))

    async def sync(self, head: int = 0) -> None:
        """Synchronize the trees of all active rounds. Failures of single rounds are logged.

        Args:
            head: the height that the responding nodes should have reached.

        Raises:
            ChainUnavailable: no round could be synchronized, because no node returned a tree that matches its root.
            StoreError: no round could be synchronized, because the leaves could not be stored.
        """
        self._forget_purged()
        rounds = self._rounds.active_rounds()
        errors: list[Exception] = []

        async def sync_round(known_round: Round) -> None:
            failure = self._failures.get(known_round.round_id)
            if failure is not None and self._node_pool.clock.monotonic() < failure.retry_at:
                errors.append(ChainUnavailable(failure.reason))
                return
            try:
                await self._sync_round(known_round, head)
            except Exception as error:  # Any error of one round must not stop the others.
                errors.append(error)

        # Failing rounds come last: a node that does not respond goes into backoff, and other rounds need that node.
        failing = frozenset(self._failures)
        for is_failing in (False, True):
            group = [each for each in rounds if (each.round_id in failing) is is_failing]
            await gather_limited(group, sync_round, CONCURRENT_ROUNDS)
        if errors and len(errors) == len(rounds):
            raise errors[0]
        self.record_synced_height(head)
        finished, self._finished = self._finished, asyncio.Event()
        finished.set()

    def record_synced_height(self, head: int) -> None:
        """Record that the newest block is still `head`, for which the trees are synchronized. Not a sync."""
        self.synced_height = max(self.synced_height, head)

    def _forget_purged(self) -> None:
        known_ids = {known_round.round_id for known_round in self._rounds.all_rounds()}
        for round_id in [round_id for round_id in self._trees if round_id not in known_ids]:
            del self._trees[round_id]
            self._failures.pop(round_id, None)
            self._contradictions.pop(round_id, None)

    async def _sync_round(self, known_round: Round, head: int) -> None:
        """Synchronize the tree of one round. Failures are recorded, logged once and raised."""
        if not self._node_pool.has_usable_node:
            raise ChainUnavailable("no chain node is in sync")  # Not a failure of this round.
        try:
            if known_round.round_id not in self._trees:
                self._trees[known_round.round_id] = await load_tree(self._store, known_round)
            await self._node_pool.call_until(partial(self._sync_with, known_round, {}), is_enough=bool, min_height=head)
            await save_tree(self._store, known_round.round_id, self._trees[known_round.round_id])
        except Exception as error:
            if not isinstance(error, ChainError) or self._node_pool.has_usable_node:
                self._record_failure(known_round, error)
            raise
        self._contradictions.pop(known_round.round_id, None)
        if self._failures.pop(known_round.round_id, None) is not None:
            self._log.info("tree_sync_recovered", round=known_round.round_id.hex()[:8])

    def _record_failure(self, known_round: Round, error: Exception) -> None:
        failure = self._failures.setdefault(known_round.round_id, _Failure())
        reason = str(error) or type(error).__name__
        if reason != failure.reason:
            self._log.warning("tree_sync_failed", round=known_round.round_id.hex()[:8], reason=reason)
        failure.reason = reason
        if isinstance(error, ChainError):
            failure.start_backoff(self._node_pool.clock.monotonic())

    async def _sync_with(self, known_round: Round, said: dict[Node, TreeState], node: Node) -> bool:
        """Synchronize a tree with a node. Returns whether its newest root is agreed.

        `said` has the newest roots of the nodes that were asked before.
        """
        round_tree = self._trees[known_round.round_id]
        try:
            state = await node.client.tree_latest(known_round.round_id)
            if state is None:
                _require_lag(node, round_tree.agreed)
                return False
            head = node.health.head
            if head is not None and state.height > head.height + LEAF_WINDOW_BLOCKS:
                # Leaves would be requested for every block up to that height.
                raise ChainResponseError(f"tree: root at height {state.height}, but the newest block is {head.height}")
            await round_tree.follow(known_round, node.name, node.client, state)
        except InvalidResponse:
            raise  # No tree was returned, so nothing is contradicted.
        except ChainResponseError:
            self._contradictions[known_round.round_id] += 1
            raise
        said[node] = state
        newest = await self._find_agreed(known_round, said)
        if newest is not None:
            anchor = Anchor(newest.height, newest.size, newest.root)
            await round_tree.agree(self._store, known_round.round_id, anchor)
        return round_tree.agreed is not None and state.height <= round_tree.agreed.height

    async def _find_agreed(self, known_round: Round, said: dict[Node, TreeState]) -> TreeState | None:
        """The newest root that enough nodes report, None if none is newer than the agreed one."""
        last = self._trees[known_round.round_id].agreed
        for height in sorted({state.height for state in said.values()}, reverse=True):
            if last is not None and height <= last.height:
                break
            roots = {node.name: state for node, state in said.items() if state.height == height}
            for node in [node for node, state in said.items() if state.height > height]:
                root = await self._fetch_root(known_round, node, height)
                if root is not None:
                    roots[node.name] = root
            newest = agreed(roots, self._node_pool.needed)
            if newest is not None:
                return newest
        return None

    async def _fetch_root(self, known_round: Round, node: Node, height: int) -> TreeState | None:
        try:
            return await node.client.tree_at(known_round.round_id, height)
        except ChainError as error:
            self._node_pool.record_error(node, error)
            return None


def _require_lag(node: Node, anchor: Anchor | None) -> None:
    """Raise an error if a node without leaves has reached the height of a root."""
    head = node.health.head
    if anchor is not None and (head is None or head.height > anchor.height):
        raise ChainResponseError("tree: has no leaves at a height where it had them")
