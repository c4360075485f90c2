"""Send loop of the lease holder: sends the messages that other hosts prepared.

On a single host, the dispatcher passes each prepared share to the sender. With a shared queue, any host can
prepare messages. This loop finds them when it is notified, and polls once per second in case a notification was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from helper.clock import Clock
from helper.core.refusals import PauseReason
from helper.observability.log_config import RecurringErrorLog
from helper.observability.stats import Stats
from helper.reveal.sender import Sender

log = structlog.get_logger("helper.cluster")

POLL_SECONDS: Final = 1.0
"""Maximum seconds between two polls of a shared queue, as notifications may be lost."""


class SendLoop:
    """Sends messages that were never sent. The sender tracks sent messages until they are confirmed.

    Args:
        sender: sends messages; idle while another host holds the lease.
        get_pause_reason: why nothing may be sent now, or None.
        clock: for the waits.
        stats: records failed attempts.
    """

    def __init__(
        self,
        *,
        sender: Sender,
        get_pause_reason: Callable[[], PauseReason | None],
        clock: Clock,
        stats: Stats,
    ) -> None:
        self._sender = sender
        self._get_pause_reason = get_pause_reason
        self._clock = clock
        self._stats = stats
        self._wake_event = asyncio.Event()
        self._errors = RecurringErrorLog(log, failed="send_failed", recovered="send_recovered")

    def wake(self) -> None:
        """Notify the loop that there may be something to send."""
        self._wake_event.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            self._wake_event.clear()
            error: Exception | None = None
            try:
                if self._get_pause_reason() is None:
                    await self._sender.send_new()
            except Exception as failure:  # the next iteration may succeed
                error = failure
            self._stats.note_attempt("sending prepared shares", error, self._clock.monotonic())
            self._errors.note(error)
            await self._clock.wait(self._wake_event, self._clock.now() + POLL_SECONDS)
