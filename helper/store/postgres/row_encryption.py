"""Encrypts secret columns in statement parameters and decrypts them in rows.

Operations and readers use the same named statements on both databases. This module maps, by statement name, the columns
that differ from SQLite's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from helper.store.postgres.keyring import DecryptionError, Keyring
from helper.store.records import RevealRow, RoundKeyRow, ShareRow
from helper.store.share_listing import ListedShare
from helper.store.transaction import Params

_NUMBERS: Final = struct.Struct(">BIBIqq")
_NUMBER_COUNT: Final = 6
_BLOB_BYTES: Final = (32, 512, 32, 32, 32, 32)
_HASH_BYTES: Final = 32

Row = tuple[Any, ...]
EncryptedParams = tuple[Any, ...] | Mapping[str, Any]


class Witness(NamedTuple):
    """Columns of a share that are encrypted together.

    Damaged columns are decrypted as -1 or empty, so that the row check fails. The plaintext has the fields in this
    order: `_NUMBERS`, then byte strings of `_BLOB_BYTES`.
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

    @classmethod
    def of(cls, row: ShareRow) -> Witness:
        """Return the witness of a share."""
        return cls._make(_read_witness(row))

    def encode(self) -> bytes:
        """Return the plaintext."""
        return b"".join((_NUMBERS.pack(*self[:_NUMBER_COUNT]), *self[_NUMBER_COUNT:]))

    @classmethod
    def decode(cls, plain: bytes) -> Witness:
        """Return the witness of a plaintext; the defaults if its length is wrong."""
        if len(plain) != _NUMBERS.size + sum(_BLOB_BYTES):
            return cls()
        blobs, start = [], _NUMBERS.size
        for length in _BLOB_BYTES:
            blobs.append(plain[start : start + length])
            start += length
        return cls(*_NUMBERS.unpack_from(plain), *blobs)


_read_witness: Final = attrgetter(*Witness._fields)


class EncryptedShare(NamedTuple):
    """A live share: its round id, then the columns of `shares` in table order."""

    round_id: bytes
    id: int
    round_no: int
    mac: bytes
    tag: bytes
    witness: bytes
    rank: int
    state: int
    due_ms: int
    attempts: int
    crashes: int
    proved_height: int | None
    stage: str
    note: str
    row_check: bytes


class EncryptedReveal(NamedTuple):
    """A stored message: the columns of `reveals` in table order. `message` begins with the transaction hash."""

    share_id: int
    message: bytes
    anchor_height: int
    circuit: str
    height: int
    sends: int
    first_sent_height: int | None
    last_sent_height: int | None
    last_endpoint: str | None
    last_outcome: str | None
    row_check: bytes


_SHARE_COLUMNS: Final = len(EncryptedShare._fields)
_SHARE_AND_REVEAL_COLUMNS: Final = _SHARE_COLUMNS + len(EncryptedReveal._fields)
_NO_REVEAL: Final = (None,) * len(RevealRow._fields)
"""The columns of a missing message in a LEFT JOIN."""


class RowEncryption:
    """Converts statement parameters to PostgreSQL columns, and rows to what the operations expect."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._encrypt: dict[str, Callable[[Any], EncryptedParams]] = {
            "add_share": lambda columns: self.encrypt_share(ShareRow(b"", *columns)),
            "add_reveal": self._encrypted_reveal,
            "add_round_key": self._encrypted_round_key,
            "shares_of_nullifier": lambda params: (keyring.nullifier_tags(*params),),
        }
        self._decrypt: dict[str, Callable[[Row], Row]] = {
            "share_by_id": self._decrypt_share,
            "live_share": self._decrypt_share,
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
        """Return the parameters of a statement for PostgreSQL."""
        convert = self._encrypt.get(name)
        return params if convert is None else convert(params)

    def decrypt_rows(self, name: str, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of a query in the form that both stores share.

        Raises:
            StoreError: a row is encrypted with a key that this host does not have.
        """
        convert = self._decrypt.get(name)
        return list(rows) if convert is None else [convert(row) for row in rows]

    def nullifier_tags(self, nullifier: bytes) -> list[bytes]:
        """Return the possible keyed hashes of a nullifier in a share's row."""
        return self._keyring.nullifier_tags(nullifier)

    # ------------------------------------------------------------------ encryption

    def encrypt_share(self, row: ShareRow) -> Row:
        """Return the values for the columns of `shares`."""
        encrypted = EncryptedShare(
            round_id=row.round_id,
            id=row.id,
            round_no=row.round_no,
            mac=row.mac,
            tag=self._keyring.nullifier_tags(row.nullifier)[0],
            witness=self._keyring.encrypt(Witness.of(row).encode()),
            rank=row.rank,
            state=row.state,
            due_ms=row.due_ms,
            attempts=row.attempts,
            crashes=row.crashes,
            proved_height=row.proved_height,
            stage=row.stage,
            note=row.note,
            row_check=row.row_check,
        )
        return encrypted[1:]

    def _encrypted_reveal(self, columns: Row) -> EncryptedReveal:
        row = RevealRow(*columns)
        return EncryptedReveal(
            share_id=row.share_id,
            message=self._keyring.encrypt(row.tx_hash + row.message),
            anchor_height=row.anchor_height,
            circuit=row.circuit,
            height=row.height,
            sends=row.sends,
            first_sent_height=row.first_sent_height,
            last_sent_height=row.last_sent_height,
            last_endpoint=row.last_endpoint,
            last_outcome=row.last_outcome,
            row_check=row.row_check,
        )

    def _encrypted_round_key(self, columns: Row) -> RoundKeyRow:
        row = RoundKeyRow(*columns)
        return row._replace(mac_key=self._keyring.encrypt(row.mac_key))

    # ------------------------------------------------------------------ decryption

    def _open(self, sealed: bytes) -> bytes:
        """Return the plaintext of a column; empty if it is damaged."""
        try:
            return self._keyring.decrypt(sealed)
        except DecryptionError:
            return b""

    def _decrypt_share(self, columns: Row) -> ShareRow:
        row = EncryptedShare(*columns)
        witness = Witness.decode(self._open(row.witness))
        return ShareRow(
            round_id=row.round_id,
            id=row.id,
            round_no=row.round_no,
            mac=row.mac,
            share_index=witness.share_index,
            proposal_id=witness.proposal_id,
            vote_decision=witness.vote_decision,
            tree_position=witness.tree_position,
            submit_at=witness.submit_at,
            shares_hash=witness.shares_hash,
            share_comms=witness.share_comms,
            primary_blind=witness.primary_blind,
            c1=witness.c1,
            c2=witness.c2,
            nullifier=witness.nullifier,
            received_ms=witness.received_ms,
            rank=row.rank,
            state=row.state,
            due_ms=row.due_ms,
            attempts=row.attempts,
            crashes=row.crashes,
            proved_height=row.proved_height,
            stage=row.stage,
            note=row.note,
            row_check=row.row_check,
        )

    def _hash_and_message(self, sealed: bytes) -> tuple[bytes, bytes]:
        plain = self._open(sealed)
        return plain[:_HASH_BYTES], plain[_HASH_BYTES:]

    def _decrypt_reveal(self, columns: Row) -> Row:
        row = EncryptedReveal(*columns)
        if row.share_id is None:
            return _NO_REVEAL
        tx_hash, message = self._hash_and_message(row.message)
        return RevealRow(
            share_id=row.share_id,
            message=message,
            tx_hash=tx_hash,
            anchor_height=row.anchor_height,
            circuit=row.circuit,
            height=row.height,
            sends=row.sends,
            first_sent_height=row.first_sent_height,
            last_sent_height=row.last_sent_height,
            last_endpoint=row.last_endpoint,
            last_outcome=row.last_outcome,
            row_check=row.row_check,
        )

    def _decrypt_round_key(self, columns: Row) -> RoundKeyRow:
        row = RoundKeyRow(*columns)
        return row._replace(mac_key=self._open(row.mac_key))

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
        """Replace the message by its transaction hash."""
        sealed, *facts = columns
        return (self._hash_and_message(sealed)[0], *facts)
