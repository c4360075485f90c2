"""Synchronizes rounds and commitment trees with every new block.

Each probe of a node may wake the loop. On a new block, rounds and trees are synchronized twice: immediately and one
interval later, because a node reports a block shortly before it has executed it. A block that only one node reports
causes the same a little later: the other may be stuck, or false, and one node's report suffices to read. A share never
causes a request, because that would reveal its arrival to the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final

import structlog

from helper.chain.chain_data import BlockHead
from helper.chain.commitment_trees import CommitmentTreeSync
from helper.chain.node_pool import NodePool
from helper.chain.round_registry import RoundRegistry
from helper.core.log_limits import LoggedProblem
from helper.errors import ChainError, HelperError

MAX_DUE_SECONDS: Final = 30.0
"""Seconds for which the sync of a route may fail before the service is not ready."""
UNAGREED_INTERVALS: Final = 2
"""Intervals after which a block is used that too few nodes report. Others usually report it in the meantime."""


class ChainSync:
    """Probes the nodes and synchronizes rounds and trees. Run it once, in a task group.

    Attributes:
        synced_height: the newest block when rounds and trees were last synchronized, 0 before the first sync.
    """

    def __init__(
        self, *, node_pool: NodePool, rounds: RoundRegistry, trees: CommitmentTreeSync, interval: float = 1.0
    ) -> None:
        self._node_pool = node_pool
        self._rounds = rounds
        self._trees = trees
        self._interval = interval
        self._log = structlog.get_logger("helper.chain")
        self.synced_height = self._synced_greatest = 0
        self._synced_at = 0.0
        self._unagreed_since: float | None = None  # monotonic time since when a node reports a newer block
        self._is_settled = False
        self._due_since: dict[str, float] = {}  # route whose sync is due: monotonic time since when
        self._has_failed = False
        self._problem = LoggedProblem()
        self._ready = asyncio.Event()
        self._wake = asyncio.Event()
        node_pool.subscribe_to_probes(self._on_probe)

    @property
    def is_ready(self) -> bool:
        """Whether the rounds have been read at least once, and their trees as far as nodes serve them."""
        return self._ready.is_set()

    def find_overdue_routes(self) -> list[str]:
        """Names of the routes (`rounds`, `tree`) that no node has answered for `MAX_DUE_SECONDS` when it was asked."""
        now = self._node_pool.clock.monotonic()
        return [route for route, since in self._due_since.items() if now - since >= MAX_DUE_SECONDS]

    async def wait_ready(self) -> None:
        """Wait for the first successful sync."""
        await self._ready.wait()

    async def run(self) -> None:
        """Synchronize after each new block until cancelled. Errors are logged."""
        await self._node_pool.probe_all()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._node_pool.monitor(self._interval))
            while True:
                self._wake.clear()
                await self.sync_once()
                await self._wake.wait()

    def _on_probe(self, head: BlockHead | None) -> None:
        """Wake the loop after a probe, unless there is nothing to do."""
        if head is None or not self._is_settled or self._has_new_block(head):
            self._wake.set()

    def _has_new_block(self, head: BlockHead) -> bool:
        """Whether a block is new since the last sync: the agreed one, or for some time that of any node."""
        if self._node_pool.greatest_height == self._synced_greatest:
            self._unagreed_since = None
        elif self._unagreed_since is None:
            self._unagreed_since = self._node_pool.clock.monotonic()
        since, now = self._unagreed_since, self._node_pool.clock.monotonic()
        is_reported = since is not None and now - since >= UNAGREED_INTERVALS * self._interval
        return is_reported or head.height != self.synced_height

    async def sync_once(self) -> bool:
        """Synchronize if there is a new block. Returns False after an error; the next tick tries again."""
        try:
            has_synced = await self._sync()
        except Exception as error:  # The next attempt may succeed.
            reason = str(error) if isinstance(error, HelperError) else repr(error)
            is_first, self._has_failed = not self._has_failed, True
            if isinstance(error, ChainError) and (is_first or not self._node_pool.has_usable_node):
                return False  # a node often fails around a commit, and the pool reports a node that does not respond
            if self._problem.note(reason):
                self._log.warning("chain_sync_failed", reason=reason)
            return False
        if has_synced:
            self._has_failed = False
        if has_synced and self._problem.clear():
            self._log.info("chain_sync_recovered", height=self.synced_height)
        return True

    async def _sync(self) -> bool:
        """Synchronize if there is a new block. Returns False if there was nothing to do, or no node in sync."""
        head = self._node_pool.head
        if head is None:
            return False
        now = self._node_pool.clock.monotonic()
        is_new, greatest = self._has_new_block(head), self._node_pool.greatest_height
        if not is_new and (self._is_settled or now - self._synced_at < self._interval):
            return False
        self._is_settled = False
        await self._run_due("rounds", self._rounds.sync(head.height))
        try:
            await self._run_due("tree", self._trees.sync(head.height))
        finally:
            self._ready.set()  # a round whose tree is missing blocks no other, even if there is none
        self.synced_height, self._synced_greatest, self._unagreed_since = head.height, greatest, None
        self._synced_at, self._is_settled = now, not is_new
        return True

    async def _run_due(self, route: str, sync: Awaitable[None]) -> None:
        """Run the sync of a route, and note since when it has been due."""
        self._due_since.setdefault(route, self._node_pool.clock.monotonic())
        await sync
        del self._due_since[route]
