"""Synchronizes the commitment tree of each round with the nodes.

A sync reads a node's newest root, of another node first each time, fetches the missing leaves and compares them with
the root. Leaves that do not match are removed, and the node that returned them goes into backoff. If the root is not
agreed yet, further nodes are asked for theirs, and a node that is ahead for its root at the height of the other.

Only agreed leaves are stored, and only they can prove that a share is invalid. While nodes differ, or only one of them
responds, the trees that they serve are held in memory: one node's report suffices to accept a share and to prove it.

A tree is retained until its round is purged, because it is needed to recognize a share that is posted again after the
round's end. A round whose tree cannot be synchronized does not delay others.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import anyio
import structlog

from helper.chain.agreement import agreed_fact
from helper.chain.chain_data import MAX_LEAVES, Anchor, LeafBlock, Round
from helper.chain.node import Node, backoff_seconds
from helper.chain.node_pool import NodePool, gather_limited
from helper.chain.rest_client import LEAF_WINDOW_BLOCKS, ChainClient, LeafReading
from helper.chain.round_registry import RoundRegistry, RoundView
from helper.core.refusals import PauseReason
from helper.errors import ChainError, ChainResponseError, ChainUnavailable, InvalidResponse, LeavesMissing
from helper.store.rounds import delete_tree, save_leaves, save_subtrees
from helper.store.store import Store
from proofs import SUBTREE_LEAVES, CommitmentTree, ProofsError

log = structlog.get_logger("helper.chain")

CONCURRENT_ROUNDS: Final = 16
"""Maximum number of trees that are synchronized concurrently: the trees of 500 rounds take seconds one by one."""
CHOICE_SECONDS: Final = 30
"""Seconds until the choice among trees that contain a leaf may change."""
WAKES_PER_ITERATION: Final = 16
"""Requests that continue in one iteration of the event loop after a sync. One takes about 0.1 ms."""
MAX_ANCHORS: Final = 64
"""Maximum number of recent agreed roots in memory."""
MAX_READ_SECONDS: Final = 2.0
"""Seconds after which other nodes are asked although a node's leaves are not complete; the next sync continues."""
MAX_UNAGREED_LEAVES: Final = 1 << 22
"""Maximum number of leaves that one node may add to the trunks of all rounds before they are agreed, and that it may
have in forks. A leaf takes about 100 bytes."""
APPENDED_LEAVES: Final = 2048
"""Maximum number of leaves that are appended at once, in about 0.04 s: a reader of the tree waits until they are."""
_MAX_CONTRADICTIONS: Final = 2
"""Consecutive contradictions after which a tree is not used. A single one may be caused by a node that reports a block
before it has executed it, or by two nodes behind one URL."""
_MAX_LEAVES_PER_ROW: Final = 8192
_SUBTREE_BYTES: Final = (SUBTREE_LEAVES - 1) * 32


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

    async def contains(self, state: Anchor) -> bool:
        """Whether a root belongs to this tree."""
        if state == self.newest:  # most syncs find no new leaf, and a root costs 24 hashes
            return True
        return state.size <= len(self.tree) and await anyio.to_thread.run_sync(self.tree.root, state.size) == state.root

    def confirm(self, state: Anchor) -> None:
        """Record a root that belongs to this tree."""
        if self.newest is None or state.height > self.newest.height:
            self.newest = state

    async def extend(self, reading: Reading, round_id: bytes, state: Anchor, seconds: float) -> bool:
        """Append a node's leaves up to its root, or a part of them if that takes longer than it may.

        Returns:
            Whether the tree has this root now; otherwise the next call with this reading continues.

        Raises:
            ChainResponseError: the node's leaves do not match its root; the tree is unchanged.
        """
        before, end_at = len(self.tree), anyio.current_time() + seconds
        tree, grown = self.tree, reading.tree
        if grown is not None and len(grown) >= before and grown.root(before) == tree.root():
            tree = grown
        try:
            leaves = b"".join(block.leaves for block in reading.blocks)
            if (count := before + len(leaves) // 32) != state.size:
                raise ChainResponseError(f"got {count} leaves, but the root covers {state.size}")
            for start in range(32 * (len(tree) - before), len(leaves), 32 * APPENDED_LEAVES):
                await anyio.to_thread.run_sync(tree.append, leaves[start : start + 32 * APPENDED_LEAVES])
                if len(tree) < count and anyio.current_time() >= end_at:
                    if tree is self.tree:
                        self.tree = await anyio.to_thread.run_sync(_truncate, tree, before)
                    reading.tree = tree
                    return False
            if await anyio.to_thread.run_sync(tree.root, state.size) != state.root:
                raise ChainResponseError("the leaves do not match the root")
        except (ChainResponseError, ProofsError) as error:
            if len(self.tree) > before:
                self.tree = await anyio.to_thread.run_sync(_truncate, self.tree, before)
            raise ChainResponseError(f"tree of round {round_id.hex()[:8]}: {error}") from None
        self.tree = tree
        self.next_height = reading.blocks[-1].height + 1
        self.confirm(state)
        return True


@dataclass(slots=True)
class Reading(LeafReading):
    """The leaves of a node as far as they were read.

    Attributes:
        tree: the branch with a part of them, if one sync did not append all; the branch itself is as before.
    """

    tree: CommitmentTree | None = None


class _ReadLimits(NamedTuple):
    """How much of a node's leaves one sync reads.

    Attributes:
        seconds: after which the next sync continues to read them, and also to append them.
        leaves: maximum number of leaves of the round that are not agreed.
    """

    seconds: float
    leaves: int


@dataclass(slots=True)
class RoundTree:
    """The commitment tree of one round.

    Attributes:
        trunk: the tree that was followed first; it contains the agreed leaves.
        agreed: the newest agreed root, None before the first. Only its leaves are stored.
        forks: other trees that contain the agreed leaves, by the name of the node that serves it.
        served: the newest root of each node whose tree is one of these. Nodes with one tree may serve different roots,
            because a false one may add leaves to those of another.
        roots: recent roots of each node that matched its leaves.
        readings: leaves of nodes that are not complete yet, by node and whether they are for a new fork.
        trunk_counts: number of leaves that each node added to the trunk and that are not agreed, at most.
        false_nodes: names of the nodes that served a root which contradicts an agreed one.
        anchors: recent agreed roots, by height.
        stored_height: the height up to which leaves are stored.
    """

    trunk: Branch
    agreed: Anchor | None = None
    forks: dict[str, Branch] = field(default_factory=dict)
    served: dict[str, Anchor] = field(default_factory=dict)
    roots: dict[str, deque[Anchor]] = field(default_factory=dict)
    readings: dict[tuple[str, bool], Reading] = field(default_factory=dict)
    trunk_counts: Counter[str] = field(default_factory=Counter)
    false_nodes: set[str] = field(default_factory=set)
    anchors: dict[int, Anchor] = field(default_factory=dict)
    stored_leaves: int = 0
    stored_height: int = 0
    stored_subtrees: int = 0

    @property
    def branches(self) -> list[Branch]:
        """The trunk and the forks."""
        return [self.trunk, *self.forks.values()]

    def branch_of(self, node: str) -> Branch:
        """The tree that a node serves, as far as it is known."""
        return self.forks.get(node, self.trunk)

    def count_unagreed(self, node: str) -> int:
        """Number of a node's leaves that are not agreed: those in the trunk or in its fork, and those being read."""
        in_fork = len(self.forks[node].tree) - self.agreed_size if node in self.forks else 0
        unfinished = sum(reading.count for (name, _), reading in self.readings.items() if name == node)
        return max(self.trunk_counts[node], in_fork) + unfinished

    @property
    def agreed_size(self) -> int:
        """Number of agreed leaves."""
        return 0 if self.agreed is None else self.agreed.size

    async def follow(self, known_round: Round, client: ChainClient, state: Anchor, limits: _ReadLimits) -> bool:
        """Follow a node's newest root: fetch the leaves that are missing, into a fork if they differ from the trunk's.

        Returns:
            Whether the tree has this root now; otherwise its leaves take longer than they may, and the next call
            continues.

        Raises:
            ChainResponseError: the root contradicts the agreed tree or the node's own leaves, or has too many.
        """
        has_root = await self._follow(known_round, client, state, limits)
        if has_root:
            for is_new_fork in (False, True):
                self.readings.pop((client.name, is_new_fork), None)
            self.served[client.name] = state
            roots = self.roots.setdefault(client.name, deque(maxlen=MAX_ANCHORS))
            if state not in roots:
                roots.append(state)
        return has_root

    async def _follow(self, known_round: Round, client: ChainClient, state: Anchor, limits: _ReadLimits) -> bool:
        name, branch = client.name, self.branch_of(client.name)
        if not len(self.trunk.tree):
            self.trunk.next_height = known_round.created_at_height  # a false node may have listed another one
        for known in dict.fromkeys((self.trunk, branch)):
            if await known.contains(state):
                known.confirm(state)
                if known is self.trunk:
                    self.forks.pop(name, None)
                return True
        size = self.agreed_size
        if self.agreed is not None and (state.size <= size or state.height <= self.agreed.height):
            raise ChainResponseError(f"tree: the root at height {state.height} belongs to another tree")
        # Leaves that take several syncs are not read again because another node has added leaves to the trunk since.
        reading = self.readings.get((name, False))
        is_overtaken = reading is not None and not _continues(branch, reading)
        if is_overtaken:
            del self.readings[name, False]
        if state.size > len(branch.tree) and not is_overtaken and (name, True) not in self.readings:
            try:
                return await self._extend(branch, known_round.round_id, client, state, limits)
            except InvalidResponse:
                raise
            except ChainResponseError:
                if len(branch.tree) == size:
                    raise
        # The leaves that are not agreed, or damaged ones from the store, differ from this node's.
        next_height = known_round.created_at_height if self.agreed is None else self.agreed.height + 1
        fork = Branch(await anyio.to_thread.run_sync(_truncate, self.trunk.tree, size), next_height)
        if not await self._extend(fork, known_round.round_id, client, state, limits):
            return False
        self.forks[name] = fork
        return True

    async def _extend(
        self, branch: Branch, round_id: bytes, client: ChainClient, state: Anchor, limits: _ReadLimits
    ) -> bool:
        """Read a node's leaves, and append them to a branch once they are complete. Returns whether they are."""
        max_count, is_trunk = state.size - len(branch.tree), branch is self.trunk
        unagreed = self.trunk_counts[client.name] + max_count if is_trunk else state.size - self.agreed_size
        if unagreed > limits.leaves:
            raise ChainResponseError(f"tree: more than {MAX_UNAGREED_LEAVES} leaves that no other node reports")
        key = client.name, branch is not self.branch_of(client.name)
        reading = self.readings.get(key)
        if reading is None or not _continues(branch, reading):
            reading = self.readings[key] = Reading(max(1, branch.next_height))
        try:
            known = len(reading.blocks)
            try:
                is_complete = await client.read_leaves(
                    round_id, reading, state.height, max_count=max_count, seconds=limits.seconds
                )
            finally:
                reading.blocks[known:] = _join(reading.blocks[known:])
            if not is_complete or not await branch.extend(reading, round_id, state, limits.seconds):
                return False
        except ChainResponseError:
            del self.readings[key]
            raise
        self.trunk_counts[client.name] += max_count if is_trunk else 0
        return True

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
            await store.run(delete_tree, round_id)
            self.stored_leaves = self.stored_height = self.stored_subtrees = 0
        for name, state in self.served.items() if self.forks else ():
            if await self._is_contradicted(name, state, anchor, branch) and name not in self.false_nodes:
                self.false_nodes.add(name)
                log.warning(
                    "node_root_contradicted",
                    endpoint=name,
                    round=round_id.hex()[:8],
                    height=state.height,
                    advice="Replace it in [chain] endpoints, if it keeps contradicting others.",
                )
        self.served = {name: state for name, state in self.served.items() if self.branch_of(name) is branch}
        self.trunk, self.agreed = branch, anchor
        self.forks.clear()
        rest = len(branch.tree) - anchor.size
        self.trunk_counts = Counter({name: min(count, rest) for name, count in self.trunk_counts.items()})
        if len(branch.tree) == anchor.size:
            branch.next_height = anchor.height + 1  # only one node reports the height in the leaves
        self.anchors[anchor.height] = anchor
        if len(self.anchors) > MAX_ANCHORS:
            del self.anchors[next(iter(self.anchors))]

    async def _is_contradicted(self, node: str, state: Anchor, anchor: Anchor, branch: Branch) -> bool:
        """Whether a node's root cannot belong to the chain of an agreed root, which this branch contains."""
        if state.height < anchor.height:
            return not await branch.contains(state)
        return state != anchor if state.height == anchor.height else not await self.branch_of(node).contains(anchor)


def _join(blocks: Sequence[LeafBlock]) -> list[LeafBlock]:
    """Join blocks to one, since one with a single leaf takes 200 bytes, and a node may serve millions of them."""
    if not blocks:
        return []
    return [LeafBlock(blocks[-1].height, blocks[0].start_index, b"".join(block.leaves for block in blocks))]


def _continues(branch: Branch, reading: Reading) -> bool:
    """Whether the leaves of an unfinished reading follow those of a branch.

    In an empty branch they do, whatever the first height of the round is now: a false node can report another one with
    each listing. The root is verified once the reading is complete.
    """
    return not len(branch.tree) or reading.first == max(1, branch.next_height)


@dataclass(slots=True)
class _Failure:
    """Consecutive sync failures of a round, and the time of the next attempt.

    `contradictions` counts responses that contradict the agreed tree or their own root.
    """

    reason: str = ""
    contradictions: int = 0
    count: int = 0
    retry_at: float = 0.0

    def start_backoff(self, monotonic: float) -> None:
        """Start a backoff, longer with each consecutive failure."""
        self.retry_at = monotonic + backoff_seconds(self.count)
        self.count += 1


class _Knowledge(NamedTuple):
    """What is known of a round and its tree at one moment.

    Attributes:
        agreed: the newest agreed root.
        roots: the newest roots that nodes serve.
        size: the number of leaves of the largest tree.
    """

    round: RoundView
    agreed: Anchor | None
    roots: tuple[Anchor, ...]
    size: int

    def concerns(self, position: int, earlier: _Knowledge) -> bool:
        """Whether a share at a position may be responded to otherwise than with what was known earlier."""
        return self.round != earlier.round or (position < self.size and self != earlier)


class _Waiter(NamedTuple):
    """A share that waits for its round or leaf, and what was known when it began to wait."""

    round_id: bytes
    position: int
    earlier: _Knowledge


class CommitmentTreeSync:
    """The commitment trees of all rounds that are not purged."""

    def __init__(self, store: Store, node_pool: NodePool, rounds: RoundRegistry) -> None:
        self._store = store
        self._node_pool = node_pool
        self._rounds = rounds
        self._trees: dict[bytes, RoundTree] = {}
        self._failures: dict[bytes, _Failure] = {}
        self._waiters: dict[asyncio.Future[None], _Waiter] = {}  # in the order of their arrival
        self._syncs = 0

    # ------------------------------------------------------------------ reading

    def anchor(self, round_id: bytes) -> Anchor | None:
        """The newest root of a round's trunk, agreed or not, or else that of a fork; None before the first."""
        newest = (branch.newest for branch in self._find(round_id).branches)
        return next((anchor for anchor in newest if anchor is not None), None)

    def last_size(self, round_id: bytes) -> int:
        """Last known number of leaves of a round, from the store if no node has confirmed any since the start."""
        anchor = self.anchor(round_id)
        return (0 if anchor is None else anchor.size) or self._find(round_id).stored_leaves

    def leaf(self, round_id: bytes, position: int) -> bytes | None:
        """An agreed leaf, None if there is none at this position."""
        round_tree = self._find(round_id)
        return round_tree.trunk.tree.leaf(position) if 0 <= position < round_tree.agreed_size else None

    def stored_leaf(self, round_id: bytes, position: int) -> bytes | None:
        """A leaf that was agreed before the last start, None if there is none at this position."""
        round_tree = self._find(round_id)
        return round_tree.trunk.tree.leaf(position) if 0 <= position < round_tree.stored_leaves else None

    def find_anchor(
        self, round_id: bytes, position: int, get_leaf: Callable[[], bytes], *, previous: Anchor | None = None
    ) -> Anchor | None:
        """A root under which a leaf can be proven: the newest agreed one, otherwise one that a node serves.

        If several trees contain the leaf, each proof of a share uses another one, since the first one may be wrong. The
        trees of nodes that contradicted an agreed root are used only while no other node is usable: an attacker
        with such a node can post shares for any number of leaves that it invents, and proving them would delay all
        others.

        Args:
            get_leaf: computes the leaf.
            previous: the root of the share's last proof, with its height, as far as it is known.
        """
        round_tree = self._find(round_id)
        if position < round_tree.agreed_size:
            return round_tree.agreed if round_tree.trunk.tree.leaf(position) == get_leaf() else None
        names = [name for name, state in round_tree.served.items() if position < state.size]
        if round_tree.false_nodes and any(
            node.name not in round_tree.false_nodes for node in self._node_pool.usable_nodes
        ):
            names = [name for name in names if name not in round_tree.false_nodes]
        leaf = get_leaf() if names else b""
        names = [name for name in names if round_tree.branch_of(name).tree.leaf(position) == leaf]
        names = [name for name in names if previous not in round_tree.roots[name]] or names
        roots = list(dict.fromkeys(round_tree.served[name] for name in names))
        choice = zlib.crc32(b"%d %d" % (position, self._node_pool.clock.now() // CHOICE_SECONDS))
        return roots[choice % len(roots)] if roots else None

    def anchor_at(self, round_id: bytes, height: int) -> Anchor | None:
        """A recent agreed root at a height, None if there is none."""
        return self._find(round_id).anchors.get(height)

    def serves_root(self, round_id: bytes, node: str, height: int, root: bytes) -> bool:
        """Whether a node is known to have had this root at a height; True if the round's tree is not known."""
        round_tree = self._trees.get(round_id)
        if round_tree is None:
            return True
        known = (*round_tree.anchors.values(), *round_tree.roots.get(node, ()))
        return any((anchor.height, anchor.root) == (height, root) for anchor in known)

    def contradiction_reason(self, round_id: bytes) -> str | None:
        """Why no share of a round may be accepted or revealed now, None if they may.

        The reason is that every node that has responded contradicts the agreed tree or its own root.
        """
        failure = self._failures.get(round_id)
        if failure is None or failure.contradictions < _MAX_CONTRADICTIONS:
            return None
        return PauseReason.ROUND_TREE_CONTRADICTED

    async def path(self, round_id: bytes, position: int, anchor: Anchor) -> bytes:
        """The 24 siblings of a leaf under an anchor's root, leaf level first.

        Raises:
            KeyError: the round has no tree with this root.
        """
        round_tree = self._trees[round_id]
        for branch in round_tree.branches:
            if await branch.contains(anchor):
                return await anyio.to_thread.run_sync(branch.tree.path, position, anchor.size)
        raise KeyError(anchor)

    async def wait_for_news(self, round_id: bytes, position: int, timeout: float) -> None:
        """Wait until a scheduled sync, also one that is running, brings news of a share's round or leaf.

        It sends no request: a request caused by a share would reveal its arrival to the node.

        Args:
            position: the position of its leaf. A tree that does not cover it is no news.
        """
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = _Waiter(round_id, position, self._read_knowledge(round_id))
        try:
            with anyio.move_on_after(timeout):
                await waiter
        finally:
            del self._waiters[waiter]

    def _read_knowledge(self, round_id: bytes) -> _Knowledge:
        round_tree = self._find(round_id)
        roots = tuple(round_tree.served.values())
        size = max((root.size for root in roots), default=0)
        return _Knowledge(self._rounds.view(round_id), round_tree.agreed, roots, size)

    def _wake_waiters(self) -> None:
        """Wake the shares for which there is news: to check all 1,500 again after each sync would delay others."""
        known = {round_id: self._read_knowledge(round_id) for round_id in {w.round_id for w in self._waiters.values()}}
        due = [future for future, w in self._waiters.items() if known[w.round_id].concerns(w.position, w.earlier)]
        self._wake(due)

    def _wake(self, due: list[asyncio.Future[None]]) -> None:
        """Wake a few in each iteration of the event loop, so that other requests need not wait for all."""
        for future in due[:WAKES_PER_ITERATION]:
            if not future.done():
                future.set_result(None)
        if len(due) > WAKES_PER_ITERATION:
            asyncio.get_running_loop().call_soon(self._wake, due[WAKES_PER_ITERATION:])

    def _find(self, round_id: bytes) -> RoundTree:
        """The tree of a round; an empty one if there is none."""
        return self._trees.get(round_id) or RoundTree(Branch(CommitmentTree(), 0))

    # ------------------------------------------------------------------ synchronizing

    async def restore(self) -> None:
        """Load the trees of all rounds from the store. The first sync compares those of active rounds with a node's."""
        for known_round in self._rounds.all_rounds():
            try:
                self._trees[known_round.round_id] = await _load(self._store, known_round)
            except Exception as error:  # An unreadable tree must not block other rounds.
                log.error(
                    "stored_tree_unreadable",
                    round=known_round.round_id.hex()[:8],
                    reason=str(error),
                    advice="The next sync reads it again. Check the database: `svote-helper doctor --skip-proof`.",
                )

    async def sync(self, head: int = 0) -> None:
        """Synchronize the trees of all active rounds. Failures of single rounds are logged.

        Args:
            head: the height that the responding nodes should have reached.

        Raises:
            ChainUnavailable: no round could be synchronized, because no node returned a tree that matches its root.
            StoreError: no round could be synchronized, because the leaves could not be stored.
        """
        self._syncs += 1
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
        self._wake_waiters()

    def _forget_purged(self) -> None:
        known_ids = {known_round.round_id for known_round in self._rounds.all_rounds()}
        for round_id in [round_id for round_id in self._trees if round_id not in known_ids]:
            del self._trees[round_id]
            self._failures.pop(round_id, None)

    async def _sync_round(self, known_round: Round, head: int) -> None:
        """Synchronize the tree of one round. Failures are recorded, logged once and raised."""
        if not self._node_pool.has_usable_node:
            raise ChainUnavailable(PauseReason.NO_NODE_IN_SYNC)  # Not a failure of this round.
        try:
            if known_round.round_id not in self._trees:
                self._trees[known_round.round_id] = await _load(self._store, known_round)
            waits: list[float] = []
            await self._node_pool.call_until(
                partial(self._sync_with, known_round, {}, waits),
                is_enough=bool,
                min_height=head,
                turn=self._syncs,
                others_seconds=lambda: sum(waits),
            )
            await _save(self._store, known_round.round_id, self._trees[known_round.round_id])
        except Exception as error:
            if not isinstance(error, ChainError) or self._node_pool.has_usable_node:
                self._record_failure(known_round, error)
            raise
        failure = self._failures.pop(known_round.round_id, None)
        if failure is not None and failure.reason:
            log.info("tree_sync_recovered", round=known_round.round_id.hex()[:8])

    def _record_failure(self, known_round: Round, error: Exception) -> None:
        failure = self._failures.setdefault(known_round.round_id, _Failure())
        reason = str(error) or type(error).__name__
        if reason != failure.reason:
            log.warning("tree_sync_failed", round=known_round.round_id.hex()[:8], reason=reason)
        failure.reason = reason
        if isinstance(error, ChainError):
            failure.start_backoff(self._node_pool.clock.monotonic())

    async def _sync_with(self, known_round: Round, said: dict[Node, Anchor], waits: list[float], node: Node) -> bool:
        """Synchronize a tree with a node. Returns whether its newest root is the agreed one, not an older one.

        `said` has the newest roots of the nodes that were asked before. The seconds for which other nodes are waited
        for are added to `waits`.
        """
        round_tree = self._trees[known_round.round_id]
        try:
            state = await node.client.tree_latest(known_round.round_id)
            if state is None:
                if round_tree.agreed is not None and node.height > round_tree.agreed.height:
                    raise ChainResponseError("tree: has no leaves at a height where it had them")
                return False
            # No chain has a root before its round, and leaves would be requested for every block up to the height.
            first, last = max(1, known_round.created_at_height), node.height + LEAF_WINDOW_BLOCKS
            if not first <= state.height <= last:
                raise ChainResponseError(f"tree: root at height {state.height}, which is not in {first} to {last}")
            limits = _ReadLimits(math.inf, MAX_LEAVES)
            if self._node_pool.needed > 1:  # also while the others are not usable, since this node may never end
                others = [each for each in self._trees.values() if each is not round_tree]
                unagreed = sum(each.count_unagreed(node.name) for each in others)
                limits = _ReadLimits(MAX_READ_SECONDS, MAX_UNAGREED_LEAVES - unagreed)
            if not await round_tree.follow(known_round, node.client, state, limits):
                return False
        except InvalidResponse:
            raise  # No tree was returned, so nothing is contradicted.
        except ChainResponseError:
            self._failures.setdefault(known_round.round_id, _Failure()).contradictions += 1
            raise
        said[node] = state
        self._wake_waiters()  # the next node may be slow, and one node's report suffices to accept a share
        newest = await self._find_agreed(known_round, said, node, waits)
        if newest is not None:
            await round_tree.agree(self._store, known_round.round_id, newest)
        return round_tree.agreed is not None and state.height == round_tree.agreed.height

    async def _find_agreed(
        self, known_round: Round, said: dict[Node, Anchor], asked: Node, waits: list[float]
    ) -> Anchor | None:
        """The newest root that enough nodes report, None if none is newer than the agreed one."""
        round_tree, heights = self._trees[known_round.round_id], {state.height for state in said.values()}
        last = round_tree.agreed
        if last is None and round_tree.stored_leaves and len(said) >= self._node_pool.needed:
            heights.add(round_tree.stored_height)  # agreed before the start, whatever a false node adds since
        for height in sorted(heights, reverse=True):
            if last is not None and height <= last.height:
                break
            roots = {node.name: state for node, state in said.items() if state.height == height}
            for node in [node for node, state in said.items() if state.height > height]:
                root = await self._fetch_root(known_round, node, height, [] if node is asked else waits)
                if root is not None:
                    roots[node.name] = root
            newest = agreed_fact(roots, self._node_pool.needed)
            if newest is not None:
                return newest
        return None

    async def _fetch_root(self, known_round: Round, node: Node, height: int, waits: list[float]) -> Anchor | None:
        started_at = self._node_pool.clock.monotonic()
        try:
            return await node.client.tree_at(known_round.round_id, height)
        except ChainError as error:
            self._node_pool.record_error(node, error)
            return None
        finally:
            waits.append(self._node_pool.clock.monotonic() - started_at)
            self._node_pool.leave_out_if_slow(node, waits[-1])


async def _load(store: Store, known_round: Round) -> RoundTree:
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
        await store.run(delete_tree, known_round.round_id)
        tree, leaves, height, count = CommitmentTree(), b"", 0, 0
    trunk = Branch(tree, max(height + 1, known_round.created_at_height))
    return RoundTree(trunk, stored_leaves=len(leaves) // 32, stored_height=height, stored_subtrees=count)


async def _save(store: Store, round_id: bytes, round_tree: RoundTree) -> None:
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
            await store.run(save_leaves, round_id, height, start, leaves)
        except LeavesMissing as error:  # a standby that lacks the last commits was promoted
            round_tree.stored_leaves = error.stored
            round_tree.stored_subtrees = min(round_tree.stored_subtrees, error.stored // SUBTREE_LEAVES)
            continue
        round_tree.stored_leaves, round_tree.stored_height = end, height
    complete = agreed.size // SUBTREE_LEAVES
    if complete > round_tree.stored_subtrees:
        nodes = b"".join(tree.subtree(index) for index in range(round_tree.stored_subtrees, complete))
        await store.run(save_subtrees, round_id, round_tree.stored_subtrees, nodes)
        round_tree.stored_subtrees = complete


def _truncate(tree: CommitmentTree, size: int) -> CommitmentTree:
    leaves = b"".join(tree.leaf(position) for position in range(size))
    subtrees = b"".join(tree.subtree(index) for index in range(size // SUBTREE_LEAVES))
    return CommitmentTree.restore(leaves, subtrees)
