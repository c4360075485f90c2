"""Checks that a database and its write-ahead log (WAL) are at their path.

SQLite finds the WAL by the name of the database. If there is no database with this name, SQLite deletes the WAL. If
another database has this name, SQLite replays the WAL into it. In both cases the latest commits are lost; in the second
case the other database is damaged too.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from helper.errors import StoreDisplaced
from helper.store.sql_files import sqlite_statements
from helper.store.sqlite.file_lock import FileLock
from helper.store.table_rows import RUN_KEY, read_meta_value

DATABASE_DISPLACED_TEXT: Final = "the database file is no longer at its path"
WAL_DISPLACED_TEXT: Final = "the database's write-ahead log is no longer at its path"
_MOVE_BACK_ADVICE: Final = (
    "Do not delete the WAL: it may contain shares that exist nowhere else. Move {what} back to {path} and start again; "
    "then nothing is lost. "
)


def wal_path(database: Path) -> Path:
    """Return the path of a database's write-ahead log."""
    return Path(f"{database}-wal")


def file_size(path: Path) -> int:
    """Return the size of a file in bytes, 0 if it does not exist."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def refuse_incomplete(database: Path, lock: FileLock, *, clean: bool) -> None:
    """Refuse to open a database, at its resolved path, that was moved, replaced or deleted after a crash, or its WAL.

    `clean` is what `FileLock.acquire` returned.

    Raises:
        StoreDisplaced: the database is missing or was replaced, or its write-ahead log is missing.
    """
    log = wal_path(database)
    restore = f"If it is permanently lost, run `svote-helper db restore BACKUP --force`, which renames {log}"
    if file_size(database) == 0:
        if file_size(log) > 0:
            raise StoreDisplaced(
                f"{database} is missing or empty, but {log} contains the last commits",
                advice=_MOVE_BACK_ADVICE.format(what="the database file", path=database) + f"{restore}.",
            )
        if not clean:
            raise StoreDisplaced(
                f"{database} is missing or empty, although the last run was not shut down cleanly",
                advice=f"Move the database file back to {database} and start again. {restore}. To begin with an empty "
                f"queue, delete {database}.lock.",
            )
        return
    if lock.crashed_run is None:
        return
    if not log.exists():
        raise StoreDisplaced(
            f"{log} is missing, although the last run on {database} was not shut down cleanly",
            advice=_MOVE_BACK_ADVICE.format(what="it", path=log)
            + "If another program (sqlite3) has opened the database "
            f"since, it has checkpointed the WAL and removed it: in that case, delete {database}.lock and start.",
        )
    if _has_other_run(database, lock.crashed_run):
        raise StoreDisplaced(
            f"{database} is not the database that {log} belongs to: the file was replaced since the last start",
            advice=_MOVE_BACK_ADVICE.format(what="the database that was replaced", path=database)
            + f"A copy is accepted if {database.name} and {log.name} were copied together. {restore}.",
        )


def _has_other_run(database: Path, run: str) -> bool:
    """Return whether the file, without its WAL, has another run identifier than `run`, or none.

    Returns False if the table with the identifier is damaged: a crash during a checkpoint may have caused the damage,
    and replaying the WAL repairs it.
    """
    uri = f"{database.as_uri()}?mode=ro&immutable=1"  # `immutable` makes SQLite ignore the WAL
    try:
        with closing(sqlite3.connect(uri, uri=True)) as conn:
            if conn.execute("SELECT 1 FROM sqlite_schema WHERE name = 'meta'").fetchone() is None:
                return True
            if read_meta_value(conn.execute(sqlite_statements()["get_meta"], (RUN_KEY,)).fetchall()) == run:
                return False
            return [row[0] for row in conn.execute("PRAGMA integrity_check('meta')")] == ["ok"]
    except sqlite3.Error:
        return False


class PathMonitor:
    """Detects that an open database, at its unresolved path, or its WAL was moved, replaced or deleted."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._log = wal_path(Path(os.path.realpath(database)))
        self._identities = _file_identity(database), _file_identity(self._log)

    def is_database_displaced(self) -> bool:
        """Return whether the database's path is missing or refers to another file."""
        return _file_identity(self._database) != self._identities[0]

    def displacement_reason(self) -> str | None:
        """Describe which file is not at its path, None if both are. The text is public, so it contains no path."""
        if self.is_database_displaced():
            return DATABASE_DISPLACED_TEXT
        return None if _file_identity(self._log) == self._identities[1] else WAL_DISPLACED_TEXT


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file, None if its status cannot be read."""
    try:
        status = os.stat(path)  # noqa: PTH116 - runs at each commit, and costs half as much as Path.stat
    except OSError:
        return None
    return status.st_dev, status.st_ino
