"""Measure the cost of clients of `/shielded-vote/v1/events`.

`python -m bench.event_listeners [--listeners 1000] [--quick]` prints JSON: the lateness of dispatch and the CPU time of
the service's process, without clients and with that many. The provers are fakes, so that proofs do not use CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.accept import PRODUCTION_SETTINGS
from devnet import ballot
from tests.campaign.wallet_clients import WalletGroup
from tests.support.event_clients import cpu_seconds, open_event_clients
from tests.support.harness import STAND_IN_PROGRAM, run_chain_and_helper, unix_time_in

TOKEN = "operators-only"
LEAD_SECONDS = 0.85
"""Offset within a second at which the first client connects and gets its first state.

The feed's interval is a few milliseconds longer than a second, so during a run its work drifts across the moment at
which shares become due. This is the worst case for them.
"""


async def measure(number: int, seconds: int) -> dict[str, float]:
    """Run once: one share due per second for this many seconds, with this many clients."""
    with tempfile.TemporaryDirectory() as name:
        settings = {"operator": {"token": TOKEN}, **PRODUCTION_SETTINGS}
        flags = ("--stand-in-proofs", "--block-seconds", "1")
        async with run_chain_and_helper(Path(name), *flags, program=STAND_IN_PROGRAM, **settings) as (chain, helper):
            round_id = await chain.open_round(seconds=3600)
            wallets = WalletGroup(chain, lambda: [helper.url], random.Random(7))
            votes = await wallets.cast_votes(round_id, seconds // ballot.SHARE_COUNT)
            await helper.wait_for_leaf(round_id, max(position for _, position in votes))
            shares = len(votes) * ballot.SHARE_COUNT
            start = unix_time_in(15 + shares / 50 + number / 100)
            due = iter(range(shares))
            await wallets.post_shares(votes, lambda: start + next(due))
            await asyncio.sleep((LEAD_SECONDS - time.time()) % 1)
            async with open_event_clients(helper.url, TOKEN, number) as listeners:
                if time.time() > start:
                    raise SystemExit(f"preparation took {time.time() - start:.1f} s too long")
                await asyncio.sleep(start - time.time())
                before, size = cpu_seconds(helper.pid), sum(listener.received_bytes for listener in listeners)
                await asyncio.sleep(seconds)
                used, received = (
                    cpu_seconds(helper.pid) - before,
                    sum(listener.received_bytes for listener in listeners) - size,
                )
                dropped = sum(listener.is_closed for listener in listeners)
            while (await helper.service_counts()).get("confirmed", 0) < shares:
                await asyncio.sleep(0.2)
            late = (await helper.service_stats())["lateness_start"]
    return {
        "listeners": number,
        "shares": shares,
        "late_p50_ms": late["p50_ms"],
        "late_p99_ms": late["p99_ms"],
        "late_max_ms": late["max_ms"],
        "cpu_per_second": used / seconds,
        "bytes_per_listener_and_second": received / seconds / max(1, number),
        "dropped": dropped,
    }


def main() -> None:
    """Run the measurement and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listeners", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run of a quarter of the length")
    options = parser.parse_args()
    seconds = options.seconds // (4 if options.quick else 1)
    runs: list[dict[str, float]] = []
    for _ in range(1 if options.quick else options.runs):
        for number in (0, options.listeners):
            print(f"{number} listeners", file=sys.stderr)
            runs.append(asyncio.run(measure(number, seconds)))
    figures = {
        f"{number} listeners": {
            name: round(median(run[name] for run in runs if run["listeners"] == number), 3) for name in runs[0]
        }
        for number in (0, options.listeners)
    }
    print(json.dumps({"name": "listeners", "median": figures, "runs": runs}))


if __name__ == "__main__":
    main()
