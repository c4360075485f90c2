"""Which circuit generation this chain takes, and what to do when it refuses a proof.

A chain accepts exactly one generation. With `circuit = "auto"` the choice starts from what this chain was seen to
accept, else from the node's version, else from the newer generation; it changes when the chain refuses a proof that
our own verifier accepts. Until the chain has accepted a reveal of the current generation, the choice is a guess, and
one reveal at a time is proven and sent: the first answer decides for the others. A choice set by hand never changes:
the queue pauses and says why.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import structlog

from helper.clock import Clock

log = structlog.get_logger("helper.circuits")

OLDER, NEWER = "k11", "k10"
GENERATIONS = (NEWER, OLDER)
COST = {NEWER: 1.0, OLDER: 6.0}
"""What a proof costs, in proofs of the newer generation: 0.29 s and 1.85 s, with a prover on each of two cores."""
FIRST_WITH_NEWER = (1, 3, 0)
"""Version of the chain's node from which on it verifies the newer generation."""
PAUSE_SECONDS = 60.0
"""How long a refusal of all that may be proven pauses the queue. One share is tried at each block meanwhile."""
HEARD_SECONDS = 10.0
"""For how long a pause that another host told of holds unless it is told again."""

_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


def by_version(version: str) -> str | None:
    """The generation that a node of this version verifies; None where the version tells nothing."""
    match = _VERSION.match(version)
    if match is None:
        return None
    return NEWER if tuple(int(part) for part in match.groups()) >= FIRST_WITH_NEWER else OLDER


def other(circuit: str) -> str:
    """The generation that this one is not."""
    return OLDER if circuit == NEWER else NEWER


class CircuitSelector:
    """The generation to prove with now.

    Args:
        setting: "auto", "k10" or "k11".
        clock: for the pause.
        remember: keeps what a chain accepted, as (key, value).
    """

    def __init__(self, setting: str, *, clock: Clock, remember: Callable[[str, str], Awaitable[None]]) -> None:
        self._auto = setting == "auto"
        self._clock = clock
        self._remember = remember
        self._chain_id = ""
        self._remembered: str | None = None
        self._refused: dict[int, set[str]] = {}
        self._paused_until: float | None = None
        self._pause_reason = ""
        self._may_try = False  # whether a block came since the last refusal
        self.current = NEWER if self._auto else setting

    @staticmethod
    def key(chain_id: str) -> str:
        """Under which name the choice for a chain is remembered."""
        return f"circuit:{chain_id}"

    def begin(self, chain_id: str, version: str, remembered: str | None) -> None:
        """Choose for a chain, once it is known: what it accepted before, its version, the newer one."""
        self._chain_id, self._remembered = chain_id, remembered
        if self._auto:
            known = remembered if remembered in GENERATIONS else None
            self.current = known or by_version(version) or NEWER
        log.info("circuit chosen", circuit=self.current, chain_id=chain_id, remembered=remembered, version=version)

    # ------------------------------------------------------------------ several hosts

    @property
    def shared_key(self) -> str | None:
        """Under which name hosts tell each other what they prove with now; None before the chain is known."""
        return f"circuit.now:{self._chain_id}" if self._chain_id else None

    @property
    def accepted_key(self) -> str:
        """Key under which the generation that this chain accepted last is kept."""
        return self.key(self._chain_id)

    def tell(self) -> str:
        """What the host that sends tells those that prove: the generation, and why the queue is paused, if it is."""
        return f"{self.current} {self.paused or ''}".strip()

    def hear(self, told: str | None, accepted: str | None = None) -> None:
        """Take over what the host that sends has written: it alone sees what the chain accepts and refuses.

        A generation set by hand stays. A pause holds for as long as it is repeated.

        Args:
            told: the value under `shared_key`.
            accepted: the value under `key`: the generation that the chain accepted last.
        """
        if accepted in GENERATIONS:
            self._remembered = accepted
        circuit, _, reason = (told or "").partition(" ")
        if self._auto and circuit in GENERATIONS and circuit != self.current:
            log.info("the host that sends has changed the circuit", circuit=circuit)
            self.current = circuit
        if reason:
            self._paused_until, self._pause_reason = self._clock.monotonic() + HEARD_SECONDS, reason
            self._may_try = False
        elif told is not None:
            self._paused_until = None

    @property
    def is_guess(self) -> bool:
        """Whether the chain has not accepted the current generation yet, so that one reveal has to try it."""
        return self.is_unproven(self.current)

    def is_unproven(self, circuit: str) -> bool:
        """Whether the chain is not known to accept this generation. A generation set by hand is taken as known."""
        return self._auto and bool(self._chain_id) and circuit != self._remembered

    @property
    def needed(self) -> tuple[str, ...]:
        """The generations whose keys the provers keep warm, the current one first."""
        return (self.current, other(self.current)) if self._auto else (self.current,)

    @property
    def paused(self) -> str | None:
        """Why the queue is paused on account of the circuit, or None."""
        if self._paused_until is None or self._clock.monotonic() >= self._paused_until:
            return None
        return self._pause_reason

    @property
    def blocked(self) -> str | None:
        """Why no share may be proven now, or None: the queue is paused, and no block came since the last refusal."""
        return None if self._may_try else self.paused

    def note_block(self) -> None:
        """A block came: where the queue is paused, one share may try again. A node that refused all may be well again,
        and a pause by the clock alone would hold up all due shares for the rest of it.
        """
        self._may_try = self.paused is not None

    async def accepted(self, circuit: str) -> None:
        """The chain took a proof of this generation."""
        self._paused_until = None
        if not self._auto or circuit == self._remembered:
            return
        await self._remember(self.key(self._chain_id), circuit)
        self._remembered = self.current = circuit
        log.info("the chain accepts this circuit", circuit=circuit, chain_id=self._chain_id)

    def refused(self, share_id: int, circuit: str) -> None:
        """The chain refused a proof of this generation that our own verifier accepts; no attempt is spent on it.

        The next proof is of the other generation. Where that is not allowed, or was refused for this share too, the
        queue pauses: a share is tried again at the next block, as chains are upgraded and nodes repaired.
        """
        if not self._auto:
            self._pause(
                f"the chain refuses {circuit} proofs that are valid: it runs the other circuit; "
                f'set [prover] circuit = "auto" or "{other(circuit)}"'
            )
            return
        tried = self._refused.setdefault(share_id, set())
        tried.add(circuit)
        if self.current == circuit:
            self.current = other(circuit)
            log.warning("the chain refuses this circuit, trying the other", circuit=circuit)
        if tried.issuperset(GENERATIONS):
            self.forget(share_id)
            self._pause("the chain refuses valid proofs of both circuits: ask whether its nodes are well")

    def _pause(self, reason: str) -> None:
        is_known = self.paused == reason
        self._paused_until = self._clock.monotonic() + PAUSE_SECONDS
        self._pause_reason = reason
        self._may_try = False
        if not is_known:
            log.error("the chain refuses valid proofs", reason=reason)

    def forget(self, share_id: int) -> None:
        """This share is done with."""
        self._refused.pop(share_id, None)
