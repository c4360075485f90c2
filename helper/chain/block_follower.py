"""Follows the chain block by block and tells the store which nullifiers have counted.

Only blocks confirm a share. Applying a block twice changes nothing, so after a crash the follower continues from the
store's cursor. When it is far behind, it continues near the head at once and leaves the blocks between to
`helper.chain.block_history`: what is revealed now is confirmed now, however long the history is.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

import structlog

from helper.chain.block_history import IN_FLIGHT, OVERLAP, TRIES, HistoryReader, HistoryStore
from helper.chain.block_source import BlockSource
from helper.chain.copy_quorum import CopyQuorum
from helper.chain.head_bounds import SLACK_BLOCKS
from helper.chain.missed_blocks import MissedBlocksCheck
from helper.chain.models import BlockHead, RoundStatus
from helper.chain.node_pool import NodePool
from helper.chain.rest_client import HeightGoneError
from helper.chain.round_registry import RoundRegistry
from helper.chain.rpc_client import BlockResults, Spent
from helper.clock import Clock
from helper.errors import ChainError, HelperError

LIVE_BLOCKS: Final = 64
"""Blocks behind the head that are read in order; if there are more, the follower skips to the head."""
PATIENCE_SECONDS: Final = 3.0
"""How long dispatch waits at the start for the blocks since the last stop. Most restarts need less, and prove nothing
that was counted meanwhile; a share that is due must not wait for more, as a second reveal is harmless and a missed one
is not."""

CURSOR_TRIES: Final = 10
"""Heads in a row that must be far below the cursor before it is moved back."""

_LONGEST_PAUSE = 10.0


class BlockFollowerStore(HistoryStore, Protocol):
    """The part of the store that the listener writes to."""

    async def cursor(self) -> int | None:
        """The height that was reached: every block up to it was applied, or is recorded as unread."""
        ...

    async def skip_to(self, height: int, *, first: int) -> None:
        """Move the cursor and record the blocks passed over as unread, from `first` on where there is no cursor."""
        ...

    async def move_back(self, height: int, *, first: int) -> None:
        """Move the cursor down to `height` and record the blocks from `first` to it as unread."""
        ...

    async def apply_block(self, height: int, spent: Sequence[Spent], *, now: float) -> Collection[int]:
        """Keep a block's nullifiers and move the cursor, in one transaction; returns our rows that it
        confirmed.
        """
        ...


class BlockFollower:
    """The block follower.

    Args:
        mine: whether this host reads the history; where several share a database, one does.
        on_block: called with each height that was reached, and when `arrived` becomes true.
        on_spent: called with the row ids of our shares that were confirmed, never with an empty list.

    Attributes:
        height: the newest height that was reached, None before the first.
        chain_time: the time (unix seconds) of the newest such block whose time is known, None before.
        history: reads the blocks below `height` that were passed over.
    """

    def __init__(
        self,
        store: BlockFollowerStore,
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
        self._tries = 0
        self._goal: int | None = None
        self._found: int | None = None
        self._wait_until = math.inf  # when dispatch stops waiting, monotonic; set with the first head
        self._began = asyncio.Event()
        self._wake = asyncio.Event()
        self._done: BlockHead | None = None  # the head up to which there was nothing left to do
        self._was_arrived = False
        self._heads_below = 0  # heads in a row that were far below the cursor
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
            on_spent=self._tell_spent,
            on_change=self._on_history,
        )
        endpoints.on_probe(self._look)

    @property
    def caught_up(self) -> bool:
        """Whether the head was reached when that was last checked. Before, nothing follows from a nullifier that was
        not seen.
        """
        return self._goal is not None and self.height is not None and self.height >= self._goal

    @property
    def arrived(self) -> bool:
        """Whether shares may be proven: all blocks up to the head found at the start are read, or that takes long.

        It is not the newest head: a slow machine could be behind that one for long.
        """
        if self._was_arrived:
            return True
        reached = self._found is not None and self.height is not None and self.height >= self._found
        return (reached and not self.history.blocks_left) or self._clock.monotonic() >= self._wait_until

    @property
    def stalled(self) -> int | None:
        """A height that no endpoint returns although it exists, None while all is well."""
        return self.history.stalled

    @property
    def disputed(self) -> int | None:
        """A height at which nodes show different reveals, None while there is none."""
        return self._quorum.disputed

    async def run(self) -> None:
        """Follow the chain for ever. On a new database it begins once the rounds were synced."""
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
            except Exception as error:  # whatever it is, the next try may go well, and nobody else confirms shares
                reason = str(error) if isinstance(error, HelperError) else repr(error)
                self._log.warning("blocks not followed", reason=reason, height=self.height)
                await self._clock.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)
                continue
            pause = 1.0
            if not moved:
                await self._wake.wait()

    async def _end_wait(self) -> None:
        """Wake what waits for `arrived` when the wait is over."""
        await self._began.wait()
        await self._clock.sleep(self._wait_until - self._clock.monotonic())
        self._check_arrived()

    def _look(self, head: BlockHead | None) -> None:
        """After a probe: mostly it shows the block that was applied last."""
        if head is not None and head != self._done:
            self._wake.set()

    async def step(self) -> bool:
        """Apply what there is to apply, at most a handful of blocks; False when there was nothing to do
        (yet).
        """
        head = self._endpoints.head
        if head is None or head == self._done:
            return False
        self._goal = head.height
        self._found = head.height if self._found is None else min(self._found, head.height)
        if not self._began.is_set():
            self._wait_until = self._clock.monotonic() + PATIENCE_SECONDS
            self._began.set()
        if self.height is None:
            self.height = await self._store.cursor()
            if self.height is None:
                return await self._begin(head.height)
            self._endpoints.bounds.floor = self.height
            await self.history.load()
        if self.height - head.height > SLACK_BLOCKS:
            return await self._check_cursor(head)
        self._heads_below = 0
        if head.height - self.height > LIVE_BLOCKS:
            await self._skip_to(head.height - OVERLAP)
            return True
        self._note_time()
        if self.height >= head.height:
            self._check_arrived()
            self._done = head
            return False
        return await self._apply(range(self.height + 1, min(self.height + IN_FLIGHT, head.height) + 1))

    async def _apply(self, heights: range) -> bool:
        """Fetch these blocks together and apply them in order, up to the first that could not be had."""
        blocks, problem = await self._source.fetch_leading(heights, thorough=self._tries >= TRIES // 2)
        for block in blocks:
            await self._take(block)
        if len(blocks) == len(heights):
            return True
        return await self._missing(heights[len(blocks)], problem) or bool(blocks)

    async def _take(self, results: BlockResults) -> None:
        confirmed = await self._store.apply_block(results.height, results.reveals, now=self._clock.now())
        self._tell_spent(confirmed)
        self._advance(results.height, results.time)
        if self.caught_up:
            self._tell_spent(await self._sent.look(results.height))

    def _advance(self, height: int, time: float | None = None) -> None:
        """The block at `height` was applied, or is recorded as unread."""
        self.height = height
        self._tries = 0
        self._note_time(time)
        self._was_arrived = self.arrived
        self.history.wake()
        self._on_block(height)

    def _tell_spent(self, confirmed: Collection[int]) -> None:
        if confirmed:
            self._on_spent(list(confirmed))

    def _note_time(self, time: float | None = None) -> None:
        """The newest block's time: its own where the source tells it, else what the heads told."""
        seen = time if time is not None or self.height is None else self._endpoints.time_at(self.height)
        if seen is not None:
            self.chain_time = max(seen, self.chain_time or seen)
            self._rounds.processed(self.chain_time, complete_from=self.history.complete_from)

    def _on_history(self) -> None:
        """The set of unread blocks has changed: rounds may be closed now, and shares proven."""
        if self.height is not None:
            self._note_time()
            self._check_arrived()

    def _check_arrived(self) -> None:
        if not self._was_arrived and self.arrived and self.height is not None:
            self._was_arrived = True
            self._on_block(self.height)

    async def _missing(self, height: int, problem: ChainError | None) -> bool:
        """A block that exists could not be had. It is left to the history reader if no node has it or after some
        attempts, so that later blocks are followed; True if it was.
        """
        if self._endpoints.usable:
            self._tries += 1
            if self._tries >= TRIES or isinstance(problem, HeightGoneError):
                await self._skip_to(height)
                return True
        if problem is not None:
            raise problem
        return False

    async def _begin(self, head: int) -> bool:
        """In a new database, start near the head; the blocks since the oldest open round's creation are unread."""
        if not self._rounds.synced:
            return False
        statuses = (RoundStatus.ACTIVE, RoundStatus.TALLYING)
        created = [known.created_at_height for known in self._rounds.all() if known.status in statuses]
        first = min(created, default=head + 1)
        await self._skip_to(min(head, max(head - OVERLAP, first - 1)), first=first)
        return True

    async def _check_cursor(self, head: BlockHead) -> bool:
        """The cursor is far above every node's head. Move it back once this was so for some blocks; True if it was.

        The blocks of all open rounds are read again then: which of them were passed over is not known. That is
        harmless, as a block may be applied twice.
        """
        assert self.height is not None
        self._done = head
        self._heads_below += 1
        if self._heads_below == 1:
            self._log.error(
                "cursor_above_chain", height=self.height, reason=f"the newest block of all nodes is {head.height}"
            )
        if self._heads_below < CURSOR_TRIES or not self._rounds.synced:
            return False
        created = [known.created_at_height for known in self._rounds.open()]
        target = max(0, head.height - OVERLAP)
        await self._store.move_back(target, first=min(created, default=target + 1))
        self._log.warning("cursor_moved_back", height=target, reason=f"it was {self.height}")
        self.height = target
        self._heads_below, self._done = 0, None
        await self.history.load()
        return True

    async def _skip_to(self, height: int, *, first: int = 0) -> None:
        await self._store.skip_to(height, first=first)
        await self.history.load()
        self._log.info("following blocks", height=height, unread=self.history.blocks_left)
        self._advance(height)
