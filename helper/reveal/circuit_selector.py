"""Selects the circuit generation that the chain verifies, and handles refused proofs.

A chain accepts exactly one generation. With `circuit = "auto"` the initial choice is the generation that this chain
accepted last, else the one for the node's version, else that of the newest version. It changes when the chain refuses a
proof that the local verifier accepts. Until the chain has accepted a reveal of the current generation, one reveal at a
time is proven and sent, and its result applies to the others. This is repeated after a start with a chain version that
this release does not know, because such a chain may verify another circuit than before. A configured generation never
changes: if the chain refuses it, dispatch is paused with a reason.

A share is only proven with generations of its kind (`helper.circuits`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from helper.circuits.registry import GENERATIONS, circuit_for_version, circuits_of_kind, default_circuit
from helper.circuits.versions import is_newer_than_known
from helper.clock import Clock
from helper.core.pause import PauseCause, PauseReason, text_of
from proofs import CircuitError

log = structlog.get_logger("helper.reveal")

PAUSE_SECONDS = 60.0
"""Seconds of a pause after the chain refused every permitted generation. During it, one share is tried per block."""
TRIAL_WAIT_SECONDS = 10.0
"""Maximum seconds that other reveals wait for the result of a trial reveal.

After that, the next share may try the circuit, and a prepared message waits for a block.
"""
APPLIED_PAUSE_SECONDS = 10.0
"""Seconds that a pause reported by another host lasts unless it is reported again."""


def next_circuit(circuit: str) -> str:
    """Return the generation to try after one that the chain refused: the next older one for the same shares."""
    candidates = circuits_of_kind(GENERATIONS[circuit].kind)
    return candidates[(candidates.index(circuit) + 1) % len(candidates)]


class CircuitSelector:
    """Selects the generation to prove with.

    Args:
        setting: "auto", or the name of a generation.
        clock: measures pauses.
        store_accepted: stores the generation that a chain accepted, as (key, value).

    Attributes:
        current: the generation to prove with.
    """

    def __init__(self, setting: str, *, clock: Clock, store_accepted: Callable[[str, str], Awaitable[None]]) -> None:
        self._is_auto = setting == "auto"
        self._clock = clock
        self._store_accepted = store_accepted
        self._chain_id = ""
        self._accepted_circuit: str | None = None
        self._refused_by_share: dict[int, set[str]] = {}
        self._paused_until: float | None = None
        self._pause_reason: PauseReason | None = None
        self._may_try = False  # whether a block was produced since the last refusal
        self.current = default_circuit() if self._is_auto else setting

    @staticmethod
    def storage_key(chain_id: str) -> str:
        """Return the key under which the accepted generation of a chain is stored."""
        return f"circuit:{chain_id}"

    def restore(self, last_accepted: str | None) -> None:
        """Choose the generation that the chain accepted last, before the chain can be asked for its version."""
        if self._is_auto and last_accepted in GENERATIONS:
            self.current = last_accepted

    def select_initial(self, chain_id: str, version: str, last_accepted: str | None) -> None:
        """Make the initial choice for a chain.

        Args:
            last_accepted: the generation that the chain accepted last, if any.
        """
        self._chain_id, self._accepted_circuit = chain_id, last_accepted
        if self._is_auto:
            known = last_accepted if last_accepted in GENERATIONS else None
            self.current = known or circuit_for_version(version) or default_circuit()
            if is_newer_than_known(version):
                self._accepted_circuit = None
                log.warning("chain_version_newer_than_known", version=version, circuit=self.current)
        log.info("circuit_selected", circuit=self.current, chain_id=chain_id, remembered=last_accepted, version=version)

    # ------------------------------------------------------------------ cluster state

    @property
    def shared_key(self) -> str | None:
        """Key under which the sender publishes its choice.

        None before the chain is known.
        """
        return f"circuit.now:{self._chain_id}" if self._chain_id else None

    @property
    def accepted_key(self) -> str:
        """Key under which the generation that this chain accepted last is stored."""
        return self.storage_key(self._chain_id)

    def publish_state(self) -> str:
        """Return the state that the sender publishes.

        It is the generation and the pause reason, if any.
        """
        return f"{self.current} {text_of(self.pause_reason) or ''}".strip()

    def apply_state(self, state: str | None, accepted: str | None = None) -> None:
        """Apply the state published by the sender.

        Only the sender learns what the chain accepts. A configured generation does not change. A pause lasts while
        the sender reports it.

        Args:
            state: the value under `shared_key`.
            accepted: the value under `accepted_key`: the generation that the chain accepted last.
        """
        if accepted in GENERATIONS:
            self._accepted_circuit = accepted
        circuit, _, reason = (state or "").partition(" ")
        if self._is_auto and circuit in GENERATIONS and circuit != self.current:
            log.info("circuit_changed_by_sender", circuit=circuit)
            self.current = circuit
        if reason:
            self._paused_until = self._clock.monotonic() + APPLIED_PAUSE_SECONDS
            self._pause_reason = PauseCause.REFUSAL_SEEN_BY_SENDER.reason(reason)
            self._may_try = False
        elif state is not None:
            self._paused_until = None

    @property
    def is_current_unproven(self) -> bool:
        """Whether the chain has not accepted the current generation yet.

        If so, one reveal must try it.
        """
        return self.is_unproven(self.current)

    def is_unproven(self, circuit: str) -> bool:
        """Whether the chain is not known to accept this generation. A configured generation counts as known."""
        return self._is_auto and bool(self._chain_id) and circuit != self._accepted_circuit

    @property
    def required_circuits(self) -> tuple[str, ...]:
        """The generations that the provers use, the current one first."""
        if not self._is_auto:
            return (self.current,)
        return (self.current, *(name for name in reversed(GENERATIONS) if name != self.current))

    def circuit_for(self, kind: str) -> str:
        """Return the generation to prove a share of this kind with.

        Raises:
            CircuitError: no permitted generation proves such shares.
        """
        if GENERATIONS[self.current].kind == kind:
            return self.current
        candidates = circuits_of_kind(kind) if self._is_auto else ()
        if not candidates:
            raise CircuitError("no circuit for this kind of share")
        return candidates[0]

    def is_outdated(self, circuit: str) -> bool:
        """Whether shares that were proven with this generation are now proven with another one."""
        generation = GENERATIONS.get(circuit)
        return generation is None or self.circuit_for(generation.kind) != circuit

    @property
    def pause_reason(self) -> PauseReason | None:
        """Why dispatch is paused because of the circuit, or None."""
        if self._paused_until is None or self._clock.monotonic() >= self._paused_until:
            return None
        return self._pause_reason

    @property
    def blocked_reason(self) -> PauseReason | None:
        """Why no share may be proven now, or None. During a pause, one share may be tried after each block."""
        return None if self._may_try else self.pause_reason

    def note_block(self) -> None:
        """Permit one share during a pause, because there is a new block.

        The nodes may have recovered; without this, all due shares would wait until the pause ends.
        """
        self._may_try = self.pause_reason is not None

    async def record_accepted(self, circuit: str) -> None:
        """Record that the chain accepted a proof of this generation, and end a pause."""
        self._paused_until = None
        if not self._is_auto or circuit == self._accepted_circuit:
            return
        await self._store_accepted(self.storage_key(self._chain_id), circuit)
        self._accepted_circuit = self.current = circuit
        log.info("circuit_accepted", circuit=circuit, chain_id=self._chain_id)

    def record_refused(self, share_id: int, circuit: str) -> None:
        """Record that the chain refused a valid proof of this generation.

        Valid means that the local verifier accepts it. No attempt is spent. The next proof is of the next generation.
        If that is not permitted, or was refused for this share too, dispatch is paused, and one share is tried after
        each block: the chain may be upgraded, or its nodes repaired.
        """
        if not self._is_auto:
            self._pause(PauseCause.CIRCUIT_REFUSED.reason(circuit, next_circuit(circuit)))
            return
        tried = self._refused_by_share.setdefault(share_id, set())
        tried.add(circuit)
        if self.current == circuit:
            self.current = next_circuit(circuit)
            log.warning("circuit_refused", circuit=circuit)
        candidates = circuits_of_kind(GENERATIONS[circuit].kind)
        if tried.issuperset(candidates):
            self.forget(share_id)
            self._pause(PauseCause.EVERY_CIRCUIT_REFUSED.reason(_join_names(candidates)))

    def _pause(self, reason: PauseReason) -> None:
        is_known = text_of(self.pause_reason) == str(reason)  # another host may have reported the same text
        self._paused_until = self._clock.monotonic() + PAUSE_SECONDS
        self._pause_reason = reason
        self._may_try = False
        if not is_known:
            log.error("valid_proofs_refused", reason=str(reason))

    def forget(self, share_id: int) -> None:
        """Drop the refusals of a share."""
        self._refused_by_share.pop(share_id, None)


def _join_names(circuits: tuple[str, ...]) -> str:
    return "both circuits" if len(circuits) == 2 else ", ".join(circuits)
