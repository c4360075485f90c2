"""Lock of a database file, and refusal of a path or of files that must not be opened.

The lock also records whether the last run ended cleanly.

SQLite finds the write-ahead log (WAL) by the name of the opened database. After a crash, a database that is opened by
another name lacks the commits in the WAL. If there is no database with this name, SQLite deletes the WAL. If another
database has this name, SQLite replays the WAL into it, which damages that database too.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import sqlite3
import stat
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from helper.errors import StoreCorrupt, StoreDisplaced, StoreError, StoreForeign, StoreLocked
from helper.store.sql_files import sqlite_statements
from helper.store.table_rows import RUN_KEY, read_meta_value


def refuse_non_file(database: Path) -> None:
    """Raise StoreForeign if there is something other than a file at the resolved path."""
    with suppress(OSError):  # missing or inaccessible: opening it fails later
        if not stat.S_ISREG(database.stat().st_mode):
            raise StoreForeign(f"{database} is not a file", advice="Set [helper] db_path to the database file.")


def refuse_second_name(database: Path) -> None:
    """Refuse a database that has more than one hard link or is a mount point.

    A path that is missing, inaccessible or not a regular file is accepted here; opening it fails later.

    Uses O_PATH descriptors. Closing an ordinary descriptor would release SQLite's locks on the file in this process.

    Args:
        database: the resolved path.

    Raises:
        StoreDisplaced: the file has, or may have, a second name.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    fds: list[int] = []
    try:
        with suppress(OSError):
            fds.append(os.open(database.parent, flags | os.O_DIRECTORY))
            fds.append(os.open(database.name, flags, dir_fd=fds[0]))
        if len(fds) < 2:
            return
        about = os.fstat(fds[1])
        mounts = [_mount_id(fd) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)
    if not stat.S_ISREG(about.st_mode):
        return
    if about.st_nlink > 1:
        raise StoreDisplaced(
            f"{database} has {about.st_nlink} hard links, but its write-ahead log is found only through one of them",
            advice=f"List them with `find / -xdev -samefile {database}`. Keep the path that has a file ending in "
            "-wal next to it (or any, if there is none), and remove the other links with rm; the data remains. Do not "
            "remove a file ending in -wal.",
        )
    if mounts[0] != mounts[1]:
        raise StoreDisplaced(
            f"{database} is a mount point: its write-ahead log would not be next to the mounted file",
            advice="Mount the directory that contains the database instead of the file. If there is a file "
            f"{database}-wal, do not delete it: with the helper stopped, move it next to the mounted file, "
            "under that file's name with -wal.",
        )


def _mount_id(fd: int) -> str:
    """Return the mount id of a descriptor; the same value for all descriptors if /proc is not mounted.

    The device number does not identify a mount: a bind mount may be on the same device, and on overlayfs a file and its
    directory may have different device numbers.
    """
    with suppress(OSError), open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:  # noqa: PTH123
        for line in lines:
            if line.startswith("mnt_id:"):
                return line
    return ""


AGE_HEADER: Final = b"age-encryption.org/v1\n"
"""First bytes of an encrypted backup or export."""
_CLEAN: Final = b"clean"
_OPEN: Final = b"open"
_RESTORING: Final = b"restoring"
_MAX_BYTES: Final = 64
"""Maximum size of a lock file: a state and a run identifier."""


class FileLock:
    """Exclusive lock of one process on a database.

    Consists of two flock(2) locks. The first is on a lock file in the database's directory. The lock file also records
    whether the last run ended cleanly (all erasure complete) and whether a restore was interrupted. The second is on
    the database itself, so that it applies to every name of the file, such as a hard link or a bind mount.

    SQLite locks byte ranges of the same file with fcntl(2), which is independent of flock(2). However, a process that
    closes any descriptor of a file loses its byte-range locks on it. Therefore acquire this lock before SQLite opens
    the database, and release it after every connection of the process is closed.

    Args:
        database: path of the database; symbolic links are resolved.

    Attributes:
        crashed_run: random identifier of the last run if it crashed after it had written the identifier to the
            database, else None.
    """

    def __init__(self, database: Path) -> None:
        self._database = Path(os.path.realpath(database))
        self._path = Path(f"{self._database}.lock")
        self._fd = -1
        self._database_fd = -1
        self.crashed_run: str | None = None

    def acquire(self, *, to_restore: bool = False) -> bool:
        """Acquire both locks without waiting.

        If the database does not exist yet, call `lock_database` after creating it.

        Args:
            to_restore: accept an interrupted restore, because the caller restores the database again.

        Returns:
            Whether the last run ended cleanly, or there was none.

        Raises:
            StoreLocked: another process holds one of them.
            StoreForeign: the path is not one of a file.
            StoreDisplaced: the database has a second name.
            StoreCorrupt: a restore was interrupted.
            StoreError: a copy that a killed restore left cannot be erased.
            OSError: the lock file cannot be opened, or is a symbolic link.
        """
        refuse_non_file(self._database)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            try_lock(self._fd, self._path)
            self.lock_database()
            _erase_copies_of_killed_restores(self._database)
            state, *recorded = os.pread(self._fd, _MAX_BYTES, 0).split() or [b""]
            if state == _RESTORING and not to_restore:
                raise StoreCorrupt(
                    "a restore of this database was interrupted",
                    advice="Run `svote-helper db restore --force` again: existing files are renamed, not deleted.",
                )
        except BaseException:
            self._close()
            raise
        if state == _OPEN and len(recorded) == 1:
            self.crashed_run = recorded[0].decode("ascii", "replace")
        return state != _OPEN

    def lock_database(self) -> None:
        """Acquire the lock on the database itself, if the file exists and is not locked yet.

        Raises:
            StoreLocked: another process holds it.
            StoreDisplaced: the database has a second name.
        """
        if self._database_fd < 0:
            self._database_fd = open_regular(self._database)
        if self._database_fd >= 0:
            try_lock(self._database_fd, self._database)
        refuse_second_name(self._database)

    def mark_open(self, run: str | None = None) -> None:
        """Record that the database is in use. A run that ends without `release(clean=True)` is treated as a crash.

        Args:
            run: run identifier that is stored in the database file itself, not only in its write-ahead log. After a
                crash, the next start requires this database and its WAL.
        """
        self._write(_OPEN if run is None else b"%s\n%s" % (_OPEN, run.encode("ascii")))

    def mark_restoring(self) -> None:
        """Record that a restore is in progress. No helper starts on these files until `mark_open`."""
        self._write(_RESTORING)

    def release(self, *, clean: bool) -> None:
        """Release the lock. The lock file is not deleted: otherwise two helpers could lock two different files."""
        if clean:
            with suppress(OSError):  # disk full: the next start then checks the whole file
                self._write(_CLEAN)
        self._close()

    def _write(self, text: bytes) -> None:
        line = text + b"\n"
        os.pwrite(self._fd, line, 0)
        os.ftruncate(self._fd, len(line))
        os.fsync(self._fd)

    def _close(self) -> None:
        for fd in (self._database_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._database_fd = self._fd = -1


def refuse_locked(database: Path) -> None:
    """Raise StoreLocked if a helper has the file open."""
    lock = FileLock(database)
    lock.acquire()
    lock.release(clean=False)


def is_locked(database: Path) -> bool:
    """Return whether a helper, or a command that changes the file, has it open; False without access to the lock."""
    try:
        fd = os.open(f"{os.path.realpath(database)}.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def temporary_path(path: Path) -> Path:
    """Return a path at which to write a file before it is renamed to `path`.

    It contains no process id: commands in a container often have the same one, and a killed command leaves its file.
    """
    return path.with_name(f".{path.name}.{secrets.randbelow(10**12)}.partial")


def _erase_copies_of_killed_restores(database: Path) -> None:
    """Erase unfinished copies of the database, which may contain witnesses. Call this under the lock.

    A file that is encrypted with age is kept: it may be an export that has moved shares.
    """
    name = re.compile(rf"\.{re.escape(database.name)}\.[0-9]+\.partial")
    for path in database.parent.iterdir():
        if not name.fullmatch(path.name):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(fd, "r+b") as file:
                if AGE_HEADER.startswith(file.read(len(AGE_HEADER))):
                    continue  # also if it is still being written
                file.seek(0)
                file.write(bytes(os.fstat(fd).st_size))
                file.flush()
                os.fsync(fd)
            path.unlink()
        except OSError as error:
            raise StoreError(
                f"{path} remains from a restore that was killed and cannot be erased: {error.strerror}",
                advice="It may contain witnesses. Delete it.",
            ) from error


def open_regular(path: Path) -> int:
    """Open a regular file read-only; return -1 if there is none. Never follows a link and never blocks."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return -1
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return -1


def try_lock(fd: int, path: Path) -> None:
    """Lock a descriptor exclusively; raise StoreLocked if another process has locked the file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreLocked(f"another helper has this database open: {path} is locked") from None


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
    """Refuse to open a database if it or its WAL was moved, replaced or deleted after a crash.

    Args:
        database: the resolved path.
        lock: the acquired lock.
        clean: whether the last run ended cleanly, as returned by `FileLock.acquire`.

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
    """Detects that an open database or its write-ahead log was moved, replaced or deleted.

    Args:
        database: the unresolved path of the database; SQLite has the file and its WAL open.
    """

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
