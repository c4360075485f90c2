"""Queue exports of svoted's helper (`svoted helper export-queue`), read and written. Pure.

A file is one JSON object with the unencrypted witnesses of one round. Versions 1 and 2 are read; a field of either is
accepted in both, and unknown fields are ignored. Version 1 is written, which every release of svoted reads.

A file that is read is converted to the lines of `helper.operations.export_format`, so that its shares are validated and
imported like those of this helper's own exports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from helper.chain.reveal_transaction import RevealMessage
from helper.circuits import circuit_of_proof
from helper.core.json_records import HEX_32, first_error
from helper.core.share import Share, ShareState, share_from_payload, share_to_payload
from helper.errors import ExportFileError
from helper.operations.export_format import MAX_SHARES, ExportHeader, encode_header, encode_share_line
from helper.store.exported_shares import ExportedShare
from helper.store.table_rows import RevealRow

READABLE_VERSIONS: Final = (1, 2)
WRITTEN_VERSION: Final = 1
MAX_FILE_BYTES: Final = 1 << 30
"""Maximum bytes of a file: about half a million shares."""
INVALID_LINE: Final = b"{}\n"
"""The line of a share that cannot be read. The import counts and reports it as invalid."""
SVOTED_STAGE: Final = "svoted"
"""Stage of a share that had failed permanently in svoted's helper."""

_PAYLOAD_FIELDS: Final = (
    "enc_share",
    "proposal_id",
    "vote_decision",
    "tree_position",
    "shares_hash",
    "share_comms",
    "primary_blind",
)
"""Fields of a payload that a row of version 1 has; it has `submit_at` in another form."""
_RECEIVED, _WITNESSED, _SUBMITTED, _FAILED = 0, 1, 2, 3
_MAX_INTEGER: Final = 2**53
_Integer = Annotated[int, Field(ge=0, le=_MAX_INTEGER)]
_Bytes32 = Annotated[bytes, Field(min_length=32, max_length=32)]


class _LenientModel(BaseModel):
    """Ignores unknown fields."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, strict=True, hide_input_in_errors=True, val_json_bytes="base64"
    )


class _Reveal(_LenientModel):
    share_nullifier: _Bytes32
    enc_share: Annotated[bytes, Field(min_length=64, max_length=64)]
    proposal_id: _Integer
    vote_decision: _Integer
    proof: bytes
    vote_round_id: _Bytes32
    vote_comm_tree_anchor_height: _Integer


class _PendingBroadcast(_LenientModel):
    """A reveal that was sent, and that its helper has not seen in a block."""

    reveal: _Reveal
    since_height: _Integer
    rebroadcast_count: Annotated[int, Field(ge=0, le=10_000)] = 0


class _RowState(_LenientModel):
    state: Annotated[int, Field(ge=_RECEIVED, le=_FAILED)]
    corrupt: bool = False


class _Row(_RowState):
    """A share whose witness is not erased. Its other fields are those of a payload, except the round and the time."""

    share_index: _Integer
    attempts: Annotated[int, Field(ge=0, le=10_000)] = 0
    submit_at: _Integer
    original_submit_at: _Integer = 0
    received_at: _Integer = 0
    pending_broadcast: Any = Field(default=None, repr=False)


class _File(_LenientModel):
    version: int
    round_id: Annotated[str, Field(pattern=HEX_32)]
    exported_at: _Integer = 0
    rows: Annotated[list[Any], Field(max_length=MAX_SHARES)] | None = Field(repr=False)


@dataclass(frozen=True, slots=True)
class SvotedExport:
    """A file of svoted's helper, converted.

    Attributes:
        lines: the shares to import, as lines of this helper's export format, with its header.
        numbers: the 1-based row in the file of each line after the header.
        submitted: number of rows without a witness, because their shares are already revealed.
    """

    lines: tuple[bytes, ...] = field(repr=False)
    numbers: tuple[int, ...]
    submitted: int


def read_svoted_export(data: bytes) -> SvotedExport:
    """Convert a file of svoted's helper.

    A row that is corrupt or cannot be read becomes a line that no import accepts, so that it is reported.

    Raises:
        ExportFileError: the file is not an export of version 1 or 2. The error does not quote its content.
    """
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise ExportFileError("not an export of svoted's helper: invalid or truncated JSON") from None
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version not in READABLE_VERSIONS:
        raise ExportFileError(f"the export has version {version}; versions 1 and 2 can be read")
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        name = first_error(error)[0] or "the file"
        raise ExportFileError(f"not an export of svoted's helper: {name} is missing or invalid") from None
    round_id = bytes.fromhex(file.round_id)
    lines, numbers, submitted = [], [], 0
    for number, row in enumerate(file.rows or [], start=1):
        line = _convert_row(row, round_id, file.exported_at)
        if line is None:
            submitted += 1
        else:
            lines.append(line)
            numbers.append(number)
    header = ExportHeader(chain_id=None, made_at=file.exported_at, shares=len(lines))
    return SvotedExport((encode_header(header), *lines), tuple(numbers), submitted)


def _convert_row(content: Any, round_id: bytes, exported_at: int) -> bytes | None:
    """Return the line of a row, None if its share is already revealed."""
    try:
        mark = _RowState.model_validate(content)
        if mark.corrupt:
            return INVALID_LINE
        if mark.state == _SUBMITTED:
            return None
        row = _Row.model_validate(content)
        times = {"submit_at": row.original_submit_at or row.submit_at}
        share = share_from_payload({**content, "vote_round_id": round_id.hex(), **times})
    except (ValidationError, ValueError):
        return INVALID_LINE
    if share.share_index != row.share_index:
        return INVALID_LINE
    failed = row.state == _FAILED
    pending = None if failed else _read_pending(row.pending_broadcast, share)
    state = ShareState.SENT if pending is not None else ShareState.WAITING
    return encode_share_line(
        ExportedShare(
            share=share,
            received_ms=(row.received_at or exported_at) * 1000,
            state=ShareState.FAILED if failed else state,
            due_ms=max(row.submit_at, share.submit_at) * 1000,
            attempts=row.attempts,
            crashes=0,
            proved_height=None if pending is None else pending.height,
            stage=SVOTED_STAGE if failed else "accepted",
            note="failed in svoted's helper" if failed else "",
            reveal=pending,
        )
    )


def _read_pending(content: Any, share: Share) -> RevealRow | None:
    """Return the message of a share that may have been sent.

    None if there is no usable one. The share is then proven again, and the chain counts it once.
    """
    if content is None:
        return None
    try:
        pending = _PendingBroadcast.model_validate_json(orjson.dumps(content))
    except ValidationError:
        return None
    reveal = pending.reveal
    circuit = circuit_of_proof(reveal.proof)
    revealed = (reveal.vote_round_id, reveal.enc_share, reveal.proposal_id, reveal.vote_decision)
    if circuit is None or revealed != (share.round_id, share.c1 + share.c2, share.proposal_id, share.vote_decision):
        return None
    message = RevealMessage(
        nullifier=reveal.share_nullifier,
        enc_share=reveal.enc_share,
        proposal_id=reveal.proposal_id,
        vote_decision=reveal.vote_decision,
        proof=reveal.proof,
        round_id=reveal.vote_round_id,
        anchor_height=reveal.vote_comm_tree_anchor_height,
    )
    since = pending.since_height
    return RevealRow(
        share_id=0,
        message=message.to_tx(),
        tx_hash=message.tx_hash(),
        anchor_height=message.anchor_height,
        circuit=circuit.name,
        height=since,
        sends=1 + pending.rebroadcast_count,
        first_sent_height=since,
        last_sent_height=since,
    )


def encode_svoted_export(shares: Sequence[ExportedShare], *, vote_end_time: int, exported_at: int) -> bytes:
    """Encode shares of one round for `svoted helper import-queue`.

    A share that is being proven, or that may have been sent, is written as received. svoted's helper looks for its
    nullifier before it proves it.

    Args:
        vote_end_time: Unix seconds at which voting ends.
    """
    rows = sorted((_create_row(exported, vote_end_time) for exported in shares), key=_row_order)
    content = {
        "version": WRITTEN_VERSION,
        "round_id": shares[0].share.round_id.hex(),
        "exported_at": exported_at,
        # The store has no creation time of a round. No share arrives before it.
        "round": {"created_at_time": min(row["received_at"] for row in rows), "vote_end_time": vote_end_time},
        "rows": rows,
    }
    return orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n"


def _create_row(exported: ExportedShare, vote_end_time: int) -> dict[str, Any]:
    share, failed = exported.share, exported.state is ShareState.FAILED
    received_at = exported.received_ms // 1000
    payload = share_to_payload(share)
    row: dict[str, Any] = {
        **{name: payload[name] for name in _PAYLOAD_FIELDS},
        "share_index": share.share_index,
        "state": _FAILED if failed else _RECEIVED,
        "attempts": exported.attempts,
        "vote_end_time": vote_end_time,
        "submit_at": max(share.submit_at, received_at),
        "received_at": received_at,
        "processable": not failed,
    }
    if share.submit_at:
        row["original_submit_at"] = share.submit_at
    return row


def _row_order(row: dict[str, Any]) -> tuple[int, ...]:
    names = ("submit_at", "received_at", "proposal_id", "vote_decision", "share_index", "tree_position")
    return tuple(row[name] for name in names)
