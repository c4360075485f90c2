"""What a move leaves where the queue was: looked at, erased, or served again."""

from __future__ import annotations

from helper.errors import StoreForeign
from helper.store.migration.endpoint import MigrationEndpoint
from helper.store.migration.marks import MigrationMark
from helper.store.migration.migration import Say
from helper.store.migration.tables import META, MOVED, TABLES, UNFINISHED, Difference


def moved_to(source: MigrationEndpoint) -> MigrationMark:
    """Where the queue of a database went; nothing is changed.

    Raises:
        StoreForeign: it was not moved from there.
    """
    source.look()
    mark = source.mark(MOVED)
    if mark is None or source.mark(UNFINISHED) is not None:
        raise StoreForeign(f"{source.label} is not marked as moved", advice="Nothing was changed.")
    return mark


def undo(source: MigrationEndpoint) -> None:
    """Take away the mark that the queue was moved: the source is served again.

    Raises:
        StoreForeign: there is none.
        StoreLocked: somebody works on it.
    """
    _hold_left(source)
    with source.changing():
        source.set_mark(MOVED, None)


def erase(source: MigrationEndpoint, *, say: Say) -> None:
    """Delete what a move left behind: all rows but the facts, the mark among them.

    What was deleted from a file is in none of its bytes once it is closed. The queue can be moved back to it as before.

    Raises:
        StoreForeign: it was not moved.
        StoreLocked: somebody works on it.
    """
    _hold_left(source)
    for table in reversed(TABLES):
        deleted = 0
        while table is not META and (rows := source.page(table, table.start or ())):
            source.apply(table, Difference([], [], list(rows)))
            deleted += len(rows)
        if deleted:
            say(f"{deleted} rows of {table.name} deleted")
    with source.changing():
        source.end_copy()


def _hold_left(source: MigrationEndpoint) -> None:
    """Keep everybody off what a move left; its mark is looked at once nobody can change it."""
    moved_to(source)
    source.hold()
    moved_to(source)
