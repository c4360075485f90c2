"""Where shares are kept: the `Store` protocol with its row types, and SQLite behind it."""

import sqlite3

from helper.store.reading import ReadOnlyQueue
from helper.store.sqlite import SqliteStore

__all__ = ["ReadOnlyQueue", "SqliteStore", "sqlite_version"]


def sqlite_version() -> str:
    """The version of the SQLite library that runs."""
    return sqlite3.sqlite_version
