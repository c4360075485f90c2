"""Rows of the table `meta`: texts with a check, the database's own keys, and the marks of a copy. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import orjson

from helper.core.text_forms import format_time
from helper.errors import StoreCorrupt, StoreMoved
from helper.store.table_rows import Row, is_sound
from proofs import row_check

ROW_CHECK_KEY: Final = "key.rows"
RANK_KEY: Final = "key.order"
RUN_KEY: Final = "file.run"
"""Key of the identifier of the run that has the file open or that crashed (see `sqlite/displacement.py`)."""
KEY_CHECK: Final = "seal.check"
"""Key of the key check value of an encrypted database (`Keyring.make_probe`)."""
KEYS_IN_USE: Final = "seal.keys"
"""Key of the identifiers (hex, separated by spaces) of the keys with which rows of a file may be encrypted."""
UNFINISHED_KEY: Final = "copy.unfinished"
"""A copy into this database is unfinished."""
MOVED_KEY: Final = "copy.moved"
"""The queue of this database was moved to another one."""
_CHECK_KEY: Final = b"small facts"
"""Key of the row checks of `meta`. Not secret, because the checks only detect damage."""
_UNREADABLE: Final = "?"


def make_meta_row(name: str, value: str) -> tuple[str, str, bytes]:
    """Return the row of a text."""
    return name, value, row_check(_CHECK_KEY, (name, value))


def read_meta_value(rows: Sequence[Row]) -> str | None:
    """Return the text in the result of the query `get_meta`; None if there is no row or it is damaged."""
    return str(rows[0][1]) if rows and is_sound(_CHECK_KEY, rows[0]) else None


def read_key(rows: Sequence[Row], name: str, label: str = "the database") -> bytes:
    """Return a key in the result of the query `get_meta`.

    Raises:
        StoreCorrupt: there is no row or it is damaged; the message names the key and the database.
    """
    text = read_meta_value(rows)
    if text is None:
        raise StoreCorrupt(f"{label} is damaged: {name} failed its check")
    return bytes.fromhex(text)


@dataclass(frozen=True, slots=True)
class CopyMark:
    """A mark of a copy.

    Attributes:
        id: identifier of the copy, the same in both databases.
        other: the other database, as named in messages without a password.
        at: Unix time at which the mark was written.
    """

    id: str
    other: str
    at: int

    def to_text(self) -> str:
        """Return the stored form."""
        return orjson.dumps(asdict(self)).decode()


def read_mark(rows: Sequence[Row]) -> CopyMark | None:
    """Parse a mark. An unreadable one is returned as a mark with unknown fields, so that it still blocks use."""
    if not rows:
        return None
    text = read_meta_value(rows)
    try:
        fields: Mapping[str, Any] = orjson.loads(text or "")
        return CopyMark(str(fields["id"]), str(fields["other"]), int(fields["at"]))
    except (ValueError, KeyError, TypeError):
        return CopyMark(_UNREADABLE, _UNREADABLE, 0)


def refuse_marked(rows: Sequence[Row], label: str) -> None:
    """Refuse to use a database that a copy has marked.

    Args:
        rows: result of the query `get_marks`.
        label: name of the database for messages.

    Raises:
        StoreMoved: it is marked; the message says where the queue is.
    """
    marks = {row[0]: read_mark([row]) for row in rows}
    mark = marks.get(MOVED_KEY)
    if mark is not None:
        raise StoreMoved(
            f"the queue of {label} was moved to {mark.other} at {format_time(mark.at)} UTC",
            advice="Configure that database: [store] url for a shared database, [helper] db_path for a file. To move "
            "the queue back, run `svote-helper db copy --to` with that database as the source. Only if that database "
            "is permanently lost, run `svote-helper db copy --undo`.",
        )
    mark = marks.get(UNFINISHED_KEY)
    if mark is not None:
        raise StoreMoved(
            f"{label} contains an unfinished copy of {mark.other}",
            advice="Run the same `svote-helper db copy` again to complete it. Until then the queue remains in the "
            "source.",
        )
