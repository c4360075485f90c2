"""The copied tables and their rows. No I/O.

Every row begins with its key. Keys of paged tables consist of numbers and bytes only, which both databases sort in the
same order. Tables with text keys are small and are read in one page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

from helper.core.share import ShareState
from helper.store.table_rows import (
    KEY_CHECK,
    KEYS_IN_USE,
    MOVED_KEY,
    RUN_KEY,
    UNFINISHED_KEY,
    RevealRow,
    RoundRow,
    Row,
    ShareRow,
    is_sound,
)

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


def live_shares(shares: Sequence[Row], history: Sequence[Row]) -> list[LiveShare]:
    """Combine rows of shares, each with its message, and of their history into one `LiveShare` per share."""
    width = len(ShareRow._fields)
    history_of: dict[int, list[Row]] = {}
    for row in history:
        history_of.setdefault(row[0], []).append(tuple(row[1:]))
    result = []
    for columns in shares:
        row, message = ShareRow(*columns[:width]), columns[width:]
        reveal = None if message[0] is None else RevealRow(*message)
        result.append(LiveShare(row.id, row.round_no, row, reveal, tuple(history_of.get(row.id, ()))))
    return result


def select_sound(live: LiveShare, row_key: bytes) -> LiveShare | None:
    """Return a share, None if it is damaged.

    A damaged message that may have been sent makes the share damaged; any other damaged message is dropped.
    """
    if not is_sound(row_key, live.share):
        return None
    if live.reveal is not None and not is_sound(row_key, live.reveal):
        live = live._replace(reveal=None)
    return None if live.reveal is None and live.share.state == ShareState.SENT else live


def is_ascending(table: Table, after: Key, page: Sequence[Row]) -> bool:
    """Return whether the keys of a page are strictly ascending and greater than `after`."""
    try:
        return all(key < next_key for key, next_key in pairwise([after, *map(table.key, page)]))
    except TypeError:  # a damaged key column can have a different type
        return False
