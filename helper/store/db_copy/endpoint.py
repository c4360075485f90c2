"""A database that is copied from or to, page by page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Final

from helper.core.share import ShareState
from helper.errors import StoreCorrupt
from helper.store.db_copy.tables import (
    LOCAL_META_KEYS,
    META,
    ROUND_KEYS,
    SHARES,
    TABLES,
    Key,
    LiveShare,
    Table,
    is_ascending,
    live_shares,
)
from helper.store.models import DamagedShare
from helper.store.sql_files import read_statements
from helper.store.table_rows import (
    MOVED_KEY,
    RANK_KEY,
    ROW_CHECK_KEY,
    UNFINISHED_KEY,
    CopyMark,
    Row,
    make_meta_row,
    read_key,
    read_mark,
)
from helper.store.transaction import Params

_TRANSITIONS: Final = {
    ShareState.WAITING: (),
    ShareState.PROVING: (ShareState.PROVING,),
    ShareState.FAILED: (ShareState.FAILED,),
    ShareState.SENT: (ShareState.PROVING, ShareState.SENT),
}
"""Legal transitions from WAITING to each state. The schema allows inserting a share only in WAITING."""


@cache
def load_copy_statements() -> Mapping[str, str]:
    """Return the statements that only a copy runs, by name."""
    generated = {name: sql for table in TABLES for name, sql in table.statements().items()}
    return generated | read_statements("helper.store.db_copy", "copying.sql")


load_copy_statements()  # as `sqlite_statements`


class CopyEndpoint(ABC):
    """Source or target of a copy. Its methods block.

    Every method may raise StoreError; a write that raises has changed nothing.

    Attributes:
        label: name for messages, without a password.
        cli_value: value for `--from` and `--to`.
    """

    label: str
    cli_value: str

    # ------------------------------------------------------------------ implemented per database

    @property
    @abstractmethod
    def config_text(self) -> str:
        """Configuration with which a helper uses this database, for messages."""

    @abstractmethod
    def connect_read_only(self) -> None:
        """Connect for reading. A helper may use the database at the same time.

        Raises:
            NotFound: the database does not exist.
            StoreForeign: it is not a database of this version of the helper.
        """

    @abstractmethod
    def lock_exclusive(self) -> None:
        """Lock the database exclusively until `close`. Creates it if it does not exist.

        Raises:
            StoreLocked: a helper uses it.
        """

    @abstractmethod
    def close(self) -> None:
        """Disconnect and release the lock."""

    @abstractmethod
    def fetch_all(self, name: str, params: Params = ()) -> list[Row]:
        """Return all rows of a named query, decrypted."""

    @abstractmethod
    def execute_many(self, name: str, rows: Sequence[Row]) -> None:
        """Run a statement for each row, encrypted, inside `write_transaction`."""

    @abstractmethod
    def write_transaction(self) -> AbstractContextManager[None]:
        """Return a write transaction; it is on disk when the context exits."""

    @abstractmethod
    def end_copy(self) -> None:
        """Complete a copy inside `write_transaction`: recount shares, advance sequences, drop claims."""

    # ------------------------------------------------------------------ reading

    def read_page(self, table: Table, after: Key) -> Sequence[Row]:
        """Return the next page of a table in key order; a share includes its message and history.

        Raises:
            StoreCorrupt: the rows are not in key order, so that paging might never end.
        """
        if table.start is None:
            return self._read_all_rows(table)
        rows = self._read_page(table, after)
        if not is_ascending(table, after, rows):
            raise StoreCorrupt(f"{self.label} is damaged: rows of {table.name} are out of order")
        return rows

    def read_pages(self, table: Table) -> Iterator[Sequence[Row]]:
        """Yield all rows of a table in key order; see `read_page`."""
        after = table.start or ()
        while page := self.read_page(table, after):
            yield page
            if len(page) < table.rows or table.start is None:
                return
            after = table.key(page[-1])

    def _read_page(self, table: Table, after: Key) -> Sequence[Row]:
        if table is not SHARES:
            return self.fetch_all(f"page_{table.name}", (*after, table.rows))
        shares = self.fetch_all("page_shares", {"after": after[0], "limit": table.rows})
        if not shares:
            return []
        return live_shares(shares, self.fetch_all("page_history", (*after, shares[-1][1])))

    def _read_all_rows(self, table: Table) -> list[Row]:
        rows = self.fetch_all(f"page_{table.name}")
        return sorted(row for row in rows if table.name != "meta" or row[0] not in LOCAL_META_KEYS)

    def read_quarantined(self) -> dict[int, DamagedShare]:
        """Return the shares that were quarantined as damaged, by number."""
        return {row[0]: DamagedShare(*row[1:]) for row in self.fetch_all("damaged")}

    def read_counters(self) -> dict[tuple[int, int], int]:
        """Return the stored share counts by round number and state."""
        return {(no, state): n for no, state, n in self.fetch_all("counters") if n}

    def read_row_key(self) -> bytes:
        """Return the key of the row checks.

        Raises:
            StoreCorrupt: it is damaged.
        """
        return read_key(self.fetch_all("get_meta", (ROW_CHECK_KEY,)), ROW_CHECK_KEY, self.label)

    def is_fresh(self) -> bool:
        """Return whether the database is empty except for its initial rows."""
        facts = {row[0] for row in self.fetch_all("page_meta")}
        return not self.read_page(ROUND_KEYS, (-1,)) and facts <= LOCAL_META_KEYS | {ROW_CHECK_KEY, RANK_KEY}

    def get_mark(self, name: str) -> CopyMark | None:
        """Return a mark of a copy."""
        return read_mark(self.fetch_all("get_meta", (name,)))

    # ------------------------------------------------------------------ writing

    def set_mark(self, name: str, mark: CopyMark | None) -> None:
        """Set or remove a mark, inside `write_transaction`."""
        self.execute_many("drop_meta", [(name,)])
        if mark is not None:
            self.execute_many("write_meta", [make_meta_row(name, mark.to_text())])

    def begin_copy(self, mark: CopyMark, meta: Sequence[Row]) -> None:
        """Mark this database as an unfinished target, so that no helper uses it, and copy the source's `meta`."""
        with self.write_transaction():
            self.execute_many("drop_meta", [(row[0],) for row in self.read_page(META, ())])
            self.execute_many("write_meta", meta)
            self.set_mark(UNFINISHED_KEY, mark)
            self.set_mark(MOVED_KEY, None)

    def delete_rows(self) -> None:
        """Delete all rows except those of `meta`."""
        with self.write_transaction():
            self.execute_many("drop_counters", [()])  # they refer to the rounds
            self.execute_many("drop_purged_failures", [()])  # not by their keys, of which a damaged one matches none
        for table in reversed(TABLES):
            while table is not META and (rows := self.read_page(table, table.start or ())):
                with self.write_transaction():
                    # One row per statement, because SQLite writes a large statement journal to a file.
                    self.execute_many(f"drop_{table.name}", [table.key(row) for row in rows])
        with self.write_transaction():
            self.execute_many("drop_all_aside", [()])

    def write_rows(self, table: Table, rows: Sequence[Row]) -> None:
        """Insert rows of a table in one transaction."""
        if rows:
            with self.write_transaction():
                if table is SHARES:
                    self._write_shares([LiveShare(*row) for row in rows])
                else:
                    self.execute_many(f"write_{table.name}", rows)

    def _write_shares(self, shares: Sequence[LiveShare]) -> None:
        received = ShareState.WAITING.value
        self.execute_many("add_share", [live.share._replace(state=received) for live in shares])
        reveals = [live.reveal for live in shares if live.reveal is not None]
        if reveals:
            self.execute_many("add_reveal", reveals)
        self.execute_many("write_history", [(live.id, *entry) for live in shares for entry in live.history])
        self.execute_many("copy_share", list(_iter_transitions(shares)))


def _iter_transitions(shares: Sequence[LiveShare]) -> Iterator[tuple[int, int]]:
    for live in shares:
        for state in _TRANSITIONS[ShareState(live.share.state)]:
            yield state.value, live.id
