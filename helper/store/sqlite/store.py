"""The store in one SQLite file: one writer thread and two read-only connections.

An operation is a function of a `Transaction`. All operations that are waiting when the thread is idle run in one
transaction; those submitted during its commit form the next batch. An operation that raises before it has written fails
alone. If an operation raises after it has written, the transaction is rolled back and every operation of the batch runs
again in its own transaction. This is rare and avoids a savepoint per operation. Shares that arrive together are
inserted as one operation.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from helper.clock import Clock, SystemClock
from helper.errors import StoreCorrupt, StoreDisplaced, StoreError, StoreForeign
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sqlite.displacement import file_size, wal_path
from helper.store.sqlite.erasure import RETRY_SECONDS, Eraser
from helper.store.sqlite.errors import DiskHealth, UnreadableRowError, is_damage, is_environment_error, translate
from helper.store.sqlite.integrity_check import check_integrity
from helper.store.sqlite.opening import OpenedDatabase, open_database
from helper.store.sqlite.reader import SqliteReader
from helper.store.sqlite.transaction import SqliteTransaction
from helper.store.store import Store
from helper.store.transaction import UNREADABLE_SHARE
from helper.store.writer_thread import WriteJob, WriterThread, deliver_results, split_batch

log = structlog.get_logger("helper.store")

MAX_PROBLEMS: Final = 20
"""Maximum number of reported problems of a file."""


class SqliteWriter(WriterThread[SqliteTransaction]):
    """The writer thread of one database file."""

    def __init__(self, path: Path, clock: Clock, encryption: RowEncryption = UNENCRYPTED) -> None:
        super().__init__()
        self._path = path
        self._encryption = encryption
        self._clock = clock
        self._opened: OpenedDatabase | None = None
        self.disk_health = DiskHealth(path, clock)

    @property
    def write_error(self) -> str | None:
        """Reason why the database cannot be written, None if it can; rechecked every half second."""
        return self.disk_health.displaced or self.disk_health.reason

    @property
    def eraser(self) -> Eraser | None:
        """Erases the deleted rows of the file; None before it is open."""
        return None if self._opened is None else self._opened.eraser

    # ------------------------------------------------------------------ the thread

    def _open(self) -> None:
        self._opened = open_database(self._path, self._clock, encryption=self._encryption)
        self._keys = self._opened.tx.keys

    def _close(self) -> None:
        assert self._opened is not None
        try:
            self._opened.close()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"the database could not be closed: {error}") from error

    def _run_batches(self) -> None:
        opened = self._opened
        is_running = opened is not None
        while opened is not None and is_running:
            batch, is_running = self._collect_batch(self.disk_health.max_wait(opened.eraser.max_wait()))
            self.disk_health.record_location(opened.path_monitor.displacement_reason())
            try:
                if batch:
                    self._process_batch(opened, batch)
                if self.disk_health.displaced is None:
                    if self.disk_health.is_probe_due:
                        self._probe(opened)
                    opened.eraser.run_due(idle=self._jobs.empty())
            except Exception as error:
                # The thread must not end, or callers would wait forever. Resolved jobs are skipped.
                log.exception("writer_failed")
                self._roll_back(opened.tx)
                for job in batch:
                    job.error = translate(error)
                deliver_results(batch)

    def _probe(self, opened: OpenedDatabase) -> None:
        with suppress(Exception):
            self._commit(opened, [], probe=True)

    def _process_batch(self, opened: OpenedDatabase, batch: list[WriteJob]) -> None:
        try:
            self._commit(opened, batch)
        except UnreadableRowError as error:
            self._quarantine(opened.tx, error.share_id)
            self._process_batch(opened, batch)
            return
        except Exception as error:
            self.has_met_damage |= is_damage(error)
            # An error of the disk affects every operation, so running them individually is pointless.
            if isinstance(error, StoreDisplaced) or is_environment_error(error) or len(batch) == 1:
                for job in batch:
                    job.value, job.error = None, translate(error)
            else:
                for job in batch:
                    self._process_batch(opened, [job])
                return
        self._deliver(opened, batch)

    def _quarantine(self, tx: SqliteTransaction, share_id: int) -> None:
        """Quarantine a share whose row cannot be read, so that no operation reads it again."""
        tx.conn.execute("BEGIN IMMEDIATE")
        # If it was quarantined before for a failed check, replace that entry: such a row is read on confirmation.
        tx.execute("drop_damaged", (share_id,))
        tx.quarantine(share_id, UNREADABLE_SHARE)
        tx.conn.execute("COMMIT")
        self._report_damaged(tx)

    def _commit(self, opened: OpenedDatabase, batch: list[WriteJob], *, probe: bool = False) -> None:
        """Run a batch in one transaction.

        Raises:
            Exception: the transaction was rolled back; no change was stored.
        """
        tx = opened.tx
        conn = tx.conn
        if self.disk_health.displaced is not None:
            # Do not checkpoint either: moved files must stay unchanged so that they match when moved back.
            raise StoreDisplaced(f"nothing was written: {self.disk_health.displaced}")
        try:
            conn.execute("BEGIN IMMEDIATE")
            if probe:
                tx.force_sync()
            for part in split_batch(batch):
                self._run_part(tx, part)
            tx.flush_counts()
            conn.execute("COMMIT")
        except Exception as error:
            self._roll_back(tx)
            for job in batch:
                job.error = None
            self.disk_health.record_failure(error)
            raise
        if probe:
            self.disk_health.record_success()

    def _count_changes(self, tx: SqliteTransaction) -> int:
        return tx.conn.total_changes

    def _is_fatal(self, tx: SqliteTransaction, error: Exception) -> bool:
        unrecoverable = is_damage(error) or is_environment_error(error) or isinstance(error, UnreadableRowError)
        return unrecoverable or not tx.conn.in_transaction

    def _translate(self, error: BaseException) -> BaseException:
        return translate(error)

    def _roll_back(self, tx: SqliteTransaction) -> None:
        if tx.conn.in_transaction:
            with suppress(sqlite3.Error):
                tx.conn.execute("ROLLBACK")
        tx.reset_after_rollback()

    def _deliver(self, opened: OpenedDatabase, batch: list[WriteJob]) -> None:
        if opened.tx.has_deleted_rows:
            opened.tx.has_deleted_rows = False
            opened.eraser.record_deletion()
        self._report_damaged(opened.tx)
        deliver_results(batch)


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
        self._clock = clock
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
            StoreError: nothing can be stored, or the database is closed or moved meanwhile.
        """
        await self._writer.run(lambda _tx: None)
        began_at = self._clock.monotonic()  # later deletions may follow each other without end
        while (eraser := self._writer.eraser) is not None and eraser.is_pending_since(began_at):
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
        return 0.0 if self._writer.eraser is None else self._writer.eraser.pending_seconds
