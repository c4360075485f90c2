"""Sends prepared messages, and records each outcome, until the block follower has confirmed the share.

`helper.reveal.send_policy` decides; this module reads what it needs and carries the step out. A node may take a minute
to respond. A send without a response for a few seconds has an unknown outcome: the share is sent again at the next
height of the chain, through another node, while the call continues. See decision 30.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import anyio
import structlog

from helper.chain.broadcast_outcome import (
    MESSAGE_REFUSALS,
    BroadcastOutcome,
    Verdict,
    classify_refusal,
    create_unanswered,
)
from helper.chain.chain_data import TxResult
from helper.chain.commitment_trees import CommitmentTreeSync
from helper.chain.node import Node
from helper.chain.node_http import RequestProgress
from helper.chain.node_pool import RESEND_SECONDS, NodePool, gather_limited
from helper.chain.reveal_transaction import RevealMessage, shows_spent
from helper.circuits import get_generation
from helper.clock import Clock
from helper.core.log_limits import RecentKeys
from helper.errors import ChainError, ProverError
from helper.lease import Lease
from helper.observability.log_config import log_error
from helper.observability.stats import Stats
from helper.reveal import send_policy
from helper.reveal.circuit_choice import TRIAL_WAIT_SECONDS, CircuitChoice
from helper.reveal.prover_pool import ProverPool
from helper.reveal.revealer import RetrySchedule
from helper.reveal.send_policy import NO_HEIGHT, NodeFacts, ProcessFacts, ProveAnew, Send, SendState, SendStates, Wait
from helper.store import messages, shares
from helper.store.messages import SentReveal
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
"""Height for which `list_follow_ups` returns only messages that were never sent."""
DOUBT_CHECK_SECONDS = 2.0
"""Seconds between two checks of the messages that wait for a time, because heights may be false."""
STATES_KEPT = 100_000
"""Maximum number of shares whose send state is held in memory."""
VERIFY_SECONDS = 30.0
"""Maximum seconds that a send waits for the local verifier, because the sends of other shares wait for it."""
VERDICT_LOG_SECONDS = 60.0
"""A verdict from a node is logged again if it did not occur for this many seconds."""


@dataclass(eq=False, repr=False, kw_only=True)
class Sender:
    """Sends prepared messages to the chain, at most once per share and block height.

    Args:
        lease: the right to send. Checked before each send is recorded, and again before the first byte is sent.
    """

    store: Store
    node_pool: NodePool
    trees: CommitmentTreeSync
    verifier: ProverPool
    circuits: CircuitChoice
    retries: RetrySchedule
    clock: Clock
    stats: Stats
    lease: Lease = field(default_factory=Lease)

    def __post_init__(self) -> None:
        self._states = SendStates(STATES_KEPT)
        self._trial_lock = asyncio.Lock()  # held by the trial reveal of a circuit
        self._sending_since = self.clock.monotonic()
        self._next_doubt_check = -math.inf
        self._logged_verdicts = RecentKeys(VERDICT_LOG_SECONDS)  # by node and verdict
        self._subscribers: list[Callable[[], None]] = []
        self._late_tasks: set[asyncio.Task[None]] = set()  # each waits for the response of an unanswered call

    @property
    def seconds_to_probe(self) -> float | None:
        """Seconds after which reveals are tried again although no block was produced, None if no node is held."""
        now = self.clock.monotonic()
        return send_policy.PROBE_SECONDS if any(n.penalty.is_held(now) for n in self.node_pool.nodes) else None

    async def stop(self) -> None:
        """Cancel the calls that continue without a response."""
        for task in self._late_tasks:
            task.cancel()
        await asyncio.gather(*self._late_tasks, return_exceptions=True)

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Register a callback for each event after which shares may have to be proven or sent again now.

        These are a requeued share, a send without a response, and a node that accepts reveals again.
        """
        self._subscribers.append(callback)

    def start_term(self) -> None:
        """Start sending on this host, after the lease was acquired.

        As after a restart, messages that may have been sent wait for a block.
        """
        self._sending_since = self.clock.monotonic()
        self._states.start_term()

    def forget_confirmed(self, share_id: int) -> None:
        """Drop the state of a confirmed share, including one revealed by another helper."""
        self.circuits.forget_share(share_id)
        first_sent_at = self._states.forget(share_id)
        if first_sent_at is not None:
            self.stats.confirmation.add_sample(self.clock.monotonic() - first_sent_at)

    # ---------------------------------------------------------------- selection

    async def send(self, share_id: int) -> None:
        """Send the prepared message of a share, unless it was confirmed in the meantime."""
        await self._run_exclusively(share_id, self._follow_up)

    async def reconcile(self) -> None:
        """Follow up unconfirmed reveals that need a decision now: at most `MAX_FOLLOW_UPS` of each kind."""
        head = self.node_pool.head
        if not self.lease.is_held or head is None:
            return
        height = head.height
        await self._follow_up_all(await self.store.list_follow_ups(height=height, limit=self._limit), height)
        if self.clock.monotonic() >= self._next_doubt_check:
            # A node that was alone in sync may have reported a false height, or a node reports a low one now.
            self._next_doubt_check = self.clock.monotonic() + DOUBT_CHECK_SECONDS
            share_ids = await self.store.list_doubtful_waits(
                height=height, greatest=self._greatest_height, limit=self._limit
            )
            await self._follow_up_all(share_ids, height)

    async def send_new(self) -> None:
        """Send messages that other hosts have prepared and that were never sent."""
        previous_ids: set[int] = set()
        while self.lease.is_held:
            share_ids = await self.store.list_follow_ups(height=NEVER_SENT_HEIGHT, limit=self._limit)
            if previous_ids.issuperset(share_ids):
                return  # the remaining ones cannot be sent now
            previous_ids, head = set(share_ids), self.node_pool.head
            await self._follow_up_all(share_ids, 0 if head is None else head.height)

    @property
    def _greatest_height(self) -> int:
        """The greatest height of a node in sync; the agreed one if more nodes are in sync than must agree."""
        pool = self.node_pool
        has_majority = len(pool.in_sync_nodes) > pool.needed
        return (pool.agreed_height or 0) if has_majority else pool.greatest_height

    @property
    def _limit(self) -> int:
        """How many shares to list, so that those that wait for a time do not displace all others."""
        return MAX_FOLLOW_UPS + self._states.waiting

    async def _follow_up_all(self, share_ids: Sequence[int], height: int) -> None:
        """Follow up reveals concurrently. An error with one share is logged and does not affect the others."""

        async def follow_up(share_id: int) -> None:
            try:
                await self._run_exclusively(share_id, self._follow_up)
            except Exception as error:
                log_error(log, "follow_up_failed", error)

        now = self.clock.monotonic()
        selected = self._states.select(share_ids, now=now, height=height, limit=MAX_FOLLOW_UPS)
        await gather_limited(selected, follow_up, CONCURRENT_RESENDS)

    async def _run_exclusively(self, share_id: int, handle: Callable[[SentReveal], Awaitable[Wait | None]]) -> None:
        """Run `handle` on a share's message, and record how long the share waits then.

        Does nothing if another task is processing the share.
        """
        if not self._states.claim(share_id, self.lease.fence):
            return
        wait: Wait | None = Wait(self.clock.monotonic(), NO_HEIGHT)  # after an error: after all others
        try:
            # Read at this point because the share may have been sent or proven again since it was selected.
            reveal = await self.store.get_sent_reveal(share_id)
            wait = None if reveal is None else await handle(reveal)
        finally:
            self._states.release(share_id, wait)

    # ---------------------------------------------------------------- steps

    async def _follow_up(self, reveal: SentReveal) -> Wait | None:
        """Carry out the next step of a reveal; one at a time until the chain has accepted its circuit."""
        circuit = reveal.row.circuit
        if self.circuits.is_unproven(circuit) and isinstance(self._decide(reveal), Send):
            try:
                async with asyncio.timeout(TRIAL_WAIT_SECONDS):
                    await self._trial_lock.acquire()
            except TimeoutError:
                return Wait(self.clock.monotonic(), 0)
            try:
                if self.circuits.is_unproven(circuit):
                    return await self._carry_out(reveal)
            finally:
                self._trial_lock.release()
        return await self._carry_out(reveal)

    async def _carry_out(self, reveal: SentReveal) -> Wait | None:
        """Send a reveal to the first node that takes it, or requeue its share. Returns how long the share waits."""
        message, sent = RevealMessage.from_tx(reveal.row.message), reveal
        for _ in range(1 + len(self.node_pool.nodes)):
            step, head = self._decide(reveal), self.node_pool.head
            if isinstance(step, ProveAnew):
                return await self._prove_anew(reveal, step.reason)
            if isinstance(step, Wait) or head is None:
                return step if isinstance(step, Wait) else None
            node = next(node for node in self.node_pool.nodes if node.name == step.node)
            if step.is_probe and not await self._is_ready(node, reveal.round_id):
                continue
            height = max(head.height, reveal.row.last_sent_height or 0)  # if false, time permits the next send
            first = height if reveal.row.first_sent_height is None else reveal.row.first_sent_height
            decide_height = send_policy.decide_height(first=first, last=height, outcome=None)
            if not self._may_send(reveal.share_id) or not await self.store.run(
                messages.mark_sending,
                reveal.share_id,
                height=height,
                endpoint=node.name,
                decide_height=decide_height,
            ):
                return None
            if not self._may_send(reveal.share_id):
                return None  # the lease ended meanwhile; the next holder treats it as a lost response
            row = sent.row._replace(sends=sent.row.sends + 1, first_sent_height=first, last_sent_height=height)
            sent = replace(sent, row=row)
            if await self._send_to(node, sent, message) or not self._is_current(reveal.share_id):
                return Wait(self.clock.monotonic() + RESEND_SECONDS, decide_height)
        return Wait(self.clock.monotonic() + send_policy.RECHECK_SECONDS, 0)

    def _decide(self, reveal: SentReveal) -> send_policy.Step:
        now, head, state = self.clock.monotonic(), self.node_pool.head, self._states.get(reveal.share_id)
        circuit, was_sent = reveal.row.circuit, reveal.row.sends > 0
        state.use_message(reveal.row.tx_hash)
        ended_at = state.ended_at
        if ended_at is None and (was_sent or not reveal.is_first_message):
            ended_at = self._sending_since  # it may have been sent before: it waits for a block produced since
        process = ProcessFacts(
            now=now,
            now_ms=int(self.clock.now() * 1000),
            head=None if head is None else head.height,
            agreed=self.node_pool.agreed_height or 0,
            greatest=self._greatest_height,
            began_at=self._sending_since if state.message_sent_at is None else state.message_sent_at,
            ended_at=ended_at,
            seconds_left=self.retries.seconds_left(reveal.round_id),
            is_circuit_refused=self.circuits.is_outdated(circuit, reveal.share_id, was_sent=was_sent),
            sent_before=state.sent_before,
            is_disputed=send_policy.is_disputed(reveal, state.verdicts.values(), self.node_pool.needed),
        )
        return send_policy.decide(reveal, process, self._node_facts(reveal, state, ended_at))

    def _node_facts(self, reveal: SentReveal, state: SendState, ended_at: float | None = None) -> list[NodeFacts]:
        pool = self.node_pool
        usable = pool.usable_nodes
        newer = {node.name for node in usable} if ended_at is None else pool.nodes_with_head_since(ended_at)
        now, tried = self.clock.monotonic(), {state.last_node, *state.unanswered}
        has_other = any(node.name not in tried and not node.penalty.is_held(now) for node in usable)
        is_turn_over = has_other and state.sends_in_a_row >= send_policy.MAX_SENDS_IN_A_ROW
        enough = 1 if is_turn_over and len(usable) <= pool.needed else pool.needed
        sent_at = state.sent_at or {reveal.row.last_endpoint or "": 0.0}
        circuit_refusers = self.circuits.refusers.get(reveal.row.circuit, ())
        return [
            NodeFacts(
                node.name,
                node.penalty,
                sent_at.get(node.name, -math.inf),
                state.verdicts.get(node.name),
                node.name in circuit_refusers,
                node.name in state.unanswered,
                (node.name in newer or len(newer) >= enough) and not (is_turn_over and node.name == state.last_node),
            )
            for node in usable
        ]

    async def _is_ready(self, node: Node, round_id: bytes) -> bool:
        """Ask a node that asked for a delay whether it is ready. One that does not respond is: it gets the reveal."""
        now, seconds_left = self.clock.monotonic(), self.retries.seconds_left(round_id)
        was_held = node.penalty.is_held(now, seconds_left)
        node.penalty = send_policy.begin_probe(node.penalty, now, seconds_left)
        try:
            is_ready = await node.client.unready_reason() is None
        except ChainError:
            is_ready = True
        if is_ready and not was_held:
            node.penalty = node.penalty._replace(hold_seconds=0.0)
        return is_ready

    async def _prove_anew(self, reveal: SentReveal, reason: str) -> Wait | None:
        spared_for = self._nodes_to_spare_for(reveal)
        is_refused = self._shows_refused_circuit(reveal, spared_for)
        node, result = (None, None) if is_refused else await self._find_result(reveal)
        if node is not None and result is not None:
            if shows_spent(result):
                # Counted in a block that is not read yet: a new proof would be refused.
                await self._record_outcome(reveal, Verdict.SPENT, node)
                return None
            is_bad_proof = classify_refusal(result.code, result.log) is Verdict.BAD_PROOF
            is_refused = is_bad_proof and self._serves_root(node, reveal)
        if is_refused:
            self._refuse_circuit(reveal, node)
        await self._requeue(reveal.share_id, reason)
        self._states.get(reveal.share_id).spared_for = spared_for
        return None

    def _nodes_to_spare_for(self, reveal: SentReveal) -> set[str]:
        """Nodes that checked a message with another root, and so have said nothing about its circuit.

        The next proof of the share is for the root of one of them, if its tree has the leaf.
        """
        usable = {node.name for node in self.node_pool.usable_nodes}
        other_roots = self._states.get(reveal.share_id).other_roots
        return (other_roots & usable) - self.circuits.refusers.get(reveal.row.circuit, set())

    def _shows_refused_circuit(self, reveal: SentReveal, spared_for: set[str]) -> bool:
        """Whether the responses to a message that was not confirmed show that the chain refuses its circuit.

        Every node that checked the proof refused it, and the others had ten blocks to accept it. The circuit is kept
        once for the sake of each node that checked it with another root.
        """
        circuit = reveal.row.circuit
        if not spared_for <= self._states.get(reveal.share_id).spared_for:
            return False
        has_refusers = bool(self.circuits.refusers.get(circuit))
        return self._is_refused(reveal) or (has_refusers and self.circuits.is_unproven(circuit))

    def _refuse_circuit(self, reveal: SentReveal, found_by: Node | None = None) -> None:
        """Prove the share with another circuit, and others too unless nodes dispute whether this share is counted.

        Args:
            found_by: the node that reports a block in which the proof was refused.
        """
        # The circuit is learnt from later blocks, so one node's height must not count.
        circuit, height = reveal.row.circuit, self.node_pool.agreed_height or 0
        verdicts = self._states.get(reveal.share_id).verdicts
        needed = min(self.node_pool.needed, len(self.node_pool.usable_nodes))
        if not send_policy.is_disputed(reveal, verdicts.values(), self.node_pool.needed):
            refusers = {name for name, verdict in verdicts.items() if verdict is Verdict.BAD_PROOF}
            refusers |= self.circuits.refusers.get(circuit, set()) | ({found_by.name} if found_by else set())
            self.circuits.record_refused(circuit, height, refusers, needed=needed)
        self.circuits.use_other(reveal.share_id, circuit)

    # ---------------------------------------------------------------- one send

    async def _send_to(self, node: Node, reveal: SentReveal, message: RevealMessage) -> bool:
        """Send a message to a node. Returns whether any byte may have left; if not, another node can be tried now.

        The number of sends in `reveal` includes this one.
        """
        state = self._states.get(reveal.share_id)
        if reveal.row.sends == 1:
            self.stats.count("broadcast")
            if reveal.is_first_message and not reveal.attempts:
                self.stats.lateness_broadcast.add_sample(self.clock.now() - reveal.due_ms / 1000)
        state.start_send(reveal.row.tx_hash, node.name, self.clock.monotonic())
        call = SendCall(node, message, self.clock)
        outcome = await call.wait()
        if outcome is None:
            # The message has left completely, so a block produced since then permits another send.
            state.ended_at = call.written_at
            state.unanswered.append(node.name)
            late = asyncio.create_task(self._await_late_outcome(reveal, call, state, state.fence))
            self._late_tasks.add(late)
            late.add_done_callback(self._late_tasks.discard)
            outcome = BroadcastOutcome(Verdict.AMBIGUOUS, log="no response yet, the call continues")
        else:
            self.stats.count(f"answer_{outcome.verdict.name.lower()}")
            if outcome.may_be_sent:
                state.ended_at = self.clock.monotonic()
        if self._is_current(reveal.share_id):
            await self._apply_outcome(reveal, outcome, node)
            if not outcome.may_be_sent:
                self.node_pool.start_backoff(node, outcome.log)
            if node.name in state.unanswered:
                self._notify()
        return outcome.may_be_sent

    async def _await_late_outcome(
        self, reveal: SentReveal, call: SendCall, state: SendState, fence: int | None
    ) -> None:
        """Wait for the outcome of an unanswered call, and apply it if the share was not sent again since."""
        try:
            try:
                outcome = await call.finish()
            finally:
                state.unanswered.remove(call.node.name)
            self.stats.count(f"answer_{outcome.verdict.name.lower()}")

            async def apply(latest: SentReveal) -> Wait | None:
                if (latest.row.sends, latest.row.tx_hash) == (reveal.row.sends, reveal.row.tx_hash):
                    await self._apply_outcome(latest, outcome, call.node)
                return None

            if self.lease.is_held and self.lease.fence == fence:
                if outcome.verdict is Verdict.ACCEPTED:
                    self.circuits.record_accepted(reveal.row.circuit, call.node.name)
                await self._run_exclusively(reveal.share_id, apply)
        except Exception as error:
            log_error(log, "late_response_failed", error)

    def _is_current(self, share_id: int) -> bool:
        """Whether the share was read under the current fencing token.

        If the lease was lost and acquired again in the meantime, another host may have sent the share or proven it
        again.
        """
        return self._states.get(share_id).fence == self.lease.fence

    def _may_send(self, share_id: int) -> bool:
        return self.lease.is_held and self._is_current(share_id)

    # ---------------------------------------------------------------- outcomes

    async def _apply_outcome(self, reveal: SentReveal, outcome: BroadcastOutcome, node: Node) -> None:
        was_held = node.penalty.hold_seconds > 0
        node.penalty = send_policy.next_penalty(node.penalty, outcome, self.clock.monotonic())
        if outcome.verdict in MESSAGE_REFUSALS and not self._serves_root(node, reveal):
            # The root, or its height, is another node's report: this refusal says nothing about the share.
            if outcome.verdict is Verdict.BAD_PROOF:
                state = self._states.get(reveal.share_id)
                state.use_message(reveal.row.tx_hash)
                state.other_roots.add(node.name)
            outcome = replace(outcome, verdict=Verdict.BEHIND)
        await self._record_outcome(reveal, outcome.verdict, node)
        if was_held and outcome.verdict is Verdict.ACCEPTED:
            self._states.clear_waits()  # the other shares wait for this node
            self._notify()
        if outcome.may_be_sent:
            await self._handle_outcome(reveal, outcome, node)

    async def _record_outcome(self, reveal: SentReveal, verdict: Verdict, node: Node) -> None:
        state = self._states.get(reveal.share_id)
        state.use_message(reveal.row.tx_hash)
        state.verdicts[node.name] = verdict
        assert reveal.row.first_sent_height is not None
        assert reveal.row.last_sent_height is not None
        height = send_policy.decide_height(
            first=reveal.row.first_sent_height,
            last=reveal.row.last_sent_height,
            outcome=verdict.name,
            is_spent=send_policy.is_spent_everywhere(self._node_facts(reveal, state)),
        )
        await self.store.run(messages.record_outcome, reveal.share_id, outcome=verdict.name, decide_height=height)

    async def _handle_outcome(self, reveal: SentReveal, outcome: BroadcastOutcome, node: Node) -> None:
        if outcome.verdict is Verdict.ACCEPTED:
            self.circuits.record_accepted(reveal.row.circuit, node.name)
        elif outcome.verdict not in MESSAGE_REFUSALS:
            if self._logged_verdicts.remember((node.name, outcome.verdict), self.clock.monotonic()):
                name = outcome.verdict.name
                log.info("reveal_not_accepted", endpoint=node.name, outcome=name, reason=outcome.log)
        elif outcome.verdict is Verdict.BAD_PROOF and not await self._is_proof_valid(reveal):
            await self._spend_attempt(reveal, outcome)
        else:
            await self._handle_refusal(reveal, outcome, node)

    async def _handle_refusal(self, reveal: SentReveal, outcome: BroadcastOutcome, node: Node) -> None:
        """Handle a refusal of a message that the local verifier accepts.

        The node may be broken or malicious, so a refusal is final only if enough nodes report it, and all that are in
        sync. Until then the same bytes are sent to the other nodes, one node per block.
        """
        circuit, state = reveal.row.circuit, self._states.get(reveal.share_id)
        refusals = {name for name, verdict in state.verdicts.items() if verdict in MESSAGE_REFUSALS}
        if outcome.verdict is Verdict.BAD_PROOF:
            self.circuits.refusers.setdefault(circuit, set()).add(node.name)
        # These nodes have accepted no proof of the circuit since, so their refusals of its other proofs count too.
        refusers = refusals | self.circuits.refusers.get(circuit, set())
        is_refused = all(other.name in refusers for other in self.node_pool.usable_nodes)
        if is_refused and self._is_refused(reveal):
            # Also if other nodes refuse it for other reasons: the chain may verify another circuit since an upgrade.
            self._refuse_circuit(reveal)
            self.circuits.refusers.pop(circuit, None)  # a later proof of it goes to every node again
            await self._requeue(reveal.share_id, f"the chain refuses {circuit} proofs")
        elif not is_refused or len(refusals) < self.node_pool.needed:
            log.warning("node_refused_reveal", endpoint=node.name, reason=outcome.log)
        elif len(refusals) > 1:
            await self.retries.fail_share(reveal.share_id, "broadcast", outcome.log)
        else:
            await self._spend_attempt(reveal, outcome)

    def _is_refused(self, reveal: SentReveal) -> bool:
        """Whether a node refused exactly this message for its proof. The local verifier accepts the proof."""
        state = self._states.get(reveal.share_id)
        return state.tx_hash == reveal.row.tx_hash and Verdict.BAD_PROOF in state.verdicts.values()

    async def _find_result(self, reveal: SentReveal) -> tuple[Node | None, TxResult | None]:
        """The result of exactly this accepted message in a block, with the node that reports it, if there is one.

        Some nodes check proofs only in blocks. A failure is preferred: a false node may report that the message was
        counted, and to prove the share again does no harm. No node is awaited for longer than the response to a send,
        because the sends of other shares wait.
        """
        counted: tuple[Node | None, TxResult | None] = (None, None)
        for node in self.node_pool.usable_nodes if reveal.row.last_outcome == Verdict.ACCEPTED.name else ():
            result: TxResult | None = None
            with anyio.move_on_after(node.client.response_wait):
                try:
                    result = await node.client.tx(reveal.row.tx_hash)
                except ChainError as error:
                    self.node_pool.record_error(node, error)
            if result is not None and not shows_spent(result):
                return node, result
            counted = counted if result is None else (node, result)
        return counted

    def _serves_root(self, node: Node, reveal: SentReveal) -> bool:
        """Whether a node checks the proof with the root that it was made for. That of an imported one is not known."""
        root, height = reveal.row.anchor_root, reveal.row.anchor_height
        return root is not None and self.trees.serves_root(reveal.round_id, node.name, height, root)

    async def _spend_attempt(self, reveal: SentReveal, outcome: BroadcastOutcome) -> None:
        await self.retries.spend_attempt(reveal.share_id, reveal, "broadcast", outcome.log)
        self._notify()

    async def _requeue(self, share_id: int, note: str) -> None:
        await self.store.run(shares.requeue, share_id, stage="broadcast", note=note)
        self._states.get(share_id).end_message(self.clock.monotonic())  # not if it could not be stored
        self.stats.count("retry_broadcast")
        self._notify()

    def _notify(self) -> None:
        for callback in self._subscribers:
            callback()

    async def _is_proof_valid(self, reveal: SentReveal) -> bool:
        """Check the proof with the local verifier, with the root that it was made for. True if it does not respond."""
        message, root = RevealMessage.from_tx(reveal.row.message), reveal.row.anchor_root
        assert root is not None, "see `_serves_root`"
        circuit = reveal.row.circuit
        try:
            statement = get_generation(circuit).create_statement(message, root)
            async with asyncio.timeout(VERIFY_SECONDS):
                return await self.verifier.verify(circuit, message.proof, statement)
        except (TimeoutError, ProverError, CircuitError):
            return True


class SendCall:
    """A send to one node. It starts immediately, and continues after the wait for its response has ended."""

    def __init__(self, node: Node, message: RevealMessage, clock: Clock) -> None:
        self.node = node
        self._clock = clock
        self._progress = RequestProgress(clock.monotonic)
        self._task = asyncio.create_task(node.client.broadcast(message, self._progress))

    @property
    def written_at(self) -> float | None:
        """Monotonic time at which the whole request was written; None before."""
        return self._progress.written_at

    async def wait(self) -> BroadcastOutcome | None:
        """Wait for the response, at most `node.client.response_wait` seconds. Cancels the call if this is cancelled.

        A call of which no byte has left by then, for example because the connection is not established, is cancelled:
        nothing was sent.

        Returns:
            The outcome; None if the whole request was written and the node has not responded. The call continues then.
        """
        seconds = self.node.client.response_wait
        timer = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({self._task, timer}, return_when=asyncio.FIRST_COMPLETED)
            if not self._task.done() and not self._progress.has_started:
                self._task.cancel()
                await asyncio.wait({self._task})
                if self._task.cancelled():  # the first byte may have left just before that
                    reason = f"no connection within {seconds:.3g} s"
                    return create_unanswered(reason, may_be_sent=self._progress.has_started)
            if not self._task.done() and self.written_at is not None:
                return None
            return await self._task
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        finally:
            timer.cancel()

    async def finish(self) -> BroadcastOutcome:
        """Wait for the outcome of the call."""
        return await self._task
