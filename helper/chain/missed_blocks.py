"""Reveals of ours that may have been counted in blocks that no node has any more.

Only blocks confirm a share, as long as there are blocks. Where some are gone for good, a node is asked by name
about reveals that were sent: they are public since then, so the question tells nothing. Nothing that still
waits is ever asked about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from helper.chain.copy_quorum import CopyQuorum
from helper.chain.node import Node
from helper.chain.node_pool import NodePool
from helper.chain.rpc_client import Spent
from helper.chain.verdicts import Verdict
from helper.errors import ChainError, ChainUnavailable
from helper.store.rows import SentReveal

EVERY = 10
"""Blocks between two looks at reveals that the chain calls spent though no block showed them."""

_PAGE = 500
_AT_ONCE = 8
_GAP = "chain.gap"


class MissedBlocksStore(Protocol):
    """The part of the store that is needed here."""

    async def unconfirmed(self, *, limit: int = 1000, after_id: int = 0) -> list[SentReveal]:
        """The shares in BROADCAST with an id above `after_id`, by id."""
        ...

    async def add_spent(self, spent: Sequence[Spent]) -> Collection[int]:
        """Keep nullifiers as spent; returns our rows that they confirmed."""
        ...

    async def get_meta(self, key: str) -> str | None:
        """A remembered text."""
        ...

    async def set_meta(self, key: str, value: str) -> None:
        """Remember a text."""
        ...


class MissedBlocksCheck:
    """Finds out which sent reveals were counted, once blocks are missing."""

    def __init__(self, store: MissedBlocksStore, endpoints: NodePool, quorum: CopyQuorum) -> None:
        self._store = store
        self._quorum = quorum
        self._endpoints = endpoints
        self._known: bool | None = None

    async def bridge(self, height: int) -> list[int]:
        """The blocks up to `height` will not be seen: remember that for good, and ask about all that was sent.

        Returns the rows that were confirmed. Raises `ChainUnavailable` when nobody could be asked: to be
        done again before anything is sent again, as a new proof would make another transaction.
        """
        await self._store.set_meta(_GAP, str(height))
        self._known = True
        return await self._confirm(lambda reveal: reveal.last_outcome != Verdict.UNAVAILABLE.name, needed=True)

    async def look(self, height: int) -> list[int]:
        """After the block at `height`: ask about reveals that the chain calls spent, every now and then.

        Returns the rows that were confirmed; nothing when no block was ever missed.
        """
        if height % EVERY:
            return []
        if self._known is None:
            self._known = await self._store.get_meta(_GAP) is not None
        if not self._known:
            return []
        return await self._confirm(lambda reveal: reveal.last_outcome == Verdict.SPENT.name, needed=False)

    async def _confirm(self, wanted: Callable[[SentReveal], bool], *, needed: bool) -> list[int]:
        confirmed: list[int] = []
        after = 0
        while page := await self._store.unconfirmed(limit=_PAGE, after_id=after):
            after = page[-1].share_id
            counted = await self._counted([r for r in page if r.sends and wanted(r)], needed=needed)
            if counted:
                confirmed += await self._store.add_spent(counted)
        return confirmed

    async def _counted(self, reveals: Sequence[SentReveal], *, needed: bool) -> list[Spent]:
        counted: list[Spent] = []
        problems: list[ChainError] = []
        slots = asyncio.Semaphore(_AT_ONCE)

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
        """By the chain's state where a consensus RPC can be asked, else by the fate of our own transaction.

        Where two nodes are configured, two must say so, as for a block.
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
            counted |= {endpoint} if result is not None and result.code == 0 else set()
            if len(counted) >= needed:
                return True
        if len(answered) < needed:
            raise ChainUnavailable("too few nodes could be asked about a reveal that was sent")
        return False
