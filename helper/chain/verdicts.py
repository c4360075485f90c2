"""What a node's answer to a broadcast means. Pure: one table, read from the top, first match wins.

Chains differ from their own documents: most refusals come with code 1 and say why only in `log`. So a row
matches by a piece of the log, or by the code where the log says nothing known, never by the code alone when
the log knows better.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from helper.chain.json_fields import Fields, loads
from helper.errors import ChainAnswerError


class Spends(Enum):
    """What an outcome costs the share: nothing, one of its attempts, or its last chance."""

    NONE = "none"
    ATTEMPT = "attempt"
    FINAL = "final"


class Verdict(Enum):
    """The meaning of an answer; none of them confirms or closes anything (only blocks do)."""

    ACCEPTED = "accepted"
    """The node took it; it is not in a block yet."""
    SPENT = "spent"
    """The nullifier is spent already: success once the listener has seen it counted."""
    AMBIGUOUS = "ambiguous"
    """It may or may not have been taken: look at the nullifiers before sending it again."""
    UNAVAILABLE = "unavailable"
    """Nothing was taken: nothing left this machine, or the node would not look at it."""
    BEHIND = "behind"
    """The node does not have our anchor's root yet."""
    BAD_PROOF = "bad proof"
    """The chain's verifier refused the proof."""
    ROUND_CLOSED = "round closed"
    """The round takes no reveals (says this node: it proves nothing about an earlier send)."""
    ROUND_UNKNOWN = "round unknown"
    """The node knows no such round."""
    REFUSED_ANCHOR = "refused anchor"
    """The chain will not take this anchor: another proof at a newer one is needed."""
    REFUSED = "refused"
    """A refusal that this version has no row for."""
    PERMANENT = "permanent"
    """The message can never be taken: its fields are wrong."""

    @property
    def spends(self) -> Spends:
        """What it costs the share."""
        return _COST.get(self, Spends.NONE)


_COST = {
    Verdict.BAD_PROOF: Spends.ATTEMPT,
    Verdict.PERMANENT: Spends.FINAL,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A classified answer.

    Attributes:
        code: the chain's code, where it gave one.
        log: the chain's words, shortened, long hex numbers taken out (they name nullifiers and end up in
            logs).
        tx_hash: the hash that the node computed, upper-case hex as it came, or "".
        left: whether any byte of the message may have left this machine.
    """

    verdict: Verdict
    code: int | None = None
    log: str = ""
    tx_hash: str = ""
    left: bool = True


# (piece of the log, lower case; "" = any)  (code; None = any)  ->  verdict
REFUSALS: tuple[tuple[str, int | None, Verdict], ...] = (
    # The log knows better than the code: these come first.
    ("duplicate submission", None, Verdict.ACCEPTED),
    ("already exists in cache", None, Verdict.ACCEPTED),
    ("already in mempool", None, Verdict.ACCEPTED),
    ("nullifier already spent", None, Verdict.SPENT),
    (
        "no commitment tree root at height",
        None,
        Verdict.BEHIND,
    ),  # stands inside "invalid zero-knowledge proof"
    ("mempool is full", None, Verdict.UNAVAILABLE),
    ("vote round is not active", None, Verdict.ROUND_CLOSED),
    ("vote_end_time", None, Verdict.ROUND_CLOSED),
    ("vote round not found", None, Verdict.ROUND_UNKNOWN),
    ("anchor height", None, Verdict.REFUSED_ANCHOR),
    ("anchor_height", None, Verdict.REFUSED_ANCHOR),
    ("invalid zero-knowledge proof", None, Verdict.BAD_PROOF),
    ("invalid message field", None, Verdict.PERMANENT),
    ("invalid proposal", None, Verdict.PERMANENT),
    # Codes on paper, for logs that say nothing known.
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

# How a chain's 400 begins.
_READ_AND_REFUSED = ("validation failed:", "invalid JSON:")
# HTTP statuses that mean "not looked at": nothing can have been taken.
_NOT_LOOKED_AT = frozenset({401, 403, 404, 405, 410, 411, 413, 415, 421, 429, 501, 503})
_LONG = re.compile(r"[0-9A-Fa-f]{16,}|[A-Za-z0-9+/]{40,}={0,2}")


def classify(status: int | None, body: bytes | None, sent: bool) -> Outcome:
    """What the answer to a broadcast means.

    `status` and `body` are None when there was no whole answer; `sent` then says whether any byte may have
    left.
    """
    if status is None or body is None:
        return Outcome(Verdict.AMBIGUOUS if sent else Verdict.UNAVAILABLE, left=sent)
    if status in _NOT_LOOKED_AT or 300 <= status < 400:
        return Outcome(Verdict.UNAVAILABLE, log=f"HTTP {status}")
    try:
        fields = Fields(loads(body, "broadcast"), "broadcast")
        code = fields.uint("code") if fields.has("code") else None
        log, tx_hash, error = fields.text("log"), fields.text("tx_hash"), fields.text("error")
    except ChainAnswerError as problem:
        return Outcome(Verdict.AMBIGUOUS, log=f"HTTP {status}: {problem}")
    if status == 400 and error:
        # The chain's own words about a message that it could read; anything else may be a proxy's.
        verdict = Verdict.PERMANENT if error.startswith(_READ_AND_REFUSED) else Verdict.REFUSED
    elif status not in (200, 422) or (code is None and not tx_hash):
        verdict = Verdict.AMBIGUOUS
    elif status == 200 and not code:
        verdict = Verdict.ACCEPTED
    else:
        verdict = verdict_of(code, log)
    return Outcome(verdict, code, presentable(log or error), tx_hash)


def verdict_of(code: int | None, log: str) -> Verdict:
    """What a chain's refusal means, of a message that was sent or of one that failed in a block."""
    text = log.lower()
    return next(verdict for piece, number, verdict in REFUSALS if piece in text and (number is None or number == code))


def presentable(text: str) -> str:
    """A node's words as they may stand in our logs: one line, 300 characters, no long hex or base64."""
    return _LONG.sub("…", " ".join(text.split()))[:300]
