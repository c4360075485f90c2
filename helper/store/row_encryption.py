"""Encrypts secret columns in statement parameters and decrypts them in rows.

Operations and readers use the same named statements on all databases. This module defines, by statement name, which
columns of an encrypted database differ from those of an unencrypted SQLite file.

A ciphertext is bound to its row by the row check, a keyed hash of all decrypted columns: a ciphertext that was moved to
another row fails it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

from helper.errors import StoreKeyError
from helper.store.keyring import KEY_ID_BYTES, DecryptionError, Keyring
from helper.store.share_listing import ListedShare
from helper.store.table_rows import RevealRow, RoundKeyRow, Row, ShareRow
from helper.store.transaction import Params

_NUMBERS: Final = struct.Struct(">BIBIqq")
_NUMBER_COUNT: Final = 6
_FIXED_COUNT: Final = 12
"""Fields of `Witness` with a fixed length."""
_PLAINTEXT: Final = struct.Struct(_NUMBERS.format + "32s512s32s32s32s32s")
_HASH_BYTES: Final = 32

_CACHED_ROUND_KEYS: Final = 64

EncryptedParams = tuple[Any, ...] | Mapping[str, Any]


class Witness(NamedTuple):
    """Columns of a share that are encrypted together.

    Damaged columns are decrypted as -1 or empty, so that the row check fails. The plaintext has the fields in this
    order: as in `_PLAINTEXT`, then, unless both are empty, the length of `kind` in one byte, `kind` and `extra`.
    """

    share_index: int = -1
    proposal_id: int = -1
    vote_decision: int = -1
    tree_position: int = -1
    submit_at: int = -1
    received_ms: int = -1
    shares_hash: bytes = b""
    share_comms: bytes = b""
    primary_blind: bytes = b""
    c1: bytes = b""
    c2: bytes = b""
    nullifier: bytes = b""
    kind: str = ""
    extra: bytes = b""

    @classmethod
    def decode(cls, plain: bytes) -> Witness:
        """Return the witness of a plaintext; the defaults if its length is wrong."""
        fixed, others = plain[: _PLAINTEXT.size], plain[_PLAINTEXT.size :]
        if len(fixed) != _PLAINTEXT.size:
            return cls()
        if not others:
            return cls(*_PLAINTEXT.unpack(fixed))
        kind_end = 1 + others[0]
        kind = others[1:kind_end].decode(errors="replace")
        return cls._make((*_PLAINTEXT.unpack(fixed), kind, others[kind_end:]))


_WITNESS_START: Final = ShareRow._fields.index("share_index")
_WITNESS_END: Final = _WITNESS_START + len(Witness._fields)
"""In `shares`, the columns `tag` and `witness` take the place of these columns of `ShareRow`."""
_read_numbers: Final = itemgetter(*map(ShareRow._fields.index, Witness._fields[:_NUMBER_COUNT]))
_read_fixed_bytes: Final = itemgetter(*map(ShareRow._fields.index, Witness._fields[_NUMBER_COUNT:_FIXED_COUNT]))
_witness_in_row_order: Final = attrgetter(*ShareRow._fields[_WITNESS_START:_WITNESS_END])
_SHARE_COLUMNS: Final = len(ShareRow._fields) - len(Witness._fields) + 2
_SHARE_AND_REVEAL_COLUMNS: Final = _SHARE_COLUMNS + len(RevealRow._fields) - 1
_NO_REVEAL: Final = (None,) * len(RevealRow._fields)
"""The columns of a missing message in a LEFT JOIN."""


def _encode_witness(row: ShareRow) -> bytes:
    """Return the plaintext of the witness of a row. Runs for each accepted share."""
    fixed = b"".join((_NUMBERS.pack(*_read_numbers(row)), *_read_fixed_bytes(row)))
    if not row.kind and not row.extra:
        return fixed
    kind = row.kind.encode()
    return b"".join((fixed, bytes((len(kind),)), kind, row.extra))


class RowEncryption:
    """Converts statement parameters to encrypted columns, and rows to what the operations expect.

    Args:
        keyring: the keys of the database.

    Attributes:
        keyring: the keys of the database.
        missing_keys: identifiers of keys that rows may need and that the keyring lacks. Decrypting such a row is an
            error; a row with any other unknown key identifier is damaged.
    """

    def __init__(self, keyring: Keyring) -> None:
        self.keyring = keyring
        self.missing_keys: frozenset[bytes] = frozenset()
        # Read for each posted share; there are few rounds.
        self._open_round_key = lru_cache(_CACHED_ROUND_KEYS)(self._open)
        self._encrypt: dict[str, Callable[[Any], EncryptedParams]] = {
            "add_share": lambda columns: self.encrypt_share(ShareRow(b"", *columns)),
            "add_reveal": self._encrypted_reveal,
            "add_round_key": self._encrypted_round_key,
        }
        self._decrypt: dict[str, Callable[[Row], Row]] = {
            "share_by_id": self._decrypt_share,
            "live_share": self._decrypt_share,
            "all_shares": self._decrypt_share,
            "stored_shares": lambda columns: (*self._decrypt_share(columns[:-2]), *columns[-2:]),
            "reveal": self._decrypt_reveal,
            "round_key": self._decrypt_round_key,
            "round_keys": self._decrypt_round_key,
            "unconfirmed": self._decrypt_sent_reveal,
            "sent_reveal": self._decrypt_sent_reveal,
            "list_waiting": self._decrypt_list_entry,
            "list_in_progress": self._decrypt_list_entry,
            "shares_by_prefix": self._decrypt_list_entry,
            "reveal_facts": self._reveal_facts,
        }

    def encrypt_params(self, name: str, params: Params) -> EncryptedParams:
        """Return the parameters of a statement, with encrypted columns."""
        convert = self._encrypt.get(name)
        return params if convert is None else convert(params)

    def decrypt_rows(self, name: str, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of a query as an unencrypted SQLite file returns them.

        Raises:
            StoreKeyError: a row is encrypted with one of `missing_keys`.
        """
        convert = self._decrypt.get(name)
        return list(rows) if convert is None else [convert(row) for row in rows]

    def nullifier_tags(self, nullifier: bytes) -> list[bytes]:
        """Return the possible keyed hashes of a nullifier in a share's row."""
        return self.keyring.nullifier_tags(nullifier)

    # ------------------------------------------------------------------ encryption

    def encrypt_share(self, row: ShareRow) -> Row:
        """Return the values for the columns of `shares`."""
        tag = self.keyring.nullifier_tag(row.nullifier)
        witness = self.keyring.encrypt(_encode_witness(row))
        return (*row[1:_WITNESS_START], tag, witness, *row[_WITNESS_END:])

    def _encrypted_reveal(self, columns: Row) -> Row:
        """Return the values for the columns of `reveals`, whose message begins with the transaction hash."""
        share_id, message, tx_hash, *others = columns
        return (share_id, self.keyring.encrypt(tx_hash + message), *others)

    def _encrypted_round_key(self, columns: Row) -> RoundKeyRow:
        row = RoundKeyRow(*columns)
        return row._replace(mac_key=self.keyring.encrypt(row.mac_key))

    # ------------------------------------------------------------------ decryption

    def _open(self, sealed: object) -> bytes:
        """Return the plaintext of a column; empty if it is damaged. A damaged column of a file may have any type."""
        if not isinstance(sealed, bytes):
            return b""
        try:
            return self.keyring.decrypt(sealed)
        except DecryptionError:
            return b""
        except StoreKeyError:
            if sealed[:KEY_ID_BYTES] in self.missing_keys:
                raise
            return b""

    def _decrypt_share(self, columns: Row) -> ShareRow:
        witness = Witness.decode(self._open(columns[_WITNESS_START + 1]))
        others = columns[_WITNESS_START + 2 :]
        return ShareRow._make((*columns[:_WITNESS_START], *_witness_in_row_order(witness), *others))

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
        share, reveal = columns[:_SHARE_COLUMNS], columns[_SHARE_COLUMNS:_SHARE_AND_REVEAL_COLUMNS]
        return (*self._decrypt_share(share), *self._decrypt_reveal(reveal), *columns[_SHARE_AND_REVEAL_COLUMNS:])

    def _decrypt_list_entry(self, columns: Row) -> ListedShare:
        """Decrypt a row of a listing, whose last column is the witness."""
        *listed, sealed = columns
        witness = Witness.decode(self._open(sealed))
        return ListedShare(*listed)._replace(submit_at=witness.submit_at, received_ms=witness.received_ms)

    def _reveal_facts(self, columns: Row) -> Row:
        """Replace the message with its transaction hash."""
        sealed, *facts = columns
        return (self._hash_and_message(sealed)[0], *facts)
