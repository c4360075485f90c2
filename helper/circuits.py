"""Which circuit generation this chain takes, and what to do when it refuses a proof.

A chain accepts exactly one generation. With `circuit = "auto"` the choice starts from what this chain was seen to
accept, else from the node's version, else from the newer generation; it changes when the chain refuses a proof that
our own verifier accepts. A choice set by hand never changes: the queue pauses and says why.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from enum import Enum

import structlog

from helper.clock import Clock

log = structlog.get_logger("helper.circuits")

OLDER, NEWER = "k11", "k10"
GENERATIONS = (NEWER, OLDER)
FIRST_WITH_NEWER = (1, 3, 0)
"""Version of the chain's node from which on it verifies the newer generation."""
PAUSE_SECONDS = 60.0
"""How long a refusal of the generation set by hand pauses the queue before a share is tried again."""

_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


class Refused(Enum):
    """What follows when the chain refused a proof."""

    TRY_OTHER = "the other generation is tried, no attempt spent"
    PAUSED = "the queue pauses, no attempt spent"
    SPEND_ATTEMPT = "the proof itself is at fault: one attempt"


def by_version(version: str) -> str | None:
    """The generation that a node of this version verifies; None where the version tells nothing."""
    match = _VERSION.match(version)
    if match is None:
        return None
    return NEWER if tuple(int(part) for part in match.groups()) >= FIRST_WITH_NEWER else OLDER


def other(circuit: str) -> str:
    """The generation that this one is not."""
    return OLDER if circuit == NEWER else NEWER


class CircuitChoice:
    """The generation to prove with now.

    Args:
        setting: "auto", "k10" or "k11".
        clock: for the pause.
        remember: keeps what a chain accepted, as (key, value).
    """

    def __init__(
        self, setting: str, *, clock: Clock, remember: Callable[[str, str], Awaitable[None]]
    ) -> None:
        self._auto = setting == "auto"
        self._clock = clock
        self._remember = remember
        self._chain_id = ""
        self._remembered: str | None = None
        self._refused: dict[int, set[str]] = {}
        self._paused_until: float | None = None
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
        log.info(
            "circuit chosen", circuit=self.current, chain_id=chain_id, remembered=remembered, version=version
        )

    @property
    def needed(self) -> tuple[str, ...]:
        """The generations whose keys the provers keep warm, the current one first."""
        return (self.current, other(self.current)) if self._auto else (self.current,)

    @property
    def paused(self) -> str | None:
        """Why the queue is paused on account of the circuit, or None."""
        if self._paused_until is None or self._clock.monotonic() >= self._paused_until:
            return None
        return (
            f"the chain refuses {self.current} proofs that are valid: it runs the other circuit; "
            f'set [prover] circuit = "auto" or "{other(self.current)}"'
        )

    async def accepted(self, circuit: str) -> None:
        """The chain took a proof of this generation."""
        self._paused_until = None
        if not self._auto or circuit == self._remembered:
            return
        self._remembered = self.current = circuit
        await self._remember(self.key(self._chain_id), circuit)
        log.info("the chain accepts this circuit", circuit=circuit, chain_id=self._chain_id)

    def refused(self, share_id: int, circuit: str, *, valid: bool) -> Refused:
        """The chain refused a proof of this generation; `valid` is what our own verifier says of it."""
        if not valid:
            return Refused.SPEND_ATTEMPT
        if not self._auto:
            self._paused_until = self._clock.monotonic() + PAUSE_SECONDS
            log.error("the chain refuses valid proofs", reason=self.paused, circuit=circuit)
            return Refused.PAUSED
        tried = self._refused.setdefault(share_id, set())
        tried.add(circuit)
        if tried.issuperset(GENERATIONS):
            del self._refused[share_id]
            return Refused.SPEND_ATTEMPT
        if self.current == circuit:
            self.current = other(circuit)
            log.warning("the chain refuses this circuit, trying the other", circuit=circuit)
        return Refused.TRY_OTHER

    def forget(self, share_id: int) -> None:
        """This share is done with."""
        self._refused.pop(share_id, None)
