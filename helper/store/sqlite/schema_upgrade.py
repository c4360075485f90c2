"""Upgrades the schema of a database on an operator's request.

The service upgrades a file when it opens it. This module first tries the upgrade on a copy in memory and checks every
row, so that a failure is reported before the file is changed.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from helper.clock import Clock
from helper.errors import StoreCorrupt
from helper.store.sqlite.errors import translate
from helper.store.sqlite.file_lock import FileLock
from helper.store.sqlite.opening import open_database
from helper.store.sqlite.schema import latest_version, migrate_schema, read_identity
from helper.store.sqlite.snapshot import Contents, check_image, take_snapshot

if TYPE_CHECKING:
    from helper.store.row_encryption import RowEncryption

_UNCHANGED_COUNTS: Final = ("live", "confirmed", "damaged")


@dataclass(frozen=True, slots=True)
class UpgradeTrial:
    """Result of a migration that was tried in memory.

    Attributes:
        image: the unchanged database, for a backup. It contains witnesses.
        before: contents of the unchanged database.
        target: the schema version after the migration.
    """

    image: bytes = field(repr=False)
    before: Contents
    target: int

    @property
    def is_needed(self) -> bool:
        """Whether the schema is older than the target."""
        return self.before.schema < self.target


def try_migration(path: Path, clock: Clock, encryption: RowEncryption | None = None) -> UpgradeTrial:
    """Migrate a copy in memory and check it. The file is not modified.

    Raises:
        StoreForeign: it is not a database of this helper, or was written by a newer version.
        StoreCorrupt: it is damaged, or would be after the migration.
        StoreError: it cannot be read or migrated.
    """
    snapshot = take_snapshot(path, clock, encryption)
    before, target = snapshot.contents, latest_version()
    if before.schema < target:
        after = check_image(_migrate_image(snapshot.image), f"{path}, migrated", encryption)
        lost = [name for name in _UNCHANGED_COUNTS if getattr(before, name) != getattr(after, name)]
        if after.schema != target or lost:
            raise StoreCorrupt(
                f"{path} would have different contents after the migration: {', '.join(lost) or 'its schema'}",
                advice="Nothing was changed. Continue with the version that wrote it, and report this.",
            )
    return UpgradeTrial(snapshot.image, before, target)


def refuse_running(path: Path) -> None:
    """Raise StoreLocked if a helper has the file open."""
    lock = FileLock(path)
    lock.acquire()
    lock.release(clean=False)


def upgrade_file(path: Path, clock: Clock, encryption: RowEncryption | None = None) -> None:
    """Upgrade the file in one transaction, and close it cleanly.

    Raises:
        StoreLocked: a helper has it open.
        StoreError: it failed; the file is unchanged.
    """
    open_database(path, clock, encryption=encryption, allow_unencrypted=True).close()


def _migrate_image(image: bytes) -> bytes:
    try:
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
            copy.deserialize(image)
            migrate_schema(copy, is_encrypted=read_identity(copy).is_encrypted)
            return copy.serialize()
    except sqlite3.Error as error:
        raise translate(error) from error
