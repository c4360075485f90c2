"""Checks the service's promises during and after a run, from chain and database only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from helper.chain.agreement import AGREEING_NODES
from helper.chain.reveal_transaction import RevealMessage, shows_spent
from helper.core.share import TRANSITIONS, Share, ShareState
from tests.simulation.chain import EPOCH, SimChain
from tests.simulation.event_log import EventLog
from tests.simulation.host import ServiceHost
from tests.simulation.liar import Lie
from tests.simulation.node import FALSE_HEIGHT_FAULTS, NodeFault, SimNode
from tests.simulation.prover import ProverFault
from tests.simulation.scenario import RoundPlan, Scenario

CLOCK_TOLERANCE_SECONDS = 120.0
FREE_CRASHES = 2
REPROVE_BLOCKS = 10
HEIGHT_LAG_BLOCKS = 5
"""Number of blocks by which the height known to the service may lag when it sends: a slow node reports an old one."""
END_MARGIN_SECONDS = 60.0
"""Seconds before the round's end, in addition to the drain, by which a share must be due to be counted."""


@dataclass(eq=False)
class TrackedShare:
    """A share that a wallet posts.

    Attributes:
        posted_at: loop second of the first post, None before it.
        acknowledged_at: loop second of the first acknowledgment, None before it.
        is_reposted: whether the wallet has posted it again without a due time, which then applies.
    """

    share: Share
    nullifier: bytes
    plan: RoundPlan
    posted_at: float | None = None
    acknowledged_at: float | None = None
    is_refused: bool = False
    is_queued: bool = False
    is_reposted: bool = False

    @property
    def due_at(self) -> float:
        """Loop second at which the share is due; while it is not acknowledged, as if it were when it was posted."""
        known_at = self.posted_at if self.acknowledged_at is None else self.acknowledged_at
        assert known_at is not None
        return max(self.share.submit_at - EPOCH, known_at)


class PromiseChecker:
    """Checks every promise and records violations.

    Attributes:
        clock_wrong_until: loop second until which work started under a wrong clock may still run.
    """

    def __init__(self, plan: Scenario, event_log: EventLog, chain: SimChain, host: ServiceHost) -> None:
        self._plan = plan
        self._event_log = event_log
        self._chain = chain
        self._host = host
        self.shares: dict[bytes, TrackedShare] = {}
        self.clock_wrong_until = -1.0
        self.broadcasts: dict[tuple[bytes, int], tuple[bytes, float]] = {}
        self.prover_faults: Counter[bytes] = Counter()
        self.worker_deaths: Counter[bytes] = Counter()
        self.spent_attempts: Counter[bytes] = Counter()
        self._nullifier_by_row: dict[int, bytes] = {}
        self._last_message: dict[bytes, tuple[bytes, int, float]] = {}  # with the proof's height and the send time
        self._proven_height: dict[bytes, int] = {}  # the chain's height when its message was stored
        self._refused_hashes: set[bytes] = set()
        self.counts: Counter[str] = Counter()
        host.disk.on_transitions = self.on_transitions
        host.on_attempt_spent = self.on_attempt_spent

    # During the run

    def on_broadcast(self, message: RevealMessage, node: SimNode) -> None:
        now = self._chain.now()
        nullifier = message.nullifier
        self._event_log.record("broadcast", nullifier, "to", node.name, "anchor", message.anchor_height)
        self.counts["broadcasts"] += 1
        tracked = self.shares.get(nullifier)
        if tracked is None:
            self._event_log.record_violation("a reveal of an unknown share", nullifier)
            return
        tolerance = CLOCK_TOLERANCE_SECONDS if now - EPOCH <= self.clock_wrong_until else 0.0
        if not tracked.is_reposted and now < tracked.share.submit_at - tolerance:
            self._event_log.record_violation("revealed early", nullifier, "by", tracked.share.submit_at - now)
        # What a node with heights of its own gets says nothing, and no true height keeps a send from it.
        if not node.liar.lies and node.fault is not NodeFault.RESET:
            self._check_one_broadcast_per_height(nullifier, self._chain.height, message)
        self._check_reproof_interval(nullifier, message.tx_hash())

    def _check_reproof_interval(self, nullifier: bytes, tx_hash: bytes) -> None:
        """Check that a new proof follows a refusal, an operator retry or ten unconfirmed blocks."""
        height = self._proven_height.get(nullifier, 0)
        previous = self._last_message.get(nullifier)
        if previous is not None and previous[0] == tx_hash:
            return
        now = self._chain.now() - EPOCH
        self._last_message[nullifier] = (tx_hash, height, now)
        if (
            previous is None
            or previous[0] in self._refused_hashes
            or height >= previous[1] + REPROVE_BLOCKS - HEIGHT_LAG_BLOCKS
        ):
            return
        if not any(map(self._depends_on_false_heights, (previous[2], now))):
            self._event_log.record_violation("proven again too early", nullifier, "heights", previous[1], height)

    def on_refusal(self, message: RevealMessage) -> None:
        self._refused_hashes.add(message.tx_hash())

    def on_operator_retry(self, nullifier: bytes) -> None:
        """Record an operator retry: a new proof may follow."""
        self._last_message.pop(nullifier, None)

    def _check_one_broadcast_per_height(self, nullifier: bytes, height: int, message: RevealMessage) -> None:
        previous, sent_at = self.broadcasts.get((nullifier, height), (None, 0.0))
        if previous is not None and not self._depends_on_false_heights(sent_at):
            description = "the same bytes" if previous == message.tx_hash() else "other bytes"
            self._event_log.record_violation("broadcast twice at one height", nullifier, "height", height, description)
        self.broadcasts[nullifier, height] = message.tx_hash(), self._chain.now() - EPOCH

    def _depends_on_false_heights(self, at: float) -> bool:
        """Return whether, at a loop second, agreement needed a node that did not report the chain's heights.

        The agreed height then stands still or rises at its own rate, and jumps at the end of the fault: ten blocks of
        the service are not ten blocks of the chain.
        """
        faults = [episode for episode in self._plan.episodes if episode.start <= at <= episode.end]
        lies = [episode for episode in self._plan.lie_episodes if episode.start <= at <= episode.end]
        faulty = {episode.node for episode in faults if episode.node is not None} | {episode.node for episode in lies}
        has_false_heights = any(episode.fault in FALSE_HEIGHT_FAULTS for episode in faults)
        has_false_heights |= any({Lie.LOW, Lie.ONE_HEIGHT}.intersection(episode.lies) for episode in lies)
        return has_false_heights and len(self._plan.nodes_with_rpc) - len(faulty) < AGREEING_NODES

    def on_prover_fault(self, nullifier: bytes, fault: ProverFault) -> None:
        """Record a prover fault, which may spend an attempt."""
        self._event_log.record("prover", fault.value, nullifier)
        if fault is ProverFault.WORKER_DIES:
            self.worker_deaths[nullifier] += 1
        else:
            self.prover_faults[nullifier] += 1

    def on_false_refusal(self, message: RevealMessage) -> None:
        """Record a false permanent refusal, which may spend one or all attempts."""
        self.prover_faults[message.nullifier] += 1

    def on_attempt_spent(self, share_id: int, stage: str, note: str) -> None:
        """Check that a spent attempt has a cause."""
        nullifier = self._nullifier_by_row.get(share_id, b"")
        self._event_log.record("attempt spent", nullifier, stage, note)
        self.counts["attempts"] += 1
        self.spent_attempts[nullifier] += 1
        allowed = self.prover_faults[nullifier] + max(0, self.worker_deaths[nullifier] - FREE_CRASHES)
        if self.spent_attempts[nullifier] > allowed:
            self._event_log.record_violation("an attempt spent without a fault of the share", nullifier, stage, note)

    def on_transitions(self, transitions: list[tuple[int, int, int | None, bytes]]) -> None:
        added = {nullifier for _, before, after, nullifier in transitions if before < 0 and after is not None}
        for share_id, before, after, nullifier in transitions:
            self._nullifier_by_row[share_id] = nullifier
            if after is None:
                self._event_log.record("row deleted", nullifier, "from", ShareState(before).name)
                if before != ShareState.WAITING or nullifier not in added:  # otherwise moved up by a repeat
                    self._check_row_deletion(nullifier)
                continue
            self._event_log.record("transition", nullifier, "to", ShareState(after).name)
            if after == ShareState.SENT:
                self._proven_height[nullifier] = self._chain.height
            if before >= 0 and ShareState(after) not in TRANSITIONS[ShareState(before)]:
                self._event_log.record_violation("an illegal transition", nullifier, before, after)

    def _check_row_deletion(self, nullifier: bytes) -> None:
        """Check that a deleted row was confirmed, or its round closed and purged."""
        tracked = self.shares[nullifier]
        if (tracked.share.round_id, nullifier) in self._chain.confirmed:
            return
        round_ = self._chain.rounds[tracked.share.round_id]
        if not round_.tallying_height:
            self._event_log.record_violation("submitted though never counted", nullifier)
        elif (
            self._chain.now()
            < self._chain.head(round_.tallying_height).time + self._plan.purge_after_seconds - CLOCK_TOLERANCE_SECONDS
        ):
            self._event_log.record_violation("purged too early", nullifier)

    # At the end of a service run and of the run

    def check_disk(self) -> None:
        """Check that every acknowledged share is stored, confirmed, or purged after its round closed."""
        stored = {row[0] for row in self._host.disk.query_rows("SELECT field(witness, 'nullifier') FROM shares")}
        for spent, known in self.shares.items():
            if known.is_queued and spent not in stored and not self._is_confirmed(known):
                sim_round = self._chain.rounds[known.share.round_id]
                if not sim_round.tallying_height:
                    self._event_log.record_violation("an acknowledged share is lost", spent)

    def _is_confirmed(self, tracked: TrackedShare) -> bool:
        return (tracked.share.round_id, tracked.nullifier) in self._chain.confirmed

    def check_final_state(self) -> None:
        """Check everything that must be true after all faults have ended."""
        self.check_disk()
        disk = self._host.disk
        hidden_heights, open_rounds = self._hidden_heights(), self._rounds_kept_open()
        states: dict[bytes, int] = dict(disk.query_rows("SELECT field(witness, 'nullifier'), state FROM shares"))
        for spent, known in self.shares.items():
            sim_round = self._chain.rounds[known.share.round_id]
            if known.acknowledged_at is None:
                is_valid = known.posted_at is not None and not known.is_refused
                if is_valid and self._could_be_confirmed(known):
                    self._event_log.record_violation("a valid share was never accepted", spent, "due", known.due_at)
                continue
            self.counts["acknowledged"] += 1
            counted = self._is_confirmed(known)
            self.counts["counted"] += counted
            if not counted and self._could_be_confirmed(known):
                self._event_log.record_violation(
                    "an acknowledged share was not counted", spent, "due", known.due_at, "state", states.get(spent)
                )
            height = self._chain.confirmed.get((known.share.round_id, spent))
            is_readable = height not in hidden_heights and not self._may_have_missed_blocks()
            if counted and spent in states and is_readable:
                self._event_log.record_violation("a witness remains after confirmation", spent)
            is_closed = sim_round.tallying_height and known.share.round_id not in open_rounds
            if not counted and is_closed and states.get(spent, 3) != ShareState.FAILED:
                self._event_log.record_violation(
                    "a closed round's share is neither counted nor failed", spent, states.get(spent)
                )
        self._check_closed_rounds()

    def _could_be_confirmed(self, tracked: TrackedShare) -> bool:
        """Return whether the share had enough time to be counted."""
        end = min(float(tracked.plan.end), self._plan.duration)
        if not tracked.plan.requires_all_shares and tracked.plan.end < self._plan.duration:
            return False
        return tracked.due_at <= end - END_MARGIN_SECONDS - self._plan.drain_seconds

    def _may_have_missed_blocks(self) -> bool:
        """Return whether blocks may be missing because every node had pruned them."""
        return not all(self._plan.nodes_with_rpc) and any(
            episode.fault.name == "PRUNED" for episode in self._plan.episodes
        )

    def _hidden_heights(self) -> set[int]:
        """Return the heights of blocks on which two nodes may never agree, since one without an RPC lost a result.

        Its index has only the last result. If the bytes of a counted reveal are in a later block too, and fail there
        for another reason than the spent nullifier, usually because the round had ended, nothing tells that they
        counted before.
        """
        results = [] if all(self._plan.nodes_with_rpc) else self._chain.included.values()
        hidden = [each for each in results if not shows_spent(each[-1])]
        return {result.height for each in hidden for result in each if result.code == 0}

    def _rounds_kept_open(self) -> set[bytes]:
        """Return the ids of the rounds that contain such a block."""
        heights, rounds = self._hidden_heights(), self._chain.rounds.values()
        return {
            each.round_id for each in rounds if any(each.created_height < h <= each.tallying_height for h in heights)
        }

    def _check_closed_rounds(self) -> None:
        sql = "SELECT k.round_id, r.alerted_ms FROM rounds r JOIN round_keys k ON k.no = r.round_no"
        alerted: dict[bytes, int | None] = dict(self._host.disk.query_rows(sql))
        open_rounds = self._rounds_kept_open()
        for round_ in self._chain.rounds.values():
            if round_.round_id not in alerted:
                continue
            is_closed = round_.tallying_height and round_.round_id not in open_rounds
            if is_closed and alerted[round_.round_id] is None:
                self._event_log.record_violation("a closed round was not reported", round_.round_id)
            if not round_.tallying_height and alerted[round_.round_id] is not None:
                self._event_log.record_violation("an open round was closed", round_.round_id)
