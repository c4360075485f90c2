"""One host of `bench.cluster`: `python -m bench.cluster_host prove|send ADDRESS SCHEMA NAME SERVER_PID`.

`prove` processes the queue with the product's dispatcher and a fake prover, from the first line on standard input to
the second. `send` sends all prepared messages with the product's sender to a fake node, and then applies blocks
that confirm them, each block by two hosts. Prints the costs as one line of JSON.
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

from helper.chain.broadcast_outcome import BroadcastOutcome, Verdict
from helper.chain.node import NO_PENALTY
from helper.chain.reveal_transaction import RevealMessage
from helper.clock import SystemClock
from helper.core.dispatch_order import BacklogLimits
from helper.core.load_forecast import MAX_REVEALS_PER_BLOCK
from helper.lease import DatabaseLease, LeaseKeeper
from helper.observability.stats import Stats
from helper.reveal.circuit_choice import CircuitChoice
from helper.reveal.dispatcher import Backlog, Dispatcher, DispatchGate
from helper.reveal.revealer import ProofTimes
from helper.reveal.sender import Sender
from helper.store import blocks, messages
from helper.store.keyring import Keyring
from helper.store.postgres.store import PostgresStore
from helper.store.table_rows import RevealRow, ShareRow
from tests.support.process import child_pids

ROUND_ID = bytes(range(32))
CORE_COUNT = 2
"""Concurrent proofs per host."""
PROOF_SECONDS = 0.18
NODE_SECONDS = 0.01
"""Response time of the fake node, in seconds."""
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
    fields = _read_proc_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
    ended = sum(map(int, fields[13:15])) / _TICKS_PER_SECOND
    running = (_read_proc_file(f"/proc/{process}/schedstat").split() for process in (pid, *child_pids(pid)))
    return ended + sum(int(values[0]) for values in running if values) / NANOSECONDS_PER_SECOND


def _read_proc_file(path: str) -> str:
    """Read a file in /proc. Returns an empty string if its process has exited."""
    try:
        return Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def open_store(address: str, schema: str, host: str) -> PostgresStore:
    """Open the store of a host."""
    return PostgresStore(address, keyring=Keyring([b"s" * 32]), host=host, schema=schema)


def create_message(queued: ShareRow) -> RevealRow:
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
    return RevealRow(queued.id, message.to_tx(), message.tx_hash(), anchor_height=100, circuit="k10", height=101)


class FakeRevealer:
    """Fake revealer with limited concurrency. Takes the time of a proof without CPU load."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._cores = asyncio.Semaphore(CORE_COUNT)

    async def prove(self, queued: ShareRow, *, has_priority: bool) -> bool:  # noqa: ARG002 - all proofs are equal
        """Create the message and store it."""
        async with self._cores:
            await asyncio.sleep(PROOF_SECONDS)
        return await self._store.run(messages.prepare, queued.id, create_message(queued))


async def run_prover(store: PostgresStore, cost: CostMeter) -> dict[str, float]:
    """Process the queue between two lines on standard input."""
    revealer: Any = FakeRevealer(store)
    clock, stats = SystemClock(), Stats()
    backlog = Backlog(
        store=store,
        proof_times=ProofTimes(CORE_COUNT, lambda: PROOF_SECONDS),
        limits=BacklogLimits(due_shares=CORE_COUNT, overdue_seconds=2.0),
        clock=clock,
        stats=stats,
    )
    dispatcher = Dispatcher(
        store=store,
        revealer=revealer,
        sender=None,
        get_gate=lambda: DispatchGate({ROUND_ID: math.inf}, math.inf),
        backlog=backlog,
        slots=CORE_COUNT,
        clock=clock,
        stats=stats,
        max_sleep=1.0,
    )
    await asyncio.to_thread(sys.stdin.readline)
    cost.begin()
    running = asyncio.create_task(dispatcher.run())
    await asyncio.to_thread(sys.stdin.readline)
    costs = cost.end()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return costs


class Node:
    """Fake node and node pool. Accepts every reveal."""

    def __init__(self) -> None:
        self.head = SimpleNamespace(height=100)
        self.nodes = self.usable_nodes = [SimpleNamespace(name="node", client=self, penalty=NO_PENALTY)]
        self.agreed_height = self.greatest_height = 100
        self.response_wait = 1.0

    async def broadcast(self, message: RevealMessage, progress: object) -> BroadcastOutcome:  # noqa: ARG002 - any
        """Accept the message."""
        await asyncio.sleep(NODE_SECONDS)
        return BroadcastOutcome(Verdict.ACCEPTED)

    def is_head_newer_than(self, when: float) -> bool:  # noqa: ARG002 - there is always a newer block
        """Always true: a new block exists after every send."""
        return True

    def seconds_left(self, round_id: bytes) -> float:  # noqa: ARG002 - no round ends
        """Replaces `RetrySchedule.seconds_left`."""
        return math.inf


async def run_sender(store: PostgresStore, cost: CostMeter) -> dict[str, float]:
    """Send all prepared messages, then confirm them in blocks."""
    clock, node = SystemClock(), Node()
    lease = DatabaseLease(store, clock=clock)
    keeper = LeaseKeeper(lease, clock=clock, standby=False, on_acquired=lambda: None)
    await keeper.acquire_at_start()
    keeper_task = asyncio.create_task(keeper.run())
    fake: Any = node
    sender = Sender(
        store=store,
        node_pool=fake,
        trees=fake,
        verifier=fake,
        circuits=CircuitChoice(
            "k10", clock=clock, store_counted=lambda key, value: store.run(blocks.set_meta, key, value)
        ),
        retries=fake,
        clock=clock,
        stats=Stats(),
        lease=lease,
    )
    prepared = await store.list_unconfirmed()
    cost.begin()
    await sender.send_new()
    results = {f"send_{name}": value / len(prepared) for name, value in cost.end().items()}
    spent = [(share.round_id, share.nullifier) for share in prepared]
    for reader in ("first_read", "other_read"):
        cost.begin()
        confirmed = await confirm_in_blocks(store, spent)
        if confirmed != (len(spent) if reader == "first_read" else 0):
            raise SystemExit(f"{confirmed} of {len(spent)} shares were confirmed")
        results |= {f"{reader}_{name}": value / len(spent) for name, value in cost.end().items()}
    keeper_task.cancel()
    await asyncio.gather(keeper_task, return_exceptions=True)
    return results


async def confirm_in_blocks(store: PostgresStore, spent: Sequence[tuple[bytes, bytes]]) -> int:
    """Apply blocks with these reveals. Returns the number of confirmed shares."""
    confirmed = 0
    for height, at in enumerate(range(0, len(spent), MAX_REVEALS_PER_BLOCK), 101):
        block = spent[at : at + MAX_REVEALS_PER_BLOCK]
        confirmed += len(await store.run(blocks.apply_blocks, [(height, height)], block))
    return confirmed


async def main() -> None:
    """Run one host."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["prove", "send"])
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
        costs = await (run_prover if options.role == "prove" else run_sender)(store, cost)
        print(json.dumps(costs), flush=True)
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main())
