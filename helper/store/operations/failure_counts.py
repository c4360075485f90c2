"""Counts failed shares of purged rounds by day, stage and reason.

No other data about these shares is stored.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

from helper.store.table_rows import MAX_STAGE_CHARS, truncate_text
from helper.store.transaction import Transaction

RETENTION_DAYS: Final = 14
"""Days for which counts are stored."""
MAX_REASONS_PER_DAY: Final = 100
"""Maximum number of distinct pairs of stage and reason per day; all others are counted together."""
OTHER_REASON: Final = ("other", "further reasons")
DAMAGED_REASON: Final = ("damaged", "its row could not be read")
_DAY_MS: Final = 86_400_000
_IDENTIFYING_TEXT: Final = re.compile(r"[0-9A-Fa-f]{12,}|[A-Za-z0-9+/]{40,}={0,2}")
"""Text that could identify a share, such as a hash or a field in a node's error message."""


def count_failed(tx: Transaction, failed: Iterable[tuple[str, str]], at_ms: int) -> None:
    """Count failed shares that are about to be deleted.

    Args:
        failed: stage and note of each.
        at_ms: Unix milliseconds now.
    """
    day = at_ms // _DAY_MS
    kinds = Counter(
        (truncate_text(_redact(stage), MAX_STAGE_CHARS), truncate_text(_redact(note))) for stage, note in failed
    )
    for (stage, reason), number in kinds.items():
        kind: dict[str, int | str] = {"day": day, "stage": stage, "reason": reason}
        known = tx.fetch_one("has_purged_failure", kind) is not None
        if not known and (tx.fetch_one("count_purged_failure_kinds", (day,)) or (0,))[0] >= MAX_REASONS_PER_DAY:
            kind |= {"stage": OTHER_REASON[0], "reason": OTHER_REASON[1]}
        tx.execute("add_purged_failure", {**kind, "n": number})


def _redact(text: str) -> str:
    """Replace all text that could identify a share."""
    return _IDENTIFYING_TEXT.sub("…", text)


def delete_old_counts(tx: Transaction, at_ms: int) -> int:
    """Delete counts that exceed their retention or are dated in the future. Returns the number of rows."""
    day = at_ms // _DAY_MS
    return tx.execute("delete_old_purged_failures", {"first": day - RETENTION_DAYS, "last": day + 1})
