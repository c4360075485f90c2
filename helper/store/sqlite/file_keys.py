"""Which keys a database file needs: checks the key file against it, and records the keys in it."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from helper.errors import StoreCorrupt, StoreKeyError
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sql_files import sqlite_statements
from helper.store.sqlite.schema import read_identity
from helper.store.table_rows import KEY_CHECK, KEYS_IN_USE, make_meta_row, read_meta_value

if TYPE_CHECKING:  # loading the cipher takes time, and an unencrypted file does not need it
    from helper.store.keyring import Keyring

_KEY_ADVICE = (
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
