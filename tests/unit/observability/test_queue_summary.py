"""Summary of a round's queue by due time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from helper.chain.models import Block, BlockHead
from helper.chain.node_pool import NodePool
from helper.core.share import ShareState
from helper.errors import ChainUnavailable
from helper.observability.queue_summary import MAX_BUCKETS, bucket_seconds, build_summary, read_block_time
from helper.store.models import DueBucket

pytestmark = pytest.mark.anyio

HOUR, DAY = 3600, 86_400
ROUND = b"\xab" * 32
CREATED = 1_790_000_000


@pytest.mark.rule("N12")
@pytest.mark.parametrize(
    ("duration", "width"),
    [
        (21 * DAY, 6 * HOUR),
        (21 * DAY - 1, 3 * HOUR),
        (7 * DAY, 3 * HOUR),
        (7 * DAY - 1, HOUR),
        (DAY, HOUR),
        (DAY - 1, 900),
        (HOUR, 900),
        (HOUR - 1, 60),
        (1, 60),
        (2 * MAX_BUCKETS * 6 * HOUR, 12 * HOUR),
    ],
)
def test_bucket_seconds_depends_on_duration(duration: int, width: int) -> None:
    assert bucket_seconds(duration) == width
    assert -(-duration // width) <= MAX_BUCKETS


@pytest.mark.rule("N12", "Q4")
def test_summary_has_documented_shape_and_sums() -> None:
    shares = [
        DueBucket(ShareState.RECEIVED, is_due=True, index=0, count=2),
        DueBucket(ShareState.RECEIVED, is_due=False, index=1, count=40),
        DueBucket(ShareState.RECEIVED, is_due=False, index=99, count=5),
        DueBucket(ShareState.WITNESSED, is_due=True, index=0, count=1),
        DueBucket(ShareState.BROADCAST, is_due=True, index=-3, count=3),
        DueBucket(ShareState.FAILED, is_due=True, index=1, count=4),
    ]
    end = CREATED + 2 * HOUR + 100
    summary = build_summary(ROUND, created=CREATED, end=end, now=CREATED + 50, width=HOUR, confirmed=12, shares=shares)
    buckets = summary.pop("buckets")  # type: ignore[misc]
    assert summary == {
        "round_id": ROUND.hex(),
        "bucket_seconds": HOUR,
        "created_at_time": CREATED,
        "vote_end_time": end,
        "generated_at": CREATED + 50,
        "last_minute_start": end - 2920,
        "ready": 2,
        "not_yet_due": 45,
        "processing": 4,
    }
    names = ("start", "end", "submitted", "pending_future", "overdue_pending", "processing", "failed", "total")
    assert all(tuple(bucket) == names for bucket in buckets)
    assert [tuple(bucket.values()) for bucket in buckets] == [
        (CREATED, CREATED + HOUR, 12, 0, 2, 4, 0, 18),
        (CREATED + HOUR, CREATED + 2 * HOUR, 0, 40, 0, 0, 4, 44),
        (CREATED + 2 * HOUR, end, 0, 5, 0, 0, 0, 5),
    ]


@pytest.mark.rule("N12")
def test_summary_last_minute_is_at_most_six_hours() -> None:
    summary = build_summary(ROUND, created=CREATED, end=CREATED + DAY, now=CREATED, width=HOUR, confirmed=0, shares=[])
    assert summary["last_minute_start"] == CREATED + DAY - 6 * HOUR
    assert len(summary["buckets"]) == 24


async def test_read_block_time_tries_all_nodes() -> None:
    async def unavailable(height: int) -> Block | None:
        raise ChainUnavailable("pruned")

    async def missing(height: int) -> Block | None:
        return None

    async def present(height: int) -> Block | None:
        return Block(BlockHead("svote", height, 1234.5), [])

    def pool(*responses: Any) -> NodePool:
        nodes = [SimpleNamespace(client=SimpleNamespace(block=response)) for response in responses]
        return cast(NodePool, SimpleNamespace(usable_nodes=nodes))

    assert await read_block_time(pool(unavailable, missing, present), 7) == 1234.5
    assert await read_block_time(pool(unavailable, missing), 7) is None
    assert await read_block_time(pool(), 7) is None
