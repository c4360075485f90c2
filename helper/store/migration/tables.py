"""What a move carries, table by table, and how a page of the source is compared with the target's. Pure.

Every row begins with its key. Keys are ordered as both databases order them: numbers, bytes, never texts (tables with a
text in their key are small, and compared as a whole).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

from helper.core.share import ShareState
from helper.store.records import Column, RevealRow, ShareRow, is_sound
from proofs import row_check

Row = tuple[Any, ...]
Key = tuple[Any, ...]

UNFINISHED: Final = "copy.unfinished"
"""The fact of a database that a move into it was begun and has not ended."""
MOVED: Final = "copy.moved"
"""The fact of a database whose queue is another's now."""
RUN: Final = "file.run"
"""The fact of a file that identifies the run that has it open, or crashed with it (see `file_location`)."""
ROW_KEY: Final = "key.rows"
OWN_FACTS: Final = frozenset({UNFINISHED, MOVED, RUN, "seal.check"})
"""Facts of one database alone, which no move carries."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table that is carried.

    Attributes:
        name: its name.
        width: how many columns make its key.
        start: a key before all others; none where the table is read as a whole.
        rows: how many rows are read at once.
        of_round: the column that is the number of the row's round, None where it is of none.
    """

    name: str
    width: int
    start: Key | None
    rows: int
    of_round: int | None = None

    def key(self, row: Row) -> Key:
        """The key of a row."""
        return row[: self.width]


META: Final = Table("meta", 1, None, 0)
ROUND_KEYS: Final = Table("round_keys", 1, (-1,), 1000)
SHARES: Final = Table("shares", 1, (0,), 500, of_round=1)
TOMBSTONES: Final = Table("tombstones", 2, (-1, b""), 5000, of_round=0)
TABLES: Final = (
    META,
    ROUND_KEYS,
    Table("rounds", 1, (-1,), 1000, of_round=0),
    SHARES,
    TOMBSTONES,
    Table("spent", 2, (-1, b""), 5000, of_round=0),
    Table("tree_leaves", 2, (-1, -1), 256, of_round=0),
    Table("tree_subtrees", 2, (-1, -1), 32, of_round=0),
    Table("actions", 1, (-1,), 1000),
    Table("failed_before", 3, None, 0),
)
"""In the order in which rows can be written: what others refer to comes first."""


class LiveShare(NamedTuple):
    """A live share with all that is its own, as one row.

    Attributes:
        id: its number.
        round_no: its round's.
        share: its row.
        reveal: its message, if one is kept.
        history: the lines of its history without its number: n, at_ms, stage, note, counted.
    """

    id: int
    round_no: int
    share: ShareRow
    reveal: RevealRow | None
    history: tuple[Row, ...]


def live_shares(shares: Sequence[Row], reveals: Sequence[Row], history: Sequence[Row]) -> list[LiveShare]:
    """Rows of three tables as one row a share."""
    kept = {row[0]: RevealRow(*row) for row in reveals}
    lines: dict[int, list[Row]] = {}
    for row in history:
        lines.setdefault(row[0], []).append(tuple(row[1:]))
    found = []
    for columns in shares:
        row = ShareRow(*columns)
        found.append(LiveShare(row.id, row.round_no, row, kept.get(row.id), tuple(lines.get(row.id, ()))))
    return found


def fit_to_carry(one: LiveShare, row_key: bytes) -> LiveShare | None:
    """A share as any store can keep it, None when it is damaged: it stays behind, as no store would work on it.

    A message that may have been sent and is damaged makes the share one that is set aside; of a failed share it is of
    no more use. Texts lose what only SQLite keeps.
    """
    share, reveal = one.share, one.reveal
    if not share.is_sound(row_key):
        return None
    if reveal is not None and not reveal.is_sound(row_key):
        reveal = None
    if reveal is None and share.state == ShareState.BROADCAST:
        return None
    return LiveShare(
        one.id,
        one.round_no,
        ShareRow(*_plain(tuple(share), row_key)),
        None if reveal is None else RevealRow(*_plain(tuple(reveal), row_key)),
        tuple(plain(line) for line in one.history),
    )


def plain(row: Row) -> Row:
    """A row whose texts have no character that a database refuses."""
    return tuple(text_of(value) if isinstance(value, str) else value for value in row)


def text_of(text: str) -> str:
    """A text without NUL."""
    return text.replace("\0", "\ufffd")


def _plain(row: tuple[Column, ...], row_key: bytes) -> Row:
    made = plain(row)
    return row if made == row else (*made[:-1], row_check(row_key, made[:-1]))


def is_right(table: Table, row: Row, row_key: bytes) -> bool:
    """Whether a row that carries a check of its own is as it was written."""
    return table.name not in {"round_keys", "rounds"} or is_sound(row_key, row)


# ---------------------------------------------------------------------- comparing


class Difference(NamedTuple):
    """What makes a part of the target the source's.

    Attributes:
        missing: rows that only the source has.
        changed: rows of the source that the target has otherwise.
        gone: rows that only the target has.
    """

    missing: list[Row]
    changed: list[Row]
    gone: list[Row]

    @property
    def size(self) -> int:
        """How many rows differ."""
        return len(self.missing) + len(self.changed) + len(self.gone)


def compare(table: Table, source: Sequence[Row], target: Sequence[Row]) -> Difference:
    """What differs between two parts of a table that span the same keys."""
    there = {table.key(row): row for row in target}
    missing, changed = [], []
    for row in source:
        other = there.pop(table.key(row), None)
        if other is None:
            missing.append(row)
        elif other != row:
            changed.append(row)
    return Difference(missing, changed, list(there.values()))


def in_order(table: Table, after: Key, page: Sequence[Row]) -> bool:
    """Whether the keys of a page go up, all of them beyond one."""
    try:
        return all(one < next_one for one, next_one in pairwise([after, *map(table.key, page)]))
    except TypeError:  # a column holds what no key is
        return False


def last_common(table: Table, source: Sequence[Row], target: Sequence[Row]) -> Key | None:
    """Up to which key two pages that begin at the same key are both complete; None: to the end of the table.

    A page that is not full is complete to the end.
    """
    ends = [table.key(page[-1]) for page in (source, target) if table.start is not None and len(page) >= table.rows]
    return min(ends, default=None)


def up_to(table: Table, page: Sequence[Row], last: Key | None) -> Sequence[Row]:
    """The rows of a page up to a key."""
    return page if last is None else [row for row in page if table.key(row) <= last]


# ---------------------------------------------------------------------- counting


def counted(table: Table, rows: Sequence[Row]) -> Mapping[tuple[int, int], int]:
    """How many shares a page holds, by round number and state."""
    found: dict[tuple[int, int], int] = {}
    for row in rows:
        if table is SHARES:
            place = (row[1], row[2].state)
        elif table is TOMBSTONES:
            place = (row[0], ShareState.SUBMITTED.value)
        else:
            continue
        found[place] = found.get(place, 0) + 1
    return found
