"""The chain's transactions: one tag byte, then a protobuf message.

The reveal is identical to the real chain's message. Delegations and votes contain only the leaves that they append; on
the real chain they carry proofs of circuits that are not part of this product. Creating a round and ending it early are
JSON messages with tags of the dev chain. This module deliberately does not use the helper's encoder, so that it can be
tested against it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

TAG_ROUND, TAG_DELEGATE, TAG_CAST, TAG_REVEAL = 0x01, 0x02, 0x03, 0x04
TAG_END_ROUND = 0x7F
TAG_END_TIME = 0x7E
_FIELD = descriptor_pb2.FieldDescriptorProto
_BYTES, _UINT32, _UINT64 = _FIELD.TYPE_BYTES, _FIELD.TYPE_UINT32, _FIELD.TYPE_UINT64

_MESSAGES: dict[str, tuple[tuple[str, int, bool], ...]] = {
    "MsgRevealShare": (
        ("share_nullifier", _BYTES, False),
        ("enc_share", _BYTES, False),
        ("proposal_id", _UINT32, False),
        ("vote_decision", _UINT32, False),
        ("proof", _BYTES, False),
        ("vote_round_id", _BYTES, False),
        ("anchor_height", _UINT64, False),
    ),
    "MsgDelegateVote": (("vote_round_id", _BYTES, False), ("leaves", _BYTES, True)),
    "MsgCastVote": (
        ("vote_round_id", _BYTES, False),
        ("authority_note", _BYTES, False),
        ("vote_commitments", _BYTES, True),
    ),
}


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
    """A delegation: the leaves (VANs) that it appends to a round's tree."""

    round_id: bytes
    leaves: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast vote, or a batch of them: one new VAN, then every vote commitment."""

    round_id: bytes
    authority_note: bytes
    vote_commitments: tuple[bytes, ...]


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


Message = Reveal | Delegation | Cast | NewRound | EndRound | EndTimeChange


def tx_hash(tx: bytes) -> bytes:
    """The transaction hash: SHA-256 of the raw bytes."""
    return hashlib.sha256(tx).digest()


def encode(message: Message) -> bytes:
    """Encode a transaction. Zero values are omitted, as in proto3."""
    match message:
        case Reveal():
            return _pack(
                TAG_REVEAL,
                "MsgRevealShare",
                share_nullifier=message.nullifier,
                enc_share=message.enc_share,
                proposal_id=message.proposal_id,
                vote_decision=message.vote_decision,
                proof=message.proof,
                vote_round_id=message.round_id,
                anchor_height=message.anchor_height,
            )
        case Delegation():
            return _pack(TAG_DELEGATE, "MsgDelegateVote", vote_round_id=message.round_id, leaves=list(message.leaves))
        case Cast():
            return _pack(
                TAG_CAST,
                "MsgCastVote",
                vote_round_id=message.round_id,
                authority_note=message.authority_note,
                vote_commitments=list(message.vote_commitments),
            )
        case NewRound():
            return bytes([TAG_ROUND]) + json.dumps(message.fields, sort_keys=True).encode()
        case EndRound():
            return bytes([TAG_END_ROUND]) + json.dumps({"vote_round_id": message.round_id.hex()}).encode()
        case EndTimeChange(round_id, end):
            return bytes([TAG_END_TIME]) + json.dumps([round_id.hex(), end]).encode()


def decode(tx: bytes) -> Message:
    """Decode a raw transaction; raises TxError."""
    if not tx:
        raise TxError("empty transaction")
    tag, body = tx[0], tx[1:]
    try:
        match tag:
            case 0x04:
                parsed = _parse("MsgRevealShare", body)
                return Reveal(
                    parsed.share_nullifier,
                    parsed.enc_share,
                    parsed.proposal_id,
                    parsed.vote_decision,
                    parsed.proof,
                    parsed.vote_round_id,
                    parsed.anchor_height,
                )
            case 0x02:
                parsed = _parse("MsgDelegateVote", body)
                return Delegation(parsed.vote_round_id, tuple(parsed.leaves))
            case 0x03:
                parsed = _parse("MsgCastVote", body)
                return Cast(parsed.vote_round_id, parsed.authority_note, tuple(parsed.vote_commitments))
            case 0x01:
                return NewRound(json.loads(body))
            case 0x7F:
                return EndRound(bytes.fromhex(json.loads(body)["vote_round_id"]))
            case 0x7E:
                round_id, end = json.loads(body)
                return EndTimeChange(bytes.fromhex(round_id), int(end))
    except (DecodeError, ValueError, KeyError, TypeError) as error:
        raise TxError(f"tx parse error: {error}") from None
    raise TxError(f"unknown transaction tag 0x{tag:02x}")


def create_competing_transaction(tx: bytes) -> bytes:
    """Create a transaction with the same reveal and another hash, by appending an unknown field.

    Simulates another helper that revealed the same share first.
    """
    return tx + b"\xf8\x01\x01"


def _create_message_classes() -> dict[str, Any]:
    """Create the message classes from a descriptor in a separate pool."""
    file = descriptor_pb2.FileDescriptorProto(name="devnet/svote.proto", package="svote.v1", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, repeated) in enumerate(fields, 1):
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            message.field.add(name=field, number=number, label=label, type=cast(Any, kind))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"svote.v1.{name}")) for name in _MESSAGES}


_MESSAGE_CLASSES = _create_message_classes()


def _pack(tag: int, name: str, **fields: Any) -> bytes:
    """Encode tag and message."""
    return bytes([tag]) + cast(bytes, _MESSAGE_CLASSES[name](**fields).SerializeToString(deterministic=True))


def _parse(name: str, body: bytes) -> Any:
    return _MESSAGE_CLASSES[name].FromString(body)
