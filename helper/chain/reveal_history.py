"""Reads the counted reveals and other voting transactions of the chain, block by block, for the archive.

Every transaction of a block is requested in the same way, so the requests do not show which reveals were sent by this
helper. They use separate connections and do not affect the health of nodes, so they never delay a reveal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, TypeVar

import anyio

from helper.chain.chain_data import TxResult
from helper.chain.node_pool import ReadOnlyNodePool, gather_limited
from helper.chain.rest_client import ChainClient
from helper.chain.reveal_transaction import ROUND_TAGS, CountedReveal, is_counted, parse_reveal, require_counted
from helper.errors import ChainUnavailable

R = TypeVar("R")

CONCURRENT_REQUESTS: Final = 4
"""Number of concurrent requests of one reader."""


@dataclass(frozen=True, slots=True)
class HistoryBlock:
    """The voting transactions of a block that succeeded, in block order.

    Attributes:
        time: the block's time in Unix seconds.
        others: transactions that are not reveals, and whether each succeeded: True, or None if that is not known.
    """

    height: int
    time: float
    reveals: tuple[CountedReveal, ...]
    others: tuple[tuple[bytes, bool | None], ...]


class RevealHistory:
    """Reads the voting transactions of blocks.

    Args:
        pool: the nodes; closed with the reader.
    """

    def __init__(self, pool: ReadOnlyNodePool) -> None:
        self._pool = pool
        self._node_pool = pool.node_pool
        self._slots = anyio.Semaphore(CONCURRENT_REQUESTS)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._pool.aclose()

    @property
    def chain_id(self) -> str | None:
        """The chain's id, None until a node has reported it."""
        return self._node_pool.chain_id

    @property
    def head(self) -> int:
        """The newest height that a usable node has reported, 0 before the first."""
        newest = self._node_pool.head
        return 0 if newest is None else newest.height

    @property
    def are_all_nodes_usable(self) -> bool:
        """Whether every configured node is usable."""
        return len(self._node_pool.usable_nodes) == len(self._node_pool.nodes)

    async def read_block(self, height: int) -> HistoryBlock:
        """The voting transactions of a block.

        Raises:
            HeightPrunedError: every usable node has pruned the block.
            ChainError: the block, or the result of one of its reveals, is not available.
        """
        block = await self._call(lambda client: client.block(height))
        if block is None:
            raise ChainUnavailable(f"block {height}: the node has not reached this height yet")
        wanted = [raw for raw in block.txs if raw[:1] and raw[0] in ROUND_TAGS]
        results = await gather_limited(wanted, self._result, CONCURRENT_REQUESTS)
        reveals: list[CountedReveal] = []
        others: list[tuple[bytes, bool | None]] = []
        for raw, result in zip(wanted, results, strict=True):
            message = parse_reveal(raw)
            if message is None:
                counted = is_counted(result, height)
                if counted is not False:
                    others.append((raw, counted))
            elif require_counted(result, height):
                reveals.append(CountedReveal(height, raw, message))
        return HistoryBlock(height, block.head.time, tuple(reveals), tuple(others))

    async def _result(self, raw: bytes) -> TxResult | None:
        tx_hash = sha256(raw).digest()
        return await self._call(lambda client: client.tx(tx_hash))

    async def root_at(self, round_id: bytes, height: int) -> bytes | None:
        """The root of a round's tree stored at a height, None if there is none.

        Raises:
            ChainError: the root is not available.
        """
        state = await self._call(lambda client: client.tree_at(round_id, height))
        return None if state is None else state.root

    async def _call(self, request: Callable[[ChainClient], Awaitable[R]]) -> R:
        async with self._slots:
            return await self._pool.call(request)
