"""Decides how many nodes must report a reveal to confirm it.

A share that is erased by mistake is lost, while one that is confirmed late is resent without harm. If two or more nodes
are configured, two must report the same reveals in a block. The wait for a second node is bounded, because an
outage of all nodes but one must not block erasure indefinitely.
"""

from __future__ import annotations

from typing import Final

import structlog

from helper.chain.models import BlockHead
from helper.chain.node_pool import NodePool
from helper.core.log_limits import LoggedProblem
from helper.errors import ChainError, ChainResponseError, ChainUnavailable

SINGLE_NODE_SECONDS: Final = 10.0
"""Seconds for which all other nodes must be unreachable, stale or on another chain before one node is sufficient."""
SECOND_COPY_WAIT_SECONDS: Final = 40.0
"""Seconds that a block waits for a reachable second node that does not report it; longer than a node's backoff."""
_MAX_WAITING_BLOCKS: Final = 10_000

log = structlog.get_logger("helper.chain")


class BlockNotAgreedError(ChainError):
    """Two nodes do not report the same reveals in a block yet."""


class BlockDisputedError(BlockNotAgreedError, ChainResponseError):
    """Nodes report different reveals in a block."""


class SecondCopyMissingError(BlockNotAgreedError, ChainUnavailable):
    """No second node has reported the block yet."""


class CopyQuorum:
    """Decides whether enough nodes report the same reveals.

    Attributes:
        disputed_heights: heights at which nodes report different reveals.
    """

    def __init__(self, node_pool: NodePool) -> None:
        self._node_pool = node_pool
        self._clock = node_pool.clock
        self._single_since: float | None = None  # monotonic
        self._waiting_since: dict[int, float] = {}  # monotonic time since which a second copy is missing, by height
        self._lack_of_copies = LoggedProblem()
        self.disputed_heights: set[int] = set()
        node_pool.subscribe_to_probes(self._on_probe)

    @property
    def needs_two_copies(self) -> bool:
        """Whether at least two nodes are configured, so that two must agree."""
        return len(self._node_pool.nodes) > 1

    @property
    def is_one_node_enough(self) -> bool:
        """Whether one node's copy is sufficient.

        It is if only one node is configured, or no other was in sync for `SINGLE_NODE_SECONDS`.
        """
        since = self._single_since
        return not self.needs_two_copies or (
            since is not None and self._clock.monotonic() - since >= SINGLE_NODE_SECONDS
        )

    def accept_single_copy(self, height: int) -> bool:
        """Whether one copy of a block is sufficient because no second one is available."""
        if not self.needs_two_copies:
            return True
        now = self._clock.monotonic()
        if not self.is_one_node_enough and now - self._waiting_since.setdefault(height, now) < SECOND_COPY_WAIT_SECONDS:
            if len(self._waiting_since) > _MAX_WAITING_BLOCKS:
                del self._waiting_since[next(iter(self._waiting_since))]
            return False
        self._waiting_since.pop(height, None)
        if self._lack_of_copies.note():
            log.warning("reveals_confirmed_by_one_node", height=height, reason="no second node reports this block")
        return True

    def note_agreement(self, height: int) -> None:
        """Record that two nodes report the same reveals in a block."""
        self._waiting_since.pop(height, None)
        self._lack_of_copies.clear()
        if height in self.disputed_heights:
            log.info("block_dispute_resolved", height=height)
            self.disputed_heights.discard(height)

    def note_dispute(self, height: int, names: str) -> None:
        """Record that nodes report different reveals in a block; logged once per height."""
        if height not in self.disputed_heights:
            log.error(
                "block_disputed",
                height=height,
                endpoint=names,
                reason="these nodes report different reveals in this block; none of its shares is confirmed",
                advice="Find out which node is wrong and remove it from [chain] endpoints.",
            )
        self.disputed_heights.add(height)

    def forget_heights(self, height: int) -> None:
        """Forget the heights up to this one: their blocks are not read any more."""
        self.disputed_heights = {disputed for disputed in self.disputed_heights if disputed > height}

    def _on_probe(self, _head: BlockHead | None) -> None:
        if self._node_pool.in_sync_count > 1:
            self._single_since = None
        elif self._single_since is None:
            self._single_since = self._clock.monotonic()
