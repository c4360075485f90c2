"""The store in one SQLite file: one writing thread and two read-only connections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from helper.clock import Clock, SystemClock
from helper.errors import StoreCorrupt
from helper.store.rows import DamagedShare
from helper.store.sqlite.reader import Reader
from helper.store.sqlite.transaction import SqliteTransaction
from helper.store.sqlite.writer import Writer
from helper.store.store import Store, report_damaged
from helper.store.writer_thread import WriterStats


def reindex(tx: SqliteTransaction) -> None:
    """Make all indexes anew from their rows."""
    tx.conn.execute("REINDEX")


class SqliteStore(Store):
    """A store in one SQLite file.

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
        clock = SystemClock() if clock is None else clock
        self._writer: Writer = Writer(path, clock, on_damaged)
        self._reader: Reader = Reader(path)
        self._operators: Reader = Reader(path)
        super().__init__(clock, self._writer, self._reader, self._operators)

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
            await self._writer.run(reindex)
        return await self._integrity()

    async def _integrity(self) -> list[str]:
        try:
            found = [str(row[0]) for row in await self._operators.run("PRAGMA integrity_check(20)")]
        except StoreCorrupt as error:
            return [str(error)]
        return [] if found == ["ok"] else found

    @property
    def shared(self) -> bool:
        """No: the file is locked by one daemon."""
        return False

    async def sender_host(self) -> str:
        """Nobody: no other host works on the file."""
        return ""

    async def skew(self) -> float:
        """0: times are this host's."""
        return 0.0

    def listen(self, heard: Callable[[str], None]) -> None:
        """Nobody else says anything."""

    @property
    def trouble(self) -> str | None:
        """Why nothing can be written, None while it can; checked again every half second."""
        return self._writer.trouble.displaced or self._writer.trouble.reason

    @property
    def stats(self) -> WriterStats:
        """What the writer has done since the start."""
        return self._writer.stats
