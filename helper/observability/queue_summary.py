"""Public summary of a round's queue by due time, for the page that monitors the queues of helpers.

The shape is that of the original helper's `queue-summary`. Anyone may read it, and the chain shows when a vote was cast
and the choice of each reveal. A count that changes when a share arrives, or when one of this helper's shares is due,
would connect the two. The summary therefore contains only past intervals of due times and one sum for all others. They
are read at each full hour, whoever asks, and shown in hundreds (`CoarseCount`).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Literal

import structlog
from typing_extensions import TypedDict

from helper.chain.chain_data import Round
from helper.chain.node_pool import NodePool
from helper.chain.round_registry import RoundRegistry
from helper.clock import Clock
from helper.core.load_forecast import last_moment_start
from helper.core.share import ShareState
from helper.errors import ChainError, StoreError
from helper.observability.log_config import RecurringErrorLog
from helper.store.models import DueBucket
from helper.store.store import Store

log = structlog.get_logger("helper.observability")

PERIOD_SECONDS: Final = 3600
"""Seconds between two readings of the queue: at each full hour."""
CHECK_SECONDS: Final = 60.0
"""Seconds between two checks for a new hour or a new round."""
REUSE_SECONDS: Final = 60.0
"""Seconds for which a response is reused."""
STEP: Final = 100
"""Published counts are multiples of this."""
DISTANCES: Final = range(200, 1000)
"""Distances of the queue's count from that of the last change at which the published one changes."""
OFFSETS: Final = range(STEP)
"""What is subtracted from a count before it is rounded down."""
MIN_SHOWN: Final = 50
"""Less than this, after the subtraction, is shown as 0 at once, so that an empty queue is."""
MAX_BUCKETS: Final = 4096
BLOCKS_PER_CHECK: Final = 8
"""Maximum number of blocks that one check requests for times of creation."""
BLOCK_TIMEOUT_SECONDS: Final = 5.0
"""Timeout in seconds of the request for the time of a round's creation."""
_HOUR: Final = 3600
_DAY: Final = 24 * _HOUR
_WIDTHS: Final = ((21 * _DAY, 6 * _HOUR), (7 * _DAY, 3 * _HOUR), (_DAY, _HOUR), (_HOUR, 900))
"""Minimum seconds of a round, and the width of its buckets in seconds. Shorter rounds have buckets of a minute."""

CountName = Literal["submitted", "pending_future", "overdue_pending", "processing", "failed"]
_PAST_NAMES: Final[Mapping[ShareState, CountName]] = {
    ShareState.WAITING: "overdue_pending",
    ShareState.FAILED: "failed",
}
Counts = Mapping[tuple[int, CountName], int]
"""Numbers of shares by the index of their bucket and their kind; absent if 0."""


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
    counted in the first bucket, because their times are deleted; shares that are not due are counted in the last one.
    `counted_at` is the time of the counts, 0 before the first reading.
    """

    round_id: str
    bucket_seconds: int
    created_at_time: int
    vote_end_time: int
    generated_at: int
    counted_at: int
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


def select_public(
    shares: Sequence[DueBucket], *, confirmed: int, past: int, last: int
) -> Counter[tuple[int, CountName]]:
    """Return the counts that may be published once they are coarse.

    Shares in the bucket of the reading are counted only if they are not due.

    Args:
        shares: counts of the unconfirmed shares. Times outside the round belong to the first or the last bucket.
        past: number of buckets that had ended at the reading.
        last: index of the last bucket.
    """
    counts: Counter[tuple[int, CountName]] = Counter({(0, "submitted"): confirmed})
    for group in shares:
        index = max(0, min(group.index, last))
        if group.state is ShareState.WAITING and not group.is_due:
            counts[last, "pending_future"] += group.count
        elif index < past:
            counts[index, _PAST_NAMES.get(group.state, "processing")] += group.count
    return counts


def build_summary(
    round_id: bytes, *, created: int, end: int, now: int, counted_at: int, counts: Counts
) -> QueueSummary:
    """Build the summary of a round. Times are in Unix seconds.

    Args:
        round_id: 32 bytes.
        created: when the round was created.
        end: its `vote_end_time`, after `created`.
        counted_at: the time of the counts.
    """
    width = bucket_seconds(end - created)
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
    for (index, name), count in counts.items():
        buckets[index][name] = count
        buckets[index]["total"] += count
    return {
        "round_id": round_id.hex(),
        "bucket_seconds": width,
        "created_at_time": created,
        "vote_end_time": end,
        "generated_at": now,
        "counted_at": counted_at,
        "last_minute_start": last_moment_start(created, end),
        "ready": sum(bucket["overdue_pending"] for bucket in buckets),
        "not_yet_due": sum(bucket["pending_future"] for bucket in buckets),
        "processing": sum(bucket["processing"] for bucket in buckets),
        "buckets": buckets,
    }


class CoarseCount:
    """A published count: it follows the real one in steps that no single vote causes.

    Rounding alone would not suffice: with shares of one's own, a count can be moved next to a step, and then a single
    share of somebody else changes it. Here the value changes only when the real count is a secret distance away from
    that of the last change, or nearly 0, and the steps are shifted by a secret offset. Both are drawn again for each
    change.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._draw()
        self.value = 0
        self._count = 0  # the real one when the value changed

    def _draw(self) -> None:
        self._distance, self._offset = self._rng.choice(DISTANCES), self._rng.choice(OFFSETS)

    def update(self, count: int) -> None:
        """Set the real count."""
        shifted = count - self._offset
        if abs(count - self._count) < self._distance and shifted >= MIN_SHOWN:
            return
        value = max(0, shifted) // STEP * STEP
        if value != self.value:
            self.value, self._count = value, count
            self._draw()


class _PublishedRound:
    """What is published of a round: the grid of its buckets, and the counts.

    Until a node has returned the block of its creation, the round begins when this process first knew it.
    """

    def __init__(self, known: Round, now: float) -> None:
        self.known = known
        self.created = int(min(now, known.vote_end_time - 1))
        self.is_created_known = False
        self.tries = 0
        self.hour = int(now // PERIOD_SECONDS)
        self.counted_at = 0
        self.counts: dict[tuple[int, CountName], CoarseCount] = {}

    def set_grid(self, known: Round, created: int) -> None:
        """Set the round and the time of its creation. Counts of another grid are dropped."""
        if (created, known.vote_end_time) != (self.created, self.known.vote_end_time):
            self.counts, self.counted_at = {}, 0
        self.known, self.created = known, created


class QueueSummaries:
    """Reads and publishes the summaries of rounds.

    Args:
        read_block_time: returns the Unix time of the block at a height, None if no node returns the block.
        rng: source of secret distances, see `CoarseCount`.
    """

    def __init__(
        self,
        store: Store,
        rounds: RoundRegistry,
        read_block_time: Callable[[int], Awaitable[float | None]],
        *,
        clock: Clock,
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._rounds = rounds
        self._read_block_time = read_block_time
        self._clock = clock
        self._rng = rng or random.SystemRandom()
        self._error_log = RecurringErrorLog(log, failed="queue_summary_failed", recovered="queue_summary_available")
        self._published: dict[bytes, _PublishedRound] = {}
        self._summaries: dict[bytes, tuple[float, QueueSummary]] = {}  # with the monotonic time of the building

    def get(self, round_id: bytes) -> QueueSummary | None:
        """Return the summary of a round, None if the round is not agreed. Reads neither the queue nor the chain.

        One node can list any number of rounds, one after the other, and a summary may take more than a megabyte.

        Raises:
            InvalidRoundError: the round ends before it begins.
        """
        known = self._rounds.get(round_id) if self._rounds.is_agreed(round_id) else None
        if known is None:
            return None
        built_at, summary = self._summaries.get(round_id, (0.0, None))
        if summary is None or self._clock.monotonic() - built_at >= REUSE_SECONDS:
            now = self._clock.now()
            published = self._published.get(round_id) or _PublishedRound(known, now)
            if published.created >= published.known.vote_end_time:
                raise InvalidRoundError
            summary = build_summary(
                round_id,
                created=published.created,
                end=published.known.vote_end_time,
                now=int(now),
                counted_at=published.counted_at,
                counts={key: count.value for key, count in published.counts.items()},
            )
            self._summaries[round_id] = self._clock.monotonic(), summary
        return summary

    async def run(self) -> None:
        """Read the queue at each full hour until cancelled."""
        while True:
            await self.refresh()
            await self._clock.sleep(CHECK_SECONDS)

    async def refresh(self) -> None:
        """Read missing times of creation, and the counts of the rounds that were not read in this hour.

        The counts of a new round, and those after a start, are first read at the next full hour.
        """
        now, known_rounds = self._clock.now(), {known.round_id: known for known in self._rounds.agreed_rounds()}
        self._summaries = {key: entry for key, entry in self._summaries.items() if key in known_rounds}
        before, self._published = self._published, {}
        for round_id, known in known_rounds.items():
            published = self._published[round_id] = before.get(round_id) or _PublishedRound(known, now)
            published.set_grid(known, published.created)
        await self._read_creation_times()
        hour = int(now // PERIOD_SECONDS)
        waiting = [
            published
            for published in self._published.values()
            if published.hour != hour and published.created < published.known.vote_end_time
        ]
        try:
            if waiting:
                counts = await self._store.count_shares()
                for published in waiting:
                    await self._read_counts(published, counts.get(published.known.round_id, {}))
                    published.hour = hour
            self._error_log.note(None)
        except StoreError as error:
            self._error_log.note(error)

    async def _read_creation_times(self) -> None:
        """Read some of the missing times of creation: of rounds that were tried less often, the newest first."""
        missing = [published for published in self._published.values() if not published.is_created_known]
        missing.sort(key=lambda published: (published.tries, -published.known.created_at_height))
        for published in missing[:BLOCKS_PER_CHECK]:
            published.tries += 1
            created = await self._read_block_time(published.known.created_at_height)
            if created is not None:
                published.is_created_known = True
                published.set_grid(published.known, int(created))
                self._summaries.pop(published.known.round_id, None)

    async def _read_counts(self, published: _PublishedRound, counts: Mapping[ShareState, int]) -> None:
        created, end, now = published.created, published.known.vote_end_time, int(self._clock.now())
        width = bucket_seconds(end - created)
        last = (end - created - 1) // width
        shares = await self._store.count_by_due_bucket(published.known.round_id, start=created, width=width, now=now)
        exact = select_public(
            shares,
            confirmed=counts.get(ShareState.CONFIRMED, 0),
            past=last + 1 if now >= end else max(0, now - created) // width,
            last=last,
        )
        for key in exact.keys() | published.counts.keys():
            published.counts.setdefault(key, CoarseCount(self._rng)).update(exact[key])
        published.counted_at = now


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
