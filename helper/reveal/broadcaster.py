"""From a message on disk to a counted reveal: send, read the answer, send again, until the listener has seen it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import structlog

import proofs
from helper.chain.commitment_tree import Anchor
from helper.chain.node_pool import Node, NodePool
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.verdicts import Outcome, Spends, Verdict, verdict_of
from helper.clock import Clock
from helper.core.recent import RecentKeys
from helper.errors import ChainError, HelperError, ProverError
from helper.lease import Lease
from helper.lease.local import LocalLease
from helper.observability.stats import Stats
from helper.reveal.attempt_budget import AttemptBudget
from helper.reveal.circuit_selector import CircuitSelector
from helper.reveal.resend_policy import AT_NEXT_BLOCK, Next, next_step
from helper.store.rows import SentReveal
from helper.store.store import Store

log = structlog.get_logger("helper.broadcast")

FOLLOWED_UP = 64
"""Unconfirmed reveals that are seen to after one block, those first that have waited for it longest: more than are
proven in that time, and few enough that a chain that takes reveals and counts none is not flooded with what it has.
"""
IN_FLIGHT = 16
"""Unconfirmed reveals that are sent again at once: one slow node must not hold up all the others."""
NEVER_SENT = 0
"""The height at which there is something to do about messages that were never sent, and about no others."""
ENDED_KEPT = 100_000
"""Shares of which it is remembered when they were last sent, and where to."""
TRIAL_SECONDS = 10.0
"""How long a reveal waits for the answer to another one that tries the same circuit; then it waits for a block."""
AVOIDED_SECONDS = 30.0
"""How long other endpoints are tried before one that left a reveal without a useful answer."""

DELAY_SECONDS = 60.0
"""Seconds without an answer of a kind after which the next one from that endpoint is logged again."""


class Trees(Protocol):
    """The verified trees, as `helper.chain.commitment_tree.CommitmentTreeSync` has them."""

    def anchor_at(self, round_id: bytes, height: int) -> Anchor | None:
        """The root that was verified at a height since the start."""
        ...


class Verifier(Protocol):
    """What checks proofs, as `helper.reveal.prover.ProverPool` does."""

    async def verify(self, circuit: str, proof: bytes, statement: proofs.Statement) -> bool:
        """Whether the proof holds for these public inputs."""
        ...


class Broadcaster:
    """Brings prepared messages to the chain, at most once a share and block height.

    Args:
        lease: the right to send, looked at before each send is noted and again before its first byte leaves.
    """

    def __init__(
        self,
        *,
        store: Store,
        trees: Trees,
        endpoints: NodePool,
        verifier: Verifier,
        circuits: CircuitSelector,
        attempts: AttemptBudget,
        clock: Clock,
        stats: Stats,
        lease: Lease | None = None,
    ) -> None:
        self._store = store
        self._lease: Lease = LocalLease() if lease is None else lease
        self._trees = trees
        self._endpoints = endpoints
        self._verifier = verifier
        self._circuits = circuits
        self._attempts = attempts
        self._clock = clock
        self._stats = stats
        self._sending: dict[int, int] = {}  # the fence under which its message was read, by share
        self._avoided: dict[str, float] = {}  # until when, monotonic, by endpoint
        self._refused_by: dict[int, tuple[bytes, dict[str, Verdict]]] = {}  # message, endpoints' names, by share
        self._trial = asyncio.Lock()  # held by the one reveal that tries a circuit
        self._tried: dict[str, dict[str, int]] = {}  # by circuit: who refused its proofs, and the share it refused last
        self._began = clock.monotonic()
        self._stuck: set[int] = set()  # shares whose last follow-up ended in an error of ours
        self._ended: dict[int, float] = {}  # when the last send ended, monotonic, by share
        self._had: dict[int, dict[str, float]] = {}  # when each endpoint was last sent it, monotonic, by share
        self._first: dict[int, float] = {}  # when it was first sent since the start, monotonic, by share
        self._delays = RecentKeys(DELAY_SECONDS)  # by endpoint and verdict
        self._changed: list[Callable[[], None]] = []

    def subscribe(self, changed: Callable[[], None]) -> None:
        """Call back whenever a share went back to the queue, now or for later."""
        self._changed.append(changed)

    def took_over(self) -> None:
        """This host sends from now on: what another one sent a moment ago waits for a block, as after a start.

        When this one sent something in an earlier holding says nothing any more: another may have sent it since.
        """
        self._began = self._clock.monotonic()
        self._ended.clear()

    def confirmed(self, share_id: int) -> None:
        """This share was counted, by whoever's reveal."""
        first = self._first.get(share_id)
        if first is not None:
            self._stats.confirmation.add(self._clock.monotonic() - first)
        self._refused_by.pop(share_id, None)
        self._stuck.discard(share_id)
        self._ended.pop(share_id, None)
        self._had.pop(share_id, None)
        self._first.pop(share_id, None)

    async def send(self, share_id: int) -> None:
        """Send one share's prepared message now; nothing happens when it was counted meanwhile."""
        await self._alone(share_id, self._send)

    async def reconcile(self, height: int) -> None:
        """See to unconfirmed reveals after the block at `height` was processed, to at most `FOLLOWED_UP`.

        An error in one share's way is logged and holds up no other. Raises StoreError when the shares cannot be read.
        """
        if not self._lease.held:
            return
        found = await self._store.follow_ups(height=height, limit=FOLLOWED_UP + len(self._stuck))
        # those last that an error of ours has stopped before: they must not take the places of all others
        wanted = sorted(found, key=self._stuck.__contains__)[:FOLLOWED_UP]
        await self._see_to(wanted, partial(self._next, height=height))

    async def send_new(self) -> None:
        """Send what other hosts have prepared and nobody has sent yet; to be called again while there is more.

        An error in one share's way is logged and holds up no other. Raises StoreError when the shares cannot be read.
        """
        before: set[int] = set()
        while self._lease.held:
            found = await self._store.follow_ups(height=NEVER_SENT, limit=FOLLOWED_UP + len(self._stuck))
            if before.issuperset(found):
                return  # those that are left cannot be sent now
            before = set(found)
            await self._see_to(found, self._send)

    async def _see_to(self, share_ids: Sequence[int], work: Callable[[SentReveal], Awaitable[None]]) -> None:
        """Work on reveals, some at once."""
        slots = asyncio.Semaphore(IN_FLIGHT)
        async with asyncio.TaskGroup() as group:
            for share_id in share_ids:
                if share_id not in self._sending:
                    await slots.acquire()
                    group.create_task(self._follow_up(share_id, work, slots))

    async def _follow_up(
        self, share_id: int, work: Callable[[SentReveal], Awaitable[None]], slots: asyncio.Semaphore
    ) -> None:
        try:
            await self._alone(share_id, work)
            self._stuck.discard(share_id)
        except HelperError as error:
            self._stuck.add(share_id)
            log.error("an unconfirmed reveal could not be seen to", error=str(error), advice=error.advice)
        except Exception:
            self._stuck.add(share_id)
            log.exception("an unconfirmed reveal could not be seen to")
        finally:
            slots.release()

    async def _alone(self, share_id: int, work: Callable[[SentReveal], Awaitable[None]]) -> None:
        """Read a share's message and work on it, unless somebody does already."""
        if share_id in self._sending:
            return
        self._sending[share_id] = self._lease.fence
        try:
            # Read only now: what was read before may have been sent, or proven anew, since.
            reveal = await self._store.sent_reveal(share_id)
            if reveal is not None:
                await work(reveal)
        finally:
            del self._sending[share_id]

    async def _next(self, reveal: SentReveal, height: int) -> None:
        step = _step(reveal, height)
        if step is Next.SEND:
            await self._send(reveal)
        elif step is Next.PROVE:
            if self._is_refused(reveal) or await self._failed_in_block(reveal):
                # Those who looked at the proof refuse it; the others had ten blocks to say something else.
                self._circuits.refused(reveal.share_id, reveal.prepared.circuit)
            await self._put_back(
                reveal.share_id, f"not counted within {height - (reveal.first_sent_height or height)} blocks"
            )

    async def _send(self, reveal: SentReveal) -> None:
        """Send a reveal; alone, while it is not known whether the chain accepts its circuit."""
        circuit = reveal.prepared.circuit
        if self._circuits.is_unproven(circuit):
            try:
                async with asyncio.timeout(TRIAL_SECONDS):
                    await self._trial.acquire()
            except TimeoutError:
                return
            try:
                if self._circuits.is_unproven(circuit):
                    await self._try_circuit(reveal)
                    return
            finally:
                self._trial.release()
        await self._send_now(reveal)

    async def _try_circuit(self, reveal: SentReveal) -> None:
        """Send a reveal to find out whether the chain accepts its circuit.

        If that circuit was refused meanwhile, a message that never left, or was refused itself, is put back instead.
        One that may be in a mempool is sent again: only its own refusal calls for a new proof.
        """
        is_over = reveal.prepared.circuit != self._circuits.current
        if is_over and (reveal.sends == 0 or self._is_refused(reveal)):
            await self._put_back(reveal.share_id, f"the chain refuses {reveal.prepared.circuit} proofs")
        else:
            await self._send_now(reveal)

    async def _send_now(self, reveal: SentReveal) -> None:
        if int(self._clock.now() * 1000) < reveal.due_ms:
            return  # the clock was set back since it was proven, or sent: nothing leaves before its time, nor again
        message = RevealMessage.from_tx(reveal.prepared.message)
        share_id, first = reveal.share_id, reveal.sends == 0
        for endpoint in self._candidates(reveal):
            head = self._endpoints.head
            if head is None or head.height <= (reveal.last_sent_height or 0) or not self._at_new_height(reveal):
                return
            mark = partial(self._store.mark_sending, height=head.height, endpoint=endpoint.name)
            if not self._may_send(share_id) or not await mark(share_id):
                return
            if not self._may_send(share_id):
                return  # it ended while the send was noted: whoever has it next takes it for one without an answer
            if first:
                self._note_broadcast(reveal)
                first = False
            self._note_had(share_id, endpoint)
            outcome = await endpoint.client.broadcast(message)
            self._stats.count(f"answer_{outcome.verdict.name.lower()}")
            if outcome.left:
                self._note_end(share_id)
            if not self._knows(share_id):
                return
            await self._store.record_outcome(share_id, outcome=outcome.verdict.name)
            if outcome.verdict in AT_NEXT_BLOCK:
                self._avoided[endpoint.name] = self._clock.monotonic() + AVOIDED_SECONDS
            if outcome.left:
                await self._answered(reveal, message, outcome, endpoint)
                return
            self._endpoints.rest(endpoint, outcome.log)

    def _knows(self, share_id: int) -> bool:
        """Whether what was read of a share is what this host still goes by. Where the lease went to another host and
        came back meanwhile, that host may have sent the share, or had it proven anew.
        """
        return self._sending.get(share_id) == self._lease.fence

    def _may_send(self, share_id: int) -> bool:
        return self._lease.held and self._knows(share_id)

    def _note_had(self, share_id: int, endpoint: Node) -> None:
        self._had.setdefault(share_id, {})[endpoint.name] = self._clock.monotonic()
        if len(self._had) > ENDED_KEPT:
            del self._had[next(iter(self._had))]

    def _note_end(self, share_id: int) -> None:
        self._ended.pop(share_id, None)
        self._ended[share_id] = self._clock.monotonic()
        if len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    def _at_new_height(self, reveal: SentReveal) -> bool:
        """Whether the chain has certainly moved on since the last send: it may have been a block ahead of what we knew
        of it then. What may have been sent before our start waits for a block since that.
        """
        earlier = None if reveal.first_message and not reveal.sends else self._began
        answered = self._ended.get(reveal.share_id, earlier)
        return answered is None or self._endpoints.made_since(answered)

    def _candidates(self, reveal: SentReveal) -> list[Node]:
        """Fresh endpoints: last those that refused this message; before them those that had the share, the longest ago
        first, as some may take a reveal and forget it; and first of all those that never had it, and answer well.
        """
        now, refusers = self._clock.monotonic(), self._refusers(reveal)

        had = self._had.get(reveal.share_id) or {reveal.last_endpoint or "": 0.0}
        tried = self._tried.get(reveal.prepared.circuit, {})

        def preference(endpoint: Node) -> tuple[bool, float, bool]:
            badly = self._avoided.get(endpoint.name, now) > now
            return endpoint.name in refusers or endpoint.name in tried, had.get(endpoint.name, -math.inf), badly

        return sorted(self._endpoints.fresh, key=preference)

    def _note_broadcast(self, reveal: SentReveal) -> None:
        self._stats.count("broadcast")
        self._first.setdefault(reveal.share_id, self._clock.monotonic())
        if len(self._first) > ENDED_KEPT:
            del self._first[next(iter(self._first))]
        if reveal.first_try:
            self._stats.lateness_broadcast.add(self._clock.now() - reveal.due_ms / 1000)

    async def _answered(self, reveal: SentReveal, message: RevealMessage, outcome: Outcome, endpoint: Node) -> None:
        """What the answer means, and what it costs by the table of outcomes."""
        if outcome.verdict is Verdict.ACCEPTED:
            self._tried.pop(reveal.prepared.circuit, None)
            await self._circuits.accepted(reveal.prepared.circuit)
        elif outcome.verdict.spends is Spends.NONE:
            if self._delays.note((endpoint.name, outcome.verdict), self._clock.monotonic()):
                log.info(
                    "a reveal is not in yet",
                    endpoint=endpoint.name,
                    outcome=outcome.verdict.name,
                    reason=outcome.log,
                )
        elif outcome.verdict is Verdict.BAD_PROOF and not await self._verifies(reveal, message):
            await self._spend(reveal, outcome)
        else:
            await self._refused(reveal, outcome, endpoint)

    async def _refused(self, reveal: SentReveal, outcome: Outcome, endpoint: Node) -> None:
        """A node refuses what is right by our own word. It may lie or be broken: it takes every fresh endpoint to
        believe it; until then the same bytes go to the others, block by block.
        """
        refusers = self._refusers(reveal)
        refusers[endpoint.name] = outcome.verdict
        self._refused_by[reveal.share_id] = (reveal.prepared.tx_hash, refusers)
        circuit, tried = reveal.prepared.circuit, dict[str, int]()
        if outcome.verdict is Verdict.BAD_PROOF and self._circuits.is_unproven(circuit):
            # Nothing of this circuit was ever accepted, so what others say of other proofs of it counts as well.
            tried = self._tried.setdefault(circuit, {})
            tried[endpoint.name] = reveal.share_id
        if any(other.name not in refusers and other.name not in tried for other in self._endpoints.fresh):
            log.warning("an endpoint refuses a reveal", endpoint=endpoint.name, reason=outcome.log)
            return
        if outcome.verdict is Verdict.BAD_PROOF:
            self._tried.pop(circuit, None)
            # Those that are being followed up now see by themselves that their circuit is refused.
            others = {share_id for share_id in tried.values() if share_id not in self._sending}
            for share_id in sorted(others | {reveal.share_id}):
                self._refused_by.pop(share_id, None)
                self._circuits.refused(share_id, circuit)
                await self._put_back(share_id, f"the chain refuses {circuit} proofs")
            return
        self._refused_by.pop(reveal.share_id, None)
        if len(refusers) > 1:
            await self._attempts.fail(reveal.share_id, "broadcast", outcome.log)
        else:
            await self._spend(reveal, outcome)

    def _refusers(self, reveal: SentReveal) -> dict[str, Verdict]:
        """The endpoints that refused this very message, and how."""
        tx_hash, refusers = self._refused_by.get(reveal.share_id, (b"", {}))
        return refusers if tx_hash == reveal.prepared.tx_hash else {}

    def _is_refused(self, reveal: SentReveal) -> bool:
        """Whether an endpoint refused this very message for its proof, which our own verifier accepts."""
        return Verdict.BAD_PROOF in self._refusers(reveal).values()

    async def _failed_in_block(self, reveal: SentReveal) -> bool:
        """Whether a block holds this very message, failed for its proof: some nodes check proofs only there."""
        for endpoint in self._endpoints.fresh if reveal.last_outcome == Verdict.ACCEPTED.name else ():
            try:
                result = await endpoint.client.tx(reveal.prepared.tx_hash)
            except ChainError as error:
                self._endpoints.failed(endpoint, error)
                continue
            if result is not None:
                return bool(result.code) and verdict_of(result.code, result.log) is Verdict.BAD_PROOF
        return False

    async def _spend(self, reveal: SentReveal, outcome: Outcome) -> None:
        await self._attempts.spend(
            reveal.share_id, reveal.attempts, "broadcast", outcome.log, not_before_ms=reveal.due_ms
        )
        self._tell_changed()

    async def _put_back(self, share_id: int, note: str) -> None:
        await self._store.requeue(share_id, stage="broadcast", note=note)
        self._stats.count("retry_broadcast")
        self._tell_changed()

    def _tell_changed(self) -> None:
        for changed in self._changed:
            changed()

    async def _verifies(self, reveal: SentReveal, message: RevealMessage) -> bool:
        """Our own verifier's word on the proof, against the chain's root at its anchor."""
        anchor = self._trees.anchor_at(reveal.round_id, message.anchor_height)
        if anchor is None:
            return True  # the tree was not restored that far back: nothing speaks against the proof
        statement = proofs.Statement(
            nullifier=message.nullifier,
            c1=message.enc_share[:32],
            c2=message.enc_share[32:],
            proposal_id=message.proposal_id,
            vote_decision=message.vote_decision,
            root=anchor.root,
            round_id=message.round_id,
        )
        try:
            return await self._verifier.verify(reveal.prepared.circuit, message.proof, statement)
        except ProverError:
            return True


def _step(reveal: SentReveal, height: int) -> Next:
    return next_step(
        sends=reveal.sends,
        first_height=reveal.first_sent_height,
        last_height=reveal.last_sent_height,
        outcome=reveal.last_outcome,
        height=height,
    )
