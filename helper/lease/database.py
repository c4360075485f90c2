"""Sender lease in a shared PostgreSQL database, checked in the transaction that records a send."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from helper.clock import Clock
from helper.errors import LeaseError, StoreError
from helper.lease import Lease
from helper.lease.term import Term

MARGIN_FRACTION: Final = 0.1
"""Fraction of a lease by which this host considers it expired before the database does."""


class SenderLeaseStore(Protocol):
    """Storage of the sender lease, implemented by `helper.store.postgres.PostgresStore`."""

    @property
    def lease_seconds(self) -> float:
        """Validity in seconds, unless it is renewed."""
        ...

    async def acquire_sender_lease(self, outer: int | None = None) -> int | None:
        """Acquire the lease. Returns the fencing token, None if another host holds it."""
        ...

    async def renew_sender_lease(self) -> bool:
        """Renew the lease. Returns False if another host has acquired it."""
        ...

    async def release_sender_lease(self) -> None:
        """Release the lease."""
        ...

    async def get_sender_host(self) -> str:
        """Return the host that holds the lease, "" if none does."""
        ...


class DatabaseLease:
    """A `helper.lease.Lease` in the database of the queue.

    The database checks the fencing token by its own clock whenever a send is recorded (`mark_sending`), so correctness
    does not depend on this host's clock. `is_held` covers the time between that record and the first byte sent.

    Args:
        store: the database.
        clock: this host's clock.
        outer: lease in an object store that must also be held. Its token is stored in the database, and a greater token
            replaces any holder there. Both leases have the same validity. None if the database alone decides.
    """

    def __init__(self, store: SenderLeaseStore, *, clock: Clock, outer: Lease | None = None) -> None:
        self.seconds = store.lease_seconds
        self.fence = 0
        self.holder = ""
        self._store = store
        self._outer = outer
        self._term = Term(clock, seconds=self.seconds, margin=self.seconds * MARGIN_FRACTION)

    @property
    def is_held(self) -> bool:
        """Whether this host holds the lease, and the outer lease if there is one."""
        return self._term.is_running and (self._outer is None or self._outer.is_held)

    @property
    def holder_seconds(self) -> float:
        """That of the outer lease, if there is one. The row expires by the database's clock, also across restarts."""
        return self.seconds if self._outer is None else self._outer.holder_seconds

    async def acquire(self) -> bool:
        """Acquire the lease; if another host holds it, set `holder`."""
        if self._outer is not None and not self._outer.is_held and not await self._outer.acquire():
            self.holder = self._outer.holder
            return False
        requested_at = self._term.read_clocks()
        with _database_errors("acquire"):
            fence = await self._store.acquire_sender_lease(None if self._outer is None else self._outer.fence)
            if fence is None:
                self.holder = await self._store.get_sender_host()
                return False
        self.fence, self.holder = fence, ""
        self._term.start(requested_at)
        return True

    async def renew(self) -> bool:
        """Renew the lease; if it is lost, set `holder`."""
        if self._outer is not None and not await self._outer.renew():
            self._term.end()
            self.holder = self._outer.holder
            return False
        requested_at = self._term.read_clocks()
        with _database_errors("renew"):
            if await self._store.renew_sender_lease():
                self._term.start(requested_at)
                return True
            self._term.end()
            self.holder = await self._store.get_sender_host()
        return False

    async def release(self) -> None:
        """Release the lease immediately, and the outer lease."""
        self._term.end()
        try:
            with _database_errors("release"):
                await self._store.release_sender_lease()
        finally:
            if self._outer is not None:
                await self._outer.release()


@contextmanager
def _database_errors(action: str) -> Iterator[None]:
    """Convert an error of the database to a `LeaseError`."""
    try:
        yield
    except StoreError as error:
        raise LeaseError(
            f"could not {action} the sender lease in the database: {error}", advice=error.advice
        ) from error
