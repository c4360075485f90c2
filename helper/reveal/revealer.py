"""One share's way from the queue to a message on disk: tree path, proof, transaction bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import structlog

from helper.chain.commitment_tree import Anchor
from helper.chain.node_pool import NodePool
from helper.chain.reveal_transaction import RevealMessage
from helper.clock import Clock
from helper.errors import ProofFailed, ProverDied, ProverTimeout
from helper.observability.stats import Stats
from helper.reveal.attempt_budget import AttemptBudget
from helper.reveal.circuit_selector import CircuitSelector
from helper.reveal.prover.job import Proof, ProofJob
from helper.store.rows import PreparedReveal, QueuedShare
from helper.store.store import Store

log = structlog.get_logger("helper.reveal")

FREE_CRASHES = 2
"""How often a worker may die under a share before it costs the share an attempt."""
TREE_WAIT = 2.0
"""Seconds until a share whose leaf is under no verified root yet is looked at again."""


class Trees(Protocol):
    """The verified trees, as `helper.chain.commitment_tree.CommitmentTreeSync` has them."""

    def anchor(self, round_id: bytes) -> Anchor | None:
        """The newest verified root of a round."""
        ...

    async def path(self, round_id: bytes, position: int, anchor: Anchor) -> bytes:
        """The 24 siblings of a leaf under an anchor's root."""
        ...


class Prover(Protocol):
    """What makes proofs, as `helper.reveal.prover.ProverPool` does."""

    async def prove(self, job: ProofJob, *, started: Callable[[], None] = ...) -> Proof:
        """Make one proof; `started` is called when a worker takes it up."""
        ...


class Revealer:
    """Proves claimed shares and puts their messages on disk."""

    def __init__(
        self,
        *,
        store: Store,
        trees: Trees,
        endpoints: NodePool,
        prover: Prover,
        circuits: CircuitSelector,
        attempts: AttemptBudget,
        clock: Clock,
        stats: Stats,
    ) -> None:
        self._store = store
        self._trees = trees
        self._endpoints = endpoints
        self._prover = prover
        self._circuits = circuits
        self._attempts = attempts
        self._clock = clock
        self._stats = stats

    async def prove(self, queued: QueuedShare) -> bool:
        """Make the share's proof and put its message on disk, fsync'd.

        Returns:
            True when there is a message to send now; False when the share went another way (back to the queue,
            failed, or counted meanwhile by somebody else's reveal).
        """
        share = queued.share
        anchor = self._trees.anchor(share.round_id)
        if anchor is None or share.tree_position >= anchor.size:
            await self._wait_for_tree(queued)
            return False
        circuit = self._circuits.current
        path = await self._trees.path(share.round_id, share.tree_position, anchor)
        proof = await self._make_proof(queued, _job(queued, circuit, path))
        if proof is None:
            return False
        if (proof.nullifier, proof.root) != (queued.nullifier, anchor.root):
            await self._spend(queued, "the proof is of another statement")
            return False
        return await self._store.prepare(queued.id, self._prepared(queued, circuit, anchor, proof))

    async def _make_proof(self, queued: QueuedShare, job: ProofJob) -> Proof | None:
        under_way = False

        def started() -> None:
            nonlocal under_way
            under_way = True
            self._note_start(queued)

        try:
            proof = await self._prover.prove(job, started=started)
        except ProverDied as error:
            await self._worker_died(queued, str(error))
            return None
        except (ProverTimeout, ProofFailed) as error:
            await self._spend(queued, str(error))
            return None
        finally:
            if under_way:
                self._stats.proving.end(self._clock.monotonic())
        self._stats.count("proven")
        self._stats.proof_seconds.add(proof.seconds)
        return proof

    def _note_start(self, queued: QueuedShare) -> None:
        self._stats.proving.begin(self._clock.monotonic())
        if not queued.attempts and not queued.crashes and queued.proved_height is None:
            self._stats.lateness_start.add(self._clock.now() - queued.due_ms / 1000)

    async def _wait_for_tree(self, queued: QueuedShare) -> None:
        """No attempt; a little later than now, or it would be taken up again and again until a block comes."""
        self._stats.count("retry_tree")
        later = int((self._endpoints.wall() + TREE_WAIT) * 1000)
        note = "no verified root holds this leaf yet"
        await self._store.requeue(queued.id, due_ms=max(later, queued.due_ms), stage="tree", note=note)

    async def _spend(self, queued: QueuedShare, reason: str) -> None:
        await self._attempts.spend(queued.id, queued.attempts, "proof", reason, not_before_ms=queued.due_ms)

    async def _worker_died(self, queued: QueuedShare, reason: str) -> None:
        due_ms = queued.due_ms
        if queued.crashes >= FREE_CRASHES:
            # Not due in the moment between the crash and its attempt: nobody else may take it up then.
            due_ms = self._attempts.due_ms(queued.attempts + 1, due_ms)
        crashes = await self._store.record_crash(queued.id, due_ms=due_ms, note=reason)
        if crashes:
            self._stats.count("retry_prover")
            log.warning("prover worker died under a share", crashes=crashes)
        if crashes > FREE_CRASHES:
            await self._spend(queued, reason)

    def _prepared(self, queued: QueuedShare, circuit: str, anchor: Anchor, proof: Proof) -> PreparedReveal:
        message = RevealMessage(
            nullifier=queued.nullifier,
            enc_share=queued.share.c1 + queued.share.c2,
            proposal_id=queued.share.proposal_id,
            vote_decision=queued.share.vote_decision,
            proof=proof.proof,
            round_id=queued.share.round_id,
            anchor_height=anchor.height,
        )
        head = self._endpoints.head
        return PreparedReveal(
            message=message.to_tx(),
            tx_hash=message.tx_hash(),
            anchor_height=anchor.height,
            circuit=circuit,
            height=anchor.height if head is None else head.height,
        )


def _job(queued: QueuedShare, circuit: str, path: bytes) -> ProofJob:
    share = queued.share
    return ProofJob(
        circuit=circuit,
        path=path,
        position=share.tree_position,
        share_comms=share.share_comms,
        primary_blind=share.primary_blind,
        c1=share.c1,
        c2=share.c2,
        share_index=share.share_index,
        proposal_id=share.proposal_id,
        vote_decision=share.vote_decision,
        round_id=share.round_id,
    )
