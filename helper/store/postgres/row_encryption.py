"""Encrypts secret columns on the way to PostgreSQL and decrypts them on the way back.

Operations and readers use the same named statements on both databases. This module maps, by statement name, the columns
that differ from SQLite's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from helper.store.postgres.keyring import DecryptionError, Keyring
from helper.store.records import RevealRow, ShareRow
from helper.store.transaction import Params

_NUMBERS: Final = struct.Struct(">BIBIqq")
_PARTS: Final = (32, 512, 32, 32, 32, 32)
"""shares_hash, share_comms, primary_blind, c1, c2, nullifier."""
_HASH_BYTES: Final = 32
_SHARE_COLUMNS: Final = 15
_REVEAL_COLUMNS: Final = 11
_SUBMIT_AT: Final = 3
_RECEIVED: Final = 11

Row = tuple[Any, ...]
Encrypted = tuple[Any, ...] | Mapping[str, Any]


class Witness(NamedTuple):
    """Encrypted columns of a share's row; -1 and empty if damaged, so that the row check fails."""

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


class RowEncryption:
    """Converts statement parameters to PostgreSQL columns, and rows to what the operations expect."""

    def __init__(self, seals: Keyring) -> None:
        self._seals = seals
        self._encrypt: dict[str, Callable[[Any], Encrypted]] = {
            "add_share": self.share,
            "add_reveal": lambda row: (row[0], self._message(row[1], row[2]), *row[3:]),
            "carry_reveal": lambda row: (row[0], self._message(row[1], row[2]), *row[3:]),
            "add_round_key": lambda row: (*row[:2], seals.seal(row[2]), row[3]),
            "shares_of_nullifier": lambda row: (seals.tags(row[0]),),
        }
        self._decrypt: dict[str, Callable[[Row], Row]] = {
            "share_by_id": self._share,
            "live_share": self._share,
            "reveal": self._reveal,
            "round_key": self._round_key,
            "round_keys": self._round_key,
            "unconfirmed": self._sent,
            "sent_reveal": self._sent,
            "list_waiting": self._listed,
            "list_under_way": self._listed,
            "shares_by_prefix": self._shown,
            "reveal_facts": lambda row: (self._opened_message(row[0])[1], *row[1:]),
        }

    def outward(self, name: str, params: Params) -> Encrypted:
        """Return the parameters of a statement for PostgreSQL."""
        convert = self._encrypt.get(name)
        return params if convert is None else convert(params)

    def inward(self, name: str, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of a query in the form that both stores share.

        Raises:
            StoreError: a row is encrypted with a key that this host does not have.
        """
        convert = self._decrypt.get(name)
        return list(rows) if convert is None else [convert(row) for row in rows]

    def tags(self, nullifier: bytes) -> list[bytes]:
        """Return the possible keyed hashes of a nullifier in a share's row."""
        return self._seals.tags(nullifier)

    # ------------------------------------------------------------------ encryption

    def share(self, columns: Row) -> Row:
        """Return a share's columns for PostgreSQL."""
        row = ShareRow(b"", *columns)
        numbers = _NUMBERS.pack(
            row.share_index, row.proposal_id, row.vote_decision, row.tree_position, row.submit_at, row.received_ms
        )
        parts = (row.shares_hash, row.share_comms, row.primary_blind, row.c1, row.c2, row.nullifier)
        witness = self._seals.seal(b"".join((numbers, *parts)))
        return (row.id, row.round_no, row.mac, self._seals.tags(row.nullifier)[0], witness, *row[16:])

    def _message(self, message: bytes, tx_hash: bytes) -> bytes:
        return self._seals.seal(tx_hash + message)

    # ------------------------------------------------------------------ decryption

    def _witness(self, sealed: bytes) -> Witness:
        try:
            plain = self._seals.open(sealed)
        except DecryptionError:
            return Witness()
        if len(plain) != _NUMBERS.size + sum(_PARTS):
            return Witness()
        parts, start = [], _NUMBERS.size
        for length in _PARTS:
            parts.append(plain[start : start + length])
            start += length
        return Witness(*_NUMBERS.unpack_from(plain), *parts)

    def _share(self, row: Row) -> Row:
        round_id, share_id, round_no, mac, _tag, sealed, *rest = row
        witness = self._witness(sealed)
        numbers = witness[:5]
        parts = witness[6:]
        return (round_id, share_id, round_no, mac, *numbers, *parts, witness.received_ms, *rest)

    def _opened_message(self, sealed: bytes) -> tuple[bytes, bytes]:
        """Return message and transaction hash; empty if damaged."""
        try:
            plain = self._seals.open(sealed)
        except DecryptionError:
            plain = b""
        return plain[_HASH_BYTES:], plain[:_HASH_BYTES]

    def _reveal(self, row: Row) -> Row:
        if row[0] is None:
            return (None,) * len(RevealRow._fields)
        return (row[0], *self._opened_message(row[1]), *row[2:])

    def _round_key(self, row: Row) -> Row:
        try:
            return (*row[:2], self._seals.open(row[2]), row[3])
        except DecryptionError:
            return (*row[:2], b"", row[3])

    def _sent(self, row: Row) -> Row:
        stop = _SHARE_COLUMNS + _REVEAL_COLUMNS
        return (*self._share(row[:_SHARE_COLUMNS]), *self._reveal(row[_SHARE_COLUMNS:stop]), *row[stop:])

    def _listed(self, row: Row) -> Row:
        return (*row[:_SUBMIT_AT], self._witness(row[_SUBMIT_AT]).submit_at, *row[_SUBMIT_AT + 1 :])

    def _shown(self, row: Row) -> Row:
        received_ms = self._witness(row[_SUBMIT_AT]).received_ms
        return (*self._listed(row)[:_RECEIVED], received_ms, *row[_RECEIVED + 1 :])
