"""What is public on the chain already, for who asks by name: a transaction, a counted reveal, a tree's root.

A node sees what it is asked. So a nullifier is in no question here: a whole round's reveals are read, or whole blocks,
and the one that is meant is picked out of them on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import anyio

from helper.chain.models import TreeState, TxResult
from helper.chain.node import Node
from helper.chain.node_pool import NodePool
from helper.chain.rest_client import HeightGoneError
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import ChainAnswerError, ChainError

BLOCKS_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class FoundTx:
    """A transaction in a block.

    Attributes:
        height: the block's.
        code: 0 when it went through.
        log: the chain's words when it did not.
        raw: its bytes, None where no node has the block any more.
    """

    height: int
    code: int
    log: str
    raw: bytes | None


@dataclass(frozen=True, slots=True)
class CountedReveal:
    """A reveal that counted: the block that has it, the transaction's bytes, and what they say."""

    height: int
    raw: bytes
    message: RevealMessage


class ChainLookups:
    """Questions about what is public, to whichever node is fresh.

    Args:
        endpoints: the nodes, which have been probed.
        told: called now and then with the height that a long search has come to.
    """

    def __init__(self, endpoints: NodePool, told: Callable[[int], None] = lambda _: None) -> None:
        self._endpoints = endpoints
        self._told = told

    async def transaction(self, tx_hash: bytes) -> FoundTx | None:
        """A transaction by its hash, None when no node knows it in a block.

        Raises:
            ChainUnavailable: no node could be asked.
        """

        async def look(endpoint: Node) -> tuple[TxResult, bytes | None] | None:
            result = await endpoint.client.tx(tx_hash)
            if result is None:
                return None
            return result, await self._raw(endpoint, result.height, tx_hash)

        found = (await self._endpoints.ask(look, enough=lambda answer: answer is not None))[-1]
        if found is None:
            return None
        result, raw = found
        return FoundTx(result.height, result.code, result.log, raw)

    async def _raw(self, endpoint: Node, height: int, tx_hash: bytes) -> bytes | None:
        try:
            block = await endpoint.client.block(height)
        except HeightGoneError:
            return None
        if block is None:
            return None
        return next((tx for tx in block.txs if sha256(tx).digest() == tx_hash), None)

    async def counted_reveal(
        self, round_ids: Iterable[bytes], nullifier: bytes, heights: range | None = None
    ) -> CountedReveal | None:
        """The reveal that made a nullifier count, None when there is none.

        Args:
            round_ids: the rounds that it may be of, the likeliest first.
            nullifier: 32 bytes; no node is asked about it.
            heights: search these blocks alone; else a round's reveals by a node's index, or without one all blocks
                since the round's beginning.

        Raises:
            ChainUnavailable: no node could be asked, or none has the blocks any more.
        """
        if heights is not None:
            return await self._in_blocks(heights, set(round_ids), nullifier)
        for round_id in round_ids:
            indexed = await self._by_index(round_id, nullifier)
            if indexed is None:
                found = await self._in_blocks(await self._span(round_id), {round_id}, nullifier)
            else:
                found = indexed[0] if indexed else None
            if found is not None:
                return found
        return None

    async def _by_index(self, round_id: bytes, nullifier: bytes) -> list[CountedReveal] | None:
        """From the index of a node that has one: the reveal, or nothing; None where no node could be searched."""
        for endpoint in self._endpoints.fresh_rpc:
            assert endpoint.rpc is not None
            try:
                async for height, raw in endpoint.rpc.reveal_transactions(round_id):
                    message = reveal_in(raw)
                    if message is not None and message.nullifier == nullifier:
                        return [CountedReveal(height, raw, message)]
            except ChainError as error:
                self._endpoints.failed(endpoint, error, rpc=True)
            else:
                return []
        return None

    async def _span(self, round_id: bytes) -> range:
        """The blocks in which a round's reveals may be."""
        known = await self._endpoints.call(lambda client: client.round(round_id))
        head = self._endpoints.head
        if known is None or head is None:
            return range(0)
        return range(max(1, known.created_at_height), head.height + 1)

    async def _in_blocks(self, heights: range, round_ids: set[bytes], nullifier: bytes) -> CountedReveal | None:
        """From whole blocks, some at once, in order."""
        for start in range(0, len(heights), BLOCKS_AT_ONCE):
            lot = heights[start : start + BLOCKS_AT_ONCE]
            blocks = await self._read(lot)
            for height in lot:
                for raw in blocks[height]:
                    message = reveal_in(raw)
                    if message is None or message.nullifier != nullifier or message.round_id not in round_ids:
                        continue
                    if await self._counted(raw):
                        return CountedReveal(height, raw, message)
            self._told(lot[-1])
        return None

    async def _counted(self, raw: bytes) -> bool:
        """Whether a transaction that is in a block went through: failed ones are in it too."""
        tx_hash = sha256(raw).digest()
        result = await self._endpoints.call(lambda client: client.tx(tx_hash))
        return result is not None and result.code == 0

    async def _read(self, heights: range) -> dict[int, list[bytes]]:
        """The transactions of some blocks."""
        blocks: dict[int, list[bytes]] = {}
        problems: list[ChainError] = []

        async def read(height: int) -> None:
            try:
                block = await self._endpoints.call(lambda client: client.block(height))
            except ChainError as error:
                problems.append(error)
            else:
                blocks[height] = [] if block is None else block.txs

        async with anyio.create_task_group() as group:
            for height in heights:
                group.start_soon(read, height)
        if problems:
            raise problems[0]
        return blocks

    async def root_at(self, round_id: bytes, height: int) -> TreeState | None:
        """A round's root as it was stored at a height, None when none was."""
        return await self._endpoints.call(lambda client: client.tree_at(round_id, height))

    async def rounds(self) -> list[bytes]:
        """All rounds of the chain, the youngest first."""
        listed = await self._endpoints.call(lambda client: client.rounds())
        return [known.round_id for known in sorted(listed.rounds, key=lambda known: -known.created_at_height)]


def reveal_in(raw: bytes) -> RevealMessage | None:
    """The reveal in a transaction, None when it is none: a block may hold anything."""
    try:
        return RevealMessage.from_tx(raw)
    except ChainAnswerError:
        return None
