"""Replaces the damaged rows of shares that wallets post again.

A damaged row is never processed, so its share would be lost on this host, although the wallet has posted it again and
it has passed every check of a new share. A message that may have been sent is kept if it passes its own check: the same
bytes are then sent again, by the same rules as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from helper.core.share import ShareState
from helper.store.operations.actions import is_marked_closed
from helper.store.operations.blocks import delete_share
from helper.store.table_rows import RevealRow, ShareRow
from helper.store.transaction import ShareIdentity, StoredShare, TakenShare, Transaction

HEALED_NOTE: Final = "posted again; replaced a damaged row"
LOST_MESSAGE_DELAY_MS: Final = 60_000
"""Delay of a new proof if the message is damaged too: about ten blocks, as between any two proofs of a share."""


class Replacement(NamedTuple):
    """How a share is stored in place of its damaged rows.

    Attributes:
        blocked_by: the newest row that cannot be deleted, None unless such a row has the share's mac.
        message: the message that may have been sent, None if there is none or it is damaged.
        not_before_ms: earliest due time, Unix milliseconds.
    """

    blocked_by: int | None
    message: RevealRow | None
    not_before_ms: int


def read_known(tx: Transaction, taken: Mapping[int, TakenShare]) -> dict[int, StoredShare]:
    """Return the rows of the known shares that are not confirmed, by id; one query for all of them."""
    ids = {share_id for known in taken.values() if not known.is_confirmed for share_id in known.ids}
    return {share.id: share for share in tx.read_stored_shares(sorted(ids))} if ids else {}


def find_damaged(
    tx: Transaction,
    identities: Sequence[ShareIdentity],
    taken: Mapping[int, TakenShare],
    stored: Mapping[int, StoredShare],
) -> set[int]:
    """Return the indexes of the known shares that have damaged rows only."""
    return {
        index
        for index, taken_share in taken.items()
        if not taken_share.is_confirmed
        and taken_share.ids
        and all(
            share_id in stored
            and _is_damaged(tx, stored[share_id])
            and _is_row_of(stored[share_id].row, identities[index], taken_share)
            for share_id in taken_share.ids
        )
    }


def _is_damaged(tx: Transaction, stored: StoredShare) -> bool:
    return stored.is_quarantined or (stored.row is not None and not stored.row.is_sound(tx.keys.row_check))


def _is_row_of(row: ShareRow | None, identity: ShareIdentity, taken_share: TakenShare) -> bool:
    """Return whether a damaged row belongs to a share: an index entry can be damaged and refer to another row."""
    _, mac, nullifier = identity
    return (
        row is None
        or taken_share.id_by_mac == taken_share.id_by_nullifier
        or row.mac == mac
        or row.nullifier == nullifier
    )


def remove_damaged(tx: Transaction, identity: ShareIdentity, taken_share: TakenShare, at_ms: int) -> Replacement | None:
    """Delete the damaged rows of a share that `find_damaged` returned, so that it can be stored again.

    A row that the database cannot delete remains quarantined.

    Args:
        tx: the transaction, under the shared lock.
        identity: the share.
        taken_share: its rows.
        at_ms: Unix milliseconds now.

    Returns:
        How to store the share. None if its round is closed, or another host has replaced the row.
    """
    round_no = identity[0]
    if is_marked_closed(tx, round_no):
        return None
    rows = {share_id: tx.get_share(share_id) for share_id in sorted(taken_share.ids)}
    stored = [
        StoredShare(share_id, row, tx.fetch_one("is_quarantined", (share_id,)) is not None)
        for share_id, row in rows.items()
    ]
    if not all(_is_damaged(tx, share) for share in stored):
        return None
    message, is_lost = None, False
    remaining: list[int] = []
    for share in stored:
        sent, is_message_damaged = _read_sent_message(tx, share)
        message = sent or message
        is_lost |= is_message_damaged
        if not _delete(tx, share, round_no, at_ms):
            remaining.append(share.id)
    blocked_by = max(remaining) if taken_share.id_by_mac in remaining else None
    return Replacement(blocked_by, message, at_ms + LOST_MESSAGE_DELAY_MS if is_lost and message is None else 0)


def _read_sent_message(tx: Transaction, share: StoredShare) -> tuple[RevealRow | None, bool]:
    """Return the message of a damaged row if a send was started, and whether such a message may be lost.

    The chain has refused the message of a failed share, or it was not confirmed in time, so it is not sent again.
    """
    if share.row is not None and share.row.state == ShareState.FAILED:
        return None, False
    reveals: list[RevealRow] = []
    is_readable = tx.attempt(
        lambda: reveals.extend(RevealRow(*columns) for columns in tx.fetch_all("reveal", (share.id,)))
    )
    if not is_readable or not reveals:
        return None, not is_readable or (share.row is not None and share.row.state == ShareState.BROADCAST)
    reveal = reveals[0]
    if not reveal.is_sound(tx.keys.row_check):
        return None, True
    return (reveal if reveal.sends else None), False


def _delete(tx: Transaction, share: StoredShare, round_no: int, at_ms: int) -> bool:
    """Delete a damaged row. Returns False if the database cannot delete it."""
    if share.row is None:
        return False
    tx.quarantine(share.id, share.row.to_damaged_share(), at_ms)  # reports it, unless it was reported before
    if tx.attempt(partial(delete_share, tx, share.id, round_no, share.row.state)):
        return True
    tx.handle_index_damage()
    return False
