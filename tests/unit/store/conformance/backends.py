"""Backends of the conformance tests: an SQLite file, encrypted or not, and a shared PostgreSQL database."""

from __future__ import annotations

import atexit
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

import psycopg

from helper.clock import Clock
from helper.store.keyring import Keyring
from helper.store.postgres.store import PostgresStore
from helper.store.queue_reader import QueueReader
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sqlite.reader import open_queue_file
from helper.store.sqlite.store import SqliteStore
from helper.store.store import Store
from tests.unit.store.fixtures import open_closed_database, query_rows

SEALING_KEYS = [b"s" * 32]
_CONNECTIONS: dict[str, psycopg.Connection[tuple[Any, ...]]] = {}
_EMPTY_SCHEMAS: list[str] = []
_MAKE_EMPTY = """
DO $$
DECLARE name TEXT;
BEGIN
  SET LOCAL session_replication_role = replica; -- in any order, without foreign keys
  FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = current_schema() LOOP
    IF name NOT IN ('schema_version', 'sender') THEN EXECUTE format('DELETE FROM %I', name); END IF;
  END LOOP;
  UPDATE sender SET fence = 0, host = '', until = '-infinity', outer_fence = 0;
  PERFORM setval(sequencename::regclass, 1, false) FROM pg_sequences WHERE schemaname = current_schema();
END $$
"""
"""Makes a schema what its migrations make it, for a hundredth of the CPU."""
Reopen = Callable[[], Awaitable[Store]]
"""Opens a store that is closed at the end of the test."""


class StoreBackend(Protocol):
    """Persistent data of a store."""

    def create_store(self, clock: Clock) -> Store: ...

    async def prepare_store(self, store: Store) -> None:
        """Give an open store every role, including that of the sender."""
        ...

    def query_rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Run a query while a store may be open."""
        ...

    def execute(self, sql: str) -> None:
        """Change data by hand, as a fault would."""
        ...

    def connect(self) -> AbstractContextManager[Any]:
        """A connection that commits each statement, for changes once no store is open."""
        ...

    def read_synced_log(self) -> object:
        """Read what has been synced of the write-ahead log; a different value after each sync of changes."""
        ...

    def count_writes(self) -> int:
        """Count the transactions that have written, from any number on."""
        ...

    def open_offline_readers(self) -> AbstractAsyncContextManager[list[QueueReader]]:
        """Open the readers that need no open store."""
        ...

    @property
    def locator(self) -> list[str]:
        """Arguments with which another process opens the store: its kind in `places.py`, and its address."""
        ...


def make_file_encryption(keys: Sequence[bytes] = SEALING_KEYS) -> RowEncryption:
    return RowEncryption(Keyring(keys))


class SqliteBackend:
    """An SQLite file.

    Args:
        directory: its directory.
        is_encrypted: whether witnesses and messages are encrypted.
    """

    def __init__(self, directory: Path, *, is_encrypted: bool = False) -> None:
        self.path = directory / "queue.db"
        self.encryption = make_file_encryption() if is_encrypted else UNENCRYPTED

    def create_store(self, clock: Clock) -> SqliteStore:
        return SqliteStore(self.path, clock=clock, encryption=self.encryption)

    def query_rows(self, sql: str) -> list[tuple[Any, ...]]:
        return query_rows(self.path, sql)

    def execute(self, sql: str) -> None:
        """Change data by hand, once no store has the file open."""
        with self.connect() as conn:
            conn.execute(sql)

    def connect(self) -> AbstractContextManager[sqlite3.Connection]:
        return open_closed_database(self.path)

    def read_synced_log(self) -> object:
        """Read the WAL: with `synchronous = FULL` each commit that has written to it syncs it."""
        return Path(f"{self.path}-wal").read_bytes()

    def count_writes(self) -> int:
        """Read the change counter of the WAL's index (https://sqlite.org/walformat.html)."""
        return int.from_bytes(Path(f"{self.path}-shm").read_bytes()[8:12], sys.byteorder)

    async def prepare_store(self, store: Store) -> None:
        """Do nothing: a file has one host, which sends."""

    @asynccontextmanager
    async def open_offline_readers(self) -> AsyncIterator[list[QueueReader]]:
        async with open_queue_file(self.path, self.encryption) as queue:
            yield [queue]

    @property
    def locator(self) -> list[str]:
        """Arguments with which another process opens the store."""
        return ["encrypted sqlite" if self.encryption.is_encrypted else "sqlite", str(self.path.parent)]


class PostgresBackend:
    """A PostgreSQL schema.

    Args:
        address: the database URL.
        schema: the schema's name.
    """

    def __init__(self, address: str, schema: str) -> None:
        self.address = address
        self.schema = schema

    def create_store(
        self,
        clock: Clock,
        *,
        host: str = "one",
        sealing_keys: list[bytes] | None = None,
        lease: float = 600.0,
    ) -> PostgresStore:
        """By default no lease expires and no claim is renewed during a test; tests expire them by hand."""
        return PostgresStore(
            self.address,
            keyring=Keyring(SEALING_KEYS if sealing_keys is None else sealing_keys),
            host=host,
            schema=self.schema,
            clock=clock,
            lease_seconds=lease,
        )

    def query_rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self._execute(sql).fetchall()

    def execute(self, sql: str) -> None:
        self._execute(sql)

    def _execute(self, sql: str) -> psycopg.Cursor[tuple[Any, ...]]:
        """Execute a statement on the connection that all schemas share: a server process costs 10 ms of CPU."""
        set_schema = f"SET search_path = {self.schema}".encode()
        conn = _CONNECTIONS.get(self.address)
        with suppress(psycopg.OperationalError):  # the server was restarted
            if conn is not None:
                conn.execute(set_schema)
        if conn is None or conn.closed:
            conn = _CONNECTIONS[self.address] = psycopg.connect(self.address, autocommit=True, prepare_threshold=None)
            atexit.register(conn.close)
            conn.execute(set_schema)
        return conn.execute(sql.encode())

    def read_synced_log(self) -> object:
        """Read the position up to which the WAL is on disk."""
        return self.query_rows("SELECT pg_current_wal_flush_lsn()")

    def count_writes(self) -> int:
        """Read the next transaction number of the server. A transaction that is rolled back has had one too."""
        return int(self.query_rows("SELECT pg_snapshot_xmax(pg_current_snapshot())::text")[0][0])

    async def prepare_store(self, store: Store) -> None:
        assert isinstance(store, PostgresStore)
        assert await store.acquire_sender_lease() is not None
        self.execute("UPDATE sender SET until = 'infinity'")  # no keeper renews it here

    @asynccontextmanager
    async def open_offline_readers(self) -> AsyncIterator[list[QueueReader]]:
        """Return no reader: only a store reads the database."""
        yield []

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection with the schema in its search path."""
        return psycopg.connect(self.address, options=f"-c search_path={self.schema}", autocommit=True)

    @property
    def locator(self) -> list[str]:
        """Arguments with which another process opens the store."""
        return ["postgres", self.address, self.schema]


@contextmanager
def reuse_schema(address: str) -> Iterator[PostgresBackend]:
    """A backend whose schema is new or as good as new. Tests must not change its tables."""
    backend = PostgresBackend(address, _EMPTY_SCHEMAS.pop() if _EMPTY_SCHEMAS else f"test_{token_hex(6)}")
    yield backend
    backend.execute(_MAKE_EMPTY)
    _EMPTY_SCHEMAS.append(backend.schema)


def parse_locator(locator: list[str]) -> SqliteBackend | PostgresBackend:
    if locator[0] == "postgres":
        return PostgresBackend(locator[1], locator[2])
    return SqliteBackend(Path(locator[1]), is_encrypted=locator[0] == "encrypted sqlite")
