"""Synchronizes the commitment tree of each round with the chain and verifies its roots.

A sync reads the newest root of a round, fetches the missing leaves and appends them. The new leaves are used and stored
only if the root over them equals the chain's; that root is then an anchor. Leaves that do not match their root are
removed, and the node that returned them goes into backoff.

A tree is retained until its round is purged, because it is needed to recognize a share that is posted again after the
round's end. A round whose tree cannot be synchronized does not delay others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from functools import partial

import anyio
import structlog

from helper.chain.absence_proof import ShareArrival, next_observation, proves_absence
from helper.chain.limited_gather import gather_limited
from helper.chain.models import Round, RoundStatus, TreeState
from helper.chain.node import Node
from helper.chain.node_pool import NodePool
from helper.chain.rest_client import LEAF_WINDOW_BLOCKS
from helper.chain.round_registry import RoundRegistry
from helper.chain.round_tree import Anchor, RoundTree, append_leaves, compute_root, load_tree, save_tree, truncate_tree
from helper.core.pause import PauseCause, PauseReason
from helper.errors import ChainError, ChainResponseError, ChainUnavailable, InvalidResponse
from helper.store.store import Store
from proofs import CommitmentTree, ProofsError

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
        """The newest verified root of a round, None if no root is verified."""
        round_tree = self._trees.get(round_id)
        return round_tree.anchor if round_tree else None

    def size(self, round_id: bytes) -> int:
        """Number of verified leaves of a round."""
        anchor = self.anchor(round_id)
        return anchor.size if anchor else 0

    def last_size(self, round_id: bytes) -> int:
        """Last known number of leaves of a round, from the store if none is verified since the start."""
        round_tree = self._trees.get(round_id)
        return self.size(round_id) or (len(round_tree.tree) if round_tree else 0)

    def leaf(self, round_id: bytes, position: int) -> bytes | None:
        """A verified leaf, None if there is none at this position."""
        if not 0 <= position < self.size(round_id):
            return None
        return self._trees[round_id].tree.leaf(position)

    def unverified_leaf(self, round_id: bytes, position: int) -> bytes | None:
        """A leaf loaded from the store whose tree is not verified yet, None if there is none."""
        round_tree = self._trees.get(round_id)
        if round_tree is None or not round_tree.is_unverified or not 0 <= position < len(round_tree.tree):
            return None
        return round_tree.tree.leaf(position)

    def anchor_at(self, round_id: bytes, height: int) -> Anchor | None:
        """The root verified at a height since the start, None if there is none."""
        round_tree = self._trees.get(round_id)
        return round_tree.anchors.get(height) if round_tree else None

    def contradiction_reason(self, round_id: bytes) -> PauseReason | None:
        """Why no share of a round may be accepted or revealed now, None if they may.

        The reason is that the last responses of nodes about its tree contradicted the verified tree or the root.
        """
        if self._contradictions[round_id] < _MAX_CONTRADICTIONS:
            return None
        return PauseCause.ROUND_TREE_CONTRADICTED.reason()

    async def path(self, round_id: bytes, position: int, anchor: Anchor) -> bytes:
        """The 24 siblings of a leaf under an anchor's root, leaf level first.

        Raises:
            KeyError: the round has no tree.
        """
        return await anyio.to_thread.run_sync(self._trees[round_id].tree.path, position, anchor.size)

    # ------------------------------------------------------------------ absence

    async def wait_next_sync(self, timeout: float) -> bool:
        """Wait until a scheduled sync, also one that is running, has succeeded. False after `timeout` seconds.

        It sends no request: a request caused by a share would reveal its arrival to the node.
        """
        with anyio.move_on_after(timeout):
            await self._finished.wait()
            return True
        return False

    def create_arrival(self) -> ShareArrival:
        """Create a `ShareArrival` for the current time."""
        node_pool = self._node_pool
        return ShareArrival(node_pool.clock.now(), node_pool.greatest_height, node_pool.smallest_offset)

    def was_absent(self, round_id: bytes, arrival: ShareArrival) -> bool:
        """Whether a missing round or leaf was absent from the chain at the arrival.

        Args:
            round_id: the round, known or not.
            arrival: when the share was first posted.
        """
        known_round = self._rounds.get(round_id)
        round_tree = self._trees.get(round_id)
        follows_tree = known_round is not None and known_round.status is RoundStatus.ACTIVE
        observation = (round_tree.observation if round_tree else None) if follows_tree else self._rounds.observation
        return proves_absence(observation, arrival, self._node_pool.smallest_offset)

    # ------------------------------------------------------------------ synchronizing

    async def restore(self) -> None:
        """Load the trees of all rounds from the store. The first sync verifies those of active rounds."""
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
            await self._node_pool.call_node(partial(self._sync_with, known_round), min_height=head)
            await save_tree(self._store, known_round.round_id, self._trees[known_round.round_id])
        except Exception as error:
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

    async def _sync_with(self, known_round: Round, node: Node) -> None:
        """Synchronize a tree with a node, and record which blocks the node's response covers."""
        head, began = node.health.head, self._node_pool.clock.monotonic()
        try:
            await self._append_new(known_round, node)
        except InvalidResponse:
            raise  # No tree was returned, so nothing is contradicted.
        except ChainResponseError:
            self._contradictions[known_round.round_id] += 1
            raise
        if head is not None:
            round_tree = self._trees[known_round.round_id]
            round_tree.observation = next_observation(round_tree.observation, node.name, head, began)

    async def _append_new(self, known_round: Round, node: Node) -> None:
        """Append a node's new leaves to a tree. On `ChainResponseError` the tree is unchanged."""
        round_tree = self._trees[known_round.round_id]
        state = await node.client.tree_latest(known_round.round_id)
        if state is None:
            if round_tree.anchor is not None:
                _require_lag(node, round_tree.anchor.height, "has no leaves")
            return
        if round_tree.anchor is not None and state.height <= round_tree.anchor.height:
            await _check_root(round_tree, round_tree.anchor, state)
            return
        head = node.health.head
        if head is not None and state.height > head.height + LEAF_WINDOW_BLOCKS:
            # Leaves would be requested for every block up to that height.
            raise ChainResponseError(f"tree: root at height {state.height}, but the newest block is {head.height}")
        if state.size < len(round_tree.tree):
            _require_lag(node, round_tree.next_height - 1, f"has {state.size} leaves, expected {len(round_tree.tree)}")
            return
        before = len(round_tree.tree)
        # Unverified stored leaves may be damaged, so their number does not limit the request. Damage is detected below.
        max_count = state.size if round_tree.is_unverified else state.size - before
        blocks = await node.client.leaves(
            known_round.round_id, round_tree.next_height, state.height, max_count=max_count
        )
        try:
            await append_leaves(round_tree.tree, blocks, state)
        except (ChainResponseError, ProofsError) as error:
            if round_tree.is_unverified:
                await self._fetch_complete_tree(node, known_round, state)
                return
            if len(round_tree.tree) > before:
                round_tree.tree = await truncate_tree(round_tree.tree, before)
            raise ChainResponseError(f"tree of round {known_round.round_id.hex()[:8]}: {error}") from None
        round_tree.set_anchor(state)
        round_tree.next_height = state.height + 1
        round_tree.is_unverified = False
        round_tree.unsaved_blocks += blocks

    async def _fetch_complete_tree(self, node: Node, known_round: Round, state: TreeState) -> None:
        """Fetch the complete tree after stored leaves did not match.

        If it matches its root, it replaces the stored tree.
        """
        tree = CommitmentTree()
        blocks = await node.client.leaves(
            known_round.round_id, known_round.created_at_height, state.height, max_count=state.size
        )
        try:
            await append_leaves(tree, blocks, state)
        except (ChainResponseError, ProofsError) as error:
            self._trees[known_round.round_id] = await load_tree(self._store, known_round)
            raise ChainResponseError(f"tree of round {known_round.round_id.hex()[:8]}: {error}") from None
        self._log.warning(
            "stored_tree_replaced",
            round=known_round.round_id.hex()[:8],
            reason="stored leaves do not match the chain's root",
        )
        await self._store.delete_tree(known_round.round_id)
        refetched = RoundTree(tree, state.height + 1, unsaved_blocks=blocks)
        refetched.set_anchor(state)
        self._trees[known_round.round_id] = refetched


async def _check_root(round_tree: RoundTree, anchor: Anchor, state: TreeState) -> None:
    """Check a node's root at or below the anchor against the verified tree."""
    if (state.height, state.size, state.root) == (anchor.height, anchor.size, anchor.root):
        return
    is_older = state.height < anchor.height and state.size < anchor.size
    if not is_older or await compute_root(round_tree.tree, state.size) != state.root:
        raise ChainResponseError(f"tree: the root at height {state.height} belongs to another tree")


def _require_lag(node: Node, height: int, problem: str) -> None:
    """Raise an error unless the node lags.

    A node may know less only if its newest block is not above `height`.
    """
    head = node.health.head
    if head is None or head.height > height:
        raise ChainResponseError(f"tree: {problem} at a height where it had them")
