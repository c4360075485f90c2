"""Health of the service: readiness, admission, dispatch, and the facts shown to operators."""

from __future__ import annotations

from helper.chain.block_follower import BlockFollower
from helper.chain.commitment_tree import CommitmentTreeSync
from helper.chain.models import RoundStatus
from helper.chain.node_pool import EVER, NodePool
from helper.chain.round_registry import RoundRegistry
from helper.chain.sync import ChainFollower
from helper.clock import Clock
from helper.cluster.membership import ClusterMember
from helper.core.pause import PauseCause, PauseReason, text_of
from helper.core.roles import ROLES, Role
from helper.observability.health_checks import Check
from helper.observability.service_state import CheckState, HealthState
from helper.observability.stats import Stats
from helper.reveal.circuit_selector import CircuitSelector
from helper.reveal.dispatcher import DispatchGate
from helper.reveal.prover.pool import ProverPool
from helper.runtime.hardening import process_facts
from helper.store.sqlite.file_location import DISPLACED, LOG_DISPLACED
from helper.store.store import Store

PAUSE_GRACE = 30.0
"""Seconds for which dispatch may be paused before the service is not ready. A restart of a node pauses it for less."""


class ServiceHealth:
    """Decides whether shares may be admitted and dispatched, and reports health.

    Args:
        stale_after: age in seconds from which the newest block is too old to admit shares.
        tolerance: seconds a due time may be ahead of the newest block time.
        role: the role of this host; only the parts that it uses must be healthy.
        among: membership in the cluster; None if there is only one host.

    Attributes:
        revealing: whether dispatch has started: provers ready, chain known, circuit selected. Set by the service.
    """

    def __init__(
        self,
        *,
        store: Store,
        endpoints: NodePool,
        rounds: RoundRegistry,
        trees: CommitmentTreeSync,
        follower: ChainFollower,
        listener: BlockFollower,
        circuits: CircuitSelector,
        prover: ProverPool,
        stats: Stats,
        clock: Clock,
        stale_after: float,
        tolerance: float,
        role: Role = ROLES["all"],
        among: ClusterMember | None = None,
    ) -> None:
        self._store = store
        self._endpoints = endpoints
        self._rounds = rounds
        self._trees = trees
        self._follower = follower
        self._listener = listener
        self._circuits = circuits
        self._prover = prover
        self._stats = stats
        self._clock = clock
        self._stale_after = stale_after
        self._tolerance = tolerance
        self._role = role
        self._among = among
        self.revealing = False
        self._paused_since: float | None = None  # monotonic

    @property
    def ready(self) -> bool:
        """Whether shares are admitted and revealed."""
        working = not self._role.works or (self.revealing and self._prover.ready)
        return working and self.intake_paused() is None

    @property
    def sends(self) -> bool:
        """Whether prepared messages may be sent: dispatch has started and the clock is correct."""
        return self.revealing and self._clock_fault() is None

    def intake_paused(self) -> PauseReason | None:
        """Why no share is admitted now, or None.

        The newest block that any node in sync has reported decides whether the chain is current. So a node that is
        unreachable for a moment does not pause admission, but nodes that respond and are all out of sync do.
        """
        return (
            self._unwritable()
            or self._clock_fault()
            or self._intake_blocked()
            or self._not_in_sync()
            or self._all_rounds_paused()
        )

    def round_paused(self, round_id: bytes) -> PauseReason | None:
        """Why no share of this round may be admitted or revealed although nodes are in sync, or None.

        The reason is that no node reports the round, or its tree, consistently with what was verified before.
        """
        frozen = self._rounds.frozen(round_id)
        return self._trees.contradicted(round_id) if frozen is None else PauseCause.ROUND_FROZEN.reason(frozen)

    def checks(self) -> list[Check]:
        """Run the checks that `/readyz` reports."""
        checks = [
            Check("store", text_of(self._unwritable())),
            Check("chain", text_of(self._not_in_sync())),
            Check("clock", text_of(self._clock_suspect())),
            Check("blocks", self._blocks_missing(), self._unread_blocks()),
            Check("rounds", text_of(self._all_rounds_paused()) or self._frozen_with_shares(), self._rounds_note()),
            Check("circuit", text_of(self._circuits.paused)),
        ]
        if self._among is not None:
            checks.append(Check("sender", text_of(self._among.waits)))
        if self._role.works:
            checks.append(Check("provers", None if self._prover.ready else "no prover is ready"))
            checks.append(Check("queue", None if self.revealing else "starting: dispatch has not begun"))
            checks.append(Check("dispatch", text_of(self._long_pause())))
        return checks

    def _clock_fault(self) -> PauseReason | None:
        return None if self._among is None else self._among.off

    def _clock_suspect(self) -> PauseReason | None:
        """Why nothing may be dispatched by this host's clock, or None."""
        fault = self._clock_fault()
        return PauseCause.CLOCK_OFF_CHAIN.reason() if fault is None and self._endpoints.clock_suspect else fault

    def _intake_blocked(self) -> PauseReason | None:
        return None if self._among is None else self._among.elsewhere

    def _work_blocked(self) -> PauseReason | None:
        return None if self._among is None else self._among.waits

    def _unwritable(self) -> PauseReason | None:
        """Why nothing can be stored, or None. The text is public; details of a disk error are only logged."""
        trouble = self._store.trouble
        if trouble is None:
            return None
        if trouble in {DISPLACED, LOG_DISPLACED}:
            return PauseCause.DATABASE_MOVED.reason(trouble)
        return PauseCause.QUEUE_UNWRITABLE.reason()

    def _not_in_sync(self) -> PauseReason | None:
        """Why the chain's state is not known well enough to admit shares, or None."""
        if not self._follower.ready:
            return PauseCause.CHAIN_NOT_READ.reason()
        newest = self._endpoints.time_at(EVER)
        is_current = newest is not None and -self._tolerance <= self._clock.now() - newest <= self._stale_after
        return None if is_current and not self._endpoints.out_of_step else PauseCause.NO_NODE_IN_SYNC.reason()

    def _blocks_missing(self) -> str | None:
        """Why confirmations may be missing, or None."""
        if self._listener.disputed is not None:
            return f"nodes show different reveals in block {self._listener.disputed}"
        if self._listener.stalled is not None:
            return f"no node has block {self._listener.stalled}"
        return text_of(self._unread_since_stop())

    def _unread_since_stop(self) -> PauseReason | None:
        """Why shares that await a proof may be confirmed already, or None."""
        return None if self._listener.arrived else PauseCause.BLOCKS_UNREAD.reason()

    def _unread_blocks(self) -> str | None:
        """The number of older blocks that are not read yet, or None. Shares are revealed meanwhile."""
        left = self._listener.history.blocks_left
        return f"{left} older blocks are still to be read; shares are revealed meanwhile" if left else None

    def _all_rounds_paused(self) -> PauseReason | None:
        """Why all active rounds are paused, or None if at least one is not."""
        open_rounds = [known for known in self._rounds.open() if known.status is RoundStatus.ACTIVE]
        reasons = [self.round_paused(known.round_id) for known in open_rounds]
        return reasons[0] if reasons and all(reasons) else None

    def _frozen_with_shares(self) -> str | None:
        """Which frozen rounds have waiting shares, or None. Other rounds are not affected."""
        frozen = [
            f"round {round_id.hex()[:8]} is frozen with {number} waiting shares"
            for round_id, number in self._rounds.frozen_shares().items()
        ]
        return "; ".join(frozen) or None

    def _rounds_note(self) -> str | None:
        """Node reports about single rounds that were not accepted, or None."""
        reports = [f"round {round_id.hex()[:8]}: {text}" for round_id, text in self._rounds.unconfirmed().items()]
        return "; ".join(reports) or None

    def gate(self) -> DispatchGate:
        """Return the conditions for dispatch, and note when a pause begins."""
        gate = self._gate()
        if gate.paused is None:
            self._paused_since = None
        elif self._paused_since is None:
            self._paused_since = self._clock.monotonic()
        return gate

    def _long_pause(self) -> PauseReason | None:
        """Why dispatch has been paused for longer than `PAUSE_GRACE`, or None."""
        reason = self.gate().paused
        since = self._clock.monotonic() if self._paused_since is None else self._paused_since
        return reason if self._clock.monotonic() - since >= PAUSE_GRACE else None

    def _gate(self) -> DispatchGate:
        head = self._endpoints.head
        reason = (
            self._unwritable()  # a proof could not be stored
            or self._clock_suspect()
            or self._work_blocked()
            or (PauseCause.NO_NODE_IN_SYNC.reason() if head is None else None)
            # Shares confirmed since the last stop or the restored backup need no proof. The wait is bounded.
            or self._unread_since_stop()
        )
        if reason is not None or head is None:
            return DispatchGate(frozenset(), 0.0, reason)
        rounds = frozenset(
            known.round_id
            for known in self._rounds.active()
            if head.time < self._rounds.latest_end(known) and self._trees.anchor(known.round_id) is not None
            if self._trees.contradicted(known.round_id) is None
        )
        return DispatchGate(
            rounds,
            head.time + self._tolerance,
            self._circuits.blocked or self._all_rounds_paused(),
            one_at_a_time=self._circuits.is_guess or self._circuits.paused is not None,
        )

    def _age_of(self, time: float | None) -> float | None:
        """Seconds since a block time by the local clock; None if the time is unknown."""
        return None if time is None else round(self._clock.now() - time, 3)

    def _tree_lag(self) -> int | None:
        """Blocks by which the trees are behind the newest block; None before a block is known."""
        head = self._endpoints.head
        return None if head is None else max(0, head.height - self._trees.synced_height)

    def facts(self) -> HealthState:
        """Return health, timings and pauses for operators, without data of single shares."""
        reasons = self._endpoints.reasons()
        return {
            "ready": self.ready,
            "intake_paused": text_of(self.intake_paused()),
            "checks": [CheckState(name=check.name, problem=check.problem, note=check.note) for check in self.checks()],
            "process": process_facts(),
            "circuit": self._circuits.current,
            "chain_id": self._endpoints.chain_id,
            "clock_skew": self._endpoints.clock_skew,
            "block_age": self._age_of(self._endpoints.time_at(EVER)),
            "tree_lag": self._tree_lag(),
            "unread_blocks": self._listener.history.blocks_left,
            "endpoints": [
                {
                    "name": endpoint.name,
                    "reason": reasons.get(endpoint.name),
                    "height": endpoint.height,
                    "block_age": self._age_of(endpoint.health.head.time if endpoint.health.head is not None else None),
                }
                for endpoint in self._endpoints.all
            ],
            "provers": {
                "workers": self._prover.workers,
                "pids": self._prover.pids,
                "deaths": dict(self._prover.deaths),
                "self_test_seconds": self._prover.seconds_each(self._circuits.current),
                "timeout_seconds": self._prover.timeout(self._circuits.current),
            },
            **self._stats.summary(self._clock.monotonic()),
        }
