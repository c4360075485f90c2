"""The writing thread of a host. Waiting operations are batched into one transaction, as with SQLite.

An operation that raises before it changed anything fails alone. After any other error the transaction is rolled back
and its operations run again one by one; an operation that conflicts with another host is retried.

After a lost connection the writer reconnects and runs the batch again. If the connection was lost during a commit, the
outcome is unknown and the callers get an error. This is safe because every operation checks the state of its share
first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import psycopg
import structlog

from helper.errors import StoreError, StoreFull, StoreUnreachable
from helper.store.postgres.connection import ConnectionSettings
from helper.store.postgres.errors import is_lost, translate, worth_repeating
from helper.store.postgres.keyring import Keyring
from helper.store.postgres.opening import connect, join, prepare, refuse_moved, take_name
from helper.store.postgres.row_encryption import RowEncryption
from helper.store.postgres.transaction import ClaimState, ExclusiveLockRequired, PostgresTransaction
from helper.store.rows import DamagedShare
from helper.store.transaction import Keys
from helper.store.write_jobs import WriteJob, parts, resolve, tell
from helper.store.writer_thread import WritingThread

log = structlog.get_logger("helper.store")

_MAX_ATTEMPTS: Final = 4
"""Attempts of an operation that conflicts with other hosts."""


class PostgresWriter(WritingThread[PostgresTransaction]):
    """The writing thread of one host.

    Args:
        link: connection settings.
        seals: the encryption keys that the hosts share.
        hands: the claims of this host.
        on_damaged: called on the event loop with each row that was set aside.

    Attributes:
        trouble: why the last batch could not be committed, None if it was.
    """

    def __init__(
        self, link: ConnectionSettings, seals: Keyring, hands: ClaimState, on_damaged: Callable[[DamagedShare], None]
    ) -> None:
        super().__init__(on_damaged)
        self._link = link
        self._seals = seals
        self._hands = hands
        self._keys: Keys | None = None
        self._tx: PostgresTransaction | None = None
        self.trouble: str | None = None

    # ------------------------------------------------------------------ the thread

    def _known_keys(self) -> Keys | None:
        return self._keys

    def _open(self) -> None:
        try:
            self._connect()
        except Exception as error:
            raise translate(error) from error

    def _close(self) -> None:
        self._disconnect()

    def _connect(self) -> PostgresTransaction:
        conn = connect(self._link)
        try:
            take_name(conn, self._link)  # first, so that a second process with this name changes nothing
            join(conn, self._link)
            self._keys = prepare(conn, self._link, self._seals)
            refuse_moved(conn, self._link)
        except BaseException:
            conn.close()
            raise
        self._tx = PostgresTransaction(self._keys, conn, RowEncryption(self._seals), self._hands)
        return self._tx

    def _disconnect(self) -> None:
        if self._tx is not None:
            tx, self._tx = self._tx, None
            with suppress(psycopg.Error):
                tx.conn.close()

    def _serve(self) -> None:
        running = True
        while running:
            batch, running = self._collect()
            try:
                if batch:
                    self._work(batch)
            except Exception as error:
                # The thread must not end, or callers would wait forever. Jobs that already have a result are skipped.
                if not isinstance(error, psycopg.Error | StoreError):
                    log.exception("writer_failed")
                self._fail(batch, error)

    def _work(self, batch: list[WriteJob]) -> None:
        """Run a batch, together or in parts. Every job gets a result or an error."""
        done = 0
        in_doubt = False
        try:
            tx = self._tx or self._connect()
            tx.begin(len(batch))
            for part in parts(batch):
                self._do(tx, part)
                done += len(part)
            tx.flush_counts()
            in_doubt = True
            tx.commit()
        except Exception as error:
            self._roll_back()
            self._retry_or_fail(error, batch, done, in_doubt=in_doubt)
            return
        self.trouble = None
        self.stats.commits += 1
        self.stats.operations += len(batch)
        if tx.found:
            damaged, tx.found = tx.found, []
            tell(batch[0].loop, self._report, damaged)
        tx.erased = False
        resolve(batch)

    def _changes(self, tx: PostgresTransaction) -> int:
        return tx.changes

    def _spoils(self, tx: PostgresTransaction, error: Exception) -> bool:  # noqa: ARG002 (SQLite's)
        return isinstance(error, psycopg.Error | ExclusiveLockRequired)

    def _translate(self, error: BaseException) -> BaseException:
        return translate(error)

    def _retry_or_fail(self, error: Exception, batch: list[WriteJob], stopped_at: int, *, in_doubt: bool) -> None:
        """Retry a failed batch, in parts if it has several jobs, or fail its jobs."""
        self.stats.failures += 1
        for job in batch:
            job.value, job.error = None, None
        if is_lost(error) or self._tx is None:
            self._disconnect()
            if in_doubt or batch[0].tries:
                self._fail(batch, error)
            else:
                batch[0].tries += 1
                self._work(batch)
        elif isinstance(error, ExclusiveLockRequired):
            for part in (batch[:stopped_at], batch[stopped_at : stopped_at + 1], batch[stopped_at + 1 :]):
                if part:
                    self._work(part)
        elif len(batch) > 1:
            for job in batch:
                self._work([job])
        elif worth_repeating(error) and batch[0].tries < _MAX_ATTEMPTS:
            batch[0].tries += 1
            self._work(batch)
        else:
            self._fail(batch, error)

    def _fail(self, batch: list[WriteJob], error: Exception) -> None:
        translated = translate(error)
        if isinstance(translated, StoreUnreachable | StoreFull):
            self.trouble = str(translated)
        for job in batch:
            job.value, job.error = None, translated
        resolve(batch)

    def _roll_back(self) -> None:
        if self._tx is None:
            return
        try:
            self._tx.conn.execute("ROLLBACK")
        except psycopg.Error:
            self._disconnect()
        else:
            self._tx.rolled_back()
