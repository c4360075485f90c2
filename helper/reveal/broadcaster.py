"""Broadcasts prepared messages and resends them until the block follower has confirmed the share.

A node may take a minute to respond. A send without a response for a few seconds has an unknown outcome: the share is
sent again at the next height of the chain, through another node, while the call continues. See decision 30.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import structlog

from helper.chain.commitment_trees import CommitmentTreeSync
from helper.chain.counted_reveals import shows_spent
from helper.chain.limited_gather import gather_limited
from helper.chain.models import TxResult
from helper.chain.node_pool import RESEND_SECONDS, Node, NodePool
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.verdicts import MESSAGE_REFUSALS, BroadcastOutcome, Verdict, classify_refusal
from helper.circuits.registry import get_generation
from helper.clock import Clock
from helper.core.log_limits import RecentKeys
from helper.errors import ChainError, ProverError
from helper.lease import Lease
from helper.lease.local import LocalLease
from helper.observability.error_log import log_error
from helper.observability.stats import Stats
from helper.reveal.attempt_budget import AttemptBudget
from helper.reveal.circuit_selector import TRIAL_WAIT_SECONDS, CircuitSelector
from helper.reveal.node_holds import PROBE_SECONDS, NodeHolds
from helper.reveal.prover.pool import ProverPool
from helper.reveal.resend_policy import NEXT_BLOCK_VERDICTS, NextStep, next_step
from helper.reveal.send_call import SendCall
from helper.reveal.send_state import SendState, SendStates
from helper.store.models import SentReveal
from helper.store.store import Store
from proofs import CircuitError

log = structlog.get_logger("helper.reveal")

MAX_FOLLOW_UPS = 64
"""Maximum number of unconfirmed reveals handled after each block; the longest overdue come first.

Larger than the number of shares that can be proven per block interval. Limits the load if the chain includes no
reveals.
"""
CONCURRENT_RESENDS = 16
"""Unconfirmed reveals resent concurrently, so that one slow node does not delay all others."""
NEVER_SENT_HEIGHT = 0
"""Height for which `follow_ups` returns only messages that were never sent."""
STATES_KEPT = 100_000
"""Maximum number of shares whose send state is held in memory."""
NODE_AVOIDANCE_SECONDS = 30.0
"""Seconds for which a node is tried last after an inconclusive response.

For a share whose call to it continues without a response, it is not tried at all in this time.
"""

VERDICT_LOG_SECONDS = 60.0
"""A verdict from a node is logged again if it did not occur for this many seconds."""


class Broadcaster:
    """Sends prepared messages to the chain, at most once per share and block height.

    Args:
        lease: the right to send. Checked before each send is recorded, and again before the first byte is sent.
    """

    def __init__(
        self,
        *,
        store: Store,
        trees: CommitmentTreeSync,
        node_pool: NodePool,
        verifier: ProverPool,
        circuits: CircuitSelector,
        attempts: AttemptBudget,
        clock: Clock,
        stats: Stats,
        lease: Lease | None = None,
    ) -> None:
        self._store = store
        self._lease: Lease = LocalLease() if lease is None else lease
        self._trees = trees
        self._node_pool = node_pool
        self._verifier = verifier
        self._circuits = circuits
        self._attempts = attempts
        self._clock = clock
        self._stats = stats
        self._states = SendStates(STATES_KEPT)
        self._avoided_until: dict[str, float] = {}  # by node; monotonic time until which the node is tried last
        self._holds = NodeHolds(clock)
        self._trial_lock = asyncio.Lock()  # held by the trial reveal of a circuit
        # By circuit: the nodes that refused a proof of it, and the last such share.
        self._refusals_by_circuit: dict[str, dict[str, int]] = {}
        self._sending_since = clock.monotonic()
        self._logged_verdicts = RecentKeys(VERDICT_LOG_SECONDS)  # by node and verdict
        self._subscribers: list[Callable[[], None]] = []
        self._unanswered_subscribers: list[Callable[[], None]] = []
        self._late_tasks: set[asyncio.Task[None]] = set()  # each waits for the response of an unanswered call

    @property
    def seconds_to_probe(self) -> float | None:
        """Seconds after which reveals are tried again although no block was produced, None if no node is held."""
        return PROBE_SECONDS if self._holds.is_any_held else None

    async def stop(self) -> None:
        """Cancel the calls that continue without a response."""
        for task in self._late_tasks:
            task.cancel()
        await asyncio.gather(*self._late_tasks, return_exceptions=True)

    def subscribe_to_unanswered(self, callback: Callable[[], None]) -> None:
        """Register a callback for each event after which shares may have to be sent again now.

        These are a send without a response, and the end of a node's hold.
        """
        self._unanswered_subscribers.append(callback)

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Register a callback for each share that is requeued."""
        self._subscribers.append(callback)

    def start_term(self) -> None:
        """Start sending on this host, after the lease was acquired.

        As after a restart, messages that may have been sent wait for a block. Send times from an earlier term are
        dropped, because another host may have sent those messages since.
        """
        self._sending_since = self._clock.monotonic()
        self._states.forget_ends()

    def forget_confirmed(self, share_id: int) -> None:
        """Drop the state of a confirmed share, including one revealed by another helper."""
        first_sent_at = self._states.confirm(share_id)
        if first_sent_at is not None:
            self._stats.confirmation.add_sample(self._clock.monotonic() - first_sent_at)

    async def send(self, share_id: int) -> None:
        """Send the prepared message of a share, unless it was confirmed in the meantime."""
        await self._run_exclusively(share_id, self._send)

    async def reconcile(self, height: int) -> None:
        """Follow up at most `MAX_FOLLOW_UPS` unconfirmed reveals, after the block at `height` was processed.

        An error with one share is logged and does not affect the others.

        Raises:
            StoreError: the shares cannot be read.
        """
        if not self._lease.is_held:
            return
        greatest = max(height, self._node_pool.greatest_height)
        share_ids = await self._store.list_follow_ups(height=greatest, limit=MAX_FOLLOW_UPS + self._states.stuck)
        # Shares that raised an error before come last, so that they do not displace all others.
        selected = sorted(share_ids, key=lambda share_id: self._states.get(share_id).is_stuck)[:MAX_FOLLOW_UPS]
        await self._follow_up_all(selected, partial(self._run_next_step, height=height))

    async def send_new(self) -> None:
        """Send messages that other hosts have prepared and that were never sent.

        An error with one share is logged and does not affect the others.

        Raises:
            StoreError: the shares cannot be read.
        """
        previous_ids: set[int] = set()
        while self._lease.is_held:
            share_ids = await self._store.list_follow_ups(
                height=NEVER_SENT_HEIGHT, limit=MAX_FOLLOW_UPS + self._states.stuck
            )
            if previous_ids.issuperset(share_ids):
                return  # the remaining ones cannot be sent now
            previous_ids = set(share_ids)
            await self._follow_up_all(share_ids, self._send)

    async def _follow_up_all(self, share_ids: Sequence[int], handle: Callable[[SentReveal], Awaitable[None]]) -> None:
        """Follow up reveals concurrently, at most `CONCURRENT_RESENDS` at a time."""

        async def follow_up(share_id: int) -> None:
            if self._states.get(share_id).is_in_flight:
                return
            try:
                await self._run_exclusively(share_id, handle)
                self._states.set_stuck(share_id, is_stuck=False)
            except Exception as error:
                self._states.set_stuck(share_id, is_stuck=True)
                log_error(log, "follow_up_failed", error)

        await gather_limited(share_ids, follow_up, CONCURRENT_RESENDS)

    async def _run_exclusively(self, share_id: int, handle: Callable[[SentReveal], Awaitable[None]]) -> None:
        """Run `handle` on a share's message.

        Does nothing if another task is processing the share.
        """
        if not self._states.claim(share_id, self._lease.fence):
            return
        try:
            # Read at this point because the share may have been sent or proven again since it was selected.
            reveal = await self._store.get_sent_reveal(share_id)
            if reveal is not None:
                await handle(reveal)
        finally:
            self._states.release(share_id)

    async def _run_next_step(self, reveal: SentReveal, height: int) -> None:
        step = next_step(
            sends=reveal.sends,
            first_height=reveal.first_sent_height,
            last_height=reveal.last_sent_height,
            outcome=reveal.last_outcome,
            height=height,
        )
        if step is NextStep.SEND or (height <= (reveal.last_sent_height or 0) and self._is_overdue(reveal)):
            await self._send(reveal)
        elif step is NextStep.PROVE:
            circuit = reveal.prepared.circuit
            is_circuit_refused = circuit in self._refusals_by_circuit and self._circuits.is_unproven(circuit)
            result = None if is_circuit_refused or self._is_refused(reveal) else await self._find_result(reveal)
            if result is not None and shows_spent(result):
                await self._send(reveal)  # counted in a block that is not read yet: a new proof would be refused
                return
            has_failed = result is not None and classify_refusal(result.code, result.log) is Verdict.BAD_PROOF
            if is_circuit_refused or self._is_refused(reveal) or has_failed:
                # Every node that checked the proof, or another one of an unproven circuit, refused it, and the others
                # had ten blocks to accept it.
                self._refusals_by_circuit.pop(circuit, None)
                self._circuits.record_refused(reveal.share_id, circuit)
            await self._requeue(
                reveal.share_id, f"not confirmed within {height - (reveal.first_sent_height or height)} blocks"
            )

    async def _send(self, reveal: SentReveal) -> None:
        """Send a reveal; one at a time until the chain has accepted its circuit."""
        circuit = reveal.prepared.circuit
        if self._circuits.is_unproven(circuit):
            try:
                async with asyncio.timeout(TRIAL_WAIT_SECONDS):
                    await self._trial_lock.acquire()
            except TimeoutError:
                return
            try:
                if self._circuits.is_unproven(circuit):
                    await self._try_circuit(reveal)
                    return
            finally:
                self._trial_lock.release()
        await self._send_now(reveal)

    async def _try_circuit(self, reveal: SentReveal) -> None:
        """Send a reveal to find out whether the chain accepts its circuit.

        If the circuit was refused in the meantime, a share whose message was never sent, or was refused itself, is
        requeued instead. A message that may be in a mempool is resent: only its own refusal requires a new proof.
        """
        is_outdated = self._circuits.is_outdated(reveal.prepared.circuit)
        if is_outdated and (reveal.sends == 0 or self._is_refused(reveal)):
            await self._requeue(reveal.share_id, f"the chain refuses {reveal.prepared.circuit} proofs")
        else:
            await self._send_now(reveal)

    async def _send_now(self, reveal: SentReveal) -> None:
        if int(self._clock.now() * 1000) < reveal.due_ms:
            return  # the clock was set back since the proof or the last send: never send or resend before the due time
        message = RevealMessage.from_tx(reveal.prepared.message)
        share_id, sends = reveal.share_id, reveal.sends
        nodes, seconds_left = self._ordered_nodes(reveal), self._attempts.seconds_left(reveal.round_id)
        for node in nodes:
            if not await self._holds.accepts_reveals(node, seconds_left=seconds_left, candidates=nodes):
                continue
            head = self._node_pool.head
            if head is None or not self._has_new_block(reveal):
                return
            height = max(head.height, reveal.last_sent_height or 0)  # if false, `_is_overdue` permits the next send
            mark_sending = partial(self._store.mark_sending, height=height, endpoint=node.name)
            if not self._may_send(share_id) or not await mark_sending(share_id):
                return
            if not self._may_send(share_id):
                return  # the lease ended while the send was recorded; the next holder treats it as a lost response
            sends += 1
            if sends == 1:
                self._note_broadcast(reveal)
            if await self._send_to(node, replace(reveal, sends=sends), message) or not self._is_current(share_id):
                return

    async def _send_to(self, node: Node, reveal: SentReveal, message: RevealMessage) -> bool:
        """Send a message to a node. Returns whether any byte may have left; if not, another node can be tried now.

        Args:
            node: the node.
            reveal: the message, with the number of sends including this one.
            message: the same message, decoded.
        """
        state = self._states.get(reveal.share_id)
        state.sent_to[node.name] = self._clock.monotonic()
        call = SendCall(node, message, self._clock)
        outcome = await call.wait()
        if outcome is None:
            await self._note_unanswered(reveal, call, state)
            return True
        self._stats.count(f"answer_{outcome.verdict.name.lower()}")
        if outcome.may_be_sent:
            state.last_ended_at = self._clock.monotonic()
        if self._is_current(reveal.share_id):
            await self._apply_outcome(reveal, outcome, node)
            if not outcome.may_be_sent:
                self._node_pool.start_backoff(node, outcome.log)
        return outcome.may_be_sent

    async def _note_unanswered(self, reveal: SentReveal, call: SendCall, state: SendState) -> None:
        """Record an unknown outcome, and wait for the response in another task.

        The message has left completely, so a block produced since then permits another send.
        """
        state.last_ended_at = call.written_at
        state.unanswered.append(call.node.name)
        late = asyncio.create_task(self._await_late_outcome(reveal, call, state, state.fence))
        self._late_tasks.add(late)
        late.add_done_callback(self._late_tasks.discard)
        if self._is_current(reveal.share_id):
            unknown = BroadcastOutcome(Verdict.AMBIGUOUS, log="no response yet, the call continues")
            await self._apply_outcome(reveal, unknown, call.node)
            self._notify_unanswered()

    async def _await_late_outcome(
        self, reveal: SentReveal, call: SendCall, state: SendState, fence: int | None
    ) -> None:
        """Wait for the outcome of an unanswered call, and apply it if the share was not sent again since."""
        try:
            try:
                outcome = await call.finish()
            finally:
                state.unanswered.remove(call.node.name)
            self._stats.count(f"answer_{outcome.verdict.name.lower()}")

            async def apply(latest: SentReveal) -> None:
                if (latest.sends, latest.prepared.tx_hash) == (reveal.sends, reveal.prepared.tx_hash):
                    await self._apply_outcome(latest, outcome, call.node)

            if self._lease.is_held and self._lease.fence == fence:
                if outcome.verdict is Verdict.ACCEPTED:
                    await self._note_accepted(reveal)
                await self._run_exclusively(reveal.share_id, apply)
        except Exception as error:
            log_error(log, "late_response_failed", error)

    async def _apply_outcome(self, reveal: SentReveal, outcome: BroadcastOutcome, node: Node) -> None:
        """Record the outcome of the latest send, and handle it."""
        await self._store.record_outcome(reveal.share_id, outcome=outcome.verdict.name)
        if outcome.retry_after is not None:
            self._holds.hold(node, outcome.retry_after)
        elif outcome.verdict is Verdict.ACCEPTED and self._holds.release(node):
            self._notify_unanswered()  # the other shares wait for this node
        if outcome.verdict in NEXT_BLOCK_VERDICTS:
            self._avoided_until[node.name] = self._clock.monotonic() + NODE_AVOIDANCE_SECONDS
        if outcome.may_be_sent:
            message = RevealMessage.from_tx(reveal.prepared.message)
            await self._handle_outcome(reveal, message, outcome, node)

    def _is_current(self, share_id: int) -> bool:
        """Whether the share was read under the current fencing token.

        If the lease was lost and acquired again in the meantime, another host may have sent the share or proven it
        again.
        """
        return self._states.get(share_id).fence == self._lease.fence

    def _may_send(self, share_id: int) -> bool:
        return self._lease.is_held and self._is_current(share_id)

    def _has_new_block(self, reveal: SentReveal) -> bool:
        """Whether a block was produced after the last send.

        A height does not prove it: the chain may have been a block ahead of the known head, or a node reported a false
        one.
        """
        ended = self._last_ended_at(reveal)
        return ended is None or self._node_pool.is_head_newer_than(ended)

    def _last_ended_at(self, reveal: SentReveal) -> float | None:
        """Monotonic end of the last send, None before the first.

        A message that may have been sent before the start waits for a block produced after the start.
        """
        ended = self._states.get(reveal.share_id).last_ended_at
        if ended is None and (reveal.sends or not reveal.is_first_message):
            return self._sending_since
        return ended

    def _is_overdue(self, reveal: SentReveal) -> bool:
        """Whether a share may be sent again although the agreed height stands still.

        One of two nodes may be silent or report a false height, and must not hold a send back.
        """
        ended = self._last_ended_at(reveal)
        return ended is None or self._clock.monotonic() - ended >= RESEND_SECONDS

    def _ordered_nodes(self, reveal: SentReveal) -> list[Node]:
        """Nodes in sync, in the order in which they are tried.

        First the nodes that have not received the share, then those that received it longest ago, because a node may
        accept a reveal and drop it. Nodes that refused the message come last. A node that received it recently and has
        not responded is not tried: more copies would only add to its load.
        """
        now, refusals = self._clock.monotonic(), self._refusals(reveal)
        state = self._states.get(reveal.share_id)
        sent_to = state.sent_to or {reveal.last_endpoint or "": 0.0}
        tried = self._refusals_by_circuit.get(reveal.prepared.circuit, {})

        def preference(node: Node) -> tuple[bool, float, bool]:
            is_avoided = self._avoided_until.get(node.name, now) > now
            return (
                node.name in refusals or node.name in tried,
                sent_to.get(node.name, -math.inf),
                is_avoided,
            )

        since = now - NODE_AVOIDANCE_SECONDS
        candidates = [node for node in self._node_pool.usable_nodes if not state.awaits_response(node.name, since)]
        return sorted(candidates, key=preference)

    def _note_broadcast(self, reveal: SentReveal) -> None:
        self._stats.count("broadcast")
        self._states.get(reveal.share_id).note_first_send(self._clock.monotonic())
        if reveal.is_first_attempt:
            self._stats.lateness_broadcast.add_sample(self._clock.now() - reveal.due_ms / 1000)

    async def _handle_outcome(
        self, reveal: SentReveal, message: RevealMessage, outcome: BroadcastOutcome, node: Node
    ) -> None:
        """Apply the verdict table to a node's response."""
        if outcome.verdict is Verdict.ACCEPTED:
            await self._note_accepted(reveal)
        elif outcome.verdict not in MESSAGE_REFUSALS:
            if self._logged_verdicts.remember((node.name, outcome.verdict), self._clock.monotonic()):
                log.info(
                    "reveal_not_accepted",
                    endpoint=node.name,
                    outcome=outcome.verdict.name,
                    reason=outcome.log,
                )
        elif outcome.verdict is Verdict.BAD_PROOF and not await self._is_proof_valid(reveal, message):
            await self._spend_attempt(reveal, outcome)
        else:
            await self._handle_refusal(reveal, outcome, node)

    async def _note_accepted(self, reveal: SentReveal) -> None:
        self._refusals_by_circuit.pop(reveal.prepared.circuit, None)
        await self._circuits.record_accepted(reveal.prepared.circuit)

    async def _handle_refusal(self, reveal: SentReveal, outcome: BroadcastOutcome, node: Node) -> None:
        """Handle a refusal of a message that the local verifier accepts.

        The node may be broken or malicious, so a refusal is accepted only if every node in sync refuses. Until then the
        same bytes are sent to the other nodes, one node per block.
        """
        state = self._states.get(reveal.share_id)
        state.add_refusal(reveal.prepared.tx_hash, node.name, outcome.verdict)
        refusals = self._refusals(reveal)
        circuit, tried = reveal.prepared.circuit, dict[str, int]()
        if outcome.verdict is Verdict.BAD_PROOF and self._circuits.is_unproven(circuit):
            # No proof of this circuit was ever accepted, so refusals of its other proofs count too.
            tried = self._refusals_by_circuit.setdefault(circuit, {})
            tried[node.name] = reveal.share_id
        if any(other.name not in refusals and other.name not in tried for other in self._node_pool.usable_nodes):
            log.warning("node_refused_reveal", endpoint=node.name, reason=outcome.log)
            return
        if self._is_refused(reveal):
            # Also if other nodes refuse it for other reasons: the chain may verify another circuit since an upgrade.
            self._refusals_by_circuit.pop(circuit, None)
            # A follow-up in progress detects the refused circuit itself.
            others = {share_id for share_id in tried.values() if not self._states.get(share_id).is_in_flight}
            for share_id in sorted(others | {reveal.share_id}):
                self._states.get(share_id).clear_refusals()
                self._circuits.record_refused(share_id, circuit)
                await self._requeue(share_id, f"the chain refuses {circuit} proofs")
            return
        state.clear_refusals()
        if len(refusals) > 1:
            await self._attempts.fail_share(reveal.share_id, "broadcast", outcome.log)
        else:
            await self._spend_attempt(reveal, outcome)

    def _refusals(self, reveal: SentReveal) -> Mapping[str, Verdict]:
        """The verdicts of the nodes that refused exactly this message, by node name."""
        return self._states.get(reveal.share_id).refusals_of(reveal.prepared.tx_hash)

    def _is_refused(self, reveal: SentReveal) -> bool:
        """Whether a node refused exactly this message for its proof.

        The local verifier accepts the proof.
        """
        return Verdict.BAD_PROOF in self._refusals(reveal).values()

    async def _find_result(self, reveal: SentReveal) -> TxResult | None:
        """The result of exactly this accepted message in a block, as a node reports it; None if there is none.

        Some nodes check proofs only in blocks.
        """
        for node in self._node_pool.usable_nodes if reveal.last_outcome == Verdict.ACCEPTED.name else ():
            try:
                result = await node.client.tx(reveal.prepared.tx_hash)
            except ChainError as error:
                self._node_pool.record_error(node, error)
                continue
            if result is not None:
                return result
        return None

    async def _spend_attempt(self, reveal: SentReveal, outcome: BroadcastOutcome) -> None:
        await self._attempts.spend_attempt(reveal.share_id, reveal, "broadcast", outcome.log)
        self._notify_subscribers()

    async def _requeue(self, share_id: int, note: str) -> None:
        await self._store.requeue(share_id, stage="broadcast", note=note)
        self._stats.count("retry_broadcast")
        self._notify_subscribers()

    def _notify_unanswered(self) -> None:
        for callback in self._unanswered_subscribers:
            callback()

    def _notify_subscribers(self) -> None:
        for callback in self._subscribers:
            callback()

    async def _is_proof_valid(self, reveal: SentReveal, message: RevealMessage) -> bool:
        """Check the proof with the local verifier, against the chain's root at its anchor."""
        anchor = self._trees.anchor_at(reveal.round_id, message.anchor_height)
        if anchor is None:
            return True  # the tree was not restored that far back, so the proof cannot be checked
        circuit = reveal.prepared.circuit
        try:
            statement = get_generation(circuit).create_statement(message, anchor.root)
            return await self._verifier.verify(circuit, message.proof, statement)
        except (ProverError, CircuitError):
            return True
