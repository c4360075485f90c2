"""Follows the chain block by block and stores the counted nullifiers.

Only blocks confirm a share. Applying a block is idempotent, so after a crash the follower continues from the stored
cursor. If it is far behind, it skips to the head and leaves the blocks between to `helper.chain.block_history`, so that
current reveals are confirmed without delay.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from typing import Final

import structlog

from helper.chain.block_history import HistoryReader
from helper.chain.block_source import BlockSource
from helper.chain.catch_up import (
    AtHead,
    CursorAboveHead,
    MoveBack,
    Read,
    SkipTo,
    Wait,
    is_thorough,
    missing_at_head,
    next_follow_step,
)
from helper.chain.copy_quorum import CopyQuorum
from helper.chain.missed_blocks import MissedBlocksCheck
from helper.chain.models import BlockHead
from helper.chain.node_pool import NodePool
from helper.chain.round_registry import RoundRegistry
from helper.chain.rpc_client import BlockResults
from helper.clock import Clock
from helper.errors import ChainError, HelperError
from helper.store.store import Store

PATIENCE_SECONDS: Final = 3.0
"""Maximum time that dispatch waits at start for the blocks since the last stop, so that shares counted meanwhile are
not proven again. A due share does not wait longer: a second reveal is harmless, a missed one is not.
"""

_LONGEST_PAUSE = 10.0


class BlockFollower:
    """Applies new blocks to the store in order.

    Args:
        store: stores cursor and nullifiers.
        endpoints: the node pool.
        rounds: the round registry, which receives the chain's time.
        clock: source of time.
        mine: whether this host reads the history; of several hosts on one database, one does.
        on_block: called with each height reached, and when `arrived` becomes true.
        on_spent: called with the row ids of confirmed shares, never with an empty list.

    Attributes:
        height: the newest height reached, None before the first.
        chain_time: time (unix seconds) of the newest block reached whose time is known, None before the first.
        history: reads the skipped blocks below `height`.
    """

    def __init__(
        self,
        store: Store,
        endpoints: NodePool,
        rounds: RoundRegistry,
        *,
        clock: Clock,
        mine: Callable[[], bool] = lambda: True,
        on_block: Callable[[int], None] = lambda _height: None,
        on_spent: Callable[[list[int]], None] = lambda _ids: None,
    ) -> None:
        self._store = store
        self._endpoints = endpoints
        self._rounds = rounds
        self._quorum = CopyQuorum(endpoints)
        self._source = BlockSource(endpoints, self._quorum)
        self._sent = MissedBlocksCheck(store, endpoints, self._quorum)
        self._clock = clock
        self._on_block = on_block
        self._on_spent = on_spent
        self._log = structlog.get_logger("helper.chain")
        self._failures = 0
        self._goal: int | None = None
        self._first_head: int | None = None
        self._wait_until = math.inf  # monotonic time at which dispatch stops waiting; set with the first head
        self._began = asyncio.Event()
        self._wake = asyncio.Event()
        self._done: BlockHead | None = None  # the head up to which all blocks are applied
        self._was_arrived = False
        self._heads_below = 0  # consecutive heads far below the cursor
        self.height: int | None = None
        self.chain_time: float | None = None
        self.history = HistoryReader(
            store,
            endpoints,
            rounds,
            clock=clock,
            quorum=self._quorum,
            sent=self._sent,
            mine=mine,
            hurry=lambda: not self.arrived,
            on_spent=self._report_spent,
            on_change=self._on_history,
        )
        endpoints.on_probe(self._on_probe)

    @property
    def caught_up(self) -> bool:
        """Whether the newest known head was reached. Before that, a missing nullifier means nothing."""
        return self._goal is not None and self.height is not None and self.height >= self._goal

    @property
    def arrived(self) -> bool:
        """Whether shares may be proven: all blocks up to the first head are read, or `PATIENCE_SECONDS` have passed.

        The first head is used because a slow machine could stay behind the newest one for a long time.
        """
        if self._was_arrived:
            return True
        reached = self._first_head is not None and self.height is not None and self.height >= self._first_head
        return (reached and not self.history.blocks_left) or self._clock.monotonic() >= self._wait_until

    @property
    def stalled(self) -> int | None:
        """A height that no node returns although it exists, None if there is none."""
        return self.history.stalled

    @property
    def disputed(self) -> int | None:
        """A height at which nodes show different reveals, None if there is none."""
        return self._quorum.disputed

    async def run(self) -> None:
        """Follow the chain until cancelled. On a new database it starts after the first sync of the rounds."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.history.run())
            group.create_task(self._end_wait())
            await self._follow()

    async def _follow(self) -> None:
        pause = 1.0
        while True:
            self._wake.clear()
            try:
                moved = await self.step()
            except Exception as error:  # The next attempt may succeed, and nothing else confirms shares.
                reason = str(error) if isinstance(error, HelperError) else repr(error)
                self._log.warning("block_follow_failed", reason=reason, height=self.height)
                await self._clock.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)
                continue
            pause = 1.0
            if not moved:
                await self._wake.wait()

    async def _end_wait(self) -> None:
        """Report `arrived` when the wait ends."""
        await self._began.wait()
        await self._clock.sleep(self._wait_until - self._clock.monotonic())
        self._check_arrived()

    def _on_probe(self, head: BlockHead | None) -> None:
        """Wake the loop after a probe, unless it shows the block that was applied last."""
        if head is not None and head != self._done:
            self._wake.set()

    async def step(self) -> bool:
        """Apply the next blocks, at most `IN_FLIGHT`. Returns False if there was nothing to do (yet)."""
        head = self._endpoints.head
        if head is None or head == self._done:
            return False
        self._goal = head.height
        self._first_head = head.height if self._first_head is None else min(self._first_head, head.height)
        if not self._began.is_set():
            self._wait_until = self._clock.monotonic() + PATIENCE_SECONDS
            self._began.set()
        if self.height is None:
            self.height = await self._store.cursor()
            if self.height is not None:
                self._endpoints.bounds.floor = self.height
                await self.history.load()
        open_rounds = self._rounds.open() if self._rounds.synced else None
        step = next_follow_step(self.height, head.height, open_rounds=open_rounds, heads_below=self._heads_below)
        if isinstance(step, CursorAboveHead | MoveBack):
            return await self._on_cursor_above(head, step)
        self._heads_below = 0
        match step:
            case Wait():
                return False
            case SkipTo():
                await self._skip(step)
                return True
            case AtHead():
                self._note_time()
                self._check_arrived()
                self._done = head
                return False
            case Read(heights):
                self._note_time()
                return await self._fetch_and_apply(heights)

    async def _fetch_and_apply(self, heights: range) -> bool:
        """Fetch blocks concurrently and apply them in order, up to the first that is not available."""
        blocks, problem = await self._source.fetch_leading(heights, thorough=is_thorough(self._failures))
        for block in blocks:
            await self._apply_block(block)
        if len(blocks) == len(heights):
            return True
        return await self._missing(heights[len(blocks)], problem) or bool(blocks)

    async def _apply_block(self, results: BlockResults) -> None:
        confirmed = await self._store.apply_block(results.height, results.reveals, now=self._clock.now())
        self._report_spent(confirmed)
        self._advance(results.height, results.time)
        if self.caught_up:
            self._report_spent(await self._sent.check_spent(results.height))

    def _advance(self, height: int, time: float | None = None) -> None:
        """Record that the block at `height` was applied or recorded as unread."""
        self.height = height
        self._failures = 0
        self._note_time(time)
        self._was_arrived = self.arrived
        self.history.wake()
        self._on_block(height)

    def _report_spent(self, confirmed: Collection[int]) -> None:
        if confirmed:
            self._on_spent(list(confirmed))

    def _note_time(self, time: float | None = None) -> None:
        """Update the chain's time from the block, or from the nodes' heads if the source does not report it."""
        newest = time if time is not None or self.height is None else self._endpoints.time_at(self.height)
        if newest is not None:
            self.chain_time = max(newest, self.chain_time or newest)
            self._rounds.processed(self.chain_time, complete_from=self.history.complete_from)

    def _on_history(self) -> None:
        """Handle a change of the unread blocks: rounds may be closed now, and shares proven."""
        if self.height is not None:
            self._note_time()
            self._check_arrived()

    def _check_arrived(self) -> None:
        if not self._was_arrived and self.arrived and self.height is not None:
            self._was_arrived = True
            self._on_block(self.height)

    async def _missing(self, height: int, problem: ChainError | None) -> bool:
        """Handle an existing block that is not available.

        If no node has it, or after several attempts, it is left to the history reader, so that later blocks are
        followed. Returns whether it was.
        """
        missing = missing_at_head(problem, self._failures, is_usable=self._endpoints.usable)
        self._failures = missing.failures
        if missing.is_skipped:
            await self._skip(SkipTo(height))
            return True
        if problem is not None:
            raise problem
        return False

    async def _on_cursor_above(self, head: BlockHead, step: CursorAboveHead | MoveBack) -> bool:
        """Handle a cursor far above every node's head. Returns whether the cursor was moved back."""
        self._done = head
        self._heads_below += 1
        if self._heads_below == 1:
            self._log.error(
                "cursor_above_chain", height=self.height, reason=f"the newest block of all nodes is {head.height}"
            )
        if isinstance(step, CursorAboveHead):
            return False
        await self._store.move_back(step.height, first=step.first)
        self._log.warning("cursor_moved_back", height=step.height, reason=f"was {self.height}")
        self.height = step.height
        self._heads_below, self._done = 0, None
        await self.history.load()
        return True

    async def _skip(self, step: SkipTo) -> None:
        await self._store.skip_to(step.height, first=step.first)
        await self.history.load()
        self._log.info("cursor_moved_forward", height=step.height, unread=self.history.blocks_left)
        self._advance(step.height)
