"""Whether a database and its write-ahead log are at their path, before they are opened and while they are in use.

SQLite finds the log by the database's name. Without a database of this name it deletes the log, and it replays a log
into any database that has the name: what was committed last is lost, and the other database is damaged.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from helper.errors import StoreDisplaced
from helper.store.sqlite.file_lock import FileLock

DISPLACED: Final = "the database file is no longer at its path"
LOG_DISPLACED: Final = "the database's write-ahead log is no longer at its path"
_MOVE_BACK: Final = (
    "Do not delete the log: it may hold shares that are nowhere else. Move {what} back to {path} and start again; "
    "nothing is lost then. "
)


def log_of(database: Path) -> Path:
    """The path of a database's write-ahead log."""
    return Path(f"{database}-wal")


def size_of(path: Path) -> int:
    """Bytes of a file, 0 if there is none."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def refuse_incomplete(database: Path, lock: FileLock, *, clean: bool) -> None:
    """Refuse to open a database of which a crash left only a part at its path.

    Args:
        database: the resolved path.
        lock: taken.
        clean: whether the last run ended in order, by the lock.

    Raises:
        StoreDisplaced: the database is missing or was replaced, or its write-ahead log is missing.
    """
    log = log_of(database)
    restore = f"If it is lost for good, run `svote-helper db restore BACKUP --force`, which keeps {log} aside"
    if size_of(database) == 0:
        if size_of(log) > 0:
            raise StoreDisplaced(
                f"there is no database {database}, but {log} holds what was committed last",
                advice=_MOVE_BACK.format(what="the database file", path=database) + f"{restore}.",
            )
        if not clean:
            raise StoreDisplaced(
                f"there is no database {database}, although the last run on it did not end in order",
                advice=f"Move the database file back to {database} and start again. {restore}. To begin with an empty "
                f"queue, delete {database}.lock.",
            )
        return
    if lock.inodes is None:
        return
    database_inode, log_inode = lock.inodes
    if not log.exists():
        raise StoreDisplaced(
            f"{log} is missing, although the last run on {database} did not end in order",
            advice=_MOVE_BACK.format(what="it", path=log) + "If another program (sqlite3) has opened the database "
            f"since, it has written the log back and removed it: delete {database}.lock then, and start.",
        )
    # Copies of both files, on another disk for instance, have new numbers both.
    if database.stat().st_ino != database_inode and log.stat().st_ino == log_inode:
        raise StoreDisplaced(
            f"{database} is not the database that {log} belongs to: the file was replaced during the last run",
            advice=_MOVE_BACK.format(what="the database that was replaced", path=database)
            + f"To use the present file without what the log holds, move {log} elsewhere and delete {database}.lock.",
        )


class PathWatch:
    """Detects that an open database or its write-ahead log was moved, replaced or deleted.

    Args:
        database: the path as it was given; SQLite has the file and its log open.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._log = log_of(Path(os.path.realpath(database)))
        self._identities = _identity(database), _identity(self._log)

    @property
    def inodes(self) -> tuple[int, int] | None:
        """The inode numbers of database and log; None if one of them is missing."""
        database, log = self._identities
        return None if database is None or log is None else (database[1], log[1])

    def database_displaced(self) -> bool:
        """Whether another file, or none, is at the database's path."""
        return _identity(self._database) != self._identities[0]

    def reason(self) -> str | None:
        """What is not at its path, or None. The text names no path, so that anybody may read it."""
        if self.database_displaced():
            return DISPLACED
        return None if _identity(self._log) == self._identities[1] else LOG_DISPLACED


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode; None if there is no such file, or it cannot be looked up."""
    try:
        found = os.stat(path)  # noqa: PTH116 - half the cost of Path.stat, at each commit
    except OSError:
        return None
    return found.st_dev, found.st_ino
