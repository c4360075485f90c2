"""The SQLite writer thread: many operations share one transaction and one fsync.

An operation is a function of a `Transaction`. All operations that are waiting when the thread is free run in one
transaction; those submitted during its commit form the next batch. An operation that raises before it has written
fails alone. If one raises after it has written, the transaction is rolled back and every operation of the batch runs
again in its own transaction: this is rare, and avoids a savepoint per operation. Shares that arrive together are
inserted as one operation.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from helper.clock import Clock
from helper.errors import StoreCorrupt, StoreDisplaced, StoreError
from helper.store.disk_health import DiskHealth
from helper.store.rows import DamagedShare
from helper.store.sqlite.errors import UnreadableRowError, is_damage, is_environment, translate
from helper.store.sqlite.opening import OpenedDatabase, open_database
from helper.store.sqlite.schema import latest_version
from helper.store.sqlite.transaction import SqliteTransaction
from helper.store.transaction import UNREADABLE, Keys
from helper.store.write_jobs import BatchFailedError, WriteJob, parts, resolve, tell
from helper.store.writer_thread import WritingThread

log = structlog.get_logger("helper.store")


class Writer(WritingThread[SqliteTransaction]):
    """The writer thread of one database file.

    Args:
        path: the database file.
        clock: used for erasure and for times in the database.
        on_damaged: called on the event loop with each row that was set aside.

    Attributes:
        trouble: whether the database can be written.
    """

    def __init__(self, path: Path, clock: Clock, on_damaged: Callable[[DamagedShare], None]) -> None:
        super().__init__(on_damaged)
        self._path = path
        self._clock = clock
        self._held: list[WriteJob] = []
        self._opened: OpenedDatabase | None = None
        self.trouble = DiskHealth(path, clock)

    @property
    def erasures(self) -> int:
        """How many times everything deleted was erased from the files."""
        return 0 if self._opened is None else self._opened.eraser.erasures

    # ------------------------------------------------------------------ the thread

    def _known_keys(self) -> Keys | None:
        return None if self._opened is None else self._opened.tx.keys

    def _open(self) -> None:
        self._opened = open_database(self._path, self._clock)

    def _close(self) -> None:
        if self._opened is None:
            return
        try:
            self._opened.close()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"the database could not be closed: {error}") from error
        finally:
            self._release_held(self._opened)

    def _serve(self) -> None:
        opened = self._opened
        going = opened is not None
        while opened is not None and going:
            batch, going = self._collect(self.trouble.patience(opened.eraser.patience()))
            self.trouble.note_location(opened.watch.reason())
            try:
                if batch:
                    self._work(opened, batch)
                if self.trouble.displaced is None:
                    if self.trouble.probe_due:
                        self._probe(opened)
                    opened.eraser.run_due(idle=self._jobs.empty())
            except Exception as error:
                # The thread must not end, or callers would wait forever. Resolved jobs are skipped.
                log.exception("writer_failed")
                self._roll_back(opened.tx)
                for job in batch:
                    job.error = translate(error)
                resolve(batch)
            if self._held and not opened.eraser.pending:
                self._release_held(opened)

    def _probe(self, opened: OpenedDatabase) -> None:
        """Commit a write to find out whether the disk works again."""
        with suppress(BatchFailedError):
            self._commit(opened, [], probe=True)

    def _work(self, opened: OpenedDatabase, batch: list[WriteJob]) -> None:
        try:
            self._commit(opened, batch)
        except BatchFailedError as failed:
            if isinstance(failed.cause, UnreadableRowError):
                self._set_aside(opened.tx, batch[0].loop, failed.cause.share_id)
                self._work(opened, batch)
                return
            healed = is_damage(failed.cause) and self._heal(opened.tx)
            if failed.shared or (len(batch) == 1 and not healed):
                for job in batch:
                    job.value, job.error = None, translate(failed.cause)
            else:
                for job in batch:
                    self._work(opened, [job])
                return
        self._deliver(opened, batch)

    def _set_aside(self, tx: SqliteTransaction, loop: asyncio.AbstractEventLoop, share_id: int) -> None:
        """Set aside a share whose row cannot be read, so that no operation reads it again."""
        tx.conn.execute("BEGIN IMMEDIATE")
        tx.set_aside(share_id, UNREADABLE, int(self._clock.now() * 1000))
        tx.conn.execute("COMMIT")
        tx.found.clear()
        tell(loop, self._report, [UNREADABLE])

    def _heal(self, tx: SqliteTransaction) -> bool:
        """Rebuild all indexes, once per start: a row that disagrees with an index cannot be changed.

        Returns:
            Whether they were rebuilt.
        """
        if not tx.healable:
            return False
        tx.healable = False
        log.error("index_damaged", reason="the database is damaged; rebuilding its indexes", advice=StoreCorrupt.advice)
        try:
            tx.conn.execute("REINDEX")
        except sqlite3.Error as error:
            log.error("reindex_failed", error=str(error))
            return False
        return True

    def _commit(self, opened: OpenedDatabase, batch: list[WriteJob], *, probe: bool = False) -> None:
        tx = opened.tx
        conn = tx.conn
        if self.trouble.displaced is not None:
            # No checkpoint either: moved files must stay unchanged, so that they fit together when moved back.
            self.stats.failures += 1
            raise BatchFailedError(StoreDisplaced(f"nothing was written: {self.trouble.displaced}"), shared=True)
        try:
            conn.execute("BEGIN IMMEDIATE")
            if probe:
                # This writes a page although nothing changes; updating a row to its current values would not.
                conn.execute(f"PRAGMA user_version = {latest_version()}")
            for part in parts(batch):
                self._do(tx, part)
            tx.flush_counts()
            conn.execute("COMMIT")
        except Exception as error:
            self.stats.failures += 1
            self._roll_back(tx)
            for job in batch:
                job.error = None
            self.trouble.note(error)
            raise BatchFailedError(error, shared=is_environment(error)) from error
        if probe:
            self.trouble.written()
        self.stats.commits += 1
        self.stats.operations += len(batch)

    def _changes(self, tx: SqliteTransaction) -> int:
        return tx.conn.total_changes

    def _spoils(self, tx: SqliteTransaction, error: Exception) -> bool:
        unrecoverable = is_damage(error) or is_environment(error) or isinstance(error, UnreadableRowError)
        return unrecoverable or not tx.conn.in_transaction

    def _translate(self, error: BaseException) -> BaseException:
        return translate(error)

    def _roll_back(self, tx: SqliteTransaction) -> None:
        if tx.conn.in_transaction:
            with suppress(sqlite3.Error):
                tx.conn.execute("ROLLBACK")
        tx.rolled_back()

    def _deliver(self, opened: OpenedDatabase, batch: list[WriteJob]) -> None:
        if opened.tx.erased:
            opened.tx.erased = False
            opened.eraser.note_deleted()
        if opened.tx.found:
            damaged, opened.tx.found = opened.tx.found, []
            tell(batch[0].loop, self._report, damaged)
        pending = opened.eraser.pending
        self._held += [job for job in batch if job.after_erasure and pending]
        resolve(job for job in batch if not (job.after_erasure and pending))

    def _release_held(self, opened: OpenedDatabase) -> None:
        held, self._held = self._held, []
        if opened.eraser.pending:
            for job in held:
                job.error = StoreError("the database was closed before everything deleted was erased")
        resolve(held)
