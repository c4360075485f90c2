"""The transaction of the SQLite writer thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from helper.core.share import ShareState
from helper.store.records import ShareRow
from helper.store.rows import SpentNullifier
from helper.store.sql_files import multi_row_statement, sqlite_statements
from helper.store.sqlite.errors import IndexDamageError, UnreadableRowError, result_code
from helper.store.transaction import UNREADABLE_SHARE, Params, ShareIdentity, Transaction

MAX_ROWS_PER_STATEMENT: Final = 64
"""Maximum number of rows in one statement."""


@dataclass(slots=True)
class SqliteTransaction(Transaction):
    """A transaction on the writer's SQLite connection.

    Attributes:
        conn: the writer's connection.
        next_id: the next share id; never decreases while the process runs.
        can_reindex: whether the indexes have not been rebuilt since the start.
    """

    conn: sqlite3.Connection
    next_id: int
    can_reindex: bool = True

    def execute(self, name: str, params: Params = ()) -> int:
        """Run a named statement. Returns the number of changed rows."""
        return self.conn.execute(sqlite_statements()[name], params).rowcount

    def fetch_all(self, name: str, params: Params = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a named query."""
        return self.conn.execute(sqlite_statements()[name], params).fetchall()

    def execute_many(self, name: str, rows: Iterable[Params]) -> None:
        """Run a named statement once per row."""
        self.conn.executemany(sqlite_statements()[name], rows)

    def allocate_id(self) -> int:
        """Return a new share id."""
        self.next_id += 1
        return self.next_id - 1

    def find_taken(self, identities: Sequence[ShareIdentity]) -> set[int]:
        """Return the indexes of the identities that are already stored or spent."""
        indexed = [(index, *name) for index, name in enumerate(identities)]
        return {index for rows in self._execute_multi_row("find_taken", indexed) for (index,) in rows}

    def add_shares(self, rows: Sequence[ShareRow]) -> None:
        """Insert new shares."""
        for _ in self._execute_multi_row("add_share", [row.to_columns() for row in rows]):
            pass

    def _execute_multi_row(self, name: str, rows: Sequence[Sequence[Any]]) -> Iterator[list[tuple[Any, ...]]]:
        """Run a named one-row statement for many rows; yields the result of each execution.

        The number of rows of each execution is a power of two, so only a few statements are prepared.
        """
        start = 0
        while left := len(rows) - start:
            size = min(MAX_ROWS_PER_STATEMENT, 1 << left.bit_length() - 1)
            values = list(chain.from_iterable(rows[start : start + size]))
            yield self.conn.execute(multi_row_statement(name, size), values).fetchall()
            start += size

    def lock_shared(self) -> None:
        """Do nothing: only this thread writes."""

    def lock_exclusive(self) -> None:
        """Do nothing: only this thread writes."""

    def is_round_closed(self, round_no: int) -> bool:  # noqa: ARG002 (for several hosts)
        """Return False: after closing a round, this host's admission rejects its shares."""
        return False

    def are_all_spent(self, spent: Sequence[SpentNullifier]) -> bool:  # noqa: ARG002 (for several hosts)
        """Return False: there is no other host."""
        return False

    def acquire_claim(self, share_id: int) -> None:
        """Do nothing: the state is the claim."""

    def release_claim(self, share_id: int) -> None:
        """Do nothing: the state is the claim."""

    def has_claim(self, row: ShareRow) -> bool:  # noqa: ARG002 (for several hosts)
        """Return True: there is no other host."""
        return True

    def expired_claims(self, limit: int) -> list[int]:  # noqa: ARG002 (for several hosts)
        """Return an empty list: claims do not expire in a file."""
        return []

    def orphaned_claims(self, limit: int) -> list[int]:
        """Return shares in WITNESSED: no other host works on them."""
        params = {"state": ShareState.WITNESSED.value, "limit": limit}
        return [row[0] for row in self.fetch_all("shares_in_state", params)]

    def can_send(self) -> bool:
        """Return True: there is no other host."""
        return True

    def notify(self, payload: str) -> None:
        """Do nothing: there is no other host."""

    def get_share(self, share_id: int) -> ShareRow | None:
        """Return a share's row, damaged or not; None if it does not exist or was set aside as unreadable.

        Raises:
            UnreadableRowError: SQLite cannot read it; the writer sets it aside and runs the batch again.
        """
        return (
            None if self.fetch_one("is_set_aside", (share_id,)) == (UNREADABLE_SHARE.state,) else self._read(share_id)
        )

    def get_live_share(self, share_id: int) -> ShareRow | None:
        """Like `get_share`, but also return None if the row was set aside for any reason.

        Raises:
            UnreadableRowError: SQLite cannot read it.
        """
        return None if self.fetch_one("is_set_aside", (share_id,)) is not None else self._read(share_id)

    def _read(self, share_id: int) -> ShareRow | None:
        try:
            found = self.fetch_one("share_by_id", (share_id,))
        except sqlite3.DatabaseError as error:
            if result_code(error) == sqlite3.SQLITE_CORRUPT:
                raise UnreadableRowError(share_id) from error
            raise
        return None if found is None else ShareRow(*found)

    def handle_index_damage(self) -> None:
        """Make the writer rebuild the indexes, unless it has done so since the start."""
        if self.can_reindex:
            raise IndexDamageError
