"""Why a helper refuses: one table of statuses and words by reason, against which every refusal is judged. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from conformance.check_failures import CheckFailed, require
from conformance.http_requests import Reply


@dataclass(frozen=True, slots=True)
class _Expected:
    """How a refusal looks.

    Attributes:
        statuses: its HTTP status.
        words: pattern that only the text of this reason has; empty if its texts differ too much.
    """

    statuses: frozenset[int]
    words: str = ""


class Reason(Enum):
    """Why a request is refused. Other texts are of no reason, and fit each whose status they have."""

    CONTENT = _Expected(frozenset({400, 422}), r"\bjson\b")
    """Syntax, encodings, ranges, hashes, the leaf, and the choice."""
    CODING = _Expected(frozenset({400, 415, 422}), r"\bjson\b|content.(type|encoding)|charset")
    SIZE = _Expected(frozenset({400, 413}), r"body.{0,20}too large|body.{0,20}\blimit|\bjson\b")
    """Newer versions of the original call a body that they cannot read completely broken JSON, also a slow one."""
    TIME = _Expected(frozenset({400, 422}), r"submit_at|vote_end|too late")
    ROUND = _Expected(
        frozenset({400, 404, 422}), r"(unknown|no such|not found).{0,20}round|round.{0,20}(unknown|not f)"
    )
    CLOSED = _Expected(frozenset({400, 409, 410, 422}), r"round.{0,30}(active|closed|ended|over\b)")
    CONFLICT = _Expected(frozenset({400, 409, 422}), r"conflict")
    TOKEN = _Expected(frozenset({401}), r"unauthori[sz]ed|helper.token")
    TIMEOUT = _Expected(frozenset({400, 408, 503}), r"time(d )?.?out|\bjson\b")
    """Without a valid token 503 is best (zkool and old ZODL give a share up after 400); the original sends 400."""
    LATER = _Expected(
        frozenset({429, 503}), r"catching up|stale|unavailable|paused|overload|\bbusy|(try|retry).{0,8}later"
    )
    """503 without the attempt header, 429 with it, is best: two wallets give a share up after 429."""


_SHARE_FIELDS: Final = re.compile(
    r"\b(shares_hash|primary_blind|share_comms|enc_share|c1|c2|share_index|vote_round_id|proposal_id|vote_decision"
    r"|tree_position|submit_at)\b"
)
_CONSEQUENCES: Final = ("shares_hash", "share_comms", "tree_position")
"""Fields that the alteration of another field contradicts: the hashes, and the leaf at the position."""


def refused(sent: str, reply: Reply, *reasons: Reason, path: Sequence[str] = ()) -> str:
    """Require a refusal for one of these reasons. Returns the observation.

    Args:
        sent: the request, for the observation.
        path: the altered field, after the objects that it is in. A text that names only other fields does not fit.

    Raises:
        CheckFailed: it is no refusal, or its status or text is that of another reason.
    """
    seen = f"{sent} → {reply}"
    require(any(reply.status in reason.value.statuses for reason in reasons), seen)
    text = reply.error
    named = {reason for reason in Reason if reason.value.words and re.search(reason.value.words, text, re.IGNORECASE)}
    if named and not named & set(reasons):
        raise CheckFailed(f"{seen}: refused for another reason ({', '.join(sorted(each.name for each in named))})")
    fields = set(_SHARE_FIELDS.findall(text)).difference(path[:-1])
    if path and fields and not fields & {path[-1], *_CONSEQUENCES}:
        raise CheckFailed(f"{seen}: refused for another field ({', '.join(sorted(fields))})")
    return seen
