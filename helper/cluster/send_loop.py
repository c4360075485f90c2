"""The loop of the host that sends for others: what they have prepared goes out, closed rounds are looked after.

On one host the processor hands each prepared share over itself (`processor.py`). Where several share a queue, messages
are prepared anywhere, and this loop finds them: when it is told of one, and every second in case nobody told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from helper.clock import Clock
from helper.errors import HelperError
from helper.reveal.broadcaster import Broadcaster
from helper.reveal.retention import BackgroundRetention, Retention

log = structlog.get_logger("helper.sending")

LOOK_SECONDS: Final = 1.0
"""How often it looks without being told."""


class SendLoop:
    """Sends what is prepared and was never sent. What was sent and is not counted is the reconciler's, block by block.

    Args:
        broadcaster: sends; does nothing while another host has the lease.
        retention: looks after closed rounds; likewise.
        paused: why nothing may be sent now, or None.
        clock: for the waits.
    """

    def __init__(
        self, *, broadcaster: Broadcaster, retention: Retention, paused: Callable[[], str | None], clock: Clock
    ) -> None:
        self._broadcaster = broadcaster
        self._tending = BackgroundRetention(retention)
        self._paused = paused
        self._clock = clock
        self._changed = asyncio.Event()
        self._told: str | None = None

    def wake(self) -> None:
        """There may be something to send."""
        self._changed.set()

    async def run(self) -> None:
        """Send until cancelled."""
        try:
            while True:
                self._changed.clear()
                await self._turn()
                await self._clock.wait(self._changed, self._clock.now() + LOOK_SECONDS)
        finally:
            await self._tending.stop()

    async def _turn(self) -> None:
        problem: Exception | None = None
        for step in (self._tending.turn, self._send):
            try:
                await step()
            except Exception as error:  # whatever it is, the other step and the next turn may go well
                problem = error
        self._tell(problem)

    async def _send(self) -> None:
        if self._paused() is None:
            await self._broadcaster.send_new()

    def _tell(self, problem: Exception | None) -> None:
        """One line when nothing can be sent, not one a second."""
        told = None if problem is None else repr(problem)
        if told is not None and told != self._told:
            if isinstance(problem, HelperError):
                log.error("prepared shares could not be sent", error=str(problem), advice=problem.advice)
            else:
                log.error("prepared shares could not be sent", exc_info=problem)
        elif told is None and self._told is not None:
            log.info("prepared shares are sent again")
        self._told = told
