"""Deletes the damaged row of a share that a wallet posts again.

A row that failed its check is never processed. Its share would be lost on this host, although the wallet has posted it
again and every check of a new share has passed.
"""

from __future__ import annotations

from helper.store.operations.blocks import delete_share
from helper.store.table_rows import ShareRow
from helper.store.transaction import ShareIdentity, Transaction


def delete_damaged(tx: Transaction, identity: ShareIdentity, at_ms: int) -> bool:
    """Delete the damaged row of a known share, so that the share can be stored again.

    A message of the old row may have been sent. The share is then proven again, and the chain counts it once.

    Args:
        tx: the transaction, under the shared lock.
        identity: a share that `Transaction.find_taken` has found.
        at_ms: Unix milliseconds now.

    Returns:
        Whether the share can be stored. False if an intact row, a tombstone or a spent nullifier has its identity, if
        its round is closed, or if SQLite cannot read its row: SQLite cannot delete such a row either.
    """
    round_no, mac, nullifier = identity
    if (
        tx.fetch_one("has_tombstone", (round_no, mac)) is not None
        or tx.fetch_one("is_spent", (round_no, nullifier)) is not None
        or tx.is_round_closed(round_no)
    ):
        return False
    damaged: list[ShareRow] = []
    for share_id in _find_rows(tx, identity):
        row = tx.get_share(share_id)
        if row is None:
            return False
        # An index entry can be damaged too, and then refers to the row of another share.
        is_same = row.mac == mac or (row.round_no, row.nullifier) == (round_no, nullifier)
        if tx.fetch_one("is_quarantined", (share_id,)) is None and row.is_sound(tx.keys.row_check):
            if is_same:
                return False
        elif is_same:
            damaged.append(row)
    for row in damaged:
        tx.quarantine(row.id, row.to_damaged_share(), at_ms)  # reports it, unless it was reported before
        delete_share(tx, row.id, round_no, row.state)
    return bool(damaged)


def _find_rows(tx: Transaction, identity: ShareIdentity) -> list[int]:
    """Return the ids of the rows that have this identity according to the indexes."""
    round_no, mac, nullifier = identity
    by_mac = [row[0] for row in tx.fetch_all("get_share_id", (mac,))]
    by_nullifier = [share_id for share_id, _, _ in tx.find_shares_by_nullifier([(round_no, nullifier)])]
    return sorted({*by_mac, *by_nullifier})
