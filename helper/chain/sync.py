"""Keeps rounds and trees in step with the chain, at the chain's own pace and whatever wallets do.

Every probe of a node is a tick. When a new block is there, rounds and trees are synced, and once more a poll
later: a node shows a block a moment before it has executed it. Nothing is ever asked because a share came in.
"""

from __future__ import annotations

import asyncio

import structlog

from helper.chain.commitment_tree import CommitmentTreeSync
from helper.chain.models import BlockHead
from helper.chain.node_pool import NodePool
from helper.chain.round_registry import RoundRegistry
from helper.errors import HelperError


class ChainFollower:
    """Runs the probes and the syncs; to be started once in a task group."""

    def __init__(
        self, *, endpoints: NodePool, rounds: RoundRegistry, trees: CommitmentTreeSync, interval: float = 1.0
    ) -> None:
        self._endpoints = endpoints
        self._rounds = rounds
        self._trees = trees
        self._interval = interval
        self._log = structlog.get_logger("helper.chain")
        self._synced_height = 0
        self._synced_at = 0.0
        self._settled = False
        self._told: str | None = None
        self._ready = asyncio.Event()
        self._wake = asyncio.Event()
        endpoints.on_probe(self._look)

    @property
    def ready(self) -> bool:
        """Whether rounds and trees were synced once."""
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        """Wait for the first sync that went well."""
        await self._ready.wait()

    async def run(self) -> None:
        """Follow the chain until cancelled; no error ends it."""
        await self._endpoints.check()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._endpoints.monitor(self._interval))
            while True:
                self._wake.clear()
                await self.tick()
                await self._wake.wait()

    def _look(self, head: BlockHead | None) -> None:
        """After a probe: mostly there is nothing to do."""
        if head is not None and self._settled and head.height <= self._synced_height:
            self._trees.in_step(head.height)
        else:
            self._wake.set()

    async def tick(self) -> bool:
        """One look: sync if a block is new. False when something went wrong; the next tick tries again."""
        try:
            await self._sync()
        except Exception as error:  # whatever it is, the next try may go well
            reason = str(error) if isinstance(error, HelperError) else repr(error)
            if reason != self._told:
                self._log.warning("chain not followed", reason=reason)
            self._told = reason
            return False
        if self._told is not None:
            self._log.info("chain is followed again", height=self._synced_height)
            self._told = None
        return True

    async def _sync(self) -> None:
        head = self._endpoints.head
        if head is None:
            return
        now = self._endpoints.clock.monotonic()
        news = head.height > self._synced_height
        if not news and (self._settled or now - self._synced_at < self._interval):
            self._trees.in_step(head.height)
            return
        self._settled = False
        await self._rounds.sync(head.height)
        await self._trees.sync(head.height)
        self._synced_height, self._synced_at, self._settled = head.height, now, not news
        self._ready.set()
