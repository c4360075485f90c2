"""Compare `svote-helper plan` with a run: `python -m bench.plan_check [--shares 600] [--circuit k10] [--runs 3]`.

The round is so short that its shares, all due in the last-moment window, form a backlog. `plan --measure` measures
this machine and states when the helper will be done. A dev chain and the helper then run such a round with real proofs:
the shares become due at the times of the plan, and the run lasts until the last one is confirmed in a block.

Prints JSON with the medians and all runs. All times begin with the first due share. `plan_seconds` is the mean of two
plans, one before and one after the run, because the speed of a shared machine drifts within minutes. `model_seconds` is
the time of a plan with the median proof time of the run itself, so that `model_ratio` is free of that drift. The CPU
time of the dev chain, which the plan does not know, is stated as a fraction of all cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.accept import PRODUCTION_SETTINGS
from bench.service import CORE_COUNT, cast_sealed_votes, wait_until_confirmed
from devnet.wallet import Wallet
from helper.core.load_forecast import Distribution, ProofRate, RoundSize, last_moment_start, last_vote_time, make_plan
from helper.core.share import SHARE_COUNT
from tests.support.harness import run_chain_and_helper, unix_time_in

ROUND_SECONDS = 120
BLOCK_SECONDS = 1
HELPERS = 2
"""Each wallet gives a share to one of two helpers."""


async def read_plan(circuit: str, shares: int) -> dict[str, Any]:
    """Return the output of `svote-helper plan --measure` for a round in which this helper gets so many shares."""
    voters = -(-shares * HELPERS // SHARE_COUNT)
    command = f"-m helper plan --voters {voters} --proposals 1 --helpers {HELPERS} --round-length {ROUND_SECONDS}"
    flags = f"--distribution deadline --circuit {circuit} --block-seconds {BLOCK_SECONDS} --measure --json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command.split(), *flags.split(), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"plan failed with exit code {process.returncode}")
    planned: dict[str, Any] = json.loads(output)
    return planned


async def compare(circuit: str, shares: int) -> dict[str, float]:
    """Plan, run, and plan again."""
    planned = await read_plan(circuit, shares)
    shares = planned["shares"]
    window, last_vote = last_moment_start(0, ROUND_SECONDS), last_vote_time(0, ROUND_SECONDS)
    with tempfile.TemporaryDirectory() as name:
        flags = ("--circuit", circuit, "--block-seconds", str(BLOCK_SECONDS))
        async with run_chain_and_helper(Path(name), *flags, **PRODUCTION_SETTINGS) as (chain, helper):
            round_id = await chain.open_round(seconds=24 * 3600)  # long enough for a slow machine
            async with Wallet(chain.url, [helper.url], mode="parallel") as wallet:
                votes = await cast_sealed_votes(wallet, round_id, shares)
                begin = unix_time_in(5 + shares / 50)
                due = [begin + int((last_vote - window) * number / shares) for number in range(shares)]
                for number, (vote, position) in enumerate(votes):
                    first = number * SHARE_COUNT
                    times = (due[first : first + SHARE_COUNT] + [0] * SHARE_COUNT)[:SHARE_COUNT]
                    indices = range(min(shares - first, SHARE_COUNT))
                    await wallet.post_shares(vote, position, times=times, indices=indices)
            if time.time() > begin:
                raise SystemExit("posting took too long")
            chain_cpu = (await chain.get("/devnet/stats"))["cpu_seconds"]
            await asyncio.sleep(begin - time.time())
            await wait_until_confirmed(helper, shares, CORE_COUNT / planned["seconds_per_proof"])
            seconds = time.time() - begin
            chain_cpu = (await chain.get("/devnet/stats"))["cpu_seconds"] - chain_cpu
            proof_ms = (await helper.service_stats())["proof"]["p50_ms"]
    plans = [planned, await read_plan(circuit, shares)]
    plan_seconds = sum(plan["done_seconds"] for plan in plans) / len(plans) - window
    voters = shares * HELPERS // SHARE_COUNT
    size = RoundSize(voters, 1, HELPERS, 1, ROUND_SECONDS, Distribution.DEADLINE)
    model_seconds = make_plan(size, ProofRate(proof_ms / 1000, CORE_COUNT, BLOCK_SECONDS)).done_seconds - window
    return {
        "shares": shares,
        "seconds_per_proof_before": plans[0]["seconds_per_proof"],
        "seconds_per_proof": proof_ms / 1000,
        "seconds_per_proof_after": plans[1]["seconds_per_proof"],
        "plan_seconds": plan_seconds,
        "model_seconds": model_seconds,
        "run_seconds": seconds,
        "ratio": seconds / plan_seconds,
        "model_ratio": seconds / model_seconds,
        "chain_cpu_fraction": chain_cpu / (CORE_COUNT * seconds),
    }


def main() -> None:
    """Run the comparison and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--circuit", choices=["k10", "k11"], default="k10")
    parser.add_argument("--shares", type=int, default=600)
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    runs = [asyncio.run(compare(options.circuit, options.shares)) for _ in range(options.runs)]
    figures = {name: round(median(run[name] for run in runs), 3) for name in runs[0]}
    print(json.dumps({"name": "plan", "circuit": options.circuit, "median": figures, "runs": runs}))


if __name__ == "__main__":
    main()
