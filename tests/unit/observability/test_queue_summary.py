"""Summary of a round's queue by due time."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helper.chain.chain_data import Block, BlockHead
from helper.chain.node_pool import NodePool
from helper.core.share import ShareState
from helper.errors import ChainUnavailable
from helper.observability.queue_summary import (
    DISTANCES,
    MAX_BUCKETS,
    MIN_SHOWN,
    REUSE_SECONDS,
    STEP,
    CoarseCount,
    bucket_seconds,
    build_summary,
    read_block_time,
    select_public,
)
from helper.store.models import DueBucket
from tests.campaign.summary_attack import (
    END,
    HOURS,
    ExactSummaries,
    ExactSums,
    Publisher,
    SimulatedQueue,
    SimulatedVote,
    Summaries,
    recovered_fraction,
)
from tests.support.clock import FakeClock

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
        DueBucket(ShareState.WAITING, is_due=True, index=0, count=200),
        DueBucket(ShareState.WAITING, is_due=False, index=2, count=4000),
        DueBucket(ShareState.WAITING, is_due=False, index=99, count=500),
        DueBucket(ShareState.PROVING, is_due=True, index=0, count=100),
        DueBucket(ShareState.SENT, is_due=True, index=-3, count=300),
        DueBucket(ShareState.FAILED, is_due=True, index=0, count=400),
        *(DueBucket(state, is_due=True, index=1, count=7) for state in ShareState),
    ]
    end = CREATED + 2 * HOUR + 100
    counts = select_public(shares, confirmed=1200, past=1, last=8)
    summary = build_summary(
        ROUND, created=CREATED, end=end, now=CREATED + 1000, counted_at=CREATED + 950, counts=counts
    )
    buckets = summary.pop("buckets")  # type: ignore[misc]
    assert summary == {
        "round_id": ROUND.hex(),
        "bucket_seconds": 900,
        "created_at_time": CREATED,
        "vote_end_time": end,
        "generated_at": CREATED + 1000,
        "counted_at": CREATED + 950,
        "last_minute_start": end - 2920,
        "ready": 200,
        "not_yet_due": 4500,
        "processing": 400,
    }
    names = ("start", "end", "submitted", "pending_future", "overdue_pending", "processing", "failed", "total")
    assert all(tuple(bucket) == names for bucket in buckets)
    assert [(bucket["start"], bucket["end"]) for bucket in buckets] == [
        (CREATED + 900 * number, min(CREATED + 900 * (number + 1), end)) for number in range(9)
    ]
    assert [tuple(bucket.values())[2:] for bucket in buckets] == [
        (1200, 0, 200, 400, 400, 2200),
        *[(0, 0, 0, 0, 0, 0)] * 7,
        (0, 4500, 0, 0, 0, 4500),
    ]


@pytest.mark.rule("N12")
def test_summary_last_minute_is_at_most_six_hours() -> None:
    summary = build_summary(ROUND, created=CREATED, end=CREATED + DAY, now=CREATED, counted_at=0, counts={})
    assert summary["last_minute_start"] == CREATED + DAY - 6 * HOUR
    assert len(summary["buckets"]) == 24


def test_coarse_count_moves_only_after_a_secret_distance() -> None:
    first_moves, next_moves = Counter[int](), Counter[int]()
    for seed in range(500):
        count = CoarseCount(random.Random(seed))
        values = list[int]()
        for number in range(0, 2500, 8):
            count.update(number)
            values.append(count.value)
        moves = [number for number, (old, new) in enumerate(pairwise(values), 1) if old != new]
        assert all(value % STEP == 0 and value <= 8 * number for number, value in enumerate(values))
        first_moves[8 * moves[0]] += 1
        # One share less does not move it back: the next move is as far away as the first one.
        count.update(8 * moves[-1] - 8)
        assert count.value == values[-1]
        next_moves[8 * (moves[1] - moves[0])] += 1
    for moved in (first_moves, next_moves):
        assert min(moved) >= DISTANCES.start
        assert max(moved.values()) < 30, "no distance is likely"
    count.update(MIN_SHOWN - 1)
    assert count.value == 0, "a queue that is nearly empty is shown as empty"


@pytest.mark.parametrize("step", [STEP, 11 * STEP])
@pytest.mark.parametrize("before", [0, 10 * STEP, 25 * STEP])
def test_coarse_count_next_to_a_step_depends_on_no_single_share(step: int, before: int) -> None:
    """With the shares of an attacker, who has moved the count there from another value."""
    shown = list[int]()
    for number in range(step - STEP, step + 2 * STEP):
        counts = [CoarseCount(random.Random(seed)) for seed in range(500)]
        for count in counts:
            count.update(before)
            count.update(number)
        shown.append(sum(count.value >= step for count in counts))
    assert max(later - earlier for earlier, later in pairwise(shown)) < 20


@pytest.mark.rule("Q3")
async def test_counts_are_read_at_full_hours_only() -> None:
    """Neither a request nor an arrival causes a reading, and a bucket is published only once it has ended."""
    clock = FakeClock(CREATED - CREATED % HOUR + 1800.0)
    votes = [SimulatedVote(0.0, 0, 0, (float(due),) * 1000) for due in (int(clock.now()) + 900, END - 1)]
    queue = SimulatedQueue(votes, clock)
    summaries = Summaries(queue, random.Random(1))
    shown = list[tuple[int, int]]()
    for _ in range(150):
        summary = await summaries.read()
        assert [bucket["pending_future"] for bucket in summary["buckets"][:-1]] == [0] * (HOURS - 1)
        shown.append((summary["counted_at"], summary["not_yet_due"]))
        assert summary["generated_at"] > clock.now() - REUSE_SECONDS
        clock.advance(60)
    first, second = (CREATED - CREATED % HOUR + hour * HOUR for hour in (1, 2))
    assert shown[:29] == [(0, 0)] * 29
    assert {at for at, _ in shown} == {0, first, second}
    assert {count for at, count in shown if at} == {900}, "1,000 less a secret offset"


@pytest.mark.parametrize(
    ("publish", "rounds", "voters", "helpers", "least", "most"),
    [
        pytest.param(ExactSummaries, 5, 20, 3, 0.8, 1.0, id="exact buckets"),
        pytest.param(ExactSums, 10, 20, 10, 0.62, 1.0, id="exact sums"),
        pytest.param(Summaries, 8, 160, 3, 0.46, 0.54, id="published"),
    ],
)
def test_attack_on_choices_succeeds_at_chance_only(
    publish: Publisher, rounds: int, voters: int, helpers: int, least: float, most: float
) -> None:
    fraction = recovered_fraction(publish, random.Random(1), rounds=rounds, voters=voters, helpers=helpers)
    assert least <= fraction <= most


async def test_read_block_time_tries_all_nodes() -> None:
    async def unavailable(height: int) -> Block | None:
        raise ChainUnavailable("pruned")

    async def missing(height: int) -> Block | None:
        return None

    async def present(height: int) -> Block | None:
        return Block(BlockHead("svote", height, 1234.5), ())

    def pool(*responses: Any) -> NodePool:
        nodes = [SimpleNamespace(client=SimpleNamespace(block=response)) for response in responses]
        return cast(NodePool, SimpleNamespace(usable_nodes=nodes))

    assert await read_block_time(pool(unavailable, missing, present), 7) == 1234.5
    assert await read_block_time(pool(unavailable, missing), 7) is None
    assert await read_block_time(pool(), 7) is None
