"""The service's figures, one command each: `python -m bench.service backlog|lone|posts [--circuit k10] [--quick]`.

JSON on standard output, medians over the runs with every run beside them.

backlog  shares revealed per second from a backlog, to confirmed, as a ratio to raw proofs per second on the same cores
         less what the dev chain took of them
lone     from a lone share's `submit_at` to the start of its proof
posts    how long a POST takes while all cores prove
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
from pathlib import Path
from statistics import median
from typing import Any

from devnet import ballot
from devnet.ballot import Ballot
from devnet.wallet import Wallet
from helper.clock import SystemClock
from helper.prover.job import ProofJob
from helper.prover.pool import ProverPool
from helper.prover.selftest import sample_job
from helper.telemetry.stats import percentile
from tests.support.harness import running, soon

CORES = os.cpu_count() or 1


async def raw_rate(circuit: str, proofs_wanted: int) -> float:
    """Proofs per second of the provers alone, one worker a core."""
    pool = ProverPool(workers=CORES, circuits=(circuit,), clock=SystemClock())
    runner = asyncio.create_task(pool.run())
    try:
        await asyncio.sleep(0)
        await pool.wait_ready()
        jobs = [ProofJob(circuit=circuit, **sample_job()) for _ in range(proofs_wanted)]
        began = time.perf_counter()
        await asyncio.gather(*(pool.prove(job) for job in jobs))
        return proofs_wanted / (time.perf_counter() - began)
    finally:
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)


async def sealed_votes(wallet: Wallet, round_id: bytes, shares: int) -> list[tuple[Ballot, int]]:
    """Votes cast on the chain, enough for so many shares."""
    votes = -(-shares // ballot.SHARES)
    made = [await wallet.seal(round_id, 1 + number % 3, number % 2, weight=100) for number in range(votes)]
    return list(zip(made, await asyncio.gather(*(wallet.cast(vote) for vote in made)), strict=True))


async def backlog(circuit: str, shares: int) -> dict[str, float]:
    """One run: every share due in the same second.

    The raw rate is taken before and after: the speed of a machine that others use too drifts within minutes.
    """
    before_it = await raw_rate(circuit, max(8, shares // 4))
    with tempfile.TemporaryDirectory() as name:
        flags = ("--circuit", circuit, "--block-seconds", "1")
        # the log and the polling as an operator has them
        async with running(Path(name), *flags, log={"level": "info"}, chain={"poll_seconds": 1}) as (chain, helper):
            round_id = await chain.open_round(seconds=3600)
            async with Wallet(chain.url, [helper.url], mode="parallel") as wallet:
                votes = await sealed_votes(wallet, round_id, shares)
                due = soon(3 + shares / 200)
                left = shares
                for vote, position in votes:
                    indices = range(min(left, ballot.SHARES))
                    left -= len(indices)
                    await wallet.post(vote, position, times=ballot.same_second(due), indices=indices)
            late = time.time() - due
            if late > 0:
                raise SystemExit(f"posting took {late:.1f} s too long")
            before = await chain.get("/devnet/stats")
            while (await helper.counts()).get("confirmed", 0) < shares:
                await asyncio.sleep(0.5)
            seconds = time.time() - due
            after = await chain.get("/devnet/stats")
    raw = (before_it + await raw_rate(circuit, max(8, shares // 4))) / 2
    chain_cpu = after["cpu_seconds"] - before["cpu_seconds"]
    yardstick = raw * (1 - chain_cpu / (CORES * seconds))
    return {
        "raw_proofs_per_second": raw,
        "revealed_per_second": shares / seconds,
        "chain_cpu_seconds": chain_cpu,
        "yardstick": yardstick,
        "ratio": shares / seconds / yardstick,
    }


async def lone(circuit: str, shares: int) -> dict[str, float]:
    """One run: shares one after another, a second and a half apart, on an idle service."""
    with tempfile.TemporaryDirectory() as name:
        async with running(Path(name), "--circuit", circuit, log={"level": "info"}) as (chain, helper):
            round_id = await chain.open_round(seconds=3600)
            async with Wallet(chain.url, [helper.url], mode="parallel") as wallet:
                votes = await sealed_votes(wallet, round_id, shares)
                start, number = soon(8), 0
                for vote, position in votes:
                    indices = range(min(shares - number, ballot.SHARES))
                    times = [start + 2 * (number + index) for index in range(ballot.SHARES)]
                    number += len(indices)
                    await wallet.post(vote, position, times=times, indices=indices)
            while (await helper.counts()).get("confirmed", 0) < shares:
                await asyncio.sleep(0.2)
            timing = (await helper.operator("/stats"))["service"]["lateness_start"]
    return {
        "p50_ms": timing["p50_ms"],
        "p99_ms": timing["p99_ms"],
        "min_ms": timing["min_ms"],
        "shares": timing["count"],
    }


async def posts(circuit: str, shares: int) -> dict[str, float]:
    """One run: POSTs at 20 a second while a backlog keeps every core proving."""
    with tempfile.TemporaryDirectory() as name:
        async with running(Path(name), "--circuit", circuit, log={"level": "info"}) as (chain, helper):
            round_id = await chain.open_round(seconds=3600)
            async with Wallet(chain.url, [helper.url], mode="parallel") as wallet:
                busy = await sealed_votes(wallet, round_id, shares)
                asked = await sealed_votes(wallet, round_id, shares)
                for vote, position in busy:
                    await wallet.post(vote, position, times=ballot.immediate())
            waits: list[float] = []
            bodies = [
                ballot.post_body(vote, share, position, soon(3000)) for vote, position in asked for share in vote.shares
            ]
            random.shuffle(bodies)
            for body in bodies[:shares]:
                began = time.perf_counter()
                answer = await helper.post(body)
                waits.append(time.perf_counter() - began)
                assert answer.json() == {"status": "queued"}, answer.text
                await asyncio.sleep(max(0.0, 0.05 - waits[-1]))
            facts = (await helper.operator("/stats"))["service"]
    return {
        "p50_ms": 1000 * median(waits),
        "p99_ms": 1000 * (percentile(waits, 0.99) or 0.0),
        "max_ms": 1000 * max(waits),
        "posts": len(waits),
        "proving_at_the_end": facts["in_hand"],
    }


MEASURES = {"backlog": backlog, "lone": lone, "posts": posts}
SHARES = {"backlog": {"k10": 300, "k11": 100}, "lone": {"k10": 100, "k11": 100}, "posts": {"k10": 300, "k11": 100}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=list(MEASURES))
    parser.add_argument("--circuit", choices=["k10", "k11"], default="k10")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run with a fifth of the shares")
    options = parser.parse_args()
    shares = SHARES[options.measure][options.circuit] // (5 if options.quick else 1)
    runs: list[dict[str, Any]] = []
    for number in range(1 if options.quick else options.runs):
        print(f"{options.measure} {options.circuit}: run {number + 1}", file=sys.stderr)
        runs.append(asyncio.run(MEASURES[options.measure](options.circuit, shares)))
    figures = {name: round(median(run[name] for run in runs), 3) for name in runs[0]}
    print(json.dumps({"name": options.measure, "circuit": options.circuit, "median": figures, "runs": runs}))


if __name__ == "__main__":
    main()
