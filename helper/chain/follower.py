"""Follows the chain: reads the ledger's unread blocks and stores the counted nullifiers.

Only blocks confirm a share. Two loops read them, so that old blocks never delay current confirmations: one the blocks
above the greatest height read, one the gaps below it, newest first. A third loop asks about reveals that no block has
confirmed: there may be thousands, and a node may take seconds for each answer. A gap after downtime, a rescan and a
block that could not be read are alike. A block on which too few nodes agree is deferred; the others are read meanwhile.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from helper.chain.agreement import Pruned, agreed_fact
from helper.chain.block_reader import CONCURRENT_BLOCKS, BlockReader, BlockReading
from helper.chain.broadcast_outcome import Verdict
from helper.chain.chain_data import BlockHead
from helper.chain.node import Node
from helper.chain.node_pool import NodePool, gather_limited
from helper.chain.reveal_transaction import shows_spent
from helper.chain.round_registry import RoundRegistry
from helper.chain.rpc_client import CountedNullifier
from helper.core.log_limits import LoggedProblem
from helper.errors import ChainError, ChainUnavailable, HelperError
from helper.store import blocks
from helper.store.ledger import BlockRange, Ledger, add_range, count_heights, find_unread, is_read, next_heights
from helper.store.messages import NO_LIMIT, SentReveal
from helper.store.models import SpentNullifier
from helper.store.store import Store

MAX_START_WAIT_SECONDS: Final = 3.0
"""Maximum seconds that dispatch waits at startup for the blocks since the last shutdown.

Shares that were confirmed in the meantime are then not proven again. A due share does not wait longer: a second reveal
is harmless, a missed one is not.
"""
FEW_BLOCKS: Final = 64
"""Number of unread blocks that are read without pauses."""
STALLED_SECONDS: Final = 30.0
"""Seconds after which a block that cannot be read is reported."""
RESET_BLOCKS: Final = 100
"""The chain was reset if the agreed height stays this far below the greatest height read."""
RESET_HEADS: Final = 10
"""Consecutive heads that must be that low."""
MAX_DEFERRED: Final = 1024
"""Blocks that are retried. With more, no older block is read until some of them are."""
MIN_RETRY_SECONDS: Final = 1.0
"""Minimum seconds between two attempts at a block; later a quarter of the time since the first."""
MAX_RETRY_SECONDS: Final = 120.0
"""Maximum seconds between two attempts at a block."""
CHECK_INTERVAL_BLOCKS: Final = 10
"""Interval, in blocks, of checks of reveals that a node reports as spent although no block contained them."""
_MAX_PAUSE_SECONDS: Final = 1.0
_MAX_ERROR_PAUSE_SECONDS: Final = 10.0
_PAGE_SIZE: Final = 500

log = structlog.get_logger("helper.chain")


@dataclass(slots=True)
class _Deferral:
    """A block that could not be read. Times are monotonic.

    Attributes:
        since: time of the first attempt.
        retry_at: time of the next attempt.
        is_disputed: whether nodes reported different reveals at the last attempt.
        late_reads: number of attempts in which a node was late.
    """

    since: float
    retry_at: float
    is_disputed: bool = False
    late_reads: int = 0
    reason: str = ""


async def _is_spent(node: Node, reveal: SentReveal, *, is_rpc: bool) -> bool:
    """Ask a node's RPC for the chain's state, or its REST API for the result of the transaction."""
    if is_rpc:
        assert node.rpc is not None
        return await node.rpc.is_spent(reveal.round_id, reveal.nullifier)
    result = await node.client.tx(reveal.row.tx_hash)
    return result is not None and shows_spent(result)


@dataclass(eq=False, repr=False)
class BlockFollower:
    """Applies agreed blocks to the store.

    Args:
        is_leader: whether this host reads the gaps; with a shared database, only one host does.
        on_block: called with the greatest height read when it changes, and when `is_ready` becomes true.
        on_confirmed: called with the row ids of confirmed shares, never with an empty list.

    Attributes:
        counted_height: the greatest height read in which a reveal was counted, 0 before the first since the start.
    """

    store: Store
    node_pool: NodePool
    rounds: RoundRegistry
    is_leader: Callable[[], bool] = lambda: True
    on_block: Callable[[int], None] = lambda _height: None
    on_confirmed: Callable[[list[int]], None] = lambda _ids: None

    def __post_init__(self) -> None:
        self._reader = BlockReader(self.node_pool, lambda nullifiers: self.store.run(blocks.list_unspent, nullifiers))
        self._clock = self.node_pool.clock
        self._ledger: Ledger | None = None
        self._deferred: dict[int, _Deferral] = {}
        self._dispute, self._stall = LoggedProblem(), LoggedProblem()
        self._first_head_height: int | None = None
        self._wait_until = math.inf  # monotonic time at which dispatch stops waiting; set with the first head
        self._new_head, self._new_gap, self._new_check = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._was_ready = False
        self._reported_height: int | None = None
        self._in_sync_count = 0
        self._low_heads: set[int] = set()  # consecutive heads far below the ledger
        self._checked_height = 0  # of the last check of sent reveals
        self.counted_height = 0
        self.node_pool.subscribe_to_probes(self._on_probe)

    async def find_counted(self, reveals: Sequence[SentReveal]) -> list[SpentNullifier]:
        """Return the nullifiers of those messages of another machine that nodes report as counted.

        Only due messages are queried, whatever the other machine has done: a request contains the nullifier.
        """
        now_ms = self._clock.now() * 1000
        return await self._find_counted([reveal for reveal in reveals if reveal.due_ms <= now_ms])

    # ------------------------------------------------------------------ state

    @property
    def height(self) -> int | None:
        """The greatest height read, None before the first start."""
        return None if self._ledger is None else self._ledger.top

    @property
    def gap_count(self) -> int:
        """Number of unread blocks below `height`."""
        return 0 if self._ledger is None else count_heights(self._ledger.unread)

    @property
    def is_caught_up(self) -> bool:
        """Whether the newest agreed block was read."""
        head = self.node_pool.head
        return head is not None and self.height is not None and self.height >= head.height

    @property
    def is_ready(self) -> bool:
        """Whether shares may be proven.

        True once all blocks up to the first head are read, or `MAX_START_WAIT_SECONDS` have passed. The first head is
        used because a slow machine could stay behind the newest one for a long time.
        """
        if self._was_ready:
            return True
        ledger, first_head = self._ledger, self._first_head_height
        is_complete = ledger is not None and first_head is not None and not find_unread(ledger, 0, first_head)
        return is_complete or self._clock.monotonic() >= self._wait_until

    @property
    def stalled_height(self) -> int | None:
        """The lowest height that could not be read for long without a dispute, None if there is none."""
        limit = self._clock.monotonic() - STALLED_SECONDS
        stalled = [height for height, block in self._deferred.items() if block.since <= limit and not block.is_disputed]
        return min(stalled, default=None)

    @property
    def disputed_height(self) -> int | None:
        """The lowest height at which nodes report different reveals, None if there is none."""
        return min((height for height, block in self._deferred.items() if block.is_disputed), default=None)

    def wake(self) -> None:
        """Read the ledger again: an operator or another host has changed it."""
        self._new_head.set()
        self._new_gap.set()

    def _on_probe(self, head: BlockHead | None) -> None:
        count = len(self.node_pool.in_sync_nodes)
        if count > self._in_sync_count:  # a node that has returned may have what the others lack
            self._retry(self._deferred)
        self._in_sync_count = count
        if head is not None and (self._ledger is None or head.height != self._ledger.top or not self._was_ready):
            self._new_head.set()
        if self.gap_count:
            self._new_gap.set()
        if not self._was_ready:
            self._note_change()

    # ------------------------------------------------------------------ loops

    async def run(self) -> None:
        """Follow the chain until cancelled. On a new database it starts after the first sync of the rounds."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self.read_gaps, self._new_gap, shares_time=True))
            group.create_task(self._repeat(self.check_sent, self._new_check))
            await self._repeat(self.read_new, self._new_head)

    async def _repeat(
        self, read: Callable[[], Awaitable[bool]], wake: asyncio.Event, *, shares_time: bool = False
    ) -> None:
        """Call `read` until it has nothing to read, and again at each wake.

        If it shares its time, it pauses after each batch for as long as that took, unless dispatch waits for it or only
        few blocks are left.
        """
        pause, problem = 1.0, LoggedProblem()
        while True:
            wake.clear()
            started_at = self._clock.monotonic()
            try:
                has_read = await read()
            except Exception as error:  # The next attempt may succeed, and nothing else confirms shares.
                reason = str(error) if isinstance(error, HelperError) else repr(error)
                if problem.note(reason):
                    log.warning("block_follow_failed", reason=reason, height=self.height)
                await self._clock.sleep(pause)
                pause = min(_MAX_ERROR_PAUSE_SECONDS, pause * 2)
                continue
            if problem.clear():
                log.info("block_follow_recovered", height=self.height)
            pause = 1.0
            if not has_read:
                await wake.wait()  # each probe sets it while a block is unread
            elif shares_time and self.is_ready and self.gap_count > FEW_BLOCKS:
                await self._clock.sleep(min(_MAX_PAUSE_SECONDS, self._clock.monotonic() - started_at))

    async def read_new(self) -> bool:
        """Read the newest blocks above the greatest height read. Returns whether a block was read."""
        head = self.node_pool.head
        if head is None:
            return False
        if self._first_head_height is None:
            self._wait_until = self._clock.monotonic() + MAX_START_WAIT_SECONDS
        self._first_head_height = min(head.height, self._first_head_height or head.height)
        if self._ledger is not None and self._ledger.top == head.height:
            return False  # changes of others are loaded with the gaps
        ledger = await self._load_ledger()
        if not self._has_agreed_head:
            return False
        if ledger is None:
            return await self._begin(head)
        if await self._move_back_after_reset(ledger, head):
            return True
        return await self._read(ledger, ledger.top + 1, head.height)

    async def read_gaps(self) -> bool:
        """Read the newest unread blocks below the greatest height read. Returns whether a block was read."""
        ledger = await self._load_ledger()
        if ledger is None or not self.is_leader() or not self._has_agreed_head:
            return False
        return await self._read(ledger, 0 if len(self._deferred) < MAX_DEFERRED else min(self._deferred), ledger.top)

    async def check_sent(self) -> bool:
        """Confirm sent reveals that nodes report as spent, if that is due. Returns False: a block causes the next."""
        self._report_confirmed(await self._check_spent(self.height or 0))
        return False

    @property
    def _has_agreed_head(self) -> bool:
        """Whether enough nodes are in sync to agree on anything."""
        return len(self.node_pool.in_sync_nodes) >= self.node_pool.needed and self.node_pool.has_usable_node

    async def _load_ledger(self) -> Ledger | None:
        """Load the ledger. Another host or an operator may have changed it."""
        before, self._ledger = self._ledger, await self.store.get_ledger()
        if self._ledger is not None and self._ledger != before:
            for height in [height for height in self._deferred if is_read(self._ledger, height, height)]:
                del self._deferred[height]
            if before is not None and self._ledger.top < before.top:  # this host or another one has moved it back
                self.rounds.note_reset(self._ledger.top)
        self._note_change()
        return self._ledger

    async def _begin(self, head: BlockHead) -> bool:
        """Start the ledger of a new database at the oldest open round."""
        if not self.rounds.is_synced:
            return False
        await self.store.run(blocks.begin_ledger, min(self._oldest_round_height(head.height + 1), head.height + 1))
        return True

    def _oldest_round_height(self, default: int) -> int:
        return min((known.created_at_height for known in self.rounds.open_rounds()), default=default)

    async def _move_back_after_reset(self, ledger: Ledger, head: BlockHead) -> bool:
        """Forget blocks far above the agreed height if it stays low. Returns whether the ledger has changed.

        Enough nodes must be that low: a false one and one that is right agree on the lower of their heights. Which
        blocks of the open rounds were read on the chain of before is not known, so all are read again.
        """
        pool, limit = self.node_pool, ledger.top - RESET_BLOCKS
        is_low = agreed_fact({name: each.height < limit for name, each in pool.in_sync_heads.items()}, pool.needed)
        if head.height >= limit or not is_low:
            self._low_heads.clear()
            return False
        if not self._low_heads:
            reason = f"the newest block of the nodes is {head.height}"
            advice = "If the chain was not reset, check the nodes: `svote-helper doctor --skip-proof`."
            log.error("cursor_above_chain", height=ledger.top, reason=reason, advice=advice)
        self._low_heads.add(head.height)
        if len(self._low_heads) < RESET_HEADS or not self.rounds.is_synced:
            return False
        await self.store.run(blocks.move_back, head.height, first=self._oldest_round_height(head.height + 1))
        log.warning("cursor_moved_back", height=head.height, reason=f"was {ledger.top}")
        self._low_heads.clear()
        return True

    # ------------------------------------------------------------------ blocks

    async def _read(self, ledger: Ledger, first: int, last: int) -> bool:
        """Read some unread blocks between these heights, newest first. Returns whether a block was read."""
        is_new = first > ledger.top
        retries = {height: block.retry_at for height, block in self._deferred.items()}
        heights = next_heights(ledger, (first, last), retries, self._clock.monotonic(), CONCURRENT_BLOCKS)

        async def read_one(height: int) -> BlockReading:
            block = self._deferred.get(height)
            late_reads = 0 if block is None else block.late_reads
            return await self._reader.read(
                height, starts_backoff=is_new, asks_both=block is not None, late_reads=late_reads
            )

        readings = dict(zip(heights, await gather_limited(heights, read_one, CONCURRENT_BLOCKS), strict=True))
        agreed, spent, pruned = list[BlockRange](), set[CountedNullifier](), 0
        ignored = frozenset[CountedNullifier]().union(*(reading.ignored for reading in readings.values()))
        for height, reading in readings.items():
            if isinstance(reading.reveals, Pruned):
                pruned = max(pruned, height)
            elif reading.reveals is None:
                self._defer(height, reading)
            else:
                agreed = add_range(agreed, height, height)
                spent |= reading.reveals
                self.counted_height = max(self.counted_height, height if reading.reveals else 0)
        if agreed:
            # In an order that says nothing about where a nullifier was found.
            confirmed = await self.store.run(blocks.apply_blocks, agreed, sorted(spent), ignored)
            self._report_confirmed(confirmed)
        if pruned:
            await self._give_up(pruned)
        if agreed or pruned:
            await self._note_read(ledger, [height for height in heights if readings[height].reveals is not None])
        if agreed and is_new:
            self._new_check.set()
        self._report_problems(readings)
        return bool(agreed or pruned)

    async def _note_read(self, before: Ledger, heights: Sequence[int]) -> None:
        """Reload the ledger after blocks were read or given up."""
        retried = [height for height in heights if self._deferred.pop(height, None) is not None]
        if retried:  # a node has probably recovered, so the nearest deferred blocks are tried too, and so on
            self._retry(sorted(self._deferred, key=lambda height: abs(height - retried[0]))[:CONCURRENT_BLOCKS])
        ledger = await self._load_ledger()
        rescan = None if ledger is None else ledger.rescan
        if ledger is not None and rescan is not None:
            was_left, is_left = (find_unread(each, rescan.first, rescan.last) for each in (before, ledger))
            if was_left and not is_left:
                counts = {"added": rescan.added, "confirmed": rescan.confirmed}
                log.info("rescan_finished", height=rescan.last, counts=counts)
        if self.gap_count:
            self._new_gap.set()

    def _defer(self, height: int, reading: BlockReading) -> None:
        now = self._clock.monotonic()
        block = self._deferred.setdefault(height, _Deferral(now, now))
        block.retry_at = now + min(max(MIN_RETRY_SECONDS, (now - block.since) / 4), MAX_RETRY_SECONDS)
        block.is_disputed, block.reason = reading.is_disputed, reading.reason
        block.late_reads += reading.is_late

    def _retry(self, heights: Iterable[int]) -> None:
        for height in heights:
            self._deferred[height].retry_at = -math.inf

    async def _give_up(self, height: int) -> None:
        """Record the unread blocks up to `height` as read, as nodes prune their oldest blocks first."""
        ledger = await self.store.get_ledger()
        unread = () if ledger is None else find_unread(ledger, 0, height)
        if not unread:
            return
        log.error(
            "blocks_missed",
            height=unread[0][0],
            count=count_heights(unread),
            reason="every node has pruned these blocks; reveals by other helpers in them remain unknown;"
            " reveals sent by this helper are checked by nullifier",
            advice="Configure a node that retains more blocks than the longest downtime, or add a node with an RPC.",
        )
        # Before anything is sent again: a new proof is another transaction.
        confirmed = await self._confirm(
            lambda reveal: reveal.row.last_outcome != Verdict.UNAVAILABLE.name, must_respond=True
        )
        self._report_confirmed(confirmed)
        await self.store.run(blocks.give_up_blocks, height)

    # ------------------------------------------------------------------ sent reveals

    async def _confirm(
        self, is_selected: Callable[[SentReveal], bool], *, sent_by: int = NO_LIMIT, must_respond: bool = False
    ) -> list[int]:
        """Confirm the selected reveals, first sent by this height, that enough nodes report as counted.

        Normally only blocks confirm a share. After blocks were missed, nodes are queried for the nullifiers of sent
        reveals. These are public, so the requests reveal nothing; nullifiers of unsent shares are never included.

        Returns:
            The ids of confirmed rows.

        Raises:
            ChainUnavailable: with `must_respond`, if too few nodes responded.
        """
        confirmed: list[int] = []
        after = 0
        while page := await self.store.list_unconfirmed(limit=_PAGE_SIZE, after_id=after, sent_by=sent_by):
            after = page[-1].share_id
            selected = [reveal for reveal in page if reveal.row.sends and is_selected(reveal)]
            counted = await self._find_counted(selected, must_respond=must_respond)
            if counted:
                confirmed += await self.store.run(blocks.add_spent, counted)
        return confirmed

    async def _check_spent(self, height: int) -> list[int]:
        """Check reveals that a node reports as spent although no block has confirmed them for ten blocks.

        Also those of rounds that have ended: only one of two honest nodes may still have the block. Does nothing
        within `CHECK_INTERVAL_BLOCKS` of the last check. Returns the ids of confirmed rows.
        """
        if height - self._checked_height < CHECK_INTERVAL_BLOCKS:
            return []
        self._checked_height = height
        now = self.rounds.chain_now()

        def is_late(reveal: SentReveal) -> bool:
            known = self.rounds.get(reveal.round_id)
            has_ended = known is not None and now is not None and known.vote_end_time <= now
            return has_ended or reveal.row.last_outcome == Verdict.SPENT.name

        return await self._confirm(is_late, sent_by=height - CHECK_INTERVAL_BLOCKS)

    async def _find_counted(
        self, reveals: Sequence[SentReveal], *, must_respond: bool = False
    ) -> list[CountedNullifier]:
        """Return the nullifiers of those sent reveals that enough nodes report as counted."""

        async def is_counted(reveal: SentReveal) -> bool:
            try:
                return await self._is_counted(reveal)
            except ChainError:
                if must_respond:
                    raise
                return False

        results = await gather_limited(reveals, is_counted, CONCURRENT_BLOCKS)
        return [(r.round_id, r.nullifier) for r, counted in zip(reveals, results, strict=True) if counted]

    async def _is_counted(self, reveal: SentReveal) -> bool:
        """Whether as many nodes as for a block report a reveal as counted."""
        pool, answers = self.node_pool, dict[Node, bool]()
        for node, services in pool.usable_services.items():
            for is_rpc in services:
                try:
                    answers[node] = await _is_spent(node, reveal, is_rpc=is_rpc)
                except ChainError as error:
                    pool.record_error(node, error, rpc=is_rpc)
                else:
                    break
            if sum(answers.values()) >= pool.needed:
                return True
        if len(answers) < pool.needed:
            raise ChainUnavailable("too few nodes responded to a query about a sent reveal")
        return False

    def _report_confirmed(self, confirmed: Sequence[int]) -> None:
        if confirmed:
            self.on_confirmed(list(confirmed))

    def _report_problems(self, readings: Mapping[int, BlockReading]) -> None:
        """Log that blocks are disputed or missing, once, and that none is any more."""
        disputed = [height for height, reading in readings.items() if reading.is_disputed]
        if disputed and self._dispute.note():
            log.error(
                "block_disputed",
                height=min(disputed),
                reason=f"{readings[min(disputed)].reason} in this block; none of its shares is confirmed",
                advice="Find out which node is wrong and replace it in [chain] endpoints.",
            )
        elif self.disputed_height is None and self._dispute.clear():
            log.info("block_dispute_resolved", height=self.height)
        stalled = self.stalled_height
        if stalled is not None and self._stall.note():
            advice = "Check the nodes: `svote-helper doctor --skip-proof`."
            log.error("block_missing", height=stalled, reason=self._deferred[stalled].reason, advice=advice)
        elif stalled is None and self._stall.clear():
            log.info("history_resumed", height=self.height)

    def _note_change(self) -> None:
        """Update the rounds and readiness after the ledger or the head may have changed."""
        ledger = self._ledger
        if ledger is not None and self._has_agreed_head:
            self.rounds.record_blocks(self.node_pool.in_sync_heads, ledger)
        is_ready, self._was_ready = self._was_ready, self.is_ready
        if ledger is not None and (ledger.top != self._reported_height or self._was_ready != is_ready):
            self._reported_height = ledger.top
            self.on_block(ledger.top)
