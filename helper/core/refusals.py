"""Why requests are refused and work is paused, and which response a refused request gets. Pure.

The texts are public and identify no share or node.

Every client that is known takes another helper, or repeats the request, after a 503. After a 429 several of them give
the share or the whole vote up, except those that name their attempt (`ATTEMPT_HEADER`): these repeat the request at the
same helper. A situation that may pass never has another status, because clients treat the others as final. The only
exception is the receipt of a slow body, which the header requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from http import HTTPStatus
from typing import Final

from helper.errors import HelperError

RETRY_AFTER_SECONDS: Final = 2
"""`Retry-After` of a 429 or 503. A wallet waits this long before it takes another helper, so it is short."""
RETRYABLE_STATUSES: Final = frozenset({408, 429, 503})
"""Statuses after which wallets retry the same share."""
ATTEMPT_HEADER: Final = "X-Vote-Ingress-Attempt-V1"
"""Request header with a wallet's token for one attempt."""

_HEADER: Final = ATTEMPT_HEADER.lower().encode()
_TOKEN: Final = re.compile(rb"[0-9a-f]{64}")
_OVERLOADED: Final = HTTPStatus.TOO_MANY_REQUESTS
_RECEIPT: Final = HTTPStatus.REQUEST_TIMEOUT
_PAUSED: Final = HTTPStatus.SERVICE_UNAVAILABLE


class Situation(Enum):
    """Situations: the status for requests that name their attempt, and the text. All other requests get 503."""

    VOTE_NOT_SYNCED = _OVERLOADED, "the vote is not in a known block yet; retry later"
    PROPOSALS_UNCONFIRMED = _OVERLOADED, "the round's proposals are not confirmed yet; retry later"
    TOO_MANY_REQUESTS = _OVERLOADED, "too many requests; retry later"
    TOO_MANY_WAITING = _OVERLOADED, "too many shares are waiting for the chain; retry later"
    TOO_MANY_CHAIN_REQUESTS = _OVERLOADED, "too many concurrent requests to the chain; retry later"
    TOO_MANY_SLOW_REQUESTS = _OVERLOADED, "too many slow requests; retry later"
    TOO_MANY_CONNECTIONS = _OVERLOADED, "too many connections; retry later"
    SLOW_HEAD = _PAUSED, "request headers timed out after {:g} s"
    SLOW_BODY = _RECEIPT, "body: was not received in time"
    PAUSED = _PAUSED, "shares cannot be accepted now: {}"
    STARTING = _PAUSED, "starting"
    STOPPING = _PAUSED, "the service is stopping; retry later"
    QUEUE_UNWRITABLE = _PAUSED, "the queue cannot be written now; retry later"
    NO_CHAIN_NODE = _PAUSED, "no chain node is reachable"
    NOTHING_SENT = _PAUSED, "nothing was sent: no chain node is reachable"

    @property
    def text(self) -> str:
        """Error text, with a placeholder for each detail."""
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A response to a request that may pass later.

    Attributes:
        text: error text without any value of the request.
    """

    status: HTTPStatus
    text: str

    @property
    def is_receipt(self) -> bool:
        """Whether the body is the receipt of the attempt, which replaces the text."""
        return self.status is _RECEIPT


class TemporaryRefusal(HelperError):
    """A request was refused that may pass later; `find_refusal` has the response.

    Attributes:
        details: values for the placeholders of the situation's text.
        headers: additional headers of the response.
    """

    advice = "No action is needed; the client retries, or takes another helper."

    def __init__(self, situation: Situation, *details: object, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(situation.text.format(*details))
        self.situation = situation
        self.details = details
        self.headers = headers


def find_refusal(situation: Situation, *details: object, names_attempt: bool) -> Refusal:
    """Look up the response to a request.

    Args:
        details: values for the placeholders of the situation's text.
        names_attempt: whether the request has an `attempt_token`.
    """
    status, text = situation.value
    if not names_attempt:
        status = _PAUSED
    return Refusal(status, text.format(*details))


def retry_after_of(status: int) -> int | None:
    """`Retry-After` of a response with this status; None for no such header."""
    return RETRY_AFTER_SECONDS if status in (_OVERLOADED, _PAUSED) else None


def attempt_token(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The token of an attempt: the only value of its header, 32 bytes in lower-case hex; otherwise None.

    Args:
        headers: names in lower case, and values.
    """
    values = [value for name, value in headers if name == _HEADER]
    return values[0].decode() if len(values) == 1 and _TOKEN.fullmatch(values[0]) is not None else None


class PauseReason(StrEnum):
    """Reasons of a pause, some with placeholders for details. Others are texts of the store, a round or the sender."""

    STARTING = "starting"
    CHAIN_NOT_READ = "starting: chain state not read yet"
    QUEUE_UNWRITABLE = "the queue cannot be written"
    CLOCK_OFF_CHAIN = "this machine's clock differs too much from the chain's"
    CLOCK_OFF_DATABASE = "this machine's clock is {:.1f} s {} the database's"
    QUEUE_USED_ELSEWHERE = "host {!r} uses this queue or a copy of it"
    LEASE_HOLDER_UNKNOWN = "not known yet whether another host uses this queue"
    LEASE_UNREACHABLE = "lease storage unreachable for too long: another host may hold the lease"
    NO_NODE_IN_SYNC = "no chain node is in sync"
    BLOCKS_UNREAD = "reading the blocks since the last shutdown"
    ROUND_TREE_CONTRADICTED = "no node returns a consistent tree of the round"
    ROUND_END_UNCONFIRMED = "a change of the round's end is not confirmed yet"
    ROUND_STATUS_UNCONFIRMED = "a change of the round's status is not confirmed yet"
    CIRCUIT_REFUSED = (
        'the chain rejects valid {0} proofs: it uses the other circuit; set [prover] circuit = "auto" or "{1}"'
    )
    EVERY_CIRCUIT_REFUSED = "the chain rejects valid proofs of {}: check its nodes"
