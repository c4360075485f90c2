"""Cluster membership: sender lease, clock agreement, shared state.

If the queue is a local file, only the lease applies, if one is configured. It prevents another host from using a copy
of the file at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

import structlog

from helper.chain.round_registry import RoundRegistry
from helper.clock import Clock
from helper.cluster.clock_skew import ClockSkewMonitor
from helper.core.pause import PauseCause, PauseReason
from helper.core.roles import Role
from helper.errors import StoreError
from helper.lease import Lease
from helper.lease.keeper import LeaseKeeper
from helper.observability.service_state import ServiceState
from helper.reveal.circuit_choice import CircuitChoice
from helper.store.store import Store

log = structlog.get_logger("helper.cluster")

EXCHANGE_INTERVAL_SECONDS: Final = 2.0
MISSING_GRACE_SECONDS: Final = 30.0
"""Seconds for which no host may send or prove before that is reported; a standby sender takes over sooner."""
_MISSING_TEXTS: Final = {
    "sender": "no host holds the sender lease, so proven shares wait: run `svote-helper serve --role sender` on a host",
    "prover": "no host proves, so due shares wait: run `svote-helper serve --role prover` on a host",
}


class ClusterMember:
    """This host as a member of a cluster that shares a queue.

    Args:
        store: the queue.
        lease: the sender lease.
        role: the role of this host.
        standby: wait while another host holds the lease.
        circuits: circuit selection, shared with the other hosts.
        rounds: round registry, updated with what other hosts stored.
        clock: the source of time.
        on_acquired: called when this host acquires the lease.
    """

    def __init__(
        self,
        store: Store,
        *,
        lease: Lease,
        role: Role,
        standby: bool,
        circuits: CircuitChoice,
        rounds: RoundRegistry,
        clock: Clock,
        on_acquired: Callable[[], None],
    ) -> None:
        self._store = store
        self._lease = lease
        self._circuits = circuits
        self._rounds = rounds
        self._clock = clock
        self._published_state: str | None = None
        self._sender: str | None = None
        self._missing_since: dict[str, float] = {}  # monotonic
        self.skew_monitor = ClockSkewMonitor(store, clock=clock)
        self.keeper: LeaseKeeper | None = None
        if role.can_send:
            self.keeper = LeaseKeeper(
                lease, clock=clock, standby=standby, on_acquired=on_acquired, can_send=lambda: self.clock_fault is None
            )

    async def start(self) -> None:
        """Compare the clocks and acquire the lease, before any work starts.

        Raises:
            StoreError: the database is unreachable.
            LeaseHeld: another host holds the lease, and this host is not a standby.
        """
        await self.skew_monitor.compare_clocks()
        if self.keeper is not None:
            await self.keeper.acquire_at_start()

    @property
    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """The tasks to run until the service stops, by name."""
        tasks = {"clock": self.skew_monitor.run(), "agreement": self._exchange_state()} if self._store.is_shared else {}
        if self.keeper is not None:
            tasks["lease"] = self.keeper.run()
        return tasks

    @property
    def clock_fault(self) -> PauseReason | None:
        """Why this host's clock must not be used, or None. A queue in a file has no clock of its own."""
        return self.skew_monitor.fault_reason if self._store.is_shared else None

    @property
    def work_blocked(self) -> PauseReason | None:
        """Why this host must not prove shares now, or None. All hosts of a shared queue prove."""
        if self._store.is_shared or self._lease.is_held:
            return None
        return self.intake_blocked or PauseCause.LEASE_UNREACHABLE.reason()

    @property
    def intake_blocked(self) -> PauseReason | None:
        """Why this host must not accept shares, or None. A standby with a copy of the queue would not reveal them."""
        if self._store.is_shared or self._lease.is_held:
            return None
        if self._lease.holder:
            return PauseCause.QUEUE_USED_ELSEWHERE.reason(self._lease.holder)
        return None if self._lease.fence else PauseCause.LEASE_HOLDER_UNKNOWN.reason()

    def missing_host(self, task: str) -> str | None:
        """Why shares wait for a host that does not run, or None.

        Args:
            task: `sender` or `prover`.
        """
        since = self._missing_since.get(task)
        grace = max(MISSING_GRACE_SECONDS, 2 * self._lease.seconds)
        return _MISSING_TEXTS[task] if since is not None and self._clock.monotonic() - since >= grace else None

    def add_state(self, state: ServiceState) -> ServiceState:
        """Add the state of the lease, for operators.

        `sender` is the host that holds the lease. For a shared queue it comes from the database ("" for none, None
        while it is unknown), otherwise it is the other host that holds it.
        """
        state = replace(state, sends=self._lease.is_held)
        if self._store.is_shared:
            return replace(state, sender=self._sender, database_skew=round(self.skew_monitor.skew_seconds, 3))
        return replace(state, sender=self._lease.holder if self.keeper is not None else None)

    async def _exchange_state(self) -> None:
        """Exchange state with the other hosts until cancelled.

        The state consists of the accepted circuit, the closed rounds and the sender's name.
        """
        while True:
            try:
                await self._exchange_state_once()
            except StoreError as error:
                self._sender = None
                log.warning("cluster_state_unavailable", reason=str(error))
            await self._clock.sleep(EXCHANGE_INTERVAL_SECONDS)

    async def _exchange_state_once(self) -> None:
        key = self._circuits.shared_key
        if key is not None:
            if self._lease.is_held:
                state = self._circuits.publish_state()
                if state != self._published_state:
                    await self._store.set_meta(key, state)
                    self._published_state = state
            else:
                self._published_state = None
                self._circuits.apply_state(await self._store.get_meta(key))
        await self._rounds.reload_from_store()
        self._sender = await self._store.get_sender_host()
        for task, is_present in (("sender", bool(self._sender)), ("prover", await self._store.has_prover())):
            if is_present:
                self._missing_since.pop(task, None)
            else:
                self._missing_since.setdefault(task, self._clock.monotonic())
