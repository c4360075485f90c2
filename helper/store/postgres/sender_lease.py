"""Which of the hosts sends: one row, taken, kept and left by operations of their own."""

from __future__ import annotations

from helper.store.postgres.transaction import ExclusiveLockRequired, PostgresTransaction


def take(tx: PostgresTransaction, outer: int | None) -> int | None:
    """Become the sender where there is none that lives, or where this host was it in its last life.

    Args:
        tx: a transaction of its own: whoever sends locks the row and shares in another order.
        outer: the fence of the lease that gives the right, None where this row is the lease. A greater one takes over
            from whoever is there, a smaller one never does.

    Returns:
        The new fence, None where another host sends.
    """
    if not tx.alone_here:
        raise ExclusiveLockRequired
    taken = tx.one("take_sender", {"host": tx.hands.host, "lease": tx.hands.lease, "outer": outer})
    return None if taken is None else int(taken[0])


def keep(tx: PostgresTransaction, fence: int) -> bool:
    """Stay the sender for another lease; False when another host has taken it over."""
    return tx.run("keep_sender", {"fence": fence, "lease": tx.hands.lease}) == 1


def leave(tx: PostgresTransaction, fence: int) -> bool:
    """Stop being the sender; False when another host has taken it over already."""
    return tx.run("leave_sender", (fence,)) == 1
