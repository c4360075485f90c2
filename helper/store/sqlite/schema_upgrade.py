"""Bringing a database of an older version up to date when an operator wants to see it done, and not at the next start.

The daemon does the same by itself when it opens a file. Here it is first tried on a copy in memory, from the schema to
every row, so that what cannot work is told before anything is touched.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from helper.clock import Clock
from helper.errors import StoreCorrupt
from helper.store.sql_files import migrations
from helper.store.sqlite.errors import translate
from helper.store.sqlite.file_lock import FileLock
from helper.store.sqlite.opening import migrate_schema, open_database
from helper.store.sqlite.snapshot import Contents, examine, take_snapshot

_SAME: Final = ("live", "confirmed", "damaged")


@dataclass(frozen=True, slots=True)
class UpgradeTrial:
    """What a migration would come to.

    Attributes:
        image: the database as it is, for a backup. It holds witnesses.
        before: what it holds.
        target: the schema that it would have.
    """

    image: bytes = field(repr=False)
    before: Contents
    target: int

    @property
    def needed(self) -> bool:
        """Whether there is anything to do."""
        return self.before.schema < self.target


def try_migration(path: Path, clock: Clock) -> UpgradeTrial:
    """Migrate a copy in memory and look it through; the file is only read.

    Raises:
        StoreForeign: it is not a database of this helper, or of a newer version.
        StoreCorrupt: it is damaged, or would be afterwards.
        StoreError: it can not be read, or not be migrated.
    """
    snapshot = take_snapshot(path, clock)
    before, target = snapshot.contents, len(migrations())
    if before.schema < target:
        after = examine(_migrated(snapshot.image), f"{path}, migrated")
        lost = [name for name in _SAME if getattr(before, name) != getattr(after, name)]
        if after.schema != target or lost:
            raise StoreCorrupt(
                f"{path} would not be the same after it: {', '.join(lost) or 'its schema'}",
                advice="Nothing was changed. Keep the version that wrote it, and report this.",
            )
    return UpgradeTrial(snapshot.image, before, target)


def refuse_running(path: Path) -> None:
    """Raise StoreLocked when a daemon has the file open, before anything else is done."""
    lock = FileLock(path)
    lock.take()
    lock.release(clean=False)


def migrate(path: Path, clock: Clock) -> None:
    """Bring the file up to date, in one transaction, and close it as a daemon does that ends in order.

    Raises:
        StoreLocked: a daemon has it open.
        StoreError: it was not done; the file is as it was.
    """
    open_database(path, clock).close()


def _migrated(image: bytes) -> bytes:
    try:
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
            copy.deserialize(image)
            migrate_schema(copy)
            return copy.serialize()
    except sqlite3.Error as error:
        raise translate(error) from error
