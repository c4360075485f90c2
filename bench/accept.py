"""Measure accepted shares per second over 64 connections and over one: `python -m bench.accept [--quick]`.

Each run compares the real service (its own chain, all four checks, an fsync before each response) with a bare Starlette
route that parses the same bodies (`bench.baseline_app`), one after the other. wrk generates the load on the same
cores. It posts 8 shares of each vote, as a helper receives them. Prints JSON with the medians and all runs.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from devnet import ballot
from devnet.ballot import Ballot
from devnet.wallet import Wallet
from tests.support.devnet import DevChain
from tests.support.harness import run_chain_and_helper, unix_time_in

WRK_SCRIPT = Path(__file__).with_name("post.lua")
CONNECTIONS = 64
SHARES_PER_VOTE = 8
MAX_CONCURRENT_VOTES = 8
"""Votes whose shares are interleaved."""
MAX_CONCURRENT_CASTS = 256
"""Votes cast concurrently. Each batch waits for a block."""
ROUND_SECONDS = 7200
PRODUCTION_SETTINGS: dict[str, Any] = {"log": {"level": "info"}, "chain": {"poll_seconds": 1}}
"""Logging and polling as in production."""


def _seal_votes(round_id: bytes, ea_pk: bytes, seed: int) -> list[Ballot]:
    """Create sealed votes, in a separate process."""
    rng = random.Random(seed)
    make = partial(ballot.seal_ballot, round_id=round_id, ea_pk=ea_pk, weight=100, rng=rng)
    return [make(proposal_id=1 + number % 3, vote_decision=number % 2) for number in range(MAX_CONCURRENT_VOTES)]


async def cast_votes(chain: DevChain, round_id: bytes, votes: int) -> list[tuple[Ballot, int]]:
    """Cast this many votes on the chain. Returns them with the positions of their commitments."""
    key = (await chain.get(f"/shielded-vote/v1/round/{round_id.hex()}"))["round"]["ea_pk"]
    seal = partial(_seal_votes, round_id, base64.b64decode(key))
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(mp_context=get_context("forkserver")) as pool:
        parts = await asyncio.gather(
            *(loop.run_in_executor(pool, seal, seed) for seed in range(votes // MAX_CONCURRENT_VOTES))
        )
    sealed = [vote for part in parts for vote in part]
    positions: list[list[int]] = []
    for at in range(0, len(sealed), MAX_CONCURRENT_CASTS):
        async with Wallet(chain.url, []) as wallet:  # a new client, as idle connections are closed
            positions.append(await asyncio.gather(*map(wallet.cast_ballot, sealed[at : at + MAX_CONCURRENT_CASTS])))
    return list(zip(sealed, (position for batch in positions for position in batch), strict=True))


def interleave_bodies(votes: Sequence[tuple[Ballot, int]]) -> list[str]:
    """Order the shares as they arrive in practice: interleaved over a few votes."""
    due = unix_time_in(ROUND_SECONDS / 2)
    return [
        json.dumps(ballot.post_body(vote, vote.shares[2 * number], position, due))
        for at in range(0, len(votes), MAX_CONCURRENT_VOTES)
        for number in range(SHARES_PER_VOTE)
        for vote, position in votes[at : at + MAX_CONCURRENT_VOTES]
    ]


async def run_load(url: str, bodies_file: Path, connections: int, seconds: int) -> dict[str, float]:
    """Run wrk and parse its output.

    Raises:
        SystemExit: a response was not `queued`.
    """
    flags = ("-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(WRK_SCRIPT), f"{url}/shielded-vote/v1/shares")
    wrk = await asyncio.create_subprocess_exec("wrk", *flags, "--", str(bodies_file), stdout=asyncio.subprocess.PIPE)
    out, _ = await wrk.communicate()
    output: dict[str, float] = json.loads(out.splitlines()[-1])
    if output["others"] or output["errors"] or not output["queued"]:
        raise SystemExit(f"not every share was accepted: {output}")
    return {"per_second": output["queued"] / output["seconds"], "p50_ms": output["p50_ms"], "p99_ms": output["p99_ms"]}


@contextlib.asynccontextmanager
async def run_baseline() -> AsyncIterator[str]:
    """Run the baseline application. Yields its base URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.baseline_app", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.terminate()
        await process.wait()


async def measure(votes: int, seconds: int) -> dict[str, float]:
    """Run once: 64 connections, with the baseline before and after, then one connection.

    The speed of a shared machine drifts, so the baseline is measured on both sides.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        async with run_chain_and_helper(directory, "--block-seconds", "1", **PRODUCTION_SETTINGS) as (chain, helper):
            round_id = await chain.open_round(seconds=ROUND_SECONDS)
            cast = await cast_votes(chain, round_id, votes)
            posted, alone = directory / "bodies", directory / "alone"
            posted.write_text("\n".join(interleave_bodies(cast[votes // 4 :])) + "\n")
            alone.write_text("\n".join(interleave_bodies(cast[: votes // 4])) + "\n")
            await helper.wait_for_leaf(round_id, max(position for _, position in cast))
            async with run_baseline() as url:
                before = await run_load(url, posted, CONNECTIONS, seconds)
                measured = await run_load(helper.url, posted, CONNECTIONS, seconds)
                after = await run_load(url, posted, CONNECTIONS, seconds)
            single = await run_load(helper.url, alone, 1, seconds)
    baseline = (before["per_second"] + after["per_second"]) / 2
    return {
        **measured,
        "bare_per_second": baseline,
        "ratio": measured["per_second"] / baseline,
        **{f"one_{name}": value for name, value in single.items()},
    }


def main() -> None:
    """Run the measurement and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run of one second")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed. Debian: apt install wrk")
    votes, seconds, runs = (1920, 1, 1) if options.quick else (3840, 2, options.runs)
    results = [asyncio.run(measure(votes, seconds)) for _ in range(runs)]
    figures = {name: round(median(run[name] for run in results), 3) for name in results[0]}
    print(json.dumps({"name": "accept", "median": figures, "runs": results}))


if __name__ == "__main__":
    main()
