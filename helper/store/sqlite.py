"""The store that ships: one SQLite file, one thread that writes, one connection that reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from helper.clock import Clock, SystemClock
from helper.errors import StoreCorrupt, StoreError
from helper.share import ShareState
from helper.store import messages, reading, work
from helper.store.listing import list_shares
from helper.store.reading import Reader
from helper.store.rows import DamagedShare, DueAhead, FailureGroup, QueueEntry, QueueFilter, QueueStory
from helper.store.sqlite_acts import SqliteActs
from helper.store.sqlite_chain import SqliteChain
from helper.store.sqlite_work import SqliteWork
from helper.store.writer import Writer, WriterStats

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


class SqliteStore(SqliteWork, SqliteChain, SqliteActs):
    """All of `helper.store.base.Store` on one SQLite file.

    Args:
        path: the database; made with mode 0600 when it is not there.
        clock: gives the times of history and of erasure.
        on_damaged: called on the event loop with each row that failed its check and was set aside.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Clock | None = None,
        on_damaged: Callable[[DamagedShare], None] = report_damaged,
    ) -> None:
        self._clock = SystemClock() if clock is None else clock
        self._writer = Writer(path, self._clock, on_damaged)
        self._reader = Reader(path)
        self._operators = Reader(path)

    async def open(self) -> None:
        """Make or open the file; raises StoreForeign, StoreCorrupt, StoreLocked or StoreError."""
        await self._writer.start()
        try:
            await self._reader.open()
            await self._operators.open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Finish what was handed in, erase what is to be erased, and let go of the file."""
        # The readers first: closing the writer's descriptors would drop their locks.
        await self._reader.close()
        await self._operators.close()
        await self._writer.stop()

    async def recover(self) -> int:
        """On start: every WITNESSED share back to RECEIVED at its own time."""
        total = 0
        while some := await self._writer.run(partial(work.recover_some, at_ms=self._now_ms(), limit=RECOVERED_AT_ONCE)):
            total += some
        return total

    async def erased(self) -> None:
        """Wait until everything deleted before this call is gone from the files."""
        await self._writer.run(lambda _tx: None, after_erasure=True)

    async def verify(self) -> list[str]:
        """Look through the whole file: damaged shares are set aside, damaged indexes made anew.

        Takes as long as reading the file; the writer goes on meanwhile.

        Returns:
            What is still wrong, in SQLite's words.
        """
        # The rows first: an index that is made anew takes each row's word, and would file a damaged one under a time
        # at which nobody looks for it.
        await self._check_rows()
        if await self._integrity():
            await self._writer.run(work.reindex)
        return await self._integrity()

    async def _check_rows(self) -> None:
        after: int | None = 0
        while after is not None:
            op = partial(messages.check_some, at_ms=self._now_ms(), after=after, limit=CHECKED_AT_ONCE)
            after = await self._writer.run(op)

    async def _integrity(self) -> list[str]:
        try:
            found = [str(row[0]) for row in await self._operators.run("PRAGMA integrity_check(20)")]
        except StoreCorrupt as error:
            return [str(error)]
        return [] if found == ["ok"] else found

    @property
    def trouble(self) -> str | None:
        """Why the disk did not take the last commit, None while it does; tried again every half second."""
        return self._writer.trouble.reason

    async def pulse(self) -> None:
        """Return once the writing thread has had a turn, however the disk is: it lives."""
        with suppress(StoreError):
            await self._writer.run(lambda _tx: None)

    @property
    def stats(self) -> WriterStats:
        """What the writer has done since the start."""
        return self._writer.stats

    # ------------------------------------------------------------------ operators

    async def counts(self) -> dict[bytes, dict[ShareState, int]]:
        """Shares by round and state; SUBMITTED counts tombstones."""
        return await reading.counts(self._operators.fetch)

    async def list_shares(self, query: QueueFilter, limit: int) -> list[QueueEntry]:
        """The first `limit` live shares that match, by time due."""
        return await list_shares(self._operators.fetch, query, limit)

    async def show(self, share_ref: str) -> QueueStory | None:
        """The whole story of one live share, None when none or more than one has this name."""
        return await reading.show(self._operators.fetch, share_ref)

    async def damaged(self) -> list[DamagedShare]:
        """The rows that were set aside."""
        return await reading.damaged(self._operators.fetch)

    async def due_ahead(self, *, now: float) -> dict[bytes, DueAhead]:
        """When the waiting shares of each round are due."""
        return await reading.due_ahead(self._operators.fetch, int(now * 1000))

    async def failures(self, *, limit: int) -> list[FailureGroup]:
        """What failed for good, by stage and reason."""
        return await reading.failures(self._operators.fetch, limit)
