"""The transaction of the SQLite writer thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sql_files import multi_row_statement, sqlite_statements
from helper.store.sqlite.errors import UnreadableRowError, result_code
from helper.store.sqlite.schema import latest_version
from helper.store.table_rows import Row, ShareRow
from helper.store.transaction import UNREADABLE_SHARE, Params, ShareIdentity, StoredShare, TakenShare, Transaction

MAX_ROWS_PER_STATEMENT: Final = 64
"""Maximum number of rows in one statement."""


@dataclass(slots=True)
class SqliteTransaction(Transaction):
    """A transaction on the writer's SQLite connection.

    Attributes:
        next_id: the next share id; never decreases while the process runs.
    """

    conn: sqlite3.Connection
    next_id: int
    encryption: RowEncryption = UNENCRYPTED

    def execute(self, name: str, params: Params = ()) -> int:
        """Run a named statement. Returns the number of changed rows."""
        return self.conn.execute(sqlite_statements()[name], self.encryption.encrypt_params(name, params)).rowcount

    def fetch_all(self, name: str, params: Params = ()) -> list[Row]:
        """Return all rows of a named query."""
        return self.encryption.decrypt_rows(name, self.conn.execute(sqlite_statements()[name], params).fetchall())

    def execute_many(self, name: str, rows: Iterable[Params]) -> None:
        """Run a named statement once per row."""
        convert = self.encryption.encrypt_params
        self.conn.executemany(sqlite_statements()[name], (convert(name, row) for row in rows))

    def force_sync(self) -> None:
        """Write a page. An UPDATE of a row to its current values would write none."""
        self.conn.execute(f"PRAGMA user_version = {latest_version()}")

    def allocate_id(self) -> int:
        """Return a new share id."""
        self.next_id += 1
        return self.next_id - 1

    def find_taken(self, identities: Sequence[ShareIdentity]) -> dict[int, TakenShare]:
        """Return the identities that are already stored or spent, by index."""
        params = [
            (index, *identity, tag)
            for index, identity in enumerate(identities)
            for tag in self.encryption.nullifier_tags(identity[2])
        ]
        return {
            index: TakenShare(bool(is_confirmed), id_by_mac)
            for rows in self._execute_multi_row("find_taken", params)
            for index, is_confirmed, id_by_mac in rows
        }

    def read_stored_shares(self, share_ids: Sequence[int]) -> list[StoredShare]:
        """Return these rows, damaged or not.

        Raises:
            UnreadableRowError: SQLite cannot read one of them.
        """
        ids = [(share_id,) for share_id in share_ids]
        try:
            return [
                StoredShare(*columns)
                for rows in self._execute_multi_row("stored_shares", ids)
                for columns in self.encryption.decrypt_rows("stored_shares", rows)
            ]
        except sqlite3.DatabaseError as error:
            if result_code(error) != sqlite3.SQLITE_CORRUPT:
                raise
            for share_id in share_ids:
                self.get_share(share_id)  # finds out which one it is
            raise

    def add_shares(self, rows: Sequence[ShareRow]) -> None:
        """Insert new shares."""
        for _ in self._execute_multi_row("add_share", [self.encryption.encrypt_share(row) for row in rows]):
            pass

    def find_shares_by_nullifier(self, spent: Sequence[tuple[int, bytes]]) -> list[tuple[int, int, bytes]]:
        """Return live shares with one of these nullifiers, by id: (share id, round number, nullifier)."""
        return sorted(
            (share_id, round_no, nullifier)
            for round_no, nullifier in spent
            for tag in self.encryption.nullifier_tags(nullifier)
            for (share_id,) in self.fetch_all("shares_of_tag", (tag,))
        )

    def _execute_multi_row(self, name: str, rows: Sequence[Sequence[Any]]) -> Iterator[list[Row]]:
        """Run a named one-row statement for many rows; yields the result of each execution.

        The number of rows of each execution is a power of two, so only a few statements are prepared.
        """
        start = 0
        while left := len(rows) - start:
            size = min(MAX_ROWS_PER_STATEMENT, 1 << left.bit_length() - 1)
            values = list(chain.from_iterable(rows[start : start + size]))
            yield self.conn.execute(multi_row_statement(sqlite_statements()[name], size), values).fetchall()
            start += size

    def get_share(self, share_id: int) -> ShareRow | None:
        """Return a share's row, damaged or not; None if it does not exist or was quarantined as unreadable.

        Raises:
            UnreadableRowError: SQLite cannot read it; the writer quarantines it and runs the batch again.
        """
        return (
            None if self.fetch_one("is_quarantined", (share_id,)) == (UNREADABLE_SHARE.state,) else self._read(share_id)
        )

    def get_live_share(self, share_id: int) -> ShareRow | None:
        """Like `get_share`, but also return None if the row was quarantined for any reason.

        Raises:
            UnreadableRowError: SQLite cannot read it.
        """
        return None if self.fetch_one("is_quarantined", (share_id,)) is not None else self._read(share_id)

    def _read(self, share_id: int) -> ShareRow | None:
        try:
            columns = self.fetch_one("share_by_id", (share_id,))
        except sqlite3.DatabaseError as error:
            if result_code(error) == sqlite3.SQLITE_CORRUPT:
                raise UnreadableRowError(share_id) from error
            raise
        return None if columns is None else ShareRow(*columns)
