"""Selects the circuit generation that the chain verifies, and handles refused proofs.

A chain accepts exactly one generation. With `circuit = "auto"` the initial choice is the generation that this chain
accepted last, else the one for the node's version, else the newer one. It changes when the chain refuses a proof that
the local verifier accepts. Until the chain has accepted a reveal of the current generation, one reveal at a time is
proven and sent, and its result applies to the others. A configured generation never changes: if the chain refuses it,
dispatch is paused with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import structlog

from helper.clock import Clock
from helper.core.pause import PauseCause, PauseReason, text_of

log = structlog.get_logger("helper.reveal")

OLDER, NEWER = "k11", "k10"
GENERATIONS = (NEWER, OLDER)
PROOF_COST = {NEWER: 1.0, OLDER: 6.0}
"""Relative cost of a proof. Measured on two cores with one prover each: 0.29 s and 1.85 s."""
FIRST_NEWER_VERSION = (1, 3, 0)
"""First node version that verifies the newer generation."""
PAUSE_SECONDS = 60.0
"""Seconds of a pause after the chain refused every permitted generation. During it, one share is tried per block."""
TRIAL_WAIT_SECONDS = 10.0
"""Maximum seconds that other reveals wait for the result of a trial reveal.

After that, the next share may try the circuit, and a prepared message waits for a block.
"""
APPLIED_PAUSE_SECONDS = 10.0
"""Seconds that a pause reported by another host lasts unless it is reported again."""

_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


def circuit_for_version(version: str) -> str | None:
    """Return the generation that a node of this version verifies.

    None if the version cannot be parsed.
    """
    match = _VERSION.match(version)
    if match is None:
        return None
    return NEWER if tuple(int(part) for part in match.groups()) >= FIRST_NEWER_VERSION else OLDER


def other_circuit(circuit: str) -> str:
    """Return the other generation."""
    return OLDER if circuit == NEWER else NEWER


class CircuitSelector:
    """Selects the generation to prove with.

    Args:
        setting: "auto", "k10" or "k11".
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
        self.current = NEWER if self._is_auto else setting

    @staticmethod
    def storage_key(chain_id: str) -> str:
        """Return the key under which the accepted generation of a chain is stored."""
        return f"circuit:{chain_id}"

    def select_initial(self, chain_id: str, version: str, last_accepted: str | None) -> None:
        """Make the initial choice for a chain.

        Args:
            last_accepted: the generation that the chain accepted last, if any.
        """
        self._chain_id, self._accepted_circuit = chain_id, last_accepted
        if self._is_auto:
            known = last_accepted if last_accepted in GENERATIONS else None
            self.current = known or circuit_for_version(version) or NEWER
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
        """The generations whose keys the provers load, the current one first."""
        return (self.current, other_circuit(self.current)) if self._is_auto else (self.current,)

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

        Valid means that the local verifier accepts it. No attempt is spent. The next proof is of the other generation.
        If that is not permitted, or was refused for this share too, dispatch is paused, and one share is tried after
        each block: the chain may be upgraded, or its nodes repaired.
        """
        if not self._is_auto:
            self._pause(PauseCause.CIRCUIT_REFUSED.reason(circuit, other_circuit(circuit)))
            return
        tried = self._refused_by_share.setdefault(share_id, set())
        tried.add(circuit)
        if self.current == circuit:
            self.current = other_circuit(circuit)
            log.warning("circuit_refused", circuit=circuit)
        if tried.issuperset(GENERATIONS):
            self.forget(share_id)
            self._pause(PauseCause.BOTH_CIRCUITS_REFUSED.reason())

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
