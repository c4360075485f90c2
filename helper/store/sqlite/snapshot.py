"""Copies the database to memory while the helper is running, and checks the copy.

The copy is made in one read transaction of a connection that can neither write nor checkpoint. The helper cannot
truncate the WAL during this transaction. To keep it short, all checks are made on the copy.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from helper.clock import Clock
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sql_files import sqlite_statements
from helper.store.sqlite.errors import not_a_database, translate
from helper.store.sqlite.file_keys import open_encryption, read_shares
from helper.store.sqlite.reader import connect_read_only, require_readable
from helper.store.sqlite.schema import check_pages, compare_schema, latest_version, read_identity
from helper.store.table_rows import ROW_CHECK_KEY, RUN_KEY, is_sound, read_key

_VERSIONS: Final = slice(18, 20)
_ROLLBACK_JOURNAL: Final = b"\x01\x01"
"""Bytes 18 and 19 of an image, so that it can be opened without a WAL. The helper enables the WAL again."""
_MAX_PROBLEMS: Final = 20


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of an image.

    Attributes:
        schema: the version of its schema.
        live: number of shares with a witness.
        moved: number of these that are marked as moved to another machine, and are therefore not revealed.
        confirmed: number of confirmed shares, of which only tombstones remain.
        damaged: number of live rows that fail their check; the helper quarantines them.
        encrypted: whether witnesses and messages are encrypted in the file.
    """

    schema: int
    live: int
    moved: int
    confirmed: int
    damaged: int
    encrypted: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checked copy.

    Attributes:
        image: the bytes of a database file. Unless it is encrypted, they contain witnesses; never write them to disk
            in plaintext.
        contents: its contents.
        read_seconds: duration of the read transaction.
    """

    image: bytes = field(repr=False)
    contents: Contents
    read_seconds: float


def take_snapshot(path: Path, clock: Clock, encryption: RowEncryption = UNENCRYPTED) -> Snapshot:
    """Copy the database and check the copy. Needs memory of up to three times the file's size.

    Args:
        path: the database file.
        clock: measures the read transaction.
        encryption: made from the key file.

    Raises:
        StoreKeyError: it is encrypted, and a key that it needs is missing.
        StoreForeign: it is not a database of this helper, or was written by a newer version.
        StoreCorrupt: it is damaged.
        StoreDisplaced: it has a second name.
        StoreError: it cannot be read.
    """
    require_readable(path)
    try:
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
            began = clock.monotonic()
            _copy_database(path, copy)
            seconds = clock.monotonic() - began
            contents = _read_contents(copy, str(path), encryption)
            # The write-ahead log next to the database does not belong to the copy, which is a different file.
            copy.execute("DELETE FROM meta WHERE key = ?", (RUN_KEY,))
            image = copy.serialize()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise translate(error, str(path)) from error
    view = memoryview(image)
    image = b"".join((view[: _VERSIONS.start], _ROLLBACK_JOURNAL, view[_VERSIONS.stop :]))
    return Snapshot(image, contents, seconds)


def _copy_database(path: Path, copy: sqlite3.Connection) -> None:
    with closing(connect_read_only(path)) as conn:
        # In an explicit transaction, a busy database is an error after the timeout; backup() would retry forever.
        conn.execute("BEGIN")
        conn.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        conn.backup(copy)
        conn.execute("ROLLBACK")


def check_image(image: bytes, name: str, encryption: RowEncryption = UNENCRYPTED) -> Contents:
    """Check an image from its header to its rows.

    Args:
        image: the bytes of a database file.
        name: its name in error messages.
        encryption: made from the key file.

    Returns:
        Its contents.

    Raises:
        StoreKeyError: it is encrypted, and a key that it needs is missing.
        StoreForeign: it is not a database of this helper, or was written by a newer version.
        StoreCorrupt: it is damaged.
    """
    if not image:
        raise not_a_database(name)
    try:
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
            conn.deserialize(image)
            return _read_contents(conn, name, encryption)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise translate(error, name) from error


def _read_contents(conn: sqlite3.Connection, name: str, encryption: RowEncryption) -> Contents:
    conn.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
    identity = read_identity(conn)
    identity.check(name)
    check_pages(conn, name, f"integrity_check({_MAX_PROBLEMS})")
    if identity.version == latest_version():
        compare_schema(conn, name)
    stored = open_encryption(conn, encryption, name)
    statements = sqlite_statements()
    key = read_key(conn.execute(statements["get_meta"], (ROW_CHECK_KEY,)).fetchall(), ROW_CHECK_KEY, name)
    aside = {row[0] for row in conn.execute(statements["damaged"])}
    live = moved = damaged = 0
    for share in read_shares(conn, stored):
        live += 1
        is_damaged = share.id in aside or not is_sound(key, share)
        damaged += is_damaged
        moved += not is_damaged and share.is_moved
    ((confirmed,),) = conn.execute(statements["tombstone_count"]).fetchall()
    return Contents(identity.version, live, moved, confirmed, damaged, stored.is_encrypted)
