"""What the parts of every store share, and what a database must bring to be one.

A store is two things: operations, which are plain functions of a `Transaction` and know no database, and the engine
that runs them. SQLite's is `writer.py` and `reading.py`, PostgreSQL's is in `postgres/`. Both run the same
operations, each with a file of named statements of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from helper.clock import Clock
from helper.store.share_listing import Row
from helper.store.transaction import Keys, Params, Transaction

T = TypeVar("T")


class Engine(Protocol):
    """Runs operations, each in a transaction."""

    @property
    def keys(self) -> Keys:
        """The database's own keys, while it is open."""
        ...

    async def run(self, op: Callable[[Transaction], T], *, after_erasure: bool = False) -> T:
        """Run an operation; returns when it is on disk. It goes on to its end when the caller is cancelled.

        Raises:
            StoreError: nothing of it was kept.
        """
        ...


class RowReader(Protocol):
    """Runs named queries beside the engine, each on a view of its own."""

    async def fetch(self, name: str, params: Params = ()) -> list[Row]:
        """All rows of a named query.

        Raises:
            StoreError: the database can not be read.
        """
        ...


class StorePart:
    """The writer, the readers and the clock of one store: operators' questions may take long, and hold nobody up."""

    _clock: Clock
    _writer: Engine
    _reader: RowReader
    _operators: RowReader

    def _now_ms(self) -> int:
        return int(self._clock.now() * 1000)
