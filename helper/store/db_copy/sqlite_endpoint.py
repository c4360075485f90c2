"""A SQLite file as the source or target of a copy."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from helper.clock import Clock
from helper.errors import NotFound
from helper.runtime.process_security import acting_as_owner
from helper.store.db_copy.endpoint import CopyEndpoint, load_copy_statements
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sql_files import sqlite_statements
from helper.store.sqlite.errors import translating
from helper.store.sqlite.opening import OpenedDatabase, open_database
from helper.store.sqlite.reader import open_read_only
from helper.store.table_rows import Row
from helper.store.transaction import Params

_DELETE_PREFIX: Final = "drop_"


class SqliteEndpoint(CopyEndpoint):
    """A database file, locked with the helper's lock.

    When run as root, it opens and closes the file as the owner of the file or its directory, so that new files belong
    to that user.

    Args:
        encryption: made from the key file. With a key, a new file is encrypted; an existing file stays as it is.

    Attributes:
        encryption: that of the file.
    """

    def __init__(self, path: Path, clock: Clock, encryption: RowEncryption = UNENCRYPTED) -> None:
        self._path = path
        self._clock = clock
        self._configured = encryption
        self.encryption = UNENCRYPTED
        self._conn: sqlite3.Connection | None = None
        self._opened: OpenedDatabase | None = None
        self._deleted = False
        self.label = self.cli_value = os.path.realpath(path)

    @property
    def config_text(self) -> str:
        """The configuration of a single host."""
        keys = "[store] key_file and no url" if self.encryption.is_encrypted else "no [store] url and key_file"
        return f'[helper] db_path = "{self.label}", and {keys}'

    def connect_read_only(self) -> None:
        """Connect read-only."""
        if self._conn is not None:
            return
        if not self._path.exists():
            raise NotFound(f"database {self._path} does not exist", advice="Specify the file of the queue: --db FILE.")
        with acting_as_owner(self._path), translating(str(self._path)):
            conn, self.encryption = open_read_only(self._path, self._configured)
        self._use_connection(conn)

    def lock_exclusive(self) -> None:
        """Acquire the helper's lock and open the file as a helper does. Creates a missing file."""
        with acting_as_owner(self._path):
            self._disconnect()  # closing this descriptor later would release SQLite's own locks
            self._opened = open_database(self._path, self._clock, encryption=self._configured, for_copy=True)
            self.encryption = self._opened.tx.encryption
        self._use_connection(self._opened.tx.conn)

    def _use_connection(self, conn: sqlite3.Connection) -> None:
        conn.text_factory = _decode_text
        self._conn = conn

    def close(self) -> None:
        """Erase deleted data, close the file and release the lock."""
        if self._opened is None and self._conn is None:
            return
        with acting_as_owner(self._path):
            if self._opened is not None:
                opened, self._opened, self._conn = self._opened, None, None
                with translating():
                    opened.close()
            self._disconnect()

    def _disconnect(self) -> None:
        if self._conn is not None:
            conn, self._conn = self._conn, None
            conn.close()

    # ------------------------------------------------------------------ statements

    @property
    def opened(self) -> OpenedDatabase:
        """The open database, while it is locked."""
        assert self._opened is not None
        return self._opened

    @property
    def _connection(self) -> sqlite3.Connection:
        assert self._conn is not None
        return self._conn

    def fetch_all(self, name: str, params: Params = ()) -> list[Row]:
        """Return all rows of a query."""
        with translating():
            rows = self._connection.execute(self._statement(name), params).fetchall()
        return self.encryption.decrypt_rows(name, rows)

    def execute_many(self, name: str, rows: Sequence[Row]) -> None:
        """Run a statement for each row."""
        params = [self.encryption.encrypt_params(name, row) for row in rows]
        changed = self._connection.executemany(self._statement(name), params).rowcount
        self._deleted = self._deleted or (name.startswith(_DELETE_PREFIX) and changed > 0)

    def _statement(self, name: str) -> str:
        return load_copy_statements().get(name) or sqlite_statements()[name]

    @contextmanager
    def write_transaction(self) -> Iterator[None]:
        """Open a write transaction. After the commit, checkpoint the WAL and erase deleted data if due."""
        with translating():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise
            if self._deleted:
                self._deleted = False
                self.opened.eraser.record_deletion()
            with acting_as_owner(self._path):  # this opens the WAL file
                self.opened.eraser.run_due(idle=False)

    def end_copy(self) -> None:
        """Recount shares."""
        for name in ("drop_all_aside", "drop_counters", "count_shares_sqlite"):
            self._connection.execute(self._statement(name))


def _decode_text(text: bytes) -> str:
    """Decode a text, which may be damaged: invalid UTF-8 must not end the query, and PostgreSQL refuses a NUL."""
    return text.decode(errors="replace").replace("\0", "\ufffd")
