"""Reading beside the writer: a few connections that can not write, for each query the newest that is committed."""

from __future__ import annotations

import logging
from typing import Any, Final

import psycopg
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from helper.errors import StoreError, StoreUnreachable
from helper.store.postgres.connection import CONNECT_SECONDS, ConnectionSettings
from helper.store.postgres.errors import is_lost, translate
from helper.store.postgres.row_encryption import RowEncryption
from helper.store.postgres.transaction import statements
from helper.store.share_listing import Row
from helper.store.transaction import Params

CONNECTIONS: Final = 4
"""Connections of one host that read; operators' questions and wallets' share them."""

# What the pool would say of lost connections, our errors say.
logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)


class PostgresReader:
    """A pool of connections that only read."""

    def __init__(self, link: ConnectionSettings, sealing: RowEncryption) -> None:
        self._link = link
        self._sealing = sealing
        self._pool: AsyncConnectionPool[psycopg.AsyncConnection[tuple[Any, ...]]] | None = None

    async def open(self) -> None:
        """Connect.

        Raises:
            StoreError: the database can not be reached.
        """
        pool = AsyncConnectionPool(
            self._link.conninfo,
            kwargs=self._link.options(reading=True),
            min_size=1,
            max_size=CONNECTIONS,
            timeout=CONNECT_SECONDS,
            open=False,
            name="store-readers",
        )
        try:
            await pool.open(wait=True, timeout=CONNECT_SECONDS)
        except PoolTimeout as error:
            await pool.close()
            raise StoreUnreachable("the database can not be reached") from error
        self._pool = pool

    async def close(self) -> None:
        """Disconnect."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.close()

    async def fetch(self, name: str, params: Params = ()) -> list[Row]:
        """All rows of a named query.

        Raises:
            StoreError: the database can not be read.
        """
        found = await self.run(statements()[name], self._sealing.outward(name, params))
        return self._sealing.inward(name, found)

    async def run(self, sql: bytes, params: Any = None) -> list[Row]:
        """All rows of a statement that changes nothing. A connection that was lost is replaced once."""
        if self._pool is None:
            raise StoreError("the database is not open", advice="Start the helper again.")
        try:
            try:
                return await _run(self._pool, sql, params)
            except psycopg.Error as error:
                if not is_lost(error):
                    raise
                return await _run(self._pool, sql, params)
        except (psycopg.Error, PoolTimeout) as error:
            raise translate(error) from error


async def _run(
    pool: AsyncConnectionPool[psycopg.AsyncConnection[tuple[Any, ...]]], sql: bytes, params: Any
) -> list[Row]:
    async with pool.connection() as conn:
        cursor = await conn.execute(sql, params)
        return [] if cursor.description is None else await cursor.fetchall()
