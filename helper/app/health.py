"""How the service is: whether it takes shares, whether it reveals them, and what operators are told of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from helper.chain.block_follower import BlockFollower
from helper.chain.commitment_tree import CommitmentTreeSync
from helper.chain.models import RoundStatus
from helper.chain.node_pool import EVER, NodePool
from helper.chain.round_registry import RoundRegistry
from helper.chain.sync import ChainFollower
from helper.clock import Clock
from helper.core.roles import ROLES, Role
from helper.observability.health_checks import Check
from helper.observability.stats import Stats
from helper.reveal.circuit_selector import CircuitSelector
from helper.reveal.dispatcher import DispatchGate
from helper.reveal.prover.pool import ProverPool
from helper.runtime.hardening import process_facts
from helper.store.sqlite.file_location import DISPLACED, LOG_DISPLACED

UNWRITABLE = "the queue cannot be written"
CLOCKS_APART = "this machine's clock and the chain's are too far apart"
PAUSE_GRACE = 30.0
"""Seconds for which dispatch may be paused before the service is not ready: a node that is restarted, or one that rests
after an error, pauses it for less.
"""
UNREAD = "the blocks since the last stop are not read yet"


class Disk(Protocol):
    """The part of the store that tells whether it can be written."""

    @property
    def trouble(self) -> str | None:
        """Why nothing can be written, None while it can."""
        ...


class ClusterState(Protocol):
    """What the other hosts have to do with this one (`helper.cluster.membership`)."""

    @property
    def off(self) -> str | None:
        """Why this host's clock is not the one that all go by, or None."""
        ...

    @property
    def waits(self) -> str | None:
        """Why nothing of the queue is proven here for now, or None."""
        ...

    @property
    def elsewhere(self) -> str | None:
        """Why no share is taken here, or None."""
        ...


class ServiceHealth:
    """The service's own judgement of itself.

    Args:
        stale_after: seconds after which the newest block is too old to take shares by.
        tolerance: seconds by which a share's time may lie after the chain's newest block when it is dispatched.
        role: what this host does of it all: what it does not do, it need not be ready for.
        among: what other hosts have to do with it; None where there is one host.

    Attributes:
        revealing: whether the queue is worked: provers warm, chain known, circuit chosen. Set once by the service.
    """

    def __init__(
        self,
        *,
        store: Disk,
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
        among: ClusterState | None = None,
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
        """Whether shares are taken and revealed: the chain was synced once, the provers' keys are warm."""
        working = not self._role.works or (self.revealing and self._prover.ready)
        return working and self.intake_paused() is None

    @property
    def sends(self) -> bool:
        """Whether what is proven may be sent: the service has begun, and its clock is that of the other hosts."""
        return self.revealing and self._off() is None

    def intake_paused(self) -> str | None:
        """Why no share is taken now, or None: the disk takes it, rounds and trees are known, and not long ago.

        It goes by the newest block that any node in step has shown: a node that rests after an error, or is away for
        a moment, is no reason to turn wallets away. Nodes that answer and are all out of step are.
        """
        return (
            self._unwritable() or self._off() or self._elsewhere() or self._out_of_step() or self._all_rounds_paused()
        )

    def round_paused(self, round_id: bytes) -> str | None:
        """Why nothing of this round may be taken or revealed now though nodes are in step, or None: none of them shows
        the round, or its tree, as it should be.
        """
        return self._rounds.frozen(round_id) or self._trees.contradicted(round_id)

    def checks(self) -> list[Check]:
        """All that must be well for shares to be taken and revealed, for `/readyz`."""
        found = [
            Check("store", self._unwritable()),
            Check("chain", self._out_of_step()),
            Check("clock", self._off() or (CLOCKS_APART if self._endpoints.clock_suspect else None)),
            Check("blocks", self._blocks_missing(), self._unread_blocks()),
            Check("rounds", self._all_rounds_paused() or self._frozen_with_shares(), self._rounds_note()),
            Check("circuit", self._circuits.paused),
        ]
        if self._among is not None:
            found.append(Check("sender", self._among.waits))
        if self._role.works:
            found.append(Check("provers", None if self._prover.ready else "no prover is ready"))
            found.append(Check("queue", None if self.revealing else "starting: the queue is not worked yet"))
            found.append(Check("dispatch", self._long_pause()))
        return found

    def _off(self) -> str | None:
        """Why this host's clock is not the one that all hosts go by, or None."""
        return None if self._among is None else self._among.off

    def _elsewhere(self) -> str | None:
        """Why no share is taken, as another host has this queue's copy, or None."""
        return None if self._among is None else self._among.elsewhere

    def _unwritable(self) -> str | None:
        """Why nothing can be stored, or None. Anybody may read it: what the disk said is for the log alone."""
        reason = self._store.trouble
        return reason if reason in {None, DISPLACED, LOG_DISPLACED} else UNWRITABLE

    def _out_of_step(self) -> str | None:
        """Why what we know of the chain is not enough to take shares by, or None."""
        if not self._follower.ready:
            return "starting: the chain was not read yet"
        newest = self._endpoints.time_at(EVER)
        in_time = newest is not None and -self._tolerance <= self._clock.now() - newest <= self._stale_after
        return None if in_time and not self._endpoints.out_of_step else "no node is in step with the chain"

    def _blocks_missing(self) -> str | None:
        """Why it is not known what has counted, or None."""
        if self._listener.disputed is not None:
            return f"nodes show different reveals in block {self._listener.disputed}"
        if self._listener.stalled is not None:
            return f"no node has block {self._listener.stalled}"
        return None if self._listener.arrived else UNREAD

    def _unread_blocks(self) -> str | None:
        """How many older blocks are not read yet, or None where all are. Shares are revealed meanwhile."""
        left = self._listener.history.blocks_left
        return f"{left} older blocks are still to be read; shares are revealed meanwhile" if left else None

    def _all_rounds_paused(self) -> str | None:
        """Why no round that takes votes can be worked on, or None: where one can, the others hold it up in nothing."""
        open_rounds = [known for known in self._rounds.open() if known.status is RoundStatus.ACTIVE]
        reasons = [self.round_paused(known.round_id) for known in open_rounds]
        return reasons[0] if reasons and all(reasons) else None

    def _frozen_with_shares(self) -> str | None:
        """Which frozen rounds have waiting shares, or None. Intake of other rounds goes on."""
        frozen = [
            f"round {round_id.hex()[:8]} is frozen with {number} waiting shares"
            for round_id, number in self._rounds.frozen_shares().items()
        ]
        return "; ".join(frozen) or None

    def _rounds_note(self) -> str | None:
        """What nodes report about single rounds and is not accepted, None without such a report."""
        reports = [f"round {round_id.hex()[:8]}: {text}" for round_id, text in self._rounds.unconfirmed().items()]
        return "; ".join(reports) or None

    def gate(self) -> DispatchGate:
        """What may be dispatched now."""
        gate = self._gate()
        if gate.paused is None:
            self._paused_since = None
        elif self._paused_since is None:
            self._paused_since = self._clock.monotonic()
        return gate

    def _long_pause(self) -> str | None:
        """Why dispatch has been paused for longer than `PAUSE_GRACE`, or None."""
        reason = self.gate().paused
        since = self._clock.monotonic() if self._paused_since is None else self._paused_since
        return reason if self._clock.monotonic() - since >= PAUSE_GRACE else None

    def _gate(self) -> DispatchGate:
        if (unwritable := self._unwritable()) is not None:
            return DispatchGate(frozenset(), 0.0, unwritable)  # the proof could not be stored, and would be made again
        if self._endpoints.clock_suspect or self._off() is not None:
            return DispatchGate(frozenset(), 0.0, self._off() or CLOCKS_APART)
        if self._among is not None and (waits := self._among.waits) is not None:
            return DispatchGate(frozenset(), 0.0, waits)
        head = self._endpoints.head
        if head is None:
            return DispatchGate(frozenset(), 0.0, "no node is in step with the chain")
        if not self._listener.arrived:
            # Shares that were counted since the last stop or the restored backup need no proof. The wait is bounded.
            return DispatchGate(frozenset(), 0.0, UNREAD)
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
        """Seconds since a block's time by our clock, None where it is not known."""
        return None if time is None else round(self._clock.now() - time, 3)

    def _tree_lag(self) -> int | None:
        """Blocks by which our trees are behind the newest block, None before either is known."""
        head = self._endpoints.head
        return None if head is None else max(0, head.height - self._trees.synced_height)

    def facts(self) -> dict[str, Any]:
        """For operators: health, timings, pauses; nothing of one share."""
        reasons = self._endpoints.reasons()
        return {
            "ready": self.ready,
            "intake_paused": self.intake_paused(),
            "checks": [asdict(check) for check in self.checks()],
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
