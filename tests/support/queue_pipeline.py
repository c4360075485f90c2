"""The queue's whole line: real parts, a real database; only provers, nodes, trees and rounds are stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from helper.app.health import ServiceHealth
from helper.chain.block_follower import BlockFollower
from helper.chain.commitment_tree import CommitmentTreeSync
from helper.chain.models import BlockHead
from helper.chain.node_pool import NodePool, create_nodes
from helper.chain.round_registry import RoundRegistry
from helper.chain.sync import ChainFollower
from helper.errors import StoreError
from helper.observability.stats import Stats
from helper.reveal.attempt_budget import AttemptBudget
from helper.reveal.broadcaster import Broadcaster
from helper.reveal.circuit_selector import CircuitSelector
from helper.reveal.dispatcher import Dispatcher, DispatchGate
from helper.reveal.prover.pool import ProverPool
from helper.reveal.retention import Retention
from helper.reveal.revealer import Revealer
from helper.store.rows import QueuedShare
from helper.store.sqlite.store import SqliteStore
from tests.support.clock import FakeClock
from tests.support.fakes import (
    ACCEPTS,
    CHAIN,
    FIRST,
    HOUR,
    PATIENCE,
    ROUND,
    SECOND,
    START,
    Answer,
    CountingClock,
    FakeProver,
    FakeRounds,
    FakeTrees,
    Nodes,
    make_round,
    make_share,
    nullifier_of,
    until,
)


class WatchedStore(SqliteStore):
    """The real store; notes its calls by name, and can be made to fail or to be watched at one of them."""

    def __init__(self, path: Path, clock: FakeClock) -> None:
        super().__init__(path, clock=clock)
        self.path = path
        self.journal: list[str] = []
        self.broken: set[str] = set()
        self.after: dict[str, Callable[[], None]] = {}

    def _note(self, name: str) -> None:
        self.journal.append(name)
        if name in self.broken:
            raise StoreError(f"{name} failed")

    async def claim_due(self, *, now: float, limit: int, rounds: Collection[bytes]) -> list[QueuedShare]:
        self._note("claim_due")
        claimed = await super().claim_due(now=now, limit=limit, rounds=rounds)
        self.after.pop("claim_due", lambda: None)()
        return claimed

    async def record_crash(self, share_id: int, *, due_ms: int, note: str) -> int:
        crashes = await super().record_crash(share_id, due_ms=due_ms, note=note)
        self.after.pop(f"crash {crashes}", lambda: None)()
        return crashes

    async def release_claim(self, share_id: int) -> bool:
        self._note("release_claim")
        return await super().release_claim(share_id)

    async def record_outcome(self, share_id: int, *, outcome: str) -> None:
        self._note("record_outcome")
        await super().record_outcome(share_id, outcome=outcome)

    async def mark_alerted(self, round_id: bytes, now: float) -> None:
        self._note("mark_alerted")
        await super().mark_alerted(round_id, now)

    async def purge(self, round_id: bytes) -> int:
        self._note("purge")
        return await super().purge(round_id)

    async def next_due_ms(self, rounds: Collection[bytes]) -> int | None:
        self._note("next_due_ms")
        due_ms = await super().next_due_ms(rounds)
        self.after.pop("next_due_ms", lambda: None)()
        return due_ms


class Line:
    """Everything between the database and the nodes."""

    def __init__(
        self,
        path: Path,
        *,
        clock: CountingClock,
        slots: int = 2,
        circuit: str = "auto",
        maximum: int = 5,
        **limits: float,
    ) -> None:
        self.clock = clock
        self.store = WatchedStore(path, clock)
        self.stats = Stats()
        self.trees = FakeTrees()
        ahead = clock.now() - clock.monotonic()
        self.rounds = FakeRounds(clock=lambda: clock.monotonic() + ahead)  # the chain's clock does not jump
        self.prover = FakeProver(clock, slots)
        self.nodes = Nodes({FIRST: ACCEPTS, SECOND: ACCEPTS})
        made = create_nodes(["http://first", "http://second"], transport=self.nodes)
        self.endpoints = NodePool(made, clock=clock, chain_id=CHAIN, **limits)
        self.circuits = CircuitSelector(circuit, clock=clock, remember=self.store.set_meta)
        common: dict[str, Any] = {"store": self.store, "clock": clock, "stats": self.stats}
        self.attempts = AttemptBudget(store=self.store, endpoints=self.endpoints, stats=self.stats, maximum=maximum)
        way: dict[str, Any] = {
            **common,
            "trees": self.trees,
            "endpoints": self.endpoints,
            "circuits": self.circuits,
            "attempts": self.attempts,
        }
        self.revealer = Revealer(**way, prover=self.prover)
        self.make_broadcaster = partial(Broadcaster, **way, verifier=self.prover)
        self.broadcaster = self.make_broadcaster()
        self.retention = Retention(**common, rounds=self.rounds, purge_after=24 * HOUR)
        self.listener = SimpleNamespace(
            arrived=True, disputed=None, stalled=None, history=SimpleNamespace(blocks_left=0)
        )
        self.vitals = ServiceHealth(
            store=self.store,
            endpoints=self.endpoints,
            rounds=cast(RoundRegistry, self.rounds),
            trees=cast(CommitmentTreeSync, self.trees),
            follower=cast(ChainFollower, None),
            listener=cast(BlockFollower, self.listener),
            circuits=self.circuits,
            prover=cast(ProverPool, self.prover),
            stats=self.stats,
            clock=clock,
            stale_after=90,
            tolerance=120,
        )
        self.turns = 0
        self.processor = Dispatcher(
            store=self.store,
            revealer=self.revealer,
            broadcaster=self.broadcaster,
            retention=self.retention,
            gate=self.gate,
            slots=slots,
            clock=clock,
            stats=self.stats,
        )
        self.height = 100
        self.block()

    def gate(self) -> DispatchGate:
        """The service's own judgement, over these parts."""
        self.turns += 1
        return self.vitals.gate()

    def block(self, blocks: int = 1, *, time: float | None = None) -> None:
        """Let every node show a new block of this time (now)."""
        self.height += blocks
        now = self.clock.now()
        for endpoint in self.endpoints.all:
            head, began = endpoint.health.head, self.clock.monotonic()
            if head is not None:  # it was asked before the block was there
                endpoint.health.saw(head, syncing=False, now=now, began=began)
            new = BlockHead(CHAIN, self.height, now if time is None else time)
            endpoint.health.saw(new, syncing=False, now=now, began=began)
        self.endpoints.settle()

    async def next_block(self) -> None:
        """A block comes and is processed, without any share of ours in it."""
        self.clock.advance(5)
        self.block()
        self.circuits.note_block()
        await self.broadcaster.reconcile(self.height)

    def all_nodes(self, answer: Answer) -> None:
        """Every node gives this answer."""
        self.nodes.answers = {FIRST: answer, SECOND: answer}

    async def put(self, *positions: int, submit_at: int = 0) -> None:
        """Enqueue shares and wake the processor, as intake does."""
        for position in positions:
            share = make_share(position, submit_at)
            now = self.clock.now()
            await self.store.enqueue(share, nullifier_of(share.primary_blind), now=now)
            self.processor.wake_by(max(submit_at, now))

    async def claim(self) -> QueuedShare:
        """Take up the one share that is due."""
        (queued,) = await self.store.claim_due(now=self.clock.now(), limit=2, rounds=[ROUND])
        return queued

    async def prepared(self, position: int = 1) -> int:
        """A share whose message is on disk and not sent; its id."""
        await self.put(position)
        queued = await self.claim()
        assert await self.revealer.prove(queued)
        return queued.id

    async def count_on_chain(self, *positions: int) -> list[int]:
        """Let the chain count these shares in the newest block."""
        spent = [(ROUND, nullifier_of(make_share(position).primary_blind)) for position in positions]
        return await self.store.apply_block(self.height, spent, now=self.clock.now())

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Read the database file over a connection of one's own: only what is committed is seen."""
        with contextlib.closing(sqlite3.connect(f"file:{self.store.path}?mode=ro", uri=True)) as file:
            return file.execute(query, values).fetchall()

    def row(self, position: int, columns: str = "state") -> tuple[Any, ...] | None:
        """Columns of one share as they are on disk; None when it is no live share."""
        found = self.rows(f"SELECT {columns} FROM shares WHERE tree_position = ?", position)
        return found[0] if found else None

    def sending(self) -> tuple[Any, ...]:
        """How the one message on disk was sent: how often, heights of the first and last time, to whom, the outcome."""
        columns = "sends, first_sent_height, last_sent_height, last_endpoint, last_outcome"
        (found,) = self.rows(f"SELECT {columns} FROM reveals")
        return found

    def states(self) -> dict[int, int]:
        """The state of every live share by its position."""
        return dict(self.rows("SELECT tree_position, state FROM shares"))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """The processor at work, once it has gone to sleep for the first time."""
        task = asyncio.create_task(self.processor.run())
        try:
            await self.settle()
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def settle(self) -> None:
        """Have the processor look at everything as it is now, and go to sleep again."""
        turns = self.turns
        self.processor.wake()
        await until(lambda: self.turns > turns)
        quiet = 0
        async with asyncio.timeout(PATIENCE):
            while quiet < 5:  # a wake-up takes a few steps of the event loop to arrive
                await asyncio.sleep(0)
                quiet = quiet + 1 if self.clock.asleep else 0

    async def later(self, seconds: float) -> None:
        """Let time pass for a processor that sleeps."""
        await self.settle()
        self.clock.advance(seconds)

    async def turns_at_rest(self) -> int:
        """How often the loop goes round while nothing happens: nought when it sleeps."""
        turns = self.turns
        for _ in range(20):
            await self.store.counts()  # a thread's answer: ample time for a loop that spins
        return self.turns - turns


@contextlib.asynccontextmanager
async def open_line(path: Path, *, clock: CountingClock | None = None, **settings: Any) -> AsyncIterator[Line]:
    """A line on an open database with one active round; closed at the end."""
    line = Line(path, clock=clock or CountingClock(float(START)), **settings)
    await line.store.open()
    try:
        await line.store.save_rounds([make_round(ROUND)], line.clock.now())
        yield line
    finally:
        await line.store.close()
        await line.endpoints.aclose()
