"""SQLite's errors as errors of the house."""

from __future__ import annotations

import sqlite3

from helper.errors import StoreCorrupt, StoreError, StoreFull

_REFUSALS = frozenset({sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH})


def code_of(error: sqlite3.Error) -> int:
    """SQLite's primary result code, 0 when the error is Python's own."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def is_environment(error: BaseException) -> bool:
    """Whether the disk or the file is at fault, so that everything in the same commit fails alike."""
    return isinstance(error, sqlite3.Error) and code_of(error) not in _REFUSALS


def translate(error: BaseException) -> BaseException:
    """The error of the house that stands for an error of SQLite; any other error as it is."""
    if not isinstance(error, sqlite3.Error):
        return error
    code = code_of(error)
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(f"nothing was written: {error}")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreCorrupt(f"the database is damaged: {error}")
    if code in _REFUSALS:
        return StoreError(f"the schema refuses this: {error}", advice="This is a fault of the helper: report it.")
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    return StoreError(f"the database could not be used: {error} ({name})")
