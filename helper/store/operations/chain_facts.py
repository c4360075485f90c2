"""Operations that take in what the chain tells: rounds, spent nullifiers, leaves; and the end of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson

from helper.core.share import ShareState
from helper.errors import StoreCorrupt, StoreError
from helper.store.block_ranges import add_range, format_ranges, parse_ranges, remove_range
from helper.store.operations.failure_counts import DAMAGED, count_failed
from helper.store.operations.transitions import CLOSED, Transition, move
from helper.store.records import RoundRow
from helper.store.rows import RoundLike, Spent
from helper.store.transaction import Transaction, fact_row, read_fact

CURSOR: Final = "chain.cursor"
UNREAD: Final = "chain.unread"
LEAF_BYTES: Final = 32
SUBTREE_BYTES: Final = 1023 * 32
MAC_BYTES: Final = 32
_LIVE: Final = frozenset(ShareState) - {ShareState.SUBMITTED}


def save_rounds(tx: Transaction, rounds: Sequence[RoundLike], at_ms: int) -> None:
    """Keep rounds as the chain tells them; what was done about their end stands."""
    tx.alone()
    for told in rounds:
        round_no = tx.need_round(told.round_id).no
        kept = kept_round(tx, round_no)
        proposals = [[proposal.id, list(proposal.options)] for proposal in told.proposals]
        row = RoundRow(
            round_no=round_no,
            status=int(told.status),
            vote_end_time=told.vote_end_time,
            created_at_height=told.created_at_height,
            proposals=orjson.dumps(proposals).decode(),
            seen_ms=at_ms,
            closed_ms=None if kept is None else kept.closed_ms,
            alerted_ms=None if kept is None else kept.alerted_ms,
        )
        tx.run("save_round", row.sealed(tx.keys.rows))


def mark_closed(tx: Transaction, round_id: bytes, at_ms: int) -> None:
    """Note that the chain has closed a round; the first time stands."""
    tx.alone()
    key = tx.round_key(round_id)
    kept = None if key is None else kept_round(tx, key.no)
    if kept is not None and kept.closed_ms is None:
        tx.run("save_round", kept._replace(closed_ms=at_ms).sealed(tx.keys.rows))


def mark_alerted(tx: Transaction, round_id: bytes, at_ms: int) -> None:
    """Note that a round's unsubmitted shares were reported; the first time stands."""
    tx.alone()
    key = tx.round_key(round_id)
    kept = None if key is None else kept_round(tx, key.no)
    if kept is not None and kept.alerted_ms is None:
        tx.run("save_round", kept._replace(alerted_ms=at_ms).sealed(tx.keys.rows))


def kept_round(tx: Transaction, round_no: int) -> RoundRow | None:
    """A round as it is kept; a damaged row counts as none."""
    found = tx.one("round", (round_no,))
    row = None if found is None else RoundRow(*found)
    return row if row is not None and row.is_sound(tx.keys.rows) else None


def set_meta(tx: Transaction, key: str, value: str) -> None:
    """Remember a text."""
    tx.run("set_meta", fact_row(key, value))


def add_spent(tx: Transaction, spent: Sequence[Spent], at_ms: int) -> list[int]:
    """Nullifiers that the chain has counted: any share of ours among them becomes a tombstone."""
    if tx.all_spent(spent):
        return []
    tx.alone()
    return _count(tx, spent, at_ms)


def _count(tx: Transaction, spent: Sequence[Spent], at_ms: int) -> list[int]:
    """The same where no other host can do so too."""
    if tx.all_spent(spent):
        return []  # another host was first, and this one has waited for it
    # All that is public first, and then what goes, by its number: where a database keeps a log of its writes, it does
    # not join one of these to the share that was deleted for it.
    numbers = [(tx.need_round(round_id).no, nullifier) for round_id, nullifier in spent]
    tx.many("add_spent", numbers)
    ours = tx.owners(numbers)
    return [share_id for share_id, round_no, nullifier in ours if _confirm(tx, share_id, round_no, nullifier, at_ms)]


def _confirm(tx: Transaction, share_id: int, round_no: int, nullifier: bytes, at_ms: int) -> bool:
    """Put a tombstone in the place of the share that has this nullifier; the only way to SUBMITTED.

    A damaged share is buried too, as far as that can be: one bad row must not hold up a block.
    """
    row = tx.share(share_id)
    if row is None:
        return False
    if (row.round_no, row.nullifier) != (round_no, nullifier):
        if row.is_sound(tx.keys.rows):
            if row.nullifier != nullifier:
                tx.index_is_wrong()
        else:
            tx.set_aside(share_id, row.damaged(), at_ms)
        return False
    if isinstance(row.mac, bytes) and len(row.mac) == MAC_BYTES and tx.run("bury", (round_no, row.mac)):
        tx.count(round_no, ShareState.SUBMITTED, 1)
    _delete(tx, share_id, round_no, row.state)
    return True


def _delete(tx: Transaction, share_id: int, round_no: int, state: int) -> bool:
    """Whether it was there."""
    # One row a statement: SQLite journals what a statement changes, and beyond 64 kB it does so in a file.
    was = tx.run("delete_share", (share_id,)) == 1
    tx.run("drop_damaged", (share_id,))
    tx.release_claim(share_id)
    if state in _LIVE:  # the column of a damaged row may say anything
        tx.count(round_no, state, -1)
    tx.erased = True
    return was


def apply_block(tx: Transaction, height: int, spent: Sequence[Spent], at_ms: int) -> list[int]:
    """Take in a block's nullifiers and move the cursor to it, never back.

    Every host reads every block: those that come after the first hold up nobody.
    """
    if tx.all_spent(spent) and _has_reached(tx, height):
        return []
    tx.alone()
    confirmed = _count(tx, spent, at_ms)
    if not _has_reached(tx, height):
        set_meta(tx, CURSOR, str(height))
    return confirmed


def skip_to(tx: Transaction, height: int, first: int) -> None:
    """Move the cursor to `height` without reading; the blocks passed over are recorded as unread.

    Args:
        height: the new cursor; nothing changes if the cursor is there already.
        first: the lowest height to record in a database that has no cursor yet.
    """
    tx.alone()
    if _has_reached(tx, height):
        return
    cursor = read_fact(tx.all("get_meta", (CURSOR,)))
    first = first if cursor is None else int(cursor) + 1
    if first <= height:
        set_meta(tx, UNREAD, format_ranges(add_range(_unread(tx), first, height)))
    set_meta(tx, CURSOR, str(height))


def move_back(tx: Transaction, height: int, first: int) -> None:
    """Move the cursor down to `height`; the blocks from `first` to it are unread, and none above it.

    Nothing changes if the cursor is at `height` or below.
    """
    tx.alone()
    cursor = read_fact(tx.all("get_meta", (CURSOR,)))
    if cursor is None or int(cursor) <= height:
        return
    ranges = remove_range(_unread(tx), height + 1, int(cursor))
    if first <= height:
        ranges = add_range(ranges, first, height)
    set_meta(tx, UNREAD, format_ranges(ranges))
    set_meta(tx, CURSOR, str(height))


def apply_unread(tx: Transaction, first: int, last: int, spent: Sequence[Spent], at_ms: int) -> list[int]:
    """Apply the nullifiers of unread blocks from `first` to `last`; these blocks are read from now on."""
    tx.alone()
    confirmed = _count(tx, spent, at_ms)
    set_meta(tx, UNREAD, format_ranges(remove_range(_unread(tx), first, last)))
    return confirmed


def _unread(tx: Transaction) -> list[tuple[int, int]]:
    return parse_ranges(read_fact(tx.all("get_meta", (UNREAD,))))


def _has_reached(tx: Transaction, height: int) -> bool:
    """Whether the block at a height, or one above it, was taken in."""
    cursor = read_fact(tx.all("get_meta", (CURSOR,)))
    return cursor is not None and int(cursor) >= height


# ---------------------------------------------------------------------- trees


def save_leaves(tx: Transaction, round_id: bytes, height: int, start: int, leaves: bytes) -> None:
    """Append leaves to a round's tree; what is there already must be the same.

    Raises:
        StoreError: they contradict what is kept, leave a gap, or are not whole leaves.
    """
    if len(leaves) % LEAF_BYTES or start < 0:
        raise StoreError("leaves of 32 bytes each were expected", advice="This is a fault of the helper: report it.")
    if not leaves:
        return
    tx.alone()
    key = tx.need_round(round_id)
    last = tx.one("last_leaves", (key.no,))
    size = 0 if last is None else last[0] + last[2]
    if start > size:
        raise StoreError(f"leaves from {start} on, but only {size} are kept: some are missing")
    stop = start + len(leaves) // LEAF_BYTES
    known = min(stop, size) - start
    if known and _kept(tx, key.no, start, start + known) != leaves[: known * LEAF_BYTES]:
        raise StoreError(f"leaves from {start} on contradict those that are kept")
    if stop > size:
        tx.run("add_leaves", (key.no, size, height, leaves[known * LEAF_BYTES :]))


def _kept(tx: Transaction, round_no: int, start: int, stop: int) -> bytes:
    """The leaves from `start` to `stop`, all of which are kept."""
    rows = tx.all("leaves_between", {"round_no": round_no, "start": start, "stop": stop})
    first = rows[0][0] if rows else start
    whole = b"".join(row[1] for row in rows)
    return whole[(start - first) * LEAF_BYTES : (stop - first) * LEAF_BYTES]


def save_subtrees(tx: Transaction, round_id: bytes, first_index: int, subtrees: bytes) -> None:
    """Keep the inner nodes of complete subtrees, from one index on.

    Raises:
        StoreError: they are not whole subtrees.
    """
    if len(subtrees) % SUBTREE_BYTES:
        raise StoreError("whole subtrees were expected", advice="This is a fault of the helper: report it.")
    tx.alone()
    key = tx.need_round(round_id)
    for n in range(len(subtrees) // SUBTREE_BYTES):
        tx.run("add_subtree", (key.no, first_index + n, subtrees[n * SUBTREE_BYTES : (n + 1) * SUBTREE_BYTES]))


def drop_tree(tx: Transaction, round_id: bytes) -> None:
    """Forget a round's leaves and subtrees."""
    tx.alone()
    key = tx.round_key(round_id)
    if key is not None:
        tx.run("drop_leaves", (key.no,))
        tx.run("drop_subtrees", (key.no,))


# ---------------------------------------------------------------------- the end of a round


def close_some(tx: Transaction, round_id: bytes, note: str, at_ms: int, limit: int) -> int:
    """Fail some of a closed round's shares that are not confirmed; 0 when there are no more."""
    tx.alone()
    key = tx.round_key(round_id)
    if key is None:
        return 0
    params = {"round_no": key.no, "limit": limit}
    ids = [row[0] for row in tx.all("round_waiting_sound", params)]
    ids += [row[0] for row in tx.all("round_under_way_sound", params)]
    sources = frozenset({ShareState.RECEIVED, ShareState.WITNESSED, ShareState.BROADCAST})
    change = Transition(sources, ShareState.FAILED, CLOSED, note, at_ms, by_anyone=True)
    return sum(move(tx, share_id, change) is not None for share_id in ids)


def purge_some(tx: Transaction, round_id: bytes, at_ms: int, limit: int) -> tuple[int, bool]:
    """Erase some of what a round has; of its failed shares stage and reason are counted.

    Returns:
        How many shares and tombstones went, and whether the round is gone altogether.

    Raises:
        StoreCorrupt: the database names shares that are not there.
    """
    tx.alone()
    key = tx.round_key(round_id)
    if key is None:
        return 0, True
    params = {"round_no": key.no, "limit": limit}
    ids = [(row[0], ShareState.RECEIVED.value) for row in tx.all("round_waiting", params)]
    ids += [(row[0], row[1]) for row in tx.all("round_not_waiting", params)]
    if ids:
        reasons = [_why_failed(tx, share_id) for share_id, _ in ids]
        count_failed(tx, [why for why in reasons if why is not None], at_ms)
        gone = sum(_delete(tx, share_id, key.no, state) for share_id, state in ids)
        if not gone:
            tx.index_is_wrong()
            raise StoreCorrupt("the database is damaged: it names shares of a closed round that are not there")
        return gone, False
    buried = tx.run("purge_tombstones", params)
    tx.count(key.no, ShareState.SUBMITTED, -buried)
    tx.erased = True
    if buried:
        return buried, False
    if tx.run("purge_spent", params):
        return 0, False
    tx.flush_counts()
    for name in ("drop_leaves", "drop_subtrees", "purge_counters", "purge_round", "purge_round_key"):
        tx.run(name, (key.no,))
    tx.forget_rounds()
    return 0, True


def _why_failed(tx: Transaction, share_id: int) -> tuple[str, str] | None:
    """Stage and reason of a share that failed and is about to be erased; None of one that had not."""
    row = tx.share(share_id)
    if row is None or not row.is_sound(tx.keys.rows):
        return DAMAGED
    return (row.stage, row.note) if row.state == ShareState.FAILED else None
