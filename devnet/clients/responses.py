"""How wallets read the responses of helpers, and library version 5.3.0 those of the chain too. Pure.

A wallet of the library may repeat a request only if its first attempt definitely had no effect. A response that does
not prove an effect or its absence makes the outcome unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

MAX_SHARE_RESPONSE_BYTES: Final = 256 << 10
"""Maximum bytes of a helper's response."""

_HASH: Final = re.compile(r"[0-9A-F]{64}|[0-9a-f]{64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_TRANSACTION_FIELDS: Final = frozenset({"tx_hash", "code", "log", "batch_digest"})
_MISSING_STATUSES: Final = (404, 405)
_TX_NOT_FOUND: Final = {"error": "tx not found"}


@dataclass(frozen=True, slots=True)
class WalletResponse:
    """The response to one HTTP attempt.

    Attributes:
        body: the body; None if it is too long.
        was_sent: whether any byte of the request may have been sent.
        retry_after: the value of `Retry-After`, if there is one.
    """

    status: int | None
    content_type: str = ""
    body: bytes | None = b""
    was_sent: bool = True
    retry_after: str | None = None

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return self.status is not None and 200 <= self.status < 300

    def json(self) -> Any:
        """The value of a JSON response; None if the response is not valid JSON, or a name in it occurs twice."""
        if self.body is None or self.content_type.partition(";")[0].strip().lower() != "application/json":
            return None
        try:
            return json.loads(self.body, object_pairs_hook=_create_object, parse_constant=_refuse_constant)
        except ValueError:
            return None

    def json_object(self) -> dict[str, Any]:
        """The object of a JSON response; empty if it has none."""
        value = self.json()
        return value if isinstance(value, dict) else {}


class ShareOutcome(Enum):
    """What the response to `POST shares` means.

    REPEATABLE: the attempt had no effect, and the same helper is queried again soon.
    REFUSED: the attempt had no effect, and this helper is not queried again.
    UNKNOWN: the helper may have the share. It is not queried again in this phase.
    ENDS_SHARE: the wallet gives this share to no other helper.
    ENDS_VOTE: the wallet sends nothing more of the vote, and the user must act.
    """

    ACCEPTED = "accepted"
    REPEATABLE = "repeatable"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    ENDS_SHARE = "ends share"
    ENDS_VOTE = "ends vote"


class ChainOutcome(Enum):
    """What the response to a POST of a transaction means.

    NOT_STARTED: the attempt had no effect.
    NO_ROUTE: the node has no such route.
    """

    ACCEPTED = "accepted"
    REFUSED = "refused"
    NOT_STARTED = "not started"
    NO_ROUTE = "no route"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ChainReply:
    """The outcome of a POST of a transaction; its hash if it was accepted, and the chain's log."""

    outcome: ChainOutcome
    tx_hash: str = ""
    log: str = ""


class TxState(Enum):
    """What the response to `GET tx` means. UNKNOWN: nothing, query again."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TxReply:
    """The state of a transaction, and of one that succeeded the attributes of its events by their type."""

    state: TxState
    events: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    log: str = ""


def is_receipt(response: WalletResponse, token: str) -> bool:
    """Whether a response proves that the attempt with this token had no effect.

    It does only with status 408, as JSON, with exactly these fields, and with the attempt's own token.
    """
    value = response.json() if response.status == 408 else None
    expected = {"version": 1, "code": "request_body_timeout", "dispatch": "not_started", "attempt": token}
    if not isinstance(value, dict) or value != {"error": expected}:
        return False
    return type(value["error"]["version"]) is int  # 1.0 and true are equal to 1


def classify_share_response(response: WalletResponse, token: str) -> ShareOutcome:
    """How the library reads a response to `POST shares`."""
    status = response.status
    if status is None:
        return ShareOutcome.UNKNOWN if response.was_sent else ShareOutcome.REPEATABLE
    if response.is_success:
        is_short = response.body is not None and len(response.body) <= MAX_SHARE_RESPONSE_BYTES
        is_accepted = is_short and response.json_object().get("status") in ("queued", "duplicate")
        return ShareOutcome.ACCEPTED if is_accepted else ShareOutcome.UNKNOWN
    if status == 429 or is_receipt(response, token):
        return ShareOutcome.REPEATABLE
    return ShareOutcome.REFUSED if 300 <= status < 500 else ShareOutcome.UNKNOWN


def classify_chain_response(response: WalletResponse, token: str, *, is_batch: bool) -> ChainReply:
    """Classify the response to a POST of a transaction that was sent with this token."""
    if (response.status is None and not response.was_sent) or is_receipt(response, token):
        return ChainReply(ChainOutcome.NOT_STARTED)
    if is_missing_route(response):
        return ChainReply(ChainOutcome.NO_ROUTE)
    return _classify_result(response.status, response.json_object(), is_batch=is_batch)


def _classify_result(status: int | None, fields: Mapping[str, Any], *, is_batch: bool) -> ChainReply:
    """Classify the result of a transaction. Any other field, and a digest where none belongs, make it unknown."""
    code, log, tx_hash = fields.get("code"), fields.get("log", ""), fields.get("tx_hash", "")
    has_digest = "batch_digest" in fields
    is_valid = fields.keys() <= _TRANSACTION_FIELDS and type(code) is int and isinstance(log, str)
    if not is_valid or (has_digest and not (is_batch and _matches(_DIGEST, fields["batch_digest"]))):
        return ChainReply(ChainOutcome.UNKNOWN)
    if status == 422 and code != 0:
        return ChainReply(ChainOutcome.REFUSED, log=log)
    if status == 200 and code == 0 and _matches(_HASH, tx_hash) and has_digest == is_batch:
        return ChainReply(ChainOutcome.ACCEPTED, tx_hash, log)
    return ChainReply(ChainOutcome.UNKNOWN)


def is_missing_route(response: WalletResponse) -> bool:
    """Whether a response says that the route does not exist: 404 or 405 with JSON that has only the field `error`."""
    fields = response.json_object()
    return response.status in _MISSING_STATUSES and list(fields) == ["error"] and isinstance(fields["error"], str)


def classify_tx_response(response: WalletResponse) -> TxReply:
    """What a response to a question for a transaction says."""
    fields = response.json_object()
    if response.status == 404 and fields == _TX_NOT_FOUND:
        return TxReply(TxState.ABSENT)
    code, log = fields.get("code"), fields.get("log")
    if not isinstance(fields.get("height"), str) or type(code) is not int or not isinstance(log, str):
        return TxReply(TxState.UNKNOWN)
    try:
        events = {
            event["type"]: {attribute["key"]: attribute["value"] for attribute in event["attributes"]}
            for event in fields["events"]
        }
    except (KeyError, TypeError):
        return TxReply(TxState.UNKNOWN)
    if response.status == 422 and code != 0:
        return TxReply(TxState.FAILED, log=log)
    is_success = response.status == 200 and code == 0
    return TxReply(TxState.SUCCEEDED, events, log) if is_success else TxReply(TxState.UNKNOWN)


def is_ready(response: WalletResponse) -> bool:
    """Whether the response to `GET status` says that a helper accepts shares."""
    return response.is_success and response.json_object().get("status") == "ok"


def is_confirmed(response: WalletResponse) -> bool | None:
    """Whether the response to `GET share-status` says that a share is counted; None if it says nothing."""
    if not response.is_success:
        return None
    return {"confirmed": True, "pending": False}.get(str(response.json_object().get("status")))


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _create_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Create an object from its pairs, refusing a name that occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
