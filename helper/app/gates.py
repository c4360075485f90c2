"""Decides whether shares may be admitted, dispatched and sent now.

Depends on the state of the chain, the clock, the store and the cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from helper.app.cluster import ClusterMember
from helper.chain.commitment_trees import CommitmentTreeSync
from helper.chain.follower import BlockFollower
from helper.chain.node_pool import NodePool
from helper.chain.round_registry import RoundRegistry
from helper.chain.scheduled_sync import ChainSync
from helper.clock import Clock
from helper.core.refusals import PauseReason
from helper.reveal.circuit_choice import CircuitChoice
from helper.reveal.dispatcher import DispatchGate
from helper.reveal.revealer import ProofTimes
from helper.store.sqlite.displacement import DATABASE_DISPLACED_TEXT, WAL_DISPLACED_TEXT
from helper.store.store import Store

PAUSE_GRACE_SECONDS = 30.0
"""Seconds for which dispatch may be paused before the service is not ready; longer than the restart of a node takes."""


@dataclass(slots=True, kw_only=True)
class Gates:
    """Decides whether shares may be admitted, dispatched and sent now.

    Attributes:
        cluster: membership in the cluster; None if there is only one host.
        is_dispatching: whether dispatch has started: provers ready, chain known, circuit selected. Set by the service.
    """

    store: Store
    node_pool: NodePool
    round_registry: RoundRegistry
    tree_sync: CommitmentTreeSync
    chain_sync: ChainSync
    block_follower: BlockFollower
    circuit_choice: CircuitChoice
    proof_times: ProofTimes
    clock: Clock
    cluster: ClusterMember | None = None
    is_dispatching: bool = False
    _paused_since: float | None = None  # monotonic

    @property
    def can_send(self) -> bool:
        """Whether prepared messages may be sent: dispatch has started and the clock is correct."""
        return self.is_dispatching and self._clock_fault() is None

    def intake_pause_reason(self) -> str | None:
        """Why no share is admitted now, or None.

        The chain is current if the newest block that any node in sync has reported is recent. A node that is briefly
        unreachable therefore does not pause admission. Admission pauses if nodes respond but none is in sync.
        """
        return (
            self.store_fault()
            or self._clock_fault()
            or (None if self.cluster is None else self.cluster.intake_blocked)
            or self.sync_fault()
            or self.all_rounds_pause_reason()
        )

    def round_pause_reason(self, round_id: bytes) -> str | None:
        """Why this round is paused although nodes are in sync, or None.

        The reason is that no node's report of the round or its tree is consistent with the verified state.
        """
        return self.round_registry.frozen_reason(round_id) or self.tree_sync.contradiction_reason(round_id)

    def get_dispatch_gate(self) -> DispatchGate:
        """Return the conditions for dispatch, and note when a pause begins."""
        gate = self._create_gate()
        if gate.pause_reason is None:
            self._paused_since = None
        elif self._paused_since is None:
            self._paused_since = self.clock.monotonic()
        return gate

    def long_pause_reason(self) -> str | None:
        """Why dispatch has been paused for longer than `PAUSE_GRACE_SECONDS`, or None."""
        reason = self.get_dispatch_gate().pause_reason
        since = self.clock.monotonic() if self._paused_since is None else self._paused_since
        return reason if self.clock.monotonic() - since >= PAUSE_GRACE_SECONDS else None

    def _create_gate(self) -> DispatchGate:
        head = self.node_pool.head
        reason = (
            self.store_fault()  # a proof could not be stored
            or self.clock_suspect()
            or (None if self.cluster is None else self.cluster.work_blocked)
            or (PauseReason.NO_NODE_IN_SYNC if head is None else None)
            # Shares confirmed since the last stop or the restored backup need no proof. The wait is bounded.
            or self.unread_since_stop()
        )
        if reason is not None or head is None:
            return DispatchGate({}, 0.0, reason)
        ends = {
            known.round_id: float(self.round_registry.view(known.round_id).latest_end)
            for known in self.round_registry.active_rounds()
            if self.tree_sync.anchor(known.round_id) is not None
            if self.tree_sync.contradiction_reason(known.round_id) is None
        }
        ends = {round_id: end for round_id, end in ends.items() if self.proof_times.can_finish_proof(end, head.time)}
        return DispatchGate(
            {each: math.inf if self.round_registry.is_doubted(each) else end for each, end in ends.items()},
            head.time + self.node_pool.max_clock_skew,
            self.circuit_choice.blocked_reason or self.all_rounds_pause_reason(),
            is_one_at_a_time=self.circuit_choice.is_current_unproven or self.circuit_choice.pause_reason is not None,
            chain_time=head.time,
        )

    def store_damage(self) -> str | None:
        """What operators must know about a database that is still used, or None. The text is public."""
        return "the database was damaged: see the log" if self.store.has_found_damage else None

    def store_fault(self) -> str | None:
        """Why nothing can be stored, or None. The text is public; details of a disk error are only logged."""
        reason = self.store.write_error
        is_public = reason in {None, DATABASE_DISPLACED_TEXT, WAL_DISPLACED_TEXT}
        return reason if is_public else PauseReason.QUEUE_UNWRITABLE

    def _clock_fault(self) -> str | None:
        return None if self.cluster is None else self.cluster.clock_fault

    def clock_suspect(self) -> str | None:
        """Why this host's clock must not be used for dispatch, or None."""
        fault = self._clock_fault()
        return PauseReason.CLOCK_OFF_CHAIN if fault is None and self.node_pool.is_clock_suspect else fault

    def sync_fault(self) -> str | None:
        """Why the chain's state is not known well enough to admit shares, or None."""
        if not self.chain_sync.is_ready:
            return PauseReason.CHAIN_NOT_READ
        nodes, head = self.node_pool, self.node_pool.last_head
        is_current = head is not None and -nodes.max_clock_skew <= self.clock.now() - head.time <= nodes.stale_after
        return None if is_current and not nodes.is_out_of_sync else PauseReason.NO_NODE_IN_SYNC

    def unread_since_stop(self) -> str | None:
        """Why shares without a proof may be confirmed already, or None."""
        return None if self.block_follower.is_ready else PauseReason.BLOCKS_UNREAD

    def all_rounds_pause_reason(self) -> str | None:
        """Why all active rounds are paused, or None if at least one is not."""
        active = self.round_registry.active_rounds(with_frozen=True)
        reasons = [self.round_pause_reason(known.round_id) for known in active]
        return reasons[0] if reasons and all(reasons) else None
