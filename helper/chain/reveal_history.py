"""Reads all counted reveals of the chain, block by block, for the archive.

Every reveal of a block is requested in the same way, so the requests do not show which were sent by this helper. They
use separate connections and do not affect the health of nodes, so they never delay a reveal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Final, TypeVar

import anyio

from helper.chain.counted_reveals import CountedReveal, parse_reveal, require_counted
from helper.chain.limited_gather import gather_limited
from helper.chain.models import TxResult
from helper.chain.read_only_pool import ReadOnlyNodePool
from helper.chain.rest_client import ChainClient
from helper.errors import ChainUnavailable

R = TypeVar("R")

CONCURRENT_REQUESTS: Final = 4
"""Number of concurrent requests of one reader."""


class RevealHistory:
    """Reads the counted reveals of blocks.

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

    async def reveals(self, height: int) -> list[CountedReveal]:
        """The counted reveals of a block, in block order.

        Raises:
            HeightPrunedError: every usable node has pruned the block.
            ChainError: the block, or the result of one of its reveals, is not available.
        """
        block = await self._call(lambda client: client.block(height))
        if block is None:
            raise ChainUnavailable(f"block {height}: the node has not reached this height yet")
        reveals = [(raw, message) for raw in block.txs if (message := parse_reveal(raw)) is not None]
        results = await gather_limited(reveals, lambda reveal: self._result(reveal[0]), CONCURRENT_REQUESTS)
        return [
            CountedReveal(height, raw, message)
            for (raw, message), result in zip(reveals, results, strict=True)
            if require_counted(result, height)
        ]

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
