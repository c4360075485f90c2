"""SQLite store of the registrations and the last valid voting configuration.

Every change is on disk (fsync) when the awaited call returns. Only the service's user can read the file: it contains
keyed hashes of the clients' networks together with the key, so a reader could test guesses.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import secrets
import sqlite3
import stat
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import aiosqlite

from admin.registration_request import RegistrationRequest
from helper.core.json_records import fact
from helper.errors import StoreCorrupt, StoreError, StoreForeign

APPLICATION_ID: Final = 0x73764144
"""SQLite application id of the file: "svAD"."""
SCHEMA_VERSION: Final = 1
REGISTRATION_SECONDS: Final = 7 * 24 * 3600
"""Seconds after which a registration expires if the validator has no staking record."""
MAX_REGISTRATIONS: Final = 10_000
"""Maximum number of registrations. Bounds the file, because any key can sign a registration."""
MAX_REGISTRATIONS_PER_NETWORK: Final = 200
"""Maximum number of registrations from one network (IPv4 /24, IPv6 /48): 2 % of `MAX_REGISTRATIONS`."""
_HASH_BYTES: Final = 8
_HEADER_BYTES: Final = 72
"""Bytes of a file's header up to the application id."""
_SCHEMA: Final = """
CREATE TABLE registrations (
  operator_address TEXT PRIMARY KEY,
  url              TEXT NOT NULL,
  moniker          TEXT NOT NULL,
  signed_at        INTEGER NOT NULL,                    -- timestamp of the request; older requests are ignored
  requested_at     INTEGER NOT NULL,                    -- time of the first registration of the address
  expires_at       INTEGER NOT NULL CHECK (expires_at > requested_at),
  network          BLOB NOT NULL                        -- keyed hash of the client's network
) STRICT, WITHOUT ROWID;

CREATE INDEX registrations_expiring ON registrations (expires_at);
CREATE INDEX registrations_by_network ON registrations (network, requested_at);

CREATE TABLE network_key (
  one   INTEGER PRIMARY KEY CHECK (one = 1),
  value BLOB NOT NULL CHECK (length(value) = 32)        -- random; the key of the hashes in registrations.network
) STRICT;

CREATE TABLE voting_config (
  one         INTEGER PRIMARY KEY CHECK (one = 1),
  source      TEXT NOT NULL,                            -- the configured URL
  body        BLOB NOT NULL,                            -- the published bytes of the dynamic document
  fetched_at  INTEGER NOT NULL,
  static_body BLOB NOT NULL                             -- the static document that named its URL; empty if none
) STRICT;
"""
"""Registrations of validators without a staking record, and the last valid voting configuration; Unix seconds."""


class RegistryFullError(Exception):
    """A limit on the number of registrations is reached. The text states which."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A pending registration."""

    operator_address: str = fact("Operator address of the validator.")
    url: str = fact("URL of the validator's helper.")
    moniker: str = fact("Display name of the validator.")
    requested_at: int = fact("Time of the first registration in Unix seconds.")
    expires_at: int = fact("Time of expiry in Unix seconds.")


class AdminStore:
    """The database file. One connection; changes run one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._conn: aiosqlite.Connection | None = None
        self._write_lock = asyncio.Lock()
        self._network_key = b""

    async def open(self) -> None:
        """Create or open the file.

        Raises:
            StoreForeign: it belongs to another program or a newer version, or is not a regular file.
            StoreCorrupt: it is damaged.
            StoreError: it cannot be opened.
        """
        try:
            async with AsyncExitStack() as after_failure:  # after a cancellation too: the thread would not end
                after_failure.push_async_callback(self.close)
                # Connect before aiosqlite starts its thread, because it does not join the thread if connecting fails.
                conn = await asyncio.to_thread(_connect, self._path)
                self._conn = await aiosqlite.Connection(lambda: conn, iter_chunk_size=64)
                await self._prepare(self._conn)
                after_failure.pop_all()
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _not_a_file(self._path) from error
            raise StoreError(
                f"{self._path} cannot be opened: {error.strerror}",
                advice="Create the directory of [admin] db_path, and make it writable by the service's user.",
            ) from error
        except sqlite3.DatabaseError as error:
            raise StoreCorrupt(f"{self._path} is damaged: {error}", advice=_DAMAGED_ADVICE) from error

    async def close(self) -> None:
        """Close the file."""
        conn, self._conn = self._conn, None
        if conn is not None:
            await conn.close()

    async def _prepare(self, conn: aiosqlite.Connection) -> None:
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 5000", "trusted_schema = OFF"):
            await conn.execute(f"PRAGMA {pragma}")
        if await _fetch_one(conn, "PRAGMA quick_check(1)") != ("ok",):
            raise StoreCorrupt(f"{self._path} is damaged", advice=_DAMAGED_ADVICE)
        (application,), (version,) = (
            await _fetch_one(conn, "PRAGMA application_id"),
            await _fetch_one(conn, "PRAGMA user_version"),
        )
        if (application, version) == (0, 0) and await _fetch_one(conn, "SELECT count(*) FROM sqlite_schema") == (0,):
            pragmas = f"PRAGMA application_id = {APPLICATION_ID};\nPRAGMA user_version = {SCHEMA_VERSION};"
            await conn.executescript(f"BEGIN;\n{_SCHEMA}\n{pragmas}\nCOMMIT;")
        elif (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
            raise _foreign_file(self._path)
        await conn.execute("INSERT OR IGNORE INTO network_key (one, value) VALUES (1, ?)", (secrets.token_bytes(32),))
        (self._network_key,) = await _fetch_one(conn, "SELECT value FROM network_key")

    # ------------------------------------------------------------------ registrations

    async def register(self, request: RegistrationRequest, *, network: bytes, now: float) -> Registration:
        """Store a registration. A request that is not newer than the stored one of its address changes nothing.

        If the store is full, the newest registration of the network with the most registrations is evicted.

        Args:
            request: the signed request.
            network: network of the client, see `admin.registration_limit.client_network`; stored as a keyed hash.
            now: Unix seconds.

        Returns:
            The stored registration of the request's address.

        Raises:
            RegistryFullError: the address is new, and its network has `MAX_REGISTRATIONS_PER_NETWORK` registrations
                or, if the store is full, at least as many as any other network.
        """
        at = int(now)
        hashed = hashlib.blake2b(network, digest_size=_HASH_BYTES, key=self._network_key).digest()
        async with self._write_lock:
            # All writes take this lock, so nothing changes between the statements.
            await self._execute("DELETE FROM registrations WHERE expires_at <= ?", at)
            if (
                await self._fetch_row(
                    "SELECT 1 FROM registrations WHERE operator_address = ?", request.operator_address
                )
                is None
            ):
                await self._evict_if_full(hashed)
            await self._execute(
                "INSERT INTO registrations"
                " (operator_address, url, moniker, signed_at, requested_at, expires_at, network)"
                " VALUES (?1, ?2, ?3, ?4, ?5, ?5 + ?6, ?7)"
                " ON CONFLICT (operator_address) DO UPDATE SET url = excluded.url, moniker = excluded.moniker,"
                " signed_at = excluded.signed_at, expires_at = excluded.expires_at"
                " WHERE excluded.signed_at > signed_at",
                request.operator_address,
                request.url,
                request.moniker,
                request.timestamp,
                at,
                REGISTRATION_SECONDS,
                hashed,
            )
            row = await self._fetch_row(f"{_SELECT_REGISTRATIONS} WHERE operator_address = ?", request.operator_address)
        assert row is not None
        return Registration(*row)

    async def list_pending(self, *, now: float) -> list[Registration]:
        """Return all pending registrations, oldest first."""
        rows = await self._rows(f"{_SELECT_REGISTRATIONS} WHERE expires_at > ?", int(now))
        return await asyncio.to_thread(_oldest_first, rows)

    async def addresses_after(self, address: str, limit: int) -> list[str]:
        """Return up to `limit` registered addresses that sort after this one, in order."""
        query = "SELECT operator_address FROM registrations WHERE operator_address > ? ORDER BY 1 LIMIT ?"
        return [row[0] for row in await self._rows(query, address, limit)]

    async def delete_registrations(self, addresses: list[str]) -> int:
        """Delete the registrations of these addresses. Returns their number."""
        async with self._write_lock:
            return sum(
                [
                    await self._execute("DELETE FROM registrations WHERE operator_address = ?", address)
                    for address in addresses
                ]
            )

    async def delete_expired(self, *, now: float) -> int:
        """Delete expired registrations. Returns their number."""
        async with self._write_lock:
            return await self._execute("DELETE FROM registrations WHERE expires_at <= ?", int(now))

    # ------------------------------------------------------------------ the voting configuration

    async def save_config(self, source: str, body: bytes, static_body: bytes, *, now: float) -> None:
        """Store the last valid configuration: its URL, and both documents as in the columns of the table."""
        async with self._write_lock:
            await self._execute(
                "INSERT INTO voting_config (one, source, body, fetched_at, static_body) VALUES (1, ?, ?, ?, ?)"
                " ON CONFLICT (one) DO UPDATE SET source = excluded.source, body = excluded.body,"
                " fetched_at = excluded.fetched_at, static_body = excluded.static_body",
                source,
                body,
                int(now),
                static_body,
            )

    async def load_config(self, source: str) -> tuple[bytes, bytes] | None:
        """Return both documents of the last valid configuration from this URL."""
        row = await self._fetch_row("SELECT body, static_body FROM voting_config WHERE source = ?", source)
        return None if row is None else (bytes(row[0]), bytes(row[1]))

    async def _evict_if_full(self, network: bytes) -> None:
        """Evict a registration if the store is full.

        Raises:
            RegistryFullError: no more registrations from this network are allowed.
        """
        (own_count,) = await self._fetch_row("SELECT count(*) FROM registrations WHERE network = ?", network) or (0,)
        if own_count >= MAX_REGISTRATIONS_PER_NETWORK:
            raise RegistryFullError("too many pending registrations from this network")
        (total,) = await self._fetch_row("SELECT count(*) FROM registrations") or (0,)
        if total < MAX_REGISTRATIONS:
            return
        largest_network, largest_count = await self._fetch_row(
            "SELECT network, count(*) FROM registrations GROUP BY network"
            " ORDER BY count(*) DESC, max(requested_at) DESC LIMIT 1"
        ) or (network, 0)
        if own_count >= largest_count:
            raise RegistryFullError("too many pending registrations")
        await self._execute(
            "DELETE FROM registrations WHERE operator_address = (SELECT operator_address FROM registrations"
            " WHERE network = ? ORDER BY requested_at DESC, signed_at DESC, operator_address DESC LIMIT 1)",
            largest_network,
        )

    @property
    def _connection(self) -> aiosqlite.Connection:
        if self._conn is None:
            raise StoreError("the registration database is not open", advice="Restart the helper.")
        return self._conn

    async def _execute(self, statement: str, *values: Any) -> int:
        try:
            return int((await self._connection.execute(statement, values)).rowcount)
        except sqlite3.Error as error:
            raise StoreError(f"registrations cannot be written: {error}") from error

    async def _fetch_row(self, query: str, *values: Any) -> tuple[Any, ...] | None:
        rows = await self._rows(query, *values)
        return rows[0] if rows else None

    async def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            return cast(list[tuple[Any, ...]], await self._connection.execute_fetchall(query, values))
        except sqlite3.Error as error:
            raise StoreError(f"registrations cannot be read: {error}") from error


def _oldest_first(rows: list[tuple[Any, ...]]) -> list[Registration]:
    # Sorted here because SQLite has no index in this order and would sort entire rows.
    return sorted((Registration(*row) for row in rows), key=lambda entry: (entry.requested_at, entry.operator_address))


_SELECT_REGISTRATIONS: Final = "SELECT operator_address, url, moniker, requested_at, expires_at FROM registrations"
_DAMAGED_ADVICE: Final = "Move the file away and restart: pending validators can register again."


def _connect(path: Path) -> sqlite3.Connection:
    """Create or open the file with mode 0600.

    Symbolic links are not followed: if root runs the service, the directory's owner could redirect root's writes.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _not_a_file(path)
        if _is_of_other_program(os.pread(fd, _HEADER_BYTES, 0)):
            raise _foreign_file(path)
        if status.st_mode & 0o077:
            os.fchmod(fd, 0o600)
        uri = f"{path.absolute().as_uri()}?mode=rw"
        conn = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        # SQLite follows symbolic links: refuse the file if it was replaced after the check.
        if not os.path.samestat(path.lstat(), status):
            conn.close()
            raise _not_a_file(path)
    finally:
        os.close(fd)  # before SQLite acquires its locks, because closing any descriptor of the file releases them
    return conn


def _is_of_other_program(header: bytes) -> bool:
    """Whether a file is another program's database, of which nothing may be changed.

    After a crash, a new registration database has one page, and its id is in the write-ahead log only.
    """
    pages, application = (int.from_bytes(header[start : start + 4], "big") for start in (28, 68))
    return header.startswith(b"SQLite format 3\0") and application != APPLICATION_ID and bool(application or pages > 1)


def _foreign_file(path: Path) -> StoreForeign:
    return StoreForeign(
        f"{path} is not a registration database, or was written by a newer version",
        advice="Set [admin] db_path to the registration database, or start the version that wrote it.",
    )


def _not_a_file(path: Path) -> StoreForeign:
    return StoreForeign(
        f"{path} is not a regular file", advice="Set [admin] db_path to the file itself, not to a link."
    )


async def _fetch_one(conn: aiosqlite.Connection, query: str) -> tuple[Any, ...]:
    async with conn.execute(query) as cursor:
        row = await cursor.fetchone()
    return () if row is None else tuple(row)
