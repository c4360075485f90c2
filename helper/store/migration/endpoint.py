"""A database that is migrated from or to, read page by page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import resources
from typing import Final

from helper.core.share import ShareState
from helper.errors import StoreCorrupt
from helper.store.migration.marks import MigrationMark, read_mark
from helper.store.migration.tables import (
    MOVED,
    OWN_FACTS,
    ROUND_KEYS,
    ROW_KEY,
    SHARES,
    UNFINISHED,
    Difference,
    Key,
    LiveShare,
    Row,
    Table,
    in_order,
    live_shares,
)
from helper.store.rows import DamagedShare
from helper.store.sql_files import named
from helper.store.transaction import Params, fact_row, read_fact

_ROUND_STATEMENTS: Final = (
    "drop_round_tombstones",
    "drop_round_spent",
    "drop_round_leaves",
    "drop_round_subtrees",
    "drop_round_counters",
    "drop_rounds",
)
_TRANSITIONS: Final = {
    ShareState.RECEIVED: (),
    ShareState.WITNESSED: (ShareState.WITNESSED,),
    ShareState.FAILED: (ShareState.FAILED,),
    ShareState.BROADCAST: (ShareState.WITNESSED, ShareState.BROADCAST),
}
"""Legal transitions from RECEIVED to each state, because the schema only lets a share be inserted as received."""


@cache
def copying() -> Mapping[str, str]:
    """Return the statements of `copying.sql` by name."""
    return named((resources.files("helper.store.migration") / "copying.sql").read_text("utf-8"))


class MigrationEndpoint(ABC):
    """The source or target of a migration. Its methods block.

    Every method may raise StoreError; a write then changed nothing.
    """

    # ------------------------------------------------------------------ implemented per database

    @property
    @abstractmethod
    def label(self) -> str:
        """Name for messages, without a password."""

    @property
    @abstractmethod
    def word(self) -> str:
        """Value for `--from` and `--to`."""

    @property
    @abstractmethod
    def setting(self) -> str:
        """Configuration with which a helper uses this database, for messages."""

    @abstractmethod
    def look(self) -> None:
        """Connect for reading. A helper may use the database at the same time.

        Raises:
            NothingThere: the database does not exist.
            StoreForeign: it is not a database of this version of the helper.
        """

    @abstractmethod
    def hold(self) -> None:
        """Lock the database exclusively until `close`. Creates it if it does not exist.

        Raises:
            StoreLocked: a helper uses it.
        """

    @abstractmethod
    def close(self) -> None:
        """Disconnect and release the lock."""

    @abstractmethod
    def all(self, name: str, params: Params = ()) -> list[Row]:
        """Return all rows of a query of `copying.sql`, decrypted."""

    @abstractmethod
    def many(self, name: str, rows: Sequence[Row]) -> None:
        """Run a statement for each row, inside `changing`. Secret columns are encrypted as the database requires."""

    @abstractmethod
    def changing(self) -> AbstractContextManager[None]:
        """A write transaction; on disk when it ends."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[None]:
        """A short read transaction on one snapshot."""

    @abstractmethod
    def end_copy(self) -> None:
        """Complete a copy inside `changing`: recount shares, advance sequences, drop claims."""

    # ------------------------------------------------------------------ reading

    def page(self, table: Table, after: Key) -> Sequence[Row]:
        """Return the next page of a table in key order; a share includes its message and history.

        Raises:
            StoreCorrupt: the rows are not in key order, so that paging might never end.
        """
        if table.start is None:
            return self._all_rows(table)
        rows = self._page(table, after)
        if not in_order(table, after, rows):
            raise StoreCorrupt(f"{self.label} is damaged: rows of {table.name} are out of order")
        return rows

    def _page(self, table: Table, after: Key) -> Sequence[Row]:
        params = (*after, table.rows)
        if table is not SHARES:
            return self.all(f"page_{table.name}", params)
        with self.reading():
            shares = self.all("page_shares", params)
            if not shares:
                return []
            span = (*after, shares[-1][1])
            return live_shares(shares, self.all("page_reveals", span), self.all("page_history", span))

    def _all_rows(self, table: Table) -> list[Row]:
        rows = self.all(f"page_{table.name}")
        return sorted(row for row in rows if table.name != "meta" or row[0] not in OWN_FACTS)

    def aside(self) -> dict[int, DamagedShare]:
        """Return the shares that were set aside as damaged, by number."""
        return {row[0]: DamagedShare(*row[1:]) for row in self.all("aside")}

    def counters(self) -> dict[tuple[int, int], int]:
        """Return the stored share counts by round number and state."""
        return {(no, state): n for no, state, n in self.all("counters") if n}

    def row_key(self) -> bytes:
        """Return the key of the row checks.

        Raises:
            StoreCorrupt: it is damaged.
        """
        text = read_fact(self.all("fact", (ROW_KEY,)))
        if text is None:
            raise StoreCorrupt(f"{self.label} is damaged: {ROW_KEY} failed its check")
        return bytes.fromhex(text)

    def is_fresh(self) -> bool:
        """Whether the database is empty except for its initial rows."""
        facts = {row[0] for row in self.all("page_meta")}
        return not self.page(ROUND_KEYS, (-1,)) and facts <= OWN_FACTS | {ROW_KEY, "key.order"}

    def mark(self, name: str) -> MigrationMark | None:
        """Return a mark of a migration."""
        return read_mark(self.all("fact", (name,)))

    # ------------------------------------------------------------------ writing

    def set_mark(self, name: str, mark: MigrationMark | None) -> None:
        """Set or remove a mark, inside `changing`."""
        self.many("drop_meta", [(name,)])
        if mark is not None:
            self.many("write_meta", [fact_row(name, mark.text())])

    def begin_copy(self, mark: MigrationMark, facts: Sequence[Row]) -> None:
        """Mark this database as an unfinished target, so that no helper uses it, and take over the source's keys."""
        with self.changing():
            keys = [row for row in facts if row[0] in {ROW_KEY, "key.order"}]
            self.many("drop_meta", [(row[0],) for row in keys])
            self.many("write_meta", keys)
            self.set_mark(UNFINISHED, mark)
            self.set_mark(MOVED, None)

    def apply(self, table: Table, difference: Difference) -> None:
        """Apply differences to a table in one transaction."""
        missing, changed, extra = difference
        fresh = [*missing, *changed]
        with self.changing():
            dropped = [table.key(row) for row in (*changed, *extra)]
            if table is ROUND_KEYS:
                self._drop_rounds(dropped)
            if table is SHARES:
                self._write_shares(dropped, [LiveShare(*row) for row in fresh])
                return
            if dropped:
                self.many(f"drop_{table.name}", dropped)
            if fresh:
                self.many(f"write_{table.name}", fresh)

    def _drop_rounds(self, keys: Sequence[Key]) -> None:
        for key in keys:
            # One row per statement: SQLite writes large statement journals to a file.
            ids = self.all("share_ids_of_round", key)
            self.many("drop_shares", ids)
            self.many("drop_aside", ids)
            for name in _ROUND_STATEMENTS:
                self.many(name, [key])

    def _write_shares(self, dropped: Sequence[Key], fresh: Sequence[LiveShare]) -> None:
        if dropped:
            self.many("drop_shares", dropped)
            self.many("drop_aside", dropped)
        if not fresh:
            return
        # An earlier copy may have stored the same share under another number.
        self.many("drop_mac", [(live.share.mac,) for live in fresh])
        received = ShareState.RECEIVED.value
        self.many("add_share", [live.share._replace(state=received).columns() for live in fresh])
        reveals = [live.reveal for live in fresh if live.reveal is not None]
        if reveals:
            self.many("add_reveal", reveals)
        self.many("write_history", [(live.id, *entry) for live in fresh for entry in live.history])
        self.many("bring_share", list(_transitions(fresh)))


def _transitions(fresh: Sequence[LiveShare]) -> Iterator[tuple[int, int]]:
    """Yield the transitions that lead each share to its state, in order."""
    for live in fresh:
        for state in _TRANSITIONS[ShareState(live.share.state)]:
            yield state.value, live.id
