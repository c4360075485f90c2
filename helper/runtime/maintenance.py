"""Periodic database maintenance: integrity checks and deletion of old failure counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import structlog

from helper.clock import Clock
from helper.errors import HelperError

log = structlog.get_logger("helper.runtime")

FIRST_CHECK_SECONDS: Final = 60.0
"""Seconds until the first check, which runs early because a damaged share may be due soon."""
CHECK_SECONDS: Final = 3600.0
"""Seconds between two checks. They are needed because a damaged index could hide a share."""


class MaintainedStore(Protocol):
    """Interface of the store for maintenance. This package must not import the store."""

    async def delete_old_failure_counts(self) -> object:
        """Delete failure counts of purged rounds beyond their retention."""
        ...

    async def verify(self) -> list[str]:
        """Check the entire database and return the problems."""
        ...


class Maintenance:
    """Checks the database every hour.

    Args:
        store: the database.
        is_responsible: whether this host runs the checks; only one of the hosts that share a database does.
        clock: the clock.
    """

    def __init__(self, store: MaintainedStore, *, is_responsible: Callable[[], bool], clock: Clock) -> None:
        self._store = store
        self._is_responsible = is_responsible
        self._clock = clock

    async def run(self) -> None:
        """Run until cancelled. A failed check is logged and repeated the next time."""
        pause = FIRST_CHECK_SECONDS
        while True:
            await self._clock.sleep(pause)
            pause = CHECK_SECONDS
            if not self._is_responsible():
                continue
            try:
                await self._store.delete_old_failure_counts()
                for problem in await self._store.verify():
                    log.error("database_damaged", reason=problem)
            except HelperError as error:
                log.error("database_check_failed", error=str(error), advice=error.advice)
