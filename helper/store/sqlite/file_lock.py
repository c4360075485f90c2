"""Lock of a database file, and refusal of a path by which it must not be opened.

The lock also records whether the last run ended cleanly.

SQLite derives the path of the write-ahead log (WAL) from the opened name. After a crash, a database that is opened by
another name lacks the commits in the WAL.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from helper.errors import StoreCorrupt, StoreDisplaced, StoreError, StoreForeign, StoreLocked


def refuse_non_file(database: Path) -> None:
    """Raise StoreForeign if there is something other than a file at the resolved path."""
    with suppress(OSError):  # missing or inaccessible: opening it fails later
        if not stat.S_ISREG(database.stat().st_mode):
            raise StoreForeign(f"{database} is not a file", advice="Set [helper] db_path to the database file.")


def refuse_second_name(database: Path) -> None:
    """Refuse a database, at its resolved path, that has more than one hard link or is a mount point.

    A path that is missing, inaccessible or not a regular file is accepted here; opening it fails later.

    Uses O_PATH descriptors. Closing an ordinary descriptor would release SQLite's locks on the file in this process.

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
    with suppress(OSError), open(f"/proc/self/fdinfo/{fd}", encoding="utf-8") as lines:  # noqa: PTH123
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
_ERASED_AT_ONCE: Final = 1 << 20


class FileLock:
    """Exclusive lock of one process on a database.

    Consists of two flock(2) locks. The first is on a lock file in the database's directory. The lock file also records
    whether the last run ended cleanly (all erasure complete) and whether a restore was interrupted. The second is on
    the database itself, so that it applies to every name of the file, such as a hard link or a bind mount.

    SQLite locks byte ranges of the same file with fcntl(2), which is independent of flock(2). However, a process that
    closes any descriptor of a file loses its byte-range locks on it. Therefore acquire this lock before SQLite opens
    the database, and release it after every connection of the process is closed.

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

        If the database does not exist yet, call `lock_database` after creating it. With `to_restore`, an interrupted
        restore is accepted, because the caller restores the database again.

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


def find_temporary_files(path: Path) -> list[Path]:
    """Return the files at temporary paths of a path: those that are being written, and those of killed commands."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9]+\.partial")
    return [file for file in path.parent.iterdir() if name.fullmatch(file.name)]


def _erase_copies_of_killed_restores(database: Path) -> None:
    """Erase unfinished copies of the database, which may contain witnesses. Call this under the lock.

    A file that is encrypted with age is kept: it is a backup or an export, which another command may be writing.
    """
    for path in find_temporary_files(database):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(fd, "r+b") as file:
                if AGE_HEADER.startswith(file.read(len(AGE_HEADER))):
                    continue  # also if it has no complete header yet
                erase_content(file)
            path.unlink()
        except OSError as error:
            raise StoreError(
                f"{path} remains from a restore that was killed and cannot be erased: {error.strerror}",
                advice="It may contain witnesses. Delete it.",
            ) from error


def erase_content(file: BinaryIO) -> None:
    """Overwrite a file with zeros, and fsync it."""
    left = file.seek(0, os.SEEK_END)
    file.seek(0)
    while left > 0:
        left -= file.write(bytes(min(left, _ERASED_AT_ONCE)))
    file.flush()
    os.fsync(file.fileno())


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
