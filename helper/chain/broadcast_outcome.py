"""Classifies a node's response to a broadcast. Pure: one table, first match wins.

Chains deviate from their documentation: most refusals have code 1 and give the reason only in `log`. Therefore the rows
that match a part of the log come first; the code decides only if the log contains no known text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from helper.chain.json_fields import Fields, loads
from helper.errors import ChainResponseError


class Verdict(Enum):
    """Meaning of a response. No verdict confirms a share or closes a round; only blocks do."""

    ACCEPTED = "accepted"
    """The node accepted the message; it is not in a block yet."""
    SPENT = "spent"
    """The nullifier is already spent: success once the block follower has seen it counted."""
    AMBIGUOUS = "ambiguous"
    """The message may have been accepted: check the nullifiers before resending it."""
    UNAVAILABLE = "unavailable"
    """The message was not accepted: nothing was sent, or the node did not process it."""
    BEHIND = "behind"
    """The node does not have the anchor's root yet."""
    BAD_PROOF = "bad proof"
    """The chain's verifier rejected the proof."""
    ROUND_CLOSED = "round closed"
    """This node reports that the round accepts no reveals. That proves nothing about an earlier send."""
    ROUND_UNKNOWN = "round unknown"
    """The node does not know the round."""
    REFUSED_ANCHOR = "refused anchor"
    """The chain refuses this anchor: a new proof at a newer anchor is needed."""
    REFUSED = "refused"
    """A refusal that this version does not know."""
    PERMANENT = "permanent"
    """The message can never be accepted: its fields are invalid."""


MESSAGE_REFUSALS = frozenset({Verdict.BAD_PROOF, Verdict.PERMANENT})
"""Refusals of the message itself. Only these can spend an attempt, and only if every node confirms them."""


@dataclass(frozen=True, slots=True)
class BroadcastOutcome:
    """A classified response.

    Attributes:
        log: the chain's message, truncated and without long hex numbers, which can be nullifiers.
        tx_hash: the hash that the node returned, in hex, or "".
        may_be_sent: whether any byte of the message may have left this machine.
        retry_after: seconds that the node asks to wait before the next reveal, None if it does not.
    """

    verdict: Verdict
    log: str = ""
    tx_hash: str = ""
    may_be_sent: bool = True
    retry_after: int | None = None


# (part of the log, lower case; "" = any)  (code; None = any)  ->  verdict
REFUSALS: tuple[tuple[str, int | None, Verdict], ...] = (
    # The log is more reliable than the code, so these come first.
    ("duplicate submission", None, Verdict.ACCEPTED),
    ("already exists in cache", None, Verdict.ACCEPTED),
    ("already in mempool", None, Verdict.ACCEPTED),
    ("nullifier already spent", None, Verdict.SPENT),
    # Must precede "invalid zero-knowledge proof", which is part of the same log.
    ("no commitment tree root at height", None, Verdict.BEHIND),
    ("mempool is full", None, Verdict.UNAVAILABLE),
    ("vote round is not active", None, Verdict.ROUND_CLOSED),
    ("vote_end_time", None, Verdict.ROUND_CLOSED),
    ("vote round not found", None, Verdict.ROUND_UNKNOWN),
    ("anchor height", None, Verdict.REFUSED_ANCHOR),
    ("anchor_height", None, Verdict.REFUSED_ANCHOR),
    ("invalid zero-knowledge proof", None, Verdict.BAD_PROOF),
    ("invalid message field", None, Verdict.PERMANENT),
    ("invalid proposal", None, Verdict.PERMANENT),
    # Documented codes, for logs without known text.
    ("", 2, Verdict.SPENT),
    ("", 3, Verdict.ROUND_UNKNOWN),
    ("", 4, Verdict.ROUND_CLOSED),
    ("", 5, Verdict.BAD_PROOF),
    ("", 7, Verdict.REFUSED_ANCHOR),
    ("", 8, Verdict.PERMANENT),
    ("", 9, Verdict.PERMANENT),
    ("", 13, Verdict.PERMANENT),
    ("", None, Verdict.REFUSED),
)

# Prefixes of the chain's own errors in a 400 response.
_CHAIN_ERROR_PREFIXES = ("validation failed:", "invalid JSON:")
# Prefix of a 400 response of a node that could not read the whole request, for example in time.
_UNREAD_ERROR_PREFIX = "read body:"
# HTTP statuses with which the message was not processed.
_NOT_PROCESSED_STATUSES = frozenset({401, 403, 404, 405, 410, 411, 413, 415, 421, 429, 501, 503})
_DELAY_STATUSES = frozenset({429, 503})  # those that define `Retry-After`, except redirects
_MAX_LOGGED_CHARACTERS = 300
_LONG_DATA_PATTERN = re.compile(r"[0-9A-Fa-f]{16,}|[A-Za-z0-9+/]{40,}={0,2}")


def create_unanswered(log: str, *, may_be_sent: bool) -> BroadcastOutcome:
    """Create the outcome of a broadcast without a complete response."""
    return BroadcastOutcome(Verdict.AMBIGUOUS if may_be_sent else Verdict.UNAVAILABLE, log, may_be_sent=may_be_sent)


def classify_response(status: int, body: bytes, *, retry_after: int | None = None) -> BroadcastOutcome:
    """Classify the response to a broadcast. `retry_after` is its `Retry-After` in seconds, None without one."""
    if status in _NOT_PROCESSED_STATUSES or 300 <= status < 400:
        return BroadcastOutcome(
            Verdict.UNAVAILABLE, log=f"HTTP {status}", retry_after=retry_after if status in _DELAY_STATUSES else None
        )
    try:
        fields = Fields(loads(body, "broadcast"), "broadcast")
        code = fields.uint("code") if fields.has("code") else None
        log, tx_hash, error = fields.text("log"), fields.text("tx_hash"), fields.text("error")
    except ChainResponseError as problem:
        return BroadcastOutcome(Verdict.AMBIGUOUS, log=f"HTTP {status}: {problem}")
    if status == 400 and error:
        # Only these prefixes are the chain's own verdict; anything else may come from a proxy.
        verdict = Verdict.PERMANENT if error.startswith(_CHAIN_ERROR_PREFIXES) else Verdict.REFUSED
        verdict = Verdict.UNAVAILABLE if error.startswith(_UNREAD_ERROR_PREFIX) else verdict
    elif status not in (200, 422) or (code is None and not tx_hash):
        verdict = Verdict.AMBIGUOUS
    elif status == 200 and not code:
        verdict = Verdict.ACCEPTED
    else:
        verdict = classify_refusal(code, log)
    return BroadcastOutcome(verdict, sanitize_text(log or error), tx_hash)


def classify_refusal(code: int | None, log: str) -> Verdict:
    """Classify a chain's refusal, in a response to a broadcast or in a block."""
    text = log.lower()
    return next(verdict for piece, number, verdict in REFUSALS if piece in text and (number is None or number == code))


def sanitize_text(text: str) -> str:
    """Make a node's text safe for logs.

    The result is one line of at most 300 characters, without long hex or base64. Only the beginning of the text is
    read: a node may send megabytes, and all other tasks wait for the pattern.
    """
    beginning = " ".join(text[: 8 * _MAX_LOGGED_CHARACTERS].split())
    return _LONG_DATA_PATTERN.sub("…", beginning)[:_MAX_LOGGED_CHARACTERS]
