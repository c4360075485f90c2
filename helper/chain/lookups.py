"""Lookups of public chain data: transactions, counted reveals, tree roots.

Nodes see the requests, so no request contains a nullifier: all reveals of a round, or complete blocks, are read and
filtered locally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from helper.chain.counted_reveals import CountedReveal, is_counted, parse_reveal, require_counted
from helper.chain.limited_gather import gather_limited
from helper.chain.models import TreeState, TxResult
from helper.chain.node import Node
from helper.chain.node_pool import NodePool
from helper.chain.rest_client import HeightPrunedError
from helper.errors import ChainError

CONCURRENT_BLOCKS: Final = 8
"""Number of blocks read concurrently."""


@dataclass(frozen=True, slots=True)
class IncludedTx:
    """A transaction in a block.

    Attributes:
        height: height of the block.
        code: 0 on success.
        log: the chain's error message otherwise.
        raw: the transaction's bytes, None if every node has pruned the block.
    """

    height: int
    code: int
    log: str
    raw: bytes | None


class ChainLookups:
    """Lookups of public data on any usable node.

    Args:
        node_pool: the node pool, which must have been probed.
        on_progress: called with the height reached during a long search.
    """

    def __init__(self, node_pool: NodePool, on_progress: Callable[[int], None] = lambda _: None) -> None:
        self._node_pool = node_pool
        self._on_progress = on_progress

    async def find_transaction(self, tx_hash: bytes) -> IncludedTx | None:
        """Return a transaction by its hash, None if no node has it in a block.

        Raises:
            ChainUnavailable: no node responded.
        """

        async def look_up(node: Node) -> tuple[TxResult, bytes | None] | None:
            result = await node.client.tx(tx_hash)
            if result is None:
                return None
            return result, await self._fetch_tx_bytes(node, result.height, tx_hash)

        included = (await self._node_pool.call_until(look_up, is_enough=lambda included: included is not None))[-1]
        if included is None:
            return None
        result, raw = included
        return IncludedTx(result.height, result.code, result.log, raw)

    async def _fetch_tx_bytes(self, node: Node, height: int, tx_hash: bytes) -> bytes | None:
        try:
            block = await node.client.block(height)
        except HeightPrunedError:
            return None
        if block is None:
            return None
        return next((tx for tx in block.txs if sha256(tx).digest() == tx_hash), None)

    async def find_reveal(
        self, round_ids: Iterable[bytes], nullifier: bytes, heights: range | None = None
    ) -> CountedReveal | None:
        """The reveal that spent a nullifier, None if there is none.

        Args:
            round_ids: the rounds to search, in order.
            nullifier: 32 bytes; never sent to a node.
            heights: search only these blocks. By default, search the indexes of nodes, and if the reveal is in none,
                all blocks since the round was created.

        Raises:
            ChainUnavailable: no node responded, every node has pruned the blocks, or the result of a reveal with this
                nullifier is not known.
        """
        rounds = list(round_ids)
        if heights is not None:
            return await self._search_blocks(heights, set(rounds), nullifier)
        for round_id in rounds:
            reveal = await self._search_index(round_id, nullifier)
            if reveal is not None:
                return reveal
        for round_id in rounds:
            reveal = await self._search_blocks(await self._reveal_heights(round_id), {round_id}, nullifier)
            if reveal is not None:
                return reveal
        return None

    async def _search_index(self, round_id: bytes, nullifier: bytes) -> CountedReveal | None:
        """Search the indexes of nodes for a reveal.

        None says nothing: an index can have gaps or be late, and if a counted reveal was included again, it contains
        the later failure instead.
        """
        for node in self._node_pool.usable_rpc_nodes:
            assert node.rpc is not None
            try:
                async for result, raw in node.rpc.reveal_transactions(round_id):
                    message = parse_reveal(raw)
                    if message is None or (message.round_id, message.nullifier) != (round_id, nullifier):
                        continue
                    if is_counted(result, result.height):
                        return CountedReveal(result.height, raw, message)
            except ChainError as error:
                self._node_pool.record_error(node, error, rpc=True)
        return None

    async def _reveal_heights(self, round_id: bytes) -> range:
        """The blocks that may contain reveals of a round."""
        known = await self._node_pool.call(lambda client: client.round(round_id))
        head = self._node_pool.head
        if known is None or head is None:
            return range(0)
        return range(max(1, known.created_at_height), head.height + 1)

    async def _search_blocks(self, heights: range, round_ids: set[bytes], nullifier: bytes) -> CountedReveal | None:
        """Search blocks in order, read in concurrent batches."""
        for start in range(0, len(heights), CONCURRENT_BLOCKS):
            batch = heights[start : start + CONCURRENT_BLOCKS]
            blocks = await self._read_blocks(batch)
            for height in batch:
                for raw in blocks[height]:
                    message = parse_reveal(raw)
                    if message is None or message.nullifier != nullifier or message.round_id not in round_ids:
                        continue
                    if require_counted(await self._result(raw), height):
                        return CountedReveal(height, raw, message)
            self._on_progress(batch[-1])
        return None

    async def is_counted_in_block(self, raw: bytes, height: int) -> bool:
        """Whether a reveal was counted in the block at a height. False while the result is unknown."""
        result = await self._result(raw)
        if result is None or not is_counted(result, height):
            return False
        return result.height == height or raw in (await self._read_blocks(range(height, height + 1)))[height]

    async def _result(self, raw: bytes) -> TxResult | None:
        tx_hash = sha256(raw).digest()
        return await self._node_pool.call(lambda client: client.tx(tx_hash))

    async def _read_blocks(self, heights: range) -> dict[int, list[bytes]]:
        """The transactions of blocks, by height."""

        async def read(height: int) -> list[bytes]:
            block = await self._node_pool.call(lambda client: client.block(height))
            return [] if block is None else block.txs

        return dict(zip(heights, await gather_limited(heights, read, CONCURRENT_BLOCKS), strict=True))

    async def root_at(self, round_id: bytes, height: int) -> TreeState | None:
        """The root of a round's tree stored at a height, None if there is none."""
        return await self._node_pool.call(lambda client: client.tree_at(round_id, height))

    async def round_ids(self) -> list[bytes]:
        """Ids of all rounds of the chain, newest first."""
        listed = await self._node_pool.call(lambda client: client.rounds())
        return [known.round_id for known in sorted(listed.rounds, key=lambda known: -known.created_at_height)]
