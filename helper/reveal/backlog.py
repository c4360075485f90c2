"""Claims due shares in a backlog, by the rule of `helper.core.dispatch_order`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from helper.clock import Clock
from helper.core.dispatch_order import BacklogLimits, DueShare, RoundQueue, RoundTurns, is_backlog, is_overdue
from helper.observability.stats import Stats
from helper.reveal.proof_times import ProofTimes
from helper.store.models import QueuedShare
from helper.store.store import Store

LISTED_SHARES: Final = 512
"""Shares of a round that are listed at once in the helper's own order. Listing reads all due shares of the round."""
LIST_SECONDS: Final = 10.0
"""Seconds after which a round is listed again, so that shares that have become due since take their place."""
COUNT_SECONDS: Final = 5.0
"""Seconds after which waiting shares and hosts are counted again."""
MAX_SELECTIONS: Final = 8
"""Selections per claim, if other hosts claimed the selected shares first."""


@dataclass(frozen=True, slots=True)
class BacklogClaim:
    """Result of a claim in a backlog.

    Attributes:
        shares: the claimed shares, each with whether it has priority.
        next_due_ms: earliest due time of the rounds that are not overdue, in Unix milliseconds; None if there is none.
    """

    shares: list[tuple[QueuedShare, bool]]
    next_due_ms: int | None


class Backlog:
    """Claims shares of all rounds in a backlog.

    Args:
        store: the queue.
        proof_times: the measured pace.
        limits: from which due shares are a backlog.
        clock: monotonic time limits the age of lists.
        stats: source of the number of confirmed shares.
    """

    def __init__(
        self, *, store: Store, proof_times: ProofTimes, limits: BacklogLimits, clock: Clock, stats: Stats
    ) -> None:
        self._store = store
        self._proof_times = proof_times
        self._limits = limits
        self._clock = clock
        self._stats = stats
        self._turns = RoundTurns()
        self._lists: dict[bytes, tuple[float, deque[DueShare]]] = {}  # by round: monotonic time of reading, shares
        self._waiting: dict[bytes, int] = {}
        self._counted_at = -math.inf

    def is_overdue(self, oldest_due_ms: int, now: float) -> bool:
        """Return whether the oldest due share is late enough for a backlog. `now` is in Unix seconds."""
        return is_overdue(oldest_due_ms, now, self._limits)

    async def claim(
        self, ends: Mapping[bytes, float], *, now: float, chain_time: float, limit: int, first_limit: int
    ) -> BacklogClaim | None:
        """Claim shares in the order of a backlog. Returns None if there is no backlog, or nothing could be claimed.

        Args:
            ends: the ends of the rounds, in Unix seconds.
            now: Unix seconds; shares due later are not claimed.
            chain_time: time of the newest block, in Unix seconds.
            limit: maximum number of shares, may be 0 or negative.
            first_limit: maximum number if those above `limit` have priority.
        """
        heads = await self._list_heads(ends, now, limit=max(self._limits.due_shares, first_limit) + 1)
        oldest_ms = min((shares[0].due_ms for shares in heads.values()), default=None)
        number = sum(map(len, heads.values()))
        if oldest_ms is None or not is_backlog(oldest_ms, number, now, self._limits):
            self._lists.clear()
            return None
        await self._count()
        on_time = [
            round_id
            for round_id in ends
            if round_id not in heads or not self.is_overdue(heads[round_id][0].due_ms, now)
        ]
        for _ in range(MAX_SELECTIONS):
            queues = [
                await self._create_queue(round_id, ends[round_id], heads[round_id], now) for round_id in sorted(heads)
            ]
            selected = self._turns.select(
                queues,
                limit=limit,
                first_limit=first_limit,
                now=now,
                chain_time=chain_time,
                pace=self._proof_times.pace(),
                limits=self._limits,
            )
            has_priority = {selection.share.id: selection.has_priority for selection in selected}
            claimed = await self._store.claim_listed(list(has_priority), now=now) if selected else []
            if claimed or limit <= 0:
                shares = [(queued, has_priority[queued.id]) for queued in claimed]
                return BacklogClaim(shares, await self._store.next_due_ms(on_time))
            # Other hosts were first, or an index is damaged: `claim_due` handles the latter.
            heads = await self._list_heads(heads, now, limit=first_limit + 1)
        return None

    async def _list_heads(self, round_ids: Collection[bytes], now: float, *, limit: int) -> dict[bytes, list[DueShare]]:
        """Return the first due shares by due time, of the rounds that have any."""
        heads = {
            round_id: await self._store.list_due(round_id, now=now, limit=limit, by_rank=False)
            for round_id in sorted(round_ids)
        }
        return {round_id: shares for round_id, shares in heads.items() if shares}

    async def _create_queue(self, round_id: bytes, end: float, heads: list[DueShare], now: float) -> RoundQueue:
        """Return a round's queue: by rank if the round itself is in a backlog, else by due time."""
        oldest_ms = heads[0].due_ms
        shares = deque(heads)
        if is_backlog(oldest_ms, len(heads), now, self._limits):
            shares = await self._own_order(round_id, now)
        waiting = max(self._waiting.get(round_id, 0), len(heads))
        return RoundQueue(round_id, end, waiting, oldest_ms, shares)

    async def _own_order(self, round_id: bytes, now: float) -> deque[DueShare]:
        """Return the first shares in this helper's own order over all due shares of the round.

        Selected shares are removed from the list by their selection.
        """
        listed_at, shares = self._lists.get(round_id, (-math.inf, deque[DueShare]()))
        if not shares or self._clock.monotonic() - listed_at > LIST_SECONDS:
            listed = await self._store.list_due(round_id, now=now, limit=LISTED_SHARES, by_rank=True)
            shares = deque(listed)
            self._lists[round_id] = (self._clock.monotonic(), shares)
        return shares

    async def _count(self) -> None:
        """Count waiting shares, hosts and confirmed shares, if the last count is too old."""
        now = self._clock.monotonic()
        if now - self._counted_at < COUNT_SECONDS:
            return
        self._counted_at = now
        self._waiting = await self._store.count_waiting()
        self._proof_times.hosts = await self._store.count_claiming_hosts()
        self._proof_times.record_confirmed(self._stats.counts["confirmed"], now)
