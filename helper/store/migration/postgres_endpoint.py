"""A PostgreSQL schema as the source or target of a migration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg

from helper.errors import StoreLocked
from helper.store.migration.endpoint import MigrationEndpoint, copying
from helper.store.migration.tables import Row
from helper.store.postgres.connection import ConnectionSettings
from helper.store.postgres.errors import translate
from helper.store.postgres.keyring import Keyring
from helper.store.postgres.opening import connect, need_ready, prepare
from helper.store.postgres.row_encryption import RowEncryption
from helper.store.postgres.transaction import statements
from helper.store.transaction import Params

_DECRYPT_AS: Final = {"page_shares": "share_by_id", "page_reveals": "reveal", "page_round_keys": "round_keys"}
"""Statement names by which `RowEncryption` decrypts rows."""
_ENCRYPT_AS: Final = {"write_round_keys": "add_round_key"}


class PostgresEndpoint(MigrationEndpoint):
    """A shared database. It is read while its hosts run, and locked with an advisory lock that each host shares.

    Args:
        link: connection settings.
        seals: the encryption keys of its hosts.
    """

    def __init__(self, link: ConnectionSettings, seals: Keyring) -> None:
        self._link = link
        self._seals = seals
        self._sealing = RowEncryption(seals)
        self._conn: psycopg.Connection[tuple[Any, ...]] | None = None
        self._held = False

    @property
    def label(self) -> str:
        """The address without a password, and the schema."""
        return f"{self._link.shown()}, schema {self._link.schema}"

    @property
    def word(self) -> str:
        """The address without a password."""
        return self._link.shown()

    @property
    def setting(self) -> str:
        """The configuration of a host."""
        return (
            f'[store] url = "{self._link.shown()}" (complete the address), '
            f'schema_name = "{self._link.schema}", key_file, on every host'
        )

    def look(self) -> None:
        """Connect and check the schema, without changes."""
        if self._conn is not None:
            return
        try:
            with _translated():
                self._connect()
                need_ready(self._open, self._link, self._seals)
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        self._conn = connect(self._link)
        self._conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ

    def hold(self) -> None:
        """Take the exclusive lock, and create or upgrade the schema."""
        if self._held:
            return
        with _translated():
            if self._conn is None:
                self._connect()
            if self.all("hold", (self._link.schema,)) != [(True,)]:
                hosts = ", ".join(str(row[0]) for row in self.all("holders", (self._link.schema,)))
                raise StoreLocked(
                    f"hosts use {self.label}: {hosts or 'they have just stopped'}",
                    advice="Stop the helper on each of these hosts first.",
                )
            self._held = True
            prepare(self._open, self._link, self._seals)

    def close(self) -> None:
        """Disconnect, which releases the lock."""
        if self._conn is not None:
            conn, self._conn, self._held = self._conn, None, False
            with suppress(psycopg.Error):
                conn.close()

    # ------------------------------------------------------------------ statements

    @property
    def _open(self) -> psycopg.Connection[tuple[Any, ...]]:
        assert self._conn is not None
        return self._conn

    def all(self, name: str, params: Params = ()) -> list[Row]:
        """Return all rows of a query, decrypted."""
        with _translated():
            rows = self._open.execute(_statement(name), params).fetchall()
        return self._sealing.inward(_DECRYPT_AS.get(name, name), rows)

    def many(self, name: str, rows: Sequence[Row]) -> None:
        """Run a statement for each row, pipelined."""
        encrypt_as = _ENCRYPT_AS.get(name, name)
        with self._open.cursor() as cursor:
            cursor.executemany(_statement(name), [self._sealing.outward(encrypt_as, row) for row in rows])

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A write transaction."""
        with _translated(), self._open.transaction():
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A read transaction on one snapshot."""
        with _translated(), self._open.transaction():
            yield

    def end_copy(self) -> None:
        """Recount shares, advance the sequences, and drop claims and the sender lease."""
        for name in ("drop_all_aside", "drop_counters", "count_in_shared", "drop_claims", "drop_sender"):
            self._open.execute(_statement(name))
        for name in ("go_on_with_ids", "go_on_with_rounds"):
            self._open.execute(_statement(name))


def _statement(name: str) -> bytes:
    own = copying().get(name)
    return statements()[name] if own is None else own.replace("?", "%s").encode()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise translate(error) from error
