"""The lease that the settings name."""

from __future__ import annotations

from helper.clock import Clock
from helper.lease import Lease
from helper.store.whole import WholeStore


def make_lease(store: WholeStore, clock: Clock) -> Lease | None:
    """The right to send from this store's queue; None where there is nobody to agree with."""
    if not store.shared:
        return None
    # loaded here: a queue in a file needs nothing of it
    from helper.lease.shared import SharedLease  # noqa: PLC0415
    from helper.store.postgres import PostgresStore  # noqa: PLC0415

    assert isinstance(store, PostgresStore)
    return SharedLease(store, clock=clock)
