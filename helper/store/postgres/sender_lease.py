"""Operations on the sender lease, which is one row."""

from __future__ import annotations

from helper.store.postgres.transaction import ExclusiveLockRequired, PostgresTransaction


def take(tx: PostgresTransaction, outer: int | None) -> int | None:
    """Acquire the lease if it is free or expired, or if this host held it before a restart.

    Args:
        tx: a transaction without other operations, because sending locks this row and shares in another order.
        outer: fencing token of the lease in the object store, None if this row alone is the lease. A greater token
            replaces any holder, a smaller one never does.

    Returns:
        The new fencing token, None if another host holds the lease.
    """
    if not tx.alone_here:
        raise ExclusiveLockRequired
    row = tx.one("take_sender", {"host": tx.hands.host, "lease": tx.hands.lease, "outer": outer})
    return None if row is None else int(row[0])


def keep(tx: PostgresTransaction, fence: int) -> bool:
    """Renew the lease; False if another host has acquired it."""
    return tx.run("keep_sender", {"fence": fence, "lease": tx.hands.lease}) == 1


def leave(tx: PostgresTransaction, fence: int) -> bool:
    """Release the lease; False if another host has already acquired it."""
    return tx.run("leave_sender", (fence,)) == 1
