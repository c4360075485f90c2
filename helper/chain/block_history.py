"""Reads blocks that the block follower skipped, newest first, in the background.

The unread blocks are recorded in the database, so a restart resumes. A consensus RPC with a transaction index is
searched for whole windows of blocks; without one, blocks are fetched in small batches. Blocks that no node has any more
are skipped, and an error is logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final

import structlog

from helper.chain.block_source import BlockSource
from helper.chain.catch_up import IN_FLIGHT, OVERLAP, is_thorough, missing_in_history, next_history_read
from helper.chain.copy_quorum import CopyQuorum
from helper.chain.missed_blocks import MissedBlocksCheck
from helper.chain.models import BlockHead
from helper.chain.node_pool import NodePool
from helper.chain.round_registry import RoundRegistry
from helper.chain.rpc_client import Spent
from helper.clock import Clock
from helper.errors import ChainError, HelperError
from helper.store.block_ranges import BlockRange, count_heights
from helper.store.store import Store

UNINDEXED_SECONDS: Final = 60.0
"""Backoff of searches on an RPC whose search failed."""
LONGEST_REST: Final = 1.0
"""Longest pause between two batches, in seconds."""
_LONGEST_PAUSE: Final = 10.0

log = structlog.get_logger("helper.chain")


class HistoryReader:
    """Reads unread blocks in the background.

    Args:
        store: stores the nullifiers and the unread blocks.
        endpoints: the node pool.
        rounds: the round registry; searches cover its open rounds.
        clock: source of time.
        quorum: decides whether one node's copy of a block is enough.
        sent: checks sent reveals by nullifier if blocks are missing on all nodes.
        mine: whether this host reads; of several hosts on one database, one does.
        hurry: whether dispatch waits for the history; if not, the reader pauses as long as it works.
        on_spent: called with the ids of confirmed rows, never with an empty list.
        on_change: called when the set of unread blocks has changed.

    Attributes:
        stalled: an unread height that no node returns although it exists, None if there is none.
    """

    def __init__(
        self,
        store: Store,
        endpoints: NodePool,
        rounds: RoundRegistry,
        *,
        clock: Clock,
        quorum: CopyQuorum,
        sent: MissedBlocksCheck,
        mine: Callable[[], bool],
        hurry: Callable[[], bool],
        on_spent: Callable[[Collection[int]], None],
        on_change: Callable[[], None],
    ) -> None:
        self._store = store
        self._endpoints = endpoints
        self._rounds = rounds
        self._clock = clock
        self._quorum = quorum
        self._source = BlockSource(endpoints, quorum, rests=False)
        self._sent = sent
        self._mine = mine
        self._hurry = hurry
        self._on_spent = on_spent
        self._on_change = on_change
        self._ranges: list[BlockRange] = []
        self._failures = 0
        self._unindexed: dict[str, float] = {}  # monotonic end of the search backoff, by node
        self._wake = asyncio.Event()
        self.stalled: int | None = None
        endpoints.on_probe(self._on_probe)

    @property
    def blocks_left(self) -> int:
        """Number of unread blocks."""
        return count_heights(self._ranges)

    @property
    def complete_from(self) -> int:
        """The lowest height from which every block up to the follower's is read."""
        return self._ranges[-1][1] + 1 if self._ranges else 0

    def wake(self) -> None:
        """Wake the reader: the follower has moved, or another host has skipped blocks."""
        self._wake.set()

    async def load(self) -> None:
        """Load the unread blocks from the database. Another host may have read some."""
        ranges = await self._store.unread_blocks()
        if ranges != self._ranges:
            self._ranges = ranges
            self._on_change()

    async def run(self) -> None:
        """Read until cancelled."""
        pause = 1.0
        while True:
            self._wake.clear()
            began = self._clock.monotonic()
            try:
                progressed = await self.step()
            except Exception as error:  # The next attempt may succeed, and nothing else reads these blocks.
                reason = str(error) if isinstance(error, HelperError) else repr(error)
                log.warning("history_not_read", reason=reason, count=self.blocks_left)
                await self._clock.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)
                continue
            pause = 1.0
            if not progressed:
                await self._wake.wait()
            elif not self._hurry():
                # Nothing waits for these blocks, so leave half of the time to requests, proofs and other node work.
                await self._clock.sleep(min(LONGEST_REST, self._clock.monotonic() - began))

    def _on_probe(self, head: BlockHead | None) -> None:
        if head is not None and self._ranges:
            self._wake.set()

    async def step(self) -> bool:
        """Read one window or batch of the newest unread blocks; False if there is none, or none can be read now."""
        await self.load()
        head = self._endpoints.head
        read = next_history_read(self._ranges, self._failures)
        if read is None or head is None or not self._mine():
            return False
        last = read.batch[0]
        if read.window is not None:
            spent = await self._search(read.window[0], last)
            if spent is not None:
                await self._apply(read.window[0], last, spent)
                return True
        blocks, problem = await self._source.fetch_leading(read.batch, thorough=is_thorough(self._failures))
        if not blocks:
            return await self._on_missing(last, problem)
        spent = [reveal for block in reversed(blocks) for reveal in block.reveals]
        await self._apply(blocks[-1].height, last, spent)
        return True

    async def _apply(self, first: int, last: int, spent: Sequence[Spent]) -> None:
        confirmed = await self._store.apply_unread(first, last, spent, now=self._clock.now())
        self._failures = 0
        if self.stalled is not None:
            log.info("history_resumed", height=last)
            self.stalled = None
        if confirmed:
            self._on_spent(confirmed)
        await self.load()

    async def _search(self, first: int, last: int) -> list[Spent] | None:
        """All reveals of open rounds in these blocks by an RPC's index, None if no RPC could search."""
        if not self._rounds.synced:
            return None
        for endpoint in self._endpoints.fresh_rpc:
            resting = self._clock.monotonic() < self._unindexed.get(endpoint.name, 0.0)
            if endpoint.rpc is None or resting or endpoint.height < last + OVERLAP:
                continue
            try:
                reveals = [
                    (height, (known.round_id, nullifier))
                    for known in self._rounds.open()
                    for height, nullifier in await endpoint.rpc.tx_search_reveals(known.round_id, first, last)
                ]
            except ChainError as error:  # It may have no index; its blocks are still valid.
                self._unindexed[endpoint.name] = self._clock.monotonic() + UNINDEXED_SECONDS
                log.info("history_search_failed", endpoint=endpoint.name, reason=str(error))
                continue
            if self._quorum.needs_two:
                return await self._read_blocks(sorted({height for height, _ in reveals}))
            return [spent for _, spent in reveals]
        return None

    async def _read_blocks(self, heights: Sequence[int]) -> list[Spent] | None:
        """The reveals of the blocks found by a search, as two nodes show them, None while one is not known."""
        spent: list[Spent] = []
        for start in range(0, len(heights), IN_FLIGHT):
            batch = heights[start : start + IN_FLIGHT]
            blocks, problem = await self._source.fetch_leading(batch)
            if problem is not None:
                raise problem
            if len(blocks) < len(batch):
                return None
            spent += [reveal for block in blocks for reveal in block.reveals]
        return spent

    async def _on_missing(self, height: int, problem: ChainError | None) -> bool:
        """Handle an unavailable block. Returns whether it was skipped because no node has it any more."""
        rpcs = sum(endpoint.rpc is not None for endpoint in self._endpoints.all)
        missing = missing_in_history(
            problem,
            self._failures,
            is_usable=self._endpoints.usable,
            all_asked=len(self._endpoints.fresh) == len(self._endpoints.all) and len(self._endpoints.fresh_rpc) == rpcs,
        )
        self._failures = missing.failures
        if missing.is_stalled and self.stalled != height:
            self.stalled = height
            log.error("block_missing", height=height, reason=str(problem or "no node has this block yet"))
        if missing.is_skipped:
            await self._skip_missing(height)
            return True
        if problem is not None:
            raise problem
        return False

    async def _skip_missing(self, height: int) -> None:
        """Skip all unread blocks up to `height`, as nodes prune their oldest blocks first."""
        skipped = [(first, min(last, height)) for first, last in self._ranges if first <= height]
        log.error(
            "blocks_missed",
            height=skipped[0][0],
            count=count_heights(skipped),
            reason="no node has these blocks any more; reveals of other helpers in them stay unknown, reveals sent by"
            " this helper are checked by nullifier",
            advice="Configure a node that retains more blocks than the longest downtime, or add a node with an RPC.",
        )
        confirmed = await self._sent.record_missed(height)
        if confirmed:
            self._on_spent(confirmed)
        await self._apply(skipped[0][0], height, ())
