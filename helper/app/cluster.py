"""Several hosts with one queue: membership, sender lease, clock skew, shared state, and the loop that sends.

All hosts must use the same clock to decide when a share is due.

If the queue is a local file, only the lease applies, if one is configured. It prevents another host from using a copy
of the file at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

import structlog

from helper.chain.round_registry import RoundRegistry
from helper.clock import Clock
from helper.config.sections import Role
from helper.core.log_limits import LoggedProblem
from helper.core.refusals import PauseReason
from helper.errors import StoreError
from helper.lease import Lease, LeaseKeeper
from helper.observability.log_config import RecurringErrorLog
from helper.observability.service_state import ServiceState
from helper.observability.stats import Stats
from helper.reveal.circuit_choice import CircuitChoice
from helper.reveal.sender import Sender
from helper.store import blocks
from helper.store.store import Store

log = structlog.get_logger("helper.cluster")

MAX_SKEW_SECONDS: Final = 2.0
"""Maximum skew; above it this host accepts, proves and sends nothing."""
CHECK_INTERVAL_SECONDS: Final = 10.0


class ClockSkewMonitor:
    """Compares the clock of a shared database with this host's every ten seconds.

    If the database is unreachable, the last comparison remains valid. Between comparisons the skew follows this host's
    own clocks, so that a change of its wall clock is detected immediately.

    Args:
        measure_skew: returns by how many seconds the database's clock is ahead of this host's.
    """

    def __init__(self, measure_skew: Callable[[], Awaitable[float]], *, clock: Clock) -> None:
        self._measure_skew = measure_skew
        self._clock = clock
        self._problem = LoggedProblem()
        self._offset = self._own_offset()  # the database's wall clock minus this host's monotonic clock

    @property
    def skew_seconds(self) -> float:
        """Seconds that the database's clock is ahead of this host's; 0 before the first comparison."""
        return self._offset - self._own_offset()

    def _own_offset(self) -> float:
        return self._clock.now() - self._clock.monotonic()

    @property
    def fault_reason(self) -> str | None:
        """Why this host's clock must not be used, or None."""
        seconds = self.skew_seconds
        if abs(seconds) <= MAX_SKEW_SECONDS:
            return None
        return PauseReason.CLOCK_OFF_DATABASE.format(round(abs(seconds), 1), "behind" if seconds > 0 else "ahead of")

    async def compare_clocks(self) -> None:
        """Compare the clocks now.

        Raises:
            StoreError: the database is unreachable.
        """
        ahead = await self._measure_skew()
        self._offset = self._own_offset() + ahead
        reason = self.fault_reason
        if reason is None:
            if self._problem.clear():
                log.info("clock_skew_recovered", seconds=round(ahead, 3))
        elif self._problem.note():  # without the reason, whose seconds change
            log.error(
                "clock_skew_exceeded",
                reason=reason,
                advice="Correct the clock of this host or of the database server.",
            )

    async def run(self) -> None:
        """Compare the clocks periodically until cancelled."""
        while True:
            await self._clock.sleep(CHECK_INTERVAL_SECONDS)
            try:
                await self.compare_clocks()
            except StoreError as error:
                log.warning("clock_skew_check_failed", reason=str(error))


EXCHANGE_INTERVAL_SECONDS: Final = 2.0
MISSING_GRACE_SECONDS: Final = 30.0
"""Seconds before a missing part of the cluster is reported, and before a host that cannot send releases the lease."""
_MISSING_TEXTS: Final = {
    "sender": "no host holds the sender lease, so proven shares wait: run `svote-helper serve --role sender` on a host"
    " with a usable node",
    "database": "nothing can be read from the shared database, see the log",
    "prover": "no host proves, so due shares wait: run `svote-helper serve --role prover` on a host",
}


class ClusterMember:
    """This host as a member of a cluster that shares a queue.

    Args:
        standby: wait while another host holds the lease.
        circuits: circuit selection, shared with the other hosts.
        rounds: round registry, updated with what other hosts stored.
        on_acquired: called when this host acquires the lease.
        can_reveal: whether this host has what a send needs: a usable node, and a prover to verify proofs.
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
        can_reveal: Callable[[], bool],
    ) -> None:
        self._store = store
        self._lease = lease
        self._circuits = circuits
        self._rounds = rounds
        self._clock = clock
        self._can_reveal = can_reveal
        self._could_reveal_at = clock.monotonic()
        self._sender: str | None = None
        self._missing_since: dict[str, float] = {}  # monotonic
        self.skew_monitor = ClockSkewMonitor(store.measure_clock_skew, clock=clock)
        self.keeper: LeaseKeeper | None = None
        if role.can_send:
            self.keeper = LeaseKeeper(
                lease, clock=clock, standby=standby, on_acquired=on_acquired, can_send=self._may_hold_lease
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
    def clock_fault(self) -> str | None:
        """Why this host's clock must not be used, or None. A queue in a file has no clock of its own."""
        return self.skew_monitor.fault_reason if self._store.is_shared else None

    def _may_hold_lease(self) -> bool:
        """Whether this host may hold the lease. Of a shared queue, another host may be able to send when it is not."""
        now = self._clock.monotonic()
        if self._can_reveal() or not self._store.is_shared:
            self._could_reveal_at = now
        return self.clock_fault is None and now - self._could_reveal_at < self._grace_seconds

    @property
    def _grace_seconds(self) -> float:
        return max(MISSING_GRACE_SECONDS, 2 * self._lease.seconds)

    @property
    def work_blocked(self) -> str | None:
        """Why this host must not prove shares now, or None. All hosts of a shared queue prove."""
        if self._store.is_shared or self._lease.is_held:
            return None
        return self.intake_blocked or PauseReason.LEASE_UNREACHABLE

    @property
    def intake_blocked(self) -> str | None:
        """Why this host must not accept shares, or None. A standby with a copy of the queue would not reveal them."""
        if self._store.is_shared or self._lease.is_held:
            return None
        if self._lease.holder:
            return PauseReason.QUEUE_USED_ELSEWHERE.format(self._lease.holder)
        return None if self._lease.fence else PauseReason.LEASE_HOLDER_UNKNOWN

    def find_missing(self, part: str) -> str | None:
        """Why shares wait for a part of the cluster that has been missing for long, or None.

        Args:
            part: `sender`, `prover` or `database`.
        """
        since = self._missing_since.get(part)
        is_long = since is not None and self._clock.monotonic() - since >= self._grace_seconds
        return _MISSING_TEXTS[part] if is_long else None

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
                self._missing_since.setdefault("database", self._clock.monotonic())
                log.warning("cluster_state_unavailable", reason=str(error))
            await self._clock.sleep(EXCHANGE_INTERVAL_SECONDS)

    async def _exchange_state_once(self) -> None:
        key = self._circuits.shared_key
        if key is not None:
            stored = await self._store.get_meta(key)
            if not self._lease.is_held:
                self._circuits.apply_state(stored)
            elif (state := self._circuits.publish_state()) != stored:
                await self._store.run(blocks.set_meta, key, state)
        await self._rounds.reload_from_store()
        self._sender = await self._store.get_sender_host()
        present = {"sender": bool(self._sender), "prover": await self._store.has_prover(), "database": True}
        for part, is_present in present.items():
            if is_present:
                self._missing_since.pop(part, None)
            else:
                self._missing_since.setdefault(part, self._clock.monotonic())


POLL_SECONDS: Final = 1.0
"""Maximum seconds between two polls of a shared queue, as notifications may be lost."""


async def send_prepared(
    sender: Sender,
    prepared: asyncio.Event,
    *,
    get_pause_reason: Callable[[], str | None],
    clock: Clock,
    stats: Stats,
) -> None:
    """Send messages that were never sent, until cancelled. The sender tracks sent messages until they are confirmed.

    On a single host, the dispatcher passes each prepared share to the sender. With a shared queue, any host can prepare
    messages. This loop of the lease holder finds them when it is notified, and polls once per second in case a
    notification was lost.

    Args:
        sender: sends messages; idle while another host holds the lease.
        prepared: set when there may be something to send.
        get_pause_reason: why nothing may be sent now, or None.
    """
    errors = RecurringErrorLog(log, failed="send_failed", recovered="send_recovered")
    while True:
        prepared.clear()
        error: Exception | None = None
        try:
            if get_pause_reason() is None:
                await sender.send_new()
        except Exception as failure:  # the next iteration may succeed
            error = failure
        stats.note_attempt("sending prepared shares", error, clock.monotonic())
        errors.note(error)
        await clock.wait(prepared, clock.now() + POLL_SECONDS)
