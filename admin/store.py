"""Registrations and the last good voting configuration, in one small SQLite file of its own.

Every change is on disk (fsync) when the awaited call returns. Nothing in here is secret; the file is the service's
user's own all the same.
"""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import aiosqlite

from admin.claim import Claim
from helper.errors import StoreCorrupt, StoreError, StoreForeign

APPLICATION_ID: Final = 0x73764144
"""What the header of our files says: "svAD"."""
VERSION: Final = 1
LIFE: Final = 7 * 24 * 3600
"""Seconds after which a registration that did not come into staking is dropped."""
MOST: Final = 10_000
"""Registrations at once: any key can sign one, and the file must not grow without end."""


class RegistryFullError(Exception):
    """There are as many registrations as are kept."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A validator that waits. Times are unix seconds."""

    operator_address: str
    url: str
    moniker: str
    requested_at: int
    expires_at: int


@dataclass(frozen=True, slots=True)
class KeptConfig:
    """A voting configuration as it was published, and when it was fetched (unix seconds)."""

    body: bytes
    fetched_at: int


class AdminStore:
    """The file. One connection, one change at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._conn: aiosqlite.Connection | None = None
        self._alone = asyncio.Lock()

    async def open(self) -> None:
        """Make or open the file.

        Raises:
            StoreForeign: it is another program's, or a newer version's.
            StoreCorrupt: it is damaged.
            StoreError: it cannot be opened.
        """
        try:
            self._path.touch(mode=0o600)
            # Opened before aiosqlite has a thread: of one whose connecting failed it does not wait for the end.
            conn = await asyncio.to_thread(sqlite3.connect, self._path, isolation_level=None, check_same_thread=False)
            self._conn = await aiosqlite.Connection(lambda: conn, iter_chunk_size=64)
            await self._prepare(self._conn)
        except OSError as error:
            raise StoreError(
                f"{self._path} cannot be opened: {error.strerror}",
                advice="Make the directory of [admin] db_path, and let the service's user write in it.",
            ) from error
        except sqlite3.DatabaseError as error:
            await self.close()
            raise StoreCorrupt(f"{self._path} is damaged: {error}", advice=_MOVE_AWAY) from error
        except StoreError:
            await self.close()
            raise

    async def close(self) -> None:
        """Let go of the file."""
        conn, self._conn = self._conn, None
        if conn is not None:
            await conn.close()

    async def _prepare(self, conn: aiosqlite.Connection) -> None:
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 5000", "trusted_schema = OFF"):
            await conn.execute(f"PRAGMA {pragma}")
        if await _one(conn, "PRAGMA quick_check(1)") != ("ok",):
            raise StoreCorrupt(f"{self._path} is damaged", advice=_MOVE_AWAY)
        (application,), (version,) = (
            await _one(conn, "PRAGMA application_id"),
            await _one(conn, "PRAGMA user_version"),
        )
        if (application, version) == (0, 0) and await _one(conn, "SELECT count(*) FROM sqlite_schema") == (0,):
            schema = (resources.files("admin") / "schema.sql").read_text("utf-8")
            marks = f"PRAGMA application_id = {APPLICATION_ID};\nPRAGMA user_version = {VERSION};"
            await conn.executescript(f"BEGIN;\n{schema}\n{marks}\nCOMMIT;")
        elif application != APPLICATION_ID or version > VERSION:
            raise StoreForeign(
                f"{self._path} is no file of registrations, or of a newer version",
                advice="Point [admin] db_path at the registrations' own file, or start the version that wrote it.",
            )

    # ------------------------------------------------------------------ registrations

    async def register(self, claim: Claim, *, now: float) -> Registration:
        """Keep a claim; one that is not newer than what is kept for its address changes nothing.

        Returns what stands afterwards.

        Raises:
            RegistryFullError: it is a new address, and there are too many.
        """
        at = int(now)
        async with self._alone:
            # With one statement after the other under the lock there is nothing between them.
            await self._change("DELETE FROM registrations WHERE expires_at <= ?", at)
            known = await self._row("SELECT 1 FROM registrations WHERE operator_address = ?", claim.operator_address)
            if known is None and await self._row("SELECT count(*) >= ? FROM registrations", MOST) == (1,):
                raise RegistryFullError
            await self._change(
                "INSERT INTO registrations (operator_address, url, moniker, signed_at, requested_at, expires_at)"
                " VALUES (?1, ?2, ?3, ?4, ?5, ?5 + ?6)"
                " ON CONFLICT (operator_address) DO UPDATE SET url = excluded.url, moniker = excluded.moniker,"
                " signed_at = excluded.signed_at, expires_at = excluded.expires_at"
                " WHERE excluded.signed_at > signed_at",
                claim.operator_address,
                claim.url,
                claim.moniker,
                claim.timestamp,
                at,
                LIFE,
            )
            row = await self._row(f"{_WAITING} WHERE operator_address = ?", claim.operator_address)
        assert row is not None
        return Registration(*row)

    async def waiting(self, *, now: float) -> list[Registration]:
        """Who waits, the longest first."""
        rows = await self._rows(f"{_WAITING} WHERE expires_at > ? ORDER BY requested_at, operator_address", int(now))
        return [Registration(*row) for row in rows]

    async def drop(self, addresses: list[str]) -> None:
        """These are in staking now."""
        async with self._alone:
            for address in addresses:
                await self._change("DELETE FROM registrations WHERE operator_address = ?", address)

    async def sweep(self, *, now: float) -> int:
        """Drop what has expired; how many."""
        async with self._alone:
            return await self._change("DELETE FROM registrations WHERE expires_at <= ?", int(now))

    # ------------------------------------------------------------------ the voting configuration

    async def keep_config(self, source: str, body: bytes, *, now: float) -> None:
        """Keep the last good copy."""
        async with self._alone:
            await self._change(
                "INSERT INTO voting_config (one, source, body, fetched_at) VALUES (1, ?, ?, ?)"
                " ON CONFLICT (one) DO UPDATE SET source = excluded.source, body = excluded.body,"
                " fetched_at = excluded.fetched_at",
                source,
                body,
                int(now),
            )

    async def kept_config(self, source: str) -> KeptConfig | None:
        """The last good copy from this URL."""
        row = await self._row("SELECT body, fetched_at FROM voting_config WHERE source = ?", source)
        return None if row is None else KeptConfig(*row)

    # ------------------------------------------------------------------ inside

    @property
    def _open(self) -> aiosqlite.Connection:
        if self._conn is None:
            raise StoreError("the registrations' file is not open", advice="Start the helper again.")
        return self._conn

    async def _change(self, statement: str, *values: Any) -> int:
        try:
            return int((await self._open.execute(statement, values)).rowcount)
        except sqlite3.Error as error:
            raise StoreError(f"registrations cannot be written: {error}") from error

    async def _row(self, query: str, *values: Any) -> tuple[Any, ...] | None:
        rows = await self._rows(query, *values)
        return rows[0] if rows else None

    async def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            return [tuple(row) for row in await self._open.execute_fetchall(query, values)]
        except sqlite3.Error as error:
            raise StoreError(f"registrations cannot be read: {error}") from error


_WAITING: Final = "SELECT operator_address, url, moniker, requested_at, expires_at FROM registrations"
_MOVE_AWAY: Final = "Move the file away and start again: validators that wait can register once more."


async def _one(conn: aiosqlite.Connection, query: str) -> tuple[Any, ...]:
    async with conn.execute(query) as cursor:
        row = await cursor.fetchone()
    return () if row is None else tuple(row)
