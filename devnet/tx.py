"""The chain's transactions: one tag byte, then a protobuf message.

Reveals, contributions to the key ceremony, partial decryptions and tallies are identical to the real chain's messages.
Delegations and votes have its field numbers, but only the fields that the tree and an audit need: on the real chain
they carry proofs of circuits that are not part of this product. A delegation may append several leaves here. The
content of batches of votes is the dev chain's. Creating a round and ending it early are JSON messages with tags of the
dev chain.

This module deliberately does not use the helper's encoder, so that it can be tested against it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

TAG_ROUND, TAG_DELEGATE, TAG_CAST, TAG_REVEAL = 0x01, 0x02, 0x03, 0x04
TAG_END_ROUND = 0x7F
TAG_END_TIME = 0x7E
TAG_TALLY, TAG_CAST_BATCH, TAG_PARTIAL, TAG_CONTRIBUTION = 0x05, 0x06, 0x0D, 0x0E


class TxError(ValueError):
    """The bytes are not a transaction of this chain."""


@dataclass(frozen=True, slots=True)
class Reveal:
    """A share's reveal: its nullifier, ciphertext c1‖c2 (64 bytes), choice, proof, round and anchor height."""

    nullifier: bytes
    enc_share: bytes
    proposal_id: int
    vote_decision: int
    proof: bytes
    round_id: bytes
    anchor_height: int


@dataclass(frozen=True, slots=True)
class Delegation:
    """A delegation: the leaves (VANs) that it appends to a round's tree, and the nullifiers of the notes."""

    round_id: bytes
    leaves: tuple[bytes, ...]
    note_nullifiers: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast vote, or a batch of them: one new VAN, then every vote commitment."""

    round_id: bytes
    authority_note: bytes
    vote_commitments: tuple[bytes, ...]
    van_nullifier: bytes = b""
    proposal_id: int = 0


@dataclass(frozen=True, slots=True)
class CastBatch:
    """Several votes of one voter: one new VAN, then their vote commitments in order.

    Attributes:
        authority_note: the VAN that remains after the last vote.
        vote_commitments: one for each vote.
        van_nullifiers: the spent VAN of each vote.
        proposal_ids: the proposal of each vote.
        delegated_nullifiers: number of nullifiers of the delegation in the same message; 0 without one.
    """

    round_id: bytes
    authority_note: bytes
    vote_commitments: tuple[bytes, ...]
    van_nullifiers: tuple[bytes, ...]
    proposal_ids: tuple[int, ...]
    delegated_nullifiers: int

    @property
    def digest(self) -> bytes:
        """Digest of the batch (32 bytes). The definition of the real chain differs."""
        return hashlib.sha256(self.round_id + b"".join(self.vote_commitments)).digest()


@dataclass(frozen=True, slots=True)
class Contribution:
    """A validator's contribution to a key ceremony. The payloads are encoded with `encode_entry`."""

    creator: str
    round_id: bytes
    commitments: tuple[bytes, ...]
    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PartialDecryption:
    """A validator's partial decryptions of all sums. The entries are encoded with `encode_entry`."""

    round_id: bytes
    creator: str
    validator_index: int
    entries: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Tally:
    """The totals of all sums. The entries are encoded with `encode_entry`."""

    round_id: bytes
    creator: str
    entries: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class NewRound:
    """The creation of a round; see `rounds.Round` for the fields."""

    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EndRound:
    """Ends a round early: its tally begins in this block. The real chain has no such message."""

    round_id: bytes


@dataclass(frozen=True, slots=True)
class EndTimeChange:
    """Changes the `vote_end_time` (Unix seconds) of a round. The real chain has no such message."""

    round_id: bytes
    vote_end_time: int


CeremonyMessage = Contribution | PartialDecryption | Tally
"""Messages that only the proposer of a block makes."""
UserMessage = Reveal | Delegation | Cast | CastBatch | NewRound | EndRound | EndTimeChange
Message = UserMessage | CeremonyMessage


def tx_hash(tx: bytes) -> bytes:
    """The transaction hash: SHA-256 of the raw bytes."""
    return hashlib.sha256(tx).digest()


_FIELD = descriptor_pb2.FieldDescriptorProto
_BYTES, _UINT32, _UINT64 = _FIELD.TYPE_BYTES, _FIELD.TYPE_UINT32, _FIELD.TYPE_UINT64
_STRING = _FIELD.TYPE_STRING
_PROTOBUF_MESSAGES: dict[int, tuple[str, type[Any], tuple[tuple[int, Any], ...]]] = {
    TAG_DELEGATE: ("MsgDelegateVote", Delegation, ((9, _BYTES), (6, _BYTES), (7, _BYTES))),
    TAG_CAST: ("MsgCastVote", Cast, ((6, _BYTES), (2, _BYTES), (3, _BYTES), (1, _BYTES), (4, _UINT32))),
    TAG_CAST_BATCH: (
        "MsgCastVoteBatch",
        CastBatch,
        tuple(enumerate((_BYTES, _BYTES, _BYTES, _BYTES, _UINT32, _UINT32), 1)),
    ),
    TAG_REVEAL: (
        "MsgRevealShare",
        Reveal,
        tuple(enumerate((_BYTES, _BYTES, _UINT32, _UINT32, _BYTES, _BYTES, _UINT64), 1)),
    ),
    TAG_CONTRIBUTION: ("MsgContributeDKG", Contribution, ((1, _STRING), (2, _BYTES), (3, _BYTES), (4, _BYTES))),
    TAG_PARTIAL: (
        "MsgSubmitPartialDecryption",
        PartialDecryption,
        ((1, _BYTES), (2, _STRING), (3, _UINT32), (4, _BYTES)),
    ),
    TAG_TALLY: ("MsgSubmitTally", Tally, ((1, _BYTES), (2, _STRING), (3, _BYTES))),
}
"""Messages in protobuf by tag: name, class, and number and type of its fields in their order.

Nested messages are byte strings, which are encoded alike.
"""
_REPEATED_FIELDS = (
    "leaves",
    "note_nullifiers",
    "vote_commitments",
    "van_nullifiers",
    "proposal_ids",
    "commitments",
    "payloads",
    "entries",
)


def encode(message: Message) -> bytes:
    """Encode a transaction. Zero values are omitted, as in proto3."""
    match message:
        case NewRound():
            return bytes([TAG_ROUND]) + json.dumps(message.fields, sort_keys=True).encode()
        case EndRound():
            return bytes([TAG_END_ROUND]) + json.dumps({"vote_round_id": message.round_id.hex()}).encode()
        case EndTimeChange(round_id, end):
            return bytes([TAG_END_TIME]) + json.dumps([round_id.hex(), end]).encode()
    tag = next(tag for tag, (_, kind, _) in _PROTOBUF_MESSAGES.items() if isinstance(message, kind))
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    encoded: bytes = _PROTOBUF_CLASSES[tag](**values).SerializeToString(deterministic=True)
    return bytes([tag]) + encoded


def encode_entry(*values: int | str | bytes) -> bytes:
    """Encode a nested message with fields from 1 on. Zero values are omitted."""
    encoded = b""
    for number, value in enumerate(values, 1):
        if isinstance(value, int):
            encoded += bytes([number << 3]) + _varint(value) if value else b""
        elif value:
            data = value.encode() if isinstance(value, str) else value
            encoded += bytes([number << 3 | 2]) + _varint(len(data)) + data
    return encoded


def decode_entry(data: bytes) -> dict[int, int | bytes]:
    """Decode what `encode_entry` encodes: values by field number."""
    values: dict[int, int | bytes] = {}
    at = 0

    def take_varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
            if byte < 0x80:
                return value

    while at < len(data):
        key = take_varint()
        number = take_varint()
        if key & 7:
            values[key >> 3] = data[at : at + number]
            at += number
        else:
            values[key >> 3] = number
    return values


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def decode(tx: bytes) -> Message:
    """Decode a raw transaction; raises TxError."""
    if not tx:
        raise TxError("empty transaction")
    tag, body = tx[0], tx[1:]
    try:
        if tag in _PROTOBUF_MESSAGES:
            return _decode_protobuf(tag, body)
        if tag == TAG_ROUND:
            return NewRound(json.loads(body))
        if tag == TAG_END_ROUND:
            return EndRound(bytes.fromhex(json.loads(body)["vote_round_id"]))
        if tag == TAG_END_TIME:
            round_id, end = json.loads(body)
            return EndTimeChange(bytes.fromhex(round_id), int(end))
    except (DecodeError, ValueError, KeyError, TypeError) as error:
        raise TxError(f"tx parse error: {error}") from None
    raise TxError(f"unknown transaction tag 0x{tag:02x}")


def _decode_protobuf(tag: int, body: bytes) -> Message:
    parsed, kind = _PROTOBUF_CLASSES[tag].FromString(body), _PROTOBUF_MESSAGES[tag][1]
    values = {field.name: getattr(parsed, field.name) for field in fields(kind)}
    message: Message = kind(**{name: tuple(v) if name in _REPEATED_FIELDS else v for name, v in values.items()})
    return message


def create_competing_transaction(tx: bytes) -> bytes:
    """Create a transaction with the same reveal and another hash, by appending an unknown field.

    Simulates another helper that revealed the same share first.
    """
    return tx + b"\xf8\x01\x01"


def _create_protobuf_classes() -> dict[int, Any]:
    """Create the message classes from a descriptor in a separate pool."""
    file = descriptor_pb2.FileDescriptorProto(name="devnet/svote.proto", package="svote.v1", syntax="proto3")
    for name, kind, types in _PROTOBUF_MESSAGES.values():
        message = file.message_type.add(name=name)
        for field, (number, type_) in zip(fields(kind), types, strict=True):
            label = _FIELD.LABEL_REPEATED if field.name in _REPEATED_FIELDS else _FIELD.LABEL_OPTIONAL
            message.field.add(name=field.name, number=number, label=label, type=type_)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        tag: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"svote.v1.{name}"))
        for tag, (name, _, _) in _PROTOBUF_MESSAGES.items()
    }


_PROTOBUF_CLASSES = _create_protobuf_classes()
