"""Classifies SQLite errors and maps them to `StoreError`."""

from __future__ import annotations

import errno
import sqlite3

from helper.errors import StoreCorrupt, StoreError, StoreForeign, StoreFull

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


def translate_opening(error: BaseException, name: str) -> BaseException:
    """Like `translate`, for the first access to a file, which may not be a database."""
    if isinstance(error, sqlite3.Error) and result_code(error) == sqlite3.SQLITE_NOTADB:
        return not_a_database(name)
    return translate(error)


def not_a_database(name: str) -> StoreForeign:
    """Return the error for a file that SQLite cannot open as a database."""
    return StoreForeign(f"{name} is not a database")


def translate(error: BaseException) -> BaseException:
    """Return the `StoreError` for an error of SQLite; any other error unchanged."""
    if isinstance(error, UnicodeDecodeError):  # SQLite's message quotes a damaged schema
        return StoreCorrupt("the database is damaged: its schema is invalid")
    if not isinstance(error, sqlite3.Error):
        return error
    code = result_code(error)
    if is_disk_full(error):
        return StoreFull("nothing was written: the disk of the database is full")
    if code in _DAMAGE_CODES:
        return StoreCorrupt(f"the database is damaged: {error}")
    if code in _CONSTRAINT_CODES:
        return StoreError(f"the schema rejected the change: {error}", advice="This is a bug in the helper: report it.")
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    return StoreError(f"the database could not be used: {error} ({name})")
