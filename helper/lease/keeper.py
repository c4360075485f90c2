"""Creates the configured sender lease, acquires and renews it, and reports when another host holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, cast

import structlog

from helper.clock import Clock
from helper.config.sections import ROLES, Config
from helper.core.log_limits import LoggedProblem
from helper.errors import LeaseError, LeaseHeld
from helper.lease.s3_lease import create_s3_lease
from helper.lease.sender_lease import DatabaseLease, Lease, SenderLeaseStore
from helper.store.factory import get_host_name
from helper.store.store import Store

log = structlog.get_logger("helper.lease")

RENEWALS_PER_TERM: Final = 3
"""Renewal attempts per lease term; two of them may fail without losing the lease."""
ATTEMPTS_PER_TERM: Final = 10
"""Attempts of a waiting host to acquire the lease, per lease term."""

CLOCK_FAULT: Final = "this host's clock differs from the database's"


class LeaseKeeper:
    """Acquires, renews and releases the sender lease of one host.

    Args:
        lease: the sender lease.
        clock: for the waits.
        standby: wait while another host holds the lease, instead of refusing to run.
        on_acquired: called whenever the lease is acquired.
        can_send: whether this host may send. If not, it releases the lease and does not acquire it.
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
            while not self._can_send():
                self._warn_once("sending_paused", CLOCK_FAULT, "Sending resumes when the clock difference is small.")
                if give_up_on_error:
                    return
                held_since = None
                await self._clock.sleep(self._lease.seconds / ATTEMPTS_PER_TERM)
            try:
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
        """Return reason and advice while the lease cannot be acquired."""
        if not self._lease.holder:  # a host may hold the lease even if no host name is stored in it
            return "waiting to see whether another host holds the lease", f"This takes {self._lease.seconds:g} s."
        advice = "This host takes over when the other one stops." if self._standby else LeaseHeld.advice
        return f"{self._other_host} holds the sender lease", advice

    async def _renew(self) -> None:
        await self._clock.sleep(self._lease.seconds / RENEWALS_PER_TERM)
        if not self._can_send():
            await self._release()
            return
        try:
            self._is_acquired = await self._lease.renew()
            self._problem.clear()
        except LeaseError as error:
            # The lease may still be valid; `is_held` becomes false when it expires.
            self._warn_once("lease_renewal_failed", str(error), error.advice)
        if not self._is_acquired:
            log.error("lease_lost", host=self._lease.holder)

    async def _release(self) -> None:
        if self._is_acquired:
            self._is_acquired = False
            try:
                await self._lease.release()
            except LeaseError as error:
                log.warning("lease_release_failed", reason=str(error), advice="The lease expires automatically.")

    def _warn_once(self, event: str, reason: str, advice: str) -> None:
        """Log a reason only when it changes."""
        if self._problem.note(reason):
            log.warning(event, reason=reason, advice=advice)


def create_lease(config: Config, store: Store, *, clock: Clock, env: Mapping[str, str]) -> Lease | None:
    """Create the sender lease of this store's queue.

    Args:
        config: the configuration.
        store: the queue.
        clock: the source of time.
        env: the environment, for the credentials of an object store.

    Returns:
        None if no other host can use the queue.

    Raises:
        ConfigError: a required library is not installed, or the credentials file is invalid.
    """
    outer = _create_s3_lease(config, clock, env)
    if not store.is_shared:
        return outer
    return DatabaseLease(cast(SenderLeaseStore, store), clock=clock, outer=outer)


def _create_s3_lease(config: Config, clock: Clock, env: Mapping[str, str]) -> Lease | None:
    if config.sender.lease_location is None or not ROLES[config.helper.role].can_send:
        return None
    return create_s3_lease(
        config.s3,
        config.sender.lease_location,
        host=get_host_name(config),
        clock=clock,
        env=env,
        seconds=config.store.lease_seconds,
    )
