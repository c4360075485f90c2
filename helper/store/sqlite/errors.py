"""SQLite's errors as errors of the house."""

from __future__ import annotations

import errno
import sqlite3

from helper.errors import StoreCorrupt, StoreError, StoreFull

_REFUSALS = frozenset({sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH})
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class IndexDamageError(Exception):
    """An index and its rows are at odds."""


class UnreadableRowError(Exception):
    """SQLite can not read a share's row, and after that can not go on with the transaction."""

    def __init__(self, share_id: int) -> None:
        super().__init__("a share's row can not be read")
        self.share_id = share_id


def code_of(error: sqlite3.Error) -> int:
    """SQLite's primary result code, 0 when the error is Python's own."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def is_damage(error: BaseException) -> bool:
    """Whether a part of the file is damaged; what does not touch that part still works."""
    if isinstance(error, UnicodeDecodeError | IndexDamageError):
        return True
    return isinstance(error, sqlite3.Error) and code_of(error) in _DAMAGE


def is_environment(error: BaseException) -> bool:
    """Whether the disk is at fault, so that everything in the same commit fails alike."""
    return isinstance(error, sqlite3.Error) and code_of(error) not in _REFUSALS | _DAMAGE


def is_full(error: BaseException) -> bool:
    """Whether there was no space left."""
    if isinstance(error, OSError):
        return error.errno in {errno.ENOSPC, errno.EDQUOT}
    return isinstance(error, sqlite3.Error) and code_of(error) == sqlite3.SQLITE_FULL


def translate(error: BaseException) -> BaseException:
    """The error of the house that stands for an error of SQLite; any other error as it is."""
    if isinstance(error, UnicodeDecodeError | IndexDamageError):
        # SQLite's message quotes a schema that is no text any more; or an index is at odds with its rows.
        return StoreCorrupt("the database is damaged: a schema or an index is not what it was")
    if not isinstance(error, sqlite3.Error):
        return error
    code = code_of(error)
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(f"nothing was written: {error}")
    if code in _DAMAGE:
        return StoreCorrupt(f"the database is damaged: {error}")
    if code in _REFUSALS:
        return StoreError(f"the schema refuses this: {error}", advice="This is a fault of the helper: report it.")
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    return StoreError(f"the database could not be used: {error} ({name})")
