"""Checks sent reveals by nullifier after blocks were missed.

Normally only blocks confirm a share. If no node has some blocks any more, nodes are queried for the nullifiers of sent
reveals. These are public, so the requests reveal nothing; nullifiers of waiting shares are never sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from helper.chain.copy_quorum import CopyQuorum
from helper.chain.counted_reveals import shows_spent
from helper.chain.node import Node
from helper.chain.node_pool import NodePool
from helper.chain.rpc_client import Spent
from helper.chain.verdicts import Verdict
from helper.errors import ChainError, ChainUnavailable
from helper.store.rows import SentReveal
from helper.store.store import Store

EVERY = 10
"""Interval, in blocks, of checks of reveals that the chain reports as spent although no block showed them."""

_PAGE = 500
_CONCURRENCY = 8
_GAP = "chain.gap"


class MissedBlocksCheck:
    """Finds counted reveals after blocks were missed."""

    def __init__(self, store: Store, endpoints: NodePool, quorum: CopyQuorum) -> None:
        self._store = store
        self._quorum = quorum
        self._endpoints = endpoints
        self._missed: bool | None = None

    async def record_missed(self, height: int) -> list[int]:
        """Record permanently that blocks up to `height` were missed, and check all sent reveals.

        Returns:
            The ids of confirmed rows.

        Raises:
            ChainUnavailable: no node answered. Repeat the call before anything is sent again, because a new proof
                makes another transaction.
        """
        await self._store.set_meta(_GAP, str(height))
        self._missed = True
        return await self._confirm(lambda reveal: reveal.last_outcome != Verdict.UNAVAILABLE.name, needed=True)

    async def check_spent(self, height: int) -> list[int]:
        """Every `EVERY` blocks, check reveals that the chain reports as spent, if blocks were ever missed.

        Returns:
            The ids of confirmed rows.
        """
        if height % EVERY:
            return []
        if self._missed is None:
            self._missed = await self._store.get_meta(_GAP) is not None
        if not self._missed:
            return []
        return await self._confirm(lambda reveal: reveal.last_outcome == Verdict.SPENT.name, needed=False)

    async def _confirm(self, selected: Callable[[SentReveal], bool], *, needed: bool) -> list[int]:
        confirmed: list[int] = []
        after = 0
        while page := await self._store.unconfirmed(limit=_PAGE, after_id=after):
            after = page[-1].share_id
            counted = await self._counted([r for r in page if r.sends and selected(r)], needed=needed)
            if counted:
                confirmed += await self._store.add_spent(counted)
        return confirmed

    async def _counted(self, reveals: Sequence[SentReveal], *, needed: bool) -> list[Spent]:
        counted: list[Spent] = []
        problems: list[ChainError] = []
        slots = asyncio.Semaphore(_CONCURRENCY)

        async def ask(reveal: SentReveal) -> None:
            async with slots:
                try:
                    if await self._is_counted(reveal):
                        counted.append((reveal.round_id, reveal.nullifier))
                except ChainError as error:
                    problems.append(error)

        async with asyncio.TaskGroup() as group:
            for reveal in reveals:
                group.create_task(ask(reveal))
        if problems and needed:
            raise problems[0]
        return counted

    async def _is_counted(self, reveal: SentReveal) -> bool:
        """Whether a reveal was counted, by the chain's state (RPC), else by the result of its transaction (REST).

        If two nodes are configured, two must confirm it, as for a block.
        """
        needed = 1 if self._quorum.is_alone else 2
        answered: set[Node] = set()
        counted: set[Node] = set()
        for endpoint in self._endpoints.fresh_rpc:
            assert endpoint.rpc is not None
            try:
                is_spent = await endpoint.rpc.spent(reveal.round_id, reveal.nullifier)
            except ChainError as error:
                self._endpoints.failed(endpoint, error, rpc=True)
                continue
            answered.add(endpoint)
            counted |= {endpoint} if is_spent else set()
            if len(answered) >= needed:
                return len(counted) >= needed
        for endpoint in self._endpoints.fresh:
            if endpoint in answered:
                continue
            try:
                result = await endpoint.client.tx(reveal.prepared.tx_hash)
            except ChainError as error:
                self._endpoints.failed(endpoint, error)
                continue
            answered.add(endpoint)
            counted |= {endpoint} if result is not None and shows_spent(result) else set()
            if len(counted) >= needed:
                return True
        if len(answered) < needed:
            raise ChainUnavailable("too few nodes answered about a sent reveal")
        return False
