"""Reads blocks that the block follower skipped, newest first, in the background.

It also reads the blocks of a rescan (`svote-helper chain rescan`).

The unread blocks are recorded in the database, so a restart resumes. A consensus RPC with a transaction index is
searched window by window; without one, blocks are fetched in small batches. A block on which two nodes do not agree
yet is held: it is tried again later, and the other blocks are read meanwhile. Blocks that every node has pruned are
skipped, and an error is logged.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from helper.chain.block_source import BlockSource
from helper.chain.catch_up import (
    CONCURRENT_BLOCKS,
    INDEX_LAG_BLOCKS,
    MAX_ATTEMPTS,
    is_thorough,
    next_history_read,
)
from helper.chain.copy_quorum import BlockNotAgreedError, Disputes
from helper.chain.models import BlockHead
from helper.chain.node_pool import NodePool
from helper.chain.rest_client import HeightPrunedError
from helper.chain.round_registry import RoundRegistry
from helper.chain.rpc_client import BlockResults, CountedNullifier
from helper.chain.sent_reveal_check import SentRevealCheck
from helper.errors import ChainError, HelperError
from helper.store.block_ranges import BlockRange, add_range, count_heights, remove_heights
from helper.store.rescan import Rescan
from helper.store.store import Store

SEARCH_BACKOFF_SECONDS: Final = 60.0
"""Backoff of searches on an RPC whose search failed."""
MAX_PAUSE_SECONDS: Final = 1.0
"""Maximum pause between two batches, in seconds."""
HOLD_SECONDS: Final = 5.0
"""Minimum seconds between two attempts at a held block, unless another node has reached it."""
MAX_HOLD_SECONDS: Final = 300.0
"""Maximum seconds between two attempts at a block that has been held for long."""
_MAX_RETRY_SECONDS: Final = 10.0

log = structlog.get_logger("helper.chain")


@dataclass(slots=True)
class _Hold:
    """A held block. Times are monotonic.

    Attributes:
        since: time of the first attempt.
        tried_at: time of the last attempt.
        copies: possible copies at the last attempt, see `_count_copies`.
    """

    since: float
    tried_at: float
    copies: int


class HistoryReader:
    """Reads unread blocks in the background.

    Args:
        store: stores the nullifiers and the unread blocks.
        rounds: the round registry; searches cover its open rounds.
        disputes: receives the heights on which nodes do not agree.
        sent_reveal_check: checks sent reveals by nullifier if blocks are missing on all nodes.
        is_leader: whether this host reads; with a shared database, only one host does.
        is_awaited: whether dispatch waits for the history; if not, the reader pauses after each batch for as long as
            the batch took.
        on_confirmed: called with the ids of confirmed rows, never with an empty list.
        on_change: called when the set of unread blocks has changed.

    Attributes:
        stalled_height: an unread height that no node returns although it exists, None if there is none.
    """

    def __init__(
        self,
        store: Store,
        node_pool: NodePool,
        rounds: RoundRegistry,
        *,
        disputes: Disputes,
        sent_reveal_check: SentRevealCheck,
        is_leader: Callable[[], bool],
        is_awaited: Callable[[], bool],
        on_confirmed: Callable[[Collection[int]], None],
        on_change: Callable[[], None],
    ) -> None:
        self._store = store
        self._node_pool = node_pool
        self._rounds = rounds
        self._clock = node_pool.clock
        self._disputes = disputes
        self._source = BlockSource(node_pool, disputes, uses_backoff=False)
        self._sent_reveal_check = sent_reveal_check
        self._is_leader = is_leader
        self._is_awaited = is_awaited
        self._on_confirmed = on_confirmed
        self._on_change = on_change
        self._ranges: list[BlockRange] = []  # including those of the rescan
        self._rescan: Rescan | None = None
        self._holds: dict[int, _Hold] = {}  # by height
        self._failures = 0
        self._search_backoff_until: dict[str, float] = {}  # monotonic end of the search backoff, by node
        self._wake = asyncio.Event()
        self.stalled_height: int | None = None
        node_pool.subscribe_to_probes(self._on_probe)

    @property
    def unread_count(self) -> int:
        """Number of unread blocks."""
        return count_heights(self._ranges)

    @property
    def complete_from(self) -> int:
        """The lowest height from which every block up to the follower's height has been read."""
        return self._ranges[-1][1] + 1 if self._ranges else 0

    def hold(self, height: int) -> None:
        """Try a block on which nodes do not agree again later."""
        now = self._clock.monotonic()
        hold = self._holds.setdefault(height, _Hold(now, now, 0))
        hold.tried_at, hold.copies = now, self._count_copies(height)

    def _count_copies(self, height: int) -> int:
        """Number of nodes in sync that have reached this height."""
        return sum(node.height >= height for node in self._node_pool.in_sync_nodes)

    def _held_heights(self) -> list[int]:
        """The heights of blocks that are not tried now."""
        now = self._clock.monotonic()
        return [
            height
            for height, hold in self._holds.items()
            if now - hold.tried_at < min(max(HOLD_SECONDS, (hold.tried_at - hold.since) / 4), MAX_HOLD_SECONDS)
            and self._count_copies(height) <= hold.copies
        ]

    def wake(self) -> None:
        """Wake the reader: the follower has moved, or another host has skipped blocks."""
        self._wake.set()

    async def load_ranges(self) -> None:
        """Load the unread blocks from the database. Another host may have read some."""
        ranges = await self._store.list_unread_blocks()
        self._rescan = await self._store.get_rescan()
        for first, last in () if self._rescan is None else self._rescan.unread:
            ranges = add_range(ranges, first, last)
        if ranges != self._ranges:
            self._ranges = ranges
            self._on_change()

    async def run(self) -> None:
        """Read until cancelled."""
        pause = 1.0
        while True:
            self._wake.clear()
            started_at = self._clock.monotonic()
            try:
                progressed = await self.read_next_blocks()
            except Exception as error:  # The next attempt may succeed, and nothing else reads these blocks.
                reason = str(error) if isinstance(error, HelperError) else repr(error)
                log.warning("history_not_read", reason=reason, count=self.unread_count)
                await self._clock.sleep(pause)
                pause = min(_MAX_RETRY_SECONDS, pause * 2)
                continue
            pause = 1.0
            if not progressed:
                await self._wake.wait()
            elif not self._is_awaited():
                # Nothing waits for these blocks, so half of the time is left for requests, proofs and other node calls.
                await self._clock.sleep(min(MAX_PAUSE_SECONDS, self._clock.monotonic() - started_at))

    def _on_probe(self, head: BlockHead | None) -> None:
        if head is not None and self._ranges:
            self._wake.set()

    async def read_next_blocks(self) -> bool:
        """Read one window or batch of the newest unread blocks.

        Returns False if there is none, or none can be read now.
        """
        await self.load_ranges()
        head = self._node_pool.head
        rescan = self._rescan if self._rescan is not None and self._rescan.unread else None
        held = self._held_heights()
        unread = remove_heights(self._ranges, held)
        rescanned = [] if rescan is None else remove_heights(rescan.unread, held)
        read = next_history_read(unread, self._failures, rescan=rescanned)
        if read is None or head is None or self._node_pool.in_sync_count < self._node_pool.needed:
            return False
        if not self._is_leader():
            return False
        last = read.batch[0]
        if read.window is not None:
            found = await self._search(read.window[0], last)
            if found is not None:
                await self._apply(remove_heights([(read.window[0], last)], found[1]), found[0])
                return True
        results = await self._source.fetch_all(read.batch, always_try_rest=is_thorough(self._failures))
        ranges, spent = list[BlockRange](), list[CountedNullifier]()
        for height, result in zip(read.batch, results, strict=True):
            if isinstance(result, BlockResults):
                ranges = add_range(ranges, height, height)
                spent = [*result.reveals, *spent]
            elif self._is_not_agreed(height, result):
                self.hold(height)
            elif height == last:
                return await self._handle_missing(last, result)
            else:
                break
        await self._apply(ranges, spent, rescan if read.is_rescan else None)
        return True

    def _is_not_agreed(self, height: int, problem: ChainError | None) -> bool:
        """Whether nodes do not agree on a block yet, or some of them have not reached it."""
        is_pending = problem is None and any(node.height < height for node in self._node_pool.in_sync_nodes)
        may_exist = isinstance(problem, HeightPrunedError) and not self._are_all_usable
        return is_pending or may_exist or isinstance(problem, BlockNotAgreedError)

    @property
    def _are_all_usable(self) -> bool:
        """Whether every service of every configured node can be asked."""
        pool = self._node_pool
        rpcs = sum(node.rpc is not None for node in pool.nodes)
        return len(pool.usable_nodes) == len(pool.nodes) and len(pool.usable_rpc_nodes) == rpcs

    async def _apply(
        self, ranges: Sequence[BlockRange], spent: Sequence[CountedNullifier], rescan: Rescan | None = None
    ) -> None:
        number = None if rescan is None else rescan.number
        for first, last in ranges:
            confirmed = await self._store.apply_unread(first, last, spent, now=self._clock.now(), rescan=number)
            self._drop_holds(first, last)
            spent = ()  # stored with the first range; the reveals of a failed read are found again
            if confirmed:
                self._on_confirmed(confirmed)
        if ranges:
            await self._note_progress(ranges[-1][1])

    def _drop_holds(self, first: int, last: int) -> None:
        dropped = [height for height in self._holds if first <= height <= last]
        for height in dropped:
            del self._holds[height]
        # A node has probably recovered, so the nearest held blocks are tried too, and so on.
        nearest = sorted(self._holds, key=lambda height: abs(height - last)) if dropped else []
        for height in nearest[:CONCURRENT_BLOCKS]:
            self._holds[height].tried_at = -math.inf

    async def _note_progress(self, height: int) -> None:
        """Update the state after the blocks at `height` and just below it were read or abandoned."""
        self._failures = 0
        if self.stalled_height is not None:
            log.info("history_resumed", height=height)
            self.stalled_height = None
        was_rescanning = self._rescan is not None and self._rescan.unread
        await self.load_ranges()
        if was_rescanning and self._rescan is not None and not self._rescan.unread:
            log.info("rescan_finished", height=height, counts=self._rescan.counts)

    async def _search(self, first: int, last: int) -> tuple[list[CountedNullifier], list[int]] | None:
        """Find all reveals of open rounds in these blocks by an RPC's index.

        Returns the reveals and the heights of held blocks, or None if no RPC could search.
        """
        if not self._rounds.is_synced:
            return None
        for node in self._node_pool.usable_rpc_nodes:
            is_in_backoff = self._clock.monotonic() < self._search_backoff_until.get(node.name, 0.0)
            if node.rpc is None or is_in_backoff or node.height < last + INDEX_LAG_BLOCKS:
                continue
            try:
                reveals = [
                    (height, (known.round_id, nullifier))
                    for known in self._rounds.open_rounds()
                    for height, nullifier in await node.rpc.search_reveals(known.round_id, first, last)
                ]
            except ChainError as error:  # It may have no index; its blocks are still valid.
                self._search_backoff_until[node.name] = self._clock.monotonic() + SEARCH_BACKOFF_SECONDS
                log.info("history_search_failed", endpoint=node.name, reason=str(error))
                continue
            if self._node_pool.needed > 1:
                return await self._read_blocks(sorted({height for height, _ in reveals}))
            return [spent for _, spent in reveals], []
        return None

    async def _read_blocks(self, heights: Sequence[int]) -> tuple[list[CountedNullifier], list[int]] | None:
        """Read the reveals of the blocks found by a search.

        Returns the reveals and the heights of held blocks, or None if a block is not available yet.
        """
        spent, held = list[CountedNullifier](), list[int]()
        for start in range(0, len(heights), CONCURRENT_BLOCKS):
            batch = heights[start : start + CONCURRENT_BLOCKS]
            for height, result in zip(batch, await self._source.fetch_all(batch), strict=True):
                if isinstance(result, BlockResults):
                    spent += result.reveals
                elif self._is_not_agreed(height, result):
                    self.hold(height)
                    held.append(height)
                elif result is None:
                    return None
                else:
                    raise result
        return spent, held

    async def _handle_missing(self, height: int, error: ChainError | None) -> bool:
        """Handle an unavailable block. Returns whether it was skipped because every node has pruned it."""
        if self._node_pool.has_usable_node:  # otherwise the attempt does not count
            self._failures += 1
            if self._failures >= MAX_ATTEMPTS and self.stalled_height != height:
                self.stalled_height = height
                log.error("block_missing", height=height, reason=str(error or "no node has this block yet"))
            if isinstance(error, HeightPrunedError) and self._are_all_usable:
                await self._skip_missing(height)
                return True
        if error is not None:
            raise error
        return False

    async def _skip_missing(self, height: int) -> None:
        """Skip all unread blocks up to `height`, as nodes prune their oldest blocks first."""
        skipped = [(first, min(last, height)) for first, last in self._ranges if first <= height]
        log.error(
            "blocks_missed",
            height=skipped[0][0],
            count=count_heights(skipped),
            reason="every node has pruned these blocks; reveals by other helpers in them remain unknown;"
            " reveals sent by this helper are checked by nullifier",
            advice="Configure a node that retains more blocks than the longest downtime, or add a node with an RPC.",
        )
        confirmed = await self._sent_reveal_check.record_missed()
        if confirmed:
            self._on_confirmed(confirmed)
        await self._store.abandon_unread(height)
        self._drop_holds(0, height)
        self._disputes.forget_heights(height)
        await self._note_progress(height)
