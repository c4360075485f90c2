"""Attempt budget of a share: what spends an attempt, and the delays of retries."""

from __future__ import annotations

import structlog

from helper.chain.node_pool import NodePool
from helper.core.schedule import retry_delay
from helper.observability.stats import Stats
from helper.store.models import QueuedShare
from helper.store.store import Store

log = structlog.get_logger("helper.reveal")

MAX_FREE_CRASHES = 2
"""Number of prover crashes on one share that do not spend an attempt."""


class AttemptBudget:
    """Spends attempts and schedules retries. The last failure is final and is logged.

    The delay is stored before it begins, so that a restart does not shorten it.

    Args:
        node_pool: source of the time from which each delay is measured.
        max_attempts: number of attempts; a share fails permanently when all are spent.
    """

    def __init__(self, *, store: Store, node_pool: NodePool, stats: Stats, max_attempts: int = 5) -> None:
        self._store = store
        self._node_pool = node_pool
        self._stats = stats
        self._max_attempts = max_attempts

    async def spend_attempt(
        self, share_id: int, attempts_spent: int, stage: str, reason: str, *, not_before_ms: int
    ) -> None:
        """Spend one attempt of a share and schedule its retry.

        The share fails if no attempt is left.

        Args:
            attempts_spent: attempts spent before this one.
            not_before_ms: the share's due time in Unix milliseconds. The retry is never earlier, even if the clock
                was set back since.
        """
        attempt = attempts_spent + 1
        if attempt >= self._max_attempts:
            await self.fail_share(share_id, stage, reason, counts_attempt=True)
            return
        self._stats.record_failure(stage, reason)
        due_ms = self.retry_due_ms(attempt, not_before_ms)
        if await self._store.retry(share_id, due_ms=due_ms, stage=stage, note=reason):
            self._stats.count(f"retry_{stage}")
            log.warning("reveal_retried", stage=stage, reason=reason, attempt=attempt)

    async def record_crash(self, queued: QueuedShare, reason: str) -> None:
        """Record that a prover worker crashed on a share, and release it. The third crash spends an attempt."""
        due_ms = queued.due_ms
        if queued.crashes >= MAX_FREE_CRASHES:
            # Delayed here, so that no other host claims it before the attempt is spent below.
            due_ms = self.retry_due_ms(queued.attempts + 1, due_ms)
        crashes = await self._store.record_crash(queued.id, due_ms=due_ms, note=reason)
        if crashes:
            self._stats.count("retry_prover")
            log.warning("prover_worker_crashed", crashes=crashes)
        if crashes > MAX_FREE_CRASHES:
            await self.spend_attempt(queued.id, queued.attempts, "proof", reason, not_before_ms=queued.due_ms)

    def retry_due_ms(self, attempt: int, not_before_ms: int) -> int:
        """Time of the retry after the `attempt`-th failure (from 1), in Unix milliseconds."""
        return max(int((self._node_pool.wall_time() + retry_delay(attempt)) * 1000), not_before_ms)

    async def fail_share(self, share_id: int, stage: str, reason: str, *, counts_attempt: bool = False) -> None:
        """Fail a share permanently and log it. Its witness remains stored until its round is purged."""
        self._stats.record_failure(stage, reason)
        if await self._store.fail(share_id, stage=stage, note=reason, spend_attempt=counts_attempt):
            self._stats.count("failed")
            log.error("share_failed", stage=stage, reason=reason)
