"""Proves claimed shares and stores the prepared messages: tree path, proof, transaction bytes."""

from __future__ import annotations

from functools import partial

import structlog

from helper.chain.commitment_trees import Anchor, CommitmentTreeSync
from helper.chain.node_pool import NodePool
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.round_registry import RoundRegistry
from helper.circuits.registry import get_generation
from helper.clock import Clock
from helper.errors import ProofFailed, ProofNotNeeded, ProverCrashed, ProverTimeout
from helper.observability.stats import Stats
from helper.reveal.attempt_budget import AttemptBudget
from helper.reveal.circuit_choice import CircuitChoice
from helper.reveal.proof_times import ProofTimes
from helper.reveal.prover.pool import Proof, ProverPool
from helper.store.models import PreparedReveal, QueuedShare
from helper.store.store import Store

log = structlog.get_logger("helper.reveal")

TREE_RETRY_SECONDS = 2.0
"""Seconds until a share is retried if no verified root covers its leaf yet."""


class Revealer:
    """Proves claimed shares and stores their messages."""

    def __init__(
        self,
        *,
        store: Store,
        trees: CommitmentTreeSync,
        node_pool: NodePool,
        rounds: RoundRegistry,
        prover: ProverPool,
        proof_times: ProofTimes,
        circuits: CircuitChoice,
        attempts: AttemptBudget,
        clock: Clock,
        stats: Stats,
    ) -> None:
        self._store = store
        self._trees = trees
        self._node_pool = node_pool
        self._rounds = rounds
        self._prover = prover
        self._proof_times = proof_times
        self._circuits = circuits
        self._attempts = attempts
        self._clock = clock
        self._stats = stats

    async def prove(self, queued: QueuedShare, *, has_priority: bool = True) -> bool:
        """Prove the share and store its message (fsync).

        Args:
            queued: the claimed share.
            has_priority: whether its proof precedes queued proofs that do not have priority.

        Returns:
            True if a message is ready to be sent; False if the share was requeued, failed, or was confirmed in
            the meantime by another helper's reveal.
        """
        share = queued.share
        circuit = self._circuits.circuit_for(share.kind)
        get_leaf = partial(get_generation(circuit).get_vote_commitment, share)
        anchor = self._trees.find_anchor(share.round_id, share.tree_position, get_leaf)
        if anchor is None:
            await self._wait_for_tree(queued)
            return False
        path = await self._trees.path(share.round_id, share.tree_position, anchor)
        proof = await self._make_proof(queued, circuit, path, has_priority=has_priority)
        if proof is None:
            return False
        if (proof.nullifier, proof.root) != (queued.nullifier, anchor.root):
            await self._spend_attempt(queued, "proof has unexpected public inputs")
            return False
        is_prepared = await self._store.prepare(queued.id, self._create_prepared(queued, circuit, anchor, proof))
        if not is_prepared:
            self._stats.count("proof_unused")
        return is_prepared

    async def _make_proof(self, queued: QueuedShare, circuit: str, path: bytes, *, has_priority: bool) -> Proof | None:
        is_proving = False

        def on_start() -> None:
            nonlocal is_proving
            is_proving = True
            self._note_start(queued)

        try:
            proof = await self._prover.prove(
                circuit,
                queued.share,
                path,
                on_start=on_start,
                is_needed=partial(self._is_proof_needed, queued),
                has_priority=has_priority,
            )
        except ProofNotNeeded:
            return None
        except ProverCrashed as error:
            await self._attempts.record_crash(queued, str(error))
            return None
        except (ProverTimeout, ProofFailed) as error:
            await self._spend_attempt(queued, str(error))
            return None
        finally:
            if is_proving:
                self._stats.proving.end(self._clock.monotonic())
        self._stats.count("proven")
        self._stats.proof_seconds.add_sample(proof.seconds)
        self._proof_times.record(proof.seconds)
        return proof

    async def _is_proof_needed(self, queued: QueuedShare) -> bool:
        """Return whether a proof that begins now can count. If it would be too late, the share is released."""
        if await self._store.is_spent(queued.round_id, queued.nullifier):
            self._stats.count("proof_skipped")
            return False
        known, head = self._rounds.get(queued.round_id), self._node_pool.head
        if known is None or head is None:
            return True
        if self._proof_times.can_finish_proof(self._rounds.latest_end(known), head.time):
            return True
        note = "the round ends before a proof would be done"
        await self._store.requeue(queued.id, stage="proof", note=note)
        return False

    def _note_start(self, queued: QueuedShare) -> None:
        self._stats.proving.begin(self._clock.monotonic())
        if not queued.attempts and not queued.crashes and queued.proved_height is None:
            self._stats.lateness_start.add_sample(self._clock.now() - queued.due_ms / 1000)

    async def _wait_for_tree(self, queued: QueuedShare) -> None:
        """Requeue without spending an attempt.

        The delay prevents a busy loop until the next block.
        """
        self._stats.count("retry_tree")
        retry_ms = int((self._node_pool.wall_time() + TREE_RETRY_SECONDS) * 1000)
        note = "no verified root covers this leaf yet"
        await self._store.requeue(queued.id, due_ms=max(retry_ms, queued.due_ms), stage="tree", note=note)

    async def _spend_attempt(self, queued: QueuedShare, reason: str) -> None:
        await self._attempts.spend_attempt(queued.id, queued, "proof", reason)

    def _create_prepared(self, queued: QueuedShare, circuit: str, anchor: Anchor, proof: Proof) -> PreparedReveal:
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
        head = self._node_pool.head
        return PreparedReveal(
            message=message.to_tx(),
            tx_hash=message.tx_hash(),
            anchor_height=anchor.height,
            circuit=circuit,
            height=anchor.height if head is None else head.height,
        )
