"""The fields of a posted share, its JSON, and the JSON of responses. Pure.

Native code validates payloads (`helper.ingest.validator`). The table `SHARE` describes their fields: the API's
documentation and the texts of errors are generated from it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from typing_extensions import TypedDict

from helper.core.share import MAX_TREE_POSITION, SHARE_COUNT, Share, ShareState
from helper.ingest.schema import (
    ArrayField,
    Base64Field,
    Field,
    HexField,
    IntegerField,
    ObjectField,
    PayloadError,
    error_message,
    wire_names,
)

if TYPE_CHECKING:
    from proofs import InvalidShare

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
