"""The sender lease: its interface and validity, the lease in the database of the queue, and its keeper.

The lease covers all hosts with the same queue or a copy of it.

The lease is valid for a few seconds, and its holder renews it long before it expires. The holder decides by its own
clocks whether its lease is still valid, measuring from before the request and subtracting a margin (`Term`). It
therefore stops before another host can start. Each acquisition has a new, greater fencing token. The store checks the
token before each send, so a host that was suspended until after the expiry finds a newer token and sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import structlog

from helper.clock import Clock
from helper.core.log_limits import LoggedProblem
from helper.errors import LeaseError, LeaseHeld, StoreError

if TYPE_CHECKING:
    from helper.store.postgres.store import PostgresStore

log = structlog.get_logger("helper.lease")


class Lease:
    """One host's view of the sender lease. The base class is the lease of a queue that no other host can use.

    Only one task may call the methods; any task may read the attributes. The methods raise LeaseError if the outcome is
    unknown. The lease is then unchanged and expires on time.

    Attributes:
        seconds: validity from the moment it is acquired or renewed.
        fence: fencing token of this host's latest acquisition, greater than all earlier ones; 0 before the first.
        holder: the other host that held the lease when it was last read; "" if none did.
        holder_seconds: validity of the other host's lease when it was last read; it may have other settings.
    """

    seconds: float = math.inf
    fence: int = 0
    holder: str = ""
    holder_seconds: float = math.inf

    @property
    def is_held(self) -> bool:
        """Whether this host holds the lease, by its own clocks minus a safety margin. Makes no request."""
        return True

    async def acquire(self) -> bool:
        """Acquire the lease if no host holds it, or if this host held it before a restart.

        Each acquisition gets a new fencing token.

        Returns:
            False if another host holds it or was faster; `holder` is then its name.
        """
        return True

    async def renew(self) -> bool:
        """Extend the lease by `seconds`, with the same token.

        Returns:
            False if it expired and another host acquired it. It must then be acquired again.
        """
        return True

    async def release(self) -> None:
        """Release the lease, so that another host does not have to wait. `is_held` is immediately false."""


MAX_SET_BACK_SECONDS: Final = 1.0
"""Seconds by which the wall clock may go back during a term; time synchronization moves it by less."""
_EXPIRED: Final = (0.0, 0.0)


Moment = tuple[float, float]
"""The wall and the monotonic time of a request."""


class Term:
    """Validity of a lease, measured from before the request, because the response may have been slow.

    The term ends when the first of the two clocks reaches its end. The monotonic clock stops while the machine is
    suspended, and the wall clock can be set, so either clock alone could extend the term.

    Args:
        seconds: validity, without the margin before its end.
    """

    def __init__(self, clock: Clock, *, seconds: float) -> None:
        self._clock = clock
        self._length = seconds
        self._until = _EXPIRED

    def read_clocks(self) -> Moment:
        """Return the current moment. Call this before a request, and pass it to `start` if the request succeeds."""
        return self._clock.now(), self._clock.monotonic()

    def start(self, requested_at: Moment) -> None:
        """Start the term at the moment of the request."""
        wall, monotonic = requested_at
        self._until = wall + self._length, monotonic + self._length

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


MARGIN_FRACTION: Final = 0.1
"""Fraction of a lease by which this host considers it expired before the database does."""


class DatabaseLease(Lease):
    """A `Lease` in the database of the queue.

    The database checks the fencing token by its own clock whenever a send is recorded (`mark_sending`), so correctness
    does not depend on this host's clock. `is_held` covers the time between that record and the first byte sent.

    Args:
        outer: lease in an object store that must also be held. Its token is stored in the database, and a greater token
            replaces any holder there. Both leases have the same validity. None if the database alone decides.
    """

    def __init__(self, store: PostgresStore, *, clock: Clock, outer: Lease | None = None) -> None:
        self.seconds = self.holder_seconds = store.lease_seconds
        self._store = store
        self._outer = outer
        self._term = Term(clock, seconds=self.seconds - self.seconds * MARGIN_FRACTION)

    @property
    def is_held(self) -> bool:
        """Whether this host holds the lease, and the outer lease if there is one."""
        return self._term.is_running and (self._outer is None or self._outer.is_held)

    async def acquire(self) -> bool:
        """Acquire the lease; if another host holds it, set `holder`."""
        if self._outer is not None and not self._outer.is_held:
            with _database_errors("acquire"):  # a host that does not reach it leaves the outer lease to others
                await self._store.get_sender_host()
            if not await self._outer.acquire():
                # The row has none: it expires by the database's clock, also across restarts.
                self.holder, self.holder_seconds = self._outer.holder, self._outer.holder_seconds
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
        """Renew the lease; if it is lost, set `holder`.

        Without the database, this host cannot send. The outer lease is then not renewed, and expires for another host.
        """
        requested_at = self._term.read_clocks()
        with _database_errors("renew"):
            if not await self._store.renew_sender_lease():
                self._term.end()
                self.holder = await self._store.get_sender_host()
                return False
        self._term.start(requested_at)
        if self._outer is not None and not await self._outer.renew():
            self._term.end()
            self.holder = self._outer.holder
            return False
        return True

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
    try:
        yield
    except StoreError as error:
        raise LeaseError(
            f"could not {action} the sender lease in the database: {error}", advice=error.advice
        ) from error


RENEWALS_PER_TERM: Final = 3
"""Renewal attempts per lease term; two of them may fail without losing the lease."""
ATTEMPTS_PER_TERM: Final = 10
"""Attempts of a waiting host to acquire the lease, per lease term."""


class LeaseKeeper:
    """Acquires, renews and releases the sender lease of one host.

    Args:
        standby: wait while another host holds the lease, instead of refusing to run.
        can_send: whether this host may send. If not, it releases the lease and does not acquire it. After it has
            released it, it is a standby.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        clock: Clock,
        standby: bool = False,
        on_acquired: Callable[[], None] = lambda: None,
        can_send: Callable[[], bool] = lambda: True,
    ) -> None:
        self._lease = lease
        self._clock = clock
        self._standby = standby
        self._on_acquired = on_acquired
        self._can_send = can_send
        self._is_acquired = False
        self._problem = LoggedProblem()

    async def acquire_at_start(self) -> None:
        """Acquire the lease before any work starts. Returns without it if its storage is unreachable; `run` retries.

        Raises:
            LeaseHeld: another host held it for longer than the lease of a crashed host remains valid.
        """
        if not self._standby:
            await self._acquire(give_up_on_error=True)

    async def run(self) -> None:
        """Acquire and renew the lease until cancelled, then release it.

        Raises:
            LeaseHeld: another host held it for longer than the lease of a crashed host remains valid.
        """
        try:
            while True:
                await (self._renew() if self._is_acquired else self._acquire())
        finally:
            await self._release()

    async def _acquire(self, *, give_up_on_error: bool = False) -> None:
        """Retry until this host holds the lease.

        The lease of a crashed host expires while this waits. A host that renews it is a configuration error, unless
        this one is a standby.

        Args:
            give_up_on_error: return, without an error, if the storage of the lease is unreachable.
        """
        held_since: float | None = None  # start of an uninterrupted period in which another host held it
        while True:
            try:
                if not self._can_send():
                    raise LeaseError(
                        "this host cannot send now", advice="`svote-helper doctor` on this host names the reason."
                    )
                if await self._lease.acquire():
                    break
            except LeaseError as error:
                self._warn_once("sending_paused", str(error), error.advice)
                if give_up_on_error:
                    return
                held_since = None
            else:
                self._warn_once("sending_paused", *self._waiting_reason())
                now = self._clock.monotonic()
                held_since = now if held_since is None else held_since
                # Otherwise a lease of more seconds, left by a crash, would be refused again after every restart.
                validity = max(self._lease.seconds, self._lease.holder_seconds)
                if not self._standby and now - held_since >= validity * (1 + 1 / ATTEMPTS_PER_TERM):
                    raise LeaseHeld(f"{self._other_host} holds the sender lease of this queue")
            await self._clock.sleep(self._lease.seconds / ATTEMPTS_PER_TERM)
        self._is_acquired = True
        self._problem.clear()
        log.info("lease_acquired", fence=self._lease.fence)
        self._on_acquired()

    @property
    def _other_host(self) -> str:
        return f"host {self._lease.holder!r}" if self._lease.holder else "another host"

    def _waiting_reason(self) -> tuple[str, str]:
        if not self._lease.holder:  # a host may hold the lease even if no host name is stored in it
            return "waiting to see whether another host holds the lease", f"This takes {self._lease.seconds:g} s."
        advice = "This host takes over when the other one stops." if self._standby else LeaseHeld.advice
        return f"{self._other_host} holds the sender lease", advice

    async def _renew(self) -> None:
        await self._clock.sleep(self._lease.seconds / RENEWALS_PER_TERM)
        if not self._can_send():
            self._standby = True  # it leaves the lease to another host, which is no configuration error
            await self._release()
            return
        try:
            self._is_acquired = await self._lease.renew()
            self._problem.clear()
        except LeaseError as error:
            # The lease may still be valid; `is_held` becomes false when it expires.
            self._warn_once("lease_renewal_failed", str(error), error.advice)
        if not self._is_acquired:
            advice = "Check which host sends: `svote-helper doctor --skip-proof`."
            log.error("lease_lost", host=self._lease.holder, advice=advice)

    async def _release(self) -> None:
        if self._is_acquired:
            self._is_acquired = False
            try:
                await self._lease.release()
            except LeaseError as error:
                log.warning("lease_release_failed", reason=str(error), advice="The lease expires automatically.")

    def _warn_once(self, event: str, reason: str, advice: str) -> None:
        if self._problem.note(reason):
            log.warning(event, reason=reason, advice=advice)
