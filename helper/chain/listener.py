"""Follows the chain block by block and tells the store which nullifiers have counted.

It is the only one who may say "confirmed". Applying a block twice changes nothing, so after any crash it
goes on from the store's cursor. Blocks are fetched several at a time when it is behind, and always applied
in order. Blocks that no node has any more are bridged by a search or, where nobody can search, left out,
loudly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import structlog

from helper.chain.blocks import BlockSource
from helper.chain.client import HeightGoneError
from helper.chain.failover import Endpoints
from helper.chain.gap import GapStore, SentInGap
from helper.chain.models import BlockHead, Round, RoundStatus
from helper.chain.rpc import BlockResults, Spent
from helper.clock import Clock
from helper.errors import ChainAnswerError, ChainError, HelperError
from helper.rounds import RoundBook

IN_FLIGHT = 8
"""Blocks that are fetched at once while catching up."""

TRIES = 8
"""Failed tries for one existing block before the listener calls itself stalled."""

# The transaction index of a node may lag a little behind its blocks: so many are read again one by one.
_OVERLAP = 10
_LONGEST_PAUSE = 10.0


class ListenerStore(GapStore, Protocol):
    """The part of the store that the listener writes to."""

    async def cursor(self) -> int | None:
        """The newest height that was applied."""
        ...

    async def apply_block(self, height: int, spent: Sequence[Spent], *, now: float) -> Collection[int]:
        """Keep a block's nullifiers and move the cursor, in one transaction; returns our rows that it
        confirmed.
        """
        ...


class Listener:
    """The follower of blocks.

    `on_block` is called with each height after it was applied, and on arriving without one; `on_spent` with the
    store's row ids of our shares that were confirmed by it (never with an empty list).

    Attributes:
        height: the newest block applied, None before the first.
        chain_time: the time (unix seconds) of the newest applied block whose time is known, None before.
        stalled: the height that no endpoint will give though it exists, None while all is well.
        arrived: whether the head that was found at the start was reached. Before, a share may have counted unknown to
            us. It is not the newest head: on a slow machine that could be run after for long.
    """

    def __init__(
        self,
        store: ListenerStore,
        endpoints: Endpoints,
        rounds: RoundBook,
        *,
        clock: Clock,
        on_block: Callable[[int], None] = lambda _height: None,
        on_spent: Callable[[list[int]], None] = lambda _ids: None,
    ) -> None:
        self._store = store
        self._endpoints = endpoints
        self._rounds = rounds
        self._source = BlockSource(endpoints)
        self._sent = SentInGap(store, endpoints)
        self._clock = clock
        self._on_block = on_block
        self._on_spent = on_spent
        self._log = structlog.get_logger("helper.chain")
        self._tries = 0
        self._goal: int | None = None
        self._found: int | None = None
        self._skipped = False
        self._wake = asyncio.Event()
        self._done: BlockHead | None = None  # the head up to which there was nothing left to do
        self.height: int | None = None
        self.chain_time: float | None = None
        self.stalled: int | None = None
        self.arrived = False
        endpoints.on_probe(self._look)

    @property
    def caught_up(self) -> bool:
        """Whether every block up to the head was applied when that was last looked at. Before, a nullifier that
        was not seen may be one that is not seen yet: nothing is to be concluded from it.
        """
        return self._goal is not None and self.height is not None and self.height >= self._goal

    async def run(self) -> None:
        """Follow the chain for ever. On a new database it begins once the rounds were synced."""
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
        if self.height is None:
            self.height = await self._store.cursor()
        if self.height is None:
            if not self._rounds.synced:
                return False
            statuses = (RoundStatus.ACTIVE, RoundStatus.TALLYING)
            await self._begin(head.height, [known for known in self._rounds.all() if known.status in statuses])
            return True
        self._note_time()
        if self.height >= head.height:
            if not self.arrived:
                self.arrived = True
                self._on_block(self.height)
            self._done = head
            return False
        heights = range(self.height + 1, min(self.height + IN_FLIGHT, head.height) + 1)
        return await self._apply(heights)

    async def _apply(self, heights: range) -> bool:
        """Fetch these blocks together and apply them in order, up to the first that could not be had."""
        fetched: dict[int, BlockResults | None] = {}
        problems: dict[int, ChainError] = {}

        async def fetch(height: int) -> None:
            try:
                fetched[height] = await self._source.fetch(height, thorough=self._tries >= TRIES // 2)
            except ChainError as error:
                problems[height] = error

        if len(heights) == 1:
            await fetch(heights[0])
        else:
            async with asyncio.TaskGroup() as group:
                for height in heights:
                    group.create_task(fetch(height))
        for height in heights:
            results = fetched.get(height)
            if results is None:
                jumped = await self._missing(height, problems.get(height))
                return jumped or height > heights[0]
            await self._take(results)
            self._skipped = False
        return True

    async def _take(self, results: BlockResults) -> None:
        confirmed = await self._store.apply_block(results.height, results.reveals, now=self._clock.now())
        self.height = results.height
        self._tries = 0
        if self.stalled is not None:
            self._log.info("blocks are followed again", height=results.height)
            self.stalled = None
        self._note_time(results.time)
        self._tell_spent(confirmed)
        self.arrived = self.arrived or (self._found is not None and results.height >= self._found)
        self._on_block(results.height)
        if self.caught_up:
            self._tell_spent(await self._sent.look(results.height))

    def _tell_spent(self, confirmed: Collection[int]) -> None:
        if confirmed:
            self._on_spent(list(confirmed))

    def _note_time(self, time: float | None = None) -> None:
        """The newest block's time: its own where the source tells it, else what the heads told."""
        seen = time if time is not None or self.height is None else self._endpoints.time_at(self.height)
        if seen is not None:
            self.chain_time = max(seen, self.chain_time or seen)
            self._rounds.processed(self.chain_time)

    async def _missing(self, height: int, problem: ChainError | None) -> bool:
        """A block that exists could not be had: look for another way, at once when it is gone for certain, else
        after some tries. True when one was found.
        """
        if self._endpoints.usable:
            self._tries += 1
            if self._tries >= TRIES and self.stalled != height:
                self.stalled = height
                self._log.error("no endpoint has this block", height=height, reason=str(problem or "not there yet"))
            given_up = self._tries >= TRIES or self._certainly_gone(problem)
            if given_up and await self._bridge(height, problem):
                return True
        if problem is not None:
            raise problem
        return False

    def _certainly_gone(self, problem: ChainError | None) -> bool:
        """Whether every node that is configured was asked, none has the height, and one says which it has."""
        everyone = len(self._endpoints.fresh) == len(self._endpoints.all)
        rpcs = sum(endpoint.rpc is not None for endpoint in self._endpoints.all)
        told = isinstance(problem, HeightGoneError) and problem.lowest is not None
        return told and everyone and len(self._endpoints.fresh_rpc) == rpcs

    # Beginning, and bridging a gap that no node can fill

    async def _begin(self, head: int, rounds: Sequence[Round]) -> None:
        """Set the cursor: near the head after a search for all reveals of these rounds, else before the
        oldest of them.
        """
        start = min((known.created_at_height - 1 for known in rounds), default=head)
        start = max(start, self.height or 0)
        if rounds and head - start > _OVERLAP and self._endpoints.fresh_rpc:
            for known in rounds:
                await self._search(known.round_id)
            start = head - _OVERLAP
        await self._take(BlockResults(min(start, head), [], [], []))
        self._log.info("following blocks", height=self.height)

    async def _bridge(self, height: int, problem: ChainError | None) -> bool:
        """Go on beyond blocks from `height` on that cannot be had; False when there is nowhere to go on."""
        head, gone = self._endpoints.head, isinstance(problem, HeightGoneError)
        if head is None or not self._rounds.synced or not (gone or head.height - height > _OVERLAP):
            return False
        searched = await self._searched(self._rounds.open())
        landing = head.height - _OVERLAP if searched else 0
        if isinstance(problem, HeightGoneError):
            lowest = problem.lowest or 0
            if not height < lowest <= head.height:
                lowest = await self._source.lowest(height, head.height) or 0
            landing = max(landing, lowest - 1)
        if landing < height:
            return False
        if not searched and not self._skipped:
            self._tell_skipped(height, landing)
        self._skipped = True
        self._tell_spent(await self._sent.bridge(landing))
        await self._take(BlockResults(landing, [], [], []))
        return True

    def _tell_skipped(self, height: int, landing: int) -> None:
        self._log.error(
            "blocks were left out: no node has them any more, and none can search them",
            height=height,
            count=landing - height + 1,
            reason="what others revealed in them is not known here; of ours, what was sent before is asked about by "
            "name, and nothing that is sent later is missed",
            advice="Give the helper a node that keeps more blocks than its longest stop, or one with its RPC.",
        )

    async def _searched(self, rounds: Sequence[Round]) -> bool:
        """Whether all reveals of these rounds were taken in by a search."""
        if rounds and not self._endpoints.fresh_rpc:
            return False
        try:
            for known in rounds:
                await self._search(known.round_id)
        except ChainAnswerError:
            if self._tries < TRIES:
                raise
            return False  # it keeps no index
        return True

    async def _search(self, round_id: bytes) -> None:
        """Take in every reveal of a round that any RPC finds."""
        problem: ChainError | None = None
        for endpoint in self._endpoints.fresh_rpc:
            assert endpoint.rpc is not None
            try:
                found = await endpoint.rpc.tx_search_reveals(round_id)
            except ChainError as error:
                self._endpoints.failed(endpoint, error, rpc=True)
                problem = error
                continue
            self._tell_spent(await self._store.add_spent([(round_id, nullifier) for _, nullifier in found]))
            return
        raise problem or ChainError("no consensus RPC is fresh")
