"""The reveal transaction: its bytes, hash and JSON body, and whether it was counted in a block.

A transaction is the byte 0x04 followed by a protobuf `MsgRevealShare`; proto3 omits zero values. The SHA-256 hash
of these bytes is therefore known before anything is sent.

A block also contains failed transactions, and the same bytes may be in many blocks, because reveals are resent
until they are counted. A node's index stores only the last occurrence of a transaction (CometBFT's `IndexerService`
overwrites entries) and may lag behind the blocks. `is_counted` is the only implementation of this decision.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from helper.chain.broadcast_outcome import Verdict, classify_refusal
from helper.chain.chain_data import TxResult
from helper.errors import ChainResponseError, ChainUnavailable

ROUND_TAGS: Final = b"\x02\x03\x04\x05\x06\x07\x0d\x0e"
"""Tags of the transactions that concern a round and that an audit reads: the first byte of each."""
DELEGATE, CAST, REVEAL, TALLY, CAST_BATCH, DELEGATE_BATCH, PARTIAL, CONTRIBUTION = ROUND_TAGS
REVEAL_TAG = bytes((REVEAL,))

_BYTES = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_UINT32 = descriptor_pb2.FieldDescriptorProto.TYPE_UINT32
_UINT64 = descriptor_pb2.FieldDescriptorProto.TYPE_UINT64

# Wire name, protobuf type and attribute of RevealMessage, ordered by field number from 1.
_FIELDS = (
    ("share_nullifier", _BYTES, "nullifier"),
    ("enc_share", _BYTES, "enc_share"),
    ("proposal_id", _UINT32, "proposal_id"),
    ("vote_decision", _UINT32, "vote_decision"),
    ("proof", _BYTES, "proof"),
    ("vote_round_id", _BYTES, "round_id"),
    ("vote_comm_tree_anchor_height", _UINT64, "anchor_height"),
)


def _create_descriptor() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="svote/v1/reveal.proto", package="svote.v1", syntax="proto3")
    message = file.message_type.add(name="MsgRevealShare")
    for number, (name, kind, _) in enumerate(_FIELDS, start=1):
        message.field.add(name=name, number=number, type=kind, label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL)
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_create_descriptor().SerializeToString())
_MsgRevealShare = message_factory.GetMessageClass(_pool.FindMessageTypeByName("svote.v1.MsgRevealShare"))


@dataclass(frozen=True, slots=True)
class RevealMessage:
    """The reveal of one share, ready to send.

    Attributes:
        nullifier: 32 bytes.
        enc_share: the ciphertexts, encoded by the circuit generation.
        round_id: 32 bytes.
        anchor_height: height of the tree root against which the proof was made.
    """

    nullifier: bytes
    enc_share: bytes
    proposal_id: int
    vote_decision: int
    proof: bytes
    round_id: bytes
    anchor_height: int

    def __repr__(self) -> str:
        """Omits everything that could link a log line to a public reveal."""
        return f"RevealMessage(anchor_height={self.anchor_height})"

    def to_tx(self) -> bytes:
        """The transaction's bytes; deterministic."""
        values = {wire: getattr(self, attribute) for wire, _, attribute in _FIELDS}
        return REVEAL_TAG + _MsgRevealShare(**values).SerializeToString(deterministic=True)

    def tx_hash(self) -> bytes:
        """SHA-256 of the transaction's bytes."""
        return sha256(self.to_tx()).digest()

    def to_json(self) -> dict[str, object]:
        """The body of `POST reveal-share`; bytes are encoded as standard base64."""
        values = ((wire, getattr(self, attribute)) for wire, _, attribute in _FIELDS)
        return {wire: b64encode(v).decode() if isinstance(v, bytes) else v for wire, v in values}

    @classmethod
    def from_tx(cls, tx: bytes) -> RevealMessage:
        """Parse the bytes of a transaction. Raises `ChainResponseError` if it is not a reveal."""
        if tx[:1] != REVEAL_TAG:
            raise ChainResponseError("transaction: not a share reveal")
        message = _MsgRevealShare()
        try:
            message.ParseFromString(tx[1:])
        except DecodeError:
            raise ChainResponseError("transaction: invalid protobuf in a share reveal") from None
        reveal = cls(**{attribute: getattr(message, wire) for wire, _, attribute in _FIELDS})
        if len(reveal.nullifier) != 32 or len(reveal.round_id) != 32:
            raise ChainResponseError("transaction: a share reveal without nullifier or round")
        return reveal


assert {attribute for _, _, attribute in _FIELDS} == {field.name for field in fields(RevealMessage)}


@dataclass(frozen=True, slots=True)
class CountedReveal:
    """A counted reveal: block height, transaction bytes and decoded message."""

    height: int
    raw: bytes
    message: RevealMessage


def parse_reveal(raw: bytes) -> RevealMessage | None:
    """The reveal in a transaction, None if it is another transaction."""
    try:
        return RevealMessage.from_tx(raw)
    except ChainResponseError:
        return None


def is_counted(result: TxResult | None, height: int) -> bool | None:
    """Whether a reveal was counted in the block at `height`; None while unknown.

    - A success is unique: the chain counts a nullifier once, in the block of the success.
    - A failure at a lower height means that the index lags behind the block.
    - A failure at a greater height because the nullifier is spent means that the reveal was counted before.
    - Any other failure at a greater height hides the result in this block, usually because the round had ended by then.
      It counts as a failure in this block too: the result is no longer available, so waiting would not help.

    Args:
        result: the transaction's entry in a node's index, None without one.
        height: height of a block that contains the transaction.
    """
    if result is None:
        return None
    if result.code == 0:
        return result.height == height
    if result.height < height:
        return None
    return result.height > height and shows_spent(result)


def require_known(counted: bool | None, height: int) -> bool:
    """Return a result of `is_counted`; raise `ChainUnavailable` while it is unknown."""
    if counted is None:
        raise ChainUnavailable(f"block {height}: the result of a reveal in it is not known yet")
    return counted


def shows_spent(result: TxResult) -> bool:
    """Whether a result shows that the nullifier is spent.

    The nullifier was counted in the result's block or an earlier one.
    """
    return result.code == 0 or classify_refusal(result.code, result.log) is Verdict.SPENT
