"""Operations on the commitment trees of rounds: leaves and complete subtrees."""

from __future__ import annotations

from typing import Final

from helper.errors import LeavesMissing, StoreError
from helper.store.transaction import Transaction, exclusive

LEAF_BYTES: Final = 32
SUBTREE_BYTES: Final = 1023 * 32


@exclusive
def save_leaves(tx: Transaction, round_id: bytes, height: int, start: int, leaves: bytes) -> None:
    """Append leaves to a round's tree. Leaves that are stored already must be equal.

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


@exclusive
def delete_tree(tx: Transaction, round_id: bytes) -> None:
    """Delete a round's leaves and subtrees."""
    tx.lock_exclusive()
    key = tx.round_key(round_id)
    if key is not None:
        tx.execute("drop_leaves", (key.no,))
        tx.execute("drop_subtrees", (key.no,))
