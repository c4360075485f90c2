"""Attempt budget: each failure of a share spends one attempt and doubles the retry delay."""

from __future__ import annotations

import structlog

from helper.chain.node_pool import NodePool
from helper.core.schedule import retry_delay
from helper.observability.stats import Stats
from helper.store.store import Store

log = structlog.get_logger("helper.reveal")


class AttemptBudget:
    """Spends attempts and schedules retries. The last failure is final and is logged.

    The delay is stored before it begins, so a restart does not shorten it.

    Args:
        endpoints: the node pool; its time is the start of each delay.
        maximum: number of attempts; a share fails for good when all are spent.
    """

    def __init__(self, *, store: Store, endpoints: NodePool, stats: Stats, maximum: int = 5) -> None:
        self._store = store
        self._endpoints = endpoints
        self._stats = stats
        self._maximum = maximum

    async def spend(self, share_id: int, spent: int, stage: str, reason: str, *, not_before_ms: int) -> None:
        """Spend one attempt of a share and schedule its retry, or fail it if none is left.

        Args:
            spent: attempts spent before this one.
            not_before_ms: the share's due time in unix milliseconds. The retry is never earlier, even if the clock
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
            log.warning("reveal_retried", stage=stage, reason=reason, attempt=number)

    def due_ms(self, number: int, not_before_ms: int) -> int:
        """Time of the retry after the `number`-th failure (from 1), in unix milliseconds."""
        return max(int((self._endpoints.wall() + retry_delay(number)) * 1000), not_before_ms)

    async def fail(self, share_id: int, stage: str, reason: str, *, spend_attempt: bool = False) -> None:
        """Fail a share for good and log it. Its witness remains stored until its round is purged."""
        self._stats.failure(stage, reason)
        if await self._store.fail(share_id, stage=stage, note=reason, spend_attempt=spend_attempt):
            self._stats.count("failed")
            log.error("share_failed", stage=stage, reason=reason)
