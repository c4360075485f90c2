"""Operations that apply blocks: spent nullifiers, confirmation and deletion of shares, the block cursor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from helper.core.share import ShareState
from helper.store.block_ranges import add_range, format_ranges, parse_ranges, remove_range
from helper.store.meta import make_meta_row, read_meta_value
from helper.store.models import SpentNullifier
from helper.store.rescan import RESCAN_KEY, Rescan, parse_rescan, start_rescan
from helper.store.table_rows import RoundRow
from helper.store.transaction import Transaction

CURSOR_KEY: Final = "chain.cursor"
UNREAD_KEY: Final = "chain.unread"
MAC_BYTES: Final = 32
_LIVE_STATES: Final = frozenset(ShareState) - {ShareState.SUBMITTED}


def set_meta(tx: Transaction, key: str, value: str) -> None:
    """Store a text in `meta`."""
    tx.execute("set_meta", make_meta_row(key, value))


def add_spent(tx: Transaction, spent: Sequence[SpentNullifier], at_ms: int) -> list[int]:
    """Store nullifiers counted by the chain, and replace this queue's shares among them with tombstones.

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
    # Insert all public nullifiers first, then delete the confirmed shares in order of id. Otherwise the write order in
    # the database's log would link a nullifier to the share that is deleted for it.
    numbers = [(tx.ensure_round(round_id).no, nullifier) for round_id, nullifier in spent]
    tx.execute_many("add_spent", numbers)
    shares = tx.find_shares_by_nullifier(numbers)
    return [
        share_id for share_id, round_no, nullifier in shares if _confirm_share(tx, share_id, round_no, nullifier, at_ms)
    ]


def _confirm_share(tx: Transaction, share_id: int, round_no: int, nullifier: bytes, at_ms: int) -> bool:
    """Replace the share that has this nullifier with a tombstone. This is the only transition to SUBMITTED.

    A damaged share is confirmed too, as far as possible, because a damaged row must not block processing of the block.
    """
    row = tx.get_share(share_id)
    if row is None:
        return False
    if (row.round_no, row.nullifier) != (round_no, nullifier):
        if not row.is_sound(tx.keys.row_check):
            tx.quarantine(share_id, row.to_damaged_share(), at_ms)
        return False
    if isinstance(row.mac, bytes) and len(row.mac) == MAC_BYTES and tx.execute("insert_tombstone", (round_no, row.mac)):
        tx.adjust_count(round_no, ShareState.SUBMITTED, 1)
    delete_share(tx, share_id, round_no, row.state)
    return True


def delete_share(tx: Transaction, share_id: int, round_no: int, state: int) -> bool:
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

    Every host reads every block. If another host has applied it already, no exclusive lock is taken. A host may have
    applied the blocks between the cursor and this one to a database whose last commits are lost since.
    """
    if tx.are_all_spent(spent) and _has_reached(tx, height):
        return []
    tx.lock_exclusive()
    confirmed = _apply_spent(tx, spent, at_ms)
    cursor = _read_cursor(tx)
    if cursor is not None and cursor < height - 1:
        set_meta(tx, UNREAD_KEY, format_ranges(add_range(_read_unread_ranges(tx), cursor + 1, height - 1)))
    if cursor is None or cursor < height:
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
    rescan = _read_rescan(tx)
    if rescan is not None:
        set_meta(tx, RESCAN_KEY, rescan.without_above(height).to_text())


def begin_rescan(tx: Transaction, first: int) -> Rescan:
    """Record the blocks from `first` to the cursor as to be read again; see `Store.begin_rescan`."""
    tx.lock_exclusive()
    last = _read_cursor(tx) or 0
    rescan = start_rescan(_read_rescan(tx), max(first, _oldest_round_height(tx, default=last + 1)), last)
    set_meta(tx, RESCAN_KEY, rescan.to_text())
    return rescan


def _oldest_round_height(tx: Transaction, default: int) -> int:
    """Return the height from which blocks can contain reveals of a stored round; `default` without rounds."""
    rows = [RoundRow(*row[1:]) for row in tx.fetch_all("rounds")]
    if not all(row.is_sound(tx.keys.row_check) for row in rows):
        return 0
    return min((row.created_at_height for row in rows), default=default)


def apply_unread(
    tx: Transaction, first: int, last: int, spent: Sequence[SpentNullifier], at_ms: int, *, rescan: int | None
) -> list[int]:
    """Apply the nullifiers of the unread blocks from `first` to `last`, and record these blocks as read.

    A rescan may read blocks of rounds that were purged since. Their nullifiers are not stored again, because no purge
    would delete them.
    """
    tx.lock_exclusive()
    if rescan is not None:
        spent = [reveal for reveal in spent if tx.round_key(reveal[0]) is not None]
    added = 0 if rescan is None else _count_new(tx, spent)
    confirmed = _apply_spent(tx, spent, at_ms)
    set_meta(tx, UNREAD_KEY, format_ranges(remove_range(_read_unread_ranges(tx), first, last)))
    state = _read_rescan(tx)
    if state is not None and state.number == rescan:
        state = state.after_read(first, last, added=added, confirmed=len(confirmed))
        set_meta(tx, RESCAN_KEY, state.to_text())
    return confirmed


def abandon_unread(tx: Transaction, last: int) -> None:
    """Record the unread blocks up to `last` as not readable; see `Store.abandon_unread`."""
    tx.lock_exclusive()
    set_meta(tx, UNREAD_KEY, format_ranges(remove_range(_read_unread_ranges(tx), 0, last)))
    rescan = _read_rescan(tx)
    if rescan is not None:
        set_meta(tx, RESCAN_KEY, rescan.after_pruned(0, last).to_text())


def _count_new(tx: Transaction, spent: Sequence[SpentNullifier]) -> int:
    """Return how many nullifiers are not stored yet."""
    keys = [(tx.ensure_round(round_id).no, nullifier) for round_id, nullifier in set(spent)]
    return sum(tx.fetch_one("is_spent", key) is None for key in keys)


def _read_unread_ranges(tx: Transaction) -> list[tuple[int, int]]:
    return parse_ranges(read_meta_value(tx.fetch_all("get_meta", (UNREAD_KEY,))))


def _read_rescan(tx: Transaction) -> Rescan | None:
    return parse_rescan(read_meta_value(tx.fetch_all("get_meta", (RESCAN_KEY,))))


def _read_cursor(tx: Transaction) -> int | None:
    text = read_meta_value(tx.fetch_all("get_meta", (CURSOR_KEY,)))
    return None if text is None else int(text)


def _has_reached(tx: Transaction, height: int) -> bool:
    """Return whether the cursor is at a height or above it."""
    cursor = _read_cursor(tx)
    return cursor is not None and cursor >= height
