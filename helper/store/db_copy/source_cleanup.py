"""Inspects, erases or reactivates the source of a finished migration."""

from __future__ import annotations

from helper.errors import StoreForeign
from helper.store.db_copy.endpoint import MigrationEndpoint
from helper.store.db_copy.migration import ProgressCallback
from helper.store.db_copy.tables import META, TABLES, Difference
from helper.store.meta import MOVED_KEY, UNFINISHED_KEY, MigrationMark


def read_moved_mark(source: MigrationEndpoint) -> MigrationMark:
    """Return the mark with the database to which the queue was moved. Changes nothing.

    Raises:
        StoreForeign: the database is not marked as moved.
    """
    source.connect_read_only()
    mark = source.get_mark(MOVED_KEY)
    if mark is None or source.get_mark(UNFINISHED_KEY) is not None:
        raise StoreForeign(f"{source.label} is not marked as moved", advice="Nothing was changed.")
    return mark


def undo_migration(source: MigrationEndpoint) -> None:
    """Remove the mark, so that a helper can use the source again.

    Raises:
        StoreForeign: the database is not marked as moved.
        StoreLocked: a process uses it.
    """
    _lock_moved(source)
    with source.write_transaction():
        source.set_mark(MOVED_KEY, None)


def erase_source(source: MigrationEndpoint, *, on_progress: ProgressCallback) -> None:
    """Delete all rows of the source except those of `meta`, which include the mark.

    After a file is closed, it contains no deleted data. The queue can still be migrated back to it.

    Args:
        source: the database.
        on_progress: called with progress messages.

    Raises:
        StoreForeign: the database is not marked as moved.
        StoreLocked: a process uses it.
    """
    _lock_moved(source)
    for table in reversed(TABLES):
        deleted = 0
        while table is not META and (rows := source.read_page(table, table.start or ())):
            source.apply_difference(table, Difference([], [], list(rows)))
            deleted += len(rows)
        if deleted:
            on_progress(f"{deleted} rows of {table.name} deleted")
    with source.write_transaction():
        source.end_copy()


def _lock_moved(source: MigrationEndpoint) -> None:
    """Lock the source. The mark is checked again under the lock."""
    read_moved_mark(source)
    source.lock_exclusive()
    read_moved_mark(source)
