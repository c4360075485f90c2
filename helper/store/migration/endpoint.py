"""One end of a move: a database that is read page by page, and written where it is the target."""

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

_OF_ROUND: Final = (
    "drop_round_tombstones",
    "drop_round_spent",
    "drop_round_leaves",
    "drop_round_subtrees",
    "drop_round_counters",
    "drop_rounds",
)
_STEPS: Final = {
    ShareState.RECEIVED: (),
    ShareState.WITNESSED: (ShareState.WITNESSED,),
    ShareState.FAILED: (ShareState.FAILED,),
    ShareState.BROADCAST: (ShareState.WITNESSED, ShareState.BROADCAST),
}
"""By which legal moves a share comes to where it stands: the schema lets none begin elsewhere than received."""


@cache
def copying() -> Mapping[str, str]:
    """The statements of `copying.sql` by name."""
    return named((resources.files("helper.store.migration") / "copying.sql").read_text("utf-8"))


class MigrationEndpoint(ABC):
    """A database at one end. Methods run on the thread that calls them.

    Every method may raise StoreError: the database could not do it, and of a write nothing was kept.
    """

    # ------------------------------------------------------------------ what an engine brings

    @property
    @abstractmethod
    def label(self) -> str:
        """What it is called in messages: no password is in it."""

    @property
    @abstractmethod
    def word(self) -> str:
        """What `--from` and `--to` call it."""

    @property
    @abstractmethod
    def setting(self) -> str:
        """What the settings say where a helper is to work on it."""

    @abstractmethod
    def look(self) -> None:
        """Connect, to read beside whoever works on it.

        Raises:
            NothingThere: there is no such database.
            StoreForeign: it is not one of this version of the helper.
        """

    @abstractmethod
    def hold(self) -> None:
        """From now on, and until `close`, nobody else works on it; made where there is none.

        Raises:
            StoreLocked: somebody does.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""

    @abstractmethod
    def all(self, name: str, params: Params = ()) -> list[Row]:
        """All rows of a query of `copying.sql`, unsealed."""

    @abstractmethod
    def many(self, name: str, rows: Sequence[Row]) -> None:
        """Run a statement once a row, inside `changing`; what is to be sealed is."""

    @abstractmethod
    def changing(self) -> AbstractContextManager[None]:
        """A transaction; on disk when it ends."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[None]:
        """A short transaction that sees one moment."""

    @abstractmethod
    def end_copy(self) -> None:
        """What is left to do inside `changing` once all rows are there: counts, numbers, who works on what."""

    # ------------------------------------------------------------------ reading

    def page(self, table: Table, after: Key) -> Sequence[Row]:
        """The next rows of a table by their keys, at most as many as it has at once; the shares' with all their own.

        Raises:
            StoreCorrupt: they are not in the order of their keys: going on behind the last might never come to an end.
        """
        if table.start is None:
            return self._whole(table)
        rows = self._page(table, after)
        if not in_order(table, after, rows):
            raise StoreCorrupt(f"{self.label} is damaged: rows of {table.name} are out of their order")
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

    def _whole(self, table: Table) -> list[Row]:
        rows = self.all(f"page_{table.name}")
        return sorted(row for row in rows if table.name != "meta" or row[0] not in OWN_FACTS)

    def aside(self) -> dict[int, DamagedShare]:
        """The shares that were set aside, by number."""
        return {row[0]: DamagedShare(*row[1:]) for row in self.all("aside")}

    def counters(self) -> dict[tuple[int, int], int]:
        """How many shares it counts, by round number and state."""
        return {(no, state): n for no, state, n in self.all("counters") if n}

    def row_key(self) -> bytes:
        """The key of its rows' checks.

        Raises:
            StoreCorrupt: it is damaged.
        """
        text = read_fact(self.all("fact", (ROW_KEY,)))
        if text is None:
            raise StoreCorrupt(f"{self.label} is damaged: {ROW_KEY} is not what it was")
        return bytes.fromhex(text)

    def is_fresh(self) -> bool:
        """Whether nothing is in it yet but what was made with it."""
        facts = {row[0] for row in self.all("page_meta")}
        return not self.page(ROUND_KEYS, (-1,)) and facts <= OWN_FACTS | {ROW_KEY, "key.order"}

    def mark(self, name: str) -> MigrationMark | None:
        """A mark that a move left."""
        return read_mark(self.all("fact", (name,)))

    # ------------------------------------------------------------------ writing

    def set_mark(self, name: str, mark: MigrationMark | None) -> None:
        """Leave a mark, or take it away, inside `changing`."""
        self.many("drop_meta", [(name,)])
        if mark is not None:
            self.many("write_meta", [fact_row(name, mark.text())])

    def begin_copy(self, mark: MigrationMark, facts: Sequence[Row]) -> None:
        """Become the target of a move: nobody serves it until that has ended. Its keys are the source's from now on."""
        with self.changing():
            keys = [row for row in facts if row[0] in {ROW_KEY, "key.order"}]
            self.many("drop_meta", [(row[0],) for row in keys])
            self.many("write_meta", keys)
            self.set_mark(UNFINISHED, mark)
            self.set_mark(MOVED, None)

    def apply(self, table: Table, difference: Difference) -> None:
        """Make a part of a table the source's, in one transaction."""
        missing, changed, gone = difference
        fresh = [*missing, *changed]
        with self.changing():
            dropped = [table.key(row) for row in (*changed, *gone)]
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
            # one row a statement: SQLite journals what a statement changes, and much of it in a file
            ids = self.all("share_ids_of_round", key)
            self.many("drop_shares", ids)
            self.many("drop_aside", ids)
            for name in _OF_ROUND:
                self.many(name, [key])

    def _write_shares(self, dropped: Sequence[Key], fresh: Sequence[LiveShare]) -> None:
        if dropped:
            self.many("drop_shares", dropped)
            self.many("drop_aside", dropped)
        if not fresh:
            return
        # another number may have stood for the same share here
        self.many("drop_mac", [(one.share.mac,) for one in fresh])
        received = ShareState.RECEIVED.value
        self.many("add_share", [one.share._replace(state=received).columns() for one in fresh])
        reveals = [tuple(one.reveal) for one in fresh if one.reveal is not None]
        if reveals:
            self.many("carry_reveal", reveals)
        self.many("write_history", [(one.id, *line) for one in fresh for line in one.history])
        self.many("bring_share", list(_steps(fresh)))


def _steps(fresh: Sequence[LiveShare]) -> Iterator[tuple[int, int]]:
    """The moves that bring each share to where it stands."""
    for one in fresh:
        for step in _STEPS[ShareState(one.share.state)]:
            yield step.value, one.id
