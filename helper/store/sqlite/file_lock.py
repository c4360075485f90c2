"""The lock of a database file, which also records how the last run on it ended."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from helper.errors import StoreCorrupt, StoreLocked
from helper.store.sqlite.file_names import refuse_second_name

_CLEAN: Final = b"clean"
_OPEN: Final = b"open"
_RESTORING: Final = b"restoring"
_MAX_BYTES: Final = 64
"""Bytes that a lock file may hold: a state, and a run."""


class FileLock:
    """The exclusive lock that one process holds on a database.

    It is two locks (flock(2)). One is on a file beside the database. That file also records whether the last run
    ended in order, and so whether erasure was finished, and whether a restore was interrupted. The other is on the
    database itself, so that it holds for every name of the file: a hard link, or a bind mount.

    SQLite locks byte ranges of the same file (fcntl(2)), which is independent of flock(2). But when a process closes
    any descriptor of a file, it loses its byte-range locks on it: take this lock before SQLite opens the database, and
    release it after every connection of the process is closed.

    Args:
        database: the file; symbolic links are resolved.

    Attributes:
        crashed_run: the random identifier of the last run, if that did not end in order and had written it to the
            database too; else None.
    """

    def __init__(self, database: Path) -> None:
        self._database = Path(os.path.realpath(database))
        self._path = Path(f"{self._database}.lock")
        self._fd = -1
        self._database_fd = -1
        self.crashed_run: str | None = None

    def acquire(self, *, to_restore: bool = False) -> bool:
        """Take both locks, or raise at once; whether the last holder ended in order (or there was none).

        A database that does not exist yet is locked by `lock_database` once it does.

        Raises:
            StoreLocked: another process holds one of them.
            StoreDisplaced: the database has another name.
            StoreCorrupt: a restore was interrupted; not raised `to_restore`.
            OSError: the lock file cannot be opened, or is a symbolic link.
        """
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            try_lock(self._fd, self._path)
            self.lock_database()
            state, *recorded = os.pread(self._fd, _MAX_BYTES, 0).split() or [b""]
            if state == _RESTORING and not to_restore:
                raise StoreCorrupt(
                    "a restore of this database was interrupted",
                    advice="Run `svote-helper db restore --force` again: it keeps aside what there is.",
                )
        except BaseException:
            self._close()
            raise
        if state == _OPEN and len(recorded) == 1:
            self.crashed_run = recorded[0].decode("ascii", "replace")
        return state != _OPEN

    def lock_database(self) -> None:
        """Take the lock on the database itself, if the file exists and is not locked yet.

        Raises:
            StoreLocked: another process holds it.
            StoreDisplaced: the database has another name.
        """
        if self._database_fd < 0:
            self._database_fd = open_regular(self._database)
        if self._database_fd >= 0:
            try_lock(self._database_fd, self._database)
        refuse_second_name(self._database)

    def mark_open(self, run: str | None = None) -> None:
        """From now on, an end without `release(clean=True)` is a crash.

        Args:
            run: the identifier that the database file holds, without its write-ahead log: the next start then requires
                the log, and this database.
        """
        self._write(_OPEN if run is None else b"%s\n%s" % (_OPEN, run.encode("ascii")))

    def mark_restoring(self) -> None:
        """From now on, and until `mark_open`, no daemon may start on these files."""
        self._write(_RESTORING)

    def release(self, *, clean: bool) -> None:
        """Give the lock up; the file stays, as deleting it would let two daemons lock two files."""
        if clean:
            with suppress(OSError):  # a full disk: the next start then looks through the whole file
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


def open_regular(path: Path) -> int:
    """A read-only descriptor of a regular file; -1 if there is none. Never follows a link, never blocks."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return -1
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return -1


def try_lock(fd: int, path: Path) -> None:
    """Lock a descriptor exclusively, or raise StoreLocked at once."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreLocked(f"another daemon has this database open: {path} is locked") from None
