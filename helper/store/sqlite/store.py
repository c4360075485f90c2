"""The store in one SQLite file: one writer thread and two read-only connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Final

from helper.clock import Clock, SystemClock
from helper.errors import StoreCorrupt, StoreForeign
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sqlite.displacement import file_size, wal_path
from helper.store.sqlite.erasure import RETRY_SECONDS
from helper.store.sqlite.integrity_check import check_integrity
from helper.store.sqlite.reader import SqliteReader
from helper.store.sqlite.transaction import SqliteTransaction
from helper.store.sqlite.writer import SqliteWriter
from helper.store.store import Store

MAX_PROBLEMS: Final = 20
"""Maximum number of reported problems of a file."""


def reindex(tx: SqliteTransaction) -> None:
    """Rebuild all indexes from the rows."""
    tx.conn.execute("REINDEX")


class SqliteStore(Store):
    """A store in one SQLite file, which is created with mode 0600 if it does not exist.

    With a key, a new file is encrypted, and an unencrypted one is refused.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Clock | None = None,
        encryption: RowEncryption = UNENCRYPTED,
    ) -> None:
        clock = SystemClock() if clock is None else clock
        self._path = path
        self._encryption = encryption
        self._writer: SqliteWriter = SqliteWriter(path, clock, encryption)
        self._reader: SqliteReader = SqliteReader(path, encryption)
        self._operator_reader: SqliteReader = SqliteReader(path, encryption)
        super().__init__(self._writer, self._reader, self._operator_reader)

    async def open(self) -> None:
        """Create or open the file; raises StoreForeign, StoreCorrupt, StoreLocked, StoreKeyError or StoreError."""
        await self._writer.start()
        try:
            await self._reader.open()
            await self._operator_reader.open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Complete the submitted operations, finish erasure, and close the file."""
        # Close the readers first, because closing the writer's descriptors would release their locks.
        await self._reader.close()
        await self._operator_reader.close()
        await self._writer.stop()

    async def wait_for_erasure(self) -> None:
        """Wait until all data deleted before this call is erased from the files.

        Raises:
            StoreError: nothing can be stored, or the database was closed before.
        """
        await self._writer.run(lambda _tx: None)
        while self._writer.is_erasure_pending:
            await asyncio.sleep(RETRY_SECONDS)
            await self._writer.run(lambda _tx: None)

    async def verify(self) -> list[str]:
        """Check the entire file, quarantine damaged shares, and rebuild damaged indexes.

        Takes longer than reading the file. Each read is short, so that the writer can erase deleted rows in between.

        Returns:
            The problems that were found, as reported by SQLite.
        """
        # Check the rows first: a rebuilt index would contain the wrong due time of a damaged row and hide the row from
        # claims.
        problems: list[str] = []
        try:
            await self._check_rows()
        except StoreCorrupt as error:
            problems.append(str(error))
        problems += await self._check_integrity()
        if problems:
            self.has_found_damage = True
            with suppress(StoreCorrupt):  # a row is unreadable; the next check reports the problems again
                await self._writer.run(reindex)
        self._writer.has_met_damage = False
        return problems

    async def _check_integrity(self) -> list[str]:
        reader = SqliteReader(self._path, self._encryption)  # so that reads of operators do not wait for the check
        try:
            await reader.open()
            return (await check_integrity(reader, self.wait_for_erasure))[:MAX_PROBLEMS]
        except (StoreCorrupt, StoreForeign) as error:  # the first page is damaged
            return [str(error)]
        finally:
            await reader.close()

    @property
    def wal_bytes(self) -> int:
        """Size of the write-ahead log."""
        return file_size(wal_path(self._path))

    @property
    def erasure_pending_seconds(self) -> float:
        """Seconds for which deleted rows have not been erased from the files; 0 if there are none."""
        return self._writer.erasure_pending_seconds
