"""Operations on data from the chain: rounds, spent nullifiers and tree leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson

from helper.core.share import ShareState
from helper.errors import StoreCorrupt, StoreError
from helper.store.block_ranges import add_range, format_ranges, parse_ranges, remove_range
from helper.store.meta import make_meta_row, read_meta_value
from helper.store.operations.failure_counts import DAMAGED_REASON, count_failed
from helper.store.operations.transitions import CLOSED_STAGE, Transition, apply_transition
from helper.store.records import RoundRow
from helper.store.rows import RoundLike, SpentNullifier
from helper.store.transaction import Transaction

CURSOR_KEY: Final = "chain.cursor"
UNREAD_KEY: Final = "chain.unread"
LEAF_BYTES: Final = 32
SUBTREE_BYTES: Final = 1023 * 32
MAC_BYTES: Final = 32
_LIVE_STATES: Final = frozenset(ShareState) - {ShareState.SUBMITTED}


def save_rounds(tx: Transaction, rounds: Sequence[RoundLike], at_ms: int) -> None:
    """Store rounds as the chain lists them; their closed and alerted marks are unchanged."""
    tx.lock_exclusive()
    for listed in rounds:
        round_no = tx.ensure_round(listed.round_id).no
        stored = tx.read_round(round_no)
        proposals = [[proposal.id, list(proposal.options)] for proposal in listed.proposals]
        row = RoundRow(
            round_no=round_no,
            status=int(listed.status),
            vote_end_time=listed.vote_end_time,
            created_at_height=listed.created_at_height,
            proposals=orjson.dumps(proposals).decode(),
            seen_ms=at_ms,
            closed_ms=None if stored is None else stored.closed_ms,
            alerted_ms=None if stored is None else stored.alerted_ms,
        )
        tx.execute("save_round", row.with_check(tx.keys.row_check))


def mark_closed(tx: Transaction, round_id: bytes, at_ms: int) -> None:
    """Record that the chain has closed a round; an earlier mark is unchanged."""
    tx.lock_exclusive()
    key = tx.round_key(round_id)
    stored = None if key is None else tx.read_round(key.no)
    if stored is not None and stored.closed_ms is None:
        tx.execute("save_round", stored._replace(closed_ms=at_ms).with_check(tx.keys.row_check))


def mark_alerted(tx: Transaction, round_id: bytes, at_ms: int) -> None:
    """Record that a round's unsubmitted shares were reported; an earlier mark is unchanged."""
    tx.lock_exclusive()
    key = tx.round_key(round_id)
    stored = None if key is None else tx.read_round(key.no)
    if stored is not None and stored.alerted_ms is None:
        tx.execute("save_round", stored._replace(alerted_ms=at_ms).with_check(tx.keys.row_check))


def set_meta(tx: Transaction, key: str, value: str) -> None:
    """Store a text in `meta`."""
    tx.execute("set_meta", make_meta_row(key, value))


def add_spent(tx: Transaction, spent: Sequence[SpentNullifier], at_ms: int) -> list[int]:
    """Store nullifiers counted by the chain, and replace our shares among them with tombstones.

    Returns:
        The ids of the shares that this call confirmed.
    """
    if tx.are_all_spent(spent):
        return []
    tx.lock_exclusive()
    return _apply_spent(tx, spent, at_ms)


def _apply_spent(tx: Transaction, spent: Sequence[SpentNullifier], at_ms: int) -> list[int]:
    """Implement `add_spent` under the exclusive lock."""
    if tx.are_all_spent(spent):
        return []  # another host applied them while this one waited for the lock
    # Insert all public nullifiers first, then delete our shares in order of id. Otherwise the write order in the
    # database's log would link a nullifier to the share that is deleted for it.
    numbers = [(tx.ensure_round(round_id).no, nullifier) for round_id, nullifier in spent]
    tx.execute_many("add_spent", numbers)
    ours = tx.find_shares_by_nullifier(numbers)
    return [
        share_id for share_id, round_no, nullifier in ours if _confirm_share(tx, share_id, round_no, nullifier, at_ms)
    ]


def _confirm_share(tx: Transaction, share_id: int, round_no: int, nullifier: bytes, at_ms: int) -> bool:
    """Replace the share that has this nullifier with a tombstone. This is the only transition to SUBMITTED.

    A damaged share is confirmed too, as far as possible, because a damaged row must not block processing of the block.
    """
    row = tx.get_share(share_id)
    if row is None:
        return False
    if (row.round_no, row.nullifier) != (round_no, nullifier):
        if row.is_sound(tx.keys.row_check):
            if row.nullifier != nullifier:
                tx.handle_index_damage()
        else:
            tx.set_aside(share_id, row.to_damaged_share(), at_ms)
        return False
    if isinstance(row.mac, bytes) and len(row.mac) == MAC_BYTES and tx.execute("insert_tombstone", (round_no, row.mac)):
        tx.adjust_count(round_no, ShareState.SUBMITTED, 1)
    _delete_share(tx, share_id, round_no, row.state)
    return True


def _delete_share(tx: Transaction, share_id: int, round_no: int, state: int) -> bool:
    """Delete a live share. Returns whether it existed."""
    # One row per statement, because SQLite writes a statement journal over 64 kB to a file.
    existed = tx.execute("delete_share", (share_id,)) == 1
    tx.execute("drop_damaged", (share_id,))
    tx.release_claim(share_id)
    if state in _LIVE_STATES:  # in a damaged row, the column may hold any value
        tx.adjust_count(round_no, state, -1)
    tx.has_deleted_rows = True
    return existed


def apply_block(tx: Transaction, height: int, spent: Sequence[SpentNullifier], at_ms: int) -> list[int]:
    """Apply the nullifiers of a block and advance the cursor to it; see `Store.apply_block`.

    Every host reads every block. If another host has applied it already, no exclusive lock is taken.
    """
    if tx.are_all_spent(spent) and _has_reached(tx, height):
        return []
    tx.lock_exclusive()
    confirmed = _apply_spent(tx, spent, at_ms)
    if not _has_reached(tx, height):
        set_meta(tx, CURSOR_KEY, str(height))
    return confirmed


def skip_to(tx: Transaction, height: int, first: int) -> None:
    """Advance the cursor to `height` and record the skipped blocks as unread; see `Store.skip_to`."""
    tx.lock_exclusive()
    cursor = _read_cursor(tx)
    if cursor is not None:
        if cursor >= height:
            return
        first = cursor + 1
    if first <= height:
        set_meta(tx, UNREAD_KEY, format_ranges(add_range(_read_unread_ranges(tx), first, height)))
    set_meta(tx, CURSOR_KEY, str(height))


def rewind_to(tx: Transaction, height: int, first: int) -> None:
    """Move the cursor down to `height` and record the blocks from `first` to it as unread; see `Store.rewind_to`."""
    tx.lock_exclusive()
    cursor = _read_cursor(tx)
    if cursor is None or cursor <= height:
        return
    ranges = remove_range(_read_unread_ranges(tx), height + 1, cursor)
    if first <= height:
        ranges = add_range(ranges, first, height)
    set_meta(tx, UNREAD_KEY, format_ranges(ranges))
    set_meta(tx, CURSOR_KEY, str(height))


def apply_unread(tx: Transaction, first: int, last: int, spent: Sequence[SpentNullifier], at_ms: int) -> list[int]:
    """Apply the nullifiers of the unread blocks from `first` to `last`, and record these blocks as read."""
    tx.lock_exclusive()
    confirmed = _apply_spent(tx, spent, at_ms)
    set_meta(tx, UNREAD_KEY, format_ranges(remove_range(_read_unread_ranges(tx), first, last)))
    return confirmed


def _read_unread_ranges(tx: Transaction) -> list[tuple[int, int]]:
    return parse_ranges(read_meta_value(tx.fetch_all("get_meta", (UNREAD_KEY,))))


def _read_cursor(tx: Transaction) -> int | None:
    text = read_meta_value(tx.fetch_all("get_meta", (CURSOR_KEY,)))
    return None if text is None else int(text)


def _has_reached(tx: Transaction, height: int) -> bool:
    """Return whether the cursor is at a height or above it."""
    cursor = _read_cursor(tx)
    return cursor is not None and cursor >= height


# ---------------------------------------------------------------------- commitment trees


def save_leaves(tx: Transaction, round_id: bytes, height: int, start: int, leaves: bytes) -> None:
    """Append leaves to a round's tree. Leaves that are stored already must be equal.

    Raises:
        StoreError: they contradict the stored leaves, leave a gap, or are not complete.
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
        raise StoreError(f"cannot store leaves from index {start}: only {size} leaves are stored, some are missing")
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


def save_subtrees(tx: Transaction, round_id: bytes, first_index: int, subtrees: bytes) -> None:
    """Store the inner nodes of complete subtrees, from subtree `first_index` on.

    Raises:
        StoreError: a subtree is incomplete.
    """
    if len(subtrees) % SUBTREE_BYTES:
        raise StoreError("subtrees must be complete", advice="This is a bug in the helper: report it.")
    tx.lock_exclusive()
    key = tx.ensure_round(round_id)
    for n in range(len(subtrees) // SUBTREE_BYTES):
        tx.execute("add_subtree", (key.no, first_index + n, subtrees[n * SUBTREE_BYTES : (n + 1) * SUBTREE_BYTES]))


def delete_tree(tx: Transaction, round_id: bytes) -> None:
    """Delete a round's leaves and subtrees."""
    tx.lock_exclusive()
    key = tx.round_key(round_id)
    if key is not None:
        tx.execute("drop_leaves", (key.no,))
        tx.execute("drop_subtrees", (key.no,))


# ---------------------------------------------------------------------- closing and purging


def fail_unconfirmed_batch(tx: Transaction, round_id: bytes, note: str, at_ms: int, limit: int) -> int:
    """Fail up to `limit` unconfirmed shares of a closed round. Returns how many; 0 if there are no more."""
    tx.lock_exclusive()
    key = tx.round_key(round_id)
    if key is None:
        return 0
    params = {"round_no": key.no, "limit": limit}
    ids = [row[0] for row in tx.fetch_all("round_waiting_verified", params)]
    ids += [row[0] for row in tx.fetch_all("round_in_progress_verified", params)]
    sources = frozenset({ShareState.RECEIVED, ShareState.WITNESSED, ShareState.BROADCAST})
    change = Transition(sources, ShareState.FAILED, CLOSED_STAGE, note, at_ms, ignore_claim=True)
    return sum(apply_transition(tx, share_id, change) is not None for share_id in ids)


def purge_batch(tx: Transaction, round_id: bytes, at_ms: int, limit: int) -> tuple[int, bool]:
    """Delete a part of a round's data and count its failed shares by stage and reason.

    Returns:
        The number of deleted shares and tombstones, and whether all data of the round is deleted.

    Raises:
        StoreCorrupt: an index lists shares that do not exist.
    """
    tx.lock_exclusive()
    key = tx.round_key(round_id)
    if key is None:
        return 0, True
    params = {"round_no": key.no, "limit": limit}
    ids = [(row[0], ShareState.RECEIVED.value) for row in tx.fetch_all("round_waiting", params)]
    ids += [(row[0], row[1]) for row in tx.fetch_all("round_not_waiting", params)]
    if ids:
        failures = [_read_failure(tx, share_id) for share_id, _ in ids]
        count_failed(tx, [failure for failure in failures if failure is not None], at_ms)
        deleted = sum(_delete_share(tx, share_id, key.no, state) for share_id, state in ids)
        if not deleted:
            tx.handle_index_damage()
            raise StoreCorrupt("the database is damaged: an index lists shares of a closed round that do not exist")
        return deleted, False
    deleted_tombstones = tx.execute("purge_tombstones", params)
    tx.adjust_count(key.no, ShareState.SUBMITTED, -deleted_tombstones)
    tx.has_deleted_rows = True
    if deleted_tombstones:
        return deleted_tombstones, False
    if tx.execute("purge_spent", params):
        return 0, False
    tx.flush_counts()
    for name in ("drop_leaves", "drop_subtrees", "purge_counters", "purge_round", "purge_round_key"):
        tx.execute(name, (key.no,))
    tx.clear_round_cache()
    return 0, True


def _read_failure(tx: Transaction, share_id: int) -> tuple[str, str] | None:
    """Return stage and reason of a failed share that is about to be deleted; None if it has not failed."""
    row = tx.get_share(share_id)
    if row is None or not row.is_sound(tx.keys.row_check):
        return DAMAGED_REASON
    return (row.stage, row.note) if row.state == ShareState.FAILED else None
