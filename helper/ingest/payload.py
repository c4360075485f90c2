"""The JSON of the wallet API: limits and errors of posted shares, and response bodies. Pure.

`helper.core.share` describes the fields of a share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

from typing_extensions import TypedDict

from helper.core.share import SHARE_JSON, ShareState
from helper.core.share_fields import Field, HexField, error_message, wire_names

if TYPE_CHECKING:
    from proofs import InvalidShare


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


MAX_SHARE_BODY_BYTES: Final = 1 << 20
"""Maximum bytes of a body: 1 MiB."""
SMALL_BODY_BYTES: Final = 16 << 10
"""Maximum bytes of a share's fields, in any JSON formatting: three times a real payload with `all_enc_shares`.

Larger bodies are more expensive than real ones, so they count against the client's rate limit.
"""
BODY_FIELD: Final = "body"
"""Field name in errors that concern the entire body."""

PATH_HEX_FIELD: Final = HexField("32 bytes, little-endian, in hex.", allows_upper_case=True)

_FIELDS: Final[Mapping[str, Field]] = {BODY_FIELD: SHARE_JSON, **dict(wire_names(SHARE_JSON.fields))}
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


def parse_hex32(field: str, text: str) -> bytes:
    """Parse 32 bytes in hex from a path.

    Raises:
        PayloadError: it is not 64 hex characters.
    """
    if PATH_HEX_FIELD.pattern.fullmatch(text) is None:
        raise PayloadError(field, error_message(PATH_HEX_FIELD, "not-hex"))
    return bytes.fromhex(text)


def ingress_receipt(attempt: str) -> IngressReceipt:
    """The receipt of a request with this token."""
    return {"error": {"version": 1, "code": "request_body_timeout", "dispatch": "not_started", "attempt": attempt}}


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
        submitted = states.get(ShareState.CONFIRMED, 0)
        failed = states.get(ShareState.FAILED, 0)
        total = sum(states.values())
        waiting = states.get(ShareState.WAITING, 0)
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
