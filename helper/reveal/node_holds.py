"""Holds: nodes that requested a delay before they accept further reveals."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from helper.chain.node import Node
from helper.clock import Clock
from helper.errors import ChainError

MAX_HOLD_SECONDS: Final = 60.0
"""Maximum seconds of a hold. A node must not exclude itself for the rest of a round."""
MAX_ROUND_FRACTION: Final = 0.1
"""Maximum hold as a fraction of the time that was left until the round's end when the hold began."""
RECHECK_SECONDS: Final = 2.0
"""Seconds until a node that is still not ready is checked again. Nodes request this while their keys are generated."""
PROBE_SECONDS: Final = 2.0
"""Seconds between two shares that are sent to a held node because every node is held."""


@dataclass(slots=True)
class _Hold:
    """A hold. `since` and `probe_at` (the time of the next probe) are monotonic times."""

    since: float
    seconds: float
    probe_at: float

    def is_over(self, now: float, seconds_left: float = math.inf) -> bool:
        passed = now - self.since
        return passed >= min(self.seconds, MAX_ROUND_FRACTION * (seconds_left + passed))


class NodeHolds:
    """Holds of nodes that responded 503 or 429 with `Retry-After` to a reveal.

    After the hold, the node's readiness is checked before the next reveal is sent to it. A reveal sent too early would
    lose a block, because a share is sent at most once per block. While every node is held, one share after the other is
    sent to a node that is ready: it may accept reveals long before the time that it has requested.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holds: dict[str, _Hold] = {}  # by node

    @property
    def is_any_held(self) -> bool:
        """Whether any node is held now."""
        now = self._clock.monotonic()
        return any(not hold.is_over(now) for hold in self._holds.values())

    def hold(self, node: Node, seconds: float) -> None:
        """Send no reveal to a node for this many seconds, at most `MAX_HOLD_SECONDS`."""
        now = self._clock.monotonic()
        self._holds[node.name] = _Hold(now, min(seconds, MAX_HOLD_SECONDS), now + PROBE_SECONDS)

    def release(self, node: Node) -> bool:
        """End the hold of a node that has accepted a reveal. Returns whether it was held."""
        return self._holds.pop(node.name, None) is not None

    async def accepts_reveals(
        self, node: Node, *, seconds_left: float = math.inf, candidates: Collection[Node] = ()
    ) -> bool:
        """Whether a reveal may be sent to a node.

        Checks the readiness of a node whose hold has ended. If the node does not respond, the result is True: readiness
        does not decide whether a node is usable.

        Args:
            node: the node.
            seconds_left: seconds until the end of the reveal's round.
            candidates: all nodes to which the reveal may be sent.
        """
        hold, now = self._holds.get(node.name), self._clock.monotonic()
        if hold is None:
            return True
        if hold.is_over(now, seconds_left):
            self.hold(node, RECHECK_SECONDS)  # other shares do not ask in the meantime
            if is_ready := await self._is_ready(node):
                self.release(node)
            return is_ready
        holds = [self._holds.get(candidate.name) for candidate in candidates]
        are_all_held = bool(holds) and all(other and not other.is_over(now, seconds_left) for other in holds)
        if not are_all_held or now < hold.probe_at:
            return False
        hold.probe_at = now + PROBE_SECONDS
        return await self._is_ready(node)

    async def _is_ready(self, node: Node) -> bool:
        try:
            return await node.client.unready_reason() is None
        except ChainError:
            return True
