"""Runs operator actions on the database file while no daemon runs, holding the daemon's lock."""

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
    """Round status according to the file: closed if the daemon found the round closed on the chain."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def frozen(self, round_id: bytes) -> str | None:  # noqa: ARG002 (the protocol's)
        """Return None: without the chain, nothing is known."""
        return None

    async def is_closed(self, round_id: bytes) -> bool:
        """Report whether the daemon had found the round closed."""
        return any(row.round_id == round_id and row.closed_at is not None for row in await self._store.rounds())

    def forget(self, round_id: bytes) -> None:
        """Do nothing: there is no cache."""


@asynccontextmanager
async def operations_on(database: Path) -> AsyncIterator[Operations]:
    """Open the database for operator actions.

    Raises:
        StoreLocked: a daemon has it open.
        StoreError: it is not usable.
    """
    store = SqliteStore(database)
    await store.open()
    try:
        yield Operations(store=store, judge=FileJudge(store), checks=proofs, wake=lambda: None, running=False)
    finally:
        await store.close()


def this_user() -> Actor:
    """Return the user who runs this command, not the owner of the database."""
    return Actor(os.getuid(), user_name(os.getuid()), "file")
