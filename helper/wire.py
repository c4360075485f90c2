"""What wallets send and what they are answered: JSON on one side, `Share` on the other. Pure.

`parse_share` looks at shape only: types, lengths, ranges, spelling. Whether 32 bytes are a canonical field
element or a point on the curve is asked together with the hashes (`intake`): native code, off the event loop.

Choices where JSON and base64 leave some:

- base64 is the standard alphabet with its padding and nothing else, not even line breaks, and one spelling
  for one value (the unused bits of the last character are zero). Real wallets write exactly this.
- integers are JSON integers: no `1.0`, no `1e3`, no strings, no booleans.
- `null` for `submit_at` or `enc_share.share_index` means that it is absent. Every other field is required.
- names are matched exactly; of a repeated name the last one counts; unknown names are ignored.
- no message repeats a value that was sent: a witness field must not come back in an error or reach a log.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from helper.share import MAX_TREE_POSITION, SHARE_COUNT, Share, ShareState

MAX_BODY: Final = 1 << 20
"""Bytes of the largest body that is read: 1 MiB."""
MAX_PROPOSAL_ID: Final = 50
MAX_DECISION: Final = 7
MAX_TIME: Final = 2**63 - 1
BODY: Final = "body"
"""The field's name in errors that are about the whole body."""

_FIELD_BYTES: Final = 32
_BASE64_32: Final = re.compile(r"[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=")
_HEX_32: Final = re.compile(r"[0-9a-fA-F]{64}")
_LOWER_HEX_32: Final = re.compile(r"[0-9a-f]{64}")
_MISSING: Final = object()

_SEARCHED: Final = 16_384
"""How far into a body that is not JSON the broken field is looked for: three times a real payload."""
_PIECE: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]')
_NAMES: Final = frozenset(
    {
        "shares_hash",
        "proposal_id",
        "vote_decision",
        "enc_share",
        "tree_position",
        "vote_round_id",
        "share_comms",
        "primary_blind",
        "submit_at",
        "all_enc_shares",
    }
)
_INNER: Final = frozenset({"c1", "c2", "share_index"})


class WireError(Exception):
    """A body is not a share.

    Attributes:
        field: what is wrong, as the wallet names it (`enc_share.c1`, `share_comms[3]`), or `body`.
        message: what is wrong with it, without its value.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def parse_share(body: bytes) -> Share:
    """Read one posted share.

    Args:
        body: the request's body, UTF-8 JSON.

    Raises:
        WireError: for whatever is not as the module's docstring says, naming the first field that is not.
    """
    if len(body) > MAX_BODY:
        raise WireError(BODY, f"is larger than {MAX_BODY} bytes")
    payload = _load(body)
    encrypted = _object(payload, "enc_share")
    return Share(
        round_id=_round_id(payload),
        share_index=_integer(encrypted, "share_index", 0, SHARE_COUNT - 1, default=0, inside="enc_share."),
        proposal_id=_integer(payload, "proposal_id", 1, MAX_PROPOSAL_ID),
        vote_decision=_integer(payload, "vote_decision", 0, MAX_DECISION),
        tree_position=_integer(payload, "tree_position", 0, MAX_TREE_POSITION),
        submit_at=_integer(payload, "submit_at", 0, MAX_TIME, default=0),
        shares_hash=_bytes32("shares_hash", _required(payload, "shares_hash")),
        share_comms=_commitments(payload),
        primary_blind=_bytes32("primary_blind", _required(payload, "primary_blind")),
        c1=_bytes32("enc_share.c1", _required(encrypted, "c1", inside="enc_share.")),
        c2=_bytes32("enc_share.c2", _required(encrypted, "c2", inside="enc_share.")),
    )


def parse_hex32(field: str, text: str) -> bytes:
    """32 bytes from the lower-case hex of a path.

    Raises:
        WireError: when it is anything else, also for upper case.
    """
    if _LOWER_HEX_32.fullmatch(text) is None:
        raise WireError(field, "must be 64 lower-case hex characters")
    return bytes.fromhex(text)


def error_answer(message: str) -> dict[str, Any]:
    """The one shape of every error."""
    return {"status": "error", "error": message}


def status_answer(leaf_count: int, anchor_height: int) -> dict[str, Any]:
    """That this helper works, and how far its tree of the newest active round is; wallets ask this first."""
    return {"status": "ok", "tree": {"leaf_count": leaf_count, "anchor_height": anchor_height}}


def share_status_answer(*, confirmed: bool) -> dict[str, Any]:
    """Whether a nullifier is committed on chain; everything else is pending, also what was never seen."""
    return {"status": "confirmed" if confirmed else "pending"}


def queue_status_answer(counts: Mapping[bytes, Mapping[ShareState, int]]) -> dict[str, Any]:
    """Per round (hex) how many shares there are and how they stand; `pending` may all still be revealed."""
    answer: dict[str, Any] = {}
    for round_id, states in counts.items():
        submitted = states.get(ShareState.SUBMITTED, 0)
        failed = states.get(ShareState.FAILED, 0)
        total = sum(states.values())
        answer[round_id.hex()] = {
            "total": total,
            "pending": total - submitted - failed,
            "submitted": submitted,
            "failed": failed,
        }
    return answer


def _load(body: bytes) -> Mapping[str, Any]:
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise WireError(*_where_broken(body, error.pos)) from None
    if not isinstance(payload, dict):
        raise WireError(BODY, "must be a JSON object")
    return payload


def _where_broken(body: bytes, position: int) -> tuple[str, str]:
    """Which field a body stops being JSON in, and how to say it."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return _field_at(body[: error.start].decode()), "is not UTF-8"
    return _field_at(text[:position]), "is not valid JSON here"


def _field_at(text: str) -> str:
    """The field in which a text ends that is the beginning of a payload; only names that we know are told."""
    if len(text) > _SEARCHED:
        return BODY
    stack: list[str | int] = []  # one entry a level: the name within an object, the index within a list
    last = ""
    for piece in _PIECE.findall(text):
        if piece in "{[":
            stack.append("" if piece == "{" else 0)
        elif piece in "}]":
            del stack[-1:]
        elif piece == "," and stack:
            top = stack[-1]
            stack[-1] = top + 1 if isinstance(top, int) else ""
        elif piece == ":" and stack and isinstance(stack[-1], str):
            stack[-1] = last
        last = piece[1:-1]
    name = stack[0] if stack else ""
    if not isinstance(name, str) or name not in _NAMES:
        return BODY
    inner = stack[1] if len(stack) > 1 else ""
    if name == "share_comms" and isinstance(inner, int) and inner < SHARE_COUNT:
        return f"{name}[{inner}]"
    if name == "enc_share" and inner in _INNER:
        return f"{name}.{inner}"
    return name


def _required(record: Mapping[str, Any], name: str, inside: str = "") -> Any:
    value = record.get(name, _MISSING)
    if value is _MISSING or value is None:
        raise WireError(inside + name, "is missing")
    return value


def _object(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = _required(record, name)
    if not isinstance(value, dict):
        raise WireError(name, "must be an object")
    return value


def _integer(
    record: Mapping[str, Any],
    name: str,
    least: int,
    most: int,
    *,
    default: int | None = None,
    inside: str = "",
) -> int:
    value = record.get(name)
    if value is None and default is not None:
        return default
    value = _required(record, name, inside)
    if type(value) is not int:  # a bool is an int to isinstance
        # beyond 64 bits the JSON parser has only a float left, which is out of range anyway
        raise WireError(inside + name, f"must be an integer from {least} to {most}")
    if not least <= value <= most:
        raise WireError(inside + name, f"must be from {least} to {most}")
    return value


def _round_id(payload: Mapping[str, Any]) -> bytes:
    value = _required(payload, "vote_round_id")
    if not isinstance(value, str) or _HEX_32.fullmatch(value) is None:
        raise WireError("vote_round_id", "must be a string of 64 hex characters")
    return bytes.fromhex(value)


def _commitments(payload: Mapping[str, Any]) -> bytes:
    values = _required(payload, "share_comms")
    if not isinstance(values, list):
        raise WireError("share_comms", f"must be a list of {SHARE_COUNT}")
    if len(values) != SHARE_COUNT:
        raise WireError("share_comms", f"must have {SHARE_COUNT} entries, not {len(values)}")
    return b"".join(_bytes32(f"share_comms[{index}]", value) for index, value in enumerate(values))


def _bytes32(field: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise WireError(field, f"must be a string, base64 of {_FIELD_BYTES} bytes")
    if _BASE64_32.fullmatch(value) is None:
        raise WireError(field, _what_is_wrong(value))
    return binascii.a2b_base64(value)


def _what_is_wrong(value: str) -> str:
    """Why a text is not the base64 of 32 bytes: its length, or its spelling."""
    try:
        length = len(binascii.a2b_base64(value.encode("ascii"), strict_mode=True))
    except (binascii.Error, UnicodeEncodeError):
        length = _FIELD_BYTES
    if length == _FIELD_BYTES:
        return f"must be standard base64 with padding, of {_FIELD_BYTES} bytes"
    return f"must be {_FIELD_BYTES} bytes, not {length}"
