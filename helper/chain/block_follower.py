"""Follows the chain block by block and stores the counted nullifiers.

Only blocks confirm a share. Applying a block is idempotent, so after a crash the follower continues from the stored
cursor. If it is far behind, it skips to the head and leaves the skipped blocks to `helper.chain.block_history`, so that
current reveals are confirmed without delay.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from typing import Final

import structlog

from helper.chain.block_history import HistoryReader
from helper.chain.block_source import BlockSource
from helper.chain.catch_up import (
    AtHeadStep,
    CursorAboveHeadStep,
    MoveBackStep,
    ReadStep,
    SkipStep,
    WaitStep,
    is_left_to_history,
    is_thorough,
    next_follow_step,
)
from helper.chain.copy_quorum import BlockNotAgreedError, Disputes
from helper.chain.models import BlockHead
from helper.chain.node_pool import NodePool
from helper.chain.round_registry import RoundRegistry
from helper.chain.rpc_client import BlockResults
from helper.chain.sent_reveal_check import SentRevealCheck
from helper.core.log_limits import LoggedProblem
from helper.errors import ChainError, HelperError
from helper.store.models import SentReveal, SpentNullifier
from helper.store.store import Store

MAX_START_WAIT_SECONDS: Final = 3.0
"""Maximum seconds that dispatch waits at startup for the blocks since the last shutdown.

Shares that were confirmed in the meantime are then not proven again. A due share does not wait longer: a second reveal
is harmless, a missed one is not.
"""

_MAX_RETRY_SECONDS = 10.0


class BlockFollower:
    """Applies new blocks to the store in order.

    Args:
        store: stores cursor and nullifiers.
        rounds: the round registry, which receives the chain's time.
        is_leader: whether this host reads the history; with a shared database, only one host does.
        on_block: called with each height reached, and when `is_ready` becomes true.
        on_confirmed: called with the row ids of confirmed shares, never with an empty list.

    Attributes:
        height: the newest height reached, None before the first.
        chain_time: time (Unix seconds) of the newest block reached whose time is known, None before the first.
        history: reader of the skipped blocks below `height`.
    """

    def __init__(
        self,
        store: Store,
        node_pool: NodePool,
        rounds: RoundRegistry,
        *,
        is_leader: Callable[[], bool] = lambda: True,
        on_block: Callable[[int], None] = lambda _height: None,
        on_confirmed: Callable[[list[int]], None] = lambda _ids: None,
    ) -> None:
        self._store = store
        self._node_pool = node_pool
        self._rounds = rounds
        self._disputes = Disputes()
        self._source = BlockSource(node_pool, self._disputes)
        self._sent_reveal_check = SentRevealCheck(store, node_pool)
        self._clock = node_pool.clock
        self._on_block = on_block
        self._on_confirmed = on_confirmed
        self._log = structlog.get_logger("helper.chain")
        self._failures = 0
        self._first_head_height: int | None = None
        self._wait_until = math.inf  # monotonic time at which dispatch stops waiting; set with the first head
        self._has_first_head = asyncio.Event()
        self._wake = asyncio.Event()
        self._applied_head: BlockHead | None = None  # the head up to which all blocks are applied
        self._was_ready = False
        self._heads_below_cursor = 0  # consecutive heads far below the cursor
        self.height: int | None = None
        self.chain_time: float | None = None
        self.history = HistoryReader(
            store,
            node_pool,
            rounds,
            disputes=self._disputes,
            sent_reveal_check=self._sent_reveal_check,
            is_leader=is_leader,
            is_awaited=lambda: not self.is_ready,
            on_confirmed=self._report_confirmed,
            on_change=self._on_history_change,
        )
        node_pool.subscribe_to_probes(self._on_probe)

    async def find_counted(self, reveals: Sequence[SentReveal]) -> list[SpentNullifier]:
        """Return the nullifiers of those messages of another machine that nodes report as counted.

        Only due messages are queried, whatever the other machine has done: a request contains the nullifier.
        """
        now_ms = self._clock.now() * 1000
        return await self._sent_reveal_check.find_counted([reveal for reveal in reveals if reveal.due_ms <= now_ms])

    @property
    def is_caught_up(self) -> bool:
        """Whether the newest known head was reached."""
        head = self._node_pool.head
        return head is not None and self.height is not None and self.height >= head.height

    @property
    def is_ready(self) -> bool:
        """Whether shares may be proven.

        True once all blocks up to the first head are read, or `MAX_START_WAIT_SECONDS` have passed. The first head is
        used because a slow machine could stay behind the newest one for a long time.
        """
        if self._was_ready:
            return True
        reached = (
            self._first_head_height is not None and self.height is not None and self.height >= self._first_head_height
        )
        return (reached and not self.history.unread_count) or self._clock.monotonic() >= self._wait_until

    @property
    def stalled_height(self) -> int | None:
        """A height that no node returns although it exists, None if there is none."""
        return self.history.stalled_height

    @property
    def disputed_height(self) -> int | None:
        """A height at which nodes report different reveals, None if there is none."""
        return min(self._disputes.heights, default=None)

    async def run(self) -> None:
        """Follow the chain until cancelled. On a new database it starts after the first sync of the rounds."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.history.run())
            group.create_task(self._report_wait_end())
            await self._follow()

    async def _follow(self) -> None:
        pause, problem = 1.0, LoggedProblem()
        while True:
            self._wake.clear()
            try:
                has_progressed = await self.apply_next_blocks()
            except Exception as error:  # The next attempt may succeed, and nothing else confirms shares.
                reason = str(error) if isinstance(error, HelperError) else repr(error)
                is_expected = isinstance(error, ChainError) and pause == 1.0  # a node often fails around a commit
                if not is_expected and problem.note(reason):
                    self._log.warning("block_follow_failed", reason=reason, height=self.height)
                await self._clock.sleep(pause)
                pause = min(_MAX_RETRY_SECONDS, pause * 2)
                continue
            if (has_progressed or self.is_caught_up) and problem.clear():
                self._log.info("block_follow_recovered", height=self.height)
            pause = 1.0
            if not has_progressed:
                await self._wake.wait()

    async def _report_wait_end(self) -> None:
        """Report readiness when the wait ends."""
        await self._has_first_head.wait()
        await self._clock.sleep(self._wait_until - self._clock.monotonic())
        self._check_ready()

    def _on_probe(self, head: BlockHead | None) -> None:
        """Wake the loop after a probe, unless it reports the block that was applied last."""
        if head is not None and head != self._applied_head:
            self._wake.set()

    async def apply_next_blocks(self) -> bool:
        """Apply the next blocks, at most `CONCURRENT_BLOCKS`. Returns False if there was none to apply."""
        head = self._node_pool.head
        if head is None or head == self._applied_head:
            return False
        self._first_head_height = (
            head.height if self._first_head_height is None else min(self._first_head_height, head.height)
        )
        if not self._has_first_head.is_set():
            self._wait_until = self._clock.monotonic() + MAX_START_WAIT_SECONDS
            self._has_first_head.set()
        if self.height is None:
            self.height = await self._store.get_cursor()
            if self.height is not None:
                await self.history.load_ranges()
        open_rounds = self._rounds.open_rounds() if self._rounds.is_synced else None
        step = next_follow_step(self.height, head.height, open_rounds=open_rounds, heads_below=self._heads_below_cursor)
        if isinstance(step, CursorAboveHeadStep | MoveBackStep):
            return await self._on_cursor_above(head, step)
        self._heads_below_cursor = 0
        match step:
            case WaitStep():
                return False
            case SkipStep():
                await self._skip(step)
                self._log.info("cursor_moved_forward", height=step.height, count=self.history.unread_count)
                return True
            case AtHeadStep():
                self._update_chain_time()
                self._check_ready()
                self._applied_head = head
                return False
            case ReadStep(heights):
                self._update_chain_time()
                return await self._fetch_and_apply(heights)

    async def _fetch_and_apply(self, heights: range) -> bool:
        """Fetch blocks concurrently and apply them in order.

        Stops at the first block that is not available.
        """
        blocks, error = await self._source.fetch_leading(heights, always_try_rest=is_thorough(self._failures))
        for block in blocks:
            await self._apply_block(block)
        if len(blocks) == len(heights):
            return True
        return await self._handle_missing(heights[len(blocks)], error) or bool(blocks)

    async def _apply_block(self, results: BlockResults) -> None:
        confirmed = await self._store.apply_block(results.height, results.reveals, now=self._clock.now())
        self._report_confirmed(confirmed)
        self._advance(results.height, results.time)
        if self.is_caught_up:
            self._report_confirmed(await self._sent_reveal_check.check_spent(results.height))

    def _advance(self, height: int, time: float | None = None) -> None:
        """Advance to `height`, whose block was applied or marked as unread."""
        self.height = height
        self._failures = 0
        self._update_chain_time(time)
        self._was_ready = self.is_ready
        self.history.wake()
        self._on_block(height)

    def _report_confirmed(self, confirmed: Collection[int]) -> None:
        if confirmed:
            self._on_confirmed(list(confirmed))

    def _update_chain_time(self, time: float | None = None) -> None:
        """Update the chain's time: that of the newest block that nodes agree on, or of the block reached below it."""
        head = self._node_pool.head
        if self.height is not None and head is not None:
            newest = head.time if self.height >= head.height else time
            if newest is not None:
                self.chain_time = min(newest, head.time)
        if self.chain_time is not None:
            self._rounds.record_block(self.chain_time, complete_from=self.history.complete_from)

    def _on_history_change(self) -> None:
        """Handle a change of the unread blocks.

        The change may permit closing rounds and proving shares.
        """
        if self.height is not None:
            self._update_chain_time()
            self._check_ready()

    def _check_ready(self) -> None:
        if not self._was_ready and self.is_ready and self.height is not None:
            self._was_ready = True
            self._on_block(self.height)

    async def _handle_missing(self, height: int, error: ChainError | None) -> bool:
        """Handle an existing block that is not available.

        If no node has it, if two nodes do not agree on it, or after repeated failures, it is left to the history
        reader, so that the follower continues with later blocks. An attempt counts only if a node is in sync. Returns
        whether the block was left.
        """
        if self._node_pool.has_usable_node:
            self._failures += 1
            if is_left_to_history(error, self._failures):
                if isinstance(error, BlockNotAgreedError):
                    self.history.hold(height)
                await self._skip(SkipStep(height))
                return True
        if error is not None:
            raise error
        return False

    async def _on_cursor_above(self, head: BlockHead, step: CursorAboveHeadStep | MoveBackStep) -> bool:
        """Handle a cursor far above every node's head. Returns whether the cursor was moved back."""
        self._applied_head = head
        self._heads_below_cursor += 1
        if self._heads_below_cursor == 1:
            self._log.error(
                "cursor_above_chain", height=self.height, reason=f"the newest block of all nodes is {head.height}"
            )
        if isinstance(step, CursorAboveHeadStep):
            return False
        await self._store.rewind_to(step.height, first=step.first)
        self._log.warning("cursor_moved_back", height=step.height, reason=f"was {self.height}")
        self.height = step.height
        self._heads_below_cursor, self._applied_head = 0, None
        await self.history.load_ranges()
        return True

    async def _skip(self, step: SkipStep) -> None:
        await self._store.skip_to(step.height, first=step.first)
        await self.history.load_ranges()
        self._advance(step.height)
