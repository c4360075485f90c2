"""Inspects, erases or reactivates the source of a finished migration."""

from __future__ import annotations

from helper.errors import StoreForeign
from helper.store.migration.endpoint import MigrationEndpoint
from helper.store.migration.marks import MigrationMark
from helper.store.migration.migration import Say
from helper.store.migration.tables import META, MOVED, TABLES, UNFINISHED, Difference


def moved_to(source: MigrationEndpoint) -> MigrationMark:
    """Return the mark that says where the queue was moved. Changes nothing.

    Raises:
        StoreForeign: the database is not marked as moved.
    """
    source.look()
    mark = source.mark(MOVED)
    if mark is None or source.mark(UNFINISHED) is not None:
        raise StoreForeign(f"{source.label} is not marked as moved", advice="Nothing was changed.")
    return mark


def undo(source: MigrationEndpoint) -> None:
    """Remove the mark, so that a helper can use the source again.

    Raises:
        StoreForeign: the database is not marked as moved.
        StoreLocked: a process uses it.
    """
    _lock_moved(source)
    with source.changing():
        source.set_mark(MOVED, None)


def erase(source: MigrationEndpoint, *, say: Say) -> None:
    """Delete all rows of the source except its facts, which include the mark.

    Once a file is closed, none of its bytes contains deleted data. The queue can still be migrated back to it.

    Args:
        source: the database.
        say: called with progress messages.

    Raises:
        StoreForeign: the database is not marked as moved.
        StoreLocked: a process uses it.
    """
    _lock_moved(source)
    for table in reversed(TABLES):
        deleted = 0
        while table is not META and (rows := source.page(table, table.start or ())):
            source.apply(table, Difference([], [], list(rows)))
            deleted += len(rows)
        if deleted:
            say(f"{deleted} rows of {table.name} deleted")
    with source.changing():
        source.end_copy()


def _lock_moved(source: MigrationEndpoint) -> None:
    """Lock the source. The mark is checked again under the lock."""
    moved_to(source)
    source.hold()
    moved_to(source)
