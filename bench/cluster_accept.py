"""Measure accepted shares per second with several processes on one queue.

This is the part of `bench.cluster` that uses the real service. Each process has its own load generator; all of them
post concurrently.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx

from bench.accept import CONNECTIONS, PRODUCTION_SETTINGS, ROUND_SECONDS, cast_votes, interleave_bodies, run_load
from bench.cluster_host import server_cpu_seconds
from tests.support.devnet import DevChain
from tests.support.event_clients import cpu_seconds
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess
from tests.support.postgres import Cluster


async def measure_accepting(
    cluster: Cluster, server: int, processes: int, votes: int, seconds: int
) -> dict[str, float]:
    """Run once.

    Args:
        cluster: the database cluster.
        server: process id of the server.
        processes: number of processes that accept shares.
        votes: number of votes whose shares are posted. Must exceed what is accepted in the time.
        seconds: duration of the load.

    Returns:
        Shares per second, the maximum of the processes' p99 latencies in milliseconds, and CPU milliseconds
            per share.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        async with httpx.AsyncClient(timeout=30) as http, contextlib.AsyncExitStack() as stack:
            chain = DevChain(directory, http, "--stand-in-proofs", "--block-seconds", "1")
            await chain.start()
            stack.push_async_callback(chain.kill)
            round_id = await chain.open_round(seconds=ROUND_SECONDS)
            lines = interleave_bodies(await cast_votes(chain, round_id, votes))
            hosts = []
            for host in _create_hosts(directory, http, chain, cluster, processes):
                await host.start()
                stack.push_async_callback(host.kill)
                await host.wait_until_ready()
                hosts.append(host)
            each = len(lines) // processes
            posted = []
            for number, host in enumerate(hosts):
                own = lines[number * each : (number + 1) * each]
                await _wait_until_round_known(host, own[0])
                posted.append(directory / f"bodies {number}")
                posted[-1].write_text("\n".join(own[1:]) + "\n")
            before = [cpu_seconds(host.pid) for host in hosts] + [server_cpu_seconds(server)]
            loads = await asyncio.gather(
                *(
                    run_load(host.url, file, CONNECTIONS // processes, seconds)
                    for host, file in zip(hosts, posted, strict=True)
                )
            )
            after = [cpu_seconds(host.pid) for host in hosts] + [server_cpu_seconds(server)]
    rate = sum(load["per_second"] for load in loads)
    spent = [1000 * (end - start) / (rate * seconds) for start, end in zip(before, after, strict=True)]
    return {
        "per_second": rate,
        "p99_ms": max(load["p99_ms"] for load in loads),
        "host_ms": sum(spent[:-1]),
        "server_ms": spent[-1],
    }


def _create_hosts(
    directory: Path, http: httpx.AsyncClient, chain: DevChain, cluster: Cluster, number: int
) -> list[HelperProcess]:
    """Create hosts that accept shares for one queue, without starting them."""
    keys = directory / "keys"
    keys.touch(0o600)
    keys.write_text(token_hex(32))
    store: dict[str, Any] = {"url": cluster.url, "key_file": str(keys), "schema_name": f"accept_{token_hex(6)}"}
    hosts = []
    for index in range(number):
        host_directory = directory / f"host {index}"
        host_directory.mkdir()
        settings = {**PRODUCTION_SETTINGS, "store": {**store, "host": f"host {index}"}}
        hosts.append(
            HelperProcess(host_directory, http, chain, program=STAND_IN_PROGRAM, helper={"role": "api"}, **settings)
        )
    return hosts


async def _wait_until_round_known(host: HelperProcess, body: str) -> None:
    """Post a share until it is accepted. The host then knows the round and its tree."""
    async with host.timeout("accepts a share"):
        while True:
            response = await host.post_share(json.loads(body))
            if response.status_code == 200:
                return
            await asyncio.sleep(0.1)
