"""A queue on its way to another machine: lines of JSON, a head and then a line a share. Pure.

The lines hold witnesses: they are written into an encrypted file only (`helper.store.backup.seal`), and handed to the
daemon over its own socket. Whoever reads them checks each share as it would a wallet's.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, ValidationError

from helper.chain.reveal_transaction import RevealMessage
from helper.core.share import Share, ShareState
from helper.errors import ChainAnswerError, ExportFileError
from helper.ingest.payload import read_share, share_payload
from helper.ingest.schema import WireError
from helper.store.action_rows import ExportedReveal, ExportedShare
from helper.store.rows import HistoryEntry, PreparedReveal

FORMAT: Final = "svote-helper queue"
VERSION: Final = 1
MAX_LINE: Final = 256 << 10
"""Bytes of the longest line: a share with its message and a long history has a tenth of it."""
MAX_SHARES: Final = 2_000_000
MAX_HISTORY: Final = 1000

_LARGEST: Final = 2**62
_Whole = Annotated[int, Field(ge=0, le=_LARGEST)]
_Text = Annotated[str, Field(max_length=400)]
_Stage = Annotated[str, Field(min_length=1, max_length=32)]
_Bytes = Annotated[Base64Bytes, Field(max_length=90_000)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Head(_Strict):
    """The first line.

    Attributes:
        format: always `FORMAT`.
        version: of the format.
        chain_id: the chain that the shares are for, None where it was never learnt.
        made_at: unix seconds.
        shares: how many lines follow.
    """

    format: Literal["svote-helper queue"] = FORMAT
    version: Literal[1] = VERSION
    chain_id: Annotated[str, Field(max_length=128)] | None
    made_at: _Whole
    shares: Annotated[int, Field(ge=0, le=MAX_SHARES)]


class _Reveal(_Strict):
    message: _Bytes
    anchor_height: _Whole
    circuit: Literal["k10", "k11"]
    height: _Whole
    sends: _Whole
    first_sent_height: _Whole | None
    last_sent_height: _Whole | None
    last_endpoint: _Text | None
    last_outcome: _Text | None


class _Line(_Strict):
    share: dict[str, Any] = Field(repr=False)
    received_ms: _Whole
    state: Literal["received", "failed", "broadcast"]
    due_ms: _Whole
    attempts: Annotated[int, Field(ge=0, le=10_000)]
    crashes: Annotated[int, Field(ge=0, le=10_000)]
    proved_height: _Whole | None
    stage: _Stage
    note: _Text
    history: Annotated[list[tuple[_Whole, _Stage, _Text, bool]], Field(max_length=MAX_HISTORY)]
    reveal: _Reveal | None


def write_head(head: Head) -> bytes:
    """The first line."""
    return orjson.dumps(head.model_dump()) + b"\n"


def read_head(line: bytes) -> Head:
    """What follows.

    Raises:
        TransferError: it is not the head of an export that this version can read.
    """
    try:
        return Head.model_validate_json(line, strict=True)
    except ValidationError:
        raise ExportFileError("this is not an export of a queue, or one of another version of the helper") from None


def write_line(one: ExportedShare) -> bytes:
    """One share's line."""
    line = {
        "share": share_payload(one.share),
        "received_ms": one.received_ms,
        "state": one.state.name.lower(),
        "due_ms": one.due_ms,
        "attempts": one.attempts,
        "crashes": one.crashes,
        "proved_height": one.proved_height,
        "stage": one.stage,
        "note": one.note,
        "history": [(line.at_ms, line.stage, line.note, line.counted) for line in one.history[-MAX_HISTORY:]],
        "reveal": None if one.reveal is None else _reveal_json(one.reveal),
    }
    return orjson.dumps(line) + b"\n"


def _reveal_json(reveal: ExportedReveal) -> dict[str, Any]:
    prepared = reveal.prepared
    return {
        "message": b64encode(prepared.message).decode(),
        "anchor_height": prepared.anchor_height,
        "circuit": prepared.circuit,
        "height": prepared.height,
        "sends": reveal.sends,
        "first_sent_height": reveal.first_sent_height,
        "last_sent_height": reveal.last_sent_height,
        "last_endpoint": reveal.last_endpoint,
        "last_outcome": reveal.last_outcome,
    }


def read_line(line: bytes) -> ExportedShare:
    """One share, as far as its shape goes: its hashes are for others to check.

    Raises:
        TransferError: the line is none, without a word of what is in it.
    """
    try:
        read = _Line.model_validate_json(line, strict=True)
        share = read_share(read.share)
    except (ValidationError, WireError):
        raise ExportFileError("a line is not that of a share") from None
    state = ShareState[read.state.upper()]
    if (state is ShareState.BROADCAST) != (read.reveal is not None):
        raise ExportFileError("a share may have been sent exactly when its message is there")
    return ExportedShare(
        share=share,
        received_ms=read.received_ms,
        state=state,
        due_ms=read.due_ms,
        attempts=read.attempts,
        crashes=read.crashes,
        proved_height=read.proved_height,
        stage=read.stage,
        note=read.note,
        history=tuple(HistoryEntry(*line) for line in read.history),
        reveal=None if read.reveal is None else _read_reveal(read.reveal, share),
    )


def _read_reveal(read: _Reveal, share: Share) -> ExportedReveal:
    """A message with how it was sent, if it is the reveal of this share."""
    first, last = read.first_sent_height, read.last_sent_height
    never = first is None and last is None
    if never != (read.sends == 0) or (first is None) != (last is None) or (first or 0) > (last or 0):
        raise ExportFileError("the heights at which a message was sent are at odds with how often it was")
    message = message_of(read.message)
    told = (message.round_id, message.enc_share, message.proposal_id, message.vote_decision, message.anchor_height)
    ours = (share.round_id, share.c1 + share.c2, share.proposal_id, share.vote_decision, read.anchor_height)
    if told != ours:
        raise ExportFileError("a message is not that of its share")
    return ExportedReveal(
        prepared=PreparedReveal(read.message, message.tx_hash(), read.anchor_height, read.circuit, read.height),
        sends=read.sends,
        first_sent_height=first,
        last_sent_height=last,
        last_endpoint=read.last_endpoint,
        last_outcome=read.last_outcome,
    )


def message_of(tx: bytes) -> RevealMessage:
    """The reveal in a transaction's bytes.

    Raises:
        TransferError: they are not exactly those of one.
    """
    try:
        message = RevealMessage.from_tx(tx)
    except ChainAnswerError:
        raise ExportFileError("a message is not a reveal") from None
    if message.to_tx() != tx:
        raise ExportFileError("a message is not written as reveals are")
    return message
