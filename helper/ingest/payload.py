"""The JSON of the wallet API: field types, the fields of a posted share, error texts, and response bodies. Pure.

Native code validates payloads (`helper.ingest.validator`) and returns the invalid field and the reason. The table
`SHARE` describes the fields: the documentation of the API and the texts of errors are generated from it. No error text
contains a value of the request: a witness field must not appear in a response or a log.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from typing_extensions import TypedDict

from helper.core.share import MAX_TREE_POSITION, SHARE_COUNT, Share, ShareState

if TYPE_CHECKING:
    from proofs import InvalidReason, InvalidShare


_BASE64_32: Final = re.compile(r"[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=")
_HEX_32: Final = re.compile(r"[0-9a-fA-F]{64}")
_LOWER_HEX_32: Final = re.compile(r"[0-9a-f]{64}")
_FIELD_BYTES: Final = 32
_MESSAGES: Final[Mapping[InvalidReason, str]] = {
    "not-utf8": "is not UTF-8",
    "not-json": "is not valid JSON here",
    "missing": "is missing",
    "non-canonical": "is not a canonical field element",
    "off-curve": "is not a point on the curve",
    "identity": "must not be the identity",
    "shares_hash": "is not the hash of share_comms",
    "share_comm": "is not the commitment to primary_blind and enc_share",
}
"""Texts that are the same for all types of fields, by reason."""

Messages = Mapping["InvalidReason", str]
Schema = dict[str, Any]


class PayloadError(Exception):
    """A payload or path parameter is not valid.

    Attributes:
        field: name of the invalid field, as on the wire (`enc_share.c1`, `share_comms[3]`), or `body`.
        message: why it is invalid, without its value.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class IntegerField:
    """An integer from `minimum` to `maximum`; optional if it has a default."""

    description: str
    minimum: int
    maximum: int
    default: int | None = None

    def schema(self) -> Schema:
        """The schema: an integer with bounds."""
        schema: Schema = {
            "type": "integer",
            "minimum": self.minimum,
            "maximum": self.maximum,
            "description": self.description,
        }
        if self.default is not None:
            schema |= {"type": ["integer", "null"], "default": self.default}
        return schema

    def messages(self, _actual: int | None) -> Messages:
        """Not an integer, or out of range."""
        bounds = f"from {self.minimum} to {self.maximum}"
        return {"type": f"must be an integer {bounds}", "range": f"must be {bounds}"}


@dataclass(frozen=True, slots=True)
class Base64Field:
    """32 bytes in base64."""

    description: str

    def schema(self) -> Schema:
        """The schema: a string with a pattern."""
        return _string_schema(_BASE64_32, self.description) | {"contentEncoding": "base64"}

    def messages(self, actual: int | None) -> Messages:
        """Not a string, not base64, or of another length."""
        return {
            "type": f"must be a string, base64 of {_FIELD_BYTES} bytes",
            "not-base64": f"must be standard base64 with padding, of {_FIELD_BYTES} bytes",
            "length": f"must be {_FIELD_BYTES} bytes, not {actual}",
        }


@dataclass(frozen=True, slots=True)
class HexField:
    """32 bytes as 64 hex characters, in lower case unless `allows_upper_case`."""

    description: str
    allows_upper_case: bool = False

    @property
    def pattern(self) -> re.Pattern[str]:
        """The valid texts."""
        return _HEX_32 if self.allows_upper_case else _LOWER_HEX_32

    def schema(self) -> Schema:
        """The schema: a string with a pattern."""
        return _string_schema(self.pattern, self.description)

    def messages(self, _actual: int | None) -> Messages:
        """Not a string of hex characters."""
        kind = "a string of 64 hex characters" if self.allows_upper_case else "64 lower-case hex characters"
        return {"not-hex": f"must be {kind}"}


@dataclass(frozen=True, slots=True)
class ArrayField:
    """An array of `count` values of 32 bytes."""

    description: str
    count: int
    item: Base64Field

    def schema(self) -> Schema:
        """The schema: an array of a fixed length."""
        size = {"minItems": self.count, "maxItems": self.count}
        return {"type": "array", "items": self.item.schema(), **size, "description": self.description}

    def messages(self, actual: int | None) -> Messages:
        """Not an array, or of another length."""
        return {
            "type": f"must be a list of {self.count}",
            "count": f"must have {self.count} entries, not {actual}",
        }


@dataclass(frozen=True, slots=True)
class ObjectField:
    """An object; its fields are validated in their order."""

    description: str
    fields: Mapping[str, Field]
    kind: str = "an object"

    def schema(self) -> Schema:
        """The schema: an object. Unknown names are ignored, so additional properties are allowed."""
        return {
            "type": "object",
            "properties": {key: field.schema() for key, field in self.fields.items()},
            "required": [
                key
                for key, field in self.fields.items()
                if not (isinstance(field, IntegerField) and field.default is not None)
            ],
            "description": self.description,
        }

    def messages(self, _actual: int | None) -> Messages:
        """Not an object."""
        return {"type": f"must be {self.kind}"}


Field = IntegerField | Base64Field | HexField | ArrayField | ObjectField
"""A field type. `schema` is its JSON Schema (draft 2020-12, as in OpenAPI 3.1).

`messages` are its error texts by reason; `actual` is the number of entries or bytes that a text contains.
"""


def error_message(field: Field | None, reason: InvalidReason, actual: int | None = None) -> str:
    """Why a field is invalid.

    Args:
        field: the invalid field; None if it is not one of these types.
        reason: one of `proofs.InvalidReason`.
        actual: the actual number of entries or bytes, for the reasons that have one.
    """
    own: Messages = {} if field is None else field.messages(actual)
    return own.get(reason) or _MESSAGES[reason]


def wire_names(fields: Mapping[str, Field], prefix: str = "") -> Iterator[tuple[str, Field]]:
    """All fields by their name in errors: `enc_share.c1`, `share_comms[3]`."""
    for key, field in fields.items():
        name = prefix + key
        yield name, field
        if isinstance(field, ObjectField):
            yield from wire_names(field.fields, f"{name}.")
        elif isinstance(field, ArrayField):
            yield from ((f"{name}[{index}]", field.item) for index in range(field.count))


def _string_schema(pattern: re.Pattern[str], description: str) -> Schema:
    return {"type": "string", "pattern": f"^{pattern.pattern}$", "description": description}


MAX_SHARE_BODY_BYTES: Final = 1 << 20
"""Maximum bytes of a body: 1 MiB."""
SMALL_BODY_BYTES: Final = 16 << 10
"""Maximum bytes of a share's fields, in any JSON formatting: three times a real payload with `all_enc_shares`.

Larger bodies are more expensive than real ones, so they count against the client's rate limit.
"""
MIN_PROPOSAL_ID: Final = 1
MAX_PROPOSAL_ID: Final = 50
MAX_DECISION: Final = 7
MAX_TIME: Final = 2**63 - 1
BODY_FIELD: Final = "body"
"""Field name in errors that concern the entire body."""

ENCRYPTED_SHARE: Final = ObjectField(
    "The share, encrypted with ElGamal over Pallas.",
    {
        "share_index": IntegerField("Which of the vote's shares this is.", 0, SHARE_COUNT - 1, default=0),
        "c1": Base64Field("A compressed Pallas point, not the identity."),
        "c2": Base64Field("A compressed Pallas point, not the identity."),
    },
)
SHARE: Final = ObjectField(
    "One share of a vote. Unknown fields are ignored.",
    {
        "enc_share": ENCRYPTED_SHARE,
        "vote_round_id": HexField("The voting round: a canonical Pallas base field element.", allows_upper_case=True),
        "proposal_id": IntegerField("A proposal of the round.", MIN_PROPOSAL_ID, MAX_PROPOSAL_ID),
        "vote_decision": IntegerField("The index of one of the proposal's options.", 0, MAX_DECISION),
        "tree_position": IntegerField(
            "The index of the vote commitment's leaf in the round's commitment tree.", 0, MAX_TREE_POSITION
        ),
        "submit_at": IntegerField(
            "The Unix time in seconds at which to reveal the share; 0, a time in the past or no value means "
            "immediately. At most the round's vote_end_time; a share for exactly that time is accepted, but the chain "
            "counts it only if the end is postponed.",
            0,
            MAX_TIME,
            default=0,
        ),
        "shares_hash": Base64Field("Poseidon hash of share_comms: a canonical Pallas base field element."),
        "share_comms": ArrayField(
            "The commitments to the vote's shares.", SHARE_COUNT, Base64Field("A canonical Pallas base field element.")
        ),
        "primary_blind": Base64Field("The blind of this share's commitment: a canonical Pallas base field element."),
    },
    kind="a JSON object",
)
"""The payload of `POST /shares`; fields are validated in this order."""
PATH_HEX_FIELD: Final = HexField("32 bytes, little-endian, in lower-case hex.")

_FIELDS: Final[Mapping[str, Field]] = {BODY_FIELD: SHARE, **dict(wire_names(SHARE.fields))}
"""The fields by their name in errors."""


class ErrorResponse(TypedDict):
    """Body of every error response."""

    status: Literal["error"]
    error: str


class BodyTimeoutDetails(TypedDict):
    """Which attempt timed out: the value of its `X-Vote-Ingress-Attempt-V1`. Nothing of it was stored or sent."""

    version: Literal[1]
    code: Literal["request_body_timeout"]
    dispatch: Literal["not_started"]
    attempt: str


class IngressReceipt(TypedDict):
    """Receipt of a request whose body timed out. Wallets accept these fields only."""

    error: BodyTimeoutDetails


class NoRouteResponse(TypedDict):
    """Body of the response if there is no such route or resource, by which wallets recognize that."""

    error: str


class AcceptedResponse(TypedDict):
    """Response to an accepted share: queued now, or already known."""

    status: Literal["queued", "duplicate"]


class ShareStatusResponse(TypedDict):
    """Whether a nullifier is confirmed on chain; an unknown share is also pending."""

    status: Literal["pending", "confirmed"]


class TreeResponse(TypedDict):
    """The commitment tree of the newest active round, zeros if there is none."""

    leaf_count: int
    anchor_height: int


class StatusResponse(TypedDict):
    """Status of a helper that accepts shares; wallets request it before posting shares."""

    status: Literal["ok"]
    tree: TreeResponse


class RoundCounts(TypedDict):
    """Number of shares of a round, in total and by state.

    `pending` shares are not confirmed yet: the sum of those that are due (`ready`), that wait (`not_yet_due`), and that
    are being proven or were sent (`processing`).
    """

    total: int
    pending: int
    ready: int
    not_yet_due: int
    processing: int
    submitted: int
    failed: int


def invalid_share(invalid: InvalidShare) -> PayloadError:
    """The error of an invalid body, with the text of its reason."""
    if invalid.reason == "too-large":
        message = f"the fields of the share are larger than {SMALL_BODY_BYTES} bytes together"
    else:
        message = error_message(_FIELDS.get(invalid.field), invalid.reason, invalid.actual)
    return PayloadError(invalid.field, message)


def share_to_payload(share: Share) -> dict[str, Any]:
    """The fields of a share as a wallet sends them."""
    comms = share.share_comms
    return {
        "enc_share": {"share_index": share.share_index, "c1": _base64(share.c1), "c2": _base64(share.c2)},
        "vote_round_id": share.round_id.hex(),
        "proposal_id": share.proposal_id,
        "vote_decision": share.vote_decision,
        "tree_position": share.tree_position,
        "submit_at": share.submit_at,
        "shares_hash": _base64(share.shares_hash),
        "share_comms": [_base64(comms[start : start + 32]) for start in range(0, len(comms), 32)],
        "primary_blind": _base64(share.primary_blind),
    }


def _base64(value: bytes) -> str:
    return b64encode(value).decode()


def parse_hex32(field: str, text: str) -> bytes:
    """Parse 32 bytes in lower-case hex from a path.

    Raises:
        PayloadError: it is not 64 lower-case hex characters.
    """
    if PATH_HEX_FIELD.pattern.fullmatch(text) is None:
        raise PayloadError(field, error_message(PATH_HEX_FIELD, "not-hex"))
    return bytes.fromhex(text)


def no_route_body(message: str) -> NoRouteResponse:
    """Body of the response if there is no such route or resource of the wallet API."""
    return {"error": message}


def ingress_receipt(attempt: str) -> IngressReceipt:
    """The receipt of a request with this token."""
    return {"error": {"version": 1, "code": "request_body_timeout", "dispatch": "not_started", "attempt": attempt}}


def error_body(message: str) -> ErrorResponse:
    """Body of an error response."""
    return {"status": "error", "error": message}


def accepted_body(*, is_duplicate: bool) -> AcceptedResponse:
    """Body of the response to an accepted share; `is_duplicate` if it is a duplicate."""
    return {"status": "duplicate" if is_duplicate else "queued"}


def status_body(leaf_count: int, anchor_height: int) -> StatusResponse:
    """Body of the status, with the tree of the newest active round."""
    return {"status": "ok", "tree": {"leaf_count": leaf_count, "anchor_height": anchor_height}}


def share_status_body(*, is_confirmed: bool) -> ShareStatusResponse:
    """Body of a share's status."""
    return {"status": "confirmed" if is_confirmed else "pending"}


def queue_status_body(
    counts: Mapping[bytes, Mapping[ShareState, int]], ready: Mapping[bytes, int]
) -> dict[str, RoundCounts]:
    """Counts of each round, by round id in hex.

    Args:
        counts: number of shares by state and round.
        ready: number of waiting shares that are due, by round; read separately, so it may differ slightly.
    """
    summary: dict[str, RoundCounts] = {}
    for round_id, states in counts.items():
        submitted = states.get(ShareState.SUBMITTED, 0)
        failed = states.get(ShareState.FAILED, 0)
        total = sum(states.values())
        waiting = states.get(ShareState.RECEIVED, 0)
        due = min(ready.get(round_id, 0), waiting)
        summary[round_id.hex()] = {
            "total": total,
            "pending": total - submitted - failed,
            "ready": due,
            "not_yet_due": waiting - due,
            "processing": total - submitted - failed - waiting,
            "submitted": submitted,
            "failed": failed,
        }
    return summary
