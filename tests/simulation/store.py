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
from helper.store.disk_health import PROBE_EVERY
from helper.store.rows import QueuedShare
from helper.store.share_listing import Row
from helper.store.sql_files import queries
from helper.store.sqlite.erasure import Eraser
from helper.store.sqlite.errors import translate
from helper.store.sqlite.file_location import PathWatch
from helper.store.sqlite.file_lock import FileLock
from helper.store.sqlite.opening import OpenedDatabase, _keys
from helper.store.sqlite.reader import Reader
from helper.store.sqlite.schema import migrate_schema
from helper.store.sqlite.store import SqliteStore
from helper.store.sqlite.transaction import SqliteTransaction
from helper.store.sqlite.writer import Writer
from helper.store.transaction import Params
from helper.store.write_jobs import WriteJob
from helper.store.writer_thread import MAX_BATCH

T = TypeVar("T")

USUAL_DELAY = 0.02
"""Seconds that a commit takes at most while the disk is well."""


class Connection(sqlite3.Connection):
    """A connection whose commits fail when they are told to.

    Attributes:
        trouble: the code of SQLite's error for every commit, None while all is well.
    """

    trouble: int | None = None

    def trouble_with(self, code: int | None) -> None:
        """From now on, commits fail with this error, or not any more."""
        self.trouble = code
        if code is None:
            self.__dict__.pop("execute", None)
        else:
            # Only now: a method in Python around each statement would cost more than most of them.
            self.__dict__["execute"] = self._execute_in_trouble

    def _execute_in_trouble(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if self.trouble is not None and sql == "COMMIT":
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = self.trouble
            error.sqlite_errorname = "SQLITE_FULL" if self.trouble == sqlite3.SQLITE_FULL else "SQLITE_IOERR"
            raise error
        return super().execute(sql, parameters)


class Disk:
    """What outlives the service.

    Attributes:
        trouble: the code of SQLite's error for every commit, None while the disk is well.
        delay: seconds that a commit takes at most.
        on_moves: told of what a commit changed, as (share id, state before, state after, nullifier); the state after
            is None for a row that is gone.
        on_commit: called after each commit, before anybody is told of it.
        before_commit: called before each batch is worked on.
    """

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.delay = USUAL_DELAY
        self.conn = sqlite3.connect(
            ":memory:", isolation_level=None, factory=Connection, cached_statements=256, check_same_thread=False
        )
        self.on_moves: Callable[[list[tuple[int, int, int | None, bytes]]], None] = lambda _: None
        self.on_commit: Callable[[], None] = lambda: None
        self.before_commit: Callable[[], None] = lambda: None
        self._moves: list[tuple[int, int, int | None, bytes]] = []
        self.conn.execute("PRAGMA foreign_keys = ON")
        migrate_schema(self.conn)
        self.conn.create_function("moved", 4, self._moved)
        self.conn.executescript(
            "CREATE TEMP TRIGGER told AFTER UPDATE OF state ON main.shares WHEN OLD.state <> NEW.state"
            " BEGIN SELECT moved(NEW.id, OLD.state, NEW.state, NEW.nullifier); END;"
            "CREATE TEMP TRIGGER taken AFTER INSERT ON main.shares"
            " BEGIN SELECT moved(NEW.id, -1, NEW.state, NEW.nullifier); END;"
            "CREATE TEMP TRIGGER gone AFTER DELETE ON main.shares"
            " BEGIN SELECT moved(OLD.id, OLD.state, NULL, OLD.nullifier); END;"
        )

    def _moved(self, share_id: int, before: int, after: int | None, nullifier: bytes) -> None:
        self._moves.append((share_id, before, after, nullifier))

    def committed(self) -> None:
        """A transaction is committed, and nobody knows yet."""
        moves, self._moves = self._moves, []
        if moves:
            self.on_moves(moves)
        self.on_commit()

    def rolled_back(self) -> None:
        """Nothing of a transaction was kept."""
        self._moves.clear()

    def rows(self, sql: str, *values: object) -> list[Row]:
        """What is on the disk."""
        return self.conn.execute(sql, values).fetchall()

    def close(self) -> None:
        """The end of the seed."""
        self.conn.close()


class _NoEraser:
    """Memory has no write-ahead log to erase."""

    pending = False
    erasures = 0

    def note_deleted(self) -> None:
        """Nothing is to be done."""


class InlineWriter(Writer):
    """The writer, driven by the loop's timers.

    Attributes:
        dead: the service was killed: nothing is written any more and nobody hears anything.
    """

    def __init__(self, disk: Disk, clock: Clock) -> None:
        super().__init__(Path("simulated"), clock, lambda share: None)
        self._disk = disk
        self._waiting: list[WriteJob] = []
        self._timer: asyncio.TimerHandle | None = None
        self.dead = False

    async def start(self) -> None:
        await asyncio.sleep(0)
        conn = self._disk.conn
        try:
            if conn.trouble is not None:
                raise sqlite3.OperationalError("disk I/O error")
            keys = _keys(conn)
        except sqlite3.Error as error:
            raise translate(error) from error
        next_id = int(conn.execute(queries()["last_share_id"]).fetchone()[0]) + 1
        tx = SqliteTransaction(keys, conn, next_id)
        self._opened = OpenedDatabase(tx, cast(Eraser, _NoEraser()), cast(FileLock, None), cast(PathWatch, None))

    async def stop(self) -> None:
        while self._waiting and not self.dead:
            await asyncio.sleep(0.05)
        self._opened = None

    async def run(self, op: Callable[[SqliteTransaction], T], *, after_erasure: bool = False) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self.dead:
            return await future
        if self._opened is None:
            raise StoreError("the database is not open")
        self._waiting.append(WriteJob(op, loop, future, after_erasure))
        if self._timer is None:
            self._timer = loop.call_later(self._disk.dice.random() * self._disk.delay, self._turn)
        return await future

    def _turn(self) -> None:
        self._timer = None
        if self.dead or self._opened is None:
            return
        self._disk.before_commit()
        if self.dead:
            return
        batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        self._work(self._opened, batch)
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(0, self._turn)

    def _commit(self, opened: OpenedDatabase, batch: list[WriteJob], *, probe: bool = False) -> None:
        try:
            super()._commit(opened, batch, probe=probe)
        finally:
            if self.trouble.reason is not None:
                asyncio.get_running_loop().call_later(PROBE_EVERY, self._try_disk)
        self._disk.committed()

    def _try_disk(self) -> None:
        """Look whether a disk that failed takes commits again, as the thread does when it wakes."""
        if self._opened is not None and not self.dead and self.trouble.probe_due:
            self._probe(self._opened)

    def _deliver(self, opened: OpenedDatabase, batch: list[WriteJob]) -> None:
        if not self.dead:
            super()._deliver(opened, batch)

    def _roll_back(self, tx: SqliteTransaction) -> None:
        super()._roll_back(tx)
        self._disk.rolled_back()


class InlineReader(Reader):
    """The reader, over the same connection: between two batches it sees what is committed."""

    def __init__(self, disk: Disk, writer: InlineWriter) -> None:
        super().__init__(Path("simulated"))
        self._disk = disk
        self._writer = writer

    async def open(self) -> None:
        return

    async def close(self) -> None:
        return

    async def run(self, sql: str, params: Params = ()) -> list[Row]:
        if self._writer.dead:
            await asyncio.get_running_loop().create_future()
        early = self._disk.dice.random() < 0.5
        if not early:
            await asyncio.sleep(0)
        rows = self._disk.conn.execute(sql, params).fetchall()
        if early:
            await asyncio.sleep(0)
        return rows


class SimStore(SqliteStore):
    """The store of one life of the service.

    Attributes:
        on_spend: told of every attempt that is spent: share id, stage, note.
    """

    def __init__(self, disk: Disk, clock: Clock) -> None:
        self._clock = clock
        self.inline = InlineWriter(disk, clock)
        self._writer = self.inline
        self._reader = self._operators = InlineReader(disk, self.inline)
        self.on_spend: Callable[[int, str, str], None] = lambda share_id, stage, note: None

    async def claim_due(self, *, now: float, limit: int, rounds: Collection[bytes]) -> list[QueuedShare]:
        return await super().claim_due(now=now, limit=limit, rounds=sorted(rounds))

    async def retry(self, share_id: int, *, due_ms: int, stage: str, note: str) -> int:
        self.on_spend(share_id, stage, note)
        return await super().retry(share_id, due_ms=due_ms, stage=stage, note=note)

    async def fail(self, share_id: int, *, stage: str, note: str, spend_attempt: bool) -> bool:
        self.on_spend(share_id, stage, note)
        return await super().fail(share_id, stage=stage, note=note, spend_attempt=spend_attempt)
