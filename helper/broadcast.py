"""From a message on disk to a counted reveal: send, read the answer, send again, until the listener has seen it."""

from __future__ import annotations

from typing import Protocol

import structlog

from helper.attempts import Attempts
from helper.chain.failover import Endpoint, Endpoints
from helper.chain.message import RevealMessage
from helper.chain.outcome import Outcome, Verdict
from helper.circuits import CircuitChoice, Refused
from helper.clock import Clock
from helper.errors import ProverError
from helper.resend import Next, next_step
from helper.store.base import SentReveal, Store
from helper.telemetry.stats import Stats
from helper.tree import TreeKeeper

log = structlog.get_logger("helper.broadcast")

PAGE = 500
"""Unconfirmed reveals that are looked at with one query."""


class Verifier(Protocol):
    """What checks proofs, as `helper.prover.ProverPool` does."""

    async def verify(
        self,
        circuit: str,
        proof: bytes,
        *,
        nullifier: bytes,
        c1: bytes,
        c2: bytes,
        proposal_id: int,
        vote_decision: int,
        root: bytes,
        round_id: bytes,
    ) -> bool:
        """Whether the proof holds for these public inputs."""
        ...


class Broadcaster:
    """Brings prepared messages to the chain, at most once a share and block height."""

    def __init__(
        self,
        *,
        store: Store,
        trees: TreeKeeper,
        endpoints: Endpoints,
        verifier: Verifier,
        circuits: CircuitChoice,
        attempts: Attempts,
        clock: Clock,
        stats: Stats,
    ) -> None:
        self._store = store
        self._trees = trees
        self._endpoints = endpoints
        self._verifier = verifier
        self._circuits = circuits
        self._attempts = attempts
        self._clock = clock
        self._stats = stats
        self._sending: set[int] = set()

    async def send(self, share_id: int) -> None:
        """Send one share's prepared message now; nothing happens when it was counted meanwhile."""
        reveal = await self._store.sent_reveal(share_id)
        if reveal is not None and share_id not in self._sending:
            self._sending.add(share_id)
            try:
                await self._send(reveal)
            finally:
                self._sending.discard(share_id)

    async def reconcile(self, height: int) -> None:
        """Look at every unconfirmed reveal after the block at `height` was processed."""
        after = 0
        while page := await self._store.unconfirmed(limit=PAGE, after_id=after):
            for reveal in page:
                if reveal.share_id not in self._sending:
                    await self._next(reveal, height)
            after = page[-1].share_id

    async def _next(self, reveal: SentReveal, height: int) -> None:
        step = next_step(
            sends=reveal.sends,
            first_height=reveal.first_sent_height,
            last_height=reveal.last_sent_height,
            outcome=reveal.last_outcome,
            height=height,
        )
        if step is Next.SEND:
            await self.send(reveal.share_id)
        elif step is Next.PROVE:
            note = f"not counted within {height - (reveal.first_sent_height or height)} blocks"
            await self._store.put_back(reveal.share_id, stage="broadcast", note=note)

    async def _send(self, reveal: SentReveal) -> None:
        message = RevealMessage.from_tx(reveal.prepared.message)
        for endpoint in self._candidates(reveal):
            head = self._endpoints.head
            if head is None or reveal.last_sent_height == head.height:
                return
            if not await self._store.mark_sending(
                reveal.share_id, height=head.height, endpoint=endpoint.name
            ):
                return
            if reveal.sends == 0:
                self._note_broadcast(reveal)
            outcome = await endpoint.client.broadcast(message)
            self._stats.count(f"answer_{outcome.verdict.name.lower()}")
            await self._store.record_outcome(reveal.share_id, outcome=outcome.verdict.name)
            if outcome.left:
                await self._answered(reveal, message, outcome)
                return
            self._endpoints.rest(endpoint, outcome.log)

    def _candidates(self, reveal: SentReveal) -> list[Endpoint]:
        """Fresh endpoints, the one that had the message last at the end."""
        return sorted(self._endpoints.fresh, key=lambda endpoint: endpoint.name == reveal.last_endpoint)

    def _note_broadcast(self, reveal: SentReveal) -> None:
        self._stats.count("broadcast")
        if reveal.first_try:
            self._stats.lateness_broadcast.add(self._clock.now() - reveal.due_ms / 1000)

    async def _answered(self, reveal: SentReveal, message: RevealMessage, outcome: Outcome) -> None:
        match outcome.verdict:
            case Verdict.ACCEPTED:
                await self._circuits.accepted(reveal.prepared.circuit)
            case Verdict.BAD_PROOF:
                await self._proof_refused(reveal, message, outcome)
            case Verdict.PERMANENT:
                await self._attempts.fail(reveal.share_id, "broadcast", outcome.log)
            case _:
                log.info("a reveal is not in yet", verdict=outcome.verdict.name, reason=outcome.log)

    async def _proof_refused(self, reveal: SentReveal, message: RevealMessage, outcome: Outcome) -> None:
        valid = await self._verifies(reveal, message)
        circuit = reveal.prepared.circuit
        if self._circuits.refused(reveal.share_id, circuit, valid=valid) is Refused.SPEND_ATTEMPT:
            await self._attempts.spend(reveal.share_id, reveal.attempts, "broadcast", outcome.log)
        else:
            await self._store.put_back(
                reveal.share_id, stage="broadcast", note=f"the chain refuses {circuit} proofs"
            )

    async def _verifies(self, reveal: SentReveal, message: RevealMessage) -> bool:
        """Our own verifier's word on the proof, against the chain's root at its anchor."""
        anchor = self._trees.anchor_at(reveal.round_id, message.anchor_height)
        if anchor is None:
            return True  # the tree was not restored that far back: nothing speaks against the proof
        try:
            return await self._verifier.verify(
                reveal.prepared.circuit,
                message.proof,
                nullifier=message.nullifier,
                c1=message.enc_share[:32],
                c2=message.enc_share[32:],
                proposal_id=message.proposal_id,
                vote_decision=message.vote_decision,
                root=anchor.root,
                round_id=message.round_id,
            )
        except ProverError:
            return True
