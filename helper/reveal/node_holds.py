"""Holds: nodes that requested a delay before they accept further reveals."""

from __future__ import annotations

from typing import Final

from helper.chain.node import Node
from helper.clock import Clock
from helper.errors import ChainError

MAX_HOLD_SECONDS: Final = 60.0
"""Maximum seconds of a hold. A node must not exclude itself for the rest of a round."""
RECHECK_SECONDS: Final = 2.0
"""Seconds until a node that is still not ready is checked again. Nodes request this while their keys are generated."""


class NodeHolds:
    """Holds of nodes that responded 503 or 429 with `Retry-After` to a reveal.

    After the hold, the node's readiness is checked before the next reveal is sent to it. A reveal sent too early would
    lose a block, because a share is sent at most once per block.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}  # by node; monotonic time

    def hold(self, node: Node, seconds: float) -> None:
        """Send no reveal to a node for this many seconds, at most `MAX_HOLD_SECONDS`."""
        self._until[node.name] = self._clock.monotonic() + min(seconds, MAX_HOLD_SECONDS)

    async def accepts_reveals(self, node: Node) -> bool:
        """Whether a reveal may be sent to a node.

        Checks the readiness of a node whose hold has ended. If the node does not respond, the result is True: readiness
        does not decide whether a node is usable.
        """
        until = self._until.get(node.name)
        if until is None:
            return True
        if self._clock.monotonic() < until:
            return False
        self.hold(node, RECHECK_SECONDS)  # other shares do not ask in the meantime
        try:
            is_ready = await node.client.unready_reason() is None
        except ChainError:
            is_ready = True
        if is_ready:
            self._until.pop(node.name, None)
        return is_ready
