"""Operations that apply blocks: spent nullifiers, confirmation and deletion of shares, the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from helper.core.share import LIVE_STATES, ShareState
from helper.store.ledger import (
    LEDGER_KEY,
    BlockRange,
    Ledger,
    add_rescan,
    find_unread,
    format_ledger,
    mark_pruned,
    mark_read,
    mark_unread,
    parse_ledger,
    start_ledger,
    truncate,
)
from helper.store.models import SpentNullifier
from helper.store.table_rows import RoundRow, is_sound, make_meta_row, read_meta_value
from helper.store.transaction import Transaction, exclusive

MAC_BYTES: Final = 32


def set_meta(tx: Transaction, key: str, value: str) -> None:
    """Store a text in `meta`."""
    tx.execute("set_meta", make_meta_row(key, value))


@exclusive
def add_spent(tx: Transaction, spent: Sequence[SpentNullifier]) -> list[int]:
    """Store nullifiers counted by the chain, and replace this queue's shares among them with tombstones.

    Returns:
        The ids of the shares that this call confirmed.
    """
    if tx.are_all_spent(spent):
        return []
    tx.lock_exclusive()
    return _apply_spent(tx, spent)


def _apply_spent(tx: Transaction, spent: Sequence[SpentNullifier]) -> list[int]:
    """Implement `add_spent` under the exclusive lock."""
    if tx.are_all_spent(spent):
        return []  # another host applied them while this one waited for the lock
    # Insert all public nullifiers first, then delete the confirmed shares in order of id. Otherwise the write order in
    # the database's log would link a nullifier to the share that is deleted for it.
    # Nullifiers of a round that is not stored are left out, because no purge would delete them. If the round is listed
    # later, its blocks are read again.
    rounds = {round_id: tx.round_key(round_id) for round_id, _ in spent}
    numbers = [(key.no, nullifier) for round_id, nullifier in spent if (key := rounds[round_id]) is not None]
    tx.execute_many("add_spent", numbers)
    shares = tx.find_shares_by_nullifier(numbers)
    return [share_id for share_id, round_no, nullifier in shares if _confirm_share(tx, share_id, round_no, nullifier)]


def _confirm_share(tx: Transaction, share_id: int, round_no: int, nullifier: bytes) -> bool:
    """Replace the share that has this nullifier with a tombstone. This is the only transition to CONFIRMED.

    A damaged share is confirmed too, as far as possible, because a damaged row must not block processing of the block.
    """
    row = tx.get_share(share_id)
    if row is None:
        return False
    if (row.round_no, row.nullifier) != (round_no, nullifier):
        if not is_sound(tx.keys.row_check, row):
            tx.quarantine(share_id, row.to_damaged_share())
        return False
    if isinstance(row.mac, bytes) and len(row.mac) == MAC_BYTES and tx.execute("insert_tombstone", (round_no, row.mac)):
        tx.adjust_count(round_no, ShareState.CONFIRMED, 1)
    delete_share(tx, share_id, round_no, row.state)
    return True


def delete_share(tx: Transaction, share_id: int, round_no: int, state: int) -> bool:
    """Delete a live share. Returns whether it existed."""
    # One row per statement, because SQLite writes a statement journal over 64 kB to a file.
    existed = tx.execute("delete_share", (share_id,)) == 1
    tx.execute("drop_damaged", (share_id,))
    tx.release_claim(share_id)
    if state in LIVE_STATES:  # in a damaged row, the column may hold any value
        tx.adjust_count(round_no, state, -1)
    tx.has_deleted_rows = True
    return existed


@exclusive
def apply_blocks(
    tx: Transaction,
    heights: Sequence[BlockRange],
    spent: Sequence[SpentNullifier],
    ignored: Iterable[SpentNullifier] = (),
) -> list[int]:
    """Record the nullifiers of these blocks as spent, confirm the shares among them, and record the blocks as read.

    Idempotent. Blocks between the greatest one read and these are then unread. Returns the ids of the shares that this
    call confirmed.

    Nothing is recorded if a nullifier in `ignored` is unspent in a stored round: the round was stored after the nodes'
    reports were compared without it, so the blocks must be read again.

    Every host reads every new block. If another host has applied these already, no exclusive lock is taken.
    """
    ledger = _read_ledger(tx)
    if ledger is not None and not any(find_unread(ledger, *blocks) for blocks in heights) and tx.are_all_spent(spent):
        return []
    tx.lock_exclusive()
    if list_unspent(tx, ignored):
        return []
    ledger = _read_ledger(tx) or start_ledger(heights[0][0])
    rescan = ledger.rescan
    is_rescanned = rescan is not None and any(
        find_unread(ledger, max(first, rescan.first), min(last, rescan.last)) for first, last in heights
    )
    added = len(list_unspent(tx, spent)) if is_rescanned else 0
    confirmed = _apply_spent(tx, spent)
    for first, last in heights:
        ledger = mark_read(ledger, first, last)
    if rescan is not None and is_rescanned:
        found = rescan._replace(added=rescan.added + added, confirmed=rescan.confirmed + len(confirmed))
        ledger = ledger._replace(rescan=found)
    _write_ledger(tx, ledger)
    return confirmed


def list_unspent(tx: Transaction, nullifiers: Iterable[SpentNullifier]) -> list[SpentNullifier]:
    """Return those nullifiers of stored rounds that are not stored as spent, in any order."""
    keys = [(tx.round_key(round_id), round_id, nullifier) for round_id, nullifier in set(nullifiers)]
    return [
        (round_id, nullifier)
        for key, round_id, nullifier in keys
        if key is not None and tx.fetch_one("is_spent", (key.no, nullifier)) is None
    ]


@exclusive
def begin_ledger(tx: Transaction, first: int) -> None:
    """Start the ledger: the blocks from `first` or from the oldest stored round on are unread.

    Nothing changes if there is a ledger. A round may have been stored since the caller chose `first`.
    """
    tx.lock_exclusive()
    if _read_ledger(tx) is None:
        _write_ledger(tx, start_ledger(min(first, _oldest_round_height(tx, default=first))))


@exclusive
def give_up_blocks(tx: Transaction, last: int) -> None:
    """Record the unread blocks up to `last` as read although they were not, because every node has pruned them."""
    tx.lock_exclusive()
    ledger = _read_ledger(tx)
    if ledger is not None:
        _write_ledger(tx, mark_pruned(ledger, last))


@exclusive
def move_back(tx: Transaction, last: int, *, first: int) -> None:
    """Forget the blocks above `last`, and record those from `first` to it as unread.

    Nothing changes if no block above `last` was read.
    """
    tx.lock_exclusive()
    ledger = _read_ledger(tx)
    if ledger is not None and ledger.top > last:
        _write_ledger(tx, mark_unread(truncate(ledger, last), min(first, last + 1), last))


def add_unread(tx: Transaction, first: int) -> None:
    """Record the blocks from `first` on as unread, if the ledger has begun."""
    ledger = _read_ledger(tx)
    if ledger is not None and first <= ledger.top:
        _write_ledger(tx, mark_unread(ledger, first, ledger.top))


@exclusive
def begin_rescan(tx: Transaction, first: int) -> Ledger:
    """Record the blocks from `first` to the greatest one read as to be read again.

    Blocks before the oldest stored round are omitted, because they contain no reveal of a stored round.
    """
    tx.lock_exclusive()
    ledger = _read_ledger(tx) or start_ledger(1)
    ledger = add_rescan(ledger, max(first, _oldest_round_height(tx, default=ledger.top + 1)))
    _write_ledger(tx, ledger)
    return ledger


def _oldest_round_height(tx: Transaction, default: int) -> int:
    """Return the height from which blocks can contain reveals of a stored round; `default` without rounds."""
    rows = [RoundRow(*row[1:]) for row in tx.fetch_all("rounds")]
    if not all(is_sound(tx.keys.row_check, row) for row in rows):
        return 0
    return min((row.created_at_height for row in rows), default=default)


def _read_ledger(tx: Transaction) -> Ledger | None:
    return parse_ledger(read_meta_value(tx.fetch_all("get_meta", (LEDGER_KEY,))))


def _write_ledger(tx: Transaction, ledger: Ledger) -> None:
    set_meta(tx, LEDGER_KEY, format_ledger(ledger))
