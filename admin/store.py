"""Registrations and the last good voting configuration, in a small SQLite file.

Every change is on disk (fsync) when the awaited call returns. Only the service's user can read the file: it holds
keyed hashes of the networks that registrations came from, and the key, so a reader could test guesses.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import secrets
import sqlite3
import stat
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, cast

import aiosqlite

from admin.registration import RegistrationRequest
from helper.errors import StoreCorrupt, StoreError, StoreForeign

APPLICATION_ID: Final = 0x73764144
"""What the header of our files says: "svAD"."""
VERSION: Final = 2
LIFE: Final = 7 * 24 * 3600
"""Seconds after which a registration that did not come into staking is dropped."""
MOST: Final = 10_000
"""Maximum number of registrations: any key can sign one, so the file needs a bound."""
MOST_OF_NETWORK: Final = 200
"""Maximum number of registrations from one network (IPv4 /24, IPv6 /48): 2 % of all places."""
_HASH_BYTES: Final = 8


class RegistryFullError(Exception):
    """No place for a new registration; the text says why."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A validator that waits. Times are unix seconds."""

    operator_address: str
    url: str
    moniker: str
    requested_at: int
    expires_at: int


@dataclass(frozen=True, slots=True)
class StoredConfig:
    """A voting configuration as it was published, and when it was fetched (unix seconds)."""

    body: bytes
    fetched_at: int


class AdminStore:
    """The file. One connection, one change at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._conn: aiosqlite.Connection | None = None
        self._alone = asyncio.Lock()
        self._network_key = b""

    async def open(self) -> None:
        """Make or open the file.

        Raises:
            StoreForeign: it is another program's or a newer version's, or no regular file.
            StoreCorrupt: it is damaged.
            StoreError: it cannot be opened.
        """
        try:
            # Opened before aiosqlite has a thread: of one whose connecting failed it does not wait for the end.
            conn = await asyncio.to_thread(_connect, self._path)
            self._conn = await aiosqlite.Connection(lambda: conn, iter_chunk_size=64)
            await self._prepare(self._conn)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _not_a_file(self._path) from error
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
        if (application, version) == (APPLICATION_ID, 1):
            await conn.executescript(_FROM_VERSION_1)
        elif (application, version) == (0, 0) and await _one(conn, "SELECT count(*) FROM sqlite_schema") == (0,):
            schema = (resources.files("admin") / "schema.sql").read_text("utf-8")
            marks = f"PRAGMA application_id = {APPLICATION_ID};\nPRAGMA user_version = {VERSION};"
            await conn.executescript(f"BEGIN;\n{schema}\n{marks}\nCOMMIT;")
        elif application != APPLICATION_ID or version > VERSION:
            raise StoreForeign(
                f"{self._path} is no file of registrations, or of a newer version",
                advice="Point [admin] db_path at the registrations' own file, or start the version that wrote it.",
            )
        await conn.execute("INSERT OR IGNORE INTO network_key (one, value) VALUES (1, ?)", (secrets.token_bytes(32),))
        (self._network_key,) = await _one(conn, "SELECT value FROM network_key")

    # ------------------------------------------------------------------ registrations

    async def register(self, claim: RegistrationRequest, *, network: bytes, now: float) -> Registration:
        """Store a claim; one that is not newer than the stored one of its address changes nothing.

        If all places are taken, the newest registration of the network with the most registrations is evicted.

        Args:
            claim: what was signed.
            network: network of the client, see `helper.server.client_address.network_of`; only a keyed hash of it is
            stored. now: unix seconds.

        Returns:
            The stored registration of the claim's address.

        Raises:
            RegistryFullError: the address is new, and its network has `MOST_OF_NETWORK` registrations or, if all
                places are taken, at least as many as any other network.
        """
        at = int(now)
        hashed = hashlib.blake2b(network, digest_size=_HASH_BYTES, key=self._network_key).digest()
        async with self._alone:
            # All writes take this lock, so nothing changes between the statements.
            await self._change("DELETE FROM registrations WHERE expires_at <= ?", at)
            if (
                await self._row("SELECT 1 FROM registrations WHERE operator_address = ?", claim.operator_address)
                is None
            ):
                await self._make_room(hashed)
            await self._change(
                "INSERT INTO registrations"
                " (operator_address, url, moniker, signed_at, requested_at, expires_at, network)"
                " VALUES (?1, ?2, ?3, ?4, ?5, ?5 + ?6, ?7)"
                " ON CONFLICT (operator_address) DO UPDATE SET url = excluded.url, moniker = excluded.moniker,"
                " signed_at = excluded.signed_at, expires_at = excluded.expires_at"
                " WHERE excluded.signed_at > signed_at",
                claim.operator_address,
                claim.url,
                claim.moniker,
                claim.timestamp,
                at,
                LIFE,
                hashed,
            )
            row = await self._row(f"{_WAITING} WHERE operator_address = ?", claim.operator_address)
        assert row is not None
        return Registration(*row)

    async def waiting(self, *, now: float) -> list[Registration]:
        """All pending registrations, the oldest first."""
        rows = await self._rows(f"{_WAITING} WHERE expires_at > ?", int(now))
        return await asyncio.to_thread(_oldest_first, rows)

    async def addresses_after(self, address: str, limit: int) -> list[str]:
        """Up to `limit` registered addresses that sort after this one, in order."""
        query = "SELECT operator_address FROM registrations WHERE operator_address > ? ORDER BY 1 LIMIT ?"
        return [row[0] for row in await self._rows(query, address, limit)]

    async def drop(self, addresses: list[str]) -> int:
        """Delete the registrations of these addresses; returns how many there were."""
        async with self._alone:
            return sum(
                [
                    await self._change("DELETE FROM registrations WHERE operator_address = ?", address)
                    for address in addresses
                ]
            )

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

    async def kept_config(self, source: str) -> StoredConfig | None:
        """The last good copy from this URL."""
        row = await self._row("SELECT body, fetched_at FROM voting_config WHERE source = ?", source)
        return None if row is None else StoredConfig(*row)

    # ------------------------------------------------------------------ inside

    async def _make_room(self, network: bytes) -> None:
        """Make sure that there is a place for one more registration of this network; raises RegistryFullError."""
        (own,) = await self._row("SELECT count(*) FROM registrations WHERE network = ?", network) or (0,)
        if own >= MOST_OF_NETWORK:
            raise RegistryFullError("too many validators of this network wait already")
        (total,) = await self._row("SELECT count(*) FROM registrations") or (0,)
        if total < MOST:
            return
        crowded, most = await self._row(
            "SELECT network, count(*) FROM registrations GROUP BY network"
            " ORDER BY count(*) DESC, max(requested_at) DESC LIMIT 1"
        ) or (network, 0)
        if own >= most:
            raise RegistryFullError("too many validators wait already")
        await self._change(
            "DELETE FROM registrations WHERE operator_address = (SELECT operator_address FROM registrations"
            " WHERE network = ? ORDER BY requested_at DESC, signed_at DESC, operator_address DESC LIMIT 1)",
            crowded,
        )

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
            return cast(list[tuple[Any, ...]], await self._open.execute_fetchall(query, values))
        except sqlite3.Error as error:
            raise StoreError(f"registrations cannot be read: {error}") from error


def _oldest_first(rows: list[tuple[Any, ...]]) -> list[Registration]:
    # SQLite has no index in this order, and sorts whole rows.
    return sorted((Registration(*row) for row in rows), key=lambda found: (found.requested_at, found.operator_address))


_WAITING: Final = "SELECT operator_address, url, moniker, requested_at, expires_at FROM registrations"
_FROM_VERSION_1: Final = """
BEGIN;
ALTER TABLE registrations ADD COLUMN network BLOB NOT NULL DEFAULT x'';
CREATE INDEX registrations_by_network ON registrations (network, requested_at);
CREATE TABLE network_key (
  one   INTEGER PRIMARY KEY CHECK (one = 1),
  value BLOB NOT NULL CHECK (length(value) = 32)
) STRICT;
PRAGMA user_version = 2;
COMMIT;
"""
_MOVE_AWAY: Final = "Move the file away and start again: validators that wait can register once more."


def _connect(path: Path) -> sqlite3.Connection:
    """Make or open the file, with mode 0600.

    Links are not followed: whoever owns the directory could have root, if root runs the service, write elsewhere.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _not_a_file(path)
        if found.st_mode & 0o077:
            os.fchmod(fd, 0o600)
        uri = f"{path.absolute().as_uri()}?mode=rw"
        conn = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        # SQLite follows links: refuse a file that was replaced since.
        if not os.path.samestat(path.lstat(), found):
            conn.close()
            raise _not_a_file(path)
    finally:
        os.close(fd)  # before SQLite has locks: closing any descriptor of the file releases them
    return conn


def _not_a_file(path: Path) -> StoreForeign:
    return StoreForeign(
        f"{path} is not a regular file", advice="Set [admin] db_path to the file itself, not to a link."
    )


async def _one(conn: aiosqlite.Connection, query: str) -> tuple[Any, ...]:
    async with conn.execute(query) as cursor:
        row = await cursor.fetchone()
    return () if row is None else tuple(row)
