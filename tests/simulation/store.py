"""The real store's SQL on a database in memory, without its threads.

Operations are gathered and committed as the writer's thread does it, by the writer's own code; only the thread is
replaced by a timer of the virtual clock. What was committed outlives a crash of the service, as the connection does;
what was not is gone. A trigger tells of every move that was committed, so that the product's own word is not needed.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar, cast

from helper.clock import Clock
from helper.errors import StoreError
from helper.store.disk_health import PROBE_SECONDS
from helper.store.rows import QueuedShare
from helper.store.share_listing import Row
from helper.store.sql_files import queries
from helper.store.sqlite.erasure import Eraser
from helper.store.sqlite.errors import translate
from helper.store.sqlite.file_location import PathMonitor
from helper.store.sqlite.file_lock import FileLock
from helper.store.sqlite.opening import OpenedDatabase, _load_keys
from helper.store.sqlite.reader import SqliteReader
from helper.store.sqlite.schema import migrate_schema
from helper.store.sqlite.store import SqliteStore
from helper.store.sqlite.transaction import SqliteTransaction
from helper.store.sqlite.writer import SqliteWriter
from helper.store.transaction import Params
from helper.store.write_jobs import WriteJob
from helper.store.writer_thread import MAX_BATCH

T = TypeVar("T")

USUAL_COMMIT_DELAY_SECONDS = 0.02
"""Seconds that a commit takes at most while the disk is well."""


class FaultyConnection(sqlite3.Connection):
    """A connection whose commits fail when they are told to.

    Attributes:
        error_code: the code of SQLite's error for every commit, None while all is well.
    """

    error_code: int | None = None

    def set_commit_error(self, code: int | None) -> None:
        """From now on, commits fail with this error, or not any more."""
        self.error_code = code
        if code is None:
            self.__dict__.pop("execute", None)
        else:
            # Only now: a method in Python around each statement would cost more than most of them.
            self.__dict__["execute"] = self._execute_with_error

    def _execute_with_error(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if self.error_code is not None and sql == "COMMIT":
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = self.error_code
            error.sqlite_errorname = "SQLITE_FULL" if self.error_code == sqlite3.SQLITE_FULL else "SQLITE_IOERR"
            raise error
        return super().execute(sql, parameters)


class SimDisk:
    """What outlives the service.

    Attributes:
        trouble: the code of SQLite's error for every commit, None while the disk is well.
        max_commit_delay: seconds that a commit takes at most.
        on_transitions: told of what a commit changed, as (share id, state before, state after, nullifier); the state
            after is None for a row that is gone.
        on_commit: called after each commit, before anybody is told of it.
        on_before_commit: called before each batch is worked on.
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
        self.conn.create_function("moved", 4, self._record_transition)
        self.conn.executescript(
            "CREATE TEMP TRIGGER told AFTER UPDATE OF state ON main.shares WHEN OLD.state <> NEW.state"
            " BEGIN SELECT moved(NEW.id, OLD.state, NEW.state, NEW.nullifier); END;"
            "CREATE TEMP TRIGGER taken AFTER INSERT ON main.shares"
            " BEGIN SELECT moved(NEW.id, -1, NEW.state, NEW.nullifier); END;"
            "CREATE TEMP TRIGGER gone AFTER DELETE ON main.shares"
            " BEGIN SELECT moved(OLD.id, OLD.state, NULL, OLD.nullifier); END;"
        )

    def _record_transition(self, share_id: int, before: int, after: int | None, nullifier: bytes) -> None:
        self._transitions.append((share_id, before, after, nullifier))

    def on_committed(self) -> None:
        """A transaction is committed, and nobody knows yet."""
        moves, self._transitions = self._transitions, []
        if moves:
            self.on_transitions(moves)
        self.on_commit()

    def discard_transitions(self) -> None:
        """Nothing of a transaction was kept."""
        self._transitions.clear()

    def query_rows(self, sql: str, *values: object) -> list[Row]:
        """What is on the disk."""
        return self.conn.execute(sql, values).fetchall()

    def close(self) -> None:
        """The end of the seed."""
        self.conn.close()


class _NoEraser:
    """Memory has no write-ahead log to erase."""

    is_pending = False
    erasure_count = 0

    def record_deletion(self) -> None:
        """Nothing is to be done."""


class InlineWriter(SqliteWriter):
    """The writer, driven by the loop's timers.

    Attributes:
        is_killed: the service was killed: nothing is written any more and nobody hears anything.
    """

    def __init__(self, disk: SimDisk, clock: Clock) -> None:
        super().__init__(Path("simulated"), clock, lambda share: None)
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
        next_id = int(conn.execute(queries()["last_share_id"]).fetchone()[0]) + 1
        tx = SqliteTransaction(keys, conn, next_id)
        self._opened = OpenedDatabase(tx, cast(Eraser, _NoEraser()), cast(FileLock, None), cast(PathMonitor, None))

    async def stop(self) -> None:
        while self._pending_jobs and not self.is_killed:
            await asyncio.sleep(0.05)
        self._opened = None

    async def run(self, op: Callable[[SqliteTransaction], T], *, after_erasure: bool = False) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self.is_killed:
            return await future
        if self._opened is None:
            raise StoreError("the database is not open")
        self._pending_jobs.append(WriteJob(op, loop, future, after_erasure))
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
        """Look whether a disk that failed takes commits again, as the thread does when it wakes."""
        if self._opened is not None and not self.is_killed and self.disk_health.is_probe_due:
            self._probe(self._opened)

    def _deliver(self, opened: OpenedDatabase, batch: list[WriteJob]) -> None:
        if not self.is_killed:
            super()._deliver(opened, batch)

    def _roll_back(self, tx: SqliteTransaction) -> None:
        super()._roll_back(tx)
        self._disk.discard_transitions()


class InlineReader(SqliteReader):
    """The reader, over the same connection: between two batches it sees what is committed."""

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
    """The store of one life of the service.

    Attributes:
        on_attempt_spent: told of every attempt that is spent: share id, stage, note.
    """

    def __init__(self, disk: SimDisk, clock: Clock) -> None:
        self._clock = clock
        self.inline_writer = InlineWriter(disk, clock)
        self._writer = self.inline_writer
        self._reader = self._operator_reader = InlineReader(disk, self.inline_writer)
        self.on_attempt_spent: Callable[[int, str, str], None] = lambda share_id, stage, note: None

    async def claim_due(self, *, now: float, limit: int, rounds: Collection[bytes]) -> list[QueuedShare]:
        return await super().claim_due(now=now, limit=limit, rounds=sorted(rounds))

    async def retry(self, share_id: int, *, due_ms: int, stage: str, note: str) -> int:
        self.on_attempt_spent(share_id, stage, note)
        return await super().retry(share_id, due_ms=due_ms, stage=stage, note=note)

    async def fail(self, share_id: int, *, stage: str, note: str, spend_attempt: bool) -> bool:
        self.on_attempt_spent(share_id, stage, note)
        return await super().fail(share_id, stage=stage, note=note, spend_attempt=spend_attempt)
