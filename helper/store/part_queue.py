"""The part of a store that shows the queue, and looks after it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from helper.core.share import ShareState
from helper.errors import StoreError
from helper.store import reader
from helper.store.engine import StorePart
from helper.store.operations import messages, shares
from helper.store.rows import DamagedShare, DueAhead, FailureGroup, QueueEntry, QueueFilter, QueueStory
from helper.store.share_listing import list_shares

log = structlog.get_logger("helper.store")

RECOVERED_AT_ONCE: Final = 200
CHECKED_AT_ONCE: Final = 100
"""Shares that one operation of the background check reads, a few milliseconds' worth: wallets wait no longer."""


def report_damaged(share: DamagedShare) -> None:
    """Name a row that was set aside in the log."""
    log.error(
        "a share's row is damaged on disk and was set aside",
        key=share.ref,
        advice="Its round's other helpers may still reveal it; restore a backup to have it revealed here.",
    )


class QueuePart(StorePart):
    """`Queue`, `Outlook`, and what is done on start and in the background."""

    async def recover(self) -> int:
        """On start: every WITNESSED share back to RECEIVED at its own time."""
        total = 0
        while some := await self._writer.run(
            partial(shares.recover_some, at_ms=self._now_ms(), limit=RECOVERED_AT_ONCE)
        ):
            total += some
        return total

    async def _check_rows(self) -> None:
        after: int | None = 0
        while after is not None:
            op = partial(messages.check_some, at_ms=self._now_ms(), after=after, limit=CHECKED_AT_ONCE)
            after = await self._writer.run(op)

    async def pulse(self) -> None:
        """Return once the writing thread has had a turn, however the disk is: it lives."""
        with suppress(StoreError):
            await self._writer.run(lambda _tx: None)

    # ------------------------------------------------------------------ operators

    async def counts(self) -> dict[bytes, dict[ShareState, int]]:
        """Shares by round and state; SUBMITTED counts tombstones."""
        return await reader.counts(self._operators.fetch)

    async def list_shares(self, query: QueueFilter, limit: int) -> list[QueueEntry]:
        """The first `limit` live shares that match, by time due."""
        return await list_shares(self._operators.fetch, query, limit)

    async def show(self, share_ref: str) -> QueueStory | None:
        """The whole story of one live share, None when none or more than one has this name."""
        return await reader.show(self._operators.fetch, share_ref)

    async def damaged(self) -> list[DamagedShare]:
        """The rows that were set aside."""
        return await reader.damaged(self._operators.fetch)

    async def due_ahead(self, *, now: float) -> dict[bytes, DueAhead]:
        """When the waiting shares of each round are due."""
        return await reader.due_ahead(self._operators.fetch, int(now * 1000))

    async def failures(self, *, limit: int) -> list[FailureGroup]:
        """What failed for good, by stage and reason."""
        return await reader.failures(self._operators.fetch, limit)
