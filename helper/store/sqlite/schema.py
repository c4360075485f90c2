"""Identity of a database file: whose it is, its schema version and migrations, and the keys that it needs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from helper.errors import StoreCorrupt, StoreForeign, StoreKeyError
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sql_files import FIRST_VERSION, check_version, read_migrations, sqlite_statements
from helper.store.table_rows import KEY_CHECK, KEYS_IN_USE, make_meta_row, read_meta_value

if TYPE_CHECKING:  # loading the cipher takes time, and an unencrypted file does not need it
    from helper.store.keyring import Keyring

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


_KEY_ADVICE: Final = (
    "Set [store] key_file to the key file with which the database was written (or SVOTE_HELPER_STORE_KEY_FILE for one "
    "command). Without its keys, the unconfirmed shares in it are lost: move the database away to begin with an empty "
    "queue."
)


def refuse_unencrypted(stored: RowEncryption, configured: RowEncryption, name: str) -> None:
    """Refuse to write unencrypted witnesses to a file although a key is configured.

    Raises:
        StoreKeyError: the file is not encrypted, and there is a key.
    """
    if configured.is_encrypted and not stored.is_encrypted:
        raise StoreKeyError(
            f"{name} is not encrypted, but [store] key_file is set",
            advice="Encrypt it, while the helper is stopped: `svote-helper db encrypt`. Or remove [store] key_file.",
        )


def open_encryption(conn: sqlite3.Connection, configured: RowEncryption, name: str) -> RowEncryption:
    """Return the encryption of a file after checking its keys; a new file is encrypted if there is a key.

    The connection is to a database of the helper, or to an empty file. Decrypts no row and writes nothing.

    Raises:
        StoreKeyError: the file is encrypted, and a key that it needs is missing.
        StoreCorrupt: its key check value is damaged.
    """
    identity = read_identity(conn)
    if identity.is_new():
        return configured
    if not identity.is_encrypted:
        return UNENCRYPTED
    if configured.keyring is None:
        raise StoreKeyError(f"{name} is encrypted, and [store] key_file is not set", advice=_KEY_ADVICE)
    for key in _find_missing_keys(conn, configured.keyring, name):
        if conn.execute(sqlite_statements()["uses_key"], {"id": key}).fetchone() == (1,):
            raise _key_missing_error(name)
    return configured


def _find_missing_keys(conn: sqlite3.Connection, keyring: Keyring, name: str) -> list[bytes]:
    """Return the identifiers of keys that rows may need and that the keyring lacks."""
    key_check, in_use = (
        conn.execute(sqlite_statements()["get_meta"], (key,)).fetchall() for key in (KEY_CHECK, KEYS_IN_USE)
    )
    if not key_check and not conn.execute(sqlite_statements()["all_round_ids"]).fetchall():
        return []  # the process that created the file was killed before it had written the key check value
    try:
        keyring.check_probe(read_meta_value(key_check))
    except StoreKeyError:
        raise _key_missing_error(name) from None
    text = read_meta_value(in_use)
    if text is None:
        raise StoreCorrupt(f"{name} is damaged: {KEYS_IN_USE} failed its check")
    return [key for key in map(bytes.fromhex, text.split()) if key not in keyring.key_ids]


def _key_missing_error(name: str) -> StoreKeyError:
    return StoreKeyError(f"{name} is encrypted with a key that is not in the key file", advice=_KEY_ADVICE)


def record_keys(conn: sqlite3.Connection, keyring: Keyring, *, only_first: bool = False) -> None:
    """Write the key check value, and the identifiers of the keys that rows may need, to an encrypted file.

    Keys that the key file lacks are removed: no row needs them (see `open_encryption`). With `only_first`, all rows are
    encrypted with the first key.
    """
    first = keyring.key_ids[0]
    in_use = read_meta_value(conn.execute(sqlite_statements()["get_meta"], (KEYS_IN_USE,)).fetchall()) or ""
    stored = [] if only_first else [bytes.fromhex(text) for text in in_use.split()]
    ids = [first, *(key for key in stored if key != first and key in keyring.key_ids)]
    if only_first or ids != stored:
        conn.execute("SAVEPOINT record_keys")  # a transaction, unless one is open
        for key, value in ((KEYS_IN_USE, " ".join(key.hex() for key in ids)), (KEY_CHECK, keyring.make_probe())):
            conn.execute(sqlite_statements()["set_meta"], make_meta_row(key, value))
        conn.execute("RELEASE record_keys")
