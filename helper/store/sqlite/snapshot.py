"""Copies the database to a private file while the helper is running, and checks the copy.

The copy is made in one read transaction of a connection that can neither write nor checkpoint. The helper cannot
truncate the WAL during this transaction. To keep it short, all checks are made on the copy.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from helper.clock import Clock
from helper.core.json_records import fact
from helper.errors import StoreFull
from helper.runtime.process_security import acting_as_owner
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sql_files import sqlite_statements
from helper.store.sqlite.displacement import file_size, wal_path
from helper.store.sqlite.errors import not_a_database, translating
from helper.store.sqlite.file_lock import erase_content, temporary_path
from helper.store.sqlite.reader import connect_read_only, require_readable
from helper.store.sqlite.schema import check_file, open_encryption
from helper.store.table_rows import ROW_CHECK_KEY, RUN_KEY, ShareRow, is_sound, read_key

_VERSIONS_AT: Final = 18
_ROLLBACK_JOURNAL: Final = b"\x01\x01"
"""Bytes 18 and 19 of a copy, so that it can be opened without a WAL. The helper enables the WAL again."""
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a copy there has no name and is private
_MAX_PROBLEMS: Final = 20


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of an image."""

    schema: int = fact("The version of its schema.")
    live: int = fact("Number of shares with a witness.")
    moved: int = fact("Number of these that are marked as moved to another machine, and are therefore not revealed.")
    confirmed: int = fact("Number of confirmed shares, of which only tombstones remain.")
    damaged: int = fact("Number of live rows that fail their check; the helper quarantines them.")
    encrypted: bool = fact("Whether witnesses and messages are encrypted in the file.")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checked copy.

    Attributes:
        file: the content of a database file. Unless it is encrypted, it contains witnesses.
        size: in bytes.
        read_seconds: duration of the read transaction.
    """

    file: BinaryIO
    size: int
    contents: Contents
    read_seconds: float


@contextmanager
def take_snapshot(path: Path, clock: Clock, encryption: RowEncryption = UNENCRYPTED) -> Iterator[Snapshot]:
    """Copy the database to a private file, and check the copy. The file is erased at the end.

    Root copies as the owner of the database.

    Raises:
        StoreKeyError: it is encrypted, and a key that it needs is missing.
        StoreForeign: it is not a database of this helper, or was written by a newer version.
        StoreCorrupt: it is damaged.
        StoreDisplaced: it has a second name.
        StoreFull: there is no space for the copy.
        StoreError: it cannot be read.
    """
    with ExitStack() as stack:
        with translating(str(path)), acting_as_owner(path) as real:
            require_readable(real)
            file, target, copy = _create_copy(real, stack)
            began = clock.monotonic()
            _copy_database(real, target)
            seconds = clock.monotonic() - began
            os.pwrite(file.fileno(), _ROLLBACK_JOURNAL, _VERSIONS_AT)
            contents = _read_contents(copy, str(path), encryption)
            # The write-ahead log next to the database does not belong to the copy, which is a different file.
            copy.execute("DELETE FROM meta WHERE key = ?", (RUN_KEY,))
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        yield Snapshot(file, size, contents, seconds)


def read_contents(path: Path, clock: Clock, encryption: RowEncryption = UNENCRYPTED) -> Contents:
    """Check a copy of the database and return its contents; see `take_snapshot`."""
    with take_snapshot(path, clock, encryption) as snapshot:
        return snapshot.contents


def _create_copy(database: Path, stack: ExitStack) -> tuple[BinaryIO, sqlite3.Connection, sqlite3.Connection]:
    """Return an empty file that has no name, and two connections to it. The stack erases and closes them.

    A process that is killed leaves nothing of it. Two connections, because the header of a copy has to be changed
    before SQLite can read it, and a file without a name cannot be opened.
    """
    path = _choose_directory(database) / temporary_path(database).name
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    file = stack.enter_context(os.fdopen(fd, "r+b"))
    stack.callback(_erase, database, file)
    try:
        target, copy = (stack.enter_context(closing(sqlite3.connect(path, isolation_level=None))) for _ in range(2))
    finally:
        path.unlink()
    for conn in (target, copy):
        conn.execute("PRAGMA journal_mode = OFF")  # a journal would have a name
        conn.execute("PRAGMA synchronous = OFF")
    return file, target, copy


def _erase(database: Path, file: BinaryIO) -> None:
    with acting_as_owner(database):
        erase_content(file)


def _choose_directory(database: Path) -> Path:
    """Return a directory of this machine for a copy: that of the database, unless its disk is full or read-only.

    The copy is never written to the disk of a backup, which may be removable or belong to another machine.

    Raises:
        StoreFull: neither disk nor memory have enough space.
    """
    size = file_size(database) + file_size(wal_path(database))
    for directory in (database.parent, _SHARED_MEMORY):
        with suppress(OSError):
            disk = os.statvfs(directory)
            # A running helper needs the rest.
            if os.access(directory, os.W_OK, effective_ids=True) and disk.f_bavail * disk.f_frsize >= 2 * size:
                return directory
    raise StoreFull(
        f"no space for a copy of {database}",
        advice=f"The copy needs {2 * size} free bytes in {database.parent} or {_SHARED_MEMORY}.",
    )


def _copy_database(path: Path, copy: sqlite3.Connection) -> None:
    with closing(connect_read_only(path)) as conn:
        # In an explicit transaction, a busy database is an error after the timeout; backup() would retry forever.
        conn.execute("BEGIN")
        conn.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        conn.backup(copy)
        conn.execute("ROLLBACK")


def check_image(image: bytes, name: str, encryption: RowEncryption = UNENCRYPTED) -> Contents:
    """Check an image (the bytes of a database file) from its header to its rows, and return its contents.

    Raises:
        StoreKeyError: it is encrypted, and a key that it needs is missing.
        StoreForeign: it is not a database of this helper, or was written by a newer version.
        StoreCorrupt: it is damaged.
    """
    if not image:
        raise not_a_database(name)
    with translating(name), closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
        conn.deserialize(image)
        return _read_contents(conn, name, encryption)


def _read_contents(conn: sqlite3.Connection, name: str, encryption: RowEncryption) -> Contents:
    conn.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
    identity = check_file(conn, name, f"integrity_check({_MAX_PROBLEMS})")
    stored = open_encryption(conn, encryption, name)
    statements = sqlite_statements()
    key = read_key(conn.execute(statements["get_meta"], (ROW_CHECK_KEY,)).fetchall(), ROW_CHECK_KEY, name)
    aside = {row[0] for row in conn.execute(statements["damaged"])}
    live = moved = damaged = 0
    for row in conn.execute(statements["all_shares"]):
        (columns,) = stored.decrypt_rows("all_shares", [row])
        share = ShareRow(*columns)
        live += 1
        is_damaged = share.id in aside or not is_sound(key, share)
        damaged += is_damaged
        moved += not is_damaged and share.is_moved
    ((confirmed,),) = conn.execute(statements["tombstone_count"]).fetchall()
    return Contents(identity.version, live, moved, confirmed, damaged, stored.is_encrypted)
