"""The sender lease: its interface, its validity, and the leases of a queue in a file and in a database.

The lease covers all hosts with the same queue or a copy of it.

The lease is valid for a few seconds, and its holder renews it long before it expires. The holder decides by its own
clocks whether its lease is still valid, measuring from before the request and subtracting a margin (`Term`). It
therefore stops before another host can start. Each acquisition has a new, greater fencing token. The store checks the
token before each send, so a host that was suspended until after the expiry finds a newer token and sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from helper.clock import Clock
from helper.errors import LeaseError, StoreError


class Lease(Protocol):
    """One host's view of the sender lease.

    Only one task may call the methods; any task may read the properties.

    `acquire`, `renew` and `release` raise LeaseError if the outcome is unknown. The lease is then unchanged and expires
    on time. `is_held` does not wait for a call that is in progress.
    """

    @property
    def seconds(self) -> float:
        """Validity in seconds, from the moment it is acquired or renewed."""
        ...

    @property
    def is_held(self) -> bool:
        """Whether this host holds the lease, by its own clocks minus a safety margin. Makes no request."""
        ...

    @property
    def fence(self) -> int:
        """Fencing token of this host's latest acquisition, greater than all earlier ones; 0 before the first."""
        ...

    @property
    def holder(self) -> str:
        """The other host that held the lease when it was last read; "" if none did."""
        ...

    @property
    def holder_seconds(self) -> float:
        """Validity in seconds of the other host's lease when it was last read; it may have other settings."""
        ...

    async def acquire(self) -> bool:
        """Acquire the lease if no host holds it, or if this host held it before a restart.

        Each acquisition gets a new fencing token.

        Returns:
            False if another host holds it or was faster; `holder` is then its name.

        Raises:
            LeaseError: the outcome is unknown.
        """
        ...

    async def renew(self) -> bool:
        """Extend the lease by `seconds`, with the same token.

        Returns:
            False if it expired and another host acquired it. It must then be acquired again.

        Raises:
            LeaseError: the outcome is unknown; `is_held` stays true until the lease expires.
        """
        ...

    async def release(self) -> None:
        """Release the lease, so that another host does not have to wait. `is_held` is immediately false.

        Raises:
            LeaseError: the release was not stored; the lease expires on time.
        """
        ...


MAX_SET_BACK_SECONDS: Final = 1.0
"""Seconds by which the wall clock may go back during a term; time synchronization moves it by less."""
_EXPIRED: Final = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Moment:
    """The time of a request by both clocks of a host."""

    wall: float
    monotonic: float


class Term:
    """Validity of a lease, measured from before the request, because the response may have been slow.

    The term ends when the first of the two clocks reaches its end. The monotonic clock stops while the machine is
    suspended, and the wall clock can be set, so either clock alone could extend the term.

    Args:
        clock: this host's clock.
        seconds: validity of a lease.
        margin: seconds before its end at which it is considered expired.

    Raises:
        ValueError: the margin is negative or not below `seconds`.
    """

    def __init__(self, clock: Clock, *, seconds: float, margin: float) -> None:
        if not 0 <= margin < seconds:
            raise ValueError(f"a lease of {seconds} s has no time left after a margin of {margin} s")
        self._clock = clock
        self._length = seconds - margin
        self._until = _EXPIRED

    def read_clocks(self) -> Moment:
        """Return the current moment. Call this before a request, and pass it to `start` if the request succeeds."""
        return Moment(self._clock.now(), self._clock.monotonic())

    def start(self, requested_at: Moment) -> None:
        """Start the term at the moment of the request."""
        self._until = (requested_at.wall + self._length, requested_at.monotonic + self._length)

    def end(self) -> None:
        """End the term."""
        self._until = _EXPIRED

    @property
    def is_running(self) -> bool:
        """Whether the term has not expired, by both clocks."""
        wall, monotonic = self._until
        # A wall clock before the moment of the request was set back, and can no longer measure the term.
        begun = wall - self._length - MAX_SET_BACK_SECONDS
        return self._clock.monotonic() < monotonic and begun <= self._clock.now() < wall


class LocalLease:
    """A `Lease` that is always held."""

    seconds: float = math.inf
    is_held: bool = True
    fence: int = 0
    holder: str = ""
    holder_seconds: float = math.inf

    async def acquire(self) -> bool:
        """Return True."""
        return True

    async def renew(self) -> bool:
        """Return True."""
        return True

    async def release(self) -> None:
        """Do nothing."""


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
    """A `Lease` in the database of the queue.

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
