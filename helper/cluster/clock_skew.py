"""Whether this host's clock is that of the database that it shares: "never early" is told by one clock, not by ten."""

from __future__ import annotations

from typing import Final, Protocol

import structlog

from helper.clock import Clock
from helper.errors import StoreError

log = structlog.get_logger("helper.skew")

TOLERANCE_SECONDS: Final = 2.0
"""Further from the database's clock than this, a host takes, proves and sends nothing."""
LOOK_SECONDS: Final = 10.0


class Database(Protocol):
    """What has a clock of its own."""

    async def skew(self) -> float:
        """How many seconds its clock is ahead of this host's."""
        ...


class ClockSkewMonitor:
    """Compares the clocks every ten seconds. One that cannot be asked leaves what was found before.

    Between two looks this host's own clocks tell: one that is set is out of step from that moment on.
    """

    def __init__(self, database: Database, *, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._told = False
        self._ahead = self._own()  # the database's wall clock less this host's monotonic one

    @property
    def seconds(self) -> float:
        """By how many seconds the database's clock is ahead of this host's; 0 before the first look."""
        return self._ahead - self._own()

    def _own(self) -> float:
        return self._clock.now() - self._clock.monotonic()

    @property
    def trouble(self) -> str | None:
        """Why this host must do nothing by its clock, or None."""
        seconds = self.seconds
        if abs(seconds) <= TOLERANCE_SECONDS:
            return None
        side = "behind" if seconds > 0 else "ahead of"
        return f"this machine's clock is {abs(seconds):.1f} s {side} the database's"

    async def look(self) -> None:
        """Compare now.

        Raises:
            StoreError: the database cannot be asked.
        """
        ahead = await self._database.skew()
        self._ahead = self._own() + ahead
        trouble, told, self._told = self.trouble, self._told, self.trouble is not None
        if trouble is not None and not told:
            log.error("nothing is done by a wrong clock", reason=trouble, advice="Set the clock, here or there.")
        elif trouble is None and told:
            log.info("the clocks agree again", seconds=round(ahead, 3))

    async def run(self) -> None:
        """Compare for ever."""
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except StoreError as error:
                log.warning("the database's clock could not be looked at", reason=str(error))
