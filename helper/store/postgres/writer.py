"""Writer thread of a host. Batches waiting operations into one transaction, as with SQLite.

An operation that raises before it changed anything fails alone. After any other error the transaction is rolled back
and its operations rerun individually. An operation that conflicts with another host is retried. An exclusive operation
has a transaction of its own.

After a lost connection, or if the server refuses writes, the writer reconnects and runs the batch again. If the
connection was lost during a commit, or a standby did not confirm it, the outcome is unknown and the callers get an
error. This is safe because every operation checks the state of its share first.

After an error that would affect every operation, batches fail until a write of the writer's own has been committed. As
the write-ahead log is replicated in order, that commit also confirms the earlier ones.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import psycopg
import structlog

from helper.clock import Clock, SystemClock
from helper.errors import StoreError, StoreUnconfirmed
from helper.store.keyring import Keyring
from helper.store.postgres.connection import (
    CONNECT_SECONDS,
    ConnectionSettings,
    is_batch_wide,
    is_retryable,
    needs_new_connection,
    translate,
)
from helper.store.postgres.opening import (
    Connection,
    acquire_host_lock,
    acquire_host_name,
    connect,
    prepare_schema,
    refuse_moved,
    require_privileges,
    require_same_queue,
)
from helper.store.postgres.transaction import ClaimState, PostgresTransaction
from helper.store.row_encryption import RowEncryption
from helper.store.writer_thread import WriteJob, WriterThread, deliver_results, split_batch, split_exclusive

log = structlog.get_logger("helper.store")

STALLED_SECONDS: Final = 10.0
"""Seconds after which an unfinished transaction is reported. Others take milliseconds, and connecting a few seconds."""
_STALLED_TEXT: Final = (
    f"a transaction has not completed for {STALLED_SECONDS:.0f} s: the database may be waiting for a synchronous "
    "standby"
)
_UNREACHABLE_TEXT: Final = f"the database has not been reachable for {STALLED_SECONDS:.0f} s"
PROBE_SECONDS: Final = 1.0
"""Seconds between two attempts to write while the database cannot be written and no batch is waiting."""
_MAX_ATTEMPTS: Final = 4
"""Attempts of an operation that conflicts with other hosts."""


class PostgresWriter(WriterThread[PostgresTransaction]):
    """The writer thread of one host."""

    def __init__(
        self,
        settings: ConnectionSettings,
        keyring: Keyring,
        claims: ClaimState,
        store_clock: Clock,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._keyring = keyring
        self._claims = claims
        self._store_clock = store_clock
        self._conn: Connection | None = None  # set before the session is ready, and kept when it has ended
        self._tx: PostgresTransaction | None = None
        self._write_error: str | None = None
        self._clock: Clock = SystemClock()  # real time in tests too: the server has no simulated clock
        self._busy_since: float | None = None  # monotonic
        self._is_connecting = False

    @property
    def write_error(self) -> str | None:
        """Reason why the database cannot be written, or why a transaction has not completed; None without one."""
        since = self._busy_since
        if since is None or self._clock.monotonic() - since <= STALLED_SECONDS:
            return self._write_error
        return _UNREACHABLE_TEXT if self._is_connecting else _STALLED_TEXT

    @property
    def is_stalled(self) -> bool:
        """Whether a transaction has not completed for `STALLED_SECONDS`."""
        return self.write_error == _STALLED_TEXT

    async def stop(self) -> None:
        """Complete the submitted operations, and close the database.

        After `STALLED_SECONDS`, operations that still wait, for a lock or a standby, are cancelled and fail.
        """
        cancelling = asyncio.create_task(self._cancel_stalled())
        try:
            await super().stop()
        finally:
            cancelling.cancel()

    async def _cancel_stalled(self) -> None:
        await asyncio.sleep(STALLED_SECONDS)
        while True:
            if self._conn is not None:
                with suppress(psycopg.Error):
                    await asyncio.to_thread(self._conn.cancel_safe, timeout=CONNECT_SECONDS)
            await asyncio.sleep(PROBE_SECONDS)  # each batch, and each attempt to write, may wait again

    # ------------------------------------------------------------------ the thread

    def _open(self) -> None:
        try:
            self._connect()
        except Exception as error:
            raise translate(error) from error

    def _connect(self) -> PostgresTransaction:
        self._is_connecting = True  # after a failed attempt until the batch ends, which may try again
        tx = self._open_session()
        if self._busy_since is not None:  # the time of the attempt is no time of a transaction
            self._busy_since = self._clock.monotonic()
        self._is_connecting = False
        return tx

    def _open_session(self) -> PostgresTransaction:
        conn = self._conn = connect(self._settings)
        try:
            acquire_host_name(conn, self._settings)  # first, so that a second process with this name changes nothing
            with conn.transaction():
                acquire_host_lock(conn, self._settings)
                require_privileges(conn, self._settings)
                if self._keys is not None:
                    require_same_queue(conn, self._settings, self._keys)
                keys = prepare_schema(conn, self._settings, self._keyring)
            self._keys = keys
            refuse_moved(conn, self._settings)
        except BaseException:
            conn.close()
            raise
        self._tx = PostgresTransaction(
            self._keys, conn, RowEncryption(self._keyring), self._claims, clock=self._store_clock
        )
        return self._tx

    def _close(self) -> None:
        if self._tx is not None:
            tx, self._tx = self._tx, None
            with suppress(psycopg.Error):
                tx.conn.close()

    def _run_batches(self) -> None:
        running = True
        while running:
            batch, running = self._collect_batch(None if self._write_error is None else PROBE_SECONDS)
            self._busy_since = self._clock.monotonic()
            try:
                if self._write_error is not None and (batch or running):  # connecting would delay a shutdown
                    self._probe()
                for part in split_exclusive(batch):
                    self._process_batch(part)
            except Exception as error:
                # The thread must not end, or callers would wait forever. Jobs that already have a result are skipped.
                if not isinstance(error, psycopg.Error | StoreError):
                    log.exception("writer_failed")
                self._roll_back()
                self._fail_batch(batch, error, is_batch_wide=True)
            self._busy_since = None
            self._is_connecting = False

    def _probe(self) -> None:
        """Check with a write whether the database can be written again; raise if not."""
        try:
            tx = self._tx or self._connect()
            tx.begin(0)
            tx.execute("probe")
            tx.execute("drop_probe")
            tx.commit()
        except Exception:
            self._close()  # another server may have become the primary
            raise
        self._write_error = None
        log.info("database_write_recovered")

    def _process_batch(self, batch: list[WriteJob]) -> None:
        in_doubt = False
        try:
            tx = self._tx or self._connect()
            tx.begin(len(batch))
            for part in split_batch(batch):
                self._run_part(tx, part)
            tx.flush_counts()
            in_doubt = True
            tx.commit()
        except Exception as error:
            self._roll_back()
            self._retry_or_fail(error, batch, in_doubt=in_doubt)
            return
        self._report_damaged(tx)
        tx.has_deleted_rows = False
        deliver_results(batch)

    def _count_changes(self, tx: PostgresTransaction) -> int:
        return tx.change_count

    def _is_fatal(self, tx: PostgresTransaction, error: Exception) -> bool:  # noqa: ARG002 (used by SQLite)
        return isinstance(error, psycopg.Error)

    def _translate(self, error: BaseException) -> BaseException:
        return translate(error)

    def _retry_or_fail(self, error: Exception, batch: list[WriteJob], *, in_doubt: bool) -> None:
        """Retry a failed batch, in parts if it has more than one job, or fail its jobs."""
        for job in batch:
            job.value, job.error = None, None
        if isinstance(error, StoreUnconfirmed | psycopg.errors.QueryCanceled):  # another attempt may wait as long
            self._fail_batch(batch, error, is_batch_wide=True)
        elif needs_new_connection(error) or self._tx is None:
            self._close()
            if in_doubt or batch[0].attempts:
                self._fail_batch(batch, error, is_batch_wide=True)
            else:
                batch[0].attempts += 1
                self._process_batch(batch)
        elif len(batch) > 1:
            for job in batch:
                self._process_batch([job])
        elif is_retryable(error) and batch[0].attempts < _MAX_ATTEMPTS:
            batch[0].attempts += 1
            self._process_batch(batch)
        else:
            self._fail_batch(batch, error, is_batch_wide=is_batch_wide(error))

    def _fail_batch(self, batch: list[WriteJob], error: Exception, *, is_batch_wide: bool) -> None:
        translated = translate(error)
        if is_batch_wide:
            if self._write_error is None:
                advice = translated.advice if isinstance(translated, StoreError) else StoreError.advice
                log.error("database_write_failed", error=str(translated), advice=advice)
            self._write_error = str(translated)
        for job in batch:
            job.value, job.error = None, translated
        deliver_results(batch)

    def _roll_back(self) -> None:
        if self._tx is None:
            return
        try:
            self._tx.conn.execute("ROLLBACK")
        except psycopg.Error:
            self._close()
        else:
            self._tx.reset_after_rollback()
