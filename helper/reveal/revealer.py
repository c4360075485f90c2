"""Proves claimed shares and stores the prepared messages; measures proofs, and counts what spends an attempt."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Final

import structlog

from helper.chain.chain_data import Anchor
from helper.chain.commitment_trees import CommitmentTreeSync
from helper.chain.node_pool import NodePool
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.round_registry import RoundRegistry
from helper.circuits import get_generation
from helper.clock import Clock
from helper.core.dispatch_order import ProofPace, last_attempt_time, rank_fraction, retry_time
from helper.errors import ProofFailed, ProofNotNeeded, ProverCrashed, ProverTimeout
from helper.observability.stats import Stats
from helper.reveal.circuit_choice import CircuitChoice
from helper.reveal.prover_pool import ProverPool
from helper.store import messages, shares
from helper.store.messages import SentReveal
from helper.store.store import Store
from helper.store.table_rows import RevealRow, ShareRow
from proofs import Proved

log = structlog.get_logger("helper.reveal")

RECENT_PROOFS: Final = 256
"""Number of proofs in memory."""
FASTEST_FRACTION: Final = 0.8
"""Fraction of the fastest recent proof that is assumed for the next one, so that no feasible proof is omitted."""
UNMEASURED_FRACTION: Final = 0.5
"""Fraction of the self-test that is assumed before the first proof. Workers start at the same time, so it is slow."""
UNKNOWN_SECONDS: Final = 1.0
"""Assumed duration of a proof before the first self-test."""
CONFIRMED_WINDOW_SECONDS: Final = 120.0
"""Seconds over which the rate of confirmed shares is measured."""
MIN_WINDOW_SECONDS: Final = 20.0
"""Seconds from which that rate is used."""
MAX_FREE_CRASHES = 2
"""Number of prover crashes on one share that do not spend an attempt."""
TREE_RETRY_SECONDS = 2.0
"""Minimum seconds until a share is retried if no tree that may be used has its leaf."""
MAX_TREE_RETRY_SECONDS = 600.0
"""Maximum of these seconds: a tenth of the time that the share has waited here, at most a tenth of that left."""
MAX_LAST_ROOTS = 4096
"""Number of shares whose last root is in memory. It only matters to shares that are proven again."""


class ProofTimes:
    """Measures proofs and confirmations.

    Args:
        provers: number of concurrent proofs of this host.
        get_estimate: the self-test's duration in seconds, None before it.
    """

    def __init__(self, provers: int, get_estimate: Callable[[], float | None]) -> None:
        self._provers = provers
        self._get_estimate = get_estimate
        self._recent: deque[float] = deque(maxlen=RECENT_PROOFS)
        self._confirmed: deque[tuple[float, int]] = deque()  # monotonic time, total
        self.hosts = 1  # that work on the queue; they are assumed to be equally fast

    def record(self, seconds: float) -> None:
        """Record the duration of a proof."""
        self._recent.append(seconds)

    def record_confirmed(self, total: int, now: float) -> None:
        """Record the number of shares confirmed so far, also by reveals of other helpers. `now` is monotonic."""
        self._confirmed.append((now, total))
        while now - self._confirmed[0][0] > CONFIRMED_WINDOW_SECONDS:
            self._confirmed.popleft()

    def pace(self) -> ProofPace:
        """Return the measured pace.

        The queue shrinks at the rate of the own proofs, or of the confirmed shares if other helpers reveal more.
        """
        proof_seconds = fmean(self._recent) if self._recent else self._get_estimate() or UNKNOWN_SECONDS
        own_rate = self.hosts * self._provers / max(proof_seconds, 0.001)
        return ProofPace(proof_seconds, max(own_rate, self._confirmed_rate()))

    def can_finish_proof(self, end: float, chain_time: float) -> bool:
        """Return whether a proof that begins now can be done before its round's end. Times are in Unix seconds.

        The fastest recent proof is assumed, and the time of the newest block, which is never later than the block that
        could contain the reveal. Only a proof that is certainly too late is not begun.
        """
        if self._recent:
            return chain_time + FASTEST_FRACTION * min(self._recent) < end
        return chain_time + UNMEASURED_FRACTION * (self._get_estimate() or 0.0) < end

    def _confirmed_rate(self) -> float:
        """Confirmed shares per second in the recent window, 0 if it is too short."""
        if not self._confirmed:
            return 0.0
        (first, before), (last, after) = self._confirmed[0], self._confirmed[-1]
        return (after - before) / (last - first) if last - first >= MIN_WINDOW_SECONDS else 0.0


@dataclass(eq=False, repr=False, kw_only=True)
class RetrySchedule:
    """Counts failed attempts and schedules retries, any number until the chain has closed the share's round.

    The time of a retry is stored before the wait begins, so that a restart does not shorten it. The first
    `quick_retries` follow within seconds, the later ones at longer intervals.
    """

    store: Store
    node_pool: NodePool
    rounds: RoundRegistry
    stats: Stats
    quick_retries: int

    async def spend_attempt(self, share_id: int, share: ShareRow | SentReveal, stage: str, reason: str) -> None:
        """Spend one attempt of a share and schedule its retry.

        The first failure after the quick retries is logged as an error: something does not pass by itself.

        Args:
            share: the share as it was read before this attempt.
        """
        self.stats.record_failure(stage, reason)
        due_ms = self._retry_ms(share)
        attempt = await self.store.run(shares.retry, share_id, due_ms=due_ms, stage=stage, note=reason)
        if attempt:
            self.stats.count(f"retry_{stage}")
            if attempt == self.quick_retries + 1:
                self.stats.count("quick_retries_failed")
                advice = f"Correct the cause. The next attempts: `svote-helper queue list --stage {stage}`."
                log.error("quick_retries_failed", stage=stage, reason=reason, attempt=attempt, advice=advice)
            else:
                log.warning("reveal_retried", stage=stage, reason=reason, attempt=attempt)

    def seconds_left(self, round_id: bytes) -> float:
        """Seconds until the round's end; infinity if the round is not known."""
        end = self.rounds.view(round_id).latest_end
        return end - self.node_pool.wall_time() if end else math.inf

    async def record_crash(self, queued: ShareRow, reason: str) -> None:
        """Record that a prover worker crashed on a share, and release it. The third crash spends an attempt."""
        # Delayed here, so that no other host claims it before the attempt is spent below.
        due_ms = queued.due_ms if queued.crashes < MAX_FREE_CRASHES else self._retry_ms(queued)
        crashes = await self.store.run(shares.record_crash, queued.id, due_ms=due_ms, note=reason)
        if crashes:
            self.stats.count("retry_prover")
            log.warning("prover_worker_crashed", crashes=crashes)
        if crashes > MAX_FREE_CRASHES:
            await self.spend_attempt(queued.id, queued, "proof", reason)

    def _retry_ms(self, share: ShareRow | SentReveal) -> int:
        """Time of the retry after one more failure, in Unix milliseconds.

        Never before the share's due time, even if the clock was set back since.
        """
        known, last_attempt = self.rounds.get(share.round_id), math.inf
        end = math.inf if known is None else float(known.vote_end_time)
        if known is not None:
            last_attempt = last_attempt_time(share.first_due_ms / 1000, end, rank_fraction(share.rank))
        time = retry_time(
            share.attempts + 1,
            self.node_pool.wall_time(),
            quick_retries=self.quick_retries,
            last_attempt=last_attempt,
            end=end,
        )
        return max(int(time * 1000), share.due_ms)

    async def fail_share(self, share_id: int, stage: str, reason: str) -> None:
        """Fail a share permanently and log it. Its witness remains stored until its round is purged."""
        self.stats.record_failure(stage, reason)
        if await self.store.run(shares.fail, share_id, stage=stage, note=reason):
            self.stats.count("failed")
            advice = f"Correct the cause, then retry: `svote-helper queue retry --stage {stage}`."
            log.error("share_failed", stage=stage, reason=reason, advice=advice)


@dataclass(eq=False, repr=False, kw_only=True)
class Revealer:
    """Proves claimed shares and stores their messages."""

    store: Store
    trees: CommitmentTreeSync
    node_pool: NodePool
    rounds: RoundRegistry
    prover: ProverPool
    proof_times: ProofTimes
    circuits: CircuitChoice
    retries: RetrySchedule
    clock: Clock
    stats: Stats
    _last_roots: dict[int, Anchor] = field(default_factory=dict, init=False)  # of the newest proofs, by share
    _created_at: float = field(init=False)  # monotonic time

    def __post_init__(self) -> None:
        self._created_at = self.clock.monotonic()

    async def prove(self, queued: ShareRow, *, has_priority: bool = True) -> bool:
        """Prove a claimed share and store its message (fsync). A proof with priority precedes queued ones without.

        Returns:
            True if a message is ready to be sent; False if the share was requeued, failed, or was confirmed in
            the meantime by another helper's reveal.
        """
        share = queued.share
        circuit = self.circuits.circuit_for(share.kind, queued.id)
        get_leaf = partial(get_generation(circuit).get_vote_commitment, share)
        previous = self._last_roots.pop(queued.id, None)
        anchor = self.trees.find_anchor(share.round_id, share.tree_position, get_leaf, previous=previous)
        if anchor is None:
            await self._wait_for_tree(queued)
            return False
        self._last_roots[queued.id] = anchor
        if len(self._last_roots) > MAX_LAST_ROOTS:
            del self._last_roots[next(iter(self._last_roots))]
        path = await self.trees.path(share.round_id, share.tree_position, anchor)
        proof = await self._make_proof(queued, circuit, path, has_priority=has_priority)
        if proof is None:
            return False
        if (proof.nullifier, proof.root) != (queued.nullifier, anchor.root):
            await self._spend_attempt(queued, "proof has unexpected public inputs")
            return False
        is_prepared = await self.store.run(
            messages.prepare, queued.id, self._create_prepared(queued, circuit, anchor, proof)
        )
        if not is_prepared:
            self.stats.count("proof_unused")
        return is_prepared

    async def _make_proof(self, queued: ShareRow, circuit: str, path: bytes, *, has_priority: bool) -> Proved | None:
        is_proving, started_at = False, 0.0

        async def begin() -> bool:
            nonlocal is_proving, started_at
            is_proving = await self._is_proof_needed(queued)
            if is_proving:
                self._note_start(queued)
                started_at = self.clock.monotonic()
            return is_proving

        try:
            proof = await self.prover.prove(circuit, queued.share, path, begin=begin, has_priority=has_priority)
        except ProofNotNeeded:
            return None
        except ProverCrashed as error:
            await self.retries.record_crash(queued, str(error))
            return None
        except (ProverTimeout, ProofFailed) as error:
            await self._spend_attempt(queued, str(error))
            return None
        finally:
            ended_at = self.clock.monotonic()
            if is_proving:
                self.stats.proving.end(ended_at)
        self.stats.count("proven")
        self.stats.proof.add_sample(ended_at - started_at)
        self.proof_times.record(ended_at - started_at)
        return proof

    async def _is_proof_needed(self, queued: ShareRow) -> bool:
        """Return whether a proof that begins now can count. If it would be too late, the share is released."""
        if await self.store.is_spent(queued.round_id, queued.nullifier):
            self.stats.count("proof_skipped")
            return False
        end, head = self.rounds.view(queued.round_id).latest_end, self.node_pool.head
        if not end or head is None or self.proof_times.can_finish_proof(end, head.time):
            return True
        note = "the round ends before a proof would be done"
        await self.store.run(shares.requeue, queued.id, stage="proof", note=note)
        return False

    def _note_start(self, queued: ShareRow) -> None:
        self.stats.proving.begin(self.clock.monotonic())
        if not queued.attempts and not queued.crashes and queued.proved_height is None:
            self.stats.lateness_start.add_sample(self.clock.now() - queued.due_ms / 1000)

    async def _wait_for_tree(self, queued: ShareRow) -> None:
        """Requeue without spending an attempt; the delay prevents a busy loop until the next block.

        It grows, because the leaf may be one that a false node had invented, and there may be many such shares.
        """
        self.stats.count("retry_tree")
        now = self.node_pool.wall_time()
        known = self.rounds.get(queued.round_id)  # its agreed end: that of a single node may be false
        left = math.inf if known is None or known.vote_end_time <= now else known.vote_end_time - now
        waited = min(now - queued.first_due_ms / 1000, self.clock.monotonic() - self._created_at)
        delay = max(TREE_RETRY_SECONDS, min(waited / 10, left / 10, MAX_TREE_RETRY_SECONDS))
        retry_ms = int((now + delay) * 1000)
        note = "no tree that may be used has this leaf at this position"
        await self.store.run(shares.requeue, queued.id, due_ms=max(retry_ms, queued.due_ms), stage="tree", note=note)

    async def _spend_attempt(self, queued: ShareRow, reason: str) -> None:
        await self.retries.spend_attempt(queued.id, queued, "proof", reason)

    def _create_prepared(self, queued: ShareRow, circuit: str, anchor: Anchor, proof: Proved) -> RevealRow:
        fields = get_generation(circuit).get_reveal_fields(queued.share)
        message = RevealMessage(
            nullifier=queued.nullifier,
            enc_share=fields.enc_share,
            proposal_id=queued.share.proposal_id,
            vote_decision=fields.vote_decision,
            proof=proof.proof,
            round_id=queued.share.round_id,
            anchor_height=anchor.height,
        )
        head = self.node_pool.head
        return RevealRow(
            share_id=queued.id,
            message=message.to_tx(),
            tx_hash=message.tx_hash(),
            anchor_height=anchor.height,
            circuit=circuit,
            height=anchor.height if head is None else head.height,
            anchor_root=anchor.root,
        )
