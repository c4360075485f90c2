"""Measure the cost of a large queue: `python -m bench.queue [--quick]`.

Runs the real service with the fake prover and its own chain on a database that is filled in steps
(`bench.fill_database`). An empty database is measured immediately before or after the largest one, because the speed of
a shared machine drifts within minutes. Each run at each size measures:

- the time from the start of the process to the first correct responses (a duplicate and a new share) and to readiness,
  after a shutdown and after a crash
- accepted shares per second
- the lateness of a single share's proof, and the dispatch rate of many shares that are due in the same second
- the service's memory and the file's size

Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.accept import CONNECTIONS, PRODUCTION_SETTINGS, ROUND_SECONDS, cast_votes, interleave_bodies, run_load
from bench.fill_database import delete_newer_shares, insert_shares
from devnet import ballot
from devnet.ballot import Ballot
from tests.support.devnet import DevChain
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, unix_time_in

QUEUE_SIZES = (10_000, 100_000, 1_000_000)
EXTRA_PAIRS = 2
"""Additional runs with the largest size and the empty queue, because short load measurements vary by 20 %."""
LONE_SHARES = 8
"""Number of shares that are due at intervals of one second."""
BURST_VOTES = 4
"""Votes whose shares are all due in the same second."""
CastBallot = tuple[Ballot, int]


@dataclass
class QueueBench:
    """The service on a database of a given size.

    Attributes:
        directory: working directory.
        http: HTTP client.
        chain: the chain.
        known_body: body of a share that was enqueued before the measurements.
        bodies_file: file of bodies with distant due times, one per line.
        votes: votes that are not posted yet. Each measurement removes the ones it posts.
        size: number of inserted shares.
        last_row_id: newest row id of the inserted shares.
    """

    directory: Path
    http: httpx.AsyncClient
    chain: DevChain
    known_body: Any
    bodies_file: Path
    votes: Iterator[CastBallot]
    size: int = 0
    last_row_id: int = 0

    def create_helper(self) -> HelperProcess:
        """Create the service without starting it."""
        return HelperProcess(self.directory, self.http, self.chain, program=STAND_IN_PROGRAM, **PRODUCTION_SETTINGS)

    @contextlib.asynccontextmanager
    async def run_service(self, times: dict[str, float], name: str) -> AsyncIterator[HelperProcess]:
        """Run the service. Appends the seconds to the first correct responses and to readiness to `times`."""
        helper, began = self.create_helper(), time.perf_counter()
        vote, position = next(self.votes)
        helper.spawn()
        try:
            async with helper.timeout("responds correctly", 300):
                await helper.wait_until_listening()
                await self._wait_for_status(helper, self.known_body, "duplicate")
                new = ballot.post_body(vote, vote.shares[0], position, unix_time_in(ROUND_SECONDS / 2))
                await self._wait_for_status(helper, new, "queued")
            times[f"{name}_answers_s"] = time.perf_counter() - began
            await helper.wait_until_ready()
            times[f"{name}_ready_s"] = time.perf_counter() - began
            yield helper
        finally:
            await helper.kill()

    async def _wait_for_status(self, helper: HelperProcess, body: Any, status: str) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                response = await helper.post_share(body)
                if response.status_code == 200:
                    if response.json() != {"status": status}:
                        raise SystemExit(f"expected {status}, got {response.text}")
                    return
            await asyncio.sleep(0.01)

    def fill_to(self, round_id: bytes, size: int) -> None:
        """Fill the database to this size."""
        print(f"filling to {size} shares", file=sys.stderr)
        insert_shares(
            self.create_helper().db, round_id, size - self.size, due=unix_time_in(ROUND_SECONDS / 2), first=self.size
        )
        self.size, self.last_row_id = size, last_row_id(self.create_helper())

    async def measure(self, seconds: int) -> dict[str, float]:
        """Run once at the current size. The size is restored afterwards."""
        print(f"{self.size} shares", file=sys.stderr)
        db = self.create_helper().db
        figures: dict[str, float] = {"size": self.size, "bytes_each": db.stat().st_size / max(1, self.size)}
        async with self.run_service(figures, "start") as helper:
            load = await run_load(helper.url, self.bodies_file, CONNECTIONS, seconds)
            figures |= {f"accept_{name}": value for name, value in load.items()}
            await self._measure_dispatch(helper, figures)
            figures["memory_mb"] = memory_mb(helper.pid)
        async with self.run_service(figures, "crash") as helper:
            await helper.stop()
        delete_newer_shares(db, after=self.last_row_id)
        return figures

    async def _measure_dispatch(self, helper: HelperProcess, figures: dict[str, float]) -> None:
        vote, position = next(self.votes)
        first = unix_time_in(2)
        for number in range(LONE_SHARES):
            await _post_accepted(helper, ballot.post_body(vote, vote.shares[number], position, first + number))
        await helper.wait_until(
            "has dispatched lone shares", lambda facts: facts["counts"].get("broadcast", 0) >= LONE_SHARES
        )
        timing = (await helper.service_stats())["lateness_start"]
        figures |= {"lone_p50_ms": timing["p50_ms"], "lone_max_ms": timing["max_ms"]}
        votes = [next(self.votes) for _ in range(BURST_VOTES)]
        due = unix_time_in(3 + BURST_VOTES * ballot.SHARE_COUNT / 40)
        for vote, position in votes:
            posts = (_post_accepted(helper, ballot.post_body(vote, share, position, due)) for share in vote.shares)
            await asyncio.gather(*posts)
        if time.time() > due:
            raise SystemExit("posting took too long")
        burst = BURST_VOTES * ballot.SHARE_COUNT
        await asyncio.sleep(due - time.time())
        async with helper.timeout("has dispatched a burst", 300):
            while (await helper.service_counts()).get("broadcast", 0) < LONE_SHARES + burst:
                await asyncio.sleep(0.02)
        figures["dispatch_per_second"] = burst / (time.time() - due)


def memory_mb(pid: int) -> float:
    """Return a process's peak memory in MB."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


async def measure(sizes: tuple[int, ...], runs: int, votes: int, seconds: int) -> list[dict[str, float]]:
    """Run every measurement at every size, with the empty queue next to the largest."""
    results: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        async with httpx.AsyncClient(timeout=30) as http:
            chain = DevChain(directory, http, "--stand-in-proofs", "--block-seconds", "1")
            await chain.start()
            try:
                round_id = await chain.open_round(seconds=ROUND_SECONDS)
                pairs = runs + EXTRA_PAIRS if runs > 1 else runs
                measures = (len(sizes) - 1) * runs + 2 * pairs
                cast = await cast_votes(chain, round_id, votes + measures * (3 + BURST_VOTES) + 8)
                posted = directory / "bodies"
                first, *later = interleave_bodies(cast[:votes])
                posted.write_text("\n".join(later) + "\n")
                rest = iter(cast[votes:])
                empty, queue = (
                    QueueBench(directory / name, http, chain, json.loads(first), posted, rest)
                    for name in ("empty", "filled")
                )
                for bench in (empty, queue):
                    await _prepare_service(bench, round_id, max(position for _, position in cast))
                for size in sizes:
                    queue.fill_to(round_id, size)
                    benches, times = ((queue, empty), pairs) if size == max(sizes) else ((queue,), runs)
                    for number in range(times):
                        for bench in reversed(benches) if number % 2 else benches:
                            results.append(await bench.measure(seconds))
            finally:
                await chain.kill()
    return results


async def _prepare_service(queue: QueueBench, round_id: bytes, position: int) -> None:
    """Wait until the service knows the round and votes, then post the known share."""
    queue.directory.mkdir()
    helper = queue.create_helper()
    await helper.start()
    try:
        await helper.wait_until_ready()
        await helper.wait_for_leaf(round_id, position)
        await _post_accepted(helper, queue.known_body)
    finally:
        await helper.stop()
    queue.last_row_id = last_row_id(queue.create_helper())


async def _post_accepted(helper: HelperProcess, body: Any) -> None:
    """Post a share that must be accepted."""
    response = await helper.post_share(body)
    assert response.json() == {"status": "queued"}, response.text


def last_row_id(helper: HelperProcess) -> int:
    """Return the newest row id."""
    return int(helper.query_rows("SELECT max(id) FROM shares")[0][0])


def main() -> None:
    """Run the measurement and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=QUEUE_SIZES)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run with 10,000 shares and one with an empty queue")
    options = parser.parse_args()
    sizes, runs, votes, seconds = (
        (QUEUE_SIZES[:1], 1, 1280, 1) if options.quick else (options.sizes, options.runs, 2560, 2)
    )
    print(json.dumps({"name": "queue", "runs": asyncio.run(measure(tuple(sizes), runs, votes, seconds))}))


if __name__ == "__main__":
    main()
