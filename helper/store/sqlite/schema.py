"""The schema of the database file: its version and its upgrades."""

from __future__ import annotations

import sqlite3
from functools import cache
from typing import Final

from helper.errors import StoreCorrupt
from helper.store.sql_files import read_migrations

APPLICATION_ID: Final = 0x73564F54
"""`application_id` in the header of our files: "sVOT"."""


@cache
def migrations() -> tuple[str, ...]:
    """The migrations of the schema on SQLite."""
    return read_migrations("helper.store")


def latest_version() -> int:
    """The schema version of this version of the helper, which `user_version` in the header of a file names."""
    return len(migrations())


def migrate_schema(conn: sqlite3.Connection) -> None:
    """Bring the schema up to date in one transaction."""
    version = int(conn.execute("PRAGMA user_version").fetchone()[0])
    if version == latest_version():
        return
    steps = "\n".join(migrations()[version:])
    try:
        conn.executescript(
            f"BEGIN IMMEDIATE; {steps}\n"
            f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {latest_version()}; COMMIT;"
        )
    except sqlite3.Error:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise


def compare_schema(conn: sqlite3.Connection) -> None:
    """Refuse a file whose schema text differs from that of the migrations: it is damaged."""
    sql = "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name"
    reference = sqlite3.connect(":memory:")
    try:
        reference.executescript("\n".join(migrations()))
        expected = reference.execute(sql).fetchall()
    finally:
        reference.close()
    if conn.execute(sql).fetchall() != expected:
        raise StoreCorrupt("the database is damaged: its schema differs from this version's")
