"""Periodic database maintenance: integrity checks and deletion of old failure counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from helper.clock import Clock
from helper.errors import HelperError
from helper.store.store import Store

log = structlog.get_logger("helper.store")

FIRST_CHECK_SECONDS: Final = 60.0
"""Seconds until the first check, which runs early because a damaged share may be due soon."""
CHECK_SECONDS: Final = 3600.0
"""Seconds between two checks. The checks are needed because a damaged index could hide a share."""


async def run_maintenance(store: Store, *, is_responsible: Callable[[], bool], clock: Clock) -> None:
    """Check the database every hour until cancelled. A failed check is logged and repeated the next time.

    Args:
        store: the database.
        is_responsible: whether this host runs the checks; exactly one host of a cluster does.
        clock: the clock.
    """
    pause = FIRST_CHECK_SECONDS
    while True:
        await clock.sleep(pause)
        pause = CHECK_SECONDS
        if not is_responsible():
            continue
        try:
            await store.delete_old_failure_counts()
            for problem in await store.verify():
                log.error("database_damaged", reason=problem)
        except HelperError as error:
            log.error("database_check_failed", error=str(error), advice=error.advice)
