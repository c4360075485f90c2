"""Block production, on a timer or on demand, with an adjustable clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from devnet.admission import Admission
from devnet.chain import Block, Chain, Totals
from devnet.journal import Journal


class BlockProducer:
    """Produces the chain's blocks. `offset_seconds` is the difference of block times to the system clock."""

    def __init__(
        self,
        chain: Chain,
        admission: Admission,
        journal: Journal,
        *,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.chain = chain
        self.admission = admission
        self.journal = journal
        self.offset_seconds = 0.0
        self.is_halted = False
        self._now_ns = now_ns
        self._lock = asyncio.Lock()
        self._block_produced = asyncio.Event()

    def now_ns(self) -> int:
        """The chain's time in Unix nanoseconds."""
        return self._now_ns() + int(self.offset_seconds * 1e9)

    async def mine(self, *, time_ns: int | None = None) -> Block:
        """Produce one block now, at the clock's time or the given time."""
        async with self._lock:
            totals: Totals = {}
            for round_ in self.chain.rounds_to_finalize():
                totals[round_.round_id] = await asyncio.to_thread(round_.decrypt_totals)
            transactions = self.chain.proposer_transactions(totals) + self.admission.take_block_transactions()
            at = self.now_ns() if time_ns is None else time_ns
            block = self.chain.apply_block(at, transactions, totals)
            self.journal.append(block.height, at, transactions, totals)
            self.admission.recheck_mempool(block)
        event, self._block_produced = self._block_produced, asyncio.Event()
        event.set()
        return block

    async def run(self, block_seconds: float) -> None:
        """Produce a block every `block_seconds` until cancelled. The schedule does not drift."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + block_seconds, loop.time())
            await asyncio.sleep(due - loop.time())
            if not self.is_halted:
                await self.mine()

    async def wait_for_block(self) -> None:
        """Wait until the next block is produced."""
        await self._block_produced.wait()
