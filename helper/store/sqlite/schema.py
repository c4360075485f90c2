"""Schema of the database file: version, migrations, and identification of the helper's databases."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cache
from typing import Final, NamedTuple

from helper.errors import StoreCorrupt, StoreForeign
from helper.store.sql_files import FIRST_VERSION, check_version, read_migrations

APPLICATION_ID: Final = 0x73564F54
"""`application_id` in the header of the helper's files: "sVOT"."""
ENCRYPTED_APPLICATION_ID: Final = 0x73564F45
"""The same for files with encrypted witnesses: "sVOE"."""

_UPGRADE_ADVICE: Final = "Start the helper, which upgrades it, or run `svote-helper db migrate`."
_IDENTITY_QUERY: Final = (
    "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema) "
    "FROM pragma_application_id, pragma_user_version"
)
_SCHEMA_QUERY: Final = "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name"


class FileIdentity(NamedTuple):
    """Identifies a database file of the helper.

    Attributes:
        application_id: id of the program that created the file; 0 for a new file or a program that sets none.
        version: schema version.
        objects: number of tables, indexes and triggers.
    """

    application_id: int
    version: int
    objects: int

    def is_new(self) -> bool:
        """Return whether the file is an empty database."""
        return self == (0, 0, 0)

    @property
    def is_encrypted(self) -> bool:
        """Whether witnesses and messages in the file are encrypted."""
        return self.application_id == ENCRYPTED_APPLICATION_ID

    def check(self, name: str, *, latest_only: bool = False) -> None:
        """Refuse a file that this version of the helper cannot use; with `latest_only`, until it is upgraded.

        Raises:
            StoreForeign: it is empty, or belongs to another program or an incompatible version.
            StoreCorrupt: it is damaged: no version of the helper writes these values.
        """
        if self.is_new():
            raise StoreForeign(f"{name} is an empty database", advice="Start the helper: it creates the schema.")
        if self.application_id not in {APPLICATION_ID, ENCRYPTED_APPLICATION_ID}:
            raise StoreForeign(f"{name} is a database of another program")
        if self.version < 1:
            raise StoreCorrupt(f"{name} is damaged: its schema version is {self.version}")
        check_version(self.version, latest_version(), name, upgrade=_UPGRADE_ADVICE if latest_only else "")


@cache
def migrations() -> tuple[str, ...]:
    """Return the migrations of the schema on SQLite."""
    return read_migrations("helper.store.sqlite")


migrations()  # as `sqlite_statements`


def latest_version() -> int:
    """Return the schema version of this helper, stored as `user_version` in the header of a file."""
    return FIRST_VERSION - 1 + len(migrations())


def read_identity(conn: sqlite3.Connection) -> FileIdentity:
    """Return the identity of an open file."""
    return FileIdentity(*conn.execute(_IDENTITY_QUERY).fetchone())


def check_pages(conn: sqlite3.Connection, name: str, pragma: str) -> None:
    """Refuse a file in which `PRAGMA quick_check` or `integrity_check` finds damage."""
    problems = [str(row[0]) for row in conn.execute(f"PRAGMA {pragma}")]
    if problems != ["ok"]:
        raise StoreCorrupt(f"{name} is damaged: {'; '.join(problems)}")


def check_file(conn: sqlite3.Connection, name: str, pragma: str) -> FileIdentity:
    """Refuse a file that is not one of this helper's, or in which the `PRAGMA` (see `check_pages`) finds damage."""
    identity = read_identity(conn)
    identity.check(name)
    check_pages(conn, name, pragma)
    if identity.version == latest_version():
        compare_schema(conn, name)
    return identity


def migrate_schema(conn: sqlite3.Connection, *, is_encrypted: bool = False) -> None:
    """Apply the missing migrations in one transaction, and record whether the file is (to be) encrypted."""
    version = read_identity(conn).version
    if version == latest_version():
        return
    steps = "\n".join(migrations()[max(0, version - FIRST_VERSION + 1) :])
    application_id = ENCRYPTED_APPLICATION_ID if is_encrypted else APPLICATION_ID
    try:
        conn.executescript(
            f"BEGIN IMMEDIATE; {steps}\n"
            f"PRAGMA application_id = {application_id}; PRAGMA user_version = {latest_version()}; COMMIT;"
        )
    except sqlite3.Error:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise


def compare_schema(conn: sqlite3.Connection, name: str) -> None:
    """Refuse a file whose schema text differs from that of the migrations: it is damaged."""
    with closing(sqlite3.connect(":memory:")) as reference:
        reference.executescript("\n".join(migrations()))
        expected = reference.execute(_SCHEMA_QUERY).fetchall()
    if conn.execute(_SCHEMA_QUERY).fetchall() != expected:
        raise StoreCorrupt(f"{name} is damaged: its schema differs from this version's")
