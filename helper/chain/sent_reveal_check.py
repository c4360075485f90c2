"""Checks sent reveals by nullifier after blocks were missed.

Normally only blocks confirm a share. If every node has pruned some blocks, nodes are queried for the nullifiers of sent
reveals. These are public, so the requests reveal nothing; nullifiers of unsent shares are never included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from helper.chain.broadcast_outcome import Verdict
from helper.chain.node import Node
from helper.chain.node_pool import NodePool, gather_limited
from helper.chain.reveal_transaction import shows_spent
from helper.chain.rpc_client import CountedNullifier
from helper.errors import ChainError, ChainUnavailable
from helper.store.models import SentReveal
from helper.store.store import Store

CHECK_INTERVAL_BLOCKS = 10
"""Interval, in blocks, of checks of reveals that a node reports as spent although no block contained them."""

_PAGE_SIZE = 500
_CONCURRENCY = 8


class SentRevealCheck:
    """Finds counted reveals after blocks were missed."""

    def __init__(self, store: Store, node_pool: NodePool) -> None:
        self._store = store
        self._node_pool = node_pool
        self._checked_height = 0

    async def record_missed(self) -> list[int]:
        """Check all sent reveals, because blocks were missed that no node has.

        Returns:
            The ids of confirmed rows.

        Raises:
            ChainUnavailable: no node responded. Repeat the call before anything is sent again, because a new proof
                creates a different transaction.
        """
        return await self._confirm_counted(
            lambda reveal: reveal.last_outcome != Verdict.UNAVAILABLE.name, must_respond=True
        )

    async def check_spent(self, height: int) -> list[int]:
        """Check reveals that a node reports as spent although no block has confirmed them for ten blocks.

        Does nothing within `CHECK_INTERVAL_BLOCKS` of the last check.

        Returns:
            The ids of confirmed rows.
        """
        if height - self._checked_height < CHECK_INTERVAL_BLOCKS:
            return []
        self._checked_height = height

        def is_late(reveal: SentReveal) -> bool:
            waited = height - (reveal.first_sent_height or height)
            return reveal.last_outcome == Verdict.SPENT.name and waited >= CHECK_INTERVAL_BLOCKS

        return await self._confirm_counted(is_late, must_respond=False)

    async def find_counted(self, reveals: Sequence[SentReveal]) -> list[CountedNullifier]:
        """Return the nullifiers of those sent reveals that nodes report as counted.

        A reveal about which too few nodes respond is left out.
        """
        return await self._find_counted(reveals, must_respond=False)

    async def _confirm_counted(self, is_selected: Callable[[SentReveal], bool], *, must_respond: bool) -> list[int]:
        confirmed: list[int] = []
        after = 0
        while page := await self._store.list_unconfirmed(limit=_PAGE_SIZE, after_id=after):
            after = page[-1].share_id
            selected = [reveal for reveal in page if reveal.sends and is_selected(reveal)]
            counted = await self._find_counted(selected, must_respond=must_respond)
            if counted:
                confirmed += await self._store.add_spent(counted)
        return confirmed

    async def _find_counted(self, reveals: Sequence[SentReveal], *, must_respond: bool) -> list[CountedNullifier]:
        async def is_counted(reveal: SentReveal) -> bool:
            try:
                return await self._is_counted(reveal)
            except ChainError:
                if must_respond:
                    raise
                return False

        results = await gather_limited(reveals, is_counted, _CONCURRENCY)
        return [(r.round_id, r.nullifier) for r, counted in zip(reveals, results, strict=True) if counted]

    async def _is_counted(self, reveal: SentReveal) -> bool:
        """Whether a reveal was counted, as reported by nodes.

        A node with an RPC is queried for the chain's state, any other for the result of the transaction. If two nodes
        are configured, two must confirm it, as for a block.
        """
        needed = self._node_pool.needed
        responding: set[Node] = set()
        counted: set[Node] = set()
        for node in self._node_pool.usable_rpc_nodes:
            assert node.rpc is not None
            try:
                is_spent = await node.rpc.is_spent(reveal.round_id, reveal.nullifier)
            except ChainError as error:
                self._node_pool.record_error(node, error, rpc=True)
                continue
            responding.add(node)
            counted |= {node} if is_spent else set()
            if len(counted) >= needed:
                return True
        for node in self._node_pool.usable_nodes:
            if node in responding:
                continue
            try:
                result = await node.client.tx(reveal.prepared.tx_hash)
            except ChainError as error:
                self._node_pool.record_error(node, error)
                continue
            responding.add(node)
            counted |= {node} if result is not None and shows_spent(result) else set()
            if len(counted) >= needed:
                return True
        if len(responding) < needed:
            raise ChainUnavailable("too few nodes responded to a query about a sent reveal")
        return False
