"""The one thread that writes: many operations, one transaction, one fsync, then every caller is told.

An operation is a function of a `Transaction`. All that wait when the thread is free run in one transaction; what is
handed in while its commit runs makes the next one. An operation that raises before it has written anything fails
alone. One that raises after it has written undoes the transaction, and all of the batch run again, each in a
transaction of its own: that is rare, and saves a savepoint for every other operation. Shares that come together are
one operation.
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
from helper.store.sql_files import migrations
from helper.store.sqlite.errors import UnreadableRowError, is_damage, is_environment, translate
from helper.store.sqlite.opening import OpenedDatabase, open_database
from helper.store.sqlite.transaction import SqliteTransaction
from helper.store.transaction import UNREADABLE, Keys
from helper.store.write_jobs import BatchFailedError, WriteJob, parts, resolve, tell
from helper.store.writer_thread import WritingThread

log = structlog.get_logger("helper.store")


class Writer(WritingThread[SqliteTransaction]):
    """The writing thread of one database.

    Args:
        path: the database file.
        clock: measures how long erasure was put off.
        on_damaged: called on the event loop with each row that was set aside.

    Attributes:
        trouble: whether the disk takes commits.
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
        """How often everything deleted was erased from the files."""
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
                    opened.eraser.tend(idle=self._jobs.empty())
            except Exception as error:
                # Nothing may end this thread: callers would wait for ever. Whoever was answered is passed over.
                log.exception("the writer failed")
                self._roll_back(opened.tx)
                for job in batch:
                    job.error = translate(error)
                resolve(batch)
            if self._held and not opened.eraser.pending:
                self._release_held(opened)

    def _probe(self, opened: OpenedDatabase) -> None:
        """Write something, to see whether the disk takes it again."""
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
        """Set a share aside whose row can not be read, so that no operation reads it again."""
        tx.conn.execute("BEGIN IMMEDIATE")
        tx.set_aside(share_id, UNREADABLE, int(self._clock.now() * 1000))
        tx.conn.execute("COMMIT")
        tx.found.clear()
        tell(loop, self._report, [UNREADABLE])

    def _heal(self, tx: SqliteTransaction) -> bool:
        """Make all indexes anew, once: a row and an index that are at odds can not be changed. Whether it helped."""
        if not tx.healable:
            return False
        tx.healable = False
        log.error("the database is damaged; its indexes are made anew", advice=StoreCorrupt.advice)
        try:
            tx.conn.execute("REINDEX")
        except sqlite3.Error as error:
            log.error("the indexes could not be made anew", error=str(error))
            return False
        return True

    def _commit(self, opened: OpenedDatabase, batch: list[WriteJob], *, probe: bool = False) -> None:
        tx = opened.tx
        conn = tx.conn
        if self.trouble.displaced is not None:
            # The same for a checkpoint: files that were moved stay as they are, so that they fit when moved back.
            self.stats.failures += 1
            raise BatchFailedError(StoreDisplaced(f"nothing was written: {self.trouble.displaced}"), shared=True)
        try:
            conn.execute("BEGIN IMMEDIATE")
            if probe:
                # A page is written even though nothing changes; a row with the contents that it has is not.
                conn.execute(f"PRAGMA user_version = {len(migrations())}")
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
        at_fault = is_damage(error) or is_environment(error) or isinstance(error, UnreadableRowError)
        return at_fault or not tx.conn.in_transaction

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
            found, opened.tx.found = opened.tx.found, []
            tell(batch[0].loop, self._report, found)
        pending = opened.eraser.pending
        self._held += [job for job in batch if job.after_erasure and pending]
        resolve(job for job in batch if not (job.after_erasure and pending))

    def _release_held(self, opened: OpenedDatabase) -> None:
        held, self._held = self._held, []
        if opened.eraser.pending:
            for job in held:
                job.error = StoreError("the database was closed before everything deleted was erased")
        resolve(held)
