"""Whether a database and its write-ahead log are at their path, before they are opened and while they are in use.

SQLite finds the log by the database's name. Without a database of this name it deletes the log, and it replays a log
into any database that has the name: what was committed last is lost, and the other database is damaged.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from helper.errors import StoreDisplaced
from helper.store.migration.tables import RUN_KEY
from helper.store.sql_files import queries
from helper.store.sqlite.file_lock import FileLock
from helper.store.transaction import read_meta_value

DATABASE_DISPLACED_TEXT: Final = "the database file is no longer at its path"
WAL_DISPLACED_TEXT: Final = "the database's write-ahead log is no longer at its path"
_MOVE_BACK_ADVICE: Final = (
    "Do not delete the log: it may hold shares that are nowhere else. Move {what} back to {path} and start again; "
    "nothing is lost then. "
)


def wal_path(database: Path) -> Path:
    """The path of a database's write-ahead log."""
    return Path(f"{database}-wal")


def file_size(path: Path) -> int:
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
    log = wal_path(database)
    restore = f"If it is lost for good, run `svote-helper db restore BACKUP --force`, which keeps {log} aside"
    if file_size(database) == 0:
        if file_size(log) > 0:
            raise StoreDisplaced(
                f"{database} is missing or empty, but {log} holds the last commits",
                advice=_MOVE_BACK_ADVICE.format(what="the database file", path=database) + f"{restore}.",
            )
        if not clean:
            raise StoreDisplaced(
                f"{database} is missing or empty, although the last run on it did not end in order",
                advice=f"Move the database file back to {database} and start again. {restore}. To begin with an empty "
                f"queue, delete {database}.lock.",
            )
        return
    if lock.crashed_run is None:
        return
    if not log.exists():
        raise StoreDisplaced(
            f"{log} is missing, although the last run on {database} did not end in order",
            advice=_MOVE_BACK_ADVICE.format(what="it", path=log)
            + "If another program (sqlite3) has opened the database "
            f"since, it has written the log back and removed it: delete {database}.lock then, and start.",
        )
    if _has_other_run(database, lock.crashed_run):
        raise StoreDisplaced(
            f"{database} is not the database that {log} belongs to: the file was replaced since the last start",
            advice=_MOVE_BACK_ADVICE.format(what="the database that was replaced", path=database)
            + f"A copy is accepted if {database.name} and {log.name} were copied together. {restore}.",
        )


def _has_other_run(database: Path, run: str) -> bool:
    """Whether the file itself, without its log, holds another run than this, or none.

    A file that is damaged where that is written is not refused here: a crash within a checkpoint may have left it so,
    and its log repairs it.
    """
    uri = f"{database.as_uri()}?mode=ro&immutable=1"  # without the log
    try:
        with closing(sqlite3.connect(uri, uri=True)) as conn:
            if conn.execute("SELECT 1 FROM sqlite_schema WHERE name = 'meta'").fetchone() is None:
                return True
            if read_meta_value(conn.execute(queries()["get_meta"], (RUN_KEY,)).fetchall()) == run:
                return False
            return [row[0] for row in conn.execute("PRAGMA integrity_check('meta')")] == ["ok"]
    except sqlite3.Error:
        return False


class PathMonitor:
    """Detects that an open database or its write-ahead log was moved, replaced or deleted.

    Args:
        database: the path as it was given; SQLite has the file and its log open.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._log = wal_path(Path(os.path.realpath(database)))
        self._identities = _file_identity(database), _file_identity(self._log)

    def is_database_displaced(self) -> bool:
        """Whether another file, or none, is at the database's path."""
        return _file_identity(self._database) != self._identities[0]

    def displacement_reason(self) -> str | None:
        """What is not at its path, or None. The text names no path, so that anybody may read it."""
        if self.is_database_displaced():
            return DATABASE_DISPLACED_TEXT
        return None if _file_identity(self._log) == self._identities[1] else WAL_DISPLACED_TEXT


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Device and inode; None if there is no such file, or it cannot be looked up."""
    try:
        found = os.stat(path)  # noqa: PTH116 - half the cost of Path.stat, at each commit
    except OSError:
        return None
    return found.st_dev, found.st_ino
