"""A PostgreSQL schema as the source or target of a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psycopg

from helper.errors import StoreLocked
from helper.store.db_copy.endpoint import CopyEndpoint, load_copy_statements
from helper.store.keyring import Keyring
from helper.store.postgres.connection import ConnectionSettings, translating
from helper.store.postgres.opening import connect, prepare_schema, require_ready, waiting_briefly
from helper.store.postgres.transaction import require_confirmed_commit
from helper.store.row_encryption import RowEncryption
from helper.store.sql_files import postgres_statements, to_postgres
from helper.store.table_rows import Row
from helper.store.transaction import Params


class PostgresEndpoint(CopyEndpoint):
    """A shared database.

    The exclusive lock is an advisory lock that conflicts with the shared lock of each host.
    """

    def __init__(self, settings: ConnectionSettings, keyring: Keyring) -> None:
        self._settings = settings
        self._keyring = keyring
        self._encryption = RowEncryption(keyring)
        self._conn: psycopg.Connection[Row] | None = None
        self.cli_value = settings.to_display_text()
        self.label = f"{self.cli_value}, schema {settings.schema}"

    @property
    def config_text(self) -> str:
        """The configuration of a host."""
        return (
            f'[store] url = "{self.cli_value}" (complete the URL), '
            f'schema_name = "{self._settings.schema}", key_file, on every host'
        )

    def connect_read_only(self) -> None:
        """Connect and check the schema, without changes."""
        if self._conn is not None:
            return
        try:
            with translating():
                self._conn = connect(self._settings)
                require_ready(self._conn, self._settings, self._keyring)
        except BaseException:
            self.close()
            raise

    def lock_exclusive(self) -> None:
        """Acquire the exclusive lock, and create or upgrade the schema."""
        with translating():
            if self._conn is None:
                self._conn = connect(self._settings)
            hosts = ", ".join(str(row[0]) for row in self.fetch_all("list_lock_holders", (self._settings.schema,)))
            refusal = StoreLocked(
                f"hosts use {self.label}: {hosts or 'one has just started'}",
                advice="Stop the helper on each of these hosts first.",
            )
            with waiting_briefly(self._conn, refusal):
                self._conn.execute(_statement("lock_schema_exclusive"), (self._settings.schema,))
            prepare_schema(self._conn, self._settings, self._keyring)

    def close(self) -> None:
        """Release the lock and disconnect: the server may detect the end of the connection late."""
        if self._conn is not None:
            conn, self._conn = self._conn, None
            with suppress(psycopg.Error), conn:
                conn.rollback()
                conn.execute("SELECT pg_advisory_unlock_all()")

    # ------------------------------------------------------------------ statements

    @property
    def _connection(self) -> psycopg.Connection[Row]:
        assert self._conn is not None
        return self._conn

    def fetch_all(self, name: str, params: Params = ()) -> list[Row]:
        """Return all rows of a query, decrypted."""
        with translating():
            rows = self._connection.execute(_statement(name), params).fetchall()
        return self._encryption.decrypt_rows(name, rows)

    def execute_many(self, name: str, rows: Sequence[Row]) -> None:
        """Run a statement for each row, pipelined."""
        with self._connection.cursor() as cursor:
            cursor.executemany(_statement(name), [self._encryption.encrypt_params(name, row) for row in rows])

    @contextmanager
    def write_transaction(self) -> Iterator[None]:
        """Open a write transaction."""
        with translating(), require_confirmed_commit(self._connection), self._connection.transaction():
            yield

    def end_copy(self) -> None:
        """Recount shares, advance the sequences, and drop claims and the sender lease."""
        for name in ("drop_all_aside", "drop_counters", "count_shares_postgres", "drop_claims", "drop_sender"):
            self._connection.execute(_statement(name))
        for name in ("continue_share_ids", "continue_round_numbers"):
            self._connection.execute(_statement(name))


def _statement(name: str) -> bytes:
    own = load_copy_statements().get(name)
    return postgres_statements()[name] if own is None else to_postgres(own)
