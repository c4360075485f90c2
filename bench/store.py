"""Measure the store alone: enqueued shares per second, and the duration of a claim as the queue grows.

    python bench/store.py [--quick] [--dir DIR]

Prints one JSON object. The shares are random bytes, because the store does not interpret them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from pathlib import Path

from helper.core.share import Share
from helper.store.rows import PreparedReveal
from helper.store.sqlite.store import SqliteStore

ROUND_ID = b"r" * 32
START_TIME = 1_800_000_000


@dataclass
class Figures:
    """Measured values. Times are in milliseconds unless the name states otherwise."""

    callers: int
    enqueued_per_second: float
    enqueue_p50: float
    enqueue_p99: float
    operations_per_commit: float
    bytes_per_share: float
    claim_p50: dict[int, float]
    claim_p99: dict[int, float]
    next_due_p50: dict[int, float]
    confirm_per_second: float
    erase_after_block_p99: float
    restart_seconds: float
    rss_mb: float


def create_share(number: int) -> tuple[Share, bytes]:
    """Create a share of random bytes with its own key, due within one hour.

    Due times cover the 3,600 seconds of that hour, so other shares are due in the same second.
    """
    noise = os.urandom(704)
    share = Share(
        round_id=ROUND_ID,
        share_index=number % 16,
        proposal_id=1,
        vote_decision=1,
        tree_position=number // 16,
        submit_at=START_TIME + number % 3600,
        shares_hash=noise[:32],
        share_comms=noise[32:544],
        primary_blind=noise[544:576],
        c1=noise[576:608],
        c2=noise[608:640],
    )
    return share, noise[640:672]


async def time_call(call: Awaitable[object], times: list[float]) -> None:
    """Await a call and append its milliseconds to `times`."""
    began = time.perf_counter()
    await call
    times.append((time.perf_counter() - began) * 1000)


async def enqueue_shares(store: SqliteStore, first: int, last: int, callers: int, times: list[float]) -> float:
    """Enqueue shares with this many concurrent callers. Returns shares per second."""
    numbers = iter(range(first, last))

    async def enqueue_next() -> None:
        for number in numbers:
            share, nullifier = create_share(number)
            await time_call(store.enqueue(share, nullifier, now=START_TIME - 100.0), times)

    began = time.perf_counter()
    await asyncio.gather(*(enqueue_next() for _ in range(callers)))
    return (last - first) / (time.perf_counter() - began)


def percentile(times: list[float], part: float) -> float:
    """Return this quantile of the times."""
    return sorted(times)[min(len(times) - 1, int(len(times) * part))]


async def measure_reads(store: SqliteStore, figures: Figures, size: int) -> None:
    """Measure claims and reads of the next due time with `size` shares in the queue."""
    claims: list[float] = []
    reads: list[float] = []
    for second in range(40):
        await time_call(store.claim_due(now=START_TIME + second, limit=4, rounds=[ROUND_ID]), claims)
        await time_call(store.next_due_ms([ROUND_ID]), reads)
    figures.claim_p50[size] = statistics.median(claims)
    figures.claim_p99[size] = percentile(claims, 0.99)
    figures.next_due_p50[size] = statistics.median(reads)


async def measure_confirmation(store: SqliteStore, figures: Figures) -> None:
    """Send 1,000 shares and confirm them in blocks of 100."""
    queued = await store.claim_due(now=START_TIME + 3600, limit=1000, rounds=[ROUND_ID])
    prepared = PreparedReveal(b"m" * 5_300, b"h" * 32, 100, "k10", 101)
    await asyncio.gather(*(store.prepare(share.id, prepared) for share in queued))
    erased: list[float] = []
    spent = [(ROUND_ID, share.nullifier) for share in queued]
    began = time.perf_counter()
    for height in range(10):
        await store.apply_block(height, spent[height * 100 : height * 100 + 100], now=START_TIME)
        await time_call(store.wait_for_erasure(), erased)
    figures.confirm_per_second = len(spent) / (time.perf_counter() - began)
    figures.erase_after_block_p99 = percentile(erased, 0.99)


async def measure(path: Path, sizes: list[int], callers: int) -> Figures:
    """Measure everything on a new file."""
    store = SqliteStore(path)
    await store.open()
    times: list[float] = []
    rate = await enqueue_shares(store, 0, sizes[0], callers, times)
    figures = Figures(
        callers=callers,
        enqueued_per_second=rate,
        enqueue_p50=statistics.median(times),
        enqueue_p99=percentile(times, 0.99),
        operations_per_commit=store.stats.operations / store.stats.commits,
        bytes_per_share=0,
        claim_p50={},
        claim_p99={},
        next_due_p50={},
        confirm_per_second=0,
        erase_after_block_p99=0,
        restart_seconds=0,
        rss_mb=0,
    )
    for size, previous in zip(sizes, [sizes[0], *sizes], strict=False):
        if size > previous:
            await enqueue_shares(store, previous, size, callers, [])
        await measure_reads(store, figures, size)
    figures.bytes_per_share = path.stat().st_size / sizes[-1]
    await measure_confirmation(store, figures)
    await store.close()
    began = time.perf_counter()
    await store.open()
    figures.restart_seconds = time.perf_counter() - began
    await store.close()
    figures.rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return figures


def main() -> None:
    """Run the measurement and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="smaller queues")
    parser.add_argument("--dir", type=Path, help="directory on the disk to measure")
    parser.add_argument("--callers", type=int, default=64)
    options = parser.parse_args()
    sizes = [5_000, 20_000] if options.quick else [10_000, 300_000]
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        figures = asyncio.run(measure(Path(folder) / "bench.db", sizes, options.callers))
    sys.stdout.write(json.dumps(asdict(figures)) + "\n")


if __name__ == "__main__":
    main()
