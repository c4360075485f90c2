"""One host of `bench.cluster`: `python -m bench.cluster_host prove|send ADDRESS SCHEMA NAME SERVER_PID`.

`prove` works the queue with the product's own loop and a stand-in for the prover, from the first line on standard input
to the second. `send` has all that is prepared sent by the product's own broadcaster to a stand-in for a node, and then
counted in blocks, each of them by two hosts. What it cost goes to standard output as one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg

from helper.chain.reveal_transaction import RevealMessage
from helper.chain.verdicts import BroadcastOutcome, Verdict
from helper.clock import SystemClock
from helper.lease.database import DatabaseLease
from helper.lease.keeper import LeaseKeeper
from helper.observability.stats import Stats
from helper.reveal.broadcaster import Broadcaster
from helper.reveal.dispatcher import Dispatcher, DispatchGate
from helper.store.postgres import PostgresStore
from helper.store.postgres.keyring import Keyring
from helper.store.rows import PreparedReveal, QueuedShare
from tests.support.process import child_pids

ROUND_ID = bytes(range(32))
CORE_COUNT = 2
"""Concurrent proofs per host."""
PROOF_SECONDS = 0.18
NODE_SECONDS = 0.01
"""Response time of the fake node, in seconds."""
REVEALS_PER_BLOCK = 256
"""Maximum reveals per block."""
PROOF_BYTES = 4_000
NANOSECONDS_PER_SECOND = 1e9
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class CostMeter:
    """Measures costs of this process and the database server between `begin` and `end`.

    Args:
        server: process id of the server. Its child processes serve the connections.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self.round_trips = 0
        for kind, name in ((psycopg.Connection, "wait"), (psycopg.AsyncConnection, "wait")):
            setattr(kind, name, self._count_calls(getattr(kind, name)))
        self.begin()

    def _count_calls(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.round_trips += 1
            return wait(*args, **kwargs)

        return counted

    def begin(self) -> None:
        """Start measuring."""
        self._round_trips_at_start, self._started_at = self.round_trips, time.perf_counter()
        self._cpu_at_start, self._server_cpu_at_start = time.process_time(), server_cpu_seconds(self._server)

    def end(self) -> dict[str, float]:
        """Return elapsed seconds, CPU seconds of this process and of the server, and round trips."""
        return {
            "seconds": time.perf_counter() - self._started_at,
            "cpu": time.process_time() - self._cpu_at_start,
            "server": server_cpu_seconds(self._server) - self._server_cpu_at_start,
            "trips": self.round_trips - self._round_trips_at_start,
        }


def server_cpu_seconds(pid: int) -> float:
    """Return a server's CPU seconds, including its running and terminated child processes."""
    about = _read_proc_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
    ended = sum(map(int, about[13:15])) / _TICKS_PER_SECOND
    living = (_read_proc_file(f"/proc/{one}/schedstat").split() for one in (pid, *child_pids(pid)))
    return ended + sum(int(words[0]) for words in living if words) / NANOSECONDS_PER_SECOND


def _read_proc_file(path: str) -> str:
    """Read a file in /proc. Returns an empty string if its process has exited."""
    try:
        return Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def open_store(address: str, schema: str, host: str) -> PostgresStore:
    """Open the store of a host."""
    return PostgresStore(address, keyring=Keyring([b"s" * 32]), host=host, schema=schema)


def create_message(queued: QueuedShare) -> PreparedReveal:
    """Create a message of realistic length."""
    message = RevealMessage(
        nullifier=queued.nullifier,
        enc_share=queued.share.c1 + queued.share.c2,
        proposal_id=queued.share.proposal_id,
        vote_decision=queued.share.vote_decision,
        proof=random.randbytes(PROOF_BYTES),
        round_id=ROUND_ID,
        anchor_height=100,
    )
    return PreparedReveal(message.to_tx(), message.tx_hash(), anchor_height=100, circuit="k10", height=101)


class StandInRevealer:
    """Fake revealer with limited concurrency. Takes the time of a proof without CPU load."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._cores = asyncio.Semaphore(CORE_COUNT)

    async def prove(self, queued: QueuedShare) -> bool:
        """Create the message and store it."""
        async with self._cores:
            await asyncio.sleep(PROOF_SECONDS)
        return await self._store.prepare(queued.id, create_message(queued))


async def run_prover(store: PostgresStore, cost: CostMeter) -> dict[str, float]:
    """Process the queue between two lines on standard input."""
    revealer: Any = StandInRevealer(store)
    processor = Dispatcher(
        store=store,
        revealer=revealer,
        broadcaster=None,
        retention=None,
        get_gate=lambda: DispatchGate(frozenset({ROUND_ID}), math.inf),
        slots=CORE_COUNT,
        clock=SystemClock(),
        stats=Stats(),
        max_sleep=1.0,
    )
    await asyncio.to_thread(sys.stdin.readline)
    cost.begin()
    working = asyncio.create_task(processor.run())
    await asyncio.to_thread(sys.stdin.readline)
    found = cost.end()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    return found


class Node:
    """Fake node and node pool. Accepts every reveal."""

    def __init__(self) -> None:
        self.head = SimpleNamespace(height=100)
        self.usable_nodes = [SimpleNamespace(name="node", client=self)]

    async def broadcast(self, message: RevealMessage) -> BroadcastOutcome:  # noqa: ARG002 - it takes any
        """Accept the message."""
        await asyncio.sleep(NODE_SECONDS)
        return BroadcastOutcome(Verdict.ACCEPTED)

    def is_head_newer_than(self, when: float) -> bool:  # noqa: ARG002 - blocks come all the time
        """Always true: a new block exists after every send."""
        return True

    async def record_accepted(self, circuit: str) -> None:
        """Ignore the accepted circuit; replaces `CircuitSelector.record_accepted`."""


async def run_sender(store: PostgresStore, cost: CostMeter) -> dict[str, float]:
    """Send all prepared messages, then confirm them in blocks."""
    clock, node = SystemClock(), Node()
    lease = DatabaseLease(store, clock=clock)
    keeper = LeaseKeeper(lease, clock=clock, standby=False, on_acquired=lambda: None)
    await keeper.acquire_at_start()
    keeping = asyncio.create_task(keeper.run())
    anything: Any = node
    broadcaster = Broadcaster(
        store=store,
        trees=anything,
        node_pool=anything,
        verifier=anything,
        circuits=anything,
        attempts=anything,
        clock=clock,
        stats=Stats(),
        lease=lease,
    )
    prepared = await store.list_unconfirmed()
    cost.begin()
    await broadcaster.send_new()
    found = {f"send_{name}": value / len(prepared) for name, value in cost.end().items()}
    spent = [(one.round_id, one.nullifier) for one in prepared]
    for what in ("count", "again"):
        cost.begin()
        counted = await confirm_in_blocks(store, spent)
        if counted != (len(spent) if what == "count" else 0):
            raise SystemExit(f"{counted} of {len(spent)} shares were confirmed")
        found |= {f"{what}_{name}": value / len(spent) for name, value in cost.end().items()}
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    return found


async def confirm_in_blocks(store: PostgresStore, spent: Sequence[tuple[bytes, bytes]]) -> int:
    """Apply blocks with these reveals. Returns the number of confirmed shares."""
    confirmed = 0
    for height, at in enumerate(range(0, len(spent), REVEALS_PER_BLOCK), 101):
        confirmed += len(await store.apply_block(height, spent[at : at + REVEALS_PER_BLOCK], now=time.time()))
    return confirmed


async def main() -> None:
    """Run one host."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prove", "send"])
    parser.add_argument("address")
    parser.add_argument("schema")
    parser.add_argument("name")
    parser.add_argument("server", type=int)
    options = parser.parse_args()
    store = open_store(options.address, options.schema, options.name)
    cost = CostMeter(options.server)
    await store.open()
    try:
        print("open", flush=True)
        found = await (run_prover if options.what == "prove" else run_sender)(store, cost)
        print(json.dumps(found), flush=True)
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main())
