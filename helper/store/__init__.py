"""Where shares are kept: the `Store` protocol with its row types, and SQLite behind it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helper.store.reader import ReadOnlyQueue
    from helper.store.sqlite.store import SqliteStore

__all__ = ["ReadOnlyQueue", "SqliteStore", "sqlite_version"]


def sqlite_version() -> str:
    """The version of the SQLite library that runs."""
    import sqlite3  # noqa: PLC0415

    return sqlite3.sqlite_version


def __getattr__(name: str) -> Any:
    """The stores, loaded when they are asked for: a command that only needs the row types must not wait for them."""
    if name == "ReadOnlyQueue":
        from helper.store.reader import ReadOnlyQueue  # noqa: PLC0415

        return ReadOnlyQueue
    if name == "SqliteStore":
        from helper.store.sqlite.store import SqliteStore  # noqa: PLC0415

        return SqliteStore
    raise AttributeError(name)
