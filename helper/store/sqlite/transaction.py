"""The transaction of the one thread that writes to a SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from helper.core.share import ShareState
from helper.store.records import ShareRow
from helper.store.rows import Spent
from helper.store.sql_files import of_rows, queries
from helper.store.sqlite.errors import IndexDamageError, UnreadableRowError, code_of
from helper.store.transaction import UNREADABLE, Name, Params, Transaction

ROWS_AT_ONCE: Final = 64
"""Rows of one statement."""


@dataclass(slots=True)
class SqliteTransaction(Transaction):
    """One SQLite connection inside the writer's transaction.

    Attributes:
        conn: the writing connection.
        next_id: the number of the next share; never goes back while the process lives.
        healable: the indexes have not yet been made anew since the start.
    """

    conn: sqlite3.Connection
    next_id: int
    healable: bool = True

    def run(self, name: str, params: Params = ()) -> int:
        """Run a named statement; the number of rows that it changed."""
        return self.conn.execute(queries()[name], params).rowcount

    def all(self, name: str, params: Params = ()) -> list[tuple[Any, ...]]:
        """All rows of a named query."""
        return self.conn.execute(queries()[name], params).fetchall()

    def many(self, name: str, rows: Iterable[Params]) -> None:
        """Run a named statement once a row."""
        self.conn.executemany(queries()[name], rows)

    def new_id(self) -> int:
        """The number of the next share."""
        self.next_id += 1
        return self.next_id - 1

    def are_taken(self, asked: Sequence[Name]) -> set[int]:
        """Which of these names are known or spent, by their places."""
        placed = [(place, *name) for place, name in enumerate(asked)]
        return {place for found in self._of_rows("are_taken", placed) for (place,) in found}

    def add_shares(self, rows: Sequence[ShareRow]) -> None:
        """Put in new shares."""
        for _ in self._of_rows("add_share", [row.columns() for row in rows]):
            pass

    def _of_rows(self, name: str, rows: Sequence[Sequence[Any]]) -> Iterator[list[tuple[Any, ...]]]:
        """Run a named statement of one row for many rows at once; what each run of it gives.

        In numbers of rows that are powers of two: so few statements do, and each is made ready once.
        """
        start = 0
        while left := len(rows) - start:
            size = min(ROWS_AT_ONCE, 1 << left.bit_length() - 1)
            values = list(chain.from_iterable(rows[start : start + size]))
            yield self.conn.execute(of_rows(name, size), values).fetchall()
            start += size

    def beside(self) -> None:
        """Nothing to do: one thread writes, and no other host."""

    def alone(self) -> None:
        """Nothing to do."""

    def is_over(self, round_no: int) -> bool:  # noqa: ARG002 (several hosts')
        """Who closes a round here takes nothing for it any more."""
        return False

    def all_spent(self, spent: Sequence[Spent]) -> bool:  # noqa: ARG002 (several hosts')
        """There is no other host."""
        return False

    def acquire_claim(self, share_id: int) -> None:
        """Nothing to do."""

    def release_claim(self, share_id: int) -> None:
        """Nothing to do."""

    def holds(self, row: ShareRow) -> bool:  # noqa: ARG002 (several hosts')
        """There is no other host."""
        return True

    def lapsed(self, limit: int) -> list[int]:  # noqa: ARG002 (several hosts')
        """None: there is no other host."""
        return []

    def orphaned_claims(self, limit: int) -> list[int]:
        """All that are in hand: nobody else works on them."""
        params = {"state": ShareState.WITNESSED.value, "limit": limit}
        return [row[0] for row in self.all("shares_in_state", params)]

    def sends(self) -> bool:
        """There is no other host."""
        return True

    def tell(self, word: str) -> None:
        """Nobody else is there to hear it."""

    def share(self, share_id: int) -> ShareRow | None:
        """A share's row as it stands, sound or not; None when there is none, or SQLite can not read it.

        Raises:
            UnreadableRowError: SQLite can not read it; the writer sets it aside and tries anew.
        """
        return None if self.one("is_set_aside", (share_id,)) == (UNREADABLE.state,) else self._read(share_id)

    def live(self, share_id: int) -> ShareRow | None:
        """The same, but None as well when it was set aside.

        Raises:
            UnreadableRowError: as above.
        """
        return None if self.one("is_set_aside", (share_id,)) is not None else self._read(share_id)

    def _read(self, share_id: int) -> ShareRow | None:
        try:
            found = self.one("share_by_id", (share_id,))
        except sqlite3.DatabaseError as error:
            if code_of(error) == sqlite3.SQLITE_CORRUPT:
                raise UnreadableRowError(share_id) from error
            raise
        return None if found is None else ShareRow(*found)

    def index_is_wrong(self) -> None:
        """An index named a row that is not what it says: have the indexes made anew, or go on if they were."""
        if self.healable:
            raise IndexDamageError
