"""Classifies SQLite errors, and detects whether commits succeed and the files are at their path."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import structlog

from helper.clock import Clock
from helper.errors import StoreCorrupt, StoreDisplaced, StoreError, StoreForeign, StoreFull

_CONSTRAINT_CODES = frozenset({sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH})
_DAMAGE_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class UnreadableRowError(Exception):
    """SQLite cannot read a share's row; the transaction cannot continue."""

    def __init__(self, share_id: int) -> None:
        super().__init__("a share's row cannot be read")
        self.share_id = share_id


def result_code(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code, 0 if Python's sqlite3 module raised the error itself."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def is_damage(error: BaseException) -> bool:
    """Return whether a part of the file is damaged. Operations on other parts still succeed."""
    if isinstance(error, UnicodeDecodeError):
        return True
    return isinstance(error, sqlite3.Error) and result_code(error) in _DAMAGE_CODES


def is_environment_error(error: BaseException) -> bool:
    """Return whether the disk or the system caused the error, so that every operation of the commit fails."""
    return isinstance(error, sqlite3.Error) and result_code(error) not in _CONSTRAINT_CODES | _DAMAGE_CODES


def is_disk_full(error: BaseException) -> bool:
    """Return whether no space is left on the disk."""
    if isinstance(error, OSError):
        return error.errno in {errno.ENOSPC, errno.EDQUOT}
    # The second code is that of the first access to a database with a WAL: its index in shared memory is a file.
    return isinstance(error, sqlite3.Error) and (
        result_code(error) == sqlite3.SQLITE_FULL
        or getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_SHMSIZE
    )


@contextmanager
def translating(name: str = "") -> Iterator[None]:
    """Raise the `StoreError` for an error of SQLite in the block; see `translate`."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise translate(error, name) from error


def not_a_database(name: str) -> StoreForeign:
    """Return the error for a file that SQLite cannot open as a database."""
    return StoreForeign(f"{name} is not a database")


def translate(error: BaseException, name: str = "") -> BaseException:
    """Return the `StoreError` for an error of SQLite; any other error unchanged.

    At the first access to a file, which may not be a database, `name` is its name.
    """
    if isinstance(error, UnicodeDecodeError):  # SQLite's message quotes a damaged schema
        return StoreCorrupt("the database is damaged: its schema is invalid")
    if not isinstance(error, sqlite3.Error):
        return error
    code = result_code(error)
    if is_disk_full(error):
        return StoreFull("nothing was written: the disk of the database is full")
    if code in _DAMAGE_CODES:
        is_foreign = name and code == sqlite3.SQLITE_NOTADB
        return not_a_database(name) if is_foreign else StoreCorrupt(f"the database is damaged: {error}")
    if code in _CONSTRAINT_CODES:
        return StoreError(f"the schema rejected the change: {error}", advice="This is a bug in the helper: report it.")
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    return StoreError(f"the database could not be used: {error} ({name})")


log = structlog.get_logger("helper.store")

PROBE_SECONDS: Final = 0.5
"""Seconds between two probes of a disk on which the last commit failed."""
LOCATION_CHECK_SECONDS: Final = 5.0
"""Seconds after which an idle writer checks again that the database is at its path; a busy one does at each commit."""
MIN_FREE_BYTES: Final = 2**20
"""Free bytes required to consider a full disk healthy again: a small commit can succeed when a share would not fit."""


class DiskHealth:
    """Reason why the database cannot be written. Updated by the writer thread, read from any thread.

    Attributes:
        reason: why the last commit failed, None if it succeeded.
        displaced: description of the file that is not at its path, None if both are.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._folder = path.parent
        self._clock = clock
        self._probe_at = 0.0
        self._is_disk_full = False
        self._path = path
        self.reason: str | None = None
        self.displaced: str | None = None

    def record_location(self, displaced: str | None) -> None:
        """Record which of the files is not at its path, None if both are."""
        if displaced == self.displaced:
            return
        self.displaced = displaced
        if displaced is None:
            log.info("database_back_in_place", path=str(self._path))
        else:
            log.error("database_displaced", reason=displaced, path=str(self._path), advice=StoreDisplaced.advice)

    def record_failure(self, error: Exception) -> None:
        """Record a failed commit, if the disk caused it."""
        if not is_environment_error(error):
            return
        if self.reason is None:
            log.error("database_write_failed", error=str(error), advice=StoreError.advice)
        self.reason = str(translate(error))
        self._is_disk_full = is_disk_full(error)
        self._probe_at = self._clock.monotonic() + PROBE_SECONDS

    def record_success(self) -> None:
        """Record a successful probe. Other commits prove nothing: SQLite does not sync a commit without changes."""
        if self.reason is None:
            return
        if self._is_disk_full and not self._has_room():
            self._probe_at = self._clock.monotonic() + PROBE_SECONDS
            return
        self.reason = None
        log.info("database_write_recovered")

    def max_wait(self, limit: float | None) -> float | None:
        """Return the seconds the writer may wait for work, at most `limit` (None: no limit)."""
        interval = LOCATION_CHECK_SECONDS if self.reason is None and self.displaced is None else PROBE_SECONDS
        return interval if limit is None else min(limit, interval)

    @property
    def is_probe_due(self) -> bool:
        """Whether it is time to probe the disk."""
        return self.reason is not None and self._clock.monotonic() >= self._probe_at

    def _has_room(self) -> bool:
        with suppress(OSError):
            usage = os.statvfs(self._folder)
            return usage.f_bavail * usage.f_frsize >= MIN_FREE_BYTES
        return True
