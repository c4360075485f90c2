"""The database, looked through now and then: what is damaged is found before it is due, what is over is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import structlog

from helper.clock import Clock
from helper.errors import HelperError

log = structlog.get_logger("helper.upkeep")

FIRST_LOOK: Final = 60.0
"""Seconds after the start of work until the first look: what is damaged may be due soon."""
LOOK_SECONDS: Final = 3600.0
"""Seconds between two looks: a damaged index could hide a share."""


class MaintainedStore(Protocol):
    """The store, which is above this package."""

    async def delete_old_failure_counts(self) -> object:
        """Delete failure counts of purged rounds beyond their retention."""
        ...

    async def verify(self) -> list[str]:
        """Check the whole database; returns what is wrong."""
        ...


class Maintenance:
    """Looks through a database for ever.

    Args:
        store: the database.
        mine: whether this host does it: one host's look is enough for all.
        clock: for the waits.
    """

    def __init__(self, store: MaintainedStore, *, mine: Callable[[], bool], clock: Clock) -> None:
        self._store = store
        self._mine = mine
        self._clock = clock

    async def run(self) -> None:
        """Look until cancelled; what cannot be looked at is told, and looked at the next time."""
        pause = FIRST_LOOK
        while True:
            await self._clock.sleep(pause)
            pause = LOOK_SECONDS
            if not self._mine():
                continue
            try:
                await self._store.delete_old_failure_counts()
                for found in await self._store.verify():
                    log.error("the database is damaged", reason=found)
            except HelperError as error:
                log.error("the database could not be checked", error=str(error), advice=error.advice)
