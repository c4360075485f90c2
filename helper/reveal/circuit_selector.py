"""Selects the circuit generation that the chain verifies, and handles refused proofs.

A chain accepts exactly one generation. With `circuit = "auto"` the initial choice is the generation that this chain
accepted last, else the one for the node's version, else the newer one. It changes when the chain refuses a proof that
our own verifier accepts. Until the chain has accepted a reveal of the current generation, one reveal at a time is
proven and sent, and its result decides for the others. A configured generation never changes: if the chain refuses
it, dispatch is paused with a reason.
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
COST = {NEWER: 1.0, OLDER: 6.0}
"""Relative cost of a proof. Measured on two cores with a prover on each: 0.29 s and 1.85 s."""
FIRST_WITH_NEWER = (1, 3, 0)
"""First version of the chain's node that verifies the newer generation."""
PAUSE_SECONDS = 60.0
"""Length of a pause after the chain refused every permitted generation. One share is tried at each block meanwhile."""
TRIAL_SECONDS = 10.0
"""How long other reveals wait for the result of the one that tries a circuit.

Then the next share may try the circuit, and a prepared message waits for a block.
"""
HEARD_SECONDS = 10.0
"""How long a pause that another host reported lasts unless it is reported again."""

_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


def by_version(version: str) -> str | None:
    """Return the generation that a node of this version verifies; None if the version cannot be parsed."""
    match = _VERSION.match(version)
    if match is None:
        return None
    return NEWER if tuple(int(part) for part in match.groups()) >= FIRST_WITH_NEWER else OLDER


def other(circuit: str) -> str:
    """Return the other generation."""
    return OLDER if circuit == NEWER else NEWER


class CircuitSelector:
    """Selects the generation to prove with.

    Args:
        setting: "auto", "k10" or "k11".
        clock: measures pauses.
        remember: stores the generation that a chain accepted, as (key, value).

    Attributes:
        current: the generation to prove with.
    """

    def __init__(self, setting: str, *, clock: Clock, remember: Callable[[str, str], Awaitable[None]]) -> None:
        self._auto = setting == "auto"
        self._clock = clock
        self._remember = remember
        self._chain_id = ""
        self._remembered: str | None = None
        self._refused: dict[int, set[str]] = {}
        self._paused_until: float | None = None
        self._pause_reason: PauseReason | None = None
        self._may_try = False  # whether a block came since the last refusal
        self.current = NEWER if self._auto else setting

    @staticmethod
    def key(chain_id: str) -> str:
        """Return the key under which the accepted generation of a chain is stored."""
        return f"circuit:{chain_id}"

    def begin(self, chain_id: str, version: str, remembered: str | None) -> None:
        """Make the initial choice for a chain.

        Args:
            remembered: the generation that the chain accepted last, if any.
        """
        self._chain_id, self._remembered = chain_id, remembered
        if self._auto:
            known = remembered if remembered in GENERATIONS else None
            self.current = known or by_version(version) or NEWER
        log.info("circuit_selected", circuit=self.current, chain_id=chain_id, remembered=remembered, version=version)

    # ------------------------------------------------------------------ several hosts

    @property
    def shared_key(self) -> str | None:
        """Key under which the sending host publishes its choice; None before the chain is known."""
        return f"circuit.now:{self._chain_id}" if self._chain_id else None

    @property
    def accepted_key(self) -> str:
        """Key under which the generation that this chain accepted last is stored."""
        return self.key(self._chain_id)

    def tell(self) -> str:
        """Return the state that the sending host publishes: the generation and the pause reason, if any."""
        return f"{self.current} {text_of(self.paused) or ''}".strip()

    def hear(self, told: str | None, accepted: str | None = None) -> None:
        """Apply the state published by the sending host, the only one that sees what the chain accepts.

        A configured generation does not change. A pause lasts as long as it is repeated.

        Args:
            told: the value under `shared_key`.
            accepted: the value under `accepted_key`: the generation that the chain accepted last.
        """
        if accepted in GENERATIONS:
            self._remembered = accepted
        circuit, _, reason = (told or "").partition(" ")
        if self._auto and circuit in GENERATIONS and circuit != self.current:
            log.info("circuit_changed_by_sender", circuit=circuit)
            self.current = circuit
        if reason:
            self._paused_until = self._clock.monotonic() + HEARD_SECONDS
            self._pause_reason = PauseCause.REFUSAL_SEEN_BY_SENDER.reason(reason)
            self._may_try = False
        elif told is not None:
            self._paused_until = None

    @property
    def is_guess(self) -> bool:
        """Whether the chain has not accepted the current generation yet, so that one reveal must try it."""
        return self.is_unproven(self.current)

    def is_unproven(self, circuit: str) -> bool:
        """Whether the chain is not known to accept this generation. A configured generation counts as known."""
        return self._auto and bool(self._chain_id) and circuit != self._remembered

    @property
    def needed(self) -> tuple[str, ...]:
        """The generations whose keys the provers load, the current one first."""
        return (self.current, other(self.current)) if self._auto else (self.current,)

    @property
    def paused(self) -> PauseReason | None:
        """Why dispatch is paused because of the circuit, or None."""
        if self._paused_until is None or self._clock.monotonic() >= self._paused_until:
            return None
        return self._pause_reason

    @property
    def blocked(self) -> PauseReason | None:
        """Why no share may be proven now, or None. During a pause, one share may be tried after each block."""
        return None if self._may_try else self.paused

    def note_block(self) -> None:
        """Permit one share during a pause, because a new block was made.

        The nodes may have recovered; without this, all due shares would wait until the pause ends.
        """
        self._may_try = self.paused is not None

    async def accepted(self, circuit: str) -> None:
        """Record that the chain accepted a proof of this generation, and end a pause."""
        self._paused_until = None
        if not self._auto or circuit == self._remembered:
            return
        await self._remember(self.key(self._chain_id), circuit)
        self._remembered = self.current = circuit
        log.info("circuit_accepted", circuit=circuit, chain_id=self._chain_id)

    def refused(self, share_id: int, circuit: str) -> None:
        """Record that the chain refused a proof of this generation that our own verifier accepts.

        No attempt is spent. The next proof is of the other generation. If that is not permitted, or was refused for
        this share too, dispatch is paused, and one share is tried after each block: the chain may be upgraded, or its
        nodes repaired.
        """
        if not self._auto:
            self._pause(PauseCause.CIRCUIT_REFUSED.reason(circuit, other(circuit)))
            return
        tried = self._refused.setdefault(share_id, set())
        tried.add(circuit)
        if self.current == circuit:
            self.current = other(circuit)
            log.warning("circuit_refused", circuit=circuit)
        if tried.issuperset(GENERATIONS):
            self.forget(share_id)
            self._pause(PauseCause.BOTH_CIRCUITS_REFUSED.reason())

    def _pause(self, reason: PauseReason) -> None:
        is_known = text_of(self.paused) == str(reason)  # another host may have reported the same text
        self._paused_until = self._clock.monotonic() + PAUSE_SECONDS
        self._pause_reason = reason
        self._may_try = False
        if not is_known:
            log.error("valid_proofs_refused", reason=str(reason))

    def forget(self, share_id: int) -> None:
        """Drop the refusals of a share."""
        self._refused.pop(share_id, None)
