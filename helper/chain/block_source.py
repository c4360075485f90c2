"""Fetches the counted reveals of a block.

With a consensus RPC this takes one request; with REST, one for the block and one for each reveal in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256
from typing import NoReturn

from helper.chain.agreement import agreed
from helper.chain.copy_quorum import BlockDisputedError, Disputes, SecondCopyMissingError
from helper.chain.counted_reveals import is_counted
from helper.chain.limited_gather import gather_limited
from helper.chain.node import Node
from helper.chain.node_pool import NodePool
from helper.chain.rest_client import HeightPrunedError
from helper.chain.reveal_transaction import REVEAL_TAG, RevealMessage
from helper.chain.rpc_client import BlockResults, CountedNullifier
from helper.errors import ChainError, ChainResponseError, ChainUnavailable

_CONCURRENT_TXS = 8


class BlockSource:
    """Fetches blocks. If two nodes are configured, two must report the same reveals.

    Every block is compared, also an empty one, not only those with shares of this helper. So requests reveal nothing
    about these shares, and no node can hide a reveal.

    Args:
        disputes: receives the heights on which nodes do not agree.
        uses_backoff: whether errors put a node into backoff. Old blocks are read without backoff, because a node that
            cannot return them is still valid for due shares.
    """

    def __init__(self, node_pool: NodePool, disputes: Disputes, *, uses_backoff: bool = True) -> None:
        self._node_pool = node_pool
        self._disputes = disputes
        self._uses_backoff = uses_backoff

    async def fetch(self, height: int, *, always_try_rest: bool = False) -> BlockResults | None:
        """Fetch the counted reveals of a block.

        Returns None while no node has the block or the result of one of its reveals.

        Args:
            always_try_rest: use REST even if an RPC reports "not yet", because some nodes do not store results of
                executed blocks.

        Raises:
            HeightPrunedError: every usable node has pruned the height; has the lowest height of any of them.
            ChainUnavailable: no node responded.
            ChainResponseError: every node that responded returned an error.
            SecondCopyMissingError: no second node has reported the block yet.
            BlockDisputedError: nodes report different reveals.
        """
        last_error: ChainError | None = None
        pruned: dict[Node, HeightPrunedError] = {}
        has_response = is_pending = False
        copies: list[tuple[Node, BlockResults]] = []
        sources = [(node, node.rpc) for node in self._node_pool.usable_rpc_nodes]
        sources += [(node, None) for node in self._node_pool.usable_nodes]
        while sources:
            node, rpc = sources.pop(0)
            if node in [copied for copied, _ in copies]:
                continue
            if is_pending and rpc is None and not always_try_rest and not copies:
                break
            try:
                results = await (self._fetch_by_rest(node, height) if rpc is None else rpc.block_results(height))
            except HeightPrunedError as error:
                pruned[node] = error
                continue
            except ChainError as error:
                if self._uses_backoff:
                    self._node_pool.record_error(node, error, rpc=rpc is not None)
                last_error, has_response = error, has_response or not isinstance(error, ChainUnavailable)
                continue
            if results is None:
                is_pending = True
                continue
            copies.append((node, results))
            if (agreed := self._find_agreed_copy(copies, height)) is not None:
                return agreed
        if copies:
            self._raise_not_agreed(copies, height)
        return (
            None if is_pending else _raise_reason(height, list(pruned.values()), last_error, has_response=has_response)
        )

    async def fetch_all(
        self, heights: Sequence[int], *, always_try_rest: bool = False
    ) -> list[BlockResults | ChainError | None]:
        """Fetch blocks concurrently. Returns for each block what `fetch` returns or raises."""

        async def fetch_or_error(height: int) -> BlockResults | ChainError | None:
            try:
                return await self.fetch(height, always_try_rest=always_try_rest)
            except ChainError as error:
                return error

        return await gather_limited(heights, fetch_or_error, len(heights))

    async def fetch_leading(
        self, heights: Sequence[int], *, always_try_rest: bool = False
    ) -> tuple[list[BlockResults], ChainError | None]:
        """Fetch blocks concurrently.

        Returns:
            The blocks before the first one that is not available, and the reason. The reason is None if all blocks are
            available, or if the block or the result of one of its reveals is not known yet.
        """
        leading: list[BlockResults] = []
        for result in await self.fetch_all(heights, always_try_rest=always_try_rest):
            if not isinstance(result, BlockResults):
                return leading, result
            leading.append(result)
        return leading, None

    def _find_agreed_copy(self, copies: Sequence[tuple[Node, BlockResults]], height: int) -> BlockResults | None:
        """The copy that enough nodes report, None if there is none. Nodes that report another go into backoff."""
        facts = {node.name: frozenset(copy.reveals) for node, copy in copies}
        fact = agreed(facts, self._node_pool.needed)
        if fact is None:
            return None
        self._disputes.note_agreement(height)
        for node, copy in copies:
            if frozenset(copy.reveals) != fact:
                self._node_pool.record_error(
                    node, ChainResponseError(f"block {height}: two other nodes report different reveals")
                )
        matching = [copy for _, copy in copies if frozenset(copy.reveals) == fact]
        return min(matching, key=lambda copy: math.inf if copy.time is None else copy.time)

    def _raise_not_agreed(self, copies: Sequence[tuple[Node, BlockResults]], height: int) -> NoReturn:
        names = ", ".join(sorted({node.name for node, _ in copies}))
        if len({frozenset(copy.reveals) for _, copy in copies}) > 1:
            self._disputes.note_dispute(height, names)
            raise BlockDisputedError(f"block {height}: {names} report different reveals")
        raise SecondCopyMissingError(f"block {height}: only {names} has reported its reveals yet")

    async def _fetch_by_rest(self, node: Node, height: int) -> BlockResults | None:
        """Fetch a block and the result of every reveal in it.

        Results are never requested for shares of this helper only, so the requests reveal nothing but the block.
        """
        block = await node.client.block(height)
        if block is None:
            return None
        reveals = [tx for tx in block.txs if tx[:1] == REVEAL_TAG]
        results = await gather_limited(reveals, lambda tx: node.client.tx(sha256(tx).digest()), _CONCURRENT_TXS)
        spent: list[CountedNullifier] = []
        for tx, result in zip(reveals, results, strict=True):
            counted = is_counted(result, height)
            if counted is None:
                return None
            if counted:
                message = RevealMessage.from_tx(tx)
                spent.append((message.round_id, message.nullifier))
        return BlockResults(height, spent, block.head.time)


def _raise_reason(
    height: int, pruned: list[HeightPrunedError], last_error: ChainError | None, *, has_response: bool
) -> NoReturn:
    """Raise the reason why no node has returned a block, as `BlockSource.fetch` documents."""
    if pruned and last_error is None:
        lowest = [error.lowest_height for error in pruned if error.lowest_height is not None]
        raise HeightPrunedError(f"block {height}: {pruned[-1]}", min(lowest, default=None))
    if pruned or has_response:
        raise ChainResponseError(f"block {height}: {last_error}")
    raise ChainUnavailable(f"block {height}: {last_error or 'no chain node is in sync'}")
