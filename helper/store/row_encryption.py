"""The stored columns of shares, messages and round keys, and the cipher of the secret ones.

All databases have the same columns and statements. The fields of a row that nobody with access to the database may read
are sealed together in one column:

column               contents
`shares.witness`     the share as posted, the time of its arrival and its nullifier (`WITNESS_FORMATS`)
`shares.tag`         a keyed hash of the nullifier, to find a share by it
`reveals.message`    `tx_hash`, `message`
`round_keys.mac_key` `mac_key`

With a key they are encrypted. Without one, `NullCipher` stores them as they are. A sealed column is bound to its row by
the row check, a keyed hash of all fields before they are sealed: one that was moved to another row fails it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from helper.store.null_cipher import DecryptionError, NullCipher
from helper.store.table_rows import HASH_BYTES, RevealRow, RoundKeyRow, Row, ShareRow
from helper.store.transaction import Params

if TYPE_CHECKING:  # loading the cipher takes time, and most files have no key
    from helper.store.keyring import Keyring

_CACHED_ROUND_KEYS: Final = 64

_WITNESS: Final = ShareRow._fields.index("witness")
SHARE_COLUMNS: Final = (*ShareRow._fields[1:_WITNESS], "tag", *ShareRow._fields[_WITNESS:])
"""The columns of `shares`, in the order in which statements read and write them."""
REVEAL_COLUMNS: Final = tuple(name for name in RevealRow._fields if name != "tx_hash")
"""The same for `reveals`."""

_SHARE_WIDTH: Final = 1 + len(SHARE_COLUMNS)
_SHARE_AND_REVEAL_WIDTH: Final = _SHARE_WIDTH + len(REVEAL_COLUMNS)
_NO_REVEAL: Final = (None,) * len(RevealRow._fields)
"""The fields of a missing message in a LEFT JOIN."""


class RowEncryption:
    """Converts statement parameters to stored columns, and rows to what the operations expect.

    Attributes:
        keyring: the keys of the database, None for a file without a key.
    """

    def __init__(self, keyring: Keyring | None = None) -> None:
        self.keyring = keyring
        self._cipher: Keyring | NullCipher = NullCipher() if keyring is None else keyring
        # Decrypted for each posted share; there are few rounds.
        self._open_round_key = self._open if keyring is None else lru_cache(_CACHED_ROUND_KEYS)(self._open)
        self._encrypt: dict[str, Callable[[Any], Params]] = {
            "add_share": self.encrypt_share,
            "add_reveal": self.encrypt_reveal,
            "add_round_key": self.encrypt_round_key,
            "write_round_keys": self.encrypt_round_key,
        }
        self._decrypt: dict[str, Callable[[Row], Row]] = {
            "share_by_id": self._decrypt_share,
            "live_share": self._decrypt_share,
            "all_shares": self._decrypt_share,
            "page_shares": self._decrypt_sent_reveal,
            "stored_shares": self._decrypt_stored_share,
            "reveal": self._decrypt_reveal,
            "round_key": self._decrypt_round_key,
            "round_keys": self._decrypt_round_key,
            "page_round_keys": self._decrypt_round_key,
            "unconfirmed": self._decrypt_sent_reveal,
            "sent_reveal": self._decrypt_sent_reveal,
            "list_waiting": self._decrypt_stored_share,
            "list_in_progress": self._decrypt_stored_share,
            "shares_by_prefix": self._decrypt_stored_share,
        }

    @property
    def is_encrypted(self) -> bool:
        """Whether there is a key."""
        return self.keyring is not None

    def encrypt_params(self, name: str, params: Params) -> Params:
        """Return the parameters of a statement, with sealed columns."""
        convert = self._encrypt.get(name)
        return params if convert is None else convert(params)

    def decrypt_rows(self, name: str, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of a query as the operations expect them.

        Raises:
            StoreKeyError: a row is encrypted with one of the keyring's `missing_keys`.
        """
        convert = self._decrypt.get(name)
        return list(rows) if convert is None else [convert(row) for row in rows]

    def nullifier_tags(self, nullifier: bytes) -> list[bytes]:
        """Return the possible tags of a nullifier in a share's row, one for each key; new rows have the first."""
        return self._cipher.nullifier_tags(nullifier)

    # ------------------------------------------------------------------ encryption

    def encrypt_share(self, row: ShareRow) -> Row:
        """Return the values of `SHARE_COLUMNS`."""
        tag = self._cipher.nullifier_tags(row.nullifier)[0]
        return (*row[1:_WITNESS], tag, self._cipher.encrypt(row.witness), *row[_WITNESS + 1 :])

    def encrypt_reveal(self, columns: Row) -> Row:
        """Return the values of `REVEAL_COLUMNS`."""
        share_id, message, tx_hash, *others = columns
        return (share_id, self._cipher.encrypt(tx_hash + message), *others)

    def encrypt_round_key(self, columns: Row) -> RoundKeyRow:
        """Return the values of the columns of `round_keys`."""
        row = RoundKeyRow(*columns)
        return row._replace(mac_key=self._cipher.encrypt(row.mac_key))

    # ------------------------------------------------------------------ decryption

    def _open(self, sealed: object) -> bytes:
        """Return the plaintext of a column; empty if it is damaged. A damaged column of a file may have any type."""
        if not isinstance(sealed, bytes):
            return b""
        try:
            return self._cipher.decrypt(sealed)
        except DecryptionError:
            return b""

    def _decrypt_share(self, columns: Row) -> ShareRow:
        tag, sealed, *others = columns[_WITNESS:]
        row = ShareRow._make((*columns[:_WITNESS], self._open(sealed), *others))
        # The row check covers the nullifier, but not the tag, without which the share is not found by its nullifier.
        return row if tag in self._cipher.nullifier_tags(row.nullifier) else row._replace(witness=b"")

    def _decrypt_reveal(self, columns: Row) -> Row:
        share_id, sealed, *others = columns
        if share_id is None:
            return _NO_REVEAL
        plain = self._open(sealed)
        return (share_id, plain[HASH_BYTES:], plain[:HASH_BYTES], *others)

    def _decrypt_round_key(self, columns: Row) -> Row:
        no, round_id, mac_key, check = columns
        return no, round_id, self._open_round_key(mac_key), check

    def _decrypt_sent_reveal(self, columns: Row) -> Row:
        """Decrypt a row of a share, its message, and other columns."""
        share, reveal = columns[:_SHARE_WIDTH], columns[_SHARE_WIDTH:_SHARE_AND_REVEAL_WIDTH]
        return (*self._decrypt_share(share), *self._decrypt_reveal(reveal), *columns[_SHARE_AND_REVEAL_WIDTH:])

    def _decrypt_stored_share(self, columns: Row) -> Row:
        """Decrypt a row with the columns of a `StoredShare`, and other columns."""
        is_quarantined, *others = columns[_SHARE_WIDTH:]
        return (self._decrypt_share(columns[:_SHARE_WIDTH]), bool(is_quarantined), *others)


UNENCRYPTED: Final = RowEncryption()
"""For a database without a key."""
