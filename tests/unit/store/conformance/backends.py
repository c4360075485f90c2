"""Where a store keeps what it keeps: the same tests ask it of a file and of a database that several hosts share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import psycopg

from helper.clock import Clock
from helper.store import ReadOnlyQueue, SqliteStore
from helper.store.base import DamagedShare
from helper.store.postgres import PostgresStore
from helper.store.postgres.keyring import Keyring
from tests.unit.store.fixtures import WholeStore, hands_on, rows

SEALS = [b"s" * 32]
Report = Callable[[DamagedShare], None]
Reopen = Callable[[], Awaitable[WholeStore]]
"""Opens a store that is closed at the end of the test."""


class Place(Protocol):
    """What is kept beyond the life of one store."""

    def store(self, clock: Clock, report: Report) -> WholeStore:
        """A store on it, not yet open."""
        ...

    async def begin(self, store: WholeStore) -> None:
        """Have an open store do all that there is to do."""
        ...

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """What a query gives, beside a running store."""
        ...

    def change(self, sql: str) -> None:
        """Change something by hand, as a fault would."""
        ...

    def alone(self) -> list[ReadOnlyQueue]:
        """What tells the same of it when no store is open."""
        ...

    @property
    def in_words(self) -> list[str]:
        """What another process needs to open it: `places.py`'s name for it, and where it is."""
        ...


class SqlitePlace:
    """A file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "queue.db"

    def store(self, clock: Clock, report: Report) -> SqliteStore:
        """A store on the file."""
        return SqliteStore(self.path, clock=clock, on_damaged=report)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """What a query gives."""
        return rows(self.path, sql)

    def change(self, sql: str) -> None:
        """Change something by hand, once no store has the file open."""
        with hands_on(self.path) as conn:
            conn.execute(sql)

    async def begin(self, store: WholeStore) -> None:
        """Nothing: nobody else sends."""

    def alone(self) -> list[ReadOnlyQueue]:
        """The file can be read by itself."""
        return [ReadOnlyQueue(self.path)]

    @property
    def in_words(self) -> list[str]:
        """What another process needs."""
        return ["sqlite", str(self.path.parent)]


class PostgresPlace:
    """A schema of a database.

    Args:
        address: the database.
        schema: its name there.
    """

    def __init__(self, address: str, schema: str) -> None:
        self.address = address
        self.schema = schema

    def store(
        self, clock: Clock, report: Report, *, host: str = "one", seals: list[bytes] | None = None, lease: float = 10.0
    ) -> PostgresStore:
        """A host's store."""
        return PostgresStore(
            self.address,
            seals=Keyring(SEALS if seals is None else seals),
            host=host,
            schema=self.schema,
            clock=clock,
            lease=lease,
            on_damaged=report,
        )

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """What a query gives."""
        with self.connect() as conn:
            return conn.execute(sql.encode()).fetchall()

    def change(self, sql: str) -> None:
        """Change something by hand."""
        with self.connect() as conn:
            conn.execute(sql.encode())

    async def begin(self, store: WholeStore) -> None:
        """Its host is the one that sends."""
        assert isinstance(store, PostgresStore)
        assert await store.take_sender() is not None
        self.change("UPDATE sender SET until = 'infinity'")  # nobody keeps it up here

    def alone(self) -> list[ReadOnlyQueue]:
        """Nothing: its sealed parts need a host."""
        return []

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection that sees the schema's tables."""
        return psycopg.connect(self.address, options=f"-c search_path={self.schema}", autocommit=True)

    @property
    def in_words(self) -> list[str]:
        """What another process needs."""
        return ["postgres", self.address, self.schema]


def place_of(words: list[str]) -> SqlitePlace | PostgresPlace:
    """The place that these words name."""
    return SqlitePlace(Path(words[1])) if words[0] == "sqlite" else PostgresPlace(words[1], words[2])
