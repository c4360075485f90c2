"""Fetches the counted reveals of a block.

With a consensus RPC this takes one request; with REST, one for the block and one for each reveal in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import NoReturn

from helper.chain.copy_quorum import BlockDisputedError, CopyQuorum, SecondCopyMissingError
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
    """Fetches blocks from any node. If two are configured, two must report the same reveals.

    Every block with reveals is compared, not only those with shares of this helper, so that requests reveal nothing
    about these shares.

    Args:
        quorum: decides whether one copy of a block is enough.
        uses_backoff: whether errors put a node into backoff. Old blocks are read without backoff, because a node that
            cannot return them is still valid for due shares.
        compares_empty: whether blocks without reveals are compared too. Otherwise one copy of such a block is enough,
            because it confirms nothing.
    """

    def __init__(
        self, node_pool: NodePool, quorum: CopyQuorum, *, uses_backoff: bool = True, compares_empty: bool = False
    ) -> None:
        self._node_pool = node_pool
        self._quorum = quorum
        self._uses_backoff = uses_backoff
        self._compares_empty = compares_empty
        self._lacks_second_copy = False  # True after a block got no second copy in time

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
            SecondCopyMissingError: no second node has reported the reveals yet.
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
            if not copies and not (self._quorum.needs_two_copies and (results.reveals or self._compares_empty)):
                return results
            copies.append((node, results))
            sources.sort(key=lambda source: source[0] in [node for node, _ in copies])
            if (agreed := self._find_agreed_copy(copies, height)) is not None:
                return agreed
        if copies:
            # A node that has pruned a block reports its lowest one. Other errors may be temporary.
            without_block = {node for node, error in pruned.items() if (error.lowest_height or 0) > height}
            others_pruned = set(self._node_pool.in_sync_nodes) <= {copied for copied, _ in copies} | without_block
            return self._check_single_copy(copies, height, others_pruned=others_pruned)
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
        """The copy that two nodes report, None if there is none. Nodes that report another one go into backoff."""
        node, newest = copies[-1]
        if not any(other is not node and set(copy.reveals) == set(newest.reveals) for other, copy in copies[:-1]):
            return None
        self._quorum.note_agreement(height)
        self._lacks_second_copy = False
        agreeing = {other for other, copy in copies if set(copy.reveals) == set(newest.reveals)}
        for other in {other for other, _ in copies} - agreeing:
            self._node_pool.record_error(
                other, ChainResponseError(f"block {height}: two other nodes report different reveals")
            )
        return newest

    def _check_single_copy(
        self, copies: Sequence[tuple[Node, BlockResults]], height: int, *, others_pruned: bool
    ) -> BlockResults:
        """Return the only copy of a block if one is enough.

        Raises an error if one is not enough, or if copies differ.

        Args:
            copies: the copies of one node, or copies that differ.
            height: height of the block.
            others_pruned: whether all other nodes in sync have pruned it. A block without reveals then needs no second
                copy. It does not need one either after an earlier block got none in time, because nodes that cannot
                return one old block usually cannot return many.
        """
        names = sorted({node.name for node, _ in copies})
        if len(names) > 1:
            self._quorum.note_dispute(height, ", ".join(names))
            raise BlockDisputedError(f"block {height}: {', '.join(names)} report different reveals")
        is_harmless = (others_pruned or self._lacks_second_copy) and not copies[0][1].reveals
        if not is_harmless:
            if not self._quorum.accept_single_copy(height):
                raise SecondCopyMissingError(f"block {height}: no second node has reported its reveals yet")
            self._lacks_second_copy = self._quorum.needs_two_copies
        return copies[0][1]

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
