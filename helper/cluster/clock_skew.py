"""Detects clock skew against the shared database.

All hosts must use the same clock to decide when a share is due.
"""

from __future__ import annotations

from typing import Final, Protocol

import structlog

from helper.clock import Clock
from helper.core.log_limits import LoggedProblem
from helper.core.refusals import PauseCause, PauseReason
from helper.errors import StoreError

log = structlog.get_logger("helper.cluster")

MAX_SKEW_SECONDS: Final = 2.0
"""Maximum skew; above it this host accepts, proves and sends nothing."""
CHECK_INTERVAL_SECONDS: Final = 10.0


class Database(Protocol):
    """A database with its own clock, implemented by `helper.store.store.Store`."""

    async def measure_clock_skew(self) -> float:
        """Return by how many seconds the database clock is ahead of this host's."""
        ...


class ClockSkewMonitor:
    """Compares the database's clock with this host's every ten seconds.

    If the database is unreachable, the last comparison remains valid. Between comparisons the skew follows this host's
    own clocks, so that a change of its wall clock is detected immediately.
    """

    def __init__(self, database: Database, *, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._problem = LoggedProblem()
        self._offset = self._own_offset()  # the database's wall clock minus this host's monotonic clock

    @property
    def skew_seconds(self) -> float:
        """Seconds that the database's clock is ahead of this host's; 0 before the first comparison."""
        return self._offset - self._own_offset()

    def _own_offset(self) -> float:
        return self._clock.now() - self._clock.monotonic()

    @property
    def fault_reason(self) -> PauseReason | None:
        """Why this host's clock must not be used, or None."""
        seconds = self.skew_seconds
        if abs(seconds) <= MAX_SKEW_SECONDS:
            return None
        return PauseCause.CLOCK_OFF_DATABASE.reason(round(abs(seconds), 1), "behind" if seconds > 0 else "ahead of")

    async def compare_clocks(self) -> None:
        """Compare the clocks now.

        Raises:
            StoreError: the database is unreachable.
        """
        ahead = await self._database.measure_clock_skew()
        self._offset = self._own_offset() + ahead
        reason = self.fault_reason
        if reason is None:
            if self._problem.clear():
                log.info("clock_skew_recovered", seconds=round(ahead, 3))
        elif self._problem.note():  # without the reason, whose seconds change
            log.error(
                "clock_skew_exceeded",
                reason=str(reason),
                advice="Correct the clock of this host or of the database server.",
            )

    async def run(self) -> None:
        """Compare the clocks periodically until cancelled."""
        while True:
            await self._clock.sleep(CHECK_INTERVAL_SECONDS)
            try:
                await self.compare_clocks()
            except StoreError as error:
                log.warning("clock_skew_check_failed", reason=str(error))
