"""The lock of a database file, which also tells how the last daemon on it ended."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from helper.errors import StoreCorrupt, StoreLocked

_CLEAN: Final = b"clean\n"
_OPEN: Final = b"open\n"
_RESTORING: Final = b"restoring\n"


class FileLock:
    """The lock that one daemon holds on a database, in a file beside it.

    The file also says whether the last daemon ended in order, and so whether erasure was finished; and whether a
    restore was begun and not finished, when the files beside it may belong to two databases.
    """

    def __init__(self, database: Path) -> None:
        self._path = Path(f"{database}.lock")
        self._fd = -1

    def take(self, *, to_restore: bool = False) -> bool:
        """Take the lock or raise at once; whether the last holder ended in order (or there was none).

        Raises:
            StoreLocked: another daemon holds it.
            StoreCorrupt: a restore was interrupted; not raised `to_restore`.
        """
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            raise StoreLocked(f"another daemon has this database open: {self._path} is locked") from None
        told = os.pread(self._fd, 16, 0)
        if told == _RESTORING and not to_restore:
            self._close()
            raise StoreCorrupt(
                "a restore of this database was interrupted",
                advice="Run `svote-helper db restore --force` again: it keeps aside what there is.",
            )
        return told != _OPEN

    def say_open(self) -> None:
        """From now on, an end without `release(clean=True)` is a crash."""
        self._write(_OPEN)

    def say_restoring(self) -> None:
        """From now on, and until `say_open`, no daemon may start on these files."""
        self._write(_RESTORING)

    def release(self, *, clean: bool) -> None:
        """Give the lock up; the file stays, as deleting it would let two daemons lock two files."""
        if clean:
            with suppress(OSError):  # a full disk: the next start then looks through the whole file
                self._write(_CLEAN)
        self._close()

    def _write(self, text: bytes) -> None:
        os.pwrite(self._fd, text, 0)
        os.ftruncate(self._fd, len(text))
        os.fsync(self._fd)

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1
