"""Health of the service: the readiness checks of `/readyz`, and the status for operators."""

from __future__ import annotations

from typing import Final

from helper.app.gates import PAUSE_GRACE_SECONDS, Gates
from helper.chain.chain_data import BlockHead
from helper.chain.scheduled_sync import MAX_DUE_SECONDS
from helper.config.sections import Role
from helper.core.text_forms import format_time
from helper.observability.service_state import Check, NodeState, ProverState, ServiceState
from helper.observability.stats import Stats
from helper.reveal.prover_pool import ProverPool
from helper.runtime.process_security import get_process_limits

UNREAD_GRACE_SECONDS: Final = 600.0
"""Seconds for which the number of unread blocks may not decrease. A node that restarts is not a problem."""
STANDSTILL_SECONDS: Final = 300.0
"""Seconds for which enough nodes may respond without a new agreed height. Blocks come every few seconds."""
MAX_BLOCKS_IN_PROGRESS: Final = 10
"""Newest blocks that may be unread at any time."""
MAX_MISSED_BLOCKS: Final = 64
"""An increase of the number of unread blocks by more is a rescan, or a downtime of the helper or its nodes."""


class ServiceHealth:
    """Reports readiness and state of the service.

    Args:
        role: the role of this host; only the components that it uses must be healthy.
    """

    def __init__(self, gates: Gates, *, prover_pool: ProverPool, stats: Stats, role: Role) -> None:
        self._gates = gates
        self._prover_pool = prover_pool
        self._stats = stats
        self._role = role
        self._unread_count = self._fewest_unread = 0
        self._unread_since = 0.0  # monotonic time at which the number of unread blocks last decreased
        self._greatest_agreed = 0
        self._standing_seconds = 0.0  # in which enough nodes have responded since that height was agreed
        self._noted_at = gates.clock.monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether shares are admitted and revealed."""
        is_dispatch_ready = not self._role.can_process or (self._gates.is_dispatching and self._prover_pool.is_ready)
        return is_dispatch_ready and self._gates.intake_pause_reason() is None

    def run_checks(self) -> list[Check]:
        """Run the checks that `/readyz` reports."""
        cluster = self._gates.cluster
        unreadable = None if cluster is None else cluster.find_missing("database")
        checks = [
            Check("store", self._gates.store_fault() or unreadable, self._gates.store_damage()),
            Check(
                "chain",
                self._standing_height() or self._gates.sync_fault() or self._overdue_routes(),
                self._same_nodes() or self._chain_id_dispute(),
            ),
            Check("clock", self._gates.clock_suspect()),
            Check("blocks", self._missing_blocks() or self._blocks_unread_for_long(), self._unread_blocks()),
            Check(
                "rounds",
                self._gates.all_rounds_pause_reason() or self._frozen_with_shares(),
                self._unconfirmed_round_reports(),
            ),
            Check("circuit", self._gates.circuit_choice.pause_reason),
        ]
        if cluster is not None:
            accepts = self._role.can_accept
            missing = cluster.find_missing("sender") if accepts else None
            checks.append(Check("sender", cluster.work_blocked or missing))
            if accepts and not self._role.can_process:
                checks.append(Check("provers", cluster.find_missing("prover")))
        if self._role.can_process:
            checks.append(Check("provers", None if self._prover_pool.is_ready else "no prover is ready"))
            checks.append(Check("queue", None if self._gates.is_dispatching else "starting: dispatch has not begun"))
            checks.append(Check("dispatch", self._gates.long_pause_reason() or self._failing_dispatch()))
        return checks

    def _failing_dispatch(self) -> str | None:
        """Which part of the dispatch raises an error each time, or None."""
        failing = self._stats.find_failing(PAUSE_GRACE_SECONDS, self._gates.clock.monotonic())
        return f"dispatch fails, see the log: {' and '.join(failing)}" if failing else None

    def _same_nodes(self) -> str | None:
        """Why fewer nodes check each other than are configured, or None."""
        return "two entries of [chain] endpoints are the same node" if self._gates.node_pool.same_nodes else None

    def _chain_id_dispute(self) -> str | None:
        """That no chain id is agreed, or None. Without names: everyone may read it."""
        is_disputed = self._gates.node_pool.chain_id_dispute is not None
        return "the entries of [chain] endpoints are of different chains, see the log" if is_disputed else None

    def _overdue_routes(self) -> str | None:
        """Which routes no node answers, so that new votes are refused; or None."""
        routes = " and ".join(f"`{route}`" for route in self._gates.chain_sync.find_overdue_routes())
        return (
            f"no node has answered {routes} for over {MAX_DUE_SECONDS:.0f} s: new votes are refused" if routes else None
        )

    def _missing_blocks(self) -> str | None:
        """Why confirmations may be missing, or None."""
        if self._gates.block_follower.disputed_height is not None:
            return f"nodes report different reveals in block {self._gates.block_follower.disputed_height}"
        if self._gates.block_follower.stalled_height is not None:
            return f"too few nodes return block {self._gates.block_follower.stalled_height}"
        return self._gates.unread_since_stop()

    def _standing_height(self) -> str | None:
        """Since when the nodes that respond have agreed on no new block, and what to do; or None."""
        age, height = self._standing_seconds, self._greatest_agreed
        reported = self._gates.node_pool.reported_heights
        limit = max(STANDSTILL_SECONDS, 2 * self._gates.node_pool.stale_after)
        if len(reported) < self._gates.node_pool.needed or age < limit:
            return None
        since = f"{format_time(int(self._gates.clock.now() - age))} UTC ({age // 60:.0f} min)"
        if max(reported) > height:
            return (
                f"two nodes have not agreed on a block above {height} since {since}, but one reports {max(reported)}: "
                "compare the nodes with a block explorer, and replace the wrong one in [chain] endpoints"
            )
        return f"no block above {height} since {since}: the chain has stopped, or its nodes here are cut off from it"

    def note_progress(self, head: BlockHead | None) -> None:
        """Note whether unread blocks become fewer and the agreed height rises. Called at each probe of a node."""
        now, agreed = self._gates.clock.monotonic(), self._gates.node_pool.agreed_height
        if agreed is not None and agreed > self._greatest_agreed:
            self._greatest_agreed, self._standing_seconds = agreed, 0.0
        elif len(self._gates.node_pool.reported_heights) >= self._gates.node_pool.needed:
            self._standing_seconds += now - self._noted_at
        self._noted_at = now
        count, before = self._count_unread_blocks(head), self._unread_count
        has_decreased = count < self._fewest_unread or count - before > MAX_MISSED_BLOCKS
        if not self._fewest_unread or has_decreased:
            self._fewest_unread, self._unread_since = count, self._gates.clock.monotonic()
        self._unread_count = count

    def _blocks_unread_for_long(self) -> str | None:
        """How many blocks stay unread, since when, and what is missing; or None."""
        age = self._gates.clock.monotonic() - self._unread_since
        if not self._fewest_unread or age < UNREAD_GRACE_SECONDS:
            return None
        since = format_time(int(self._gates.clock.now() - age))
        nodes = "no two nodes return" if len(self._gates.node_pool.nodes) > 1 else "the node does not return"
        return f"{self._unread_count} blocks unread since {since} UTC: {nodes} them, or reading them fails, see the log"

    def _count_unread_blocks(self, head: BlockHead | None) -> int:
        """Number of unread blocks, with those above the newest one read if these are more than a few."""
        height = self._gates.block_follower.height
        behind = 0 if head is None or height is None else head.height - height
        return self._gates.block_follower.gap_count + (behind if behind > MAX_BLOCKS_IN_PROGRESS else 0)

    def _unread_blocks(self) -> str | None:
        """The number of older blocks that are not read yet, or None. Shares are revealed in the meantime."""
        left = self._gates.block_follower.gap_count
        return f"{left} older blocks have not been read yet; shares are still revealed" if left else None

    def _frozen_with_shares(self) -> str | None:
        """Which frozen rounds have waiting shares, or None. Other rounds are not affected.

        The text is public and therefore without their number, which changes with each confirmation.
        """
        frozen = [
            f"round {round_id.hex()[:8]} is frozen and has waiting shares"
            for round_id in self._gates.round_registry.frozen_shares()
        ]
        return "; ".join(frozen) or None

    def _unconfirmed_round_reports(self) -> str | None:
        """Node reports about single rounds that were not accepted, or None."""
        reports = [
            f"round {round_id.hex()[:8]}: {text}"
            for round_id, text in self._gates.round_registry.unconfirmed_reports().items()
        ]
        return "; ".join(reports) or None

    def _age_of(self, time: float | None) -> float | None:
        """Seconds since a block time by the local clock; None if the time is unknown."""
        return None if time is None else round(self._gates.clock.now() - time, 3)

    def _tree_lag(self) -> int | None:
        """Blocks by which the trees are behind the newest block; None before a block is known."""
        head = self._gates.node_pool.head
        return None if head is None else max(0, head.height - self._gates.chain_sync.synced_height)

    def collect_status(self) -> ServiceState:
        """Return health, timings and pauses for operators, without data of single shares."""
        reasons, head, stats = self._gates.node_pool.unusable_reasons(), self._gates.node_pool.last_head, self._stats
        circuit = self._gates.circuit_choice.current
        return ServiceState(
            ready=self.is_ready,
            intake_paused=self._gates.intake_pause_reason(),
            checks=self.run_checks(),
            process=get_process_limits(),
            circuit=circuit,
            chain_id=self._gates.node_pool.chain_id,
            clock_skew=self._gates.node_pool.clock_skew,
            block_age=self._age_of(None if head is None else head.time),
            tree_lag=self._tree_lag(),
            unread_blocks=self._gates.block_follower.gap_count,
            endpoints=[
                NodeState(
                    name=endpoint.name,
                    reason=reasons.get(endpoint.name),
                    height=endpoint.height,
                    block_age=self._age_of(endpoint.health.head.time if endpoint.health.head is not None else None),
                )
                for endpoint in self._gates.node_pool.nodes
            ],
            provers=ProverState(
                workers=self._prover_pool.workers,
                pids=self._prover_pool.pids,
                deaths=dict(self._prover_pool.unexpected_exits),
                self_test_seconds=self._prover_pool.estimated_seconds(circuit),
                timeout_seconds=self._prover_pool.proof_timeout(circuit),
            ),
            counts=dict(stats.counts),
            proving_seconds=round(stats.proving.total_seconds(self._gates.clock.monotonic()), 3),
            lateness_start=stats.lateness_start.summary(),
            lateness_broadcast=stats.lateness_broadcast.summary(),
            proof=stats.proof.summary(),
            queue_age=stats.queue_age.summary(),
            confirmation=stats.confirmation.summary(),
            recent_failures=list(stats.failures),
        )
