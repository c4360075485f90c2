"""Acts on the database's file while no daemon runs: this process takes the daemon's lock, so nobody else writes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import proofs
from helper.operations.actions import Operations
from helper.server.peer_credentials import user_name
from helper.store.action_rows import Actor
from helper.store.sqlite.store import SqliteStore
from helper.store.store import Store


class FileJudge:
    """What the file says of rounds: closed are those that the daemon found closed by the chain's word."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def frozen(self, round_id: bytes) -> str | None:  # noqa: ARG002 (the protocol's)
        """Nothing is known of it without the chain."""
        return None

    async def is_closed(self, round_id: bytes) -> bool:
        """Whether it was found closed before the daemon ended."""
        return any(one.round_id == round_id and one.closed_at is not None for one in await self._store.rounds())

    def forget(self, round_id: bytes) -> None:
        """Nobody remembers it."""


@asynccontextmanager
async def operations_on(database: Path) -> AsyncIterator[Operations]:
    """What a daemon would do, on the file alone.

    Raises:
        StoreLocked: a daemon has it open.
        StoreError: it cannot be used.
    """
    store = SqliteStore(database)
    await store.open()
    try:
        yield Operations(store=store, judge=FileJudge(store), checks=proofs, wake=lambda: None, running=False)
    finally:
        await store.close()


def this_user() -> Actor:
    """Who runs this command, even while it acts as the owner of the database."""
    return Actor(os.getuid(), user_name(os.getuid()), "file")
