"""What the operators' page computes from the summaries of a helper of ours and of the original, side by side.

The page asks each helper every 30 s. It joins buckets with the same start and end, calls an old summary stale, and
reports a backlog if overdue and processing shares of a past bucket have grown, and its submitted ones have not.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from helper.core.share import ShareState
from helper.observability.queue_summary import DISTANCES
from helper.store.models import DueBucket
from tests.campaign.summary_attack import END, HOURS, ROUND, START, SimulatedQueue, SimulatedVote, Summaries
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio

HOUR = 3600
POLL_SECONDS = 30
COUNTS = ("submitted", "pending_future", "overdue_pending", "processing", "failed", "total")
Summary = Mapping[str, Any]
Window = tuple[int, int]


class StoppedQueue(SimulatedQueue):
    """The queue of a helper that reveals no share from `stops_at` to `continues_at`, and the due ones then."""

    def __init__(self, dues: Sequence[float], clock: FakeClock, stops_at: float, continues_at: float) -> None:
        super().__init__([SimulatedVote(START, 0, 0, tuple(dues))], clock)
        self.stops_at, self.continues_at = stops_at, continues_at

    def classify(self, due: float) -> str:
        now = self.clock.now()
        if due > now:
            return "pending_future"
        return "overdue_pending" if self.stops_at <= due and now < self.continues_at else "submitted"

    async def count_shares(self) -> dict[bytes, dict[ShareState, int]]:
        kinds = Counter(self.classify(due) for _, due in self.shares)
        return {ROUND: {ShareState.CONFIRMED: kinds["submitted"]}}

    async def count_by_due_bucket(self, _round: bytes, *, start: int, width: int, now: float) -> list[DueBucket]:
        groups = Counter((self.classify(due), int((due - start) // width)) for _, due in self.shares)
        return [
            DueBucket(ShareState.WAITING, is_due=kind == "overdue_pending", index=index, count=count)
            for (kind, index), count in groups.items()
            if kind != "submitted"
        ]


def summarize_as_original(queue: StoppedQueue) -> Summary:
    """The summary of the original helper: exact, with each share in the bucket of its due time."""
    counts = Counter((queue.classify(due), int((due - START) // HOUR)) for _, due in queue.shares)
    buckets = []
    for index, start in enumerate(range(START, END, HOUR)):
        bucket: dict[str, int] = {name: counts[name, index] for name in COUNTS}
        buckets.append({**bucket, "total": sum(bucket.values()), "start": start, "end": min(start + HOUR, END)})
    return {
        "bucket_seconds": HOUR,
        "created_at_time": START,
        "vote_end_time": END,
        "generated_at": int(queue.clock.now()),
        "last_minute_start": END - 6 * HOUR,
        "buckets": buckets,
    }


def join_buckets(summaries: Sequence[Summary]) -> dict[Window, list[Summary]]:
    """The buckets of all helpers by start and end."""
    joined: dict[Window, list[Summary]] = {}
    for summary in summaries:
        for bucket in summary["buckets"]:
            joined.setdefault((bucket["start"], bucket["end"]), []).append(bucket)
    return joined


def is_stale(summary: Summary, now: float) -> bool:
    return bool(now - summary["generated_at"] > max(300, 2 * summary["bucket_seconds"]))


def find_backlogs(before: Summary, after: Summary, now: float) -> list[Window]:
    """The past buckets for which the page reports a backlog."""
    known = join_buckets([before])
    return [
        window
        for window, (bucket,) in join_buckets([after]).items()
        if window[1] <= now
        and window in known
        and sum(bucket[name] - known[window][0][name] for name in ("overdue_pending", "processing")) > 0
        and bucket["submitted"] <= known[window][0]["submitted"]
    ]


def find_differences(ours: Summary, original: Summary, now: float) -> list[object]:
    """Sums and past buckets that differ by more than our counts may be late. Ours are those of this moment."""
    sums = {name: [sum(bucket[name] for bucket in each["buckets"]) for each in (ours, original)] for name in COUNTS[:2]}
    past = {
        window: [bucket["overdue_pending"] for bucket in buckets]
        for window, buckets in join_buckets([ours, original]).items()
        if window[1] <= now
    }
    return [found for found in (*sums.items(), *past.items()) if abs(found[1][0] - found[1][1]) >= DISTANCES.stop]


async def watch(queue: StoppedQueue, first: int, last: int) -> dict[str, list[tuple[float, Window]]]:
    """Poll both helpers from one hour of the round to another. Returns the reported backlogs with their times."""
    ours, clock = Summaries(queue, random.Random(1)), queue.clock
    reported: dict[str, list[tuple[float, Window]]] = {"ours": [], "original": []}
    clock.advance(START + first * HOUR - clock.now())
    previous: dict[str, Summary] = {}
    while clock.now() < START + last * HOUR:
        now = clock.now()
        summaries: dict[str, Summary] = {"ours": dict(await ours.read()), "original": summarize_as_original(queue)}
        assert summaries["original"].keys() <= summaries["ours"].keys()
        assert all(len(buckets) == 2 for buckets in join_buckets([*summaries.values()]).values()), "the same grid"
        assert all(
            summaries["ours"][name] == summaries["original"][name]
            for name in ("bucket_seconds", "created_at_time", "vote_end_time", "last_minute_start")
        )
        for name, summary in summaries.items():
            assert not is_stale(summary, now)
            assert all(bucket["total"] == sum(bucket[each] for each in COUNTS[:-1]) for bucket in summary["buckets"])
            if name in previous:
                reported[name] += [(now, window) for window in find_backlogs(previous[name], summary, now)]
        if int(now) % HOUR == 0 and previous and summaries["ours"]["counted_at"] == now:
            assert find_differences(summaries["ours"], summaries["original"], now) == []
        previous = summaries
        clock.advance(POLL_SECONDS)
    return reported


@pytest.mark.rule("Q3", "Q4")
@pytest.mark.parametrize("stops", [False, True], ids=["reveals", "stopped for two hours"])
async def test_page_reads_our_summary_as_the_originals(stops: bool) -> None:
    rng = random.Random(2)
    busy = (START + 50 * HOUR, START + 51 * HOUR)
    dues = [rng.uniform(START, START + (HOURS - 6) * HOUR) for _ in range(3000)]
    dues += [rng.uniform(*busy) for _ in range(1500)]
    clock = FakeClock(START)
    queue = StoppedQueue(dues, clock, busy[0] if stops else END, busy[1] + HOUR if stops else END)
    reported = await watch(queue, 49, 53)
    windows = {name: {window for _, window in backlogs} for name, backlogs in reported.items()}
    if not stops:
        assert windows == {"ours": set(), "original": set()}
        return
    assert windows["ours"] == {busy}
    assert busy in windows["original"]
    first = {name: min(at for at, window in backlogs if window == busy) for name, backlogs in reported.items()}
    assert 0 <= first["ours"] - first["original"] <= HOUR
