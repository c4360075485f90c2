"""Export format of a queue: JSON lines, a header and one line per share. Pure.

The lines contain witnesses. They are only written to an encrypted file (`helper.store.backup.seal`) and sent to the
daemon over its control socket.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, ValidationError

from helper.chain.reveal_transaction import RevealMessage
from helper.core.share import Share, ShareState
from helper.errors import ChainAnswerError, ExportFileError
from helper.ingest.payload import share_payload
from helper.ingest.schema import WireError
from helper.ingest.validator import Checks, checked_share
from helper.store.action_rows import Checked, ExportedReveal, ExportedShare
from helper.store.rows import HistoryEntry, PreparedReveal
from proofs import ProofsError

FORMAT: Final = "svote-helper queue"
VERSION: Final = 1
MAX_LINE: Final = 256 << 10
"""Maximum bytes of a line. A share with its message and a long history has a tenth of it."""
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
    """The header line of an export.

    Attributes:
        format: always `FORMAT`.
        version: version of the format.
        chain_id: chain of the shares, None if unknown.
        made_at: time of the export, Unix seconds.
        shares: number of lines that follow.
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
    """Encode the header line."""
    return orjson.dumps(head.model_dump()) + b"\n"


def read_head(line: bytes) -> Head:
    """Parse the header line.

    Raises:
        ExportFileError: it is not the header of an export that this version can read.
    """
    try:
        return Head.model_validate_json(line, strict=True)
    except ValidationError:
        raise ExportFileError("not a queue export, or an export of another version of the helper") from None


def write_line(exported: ExportedShare) -> bytes:
    """Encode the line of one share."""
    line = {
        "share": share_payload(exported.share),
        "received_ms": exported.received_ms,
        "state": exported.state.name.lower(),
        "due_ms": exported.due_ms,
        "attempts": exported.attempts,
        "crashes": exported.crashes,
        "proved_height": exported.proved_height,
        "stage": exported.stage,
        "note": exported.note,
        "history": [(entry.at_ms, entry.stage, entry.note, entry.counted) for entry in exported.history[-MAX_HISTORY:]],
        "reveal": None if exported.reveal is None else _reveal_json(exported.reveal),
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


def read_line(checks: Checks, line: bytes) -> Checked:
    """Parse the line of one share and validate the share like one from a wallet.

    Raises:
        ExportFileError: the line is invalid. The error does not quote its content.
    """
    try:
        read = _Line.model_validate_json(line, strict=True)
        checked = checked_share(checks.read_shares([orjson.dumps(read.share)])[0])
    except (ValidationError, orjson.JSONEncodeError, WireError, ProofsError):
        raise ExportFileError("invalid share line") from None
    share = checked.share
    state = ShareState[read.state.upper()]
    if (state is ShareState.BROADCAST) != (read.reveal is not None):
        raise ExportFileError("a share must have a message if, and only if, its state is broadcast")
    exported = ExportedShare(
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
    return exported, checked.nullifier


def _read_reveal(read: _Reveal, share: Share) -> ExportedReveal:
    """The prepared message and its send history. Checks that the message reveals this share."""
    first, last = read.first_sent_height, read.last_sent_height
    never_sent = first is None and last is None
    if never_sent != (read.sends == 0) or (first is None) != (last is None) or (first or 0) > (last or 0):
        raise ExportFileError("send heights of a message contradict its number of sends")
    message = message_of(read.message)
    actual = (message.round_id, message.enc_share, message.proposal_id, message.vote_decision, message.anchor_height)
    expected = (share.round_id, share.c1 + share.c2, share.proposal_id, share.vote_decision, read.anchor_height)
    if actual != expected:
        raise ExportFileError("a message does not belong to its share")
    return ExportedReveal(
        prepared=PreparedReveal(read.message, message.tx_hash(), read.anchor_height, read.circuit, read.height),
        sends=read.sends,
        first_sent_height=first,
        last_sent_height=last,
        last_endpoint=read.last_endpoint,
        last_outcome=read.last_outcome,
    )


def message_of(tx: bytes) -> RevealMessage:
    """Decode a reveal transaction.

    Raises:
        ExportFileError: the bytes are not the canonical encoding of a reveal.
    """
    try:
        message = RevealMessage.from_tx(tx)
    except ChainAnswerError:
        raise ExportFileError("a message is not a reveal") from None
    if message.to_tx() != tx:
        raise ExportFileError("a message is not canonically encoded")
    return message
