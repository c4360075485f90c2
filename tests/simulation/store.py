"""The SQLite store over an in-memory database, without threads.

The real writer batches and commits operations; a timer of the virtual clock replaces its thread. The connection
outlives a crash of the service: committed transactions survive, others are lost. Triggers report every committed
state transition, so that checks do not depend on the service's own reports.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from helper.clock import Clock
from helper.errors import StoreError
from helper.store import shares
from helper.store.sql_files import sqlite_statements
from helper.store.sqlite.displacement import PathMonitor
from helper.store.sqlite.erasure import Eraser
from helper.store.sqlite.errors import PROBE_SECONDS, translate
from helper.store.sqlite.file_lock import FileLock
from helper.store.sqlite.integrity_check import check_integrity
from helper.store.sqlite.opening import OpenedDatabase, _load_keys
from helper.store.sqlite.reader import SqliteReader
from helper.store.sqlite.schema import migrate_schema
from helper.store.sqlite.store import SqliteStore, SqliteWriter
from helper.store.sqlite.transaction import SqliteTransaction
from helper.store.table_rows import Row
from helper.store.transaction import Params
from helper.store.writer_thread import MAX_BATCH, WriteJob
from tests.support.sealed_fields import add_field_functions

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

USUAL_COMMIT_DELAY_SECONDS = 0.02
"""Maximum seconds of a commit on a healthy disk."""


class FaultyConnection(sqlite3.Connection):
    """Connection whose commits can be made to fail."""

    error_code: int | None = None

    def set_commit_error(self, code: int | None) -> None:
        """Make commits fail with this error code, or succeed with None."""
        self.error_code = code
        if code is None:
            self.__dict__.pop("execute", None)
        else:
            # Installed only while needed: a Python method around each statement costs more than most statements.
            self.__dict__["execute"] = self._execute_with_error

    def _execute_with_error(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if self.error_code is not None and sql == "COMMIT":
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = self.error_code
            error.sqlite_errorname = "SQLITE_FULL" if self.error_code == sqlite3.SQLITE_FULL else "SQLITE_IOERR"
            raise error
        return super().execute(sql, parameters)


class SimDisk:
    """The part of the store that outlives the service.

    Attributes:
        on_transitions: called with the changes of a commit, as (share id, state before, state after, nullifier); the
            state
            after is None for a deleted row.
        on_commit: called after each commit, before its result is delivered.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.max_commit_delay = USUAL_COMMIT_DELAY_SECONDS
        self.conn = sqlite3.connect(
            ":memory:", isolation_level=None, factory=FaultyConnection, cached_statements=256, check_same_thread=False
        )
        self.on_transitions: Callable[[list[tuple[int, int, int | None, bytes]]], None] = lambda _: None
        self.on_commit: Callable[[], None] = lambda: None
        self.on_before_commit: Callable[[], None] = lambda: None
        self._transitions: list[tuple[int, int, int | None, bytes]] = []
        self.conn.execute("PRAGMA foreign_keys = ON")
        migrate_schema(self.conn)
        add_field_functions(self.conn)
        self.conn.create_function("record_transition", 4, self._record_transition)
        self.conn.executescript(
            "CREATE TEMP TRIGGER share_updated AFTER UPDATE OF state ON main.shares WHEN OLD.state <> NEW.state"
            " BEGIN SELECT record_transition(NEW.id, OLD.state, NEW.state, field(NEW.witness, 'nullifier')); END;"
            "CREATE TEMP TRIGGER share_inserted AFTER INSERT ON main.shares"
            " BEGIN SELECT record_transition(NEW.id, -1, NEW.state, field(NEW.witness, 'nullifier')); END;"
            "CREATE TEMP TRIGGER share_deleted AFTER DELETE ON main.shares"
            " BEGIN SELECT record_transition(OLD.id, OLD.state, NULL, field(OLD.witness, 'nullifier')); END;"
        )

    def _record_transition(self, share_id: int, before: int, after: int | None, nullifier: bytes) -> None:
        self._transitions.append((share_id, before, after, nullifier))

    def on_committed(self) -> None:
        """Report the transitions of a commit before its result is delivered."""
        transitions, self._transitions = self._transitions, []
        if transitions:
            self.on_transitions(transitions)
        self.on_commit()

    def discard_transitions(self) -> None:
        """Discard the transitions of a transaction that was rolled back."""
        self._transitions.clear()

    def query_rows(self, sql: str, *values: object) -> list[Row]:
        return self.conn.execute(sql, values).fetchall()

    def close(self) -> None:
        self.conn.close()


class _NoEraser:
    """Eraser of a database without a write-ahead log."""

    def is_pending_since(self, _at: float) -> bool:
        return False

    def record_deletion(self) -> None:
        """Do nothing."""


class InlineWriter(SqliteWriter):
    """The writer, driven by timers of the loop."""

    def __init__(self, disk: SimDisk, clock: Clock) -> None:
        super().__init__(Path("simulated"), clock)
        self._disk = disk
        self._pending_jobs: list[WriteJob] = []
        self._timer: asyncio.TimerHandle | None = None
        self.is_killed = False

    async def start(self) -> None:
        await asyncio.sleep(0)
        conn = self._disk.conn
        try:
            if conn.error_code is not None:
                raise sqlite3.OperationalError("disk I/O error")
            keys = _load_keys(conn)
        except sqlite3.Error as error:
            raise translate(error) from error
        next_id = int(conn.execute(sqlite_statements()["last_share_id"]).fetchone()[0]) + 1
        self._keys = keys
        tx = SqliteTransaction(keys, conn, next_id, clock=self._clock)
        self._opened = OpenedDatabase(tx, cast(Eraser, _NoEraser()), cast(FileLock, None), cast(PathMonitor, None))

    async def stop(self) -> None:
        while self._pending_jobs and not self.is_killed:
            await asyncio.sleep(0.05)
        self._opened = None

    async def run(self, op: Callable[Concatenate[SqliteTransaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self.is_killed:
            return await future
        if self._opened is None:
            raise StoreError("the database is not open")
        self._pending_jobs.append(WriteJob(op, args, kwargs, future))
        if self._timer is None:
            self._timer = loop.call_later(self._disk.rng.random() * self._disk.max_commit_delay, self._run_batch)
        return await future

    def _run_batch(self) -> None:
        self._timer = None
        if self.is_killed or self._opened is None:
            return
        self._disk.on_before_commit()
        if self.is_killed:
            return
        batch, self._pending_jobs = self._pending_jobs[:MAX_BATCH], self._pending_jobs[MAX_BATCH:]
        self._process_batch(self._opened, batch)
        if self._pending_jobs:
            self._timer = asyncio.get_running_loop().call_later(0, self._run_batch)

    def _commit(self, opened: OpenedDatabase, batch: list[WriteJob], *, probe: bool = False) -> None:
        try:
            super()._commit(opened, batch, probe=probe)
        finally:
            if self.disk_health.reason is not None:
                asyncio.get_running_loop().call_later(PROBE_SECONDS, self._probe_disk)
        self._disk.on_committed()

    def _probe_disk(self) -> None:
        """Probe a failed disk, as the writer thread does when it wakes."""
        if self._opened is not None and not self.is_killed and self.disk_health.is_probe_due:
            self._probe(self._opened)

    def _deliver(self, opened: OpenedDatabase, batch: list[WriteJob]) -> None:
        if not self.is_killed:
            super()._deliver(opened, batch)

    def _roll_back(self, tx: SqliteTransaction) -> None:
        super()._roll_back(tx)
        self._disk.discard_transitions()


class InlineReader(SqliteReader):
    """The reader over the writer's connection. Between batches it sees committed data only."""

    def __init__(self, disk: SimDisk, writer: InlineWriter) -> None:
        super().__init__(Path("simulated"))
        self._disk = disk
        self._writer = writer

    async def open(self) -> None:
        return

    async def close(self) -> None:
        return

    async def run(self, sql: str, params: Params = ()) -> list[Row]:
        if self._writer.is_killed:
            await asyncio.get_running_loop().create_future()
        early = self._disk.rng.random() < 0.5
        if not early:
            await asyncio.sleep(0)
        rows = self._disk.conn.execute(sql, params).fetchall()
        if early:
            await asyncio.sleep(0)
        return rows


class SimStore(SqliteStore):
    """The store of one service run.

    Attributes:
        on_attempt_spent: called with (share id, stage, note) for each attempt spent and each permanent failure.
    """

    def __init__(self, disk: SimDisk, clock: Clock) -> None:
        self._clock = clock
        self.inline_writer = InlineWriter(disk, clock)
        self._writer = self.inline_writer
        self._reader = self._operator_reader = InlineReader(disk, self.inline_writer)
        self.on_attempt_spent: Callable[[int, str, str], None] = lambda share_id, stage, note: None

    async def _check_integrity(self) -> list[str]:
        return await check_integrity(self._reader, self.wait_for_erasure)

    async def run(self, op: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        result = await super().run(op, *args, **kwargs)
        if result and op in {shares.retry, shares.fail}:  # a crash before the commit has spent nothing
            self.on_attempt_spent(cast(int, args[0]), str(kwargs["stage"]), str(kwargs["note"]))
        return result
