"""The stored columns of shares, messages and round keys, and the cipher of the secret ones.

All databases have the same columns and statements. The fields of a row that nobody with access to the database may read
are sealed together in one column:

column               contents
`shares.witness`     `SEALED_FIELDS`
`shares.tag`         a keyed hash of the nullifier, to find a share by it
`reveals.message`    `tx_hash`, `message`
`round_keys.mac_key` `mac_key`

With a key they are encrypted. Without one, `NullCipher` stores them as they are. A sealed column is bound to its row by
the row check, a keyed hash of all fields before they are sealed: one that was moved to another row fails it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from helper.errors import StoreError
from helper.store.null_cipher import DecryptionError, NullCipher
from helper.store.table_rows import RevealRow, RoundKeyRow, Row, ShareRow
from helper.store.transaction import Params

if TYPE_CHECKING:  # loading the cipher takes time, and most files have no key
    from helper.store.keyring import Keyring

_HASH_BYTES: Final = 32
_CACHED_ROUND_KEYS: Final = 64

# Positions in a `ShareRow`, by name.
_FIRST: Final = ShareRow._fields.index("share_index")
_BYTES: Final = ShareRow._fields.index("shares_hash")
_KIND: Final = ShareRow._fields.index("kind")
_END: Final = ShareRow._fields.index("extra") + 1
_NUMBERS: Final = struct.Struct(">BIBIqq")
_PLAINTEXT: Final = struct.Struct(_NUMBERS.format + "32s512s32s32s32s32s")
"""The fields from `share_index` to `nullifier`."""
_TIMES: Final = struct.Struct(">qq")
_TIMES_AT: Final = struct.calcsize(">BIBI")

SEALED_FIELDS: Final = ShareRow._fields[_FIRST:_END]
"""The fields of a share in `witness`, in the order of the plaintext.

After `_PLAINTEXT` it has, unless both are empty, the length of `kind` in one byte, `kind` and `extra`.
"""
SHARE_COLUMNS: Final = (*ShareRow._fields[1:_FIRST], "tag", "witness", *ShareRow._fields[_END:])
"""The columns of `shares`, in the order in which statements read and write them."""
REVEAL_COLUMNS: Final = tuple(name for name in RevealRow._fields if name != "tx_hash")
"""The same for `reveals`."""

_NULLIFIER: Final = SEALED_FIELDS.index("nullifier")
_DAMAGED: Final = (-1,) * 6 + (b"",) * 6 + ("", b"")
"""Values of `SEALED_FIELDS` with which no row passes its check."""
_SHARE_WIDTH: Final = 1 + len(SHARE_COLUMNS)
_SHARE_AND_REVEAL_WIDTH: Final = _SHARE_WIDTH + len(REVEAL_COLUMNS)
_NO_REVEAL: Final = (None,) * len(RevealRow._fields)
"""The fields of a missing message in a LEFT JOIN."""

EncryptedParams = tuple[Any, ...] | Mapping[str, Any]


def _encode_witness(row: ShareRow) -> bytes:
    """Return the plaintext of the witness of a row. Runs for each accepted share.

    Raises:
        StoreError: a field has a wrong length or is out of range.
    """
    values: Row = row
    kind = row.kind.encode()
    try:
        fixed = b"".join((_NUMBERS.pack(*values[_FIRST:_BYTES]), *values[_BYTES:_KIND]))
        others = b"".join((bytes((len(kind),)), kind, row.extra)) if kind or row.extra else b""
    except (struct.error, ValueError) as error:
        raise _invalid_share(str(error)) from error
    if len(fixed) != _PLAINTEXT.size:
        raise _invalid_share("a field of the share has a wrong length")
    return fixed + others


def _invalid_share(reason: str) -> StoreError:
    return StoreError(f"the schema rejected the change: {reason}", advice="This is a bug in the helper: report it.")


def _decode_witness(plain: bytes) -> Row:
    """Return `SEALED_FIELDS` of a plaintext; `_DAMAGED` if its length is wrong."""
    if len(plain) == _PLAINTEXT.size:
        return (*_PLAINTEXT.unpack(plain), "", b"")
    if len(plain) < _PLAINTEXT.size:
        return _DAMAGED
    others = plain[_PLAINTEXT.size :]
    kind_end = 1 + others[0]
    return (*_PLAINTEXT.unpack_from(plain), others[1:kind_end].decode(errors="replace"), others[kind_end:])


class RowEncryption:
    """Converts statement parameters to stored columns, and rows to what the operations expect.

    Args:
        keyring: the keys of the database, None for a file without a key.

    Attributes:
        keyring: the keys of the database, None for a file without a key.
    """

    def __init__(self, keyring: Keyring | None = None) -> None:
        self.keyring = keyring
        self._cipher: Keyring | NullCipher = NullCipher() if keyring is None else keyring
        # Decrypted for each posted share; there are few rounds.
        self._open_round_key = self._open if keyring is None else lru_cache(_CACHED_ROUND_KEYS)(self._open)
        self._encrypt: dict[str, Callable[[Any], EncryptedParams]] = {
            "add_share": self.encrypt_share,
            "add_reveal": self.encrypt_reveal,
            "add_round_key": self.encrypt_round_key,
            "write_round_keys": self.encrypt_round_key,
        }
        self._decrypt: dict[str, Callable[[Row], Row]] = {
            "share_by_id": self._decrypt_share,
            "live_share": self._decrypt_share,
            "all_shares": self._decrypt_share,
            "page_shares": self._decrypt_share,
            "stored_shares": lambda columns: (*self._decrypt_share(columns[:-2]), *columns[-2:]),
            "reveal": self._decrypt_reveal,
            "page_reveals": self._decrypt_reveal,
            "round_key": self._decrypt_round_key,
            "round_keys": self._decrypt_round_key,
            "page_round_keys": self._decrypt_round_key,
            "unconfirmed": self._decrypt_sent_reveal,
            "sent_reveal": self._decrypt_sent_reveal,
            "list_waiting": self._decrypt_listed_share,
            "list_in_progress": self._decrypt_listed_share,
            "shares_by_prefix": self._decrypt_listed_share,
            "reveal_facts": self._reveal_facts,
        }

    @property
    def is_encrypted(self) -> bool:
        """Whether there is a key."""
        return self.keyring is not None

    def encrypt_params(self, name: str, params: Params) -> EncryptedParams:
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
        return (*row[1:_FIRST], tag, self._cipher.encrypt(_encode_witness(row)), *row[_END:])

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
        tag, sealed = columns[_FIRST], columns[_FIRST + 1]
        witness = _decode_witness(self._open(sealed))
        # The row check covers the nullifier, but not the tag, without which the share is not found by its nullifier.
        if tag not in self._cipher.nullifier_tags(witness[_NULLIFIER]):
            witness = _DAMAGED
        return ShareRow._make((*columns[:_FIRST], *witness, *columns[_FIRST + 2 :]))

    def _hash_and_message(self, sealed: object) -> tuple[bytes, bytes]:
        plain = self._open(sealed)
        return plain[:_HASH_BYTES], plain[_HASH_BYTES:]

    def _decrypt_reveal(self, columns: Row) -> Row:
        share_id, sealed, *others = columns
        if share_id is None:
            return _NO_REVEAL
        tx_hash, message = self._hash_and_message(sealed)
        return (share_id, message, tx_hash, *others)

    def _decrypt_round_key(self, columns: Row) -> Row:
        no, round_id, mac_key, check = columns
        return no, round_id, self._open_round_key(mac_key), check

    def _decrypt_sent_reveal(self, columns: Row) -> Row:
        """Decrypt a row of a share, its message, and two counts."""
        share, reveal = columns[:_SHARE_WIDTH], columns[_SHARE_WIDTH:_SHARE_AND_REVEAL_WIDTH]
        return (*self._decrypt_share(share), *self._decrypt_reveal(reveal), *columns[_SHARE_AND_REVEAL_WIDTH:])

    def _decrypt_listed_share(self, columns: Row) -> Row:
        """Replace the witness of a `ListedShare` with the times that it contains. Nothing else of it is decoded."""
        mac, round_id, state, sealed, *others = columns
        plain = self._open(sealed)
        times = _TIMES.unpack_from(plain, _TIMES_AT) if len(plain) >= _PLAINTEXT.size else (-1, -1)
        return (mac, round_id, state, *times, *others)

    def _reveal_facts(self, columns: Row) -> Row:
        """Replace the message with its transaction hash."""
        sealed, *facts = columns
        return (self._hash_and_message(sealed)[0], *facts)


UNENCRYPTED: Final = RowEncryption()
"""For a database without a key."""
