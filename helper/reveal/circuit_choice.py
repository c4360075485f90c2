"""Chooses the circuit generation to prove with: the one that the chain accepts.

A chain accepts exactly one generation. With `circuit = "auto"` a reveal that the chain has counted names it: its proof
is valid for one of ours. Until there is one, one reveal at a time is sent as a trial, and a node's response to it
applies to the others. Responses of nodes change the choice only in memory, and a counted reveal corrects it. The first
choice is the generation that was counted last, else the one for the node's version. A configured generation never
changes: if the nodes refuse it, dispatch is paused with a reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set

import structlog

from helper.chain.commitment_trees import CommitmentTreeSync
from helper.chain.node_pool import NodePool
from helper.chain.reveal_transaction import RevealMessage, is_counted, parse_reveal
from helper.circuits import GENERATIONS, circuit_for_version, circuits_of_kind, default_circuit, is_newer_than_known
from helper.clock import Clock
from helper.core.refusals import PauseReason
from helper.errors import ChainError, ProverError, StoreError
from helper.reveal.prover_pool import ProverPool
from helper.store.store import Store
from proofs import CircuitError

log = structlog.get_logger("helper.reveal")

PAUSE_SECONDS = 60.0
"""Seconds of a pause after every permitted generation was refused. During it, one share is tried per block."""
TRIAL_WAIT_SECONDS = 10.0
"""Maximum seconds that other reveals wait for the result of a trial reveal; then the next share may try the circuit."""
MAX_DISPUTED = 4096
"""Maximum number of shares in memory whose circuit nodes dispute."""
APPLIED_PAUSE_SECONDS = 10.0
"""Seconds that a pause reported by another host lasts unless it is reported again."""


async def _is_counted(node_pool: NodePool, message: RevealMessage, height: int) -> bool:
    """Whether enough nodes report that exactly this message was counted in a block."""
    tx_hash, count = message.tx_hash(), 0
    for node in node_pool.usable_nodes:
        try:
            count += bool(is_counted(await node.client.tx(tx_hash), height))
        except ChainError as error:
            node_pool.record_error(node, error)
    return count >= node_pool.needed


def next_circuit(circuit: str) -> str:
    """Return the generation to try after one that was refused: the next older one for the same shares."""
    candidates = circuits_of_kind(GENERATIONS[circuit].kind)
    return candidates[(candidates.index(circuit) + 1) % len(candidates)]


class CircuitChoice:
    """Chooses the generation to prove with.

    Args:
        setting: "auto", or the name of a generation.
        store_counted: stores the generation that a chain has counted, as (key, value).

    Attributes:
        current: the generation to prove with.
        refusers: names of the nodes that refused a valid proof of each generation since they accepted one.
    """

    def __init__(self, setting: str, *, clock: Clock, store_counted: Callable[[str, str], Awaitable[None]]) -> None:
        self._is_auto = setting == "auto"
        self._clock = clock
        self._store_counted = store_counted
        self._chain_id = ""
        self._counted: str | None = None  # in a block
        self._accepted: str | None = None  # by a node
        self._refused = dict[str, Set[str]]()  # since an acceptance: the nodes that refused each generation
        self._height = 0  # greatest height at which the choice was confirmed or refused, or a reveal was examined
        self._paused_until: float | None = None
        self._pause_reason: str | None = None
        self._may_try = False  # whether a block was produced since the last refusal
        self._disputed: dict[int, str] = {}  # by share: the generation for its next proof
        self.refusers: dict[str, set[str]] = {}
        self.current = default_circuit() if self._is_auto else setting

    @staticmethod
    def storage_key(chain_id: str) -> str:
        """Return the key under which the generation is stored that a chain has counted."""
        return f"circuit:{chain_id}"

    def restore(self, last_counted: str | None) -> None:
        """Choose the generation that was counted last, before the chain can be asked for its version."""
        if self._is_auto and last_counted in GENERATIONS:
            self.current = last_counted

    def select_initial(self, chain_id: str, version: str, last_counted: str | None) -> None:
        """Make the first choice for a chain. A version that this release does not know may verify another circuit."""
        known = last_counted if last_counted in GENERATIONS else None
        self._chain_id, self._counted = chain_id, known
        if self._is_auto:
            self.current = known or circuit_for_version(version) or default_circuit()
            if is_newer_than_known(version):
                self._counted = None
                log.warning("chain_version_newer_than_known", version=version, circuit=self.current)
        log.info("circuit_selected", circuit=self.current, chain_id=chain_id, remembered=last_counted, version=version)

    # ------------------------------------------------------------------ cluster state

    @property
    def shared_key(self) -> str | None:
        """Key under which the sender publishes its choice; None before the chain is known."""
        return f"circuit.now:{self._chain_id}" if self._chain_id else None

    def publish_state(self) -> str:
        """Return the state that the sender publishes: the generation, "+" if it was accepted, the pause reason."""
        mark = "" if self.is_current_unproven else "+"
        return f"{self.current}{mark} {self.pause_reason or ''}".strip()

    def apply_state(self, state: str | None) -> None:
        """Apply the state published by the sender, which alone learns what the chain accepts."""
        name, _, reason = (state or "").partition(" ")
        circuit = name.removesuffix("+")
        if self._is_auto and circuit in GENERATIONS:
            self._accepted = circuit if name.endswith("+") else None
            if circuit != self.current:
                log.info("circuit_changed_by_sender", circuit=circuit)
                self.current = circuit
        if reason:
            self._paused_until = self._clock.monotonic() + APPLIED_PAUSE_SECONDS
            self._pause_reason = reason
            self._may_try = False
        elif state is not None:
            self._paused_until = None

    # ------------------------------------------------------------------ the choice

    @property
    def is_current_unproven(self) -> bool:
        """Whether one reveal must try the current generation first."""
        return self.is_unproven(self.current)

    def is_unproven(self, circuit: str) -> bool:
        """Whether neither a block nor a node is known to accept this generation. A configured one counts as known."""
        return self._is_auto and bool(self._chain_id) and circuit not in {self._counted, self._accepted}

    @property
    def required_circuits(self) -> tuple[str, ...]:
        """The generations that the provers use, the current one first."""
        if not self._is_auto:
            return (self.current,)
        return (self.current, *(name for name in reversed(GENERATIONS) if name != self.current))

    def use_other(self, share_id: int, circuit: str) -> None:
        """Prove a share with the next generation, because a node refused its proof of this one.

        Another node may have accepted that proof and may be right, whatever is the choice for other shares: a false
        node can refuse the chain's circuit and accept another one. Each share therefore uses them in turn.
        """
        if self._is_auto:
            self._disputed.pop(share_id, None)
            self._disputed[share_id] = next_circuit(circuit)
            if len(self._disputed) > MAX_DISPUTED:
                del self._disputed[next(iter(self._disputed))]

    def forget_share(self, share_id: int) -> None:
        """Drop what is known of a confirmed share."""
        self._disputed.pop(share_id, None)

    def circuit_for(self, kind: str, share_id: int | None = None) -> str:
        """Return the generation to prove a share of this kind with.

        Raises:
            CircuitError: no permitted generation proves such shares.
        """
        if share_id in self._disputed:
            return self._disputed[share_id]
        if GENERATIONS[self.current].kind == kind:
            return self.current
        candidates = circuits_of_kind(kind) if self._is_auto else ()
        if not candidates:
            raise CircuitError("no circuit for this kind of share")
        return candidates[0]

    def is_outdated(self, circuit: str, share_id: int, *, was_sent: bool) -> bool:
        """Whether a share that was proven with this generation is now proven with another one.

        A message that was never sent may be of another host, which does not know of the refusals of this share.
        """
        generation = GENERATIONS.get(circuit)
        if generation is None:
            return True
        is_of_others = not was_sent and circuit == self.circuit_for(generation.kind)
        return not is_of_others and circuit != self.circuit_for(generation.kind, share_id)

    @property
    def pause_reason(self) -> str | None:
        """Why dispatch is paused because of the circuit, or None."""
        is_paused = self._paused_until is not None and self._clock.monotonic() < self._paused_until
        return self._pause_reason if is_paused else None

    @property
    def blocked_reason(self) -> str | None:
        """Why no share may be proven now, or None. During a pause, one share may be tried after each block."""
        return None if self._may_try else self.pause_reason

    def note_block(self) -> None:
        """Permit one share during a pause, because there is a new block: the nodes may have recovered."""
        self._may_try = self.pause_reason is not None

    def record_accepted(self, circuit: str, node: str) -> None:
        """Record that a node accepted a proof of this generation, and end a pause.

        A false node may accept every proof, so the choice does not change to a generation that more nodes refuse.
        """
        self._end_refusals()
        self.refusers.get(circuit, set()).discard(node)
        refused_by = {name: len(self.refusers.get(name, ())) for name in (circuit, self.current)}
        if self._is_auto and circuit != self._accepted and refused_by[circuit] <= refused_by[self.current]:
            self._accepted = circuit
            self.current = self.current if self.current == self._counted else circuit
            log.info("circuit_accepted", circuit=circuit, chain_id=self._chain_id)

    async def record_counted(self, circuit: str, height: int) -> None:
        """Record that the chain counted a proof of this generation in an agreed block."""
        self._end_refusals()
        self.refusers.pop(circuit, None)
        if self._is_auto and (circuit, circuit) != (self._counted, self.current):
            await self._store_counted(self.storage_key(self._chain_id), circuit)
            self._counted = self.current = circuit
            log.info("circuit_counted", circuit=circuit, chain_id=self._chain_id, height=height)

    def _end_refusals(self) -> None:
        self._paused_until = None
        self._refused.clear()

    def record_refused(self, circuit: str, height: int, nodes: Set[str], *, needed: int) -> None:
        """Record that the chain seems to refuse valid proofs of this generation, and choose the next one.

        Valid means that the local verifier accepts them. No attempt is spent. If no other is permitted, or enough nodes
        have refused all of them, dispatch is paused, and one share is tried after each block: the chain may be
        upgraded, or its nodes repaired. A false node refuses one, and the others another one.

        Args:
            nodes: names of the nodes that have refused it.
            needed: number of nodes that must refuse every generation.
        """
        self._height = max(self._height, height)
        self._accepted = None if circuit == self._accepted else self._accepted
        if not self._is_auto:
            self._pause(PauseReason.CIRCUIT_REFUSED.format(circuit, next_circuit(circuit)))
            return
        self._refused[circuit] = self._refused.get(circuit, frozenset()) | nodes
        if self.current == circuit:
            self.current = next_circuit(circuit)
            log.warning("circuit_refused", circuit=circuit)
        candidates = circuits_of_kind(GENERATIONS[circuit].kind)
        refused_all = [self._refused.get(name, frozenset()) for name in candidates]
        if len(set.intersection(*map(set, refused_all))) >= needed:
            self._refused.clear()
            names = "both circuits" if len(candidates) == 2 else ", ".join(candidates)
            self._pause(PauseReason.EVERY_CIRCUIT_REFUSED.format(names))

    def _pause(self, reason: str) -> None:
        is_known = self.pause_reason == reason  # another host may have reported the same text
        self._paused_until = self._clock.monotonic() + PAUSE_SECONDS
        self._pause_reason = reason
        self._may_try = False
        if not is_known:
            advice = "Check [prover] circuit and the nodes: `svote-helper doctor`."
            log.error("valid_proofs_refused", reason=reason, advice=advice)

    # ------------------------------------------------------------------ counted reveals

    async def learn(
        self, height: int, *, node_pool: NodePool, store: Store, trees: CommitmentTreeSync, verifier: ProverPool
    ) -> None:
        """Learn the generation from a reveal that was counted in the agreed block at `height`, if it is not known.

        The block is read once more, because an RPC has its results only. The store has the nullifiers that are counted
        by agreement, enough nodes report this message as counted, and the proof is checked here, so a false node can
        only withhold it.
        """
        if not self._is_auto or not self._chain_id or self.current == self._counted or height <= self._height:
            return
        try:
            block = await node_pool.call(lambda client: client.block(height), min_height=height)
            for message in filter(None, map(parse_reveal, block.txs if block is not None else ())):
                anchor = trees.anchor_at(message.round_id, message.anchor_height)
                root = verifier.root_of(message.proof) or (None if anchor is None else anchor.root)
                if root is None or not await store.is_spent(message.round_id, message.nullifier):
                    continue
                if not await _is_counted(node_pool, message, height):
                    continue  # the same bytes may also be in a later block, where they failed
                for circuit in self.required_circuits:
                    if len(message.enc_share) != GENERATIONS[circuit].enc_share_bytes:
                        continue
                    statement = GENERATIONS[circuit].create_statement(message, root)
                    if await verifier.verify(circuit, message.proof, statement):
                        await self.record_counted(circuit, height)
                        return
            self._height = height
        except (ChainError, ProverError, CircuitError, StoreError) as error:
            log.debug("circuit_not_learnt", height=height, reason=str(error))
