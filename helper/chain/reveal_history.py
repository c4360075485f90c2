"""All the chain's counted reveals, block by block, for who reads every one of them.

Every reveal of a block is asked about in the same way, so no question tells which of them were this helper's. The
questions go over connections of their own and set no node aside: whoever reads here is never in the way of a reveal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Final, TypeVar

import anyio
import httpx

from helper.chain.gather import gather_limited
from helper.chain.lookups import CountedReveal, reveal_in
from helper.chain.node_http import TIMEOUT
from helper.chain.node_pool import NodePool
from helper.chain.read_only_pool import ReadOnlyNodePool
from helper.chain.rest_client import ChainClient
from helper.errors import ChainAnswerError, ChainUnavailable

R = TypeVar("R")

AT_ONCE: Final = 4
"""Questions of one reader at once."""


class RevealHistory:
    """A reader of blocks.

    Args:
        endpoints: says which nodes are fresh.
        timeout: seconds that one node may take.
        transport: replaces the network in tests.
    """

    def __init__(
        self, endpoints: NodePool, *, timeout: float = TIMEOUT, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._endpoints = endpoints
        self._onlooker = ReadOnlyNodePool(endpoints, timeout=timeout, transport=transport)
        self._turns = anyio.Semaphore(AT_ONCE)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._onlooker.aclose()

    @property
    def chain_id(self) -> str | None:
        """The chain's id, None while no node has told it."""
        return self._endpoints.chain_id

    @property
    def head(self) -> int:
        """The newest height that a fresh node showed; 0 while there is none."""
        newest = self._endpoints.head
        return 0 if newest is None else newest.height

    @property
    def whole(self) -> bool:
        """Whether every node that is configured may be asked now."""
        return len(self._endpoints.fresh) == len(self._endpoints.all)

    async def reveals(self, height: int) -> list[CountedReveal]:
        """The reveals of a block that counted, in their order in it.

        Raises:
            HeightGoneError: no node that was asked has the block any more.
            ChainError: it, or the fate of one of its reveals, could not be had.
        """
        block = await self._ask(lambda client: client.block(height))
        if block is None:
            raise ChainUnavailable(f"block {height}: the node that was asked is not there yet")
        there = [(raw, message) for raw in block.txs if (message := reveal_in(raw)) is not None]
        counted = await gather_limited([raw for raw, _ in there], lambda raw: self._counted(raw, height), AT_ONCE)
        return [
            CountedReveal(height, raw, message) for (raw, message), good in zip(there, counted, strict=True) if good
        ]

    async def _counted(self, raw: bytes, height: int) -> bool:
        tx_hash = sha256(raw).digest()
        result = await self._ask(lambda client: client.tx(tx_hash))
        if result is None or (result.code and result.height < height):  # the index may lag behind the blocks
            raise ChainUnavailable(f"block {height}: what came of a transaction in it is not known yet")
        if result.code and result.height > height:
            raise ChainAnswerError(f"block {height}: of a transaction in it only a later failure is known")
        return result.code == 0 and result.height == height

    async def root_at(self, round_id: bytes, height: int) -> bytes | None:
        """A round's root as it was stored at a height, None when none was.

        Raises:
            ChainError: it could not be had.
        """
        state = await self._ask(lambda client: client.tree_at(round_id, height))
        return None if state is None else state.root

    async def _ask(self, question: Callable[[ChainClient], Awaitable[R]]) -> R:
        async with self._turns:
            return await self._onlooker.call(question)
