"""Read-only connections: a pool for queries.

Each query, or snapshot of several queries, sees the latest committed state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import psycopg
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from helper.errors import StoreError, StoreUnreachable
from helper.store.postgres.connection import CONNECTIONS_ADVICE, ConnectionSettings, is_connection_lost, translating
from helper.store.row_encryption import RowEncryption
from helper.store.sql_files import postgres_statements
from helper.store.table_rows import Row
from helper.store.transaction import Params

CONNECTIONS: Final = 4
"""Read-only connections of one host, shared by operator queries and wallet requests."""
WAIT_SECONDS: Final = 2.0
"""Time limit for a free connection: shorter than the 5 s after which wallets give up on a request."""

_BEGIN_SNAPSHOT: Final = b"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
"""First statement of a transaction whose statements all see the same committed state."""

# The pool's own messages repeat errors that are already reported as StoreError.
logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)


class PostgresReader:
    """A pool of read-only connections."""

    def __init__(self, settings: ConnectionSettings, encryption: RowEncryption) -> None:
        self._settings = settings
        self._encryption = encryption
        self._pool: AsyncConnectionPool[psycopg.AsyncConnection[Row]] | None = None

    async def open(self) -> None:
        """Open the pool.

        Raises:
            StoreError: the database is unreachable.
        """
        pool = AsyncConnectionPool(
            self._settings.conninfo,
            kwargs=self._settings.options(reading=True),
            min_size=1,
            max_size=CONNECTIONS,
            timeout=WAIT_SECONDS,
            reconnect_timeout=WAIT_SECONDS,  # the next read tries again; the pool would pause up to two minutes
            open=False,
            name="store-readers",
        )
        try:
            await pool.open(wait=True, timeout=self._settings.connect_seconds)
        except BaseException as error:
            await pool.close()  # its tasks ignore cancellation, so without this the event loop would not end
            if not isinstance(error, PoolTimeout):
                raise
            raise StoreUnreachable(
                "the database is unreachable: no further connection could be opened",
                advice=f"Check the log of the server. {CONNECTIONS_ADVICE}",
            ) from error
        self._pool = pool

    async def close(self) -> None:
        """Close the pool."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.close()

    async def fetch(self, name: str, params: Params = ()) -> list[Row]:
        """Return all rows of a named query; see `RowReader`."""
        rows = await self.run(postgres_statements()[name], params)
        return self._encryption.decrypt_rows(name, rows)

    async def fetch_snapshot(self, queries: Sequence[tuple[str, Params]]) -> list[Row]:
        """Return the rows of all these named queries as of one moment; see `RowReader`."""
        statements = [(postgres_statements()[name], params) for name, params in queries]
        results = await self._run_all([(_BEGIN_SNAPSHOT, None), *statements])
        decrypt = self._encryption.decrypt_rows
        return [row for (name, _), rows in zip(queries, results[1:], strict=True) for row in decrypt(name, rows)]

    async def run(self, sql: bytes, params: Any = None) -> list[Row]:
        """Return all rows of a statement that changes nothing. Lost connections are replaced."""
        return (await self._run_all([(sql, params)]))[0]

    async def _run_all(self, statements: Sequence[tuple[bytes, Any]]) -> list[list[Row]]:
        """Return the rows of each statement; several statements run in one transaction."""
        if self._pool is None:
            raise StoreError("the database is not open", advice="Start the helper again.")
        with translating(), _restore_cancellation():
            for _ in range(CONNECTIONS):  # all idle connections are lost if the server was restarted
                try:
                    return await _run_all(self._pool, statements)
                except psycopg.Error as error:
                    if isinstance(error, PoolTimeout) or not is_connection_lost(error):
                        raise
            return await _run_all(self._pool, statements)


@contextlib.contextmanager
def _restore_cancellation() -> Iterator[None]:
    """Raise CancelledError at the end of the block if the task was cancelled in it, but the block continued.

    The pool waits for a connection with `asyncio.wait_for`, which until Python 3.11 ignores a cancellation that arrives
    together with the result. A component whose cancellation is lost never ends, and neither does the service.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before and not isinstance(sys.exception(), asyncio.CancelledError):
            raise asyncio.CancelledError


async def _run_all(
    pool: AsyncConnectionPool[psycopg.AsyncConnection[Row]], statements: Sequence[tuple[bytes, Any]]
) -> list[list[Row]]:
    async with pool.connection() as conn, conn.transaction() if len(statements) > 1 else contextlib.nullcontext():
        results: list[list[Row]] = []
        for sql, params in statements:
            cursor = await conn.execute(sql, params)
            results.append([] if cursor.description is None else await cursor.fetchall())
        return results
