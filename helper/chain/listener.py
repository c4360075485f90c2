"""Follows the chain block by block and tells the store which nullifiers have counted.

It is the only one who may say "confirmed". Applying a block twice changes nothing, so after any crash it
goes on from the store's cursor. Blocks are fetched several at a time when it is behind, and always applied
in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import anyio
import structlog

from helper.chain.blocks import BlockSource
from helper.chain.failover import Endpoints
from helper.chain.models import Round, RoundStatus
from helper.chain.rpc import BlockResults, Spent
from helper.clock import Clock
from helper.errors import ChainError, HelperError
from helper.rounds import RoundBook

IN_FLIGHT = 8
"""Blocks that are fetched at once while catching up."""

TRIES = 8
"""Failed tries for one existing block before the listener calls itself stalled."""

# The transaction index of a node may lag a little behind its blocks: so many are read again one by one.
_OVERLAP = 10
_LONGEST_PAUSE = 10.0


class ListenerStore(Protocol):
    """The part of the store that the listener writes to."""

    async def cursor(self) -> int | None:
        """The newest height that was applied."""
        ...

    async def apply_block(self, height: int, spent: Sequence[Spent], *, now: float) -> Collection[int]:
        """Keep a block's nullifiers and move the cursor, in one transaction; returns our rows that it
        confirmed.
        """

    async def add_spent(self, spent: Sequence[Spent]) -> Collection[int]:
        """The same without the cursor."""


class Listener:
    """The follower of blocks.

    `on_block` is called with each height after it was applied; `on_spent` with the store's row ids of our
    shares that were confirmed by it (never with an empty list).

    Attributes:
        height: the newest block applied, None before the first.
        chain_time: the time (unix seconds) of the newest applied block whose time is known, None before.
        stalled: the height that no endpoint will give though it exists, None while all is well.
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
        self._clock = clock
        self._on_block = on_block
        self._on_spent = on_spent
        self._log = structlog.get_logger("helper.chain")
        self._tries = 0
        self.height: int | None = None
        self.chain_time: float | None = None
        self.stalled: int | None = None

    async def run(self) -> None:
        """Follow the chain for ever. On a new database it begins once the rounds were synced."""
        pause = 1.0
        while True:
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
                await self._endpoints.wait_probe()

    async def step(self) -> bool:
        """Apply what there is to apply, at most a handful of blocks; False when there was nothing to do
        (yet).
        """
        head = self._endpoints.head
        if head is None:
            return False
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

        async with anyio.create_task_group() as group:
            for height in heights:
                group.start_soon(fetch, height)
        for height in heights:
            results = fetched.get(height)
            if results is None:
                await self._missing(height, problems.get(height))
                return height > heights[0]
            await self._take(results)
        return True

    async def _take(self, results: BlockResults) -> None:
        confirmed = await self._store.apply_block(results.height, results.reveals, now=self._clock.now())
        self.height = results.height
        self._tries = 0
        if self.stalled is not None:
            self._log.info("blocks are followed again", height=results.height)
            self.stalled = None
        self._note_time(results.time)
        if confirmed:
            self._on_spent(list(confirmed))
        self._on_block(results.height)

    def _note_time(self, time: float | None = None) -> None:
        """The newest block's time: its own where the source tells it, else what the heads told."""
        seen = time if time is not None or self.height is None else self._endpoints.time_at(self.height)
        if seen is not None:
            self.chain_time = max(seen, self.chain_time or seen)
            self._rounds.processed(self.chain_time)

    async def _missing(self, height: int, problem: ChainError | None) -> None:
        """A block that exists could not be had: count, and look for another way after some tries."""
        if not self._endpoints.usable:
            if problem is not None:
                raise problem
            return
        self._tries += 1
        if self._tries >= TRIES and self.stalled != height:
            self.stalled = height
            self._log.error("no endpoint has this block", height=height, reason=str(problem or "not there yet"))
        head = self._endpoints.head
        gap = 0 if head is None else head.height - height
        if self.stalled == height and gap > _OVERLAP and head is not None and self._endpoints.fresh_rpc:
            await self._begin(head.height, self._rounds.open())
        elif problem is not None:
            raise problem

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
            confirmed = await self._store.add_spent([(round_id, nullifier) for _, nullifier in found])
            if confirmed:
                self._on_spent(list(confirmed))
            return
        raise problem or ChainError("no consensus RPC is fresh")
