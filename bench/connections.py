"""Measure shares that arrive over a new connection each: `python -m bench.connections [--quick]`.

64 connections are open at once, and each carries one share, as with wallets that use Tor: directly to the service, and
through the example configuration of each installed proxy, with full TLS handshakes and with resumed sessions. The
poster runs on the same cores. A latency is the time from the connect call to the end of the response. Prints JSON with
the medians and all runs: shares per second, latencies, and the CPU time per share of service, proxy and poster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.accept import PRODUCTION_SETTINGS, ROUND_SECONDS, cast_votes, interleave_bodies
from helper.observability.stats import percentile
from tests.support.event_clients import cpu_seconds
from tests.support.harness import run_chain_and_helper
from tests.support.process import child_pids
from tests.support.proxies import PROXIES, run_proxy

CONNECTIONS = 64
ROUTES = ("direct", *(f"{proxy}{suffix}" for proxy in PROXIES for suffix in ("", "_resumed")))
"""How the shares arrive."""


@dataclass(frozen=True)
class Route:
    """Where shares are posted.

    Attributes:
        url: base URL.
        proxy_pids: processes of the proxy.
    """

    url: str
    proxy_pids: Collection[int] = ()


@contextlib.asynccontextmanager
async def open_route(name: str, directory: Path, helper_url: str) -> AsyncIterator[Route]:
    """Start the proxy of a route."""
    proxy = name.removesuffix("_resumed")
    if proxy not in PROXIES:
        yield Route(helper_url)
        return
    directory.mkdir()
    others = child_pids(os.getpid())
    async with run_proxy(proxy, directory, int(helper_url.rpartition(":")[2])) as client:
        started = [pid for pid in child_pids(os.getpid()) if pid not in others]
        workers = [worker for pid in started for worker in child_pids(pid)]
        yield Route(str(client.base_url), [*started, *workers])


async def run_load(url: str, bodies: Path, *, resume: bool) -> dict[str, Any]:
    """Post each body over a new connection.

    Raises:
        SystemExit: a response was not `queued`.
    """
    command = [sys.executable, "-m", "tests.support.short_connections", url, str(bodies)]
    flags = ["--connections", str(CONNECTIONS), *(["--resume"] if resume else [])]
    poster = await asyncio.create_subprocess_exec(*command, *flags, stdout=asyncio.subprocess.PIPE)
    output, _ = await poster.communicate()
    result: dict[str, Any] = json.loads(output)
    if set(result["responses"]) != {"200 queued"}:
        raise SystemExit(f"not every share was accepted: {result['responses']}")
    return result


async def measure_route(name: str, directory: Path, helper_url: str, helper_pid: int, bodies: Path) -> dict[str, float]:
    """Measure one route. The names of the figures begin with that of the route."""
    async with open_route(name, directory / name, helper_url) as route:
        pids = {"service": [helper_pid], "proxy": route.proxy_pids}
        before = {what: sum(map(cpu_seconds, group)) for what, group in pids.items()}
        result = await run_load(route.url, bodies, resume=name.endswith("_resumed"))
        used = {what: sum(map(cpu_seconds, group)) - before[what] for what, group in pids.items()}
    latencies: list[float] = result["latencies"]
    shares = len(latencies)
    used["poster"] = result["cpu_seconds"]
    return {
        f"{name}_per_second": shares / result["seconds"],
        f"{name}_p50_ms": 1e3 * (percentile(latencies, 0.5) or 0.0),
        f"{name}_p99_ms": 1e3 * (percentile(latencies, 0.99) or 0.0),
        f"{name}_resumed": result["resumed"] / shares,
        **{f"{name}_{what}_cpu_ms": 1e3 * seconds / shares for what, seconds in used.items()},
    }


async def measure(votes: int) -> dict[str, float]:
    """Run once: every route with its own shares."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        async with run_chain_and_helper(directory, "--block-seconds", "1", **PRODUCTION_SETTINGS) as (chain, helper):
            round_id = await chain.open_round(seconds=ROUND_SECONDS)
            cast = await cast_votes(chain, round_id, votes * len(ROUTES))
            await helper.wait_for_leaf(round_id, max(position for _, position in cast))
            figures: dict[str, float] = {}
            for number, route in enumerate(ROUTES):
                bodies = directory / f"bodies-{route}"
                bodies.write_text("\n".join(interleave_bodies(cast[number * votes : (number + 1) * votes])) + "\n")
                figures |= await measure_route(route, directory, helper.url, helper.pid, bodies)
    return figures


def main() -> None:
    """Run the measurement and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run with 640 shares per route")
    options = parser.parse_args()
    votes, runs = (80, 1) if options.quick else (512, options.runs)
    results = [asyncio.run(measure(votes)) for _ in range(runs)]
    figures = {name: round(median(run[name] for run in results), 3) for name in results[0]}
    print(json.dumps({"name": "connections", "median": figures, "runs": results}))


if __name__ == "__main__":
    main()
