"""The queue's store, in SQLite or PostgreSQL."""


def sqlite_version() -> str:
    """Return the version of the SQLite library in use."""
    import sqlite3  # noqa: PLC0415 - most commands need no database

    return sqlite3.sqlite_version
