"""Measure the cost of a queue in PostgreSQL shared by several hosts: `python -m bench.cluster [--quick]`.

Each run has 1, 2, 4 and 8 prover hosts (`bench.cluster_host`: the product's dispatcher with a fake prover). It measures
CPU time of the hosts and of the server's processes, and round trips, for each share that is enqueued, proven, sent and
confirmed. It then measures the shares per second that one and two processes accept for one queue
(`bench.cluster_accept`: the real service with its own chain). The server, the hosts and the load generator share
the cores. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from secrets import token_hex
from time import time
from typing import Any

from bench.cluster_accept import measure_accepting
from bench.cluster_host import ROUND_ID, CostMeter, open_store, server_cpu_seconds
from bench.fill_database import SPREAD_SECONDS, generate_shares
from helper.core.share import ShareState
from helper.store.postgres.store import PostgresStore
from helper.store.shares import EnqueueOperation
from tests.support.postgres import Cluster

HOST_COUNTS = (1, 2, 4, 8)
CALLER_COUNT = 64
"""Concurrent enqueue calls."""
MILLISECONDS_PER_SECOND = 1000.0
SHARES = 150
"""Shares per prover host."""


class HostProcess:
    """A `bench.cluster_host` process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._lines = process, process.stdin, process.stdout

    def send_line(self) -> None:
        """Send the start or stop signal: one line on its standard input."""
        self._stdin.write(b"\n")

    async def read_result(self) -> dict[str, float]:
        """Read the result line."""
        while line := await self._lines.readline():
            if line.startswith(b"{"):
                result: dict[str, float] = json.loads(line)
                return result
        raise SystemExit("a host exited early")


@asynccontextmanager
async def run_host(role: str, cluster: Cluster, schema: str, name: str) -> AsyncIterator[HostProcess]:
    """Run a host with an open queue. Terminates it at the end."""
    arguments = ("bench.cluster_host", role, cluster.url, schema, name, str(server_pid(cluster)))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", *arguments, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise SystemExit("a host did not start")
        yield HostProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def server_pid(cluster: Cluster) -> int:
    """Return the process id of the server."""
    return int((cluster.data_directory / "postmaster.pid").read_text().split()[0])


async def enqueue_due_shares(store: PostgresStore, number: int) -> None:
    """Enqueue this many due shares."""
    now = time()
    shares = generate_shares(ROUND_ID, 0, number, int(now) - SPREAD_SECONDS)

    async def enqueue_next() -> None:
        for share, nullifier in shares:
            await store.run(EnqueueOperation(share, nullifier, now=now))

    await asyncio.gather(*(enqueue_next() for _ in range(CALLER_COUNT)))


async def measure_coordination(cluster: Cluster, cost: CostMeter, provers: int, number: int) -> dict[str, float]:
    """Run once with this many prover hosts and shares per host. Returns milliseconds and round trips per share."""
    schema, total = f"bench_{token_hex(6)}", provers * number
    store = open_store(cluster.url, schema, "enqueues")
    await store.open()
    try:
        cost.begin()
        await enqueue_due_shares(store, total)
        results = {f"enqueue_{name}": value / total for name, value in cost.end().items()}
        async with AsyncExitStack() as stack:
            hosts = [
                await stack.enter_async_context(run_host("prove", cluster, schema, f"prover {index}"))
                for index in range(provers)
            ]
            used = server_cpu_seconds(server_pid(cluster))
            for host in hosts:
                host.send_line()
            await wait_until_prepared(store, total)
            used = server_cpu_seconds(server_pid(cluster)) - used
            for host in hosts:
                host.send_line()
            reports = [await host.read_result() for host in hosts]
        results |= {f"prove_{name}": sum(report[name] for report in reports) / total for name in ("cpu", "trips")}
        seconds = sum(report["seconds"] for report in reports)
        results |= {"prove_server": used / total, "prove_per_second": provers * total / seconds}
        async with run_host("send", cluster, schema, "sends") as sender:
            results |= await sender.read_result()
    finally:
        await store.close()
    times = ("cpu", "server", "seconds")
    in_ms = {
        name: value * MILLISECONDS_PER_SECOND if name.rpartition("_")[2] in times else value
        for name, value in results.items()
    }
    return {"size": provers, **in_ms, "send_per_second": 1 / results["send_seconds"]}


async def wait_until_prepared(store: PostgresStore, total: int) -> None:
    """Wait until this many messages are prepared."""
    while (await store.count_shares())[ROUND_ID].get(ShareState.SENT, 0) < total:
        await asyncio.sleep(0.2)


async def measure(hosts: Sequence[int], runs: int, number: int, votes: int, seconds: int) -> list[dict[str, Any]]:
    """Run all measurements with every number of hosts."""
    cluster, results = Cluster(), list[dict[str, Any]]()
    try:
        cluster.start()
        server = server_pid(cluster)
        cost = CostMeter(server)
        for run in range(runs):
            for provers in hosts:
                print(f"{provers} prover hosts: run {run + 1}", file=sys.stderr)
                results.append(await measure_coordination(cluster, cost, provers, number))
            for processes in (1, 2):
                print(f"{processes} accepting processes: run {run + 1}", file=sys.stderr)
                results.append(
                    {
                        "size": 0,
                        "processes": processes,
                        **await measure_accepting(cluster, server, processes, votes, seconds),
                    }
                )
    finally:
        cluster.remove()
    return results


def main() -> None:
    """Run the measurement and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run with fewer shares and hosts")
    options = parser.parse_args()
    settings = (
        (HOST_COUNTS[:2], 1, SHARES // 5, 960, 1) if options.quick else (HOST_COUNTS, options.runs, SHARES, 1920, 2)
    )
    print(json.dumps({"name": "cluster", "runs": asyncio.run(measure(*settings))}))


if __name__ == "__main__":
    main()
