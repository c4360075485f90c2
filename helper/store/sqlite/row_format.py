"""How a database file stores witnesses and messages: as they are, or encrypted."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import TYPE_CHECKING

from helper.errors import StoreCorrupt, StoreKeyError
from helper.store.meta import KEY_CHECK, KEYS_IN_USE, make_meta_row, read_meta_value
from helper.store.sql_files import encrypted_sqlite_statements, sqlite_statements
from helper.store.sqlite.schema import FileIdentity, read_identity
from helper.store.table_rows import Row, ShareRow
from helper.store.transaction import Params

if TYPE_CHECKING:  # loading the cipher takes time, and an unencrypted file does not need it
    from helper.store.keyring import Keyring
    from helper.store.row_encryption import RowEncryption

_KEY_ADVICE = (
    "Set [store] key_file to the key file with which the database was written (or SVOTE_HELPER_STORE_KEY_FILE for one "
    "command). Without its keys, the unconfirmed shares in it are lost: move the database away to begin with an empty "
    "queue."
)


class RowFormat:
    """The statements of a database file, and the conversion of their parameters and rows.

    Args:
        encryption: encrypts and decrypts columns; None for an unencrypted file.
    """

    def __init__(self, encryption: RowEncryption | None = None) -> None:
        self.encryption = encryption
        self._statements = sqlite_statements() if encryption is None else encrypted_sqlite_statements()

    @property
    def is_encrypted(self) -> bool:
        """Whether witnesses and messages are encrypted."""
        return self.encryption is not None

    def statement(self, name: str) -> str:
        """Return a named statement."""
        return self._statements[name]

    def encrypt_params(self, name: str, params: Params) -> Params:
        """Return the parameters of a statement for this file."""
        return params if self.encryption is None else self.encryption.encrypt_params(name, params)

    def decrypt_rows(self, name: str, rows: list[Row]) -> list[Row]:
        """Return the rows of a query as an unencrypted file returns them."""
        return rows if self.encryption is None else self.encryption.decrypt_rows(name, rows)

    def read_shares(self, conn: sqlite3.Connection) -> Iterator[ShareRow]:
        """Yield all live shares, damaged or not, one at a time."""
        for row in conn.execute(self.statement("all_shares")):
            (columns,) = self.decrypt_rows("all_shares", [row])
            yield ShareRow(*columns)


UNENCRYPTED = RowFormat()


def select_row_format(identity: FileIdentity, encryption: RowEncryption | None, name: str) -> RowFormat:
    """Return the format of a file; a new file is encrypted if there is a key.

    Args:
        identity: the file's identity.
        encryption: made from the key file, None without a key file.
        name: name of the file in messages.

    Raises:
        StoreKeyError: the file is encrypted, and there is no key.
    """
    if identity.is_encrypted and encryption is None:
        raise StoreKeyError(f"{name} is encrypted, and [store] key_file is not set", advice=_KEY_ADVICE)
    return RowFormat(encryption) if identity.is_encrypted or identity.is_new() else UNENCRYPTED


def refuse_unencrypted(row_format: RowFormat, encryption: RowEncryption | None, name: str) -> None:
    """Refuse to write unencrypted witnesses to a file although a key is configured.

    Raises:
        StoreKeyError: the file is not encrypted, and there is a key.
    """
    if encryption is not None and not row_format.is_encrypted:
        raise StoreKeyError(
            f"{name} is not encrypted, but [store] key_file is set",
            advice="Encrypt it, while the helper is stopped: `svote-helper db encrypt`. Or remove [store] key_file.",
        )


def open_row_format(conn: sqlite3.Connection, encryption: RowEncryption | None, name: str) -> RowFormat:
    """Return the format of an existing file after checking its keys. Decrypts no row and writes nothing.

    Args:
        conn: a connection to a database of the helper.
        encryption: made from the key file, None without a key file.
        name: name of the file in messages.

    Raises:
        StoreKeyError: the file is encrypted, and a key that it needs is missing.
        StoreCorrupt: its key check value is damaged.
    """
    identity = read_identity(conn)
    row_format = select_row_format(identity, encryption, name)
    if row_format.encryption is not None and not identity.is_new():
        for key in _find_missing_keys(conn, row_format, row_format.encryption.keyring, name):
            if conn.execute(row_format.statement("uses_key"), {"id": key}).fetchone() == (1,):
                raise _key_missing_error(name)
    return row_format


def _find_missing_keys(conn: sqlite3.Connection, row_format: RowFormat, keyring: Keyring, name: str) -> list[bytes]:
    """Return the identifiers of keys that rows may need and that the keyring lacks."""
    key_check, in_use = (
        conn.execute(row_format.statement("get_meta"), (key,)).fetchall() for key in (KEY_CHECK, KEYS_IN_USE)
    )
    if not key_check and not conn.execute(row_format.statement("all_round_ids")).fetchall():
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


def record_keys(conn: sqlite3.Connection, row_format: RowFormat, *, only_first: bool = False) -> None:
    """Write the key check value, and the identifiers of the keys that rows may need, to an encrypted file.

    Keys that the key file lacks are removed: no row needs them (see `open_row_format`).

    Args:
        conn: the writing connection.
        row_format: the file's format; nothing is written to an unencrypted file.
        only_first: whether all rows are encrypted with the first key.
    """
    if row_format.encryption is None:
        return
    keyring = row_format.encryption.keyring
    first = keyring.key_ids[0]
    in_use = read_meta_value(conn.execute(row_format.statement("get_meta"), (KEYS_IN_USE,)).fetchall()) or ""
    stored = [] if only_first else [bytes.fromhex(text) for text in in_use.split()]
    ids = [first, *(key for key in stored if key != first and key in keyring.key_ids)]
    if only_first or ids != stored:
        conn.execute("SAVEPOINT record_keys")  # a transaction, unless one is open
        for key, value in ((KEYS_IN_USE, " ".join(key.hex() for key in ids)), (KEY_CHECK, keyring.make_probe())):
            conn.execute(row_format.statement("set_meta"), make_meta_row(key, value))
        conn.execute("RELEASE record_keys")
