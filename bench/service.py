"""Measure the service: `python -m bench.service backlog|lone|posts|start [--circuit k10] [--quick]`.

Prints JSON with the medians and all runs.

backlog  confirmed shares per second from a backlog, relative to raw proofs per second on the same cores without the CPU
         time of the dev chain
lone     time from the `submit_at` of a single share to the start of its proof, and CPU usage when idle
posts    latency of a POST while all cores prove, and the reveal rate with 20 POSTs per second relative to the rate
         without
start    time from the start of the service, with a due share in its queue, to the start of the proof and to the reveal
         at the node, and the CPU time used until then by the service and by a prover
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.accept import PRODUCTION_SETTINGS
from devnet import ballot
from devnet.ballot import Ballot
from devnet.wallet import Wallet
from helper.clock import SystemClock
from helper.observability.stats import percentile
from helper.reveal.prover_pool import LOAD_IDLE_SECONDS, ProverPool
from tests.support.event_clients import cpu_seconds
from tests.support.fakes import create_provable_share
from tests.support.harness import HelperProcess, run_chain_and_helper, unix_time_in
from tests.support.process import child_pids

CORE_COUNT = os.cpu_count() or 1
RAW_PROOF_COUNTS = {"k10": 75, "k11": 16}
"""Number of proofs whose generation takes about ten seconds."""
POST_INTERVAL_SECONDS = 1 / 20
"""Interval between two posts, in seconds."""
PHASE_SECONDS = 4.0
IDLE_SECONDS = 20.0
MAX_IDLE_SHARE = 0.1
"""CPU seconds per second of all processes, above which one of them creates keys."""
POLL_SECONDS = 0.05
"""Minimum polling interval, in seconds."""


async def measure_raw_rate(circuit: str, count: int) -> float:
    """Measure proofs per second of the provers alone, one worker per core."""
    pool = ProverPool(workers=CORE_COUNT, circuits=(circuit,), clock=SystemClock(), nice=10)
    runner = asyncio.create_task(pool.run())
    try:
        await asyncio.sleep(0)
        await pool.wait_ready()
        shares = [create_provable_share() for _ in range(count)]
        began = time.perf_counter()
        await asyncio.gather(*(pool.prove(circuit, share, path) for share, path in shares))
        return count / (time.perf_counter() - began)
    finally:
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)


async def cast_sealed_votes(wallet: Wallet, round_id: bytes, shares: int) -> list[tuple[Ballot, int]]:
    """Cast enough votes on the chain for this many shares."""
    votes = -(-shares // ballot.SHARE_COUNT)
    sealed = [await wallet.seal_ballot(round_id, 1 + number % 3, number % 2, weight=100) for number in range(votes)]
    return list(zip(sealed, await asyncio.gather(*(wallet.cast_ballot(vote) for vote in sealed)), strict=True))


async def measure_backlog(circuit: str, shares: int) -> dict[str, float]:
    """Run once: all shares due in the same second.

    The raw rate is measured before and after, because the speed of a shared machine drifts within minutes.
    """
    raw = min(RAW_PROOF_COUNTS[circuit], max(4, shares // 4))
    rate_before = await measure_raw_rate(circuit, raw)
    with tempfile.TemporaryDirectory() as name:
        flags = ("--circuit", circuit, "--block-seconds", "1")
        async with run_chain_and_helper(Path(name), *flags, **PRODUCTION_SETTINGS) as (chain, helper):
            round_id = await chain.open_round(seconds=3600)
            async with Wallet(chain.url, [helper.url], mode="parallel") as wallet:
                votes = await cast_sealed_votes(wallet, round_id, shares)
                due = unix_time_in(3 + shares / 200)
                left = shares
                for vote, position in votes:
                    indices = range(min(left, ballot.SHARE_COUNT))
                    left -= len(indices)
                    await wallet.post_shares(vote, position, times=ballot.same_second_times(due), indices=indices)
            late = time.time() - due
            if late > 0:
                raise SystemExit(f"posting took {late:.1f} s too long")
            before = await chain.get("/devnet/stats")
            await wait_until_confirmed(helper, shares, rate_before)
            seconds = time.time() - due
            after = await chain.get("/devnet/stats")
    rate = (rate_before + await measure_raw_rate(circuit, raw)) / 2
    chain_cpu = after["cpu_seconds"] - before["cpu_seconds"]
    baseline = rate * (1 - chain_cpu / (CORE_COUNT * seconds))
    return {
        "raw_proofs_per_second": rate,
        "revealed_per_second": shares / seconds,
        "chain_cpu_seconds": chain_cpu,
        "baseline": baseline,
        "ratio": shares / seconds / baseline,
    }


async def wait_until_confirmed(helper: HelperProcess, shares: int, rate: float) -> None:
    """Wait until this many shares are confirmed.

    Polling costs the provers a few milliseconds. Until all shares are proven, the interval is half of the expected
    remaining time.
    """
    while (counts := await helper.service_counts()).get("confirmed", 0) < shares:
        await asyncio.sleep(max(POLL_SECONDS, (shares - counts.get("broadcast", 0)) / rate / 2))


async def wait_until_keys_exist(pids: Sequence[int]) -> None:
    """Wait until idle provers have created the keys of all circuits: until no process uses much CPU time any more."""
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < 2 * LOAD_IDLE_SECONDS:
        used = sum(map(cpu_seconds, pids))
        await asyncio.sleep(1.0)
        if sum(map(cpu_seconds, pids)) - used > MAX_IDLE_SHARE:
            quiet_since = time.monotonic()


async def measure_lone_shares(circuit: str, shares: int) -> dict[str, float]:
    """Run once: one share per second on an otherwise idle service, then an idle period."""
    with tempfile.TemporaryDirectory() as name:
        flags = ("--circuit", circuit, "--block-seconds", "5")
        async with run_chain_and_helper(Path(name), *flags, **PRODUCTION_SETTINGS) as (chain, helper):
            round_id = await chain.open_round(seconds=3600)
            async with Wallet(chain.url, [helper.url], mode="parallel") as wallet:
                votes = await cast_sealed_votes(wallet, round_id, shares)
                start, number = unix_time_in(2 + shares / 8), 0
                for vote, position in votes:
                    indices = range(min(shares - number, ballot.SHARE_COUNT))
                    times = [start + number + index for index in range(ballot.SHARE_COUNT)]
                    number += len(indices)
                    await wallet.post_shares(vote, position, times=times, indices=indices)
            while (await helper.service_counts()).get("confirmed", 0) < shares:
                await asyncio.sleep(0.2)
            timing = (await helper.service_stats())["lateness_start"]
            pids = [helper.pid, *await helper.worker_pids()]
            await wait_until_keys_exist(pids)
            used, seconds = sum(map(cpu_seconds, pids)), min(IDLE_SECONDS, float(shares))
            await asyncio.sleep(seconds)
            used = sum(map(cpu_seconds, pids)) - used
    return {
        "idle_percent": 100 * used / seconds,
        "p50_ms": timing["p50_ms"],
        "p99_ms": timing["p99_ms"],
        "min_ms": timing["min_ms"],
        "shares": timing["count"],
    }


async def measure_posts(circuit: str, shares: int) -> dict[str, float]:
    """Run once: a backlog keeps every core proving. Shares are posted at 20 per second in every other phase."""
    with tempfile.TemporaryDirectory() as name:
        flags = ("--circuit", circuit, "--block-seconds", "1")
        async with run_chain_and_helper(Path(name), *flags, **PRODUCTION_SETTINGS) as (chain, helper):
            round_id = await chain.open_round(seconds=3600)
            async with Wallet(chain.url, [helper.url], mode="parallel") as wallet:
                busy = await cast_sealed_votes(wallet, round_id, shares)
                posted = await cast_sealed_votes(wallet, round_id, shares)
                for vote, position in busy:
                    await wallet.post_shares(vote, position, times=ballot.immediate_times())
            bodies = [
                ballot.post_body(vote, share, position, unix_time_in(3000))
                for vote, position in posted
                for share in vote.shares
            ]
            random.shuffle(bodies)
            waits, rates = await _run_phases(helper, iter(bodies[: shares // 2]))
            if not (await helper.service_stats())["in_hand"]:
                raise SystemExit("the backlog was empty before all shares were posted")
    rate_without, rate_with = (sum(rates[offset::2]) / len(rates[offset::2]) for offset in (0, 1))
    return {
        "p50_ms": 1000 * median(waits),
        "p99_ms": 1000 * (percentile(waits, 0.99) or 0.0),
        "max_ms": 1000 * max(waits),
        "posts": len(waits),
        "revealed_without_posts_per_second": rate_without,
        "revealed_with_posts_per_second": rate_with,
        "ratio": rate_with / rate_without,
    }


async def _run_phases(helper: HelperProcess, bodies: Iterator[Any]) -> tuple[list[float], list[float]]:
    """Return the seconds per POST, and the reveals per second of alternating phases without and with POSTs."""
    waits: list[float] = []
    rates: list[float] = []
    left = True
    while left:
        for posting in (False, True):
            began, before = time.perf_counter(), await _broadcast_count(helper)
            while (now := time.perf_counter() - began) < PHASE_SECONDS:
                body = next(bodies, None) if posting else None
                if body is None:
                    left = left and not posting
                    await asyncio.sleep(min(POST_INTERVAL_SECONDS, PHASE_SECONDS - now))
                    continue
                sent_at = time.perf_counter()
                response = await helper.post_share(body)
                waits.append(time.perf_counter() - sent_at)
                assert response.json() == {"status": "queued"}, response.text
                await asyncio.sleep(max(0.0, POST_INTERVAL_SECONDS - waits[-1]))
            rates.append((await _broadcast_count(helper) - before) / (time.perf_counter() - began))
    return waits, rates


async def measure_start(circuit: str, starts: int) -> dict[str, float]:
    """Run once: before each start, a share becomes due while the service is not running."""
    runs: list[list[float]] = []
    with tempfile.TemporaryDirectory() as name:
        flags = ("--circuit", circuit, "--block-seconds", "5")
        async with run_chain_and_helper(Path(name), *flags, **PRODUCTION_SETTINGS) as (chain, helper):
            round_id = await chain.open_round(seconds=3600)
            async with Wallet(chain.url, [helper.url], mode="parallel") as wallet:
                (vote, position), *_ = await cast_sealed_votes(wallet, round_id, 1 + starts)
                await wallet.post_shares(vote, position, times=ballot.immediate_times(), indices=[0])
            await wait_until_confirmed(helper, 1, 1.0)  # the helper knows the circuit then
            for index in range(1, 1 + starts):
                await helper.post_share(ballot.post_body(vote, vote.shares[index], position, unix_time_in(2)))
                await helper.kill()
                due = helper.query_rows("SELECT due_ms FROM shares WHERE state = 0")[0][0] / 1000
                await asyncio.sleep(due - time.time())
                began = time.time()
                helper.spawn()
                while len(sent := await chain.broadcasts()) <= index:
                    await asyncio.sleep(POLL_SECONDS)
                used = [cpu_seconds(helper.pid), *map(cpu_seconds, child_pids(helper.pid))]
                await helper.wait_until_listening()
                lateness = (await helper.service_stats())["lateness_start"]["p50_ms"] / 1000
                runs.append([due + lateness - began, sent[-1]["time"] - began, used[0], max(used[1:])])
    names = ("proof_seconds", "reveal_seconds", "service_cpu_seconds", "prover_cpu_seconds")
    return dict(zip(names, map(median, zip(*runs, strict=True)), strict=True))


async def _broadcast_count(helper: HelperProcess) -> int:
    """Return the number of shares revealed since the start."""
    return (await helper.service_counts()).get("broadcast", 0)


MEASURES = {
    "backlog": measure_backlog,
    "lone": measure_lone_shares,
    "posts": measure_posts,
    "start": measure_start,
}
SHARES = {
    "backlog": {"k10": 300, "k11": 100},
    "lone": {"k10": 32, "k11": 32},
    "posts": {"k10": 480, "k11": 160},
    "start": {"k10": 5, "k11": 5},
}
QUICK = {
    "backlog": {"k10": 40, "k11": 10},
    "lone": {"k10": 6, "k11": 6},
    "posts": {"k10": 96, "k11": 32},
    "start": {"k10": 1, "k11": 1},
}


def main() -> None:
    """Run the measurement and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=list(MEASURES))
    parser.add_argument("--circuit", choices=["k10", "k11"], default="k10")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run with fewer shares")
    options = parser.parse_args()
    shares = (QUICK if options.quick else SHARES)[options.measure][options.circuit]
    runs: list[dict[str, Any]] = []
    for number in range(1 if options.quick else options.runs):
        print(f"{options.measure} {options.circuit}: run {number + 1}", file=sys.stderr)
        runs.append(asyncio.run(MEASURES[options.measure](options.circuit, shares)))
    figures = {name: round(median(run[name] for run in runs), 3) for name in runs[0]}
    print(json.dumps({"name": options.measure, "circuit": options.circuit, "median": figures, "runs": runs}))


if __name__ == "__main__":
    main()
