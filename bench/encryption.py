"""Measure the cost of an encrypted database file for accepted shares: `python -m bench.encryption [--turns N]`.

Runs two services on one chain, one of them with `[store] key_file`, and posts shares over 64 connections to each in
turns. Prints JSON with the medians of all turns: accepted shares per second, and the CPU time of the service per share,
which depends less on the load of a shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.accept import CONNECTIONS, PRODUCTION_SETTINGS, ROUND_SECONDS, cast_votes, interleave_bodies, run_load
from tests.support.devnet import DevChain
from tests.support.event_clients import cpu_seconds
from tests.support.harness import REAL_PROGRAM, HelperProcess, run_helper

VOTES_PER_TURN = 640
"""Their shares suffice for a turn."""
TURN_SECONDS = 1


async def measure_turn(helper: HelperProcess, bodies: Path) -> dict[str, float]:
    """Post new shares for `TURN_SECONDS`."""
    before = cpu_seconds(helper.pid)
    load = await run_load(helper.url, bodies, CONNECTIONS, TURN_SECONDS)
    used = cpu_seconds(helper.pid) - before
    return {"per_second": load["per_second"], "cpu_us": 1e6 * used / (load["per_second"] * TURN_SECONDS)}


async def measure(turns: int) -> dict[str, list[dict[str, float]]]:
    """Return the results of the turns without and with encryption. Each turn posts the same shares to both services."""
    results: dict[str, list[dict[str, float]]] = {"plain": [], "encrypted": []}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        key = directory / "store.key"
        key.touch(0o600)
        key.write_text(secrets.token_hex(32))
        async with httpx.AsyncClient(timeout=30) as http:
            chain = DevChain(directory, http, "--block-seconds", "1")
            await chain.start()
            try:
                round_id = await chain.open_round(seconds=ROUND_SECONDS)
                cast = await cast_votes(chain, round_id, turns * VOTES_PER_TURN)
                for kind in results:
                    (directory / kind).mkdir()
                sections: dict[str, Any] = dict(PRODUCTION_SETTINGS)
                encrypted = sections | {"store": {"key_file": str(key)}}
                async with (
                    run_helper(directory / "plain", http, chain, program=REAL_PROGRAM, **sections) as plain,
                    run_helper(directory / "encrypted", http, chain, program=REAL_PROGRAM, **encrypted) as sealed,
                ):
                    helpers = {"plain": plain, "encrypted": sealed}
                    for helper in helpers.values():
                        await helper.wait_for_leaf(round_id, max(position for _, position in cast))
                    for turn in range(turns):
                        votes = cast[turn * VOTES_PER_TURN : (turn + 1) * VOTES_PER_TURN]
                        bodies = directory / "bodies"
                        bodies.write_text("\n".join(interleave_bodies(votes)) + "\n")
                        for kind in sorted(helpers, reverse=turn % 2 == 0):
                            results[kind].append(await measure_turn(helpers[kind], bodies))
                            print(f"turn {turn + 1}, {kind}: {results[kind][-1]}", file=sys.stderr)
            finally:
                await chain.kill()
    return results


def main() -> None:
    """Run the measurement and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed. Debian: apt install wrk")
    results = asyncio.run(measure(options.turns))
    figures = {
        kind: {name: round(median(turn[name] for turn in turns), 1) for name in turns[0]}
        for kind, turns in results.items()
    }
    ratios = {name: round(figures["encrypted"][name] / figures["plain"][name], 3) for name in figures["plain"]}
    print(json.dumps({"name": "encryption", "median": figures, "ratio": ratios, "runs": results}))


if __name__ == "__main__":
    main()
