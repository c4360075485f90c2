"""Where a store keeps what it keeps: the same tests ask it of a file and of a database that several hosts share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import psycopg

from helper.clock import Clock
from helper.store.postgres import PostgresStore
from helper.store.postgres.keyring import Keyring
from helper.store.queue_reader import QueueReader
from helper.store.rows import DamagedShare
from helper.store.sqlite.reader import open_queue_file
from helper.store.sqlite.store import SqliteStore
from helper.store.store import Store
from tests.unit.store.fixtures import open_closed_database, query_rows

SEALING_KEYS = [b"s" * 32]
Report = Callable[[DamagedShare], None]
Reopen = Callable[[], Awaitable[Store]]
"""Opens a store that is closed at the end of the test."""


class StoreBackend(Protocol):
    """What is kept beyond the life of one store."""

    def create_store(self, clock: Clock, report: Report) -> Store:
        """A store on it, not yet open."""
        ...

    async def prepare_store(self, store: Store) -> None:
        """Have an open store do all that there is to do."""
        ...

    def query_rows(self, sql: str) -> list[tuple[Any, ...]]:
        """What a query gives, beside a running store."""
        ...

    def execute(self, sql: str) -> None:
        """Change something by hand, as a fault would."""
        ...

    def open_offline_readers(self) -> AbstractAsyncContextManager[list[QueueReader]]:
        """The readers that need no open store."""
        ...

    @property
    def locator(self) -> list[str]:
        """What another process needs to open it: `places.py`'s name for it, and where it is."""
        ...


class SqliteBackend:
    """A file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "queue.db"

    def create_store(self, clock: Clock, report: Report) -> SqliteStore:
        """A store on the file."""
        return SqliteStore(self.path, clock=clock, on_damaged=report)

    def query_rows(self, sql: str) -> list[tuple[Any, ...]]:
        """What a query gives."""
        return query_rows(self.path, sql)

    def execute(self, sql: str) -> None:
        """Change something by hand, once no store has the file open."""
        with open_closed_database(self.path) as conn:
            conn.execute(sql)

    async def prepare_store(self, store: Store) -> None:
        """Nothing: nobody else sends."""

    @asynccontextmanager
    async def open_offline_readers(self) -> AsyncIterator[list[QueueReader]]:
        """The reader of the file."""
        async with open_queue_file(self.path) as queue:
            yield [queue]

    @property
    def locator(self) -> list[str]:
        """What another process needs."""
        return ["sqlite", str(self.path.parent)]


class PostgresBackend:
    """A schema of a database.

    Args:
        address: the database.
        schema: its name there.
    """

    def __init__(self, address: str, schema: str) -> None:
        self.address = address
        self.schema = schema

    def create_store(
        self, clock: Clock, report: Report, *, host: str = "one", seals: list[bytes] | None = None, lease: float = 10.0
    ) -> PostgresStore:
        """A host's store."""
        return PostgresStore(
            self.address,
            keyring=Keyring(SEALING_KEYS if seals is None else seals),
            host=host,
            schema=self.schema,
            clock=clock,
            lease_seconds=lease,
            on_damaged=report,
        )

    def query_rows(self, sql: str) -> list[tuple[Any, ...]]:
        """What a query gives."""
        with self.connect() as conn:
            return conn.execute(sql.encode()).fetchall()

    def execute(self, sql: str) -> None:
        """Change something by hand."""
        with self.connect() as conn:
            conn.execute(sql.encode())

    async def prepare_store(self, store: Store) -> None:
        """Its host is the one that sends."""
        assert isinstance(store, PostgresStore)
        assert await store.acquire_sender_lease() is not None
        self.execute("UPDATE sender SET until = 'infinity'")  # nobody keeps it up here

    @asynccontextmanager
    async def open_offline_readers(self) -> AsyncIterator[list[QueueReader]]:
        """None: only a store reads the database."""
        yield []

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection that sees the schema's tables."""
        return psycopg.connect(self.address, options=f"-c search_path={self.schema}", autocommit=True)

    @property
    def locator(self) -> list[str]:
        """What another process needs."""
        return ["postgres", self.address, self.schema]


def parse_locator(locator: list[str]) -> SqliteBackend | PostgresBackend:
    """The place that these words name."""
    return SqliteBackend(Path(locator[1])) if locator[0] == "sqlite" else PostgresBackend(locator[1], locator[2])
