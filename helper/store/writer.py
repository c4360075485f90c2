"""The one thread that writes: many operations, one transaction, one fsync, then every caller is told.

An operation is a function of a `Tx`. All that wait when the thread is free run in one transaction; what is handed in
while its commit runs makes the next one. An operation that raises before it has written anything fails alone. One that
raises after it has written undoes the transaction, and all of the batch run again, each in a transaction of its own:
that is rare, and saves a savepoint for every other operation.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import structlog

from helper.clock import Clock
from helper.errors import StoreCorrupt, StoreError
from helper.store.failure import UnreadableRowError, is_damage, is_environment, translate
from helper.store.jobs import BatchFailedError, Job, resolve, settle, tell
from helper.store.opening import Opened, open_database
from helper.store.queries import migrations
from helper.store.rows import DamagedShare
from helper.store.trouble import Trouble
from helper.store.tx import UNREADABLE, Keys, SqliteTx

log = structlog.get_logger("helper.store")

T = TypeVar("T")

MAX_BATCH: Final = 512
"""Operations of one transaction, so that the first of them does not wait long."""


@dataclass(slots=True)
class WriterStats:
    """What the thread has done since it was opened: transactions, operations in them, failed transactions."""

    commits: int = 0
    operations: int = 0
    failures: int = 0


class Writer:
    """The writing thread of one database.

    Args:
        path: the database file.
        clock: measures how long erasure was put off.
        on_damaged: called on the event loop with each row that was set aside.

    Attributes:
        trouble: whether the disk takes commits.
    """

    def __init__(self, path: Path, clock: Clock, on_damaged: Callable[[DamagedShare], None]) -> None:
        self._path = path
        self._clock = clock
        self._on_damaged = on_damaged
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._held: list[Job] = []
        self._stopped: asyncio.Future[None] | None = None
        self._opened: Opened | None = None
        self.trouble = Trouble(path, clock)
        self.stats = WriterStats()

    async def start(self) -> None:
        """Open the database on a new thread; raises what `open_database` raises."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        self._stopped = loop.create_future()
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._main, args=(loop, started, self._stopped), name="store-writer", daemon=True
        )
        self._thread.start()
        try:
            await started
        except BaseException:
            self._thread = None
            self._jobs.put(None)  # if the caller was cancelled, the thread is to end as well
            raise

    async def stop(self) -> None:
        """Finish what was handed in, erase what is to be erased, close the file."""
        if self._thread is None or self._stopped is None:
            return
        self._thread = None
        self._jobs.put(None)
        await self._stopped

    async def run(self, op: Callable[[SqliteTx], T], *, after_erasure: bool = False) -> T:
        """Run an operation; returns when it is on disk, or (`after_erasure`) when all deleted is erased too.

        The operation goes on to its end when the caller is cancelled.

        Raises:
            StoreError: nothing of it was kept.
        """
        if self._thread is None:
            raise StoreError("the database is not open", advice="Start the helper again.")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put(Job(op, loop, future, after_erasure))
        return await future

    @property
    def keys(self) -> Keys:
        """The database's own keys, while it is open."""
        if self._opened is None:
            raise StoreError("the database is not open", advice="Start the helper again.")
        return self._opened.tx.keys

    @property
    def erasures(self) -> int:
        """How often everything deleted was erased from the files."""
        return 0 if self._opened is None else self._opened.eraser.erasures

    # ------------------------------------------------------------------ the thread

    def _main(
        self, loop: asyncio.AbstractEventLoop, started: asyncio.Future[None], stopped: asyncio.Future[None]
    ) -> None:
        try:
            opened = self._opened = open_database(self._path, self._clock)
        except Exception as error:
            tell(loop, settle, started, error)
            return
        tell(loop, settle, started, None)
        failure: Exception | None = None
        try:
            self._serve(opened)
        finally:
            try:
                opened.close()
            except (sqlite3.Error, OSError) as error:
                failure = StoreError(f"the database could not be closed: {error}")
            self._release_held(opened)
            tell(loop, settle, stopped, failure)

    def _serve(self, opened: Opened) -> None:
        going = True
        while going:
            batch, going = self._collect(self.trouble.patience(opened.eraser.patience()))
            try:
                if batch:
                    self._work(opened, batch)
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

    def _probe(self, opened: Opened) -> None:
        """Write something, to see whether the disk takes it again."""
        with suppress(BatchFailedError):
            self._commit(opened, [], probe=True)

    def _collect(self, patience: float | None) -> tuple[list[Job], bool]:
        """All that waits now (at least one job, unless `patience` runs out), and whether to go on after it."""
        batch: list[Job] = []
        with suppress(queue.Empty):
            job = self._jobs.get(timeout=patience)
            while job is not None:
                batch.append(job)
                if len(batch) == MAX_BATCH:
                    return batch, True
                job = self._jobs.get_nowait()
            return batch, False
        return batch, True

    def _work(self, opened: Opened, batch: list[Job]) -> None:
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

    def _set_aside(self, tx: SqliteTx, loop: asyncio.AbstractEventLoop, share_id: int) -> None:
        """Set a share aside whose row can not be read, so that no operation reads it again."""
        tx.conn.execute("BEGIN IMMEDIATE")
        tx.set_aside(share_id, UNREADABLE, int(self._clock.now() * 1000))
        tx.conn.execute("COMMIT")
        tx.found.clear()
        tell(loop, self._report, [UNREADABLE])

    def _heal(self, tx: SqliteTx) -> bool:
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

    def _commit(self, opened: Opened, batch: list[Job], *, probe: bool = False) -> None:
        tx = opened.tx
        conn = tx.conn
        try:
            conn.execute("BEGIN IMMEDIATE")
            if probe:
                # A page is written even though nothing changes; a row with the contents that it has is not.
                conn.execute(f"PRAGMA user_version = {len(migrations())}")
            for job in batch:
                before = conn.total_changes
                try:
                    job.value = job.op(tx)
                except Exception as error:
                    if _spoils(error) or not conn.in_transaction or conn.total_changes != before:
                        raise
                    job.error = translate(error)
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

    def _roll_back(self, tx: SqliteTx) -> None:
        if tx.conn.in_transaction:
            with suppress(sqlite3.Error):
                tx.conn.execute("ROLLBACK")
        tx.rolled_back()

    def _deliver(self, opened: Opened, batch: list[Job]) -> None:
        if opened.tx.erased:
            opened.tx.erased = False
            opened.eraser.note_deleted()
        if opened.tx.found:
            found, opened.tx.found = opened.tx.found, []
            tell(batch[0].loop, self._report, found)
        pending = opened.eraser.pending
        self._held += [job for job in batch if job.after_erasure and pending]
        resolve(job for job in batch if not (job.after_erasure and pending))

    def _release_held(self, opened: Opened) -> None:
        held, self._held = self._held, []
        if opened.eraser.pending:
            for job in held:
                job.error = StoreError("the database was closed before everything deleted was erased")
        resolve(held)

    def _report(self, found: list[DamagedShare]) -> None:
        for share in found:
            self._on_damaged(share)


def _spoils(error: Exception) -> bool:
    """Whether the transaction can not go on after this error of one operation."""
    return is_damage(error) or is_environment(error) or isinstance(error, UnreadableRowError)
