"""Read-only connections to the database file.

All rows of a query are fetched immediately. No read transaction stays open, so the WAL can be truncated.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiosqlite
import anyio

from helper.errors import StoreError
from helper.store.meta import refuse_marked
from helper.store.queue_reader import QueueReader
from helper.store.sqlite.displacement import file_size, wal_path
from helper.store.sqlite.errors import result_code, translate, translate_opening
from helper.store.sqlite.row_format import UNENCRYPTED, RowFormat, open_row_format, refuse_unencrypted
from helper.store.sqlite.schema import IDENTITY_QUERY, FileIdentity
from helper.store.sqlite.second_name_check import read_only_uri
from helper.store.table_rows import Row
from helper.store.transaction import Params

if TYPE_CHECKING:
    from helper.store.row_encryption import RowEncryption

_OPEN_FAILURE_CODES: Final = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY})


class SqliteReader:
    """A read-only connection with its own thread.

    Args:
        path: the database file.
        encryption: made from the key file, None without a key file.

    Attributes:
        row_format: the format of the open file.
    """

    def __init__(self, path: Path, encryption: RowEncryption | None = None) -> None:
        self._path = path
        self._encryption = encryption
        self.row_format = UNENCRYPTED
        self._conn: aiosqlite.Connection | None = None
        self._snapshot_lock = asyncio.Lock()

    async def open(self) -> None:
        """Connect.

        Raises:
            StoreForeign: the file is not a database.
            StoreKeyError: the file is encrypted, and a key that it needs is missing.
            StoreError: the file cannot be read.
        """
        try:
            try:
                await self._connect()
            except sqlite3.OperationalError as error:
                # In a read-only directory SQLite cannot open the WAL's shared memory; without a WAL it is not needed.
                if result_code(error) not in _OPEN_FAILURE_CODES or file_size(wal_path(self._path)) > 0:
                    raise
                await self._connect("&immutable=1")
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise translate_opening(error, str(self._path)) from error

    async def _connect(self, options: str = "") -> None:
        # Connect before aiosqlite starts its thread: aiosqlite does not wait for a thread that failed to connect, and
        # such a thread may call a closed event loop.
        uri = read_only_uri(self._path) + options
        conn, self.row_format = await asyncio.to_thread(_open_file, uri, self._encryption, str(self._path))
        self._conn = await aiosqlite.Connection(lambda: conn, iter_chunk_size=64)

    async def close(self) -> None:
        """Disconnect, and end the thread."""
        if self._conn is not None:
            conn, self._conn = self._conn, None
            await conn.close()

    async def fetch(self, name: str, params: Params = ()) -> list[Row]:
        """Return all rows of a named query.

        Raises:
            StoreError: the file cannot be read.
        """
        rows = self.row_format
        return rows.decrypt_rows(name, await self.run(rows.statement(name), rows.encrypt_params(name, params)))

    async def fetch_snapshot(self, queries: Sequence[tuple[str, Params]]) -> list[Row]:
        """Return the rows of all these named queries, one after the other, as of one moment.

        Raises:
            StoreError: the file cannot be read.
        """
        async with self._snapshot_lock:
            try:
                await self.run("BEGIN")
                return [row for name, params in queries for row in await self.fetch(name, params)]
            finally:
                # A cancelled BEGIN is executed nevertheless. Without one, ROLLBACK fails and changes nothing.
                with anyio.CancelScope(shield=True), suppress(StoreError):
                    await self.run("ROLLBACK")

    async def run(self, sql: str, params: Params = ()) -> list[Row]:
        """Return all rows of a read-only statement."""
        if self._conn is None:
            raise StoreError("the database is not open", advice="Start the helper again.")
        try:
            rows: Iterable[Any] = await self._conn.execute_fetchall(sql, params)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise translate(error) from error
        return list(rows)


def _open_file(uri: str, encryption: RowEncryption | None, name: str) -> tuple[sqlite3.Connection, RowFormat]:
    conn = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    conn.text_factory = partial(str, encoding="utf-8", errors="replace")
    try:
        conn.execute("PRAGMA query_only = ON")
        conn.execute("PRAGMA temp_store = MEMORY")
        return conn, open_row_format(conn, encryption, name)
    except BaseException:
        conn.close()
        raise


@asynccontextmanager
async def open_queue_file(
    path: Path, encryption: RowEncryption | None = None, *, allow_unencrypted: bool = True
) -> AsyncIterator[QueueReader]:
    """Open a database file read-only for operator commands, without a running helper.

    Args:
        path: the file.
        encryption: made from the key file, None without a key file.
        allow_unencrypted: read a file that is not encrypted even with a key file, which the service refuses.

    Raises:
        StoreKeyError: it is encrypted, and a key that it needs is missing; or it is not encrypted, and must be.
        StoreForeign: it is not a database of this version of the helper.
        StoreMoved: the queue was moved to another database.
        StoreError: it cannot be read.
    """
    reader = SqliteReader(path, encryption)
    await reader.open()
    try:
        FileIdentity(*(await reader.run(IDENTITY_QUERY))[0]).check(str(path), latest_only=True)
        if not allow_unencrypted:
            refuse_unencrypted(reader.row_format, encryption, str(path))
        refuse_marked(await reader.fetch("get_marks"), str(path))
        yield QueueReader(reader)
    finally:
        await reader.close()
