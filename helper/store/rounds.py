"""Operations on rounds and their trees: store, mark as closed, fail unconfirmed shares, purge and count failures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson

from helper.core.share import UNCONFIRMED_STATES, ShareState
from helper.errors import LeavesMissing, StoreCorrupt, StoreError
from helper.store.blocks import add_unread, delete_share
from helper.store.models import StoredRound
from helper.store.table_rows import MAX_STAGE_CHARS, RoundRow, is_sound, truncate_text, with_check
from helper.store.transaction import Transaction, exclusive
from helper.store.transitions import CLOSED_STAGE, Transition, apply_transition_to_batch

RETENTION_DAYS: Final = 14
"""Days for which counts are stored."""
MAX_REASONS_PER_DAY: Final = 100
"""Maximum number of distinct pairs of stage and reason per day; all others are counted together."""
OTHER_REASON: Final = ("other", "further reasons")
DAMAGED_REASON: Final = ("damaged", "its row could not be read")
_DAY_MS: Final = 86_400_000
_IDENTIFYING_TEXT: Final = re.compile(r"[0-9A-Fa-f]{12,}|[A-Za-z0-9+/]{40,}={0,2}")
"""Text that could identify a share, such as a hash or a field in a node's error message."""


def count_failed(tx: Transaction, failed: Iterable[tuple[str, str]]) -> None:
    """Count failed shares, given by stage and note, that are about to be deleted. No other data of them is stored."""
    day = tx.now_ms // _DAY_MS
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
    return _IDENTIFYING_TEXT.sub("…", text)


def delete_old_failure_counts(tx: Transaction) -> int:
    """Delete counts that exceed their retention or are dated in the future. Returns the number of rows."""
    day = tx.now_ms // _DAY_MS
    return tx.execute("delete_old_purged_failures", {"first": day - RETENTION_DAYS, "last": day + 1})


LEAF_BYTES: Final = 32
SUBTREE_BYTES: Final = 1023 * 32


@exclusive
def save_leaves(tx: Transaction, round_id: bytes, height: int, start: int, leaves: bytes) -> None:
    """Store the leaves that one block appended to a round's tree (n × 32 bytes). Idempotent.

    Raises:
        LeavesMissing: earlier leaves are not stored.
        StoreError: they contradict the stored leaves, or are not complete.
    """
    if len(leaves) % LEAF_BYTES or start < 0:
        raise StoreError("leaves must have 32 bytes each", advice="This is a bug in the helper: report it.")
    if not leaves:
        return
    tx.lock_exclusive()
    key = tx.ensure_round(round_id)
    last = tx.fetch_one("last_leaves", (key.no,))
    size = 0 if last is None else last[0] + last[2]
    if start > size:
        raise LeavesMissing(size)
    stop = start + len(leaves) // LEAF_BYTES
    known = min(stop, size) - start
    if known and _stored_leaves(tx, key.no, start, start + known) != leaves[: known * LEAF_BYTES]:
        raise StoreError(f"the leaves from index {start} contradict the stored leaves")
    if stop > size:
        tx.execute("add_leaves", (key.no, size, height, leaves[known * LEAF_BYTES :]))


def _stored_leaves(tx: Transaction, round_no: int, start: int, stop: int) -> bytes:
    """Return the leaves from `start` to `stop`, all of which are stored."""
    rows = tx.fetch_all("leaves_between", {"round_no": round_no, "start": start, "stop": stop})
    first = rows[0][0] if rows else start
    leaves = b"".join(row[1] for row in rows)
    return leaves[(start - first) * LEAF_BYTES : (stop - first) * LEAF_BYTES]


@exclusive
def save_subtrees(tx: Transaction, round_id: bytes, first_index: int, subtrees: bytes) -> None:
    """Store the inner nodes of complete subtrees (each 1023 × 32 bytes), from subtree `first_index` on.

    Raises:
        StoreError: a subtree is incomplete.
    """
    if len(subtrees) % SUBTREE_BYTES:
        raise StoreError("subtrees must be complete", advice="This is a bug in the helper: report it.")
    tx.lock_exclusive()
    key = tx.ensure_round(round_id)
    for n in range(len(subtrees) // SUBTREE_BYTES):
        tx.execute("add_subtree", (key.no, first_index + n, subtrees[n * SUBTREE_BYTES : (n + 1) * SUBTREE_BYTES]))


@exclusive
def delete_tree(tx: Transaction, round_id: bytes) -> None:
    """Delete a round's leaves and subtrees."""
    tx.lock_exclusive()
    key = tx.round_key(round_id)
    if key is not None:
        tx.execute("drop_leaves", (key.no,))
        tx.execute("drop_subtrees", (key.no,))


@exclusive
def save_rounds(tx: Transaction, rounds: Sequence[StoredRound], now: float) -> None:
    """Store rounds as the chain lists them. The marks of stored rounds are unchanged."""
    tx.lock_exclusive()
    for listed in rounds:
        round_no = tx.ensure_round(listed.round_id).no
        stored = tx.read_round(round_no)
        row = RoundRow(
            round_no=round_no,
            status=listed.status,
            vote_end_time=listed.vote_end_time,
            created_at_height=listed.created_at_height,
            proposals=orjson.dumps(listed.proposals).decode(),
            seen_ms=int(now * 1000),
            closed_ms=None if stored is None else stored.closed_ms,
            alerted_ms=None if stored is None else stored.alerted_ms,
        )
        tx.execute("save_round", with_check(tx.keys.row_check, row))
        if stored is None:  # its nullifiers were left out when its blocks were read
            add_unread(tx, listed.created_at_height)
            tx.clear_round_cache()  # a damaged row, which had a mark perhaps, is replaced by one without


@exclusive
def mark_closed(tx: Transaction, round_id: bytes, now: float) -> None:
    """Record that the chain has closed a round; an earlier mark is unchanged."""
    _mark(tx, round_id, "closed_ms", now)


@exclusive
def mark_alerted(tx: Transaction, round_id: bytes, now: float) -> None:
    """Record that a round's unconfirmed shares were reported; an earlier mark is unchanged."""
    _mark(tx, round_id, "alerted_ms", now)


def _mark(tx: Transaction, round_id: bytes, column: str, now: float) -> None:
    """Write the time to a column of a stored round that is NULL."""
    tx.lock_exclusive()
    key = tx.round_key(round_id)
    stored = None if key is None else tx.read_round(key.no)
    if stored is not None and getattr(stored, column) is None:
        marked: dict[str, Any] = {column: int(now * 1000)}
        tx.execute("save_round", with_check(tx.keys.row_check, stored._replace(**marked)))
        tx.clear_round_cache()


@exclusive
def fail_unconfirmed(tx: Transaction, limit: int, round_id: bytes, *, note: str) -> tuple[int, bool]:
    """Fail up to `limit` unconfirmed shares of a closed round. Returns how many, and whether there may be more."""
    tx.lock_exclusive()
    key = tx.round_key(round_id)
    if key is None:
        return 0, False
    params = {"round_no": key.no, "limit": limit}
    ids = [row[0] for row in tx.fetch_all("round_waiting_verified", params)]
    ids += [row[0] for row in tx.fetch_all("round_in_progress_verified", params)]
    change = Transition(UNCONFIRMED_STATES, ShareState.FAILED, CLOSED_STAGE, note, ignore_claim=True)
    return apply_transition_to_batch(tx, ids, change)


@exclusive
def purge(tx: Transaction, limit: int, round_id: bytes) -> tuple[int, bool]:
    """Delete a part of the data of a closed round.

    Failed shares remain only as counts by stage and reason (`Store.list_purged_failures`).

    Returns:
        The number of deleted shares and tombstones, and whether data of the round is left.

    Raises:
        StoreCorrupt: an index lists only shares that do not exist.
    """
    tx.lock_exclusive()
    key = tx.round_key(round_id)
    if key is None:
        return 0, False
    params = {"round_no": key.no, "limit": limit}
    ids = [(row[0], ShareState.WAITING.value) for row in tx.fetch_all("round_waiting", params)]
    ids += [(row[0], row[1]) for row in tx.fetch_all("round_not_waiting", params)]
    if ids:
        failures = [_read_failure(tx, share_id) for share_id, _ in ids]
        count_failed(tx, [failure for failure in failures if failure is not None])
        deleted = sum(delete_share(tx, share_id, key.no, state) for share_id, state in ids)
        if not deleted:
            raise StoreCorrupt("the database is damaged: an index lists shares of a closed round that do not exist")
        return deleted, True
    deleted_tombstones = tx.execute("purge_tombstones", params)
    tx.adjust_count(key.no, ShareState.CONFIRMED, -deleted_tombstones)
    tx.has_deleted_rows = True
    if deleted_tombstones:
        return deleted_tombstones, True
    if tx.execute("purge_spent", params):
        return 0, True
    tx.flush_counts()
    for name in ("drop_leaves", "drop_subtrees", "purge_counters", "purge_round", "purge_round_key"):
        tx.execute(name, (key.no,))
    tx.clear_round_cache()
    return 0, False


def _read_failure(tx: Transaction, share_id: int) -> tuple[str, str] | None:
    """Return stage and reason of a failed share that is about to be deleted; None if it has not failed."""
    row = tx.get_share(share_id)
    if row is None or not is_sound(tx.keys.row_check, row):
        return DAMAGED_REASON
    return (row.stage, row.note) if row.state == ShareState.FAILED else None
