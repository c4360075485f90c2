"""Attempt budget of a share: what spends an attempt, and when the share is tried again."""

from __future__ import annotations

import math

import structlog

from helper.chain.node_pool import NodePool
from helper.chain.round_registry import RoundRegistry
from helper.core.schedule import last_attempt_time, rank_fraction, retry_time
from helper.observability.stats import Stats
from helper.store.models import QueuedShare, SentReveal
from helper.store.store import Store

log = structlog.get_logger("helper.reveal")

MAX_FREE_CRASHES = 2
"""Number of prover crashes on one share that do not spend an attempt."""


class AttemptBudget:
    """Spends attempts and schedules retries, until the chain has closed the round of the share.

    The time of a retry is stored before the wait begins, so that a restart does not shorten it.

    Args:
        node_pool: source of the time from which each delay is measured.
        rounds: the end of each round.
        quick_retries: number of retries within seconds; the later ones follow at longer intervals.
    """

    def __init__(
        self, *, store: Store, node_pool: NodePool, rounds: RoundRegistry, stats: Stats, quick_retries: int = 5
    ) -> None:
        self._store = store
        self._node_pool = node_pool
        self._rounds = rounds
        self._stats = stats
        self._quick_retries = quick_retries

    async def spend_attempt(self, share_id: int, share: QueuedShare | SentReveal, stage: str, reason: str) -> None:
        """Spend one attempt of a share and schedule its retry.

        The first failure after the quick retries is logged as an error: something does not pass by itself.

        Args:
            share: the share as it was read before this attempt.
        """
        self._stats.record_failure(stage, reason)
        due_ms = self._retry_ms(share)
        attempt = await self._store.retry(share_id, due_ms=due_ms, stage=stage, note=reason)
        if attempt:
            self._stats.count(f"retry_{stage}")
            if attempt == self._quick_retries + 1:
                self._stats.count("quick_retries_failed")
                log.error("quick_retries_failed", stage=stage, reason=reason, attempt=attempt)
            else:
                log.warning("reveal_retried", stage=stage, reason=reason, attempt=attempt)

    def seconds_left(self, round_id: bytes) -> float:
        """Seconds until the round's end; infinity if the round is not known."""
        known = self._rounds.get(round_id)
        return math.inf if known is None else self._rounds.latest_end(known) - self._node_pool.wall_time()

    async def record_crash(self, queued: QueuedShare, reason: str) -> None:
        """Record that a prover worker crashed on a share, and release it. The third crash spends an attempt."""
        # Delayed here, so that no other host claims it before the attempt is spent below.
        due_ms = queued.due_ms if queued.crashes < MAX_FREE_CRASHES else self._retry_ms(queued)
        crashes = await self._store.record_crash(queued.id, due_ms=due_ms, note=reason)
        if crashes:
            self._stats.count("retry_prover")
            log.warning("prover_worker_crashed", crashes=crashes)
        if crashes > MAX_FREE_CRASHES:
            await self.spend_attempt(queued.id, queued, "proof", reason)

    def _retry_ms(self, share: QueuedShare | SentReveal) -> int:
        """Time of the retry after one more failure, in Unix milliseconds.

        Never before the share's due time, even if the clock was set back since.
        """
        known = self._rounds.get(share.round_id)
        end = math.inf if known is None else float(known.vote_end_time)
        last_attempt = (
            end if known is None else last_attempt_time(share.first_due_ms / 1000, end, rank_fraction(share.rank))
        )
        time = retry_time(
            share.attempts + 1,
            self._node_pool.wall_time(),
            quick_retries=self._quick_retries,
            last_attempt=last_attempt,
            end=end,
        )
        return max(int(time * 1000), share.due_ms)

    async def fail_share(self, share_id: int, stage: str, reason: str) -> None:
        """Fail a share permanently and log it. Its witness remains stored until its round is purged."""
        self._stats.record_failure(stage, reason)
        if await self._store.fail(share_id, stage=stage, note=reason):
            self._stats.count("failed")
            log.error("share_failed", stage=stage, reason=reason)
