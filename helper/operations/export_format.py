"""Export format of a queue: JSON lines, a header and one line per share. Pure.

The lines contain witnesses. They are only written to an encrypted file (`helper.store.backup.EncryptedWriter`) and
sent to the service over its control socket.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from helper.chain.reveal_transaction import RevealMessage, parse_reveal
from helper.circuits import GENERATIONS, generation_of_kind
from helper.core.share import ShareState
from helper.core.text_forms import clean_text
from helper.errors import ExportFileError, ShareRefused
from helper.ingest.validator import CheckedShare, Checks, checked_share
from helper.store.exported_shares import ExportedShare, ValidatedShare
from helper.store.models import HistoryEntry
from helper.store.table_rows import MAX_NOTE_CHARS, MAX_STAGE_CHARS, RevealRow
from proofs import ProofsError

MAX_LINE_BYTES: Final = 256 << 10
"""Maximum bytes of a line. A share with its message and a long history needs a tenth of it."""
MAX_SHARES: Final = 2_000_000
MAX_HISTORY: Final = 1000

_MAX_INTEGER: Final = 2**62
_NonNegativeInt = Annotated[int, Field(ge=0, le=_MAX_INTEGER)]
_Text = Annotated[str, Field(max_length=MAX_NOTE_CHARS), AfterValidator(clean_text)]
_Stage = Annotated[str, Field(min_length=1, max_length=MAX_STAGE_CHARS), AfterValidator(clean_text)]


def _check_circuit(name: str) -> str:
    if name not in GENERATIONS:
        raise ValueError("unknown circuit")
    return name


class _StrictModel(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True, val_json_bytes="base64"
    )


class ExportHeader(_StrictModel):
    """The header line of an export.

    Attributes:
        chain_id: chain of the shares, None if unknown.
        made_at: time of the export, Unix seconds.
        shares: number of lines that follow.
    """

    format: Literal["svote-helper queue"] = "svote-helper queue"
    version: Literal[1] = 1
    chain_id: Annotated[str, Field(max_length=128)] | None
    made_at: _NonNegativeInt
    shares: Annotated[int, Field(ge=0, le=MAX_SHARES)]


class _Reveal(_StrictModel):
    """A message that may have been sent: fields of `RevealRow`."""

    message: Annotated[bytes, Field(max_length=90_000)]
    anchor_height: _NonNegativeInt
    circuit: Annotated[str, AfterValidator(_check_circuit)]
    height: _NonNegativeInt
    sends: _NonNegativeInt
    first_sent_height: _NonNegativeInt | None
    last_sent_height: _NonNegativeInt | None
    last_endpoint: _Text | None
    last_outcome: _Text | None


class _ShareLine(_StrictModel):
    """A share: fields of `ExportedShare`."""

    share: dict[str, Any] = Field(repr=False)
    received_ms: _NonNegativeInt
    state: Literal["received", "failed", "broadcast"]
    due_ms: _NonNegativeInt
    attempts: Annotated[int, Field(ge=0, le=10_000)]
    crashes: Annotated[int, Field(ge=0, le=10_000)]
    proved_height: _NonNegativeInt | None
    stage: _Stage
    note: _Text
    history: Annotated[list[tuple[_NonNegativeInt, _Stage, _Text, bool]], Field(max_length=MAX_HISTORY)]
    reveal: _Reveal | None


def encode_header(header: ExportHeader, *, line_bytes: int = 0) -> bytes:
    """Encode the header line, with spaces at its end if it would be shorter than `line_bytes`."""
    return orjson.dumps(header.model_dump()).ljust(line_bytes - 1) + b"\n"


def parse_header(line: bytes) -> ExportHeader:
    """Parse the header line.

    Raises:
        ExportFileError: it is not the header of an export that this version can read.
    """
    try:
        return ExportHeader.model_validate_json(line, strict=True)
    except ValidationError:
        raise ExportFileError("not a queue export, or an export of another version of the helper") from None


def encode_share_line(exported: ExportedShare) -> bytes:
    """Encode the line of one share."""
    converted = {
        "share": generation_of_kind(exported.share.kind).to_payload(exported.share),
        "state": exported.state.json_name,
        "history": [
            (entry.at_ms, entry.stage, entry.note, entry.spent_attempt) for entry in exported.history[-MAX_HISTORY:]
        ],
        "reveal": None,
    }
    if (reveal := exported.reveal) is not None:
        values = {name: getattr(reveal, name) for name in _Reveal.model_fields}
        converted["reveal"] = {**values, "message": b64encode(reveal.message).decode()}
    plain = {name: getattr(exported, name) for name in _ShareLine.model_fields}
    return orjson.dumps({**plain, **converted}) + b"\n"


def parse_share_line(checks: Checks, line: bytes) -> ValidatedShare:
    """Parse the line of one share and validate the share like one from a wallet.

    Raises:
        ExportFileError: the line is invalid. The error does not quote its content.
    """
    try:
        parsed = _ShareLine.model_validate_json(line, strict=True)
        checked = checked_share(checks.read_shares([orjson.dumps(parsed.share)])[0])
    except (ValidationError, orjson.JSONEncodeError, ShareRefused, ProofsError):
        raise ExportFileError("invalid share line") from None
    state = ShareState.parse(parsed.state)
    if (state is ShareState.SENT) != (parsed.reveal is not None):
        raise ExportFileError("a share must have a message if, and only if, its state is broadcast")
    exported = ExportedShare(
        **parsed.model_dump(exclude={"share", "state", "history", "reveal"}),
        share=checked.share,
        state=state,
        history=tuple(HistoryEntry(*line) for line in parsed.history),
        reveal=None if parsed.reveal is None else _parse_reveal(parsed.reveal, checked),
    )
    return exported, checked.nullifier


def _parse_reveal(parsed: _Reveal, checked: CheckedShare) -> RevealRow:
    """The prepared message and its send history. Checks that the message reveals this share."""
    first, last = parsed.first_sent_height, parsed.last_sent_height
    never_sent = first is None and last is None
    if never_sent != (parsed.sends == 0) or (first is None) != (last is None) or (first or 0) > (last or 0):
        raise ExportFileError("send heights of a message contradict its number of sends")
    message, share = parse_reveal(parsed.message), checked.share
    if message is None:
        raise ExportFileError("a message is not a reveal")
    fields = generation_of_kind(share.kind).get_reveal_fields(share)
    expected = RevealMessage(
        nullifier=checked.nullifier,
        enc_share=fields.enc_share,
        proposal_id=share.proposal_id,
        vote_decision=fields.vote_decision,
        proof=message.proof,
        round_id=share.round_id,
        anchor_height=parsed.anchor_height,
    )
    if parsed.message != expected.to_tx():
        raise ExportFileError("a message does not belong to its share, or is not canonically encoded")
    return RevealRow(share_id=0, tx_hash=message.tx_hash(), **parsed.model_dump())
