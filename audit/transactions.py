"""Decodes the transactions of a round: a tag byte, then a protobuf message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from helper.chain.reveal_transaction import (
    CAST,
    CAST_BATCH,
    CONTRIBUTION,
    DELEGATE,
    DELEGATE_BATCH,
    PARTIAL,
    REVEAL,
    ROUND_TAGS,
    TALLY,
    RevealMessage,
)
from helper.errors import AuditError, ChainResponseError

_VARINT, _FIXED64, _LENGTH_DELIMITED, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES: Final = 10
_MAX_UINT32: Final = 2**32 - 1
_MAX_UINT64: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Delegation:
    """A delegation: the leaf that it appends, and the nullifiers of the delegated notes."""

    round_id: bytes
    leaf: bytes
    nullifiers: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast vote: the two leaves that it appends, in order, and the nullifier of the spent authority note."""

    round_id: bytes
    leaves: tuple[bytes, bytes]
    nullifier: bytes
    proposal_id: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of votes. Its encoding is not known, so its leaves and nullifiers are not either."""


@dataclass(frozen=True, slots=True)
class PartialEntry:
    """A validator's partial decryption of one option's sum."""

    proposal_id: int
    decision: int
    point: bytes
    proof: bytes


@dataclass(frozen=True, slots=True)
class PartialDecryption:
    """The partial decryptions of one validator."""

    round_id: bytes
    creator: str
    index: int
    entries: tuple[PartialEntry, ...]


@dataclass(frozen=True, slots=True)
class TallyEntry:
    """The total of one option. The proof is empty in rounds with a threshold."""

    proposal_id: int
    decision: int
    total: int
    proof: bytes


@dataclass(frozen=True, slots=True)
class Tally:
    """The totals that a validator submitted."""

    round_id: bytes
    entries: tuple[TallyEntry, ...]


@dataclass(frozen=True, slots=True)
class Contribution:
    """A validator's contribution to the key ceremony. It sends a share to each of the other validators."""

    round_id: bytes
    creator: str
    commitments: tuple[bytes, ...]
    receivers: int


Message = Delegation | Cast | Batch | RevealMessage | PartialDecryption | Tally | Contribution


class _Fields:
    """The fields of a protobuf message by number, as the chain reads them.

    Unknown fields of any kind are ignored. Otherwise anyone could send a vote that the chain counts and audits cannot
    read.

    Raises:
        AuditError: the bytes are not a protobuf message.
    """

    def __init__(self, data: bytes) -> None:
        self._values: dict[int, list[int | bytes | None]] = {}
        at = 0
        while at < len(data):
            key, at = _read_varint(data, at)
            value, at = _read_value(data, at, key & 7)
            self._values.setdefault(key >> 3, []).append(value)

    def number(self, number: int, *, maximum: int = _MAX_UINT32) -> int:
        """The last value of an integer field, 0 if absent. Higher bits than those of `maximum` are ignored."""
        value = self._values.get(number, [0])[-1]
        if not isinstance(value, int):
            raise AuditError(f"transaction: field {number} is not an integer")
        return value & maximum

    def repeated(self, number: int) -> tuple[bytes, ...]:
        """All values of a bytes field."""
        values = self._values.get(number, [])
        if not all(isinstance(value, bytes) for value in values):
            raise AuditError(f"transaction: field {number} is not a byte string")
        return tuple(value for value in values if isinstance(value, bytes))

    def data(self, number: int, length: int | None = None) -> bytes:
        """The last value of a bytes field, empty if absent."""
        value = self.repeated(number)[-1:] or (b"",)
        if length is not None and len(value[0]) != length:
            raise AuditError(f"transaction: field {number} must have {length} bytes")
        return value[0]

    def text(self, number: int) -> str:
        """A string field; invalid UTF-8 is replaced."""
        return self.data(number).decode(errors="replace")


def _read_value(data: bytes, at: int, kind: int) -> tuple[int | bytes | None, int]:
    """Read a value of a wire type. Returns it, None for types that no field has, and the position after it."""
    value: int | bytes | None = None
    if kind == _VARINT:
        value, at = _read_varint(data, at)
    elif kind == _LENGTH_DELIMITED:
        length, at = _read_varint(data, at)
        value, at = data[at : at + length], at + length
    elif kind in _FIXED_BYTES:
        at += _FIXED_BYTES[kind]
    elif kind == _START_GROUP:
        at = _skip_group(data, at)
    else:
        raise AuditError("transaction: unknown wire type")
    if at > len(data):
        raise AuditError("transaction: truncated")
    return value, at


def _skip_group(data: bytes, at: int) -> int:
    """Return the position after a group. Does not compare the field number at its end; gogoproto does not either."""
    depth = 1
    while depth:
        key, at = _read_varint(data, at)
        kind = key & 7
        if kind in (_START_GROUP, _END_GROUP):
            depth += 1 if kind == _START_GROUP else -1
        else:
            _, at = _read_value(data, at, kind)
    return at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for count in range(_MAX_VARINT_BYTES):
        if at + count >= len(data):
            break
        byte = data[at + count]
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return value, at + count + 1
    raise AuditError("transaction: invalid varint")


def _decode_delegation(body: bytes) -> Delegation:
    fields = _Fields(body)
    return Delegation(fields.data(9, 32), fields.data(6, 32), fields.repeated(7))


def _decode_cast(body: bytes) -> Cast:
    fields = _Fields(body)
    return Cast(fields.data(6, 32), (fields.data(2, 32), fields.data(3, 32)), fields.data(1, 32), fields.number(4))


def _decode_partial(body: bytes) -> PartialDecryption:
    fields = _Fields(body)
    entries = tuple(decode_partial_entry(entry) for entry in fields.repeated(4))
    return PartialDecryption(fields.data(1, 32), fields.text(2), fields.number(3), entries)


def decode_partial_entry(data: bytes) -> PartialEntry:
    """Decode one partial decryption, as in transactions and in the chain's store.

    Raises:
        AuditError: the encoding is not known.
    """
    entry = _Fields(data)
    return PartialEntry(entry.number(1), entry.number(2), entry.data(3), entry.data(4))


def _decode_tally(body: bytes) -> Tally:
    fields = _Fields(body)
    entries = (_Fields(entry) for entry in fields.repeated(3))
    return Tally(
        fields.data(1, 32),
        tuple(
            TallyEntry(entry.number(1), entry.number(2), entry.number(3, maximum=_MAX_UINT64), entry.data(4))
            for entry in entries
        ),
    )


def _decode_contribution(body: bytes) -> Contribution:
    fields = _Fields(body)
    return Contribution(fields.data(2, 32), fields.text(1), fields.repeated(3), len(fields.repeated(4)))


_DECODERS: Final[dict[int, Callable[[bytes], Message]]] = {
    DELEGATE: _decode_delegation,
    CAST: _decode_cast,
    PARTIAL: _decode_partial,
    TALLY: _decode_tally,
    CONTRIBUTION: _decode_contribution,
}


def is_of_round(raw: bytes, round_id: bytes) -> bool:
    """Whether a transaction is one that an audit of the round reads. May be true for those of other rounds."""
    return raw[:1] != b"" and raw[0] in ROUND_TAGS and round_id in raw


def decode(raw: bytes, round_id: bytes) -> Message | None:
    """Decode a transaction of a round, None if it is of another round.

    Raises:
        AuditError: the encoding is not known.
    """
    if not is_of_round(raw, round_id):
        return None
    tag, body = raw[0], raw[1:]
    if tag in (CAST_BATCH, DELEGATE_BATCH):
        return Batch()
    try:
        message = RevealMessage.from_tx(raw) if tag == REVEAL else _DECODERS[tag](body)
    except ChainResponseError as error:
        raise AuditError(str(error)) from None
    return message if isinstance(message, Batch) or message.round_id == round_id else None
