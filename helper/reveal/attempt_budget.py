"""What a failure of the share itself costs: one of its attempts, and a wait that doubles."""

from __future__ import annotations

import structlog

from helper.chain.node_pool import NodePool
from helper.core.schedule import retry_delay
from helper.observability.stats import Stats
from helper.store.store import Store

log = structlog.get_logger("helper.attempts")


class AttemptBudget:
    """Spends attempts: the wait is on disk before it is waited for, the last failure is final and reported.

    Args:
        endpoints: for the time from which waits are reckoned.
        maximum: the failure with this number is final.
    """

    def __init__(self, *, store: Store, endpoints: NodePool, stats: Stats, maximum: int = 5) -> None:
        self._store = store
        self._endpoints = endpoints
        self._stats = stats
        self._maximum = maximum

    async def spend(self, share_id: int, spent: int, stage: str, reason: str, *, not_before_ms: int) -> None:
        """Count one failure against a share that has `spent` attempts behind it.

        Args:
            not_before_ms: unix milliseconds at which it was due; it is tried again no earlier, also by a clock that
                was set back since.
        """
        number = spent + 1
        if number >= self._maximum:
            await self.fail(share_id, stage, reason, spend_attempt=True)
            return
        self._stats.failure(stage, reason)
        due_ms = self.due_ms(number, not_before_ms)
        if await self._store.retry(share_id, due_ms=due_ms, stage=stage, note=reason):
            self._stats.count(f"retry_{stage}")
            log.warning("a reveal failed and is tried again", stage=stage, reason=reason, attempt=number)

    def due_ms(self, number: int, not_before_ms: int) -> int:
        """When a share is tried again after its failure with this number, from 1 on. Unix milliseconds."""
        return max(int((self._endpoints.wall() + retry_delay(number)) * 1000), not_before_ms)

    async def fail(self, share_id: int, stage: str, reason: str, *, spend_attempt: bool = False) -> None:
        """Give a share up: it is reported and its witness kept until its round is purged."""
        self._stats.failure(stage, reason)
        if await self._store.fail(share_id, stage=stage, note=reason, spend_attempt=spend_attempt):
            self._stats.count("failed")
            log.error("a share has failed for good", stage=stage, reason=reason)
