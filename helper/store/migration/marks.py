"""Marks of a migration in a database: unfinished copy, or queue moved to another database. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import orjson

from helper.core.time_text import format_time
from helper.errors import StoreMoved
from helper.store.transaction import read_meta_value

_UNREADABLE: Final = "?"


@dataclass(frozen=True, slots=True)
class MigrationMark:
    """A mark of a migration.

    Attributes:
        id: identifier of the migration, the same in both databases.
        other: the other database, as named in messages without a password.
        at: unix time at which it was written.
    """

    id: str
    other: str
    at: int

    def to_text(self) -> str:
        """Return the stored form."""
        return orjson.dumps(asdict(self)).decode()


def read_mark(rows: Sequence[tuple[Any, ...]]) -> MigrationMark | None:
    """Parse a mark. An unreadable one is returned as a mark with unknown fields, so that it still blocks use."""
    if not rows:
        return None
    text = read_meta_value(rows)
    try:
        fields: Mapping[str, Any] = orjson.loads(text or "")
        return MigrationMark(str(fields["id"]), str(fields["other"]), int(fields["at"]))
    except (ValueError, KeyError, TypeError):
        return MigrationMark(_UNREADABLE, _UNREADABLE, 0)


def refuse_marked(unfinished: Sequence[tuple[Any, ...]], moved: Sequence[tuple[Any, ...]], label: str) -> None:
    """Refuse to use a database that a migration has marked.

    Args:
        unfinished: rows of `meta` with the key `UNFINISHED_KEY`.
        moved: rows of `meta` with the key `MOVED_KEY`.
        label: name of the database for messages.

    Raises:
        StoreMoved: it is marked; the message says where the queue is.
    """
    mark = read_mark(moved)
    if mark is not None:
        raise StoreMoved(
            f"the queue of {label} was moved to {mark.other} at {format_time(mark.at)} UTC",
            advice="Configure that database: [store] url for a shared database, [helper] db_path for a file. To move "
            "the queue back, run `svote-helper db copy --to` with that database as the source. Only if that database "
            "is permanently lost, run `svote-helper db copy --undo`.",
        )
    mark = read_mark(unfinished)
    if mark is not None:
        raise StoreMoved(
            f"{label} holds an unfinished copy of {mark.other}",
            advice="Run the same `svote-helper db copy` again to complete it. Until then the queue remains in the "
            "source.",
        )
