"""Periodic database maintenance: integrity checks and deletion of old failure counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from helper.clock import Clock
from helper.errors import HelperError
from helper.store import rounds
from helper.store.store import Store

log = structlog.get_logger("helper.store")

DAMAGE_ADVICE: Final = (
    "Check the disk for errors, and restart the helper. If the problem is found again, restore the newest backup:"
    " `svote-helper db restore FILE --force`."
)
"""A share that a damaged index hid at the start is requeued by the next one."""
FIRST_CHECK_SECONDS: Final = 60.0
"""Seconds until the first check, which runs early because a damaged share may be due soon."""
CHECK_SECONDS: Final = 3600.0
"""Seconds between two checks. The checks are needed because a damaged index could hide a share."""


async def run_maintenance(store: Store, *, is_responsible: Callable[[], bool], clock: Clock) -> None:
    """Check the database every hour, and within a minute after damage was met, until cancelled.

    A failed check is logged and repeated the next time. Exactly one host of a cluster is responsible.
    """
    due = clock.monotonic()
    while True:
        await clock.sleep(FIRST_CHECK_SECONDS)
        if not is_responsible() or (clock.monotonic() < due and not store.has_met_damage):
            continue
        due = clock.monotonic() + CHECK_SECONDS
        try:
            await store.run(rounds.delete_old_failure_counts)
            for problem in await store.verify():
                log.error("database_damaged", reason=problem, advice=DAMAGE_ADVICE)
        except HelperError as error:
            log.error("database_check_failed", error=str(error), advice=error.advice)
