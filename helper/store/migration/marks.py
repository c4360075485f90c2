"""The words that a move leaves in a database: that a copy into it is not finished, or where its queue went. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from helper.errors import StoreMoved
from helper.store.transaction import read_fact

_UNREADABLE: Final = "?"


@dataclass(frozen=True, slots=True)
class MigrationMark:
    """One such word.

    Attributes:
        id: of the move, the same at both ends.
        other: the other end as it is called in messages; no password.
        at: unix second at which it was written.
    """

    id: str
    other: str
    at: int

    def text(self) -> str:
        """As it is kept."""
        return orjson.dumps(asdict(self)).decode()


def read_mark(rows: Sequence[tuple[Any, ...]]) -> MigrationMark | None:
    """A mark from the rows of its fact; one that can not be read is a mark all the same."""
    if not rows:
        return None
    text = read_fact(rows)
    try:
        told: Mapping[str, Any] = orjson.loads(text or "")
        return MigrationMark(str(told["id"]), str(told["other"]), int(told["at"]))
    except (ValueError, KeyError, TypeError):
        return MigrationMark(_UNREADABLE, _UNREADABLE, 0)


def refuse_marked(unfinished: Sequence[tuple[Any, ...]], moved: Sequence[tuple[Any, ...]], here: str) -> None:
    """Refuse to work on a database that a move has marked.

    Args:
        unfinished: the rows of the fact `UNFINISHED`.
        moved: the rows of the fact `MOVED`.
        here: what the database is called.

    Raises:
        StoreMoved: it is marked; the text says where its queue is, and what leads back.
    """
    mark = read_mark(moved)
    if mark is not None:
        when = datetime.fromtimestamp(mark.at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        raise StoreMoved(
            f"the queue of {here} was moved to {mark.other} at {when}",
            advice="Start the helper there: [store] url names a shared database, [helper] db_path a file. To have "
            "the queue here again, move it back with `svote-helper db copy --to`, from there. Only if what is there "
            "is lost for good: `svote-helper db copy --undo`.",
        )
    mark = read_mark(unfinished)
    if mark is not None:
        raise StoreMoved(
            f"{here} holds a copy of {mark.other} that is not finished",
            advice="Run the same `svote-helper db copy` again: it goes on where it ended. Until then the queue is "
            "where it was.",
        )
