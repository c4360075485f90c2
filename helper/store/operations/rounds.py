"""Operations on rounds: store, mark as closed, fail unconfirmed shares, purge."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from helper.core.share import ShareState
from helper.errors import StoreCorrupt
from helper.store.models import RoundLike
from helper.store.operations.blocks import add_unread, delete_share
from helper.store.operations.failure_counts import DAMAGED_REASON, count_failed
from helper.store.operations.transitions import CLOSED_STAGE, Transition, apply_transition_to_batch
from helper.store.table_rows import RoundRow
from helper.store.transaction import Transaction, exclusive


@exclusive
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
        if stored is None:  # its nullifiers were left out when its blocks were read
            add_unread(tx, listed.created_at_height)


@exclusive
def mark_closed(tx: Transaction, round_id: bytes, at_ms: int) -> None:
    """Record that the chain has closed a round; an earlier mark is unchanged."""
    tx.lock_exclusive()
    key = tx.round_key(round_id)
    stored = None if key is None else tx.read_round(key.no)
    if stored is not None and stored.closed_ms is None:
        tx.execute("save_round", stored._replace(closed_ms=at_ms).with_check(tx.keys.row_check))


@exclusive
def mark_alerted(tx: Transaction, round_id: bytes, at_ms: int) -> None:
    """Record that a round's unconfirmed shares were reported; an earlier mark is unchanged."""
    tx.lock_exclusive()
    key = tx.round_key(round_id)
    stored = None if key is None else tx.read_round(key.no)
    if stored is not None and stored.alerted_ms is None:
        tx.execute("save_round", stored._replace(alerted_ms=at_ms).with_check(tx.keys.row_check))


@exclusive
def fail_unconfirmed_batch(tx: Transaction, round_id: bytes, note: str, at_ms: int, limit: int) -> tuple[int, bool]:
    """Fail up to `limit` unconfirmed shares of a closed round. Returns how many, and whether there may be more."""
    tx.lock_exclusive()
    key = tx.round_key(round_id)
    if key is None:
        return 0, False
    params = {"round_no": key.no, "limit": limit}
    ids = [row[0] for row in tx.fetch_all("round_waiting_verified", params)]
    ids += [row[0] for row in tx.fetch_all("round_in_progress_verified", params)]
    sources = frozenset({ShareState.RECEIVED, ShareState.WITNESSED, ShareState.BROADCAST})
    change = Transition(sources, ShareState.FAILED, CLOSED_STAGE, note, at_ms, ignore_claim=True)
    return apply_transition_to_batch(tx, ids, change)


@exclusive
def purge_batch(tx: Transaction, round_id: bytes, at_ms: int, limit: int) -> tuple[int, bool]:
    """Delete a part of a round's data and count its failed shares by stage and reason.

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
    ids = [(row[0], ShareState.RECEIVED.value) for row in tx.fetch_all("round_waiting", params)]
    ids += [(row[0], row[1]) for row in tx.fetch_all("round_not_waiting", params)]
    if ids:
        failures = [_read_failure(tx, share_id) for share_id, _ in ids]
        count_failed(tx, [failure for failure in failures if failure is not None], at_ms)
        deleted = sum(delete_share(tx, share_id, key.no, state) for share_id, state in ids)
        if not deleted:
            raise StoreCorrupt("the database is damaged: an index lists shares of a closed round that do not exist")
        return deleted, True
    deleted_tombstones = tx.execute("purge_tombstones", params)
    tx.adjust_count(key.no, ShareState.SUBMITTED, -deleted_tombstones)
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
    if row is None or not row.is_sound(tx.keys.row_check):
        return DAMAGED_REASON
    return (row.stage, row.note) if row.state == ShareState.FAILED else None
