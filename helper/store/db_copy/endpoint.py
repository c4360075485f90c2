"""A database that is copied from or to, page by page, and the copied tables.

Every row begins with its key. Keys of paged tables consist of numbers and bytes only, which both databases sort in the
same order. Tables with text keys are small and are read in one page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

from helper.core.share import ShareState
from helper.errors import StoreCorrupt
from helper.store.models import DamagedShare
from helper.store.sql_files import read_statements
from helper.store.table_rows import (
    KEY_CHECK,
    KEYS_IN_USE,
    MOVED_KEY,
    RANK_KEY,
    ROW_CHECK_KEY,
    RUN_KEY,
    UNFINISHED_KEY,
    CopyMark,
    RevealRow,
    RoundRow,
    Row,
    ShareRow,
    is_sound,
    make_meta_row,
    read_key,
    read_mark,
)
from helper.store.transaction import Params

Key = tuple[Any, ...]

LOCAL_META_KEYS: Final = frozenset({UNFINISHED_KEY, MOVED_KEY, RUN_KEY, KEY_CHECK, KEYS_IN_USE})
"""Keys in `meta` that belong to one database and are not copied."""


@dataclass(frozen=True, slots=True)
class Table:
    """A copied table.

    Attributes:
        columns: its columns, beginning with its key.
        width: number of key columns.
        start: a key before all others; None if the table is read in one page.
        round_column: index of the round number column, None if the table has none.
    """

    name: str
    columns: str
    width: int
    start: Key | None
    rows: int
    round_column: int | None = None

    def key(self, row: Row) -> Key:
        """Return the key of a row."""
        return row[: self.width]

    def statements(self) -> dict[str, str]:
        """Return the statements that read a page, delete a row by its key, and insert a row."""
        columns = self.columns.split(", ")
        key = columns[: self.width]
        page = ""
        if self.start is not None:
            page = f" WHERE ({', '.join(key)}) > ({_placeholders(key)}) ORDER BY {', '.join(key)} LIMIT ?"
        is_row = " AND ".join(f"{column} = ?" for column in key)
        return {
            f"page_{self.name}": f"SELECT {self.columns} FROM {self.name}{page}",  # noqa: S608 - constants
            f"drop_{self.name}": f"DELETE FROM {self.name} WHERE {is_row}",  # noqa: S608
            f"write_{self.name}": f"INSERT INTO {self.name} ({self.columns}) VALUES ({_placeholders(columns)})",  # noqa: S608
        }


def _placeholders(columns: Sequence[str]) -> str:
    return ", ".join("?" for _ in columns)


META: Final = Table("meta", "key, value, row_check", 1, None, 0)
ROUND_KEYS: Final = Table("round_keys", "no, round_id, mac_key, row_check", 1, (-1,), 1000)
SHARES: Final = Table("shares", "id", 1, (0,), 500, round_column=1)
"""A share also has a message and a history, so the statements that read and insert it are in `copying.sql`."""
TOMBSTONES: Final = Table("tombstones", "round_no, mac", 2, (-1, b""), 5000, round_column=0)
TABLES: Final = (
    META,
    ROUND_KEYS,
    Table("rounds", ", ".join(RoundRow._fields), 1, (-1,), 1000, round_column=0),
    SHARES,
    TOMBSTONES,
    Table("spent", "round_no, nullifier", 2, (-1, b""), 5000, round_column=0),
    Table("tree_leaves", "round_no, start_index, height, leaves", 2, (-1, -1), 256, round_column=0),
    Table("tree_subtrees", "round_no, idx, nodes", 2, (-1, -1), 32, round_column=0),
    Table("actions", "id, begun_ms, uid, who, way, what, wanted, ended_ms, outcome", 1, (-1,), 1000),
    Table("failed_before", "day, stage, reason, n", 3, None, 0),
)
"""In the order in which rows can be inserted: referenced tables first."""


_SHARE_WIDTH: Final = len(ShareRow._fields)


class LiveShare(NamedTuple):
    """A live share with its message and history.

    Attributes:
        history: its history entries without the share number: n, at_ms, stage, note, counted.
    """

    id: int
    round_no: int
    share: ShareRow
    reveal: RevealRow | None
    history: tuple[Row, ...]


def select_sound(live: LiveShare, row_key: bytes) -> LiveShare | None:
    """Return a share, None if it is damaged.

    A damaged message that may have been sent makes the share damaged; any other damaged message is dropped.
    """
    if not is_sound(row_key, live.share):
        return None
    if live.reveal is not None and not is_sound(row_key, live.reveal):
        live = live._replace(reveal=None)
    return None if live.reveal is None and live.share.state == ShareState.SENT else live


def _is_ascending(table: Table, after: Key, page: Sequence[Row]) -> bool:
    """Return whether the keys of a page are strictly ascending and greater than `after`."""
    try:
        return all(key < next_key for key, next_key in pairwise([after, *map(table.key, page)]))
    except TypeError:  # a damaged key column can have a different type
        return False


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
            rows = self.fetch_all(f"page_{table.name}")
            return sorted(row for row in rows if table is not META or row[0] not in LOCAL_META_KEYS)
        if table is SHARES:
            rows = self._fetch_shares(*after)
        else:
            rows = self.fetch_all(f"page_{table.name}", (*after, table.rows))
        if not _is_ascending(table, after, rows):
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

    def read_shares(self) -> Iterator[LiveShare]:
        """Yield all shares by number, with their messages and histories; see `read_page`."""
        for page in self.read_pages(SHARES):
            yield from (LiveShare(*row) for row in page)

    def _fetch_shares(self, after: int) -> list[Row]:
        """Return the next page of shares as `LiveShare`, which has their messages and histories."""
        shares = self.fetch_all("page_shares", {"after": after, "limit": SHARES.rows})
        if not shares:
            return []
        history: dict[int, list[Row]] = {}
        for share_id, *entry in self.fetch_all("page_history", (after, shares[-1][1])):
            history.setdefault(share_id, []).append(tuple(entry))
        result: list[Row] = []
        for columns in shares:
            row, message = ShareRow(*columns[:_SHARE_WIDTH]), columns[_SHARE_WIDTH:]
            reveal = None if message[0] is None else RevealRow(*message)
            result.append(LiveShare(row.id, row.round_no, row, reveal, tuple(history.get(row.id, ()))))
        return result

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
