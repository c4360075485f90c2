"""Read-only connections to the database file.

All rows of a query are fetched immediately. No read transaction stays open, so the WAL can be truncated.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiosqlite
import anyio

from helper.errors import StoreError
from helper.store.queue_reader import QueueReader
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sql_files import sqlite_statements
from helper.store.sqlite.displacement import file_size, wal_path
from helper.store.sqlite.errors import is_disk_full, result_code, translate, translating
from helper.store.sqlite.file_lock import is_locked, refuse_non_file, refuse_second_name
from helper.store.sqlite.schema import open_encryption, read_identity, refuse_unencrypted
from helper.store.table_rows import Row, refuse_marked
from helper.store.transaction import Params

BUSY_SECONDS: Final = 5.0
"""Seconds to wait while another process has locked the database."""
_UNCREATED_CODES: Final = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY})


def connect_read_only(database: Path, *, timeout: float = BUSY_SECONDS) -> sqlite3.Connection:
    """Open a database for queries, of any one thread at a time.

    Raises:
        StoreForeign: the path is not one of a file.
        StoreDisplaced: the file has a second name.
        sqlite3.Error: it cannot be opened.
    """
    real = Path(os.path.realpath(database))
    refuse_non_file(real)
    refuse_second_name(real)

    def connect(options: str) -> sqlite3.Connection:
        conn = sqlite3.connect(
            f"{real.as_uri()}?mode=ro{options}",
            uri=True,
            isolation_level=None,
            timeout=timeout,
            check_same_thread=False,
        )
        try:
            conn.execute("PRAGMA query_only = ON")
            conn.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        except BaseException:
            conn.close()
            raise
        return conn

    try:
        return connect("")
    except sqlite3.OperationalError as error:
        # In a read-only directory, or on a full disk, SQLite cannot create the WAL's shared memory. Without a WAL and a
        # helper it is not needed.
        is_uncreated = result_code(error) in _UNCREATED_CODES or is_disk_full(error)
        if not is_uncreated or file_size(wal_path(real)) > 0 or is_locked(real):
            raise
    return connect("&immutable=1")


def require_readable(database: Path) -> None:
    """Raise the system's error if a file cannot be read, because SQLite's does not contain the reason."""
    refuse_non_file(database)
    with database.open("rb"):
        pass


class SqliteReader:
    """A read-only connection with its own thread.

    Attributes:
        encryption: that of the open file.
    """

    def __init__(self, path: Path, encryption: RowEncryption = UNENCRYPTED) -> None:
        self._path = path
        self._configured = encryption
        self.encryption = UNENCRYPTED
        self._conn: aiosqlite.Connection | None = None
        self._snapshot_lock = asyncio.Lock()

    async def open(self) -> None:
        """Connect.

        Raises:
            StoreError: the file cannot be used, as for `open_read_only`.
        """
        with translating(str(self._path)):
            # Connect before aiosqlite starts its thread: aiosqlite does not wait for a thread that failed to connect,
            # and such a thread may call a closed event loop.
            conn, self.encryption = await asyncio.to_thread(open_read_only, self._path, self._configured)
        self._conn = await aiosqlite.Connection(lambda: conn, iter_chunk_size=64)

    async def close(self) -> None:
        """Disconnect, and end the thread."""
        if self._conn is not None:
            conn, self._conn = self._conn, None
            await conn.close()

    async def fetch(self, name: str, params: Params = ()) -> list[Row]:
        """Return all rows of a named query; see `RowReader`."""
        rows = await self.run(sqlite_statements()[name], params)
        return self.encryption.decrypt_rows(name, rows)

    async def fetch_snapshot(self, queries: Sequence[tuple[str, Params]]) -> list[Row]:
        """Return the rows of all these named queries as of one moment; see `RowReader`."""
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


def open_read_only(path: Path, configured: RowEncryption) -> tuple[sqlite3.Connection, RowEncryption]:
    """Open a database of this version of the helper for queries, and return its encryption too.

    Raises:
        StoreForeign: the file is not one.
        StoreCorrupt: it is damaged.
        StoreKeyError: it is encrypted, and a key that it needs is missing.
        sqlite3.Error: it cannot be opened.
    """
    conn = connect_read_only(path)
    conn.text_factory = partial(str, encoding="utf-8", errors="replace")
    try:
        conn.execute("PRAGMA temp_store = MEMORY")
        read_identity(conn).check(str(path), latest_only=True)
        return conn, open_encryption(conn, configured, str(path))
    except BaseException:
        conn.close()
        raise


@asynccontextmanager
async def open_queue_file(
    path: Path, encryption: RowEncryption = UNENCRYPTED, *, allow_unencrypted: bool = True
) -> AsyncIterator[QueueReader]:
    """Open a database file read-only for operator commands, without a running helper.

    With `allow_unencrypted`, a file is read that the service refuses, because there is a key file.

    Raises:
        StoreKeyError: it is encrypted, and a key that it needs is missing; or it is not encrypted, and must be.
        StoreForeign: it is not a database of this version of the helper.
        StoreMoved: the queue was moved to another database.
        StoreError: it cannot be read.
    """
    reader = SqliteReader(path, encryption)
    await reader.open()
    try:
        if not allow_unencrypted:
            refuse_unencrypted(reader.encryption, encryption, str(path))
        refuse_marked(await reader.fetch("get_marks"), str(path))
        yield QueueReader(reader)
    finally:
        await reader.close()
