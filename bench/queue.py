"""What a great queue costs: `python -m bench.queue [--quick]`.

One database, filled further and further (`bench.fill_database`), under the real service with the stand-in prover and a
chain of its own; and one that stays empty, measured right beside the largest size, as the speed of a machine that
others use too drifts within minutes. At each size, in every run: from the process's start to the first right answers (a
share that is known, a new one) and to ready, after an end in order and after a crash; how many shares a second are
taken in; how late a lone share's proof begins, and how fast many of one second are dispatched; the daemon's memory, and
the file's size. JSON on standard output.
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

from bench.accept import ROUND_SECONDS, bodies, load, voted
from bench.fill_database import fill, forget
from devnet import ballot
from devnet.ballot import Ballot
from tests.support.devnet import Chain
from tests.support.harness import STAND_IN, Helper, soon

SIZES = (10_000, 100_000, 1_000_000)
SETTINGS: dict[str, Any] = {"log": {"level": "info"}, "chain": {"poll_seconds": 1}}
CONNECTIONS = 64
MORE_PAIRS = 2
"""Runs more than elsewhere with the largest size and the empty queue: a load of seconds goes up and down by a fifth."""
LONE = 8
"""Shares that are due one after the other, a second apart."""
BURST_VOTES = 4
"""Votes all of whose shares are due in one second."""
Cast = tuple[Ballot, int]


@dataclass
class Queue:
    """The service on a database of a certain size.

    Attributes:
        folder: where everything lies.
        http: asks.
        chain: the chain.
        known: the body of a share that was taken before anything is measured.
        posted: a file of bodies that are due long after, one a line.
        votes: votes that were not posted yet; each measure takes some.
        size: how many shares were filled in.
        last: the newest of their rows.
    """

    folder: Path
    http: httpx.AsyncClient
    chain: Chain
    known: Any
    posted: Path
    votes: Iterator[Cast]
    size: int = 0
    last: int = 0

    def helper(self) -> Helper:
        """The service, not started yet."""
        return Helper(self.folder, self.http, self.chain, program=STAND_IN, **SETTINGS)

    @contextlib.asynccontextmanager
    async def started(self, times: dict[str, float], name: str) -> AsyncIterator[Helper]:
        """With the service, from its start; the seconds to its first right answers and to ready go to `times`."""
        helper, began = self.helper(), time.perf_counter()
        vote, position = next(self.votes)
        helper.launch()
        try:
            async with helper.patience("answers as it should", 300):
                await helper.listening()
                await self._until(helper, self.known, "duplicate")
                new = ballot.post_body(vote, vote.shares[0], position, soon(ROUND_SECONDS / 2))
                await self._until(helper, new, "queued")
            times[f"{name}_answers_s"] = time.perf_counter() - began
            await helper.ready()
            times[f"{name}_ready_s"] = time.perf_counter() - began
            yield helper
        finally:
            await helper.kill()

    async def _until(self, helper: Helper, body: Any, status: str) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = await helper.post(body)
                if answer.status_code == 200:
                    if answer.json() != {"status": status}:
                        raise SystemExit(f"a share that is {status} was answered {answer.text}")
                    return
            await asyncio.sleep(0.01)

    def fill(self, round_id: bytes, size: int) -> None:
        """Fill it up to a size."""
        print(f"filling up to {size}", file=sys.stderr)
        fill(self.helper().db, round_id, size - self.size, due=soon(ROUND_SECONDS / 2), first=self.size)
        self.size, self.last = size, last_id(self.helper())

    async def measure(self, seconds: int) -> dict[str, float]:
        """One run at the size that the queue has; it is left at this size."""
        print(f"{self.size} shares", file=sys.stderr)
        db = self.helper().db
        figures: dict[str, float] = {"size": self.size, "bytes_each": db.stat().st_size / max(1, self.size)}
        async with self.started(figures, "start") as helper:
            taken = await load(helper.url, self.posted, CONNECTIONS, seconds)
            figures |= {f"accept_{name}": value for name, value in taken.items()}
            await self._dispatch(helper, figures)
            figures["memory_mb"] = memory_mb(helper.pid)
        async with self.started(figures, "crash") as helper:
            await helper.stop()
        forget(db, after=self.last)
        return figures

    async def _dispatch(self, helper: Helper, figures: dict[str, float]) -> None:
        vote, position = next(self.votes)
        first = soon(2)
        for number in range(LONE):
            await _queued(helper, ballot.post_body(vote, vote.shares[number], position, first + number))
        await helper.until("has dispatched lone shares", lambda facts: facts["counts"].get("broadcast", 0) >= LONE)
        timing = (await helper.service())["lateness_start"]
        figures |= {"lone_p50_ms": timing["p50_ms"], "lone_max_ms": timing["max_ms"]}
        votes = [next(self.votes) for _ in range(BURST_VOTES)]
        due = soon(3 + BURST_VOTES * ballot.SHARES / 40)
        for vote, position in votes:
            posts = (_queued(helper, ballot.post_body(vote, share, position, due)) for share in vote.shares)
            await asyncio.gather(*posts)
        if time.time() > due:
            raise SystemExit("posting took too long")
        burst = BURST_VOTES * ballot.SHARES
        await asyncio.sleep(due - time.time())
        async with helper.patience("has dispatched a burst", 300):
            while (await helper.counts()).get("broadcast", 0) < LONE + burst:
                await asyncio.sleep(0.02)
        figures["dispatch_per_second"] = burst / (time.time() - due)


def memory_mb(pid: int) -> float:
    """The most that a process had in memory."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


async def measure(sizes: tuple[int, ...], runs: int, votes: int, seconds: int) -> list[dict[str, float]]:
    """Every run at every size, and with the empty queue beside the largest."""
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with httpx.AsyncClient(timeout=30) as http:
            chain = Chain(folder, http, "--stand-in-proofs", "--block-seconds", "1")
            await chain.start()
            try:
                round_id = await chain.open_round(seconds=ROUND_SECONDS)
                pairs = runs + MORE_PAIRS if runs > 1 else runs
                measures = (len(sizes) - 1) * runs + 2 * pairs
                cast = await voted(chain, round_id, votes + measures * (3 + BURST_VOTES) + 8)
                posted = folder / "bodies"
                first, *later = bodies(cast[:votes])
                posted.write_text("\n".join(later) + "\n")
                rest = iter(cast[votes:])
                empty, queue = (
                    Queue(folder / place, http, chain, json.loads(first), posted, rest) for place in ("empty", "filled")
                )
                for one in (empty, queue):
                    await _first(one, round_id, max(position for _, position in cast))
                for size in sizes:
                    queue.fill(round_id, size)
                    both, times = ((queue, empty), pairs) if size == max(sizes) else ((queue,), runs)
                    for number in range(times):
                        for one in reversed(both) if number % 2 else both:
                            found.append(await one.measure(seconds))
            finally:
                await chain.kill()
    return found


async def _first(queue: Queue, round_id: bytes, position: int) -> None:
    """Let the service learn of round and votes, and take the share that is known from then on."""
    queue.folder.mkdir()
    helper = queue.helper()
    await helper.start()
    try:
        await helper.ready()
        await helper.knows_leaf(round_id, position)
        await _queued(helper, queue.known)
    finally:
        await helper.stop()
    queue.last = last_id(queue.helper())


async def _queued(helper: Helper, body: Any) -> None:
    """Post a share that must be taken."""
    answer = await helper.post(body)
    assert answer.json() == {"status": "queued"}, answer.text


def last_id(helper: Helper) -> int:
    """The newest row's number."""
    return int(helper.rows("SELECT max(id) FROM shares")[0][0])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run, with 10,000 and with an empty queue")
    options = parser.parse_args()
    sizes, runs, votes, seconds = (SIZES[:1], 1, 640, 1) if options.quick else (options.sizes, options.runs, 1600, 2)
    print(json.dumps({"name": "queue", "runs": asyncio.run(measure(tuple(sizes), runs, votes, seconds))}))


if __name__ == "__main__":
    main()
