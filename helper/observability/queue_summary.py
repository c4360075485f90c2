"""Public summary of a round's queue by due time, for the page that monitors the queues of helpers.

The shape is that of the original helper's `queue-summary`. A summary contains counts only. It is reused for
`REUSE_SECONDS`, so that polling clients neither see single arrivals nor cause a scan of the queue each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from typing_extensions import TypedDict

from helper.chain.models import Round
from helper.chain.node_pool import NodePool
from helper.chain.round_registry import RoundRegistry
from helper.clock import Clock
from helper.core.share import ShareState
from helper.errors import ChainError
from helper.store.models import DueBucket
from helper.store.store import Store

REUSE_SECONDS: Final = 60.0
"""Seconds for which a summary is reused."""
MAX_BUCKETS: Final = 4096
BLOCK_TIMEOUT_SECONDS: Final = 5.0
"""Timeout in seconds of the request for the time of a round's creation."""
_HOUR: Final = 3600
_DAY: Final = 24 * _HOUR
_WIDTHS: Final = ((21 * _DAY, 6 * _HOUR), (7 * _DAY, 3 * _HOUR), (_DAY, _HOUR), (_HOUR, 900))
"""Minimum seconds of a round, and the width of its buckets in seconds. Shorter rounds have buckets of a minute."""


class SummaryBucket(TypedDict):
    """Shares by due time, from `start` to `end` (Unix seconds). `total` is the sum of the five counts."""

    start: int
    end: int
    submitted: int
    pending_future: int
    overdue_pending: int
    processing: int
    failed: int
    total: int


class QueueSummary(TypedDict):
    """The queue of a round: counts of shares by due time. All times are Unix seconds.

    `last_minute_start` is the start of the period in which wallets send shares immediately. Confirmed shares are
    counted in the first bucket, because their times are deleted.
    """

    round_id: str
    bucket_seconds: int
    created_at_time: int
    vote_end_time: int
    generated_at: int
    last_minute_start: int
    ready: int
    not_yet_due: int
    processing: int
    buckets: list[SummaryBucket]


class InvalidRoundError(ValueError):
    """The round ends before it begins."""


def bucket_seconds(duration: int) -> int:
    """Return the width of the buckets of a round with this duration, both in seconds."""
    width = next((width for minimum, width in _WIDTHS if duration >= minimum), 60)
    return max(width, -(-duration // MAX_BUCKETS))


def build_summary(
    round_id: bytes, *, created: int, end: int, now: int, width: int, confirmed: int, shares: Sequence[DueBucket]
) -> QueueSummary:
    """Build the summary of a round. Times are in Unix seconds.

    Args:
        round_id: 32 bytes.
        created: when the round was created.
        end: its `vote_end_time`, after `created`.
        now: the time at which the counts were read.
        width: seconds of a bucket.
        confirmed: number of confirmed shares.
        shares: counts of the other shares. Times outside the round belong to the first or the last bucket.
    """
    buckets: list[SummaryBucket] = [
        {
            "start": start,
            "end": min(start + width, end),
            "submitted": 0,
            "pending_future": 0,
            "overdue_pending": 0,
            "processing": 0,
            "failed": 0,
            "total": 0,
        }
        for start in range(created, end, width)
    ]
    buckets[0]["submitted"] = buckets[0]["total"] = confirmed
    ready = not_yet_due = processing = 0
    for group in shares:
        bucket = buckets[max(0, min(group.index, len(buckets) - 1))]
        bucket["total"] += group.count
        if group.state is ShareState.FAILED:
            bucket["failed"] += group.count
        elif group.state is not ShareState.RECEIVED:
            bucket["processing"] += group.count
            processing += group.count
        elif group.is_due:
            bucket["overdue_pending"] += group.count
            ready += group.count
        else:
            bucket["pending_future"] += group.count
            not_yet_due += group.count
    return {
        "round_id": round_id.hex(),
        "bucket_seconds": width,
        "created_at_time": created,
        "vote_end_time": end,
        "generated_at": now,
        "last_minute_start": end - min((end - created) * 2 // 5, 6 * _HOUR),
        "ready": ready,
        "not_yet_due": not_yet_due,
        "processing": processing,
        "buckets": buckets,
    }


class QueueSummaries:
    """Reads and caches the summaries of rounds.

    Args:
        store: the queue.
        rounds: the known rounds.
        read_block_time: returns the Unix time of the block at a height, None if no node returns the block.
        clock: the time.
    """

    def __init__(
        self,
        store: Store,
        rounds: RoundRegistry,
        read_block_time: Callable[[int], Awaitable[float | None]],
        *,
        clock: Clock,
    ) -> None:
        self._store = store
        self._rounds = rounds
        self._read_block_time = read_block_time
        self._clock = clock
        self._lock = asyncio.Lock()
        self._summaries: dict[bytes, tuple[float, QueueSummary]] = {}  # with the monotonic time of the reading
        self._created_times: dict[bytes, int] = {}

    async def get(self, round_id: bytes) -> QueueSummary | None:
        """Return the summary of a round, None if the round is not known.

        Raises:
            StoreError: the queue cannot be read.
            InvalidRoundError: the round ends before it begins.
        """
        async with self._lock:
            known_round = self._rounds.get(round_id)
            if known_round is None:
                self._summaries.pop(round_id, None)
                self._created_times.pop(round_id, None)
                return None
            read_at, summary = self._summaries.get(round_id, (0.0, None))
            if summary is None or self._clock.monotonic() - read_at >= REUSE_SECONDS:
                read_at = self._clock.monotonic()
                summary = await self._read(known_round)
                self._summaries[round_id] = (read_at, summary)
            return summary

    async def _read(self, known_round: Round) -> QueueSummary:
        created = await self._created_time(known_round)
        duration = known_round.vote_end_time - created
        if duration <= 0:
            raise InvalidRoundError
        width, now = bucket_seconds(duration), self._clock.now()
        counts = (await self._store.count_shares()).get(known_round.round_id, {})
        shares = await self._store.count_by_due_bucket(known_round.round_id, start=created, width=width, now=now)
        return build_summary(
            known_round.round_id,
            created=created,
            end=known_round.vote_end_time,
            now=int(now),
            width=width,
            confirmed=counts.get(ShareState.SUBMITTED, 0),
            shares=shares,
        )

    async def _created_time(self, known_round: Round) -> int:
        """Unix seconds at which the round was created.

        If no node has the block, the time of the reading, or the earliest due time of a share.
        """
        created = self._created_times.get(known_round.round_id)
        if created is None:
            block_time = await self._read_block_time(known_round.created_at_height)
            if block_time is not None:
                created = self._created_times[known_round.round_id] = int(block_time)
        if created is None:
            due_ms = await self._store.next_due_ms([known_round.round_id])
            earliest = self._clock.now() if due_ms is None else due_ms / 1000
            created = int(min(earliest, self._clock.now(), known_round.vote_end_time - 1))
        return created


async def read_block_time(node_pool: NodePool, height: int) -> float | None:
    """Return the Unix time of the block at a height from any node, None if no node returns it.

    Errors do not put a node into backoff: a node that has pruned an old block is still usable for due shares.
    """
    try:
        async with asyncio.timeout(BLOCK_TIMEOUT_SECONDS):
            for node in node_pool.usable_nodes:
                try:
                    block = await node.client.block(height)
                except ChainError:
                    continue
                if block is not None:
                    return block.head.time
    except TimeoutError:
        pass
    return None
