"""The complete queue pipeline with a real database and fake provers, nodes, trees and rounds."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from helper.app.gates import Gates
from helper.chain.chain_data import BlockHead
from helper.chain.follower import BlockFollower
from helper.chain.node import Node
from helper.chain.node_pool import NodePool, create_nodes
from helper.chain.round_registry import to_stored_round
from helper.chain.scheduled_sync import ChainSync
from helper.core.dispatch_order import BacklogLimits
from helper.errors import StoreError
from helper.observability.stats import Stats
from helper.reveal.circuit_choice import CircuitChoice
from helper.reveal.dispatcher import Backlog, Dispatcher, DispatchGate
from helper.reveal.prover_pool import ProverPool
from helper.reveal.revealer import ProofTimes, RetrySchedule, Revealer
from helper.reveal.round_closing import RoundClosing
from helper.reveal.sender import Sender
from helper.store import shares
from helper.store.blocks import apply_blocks, set_meta
from helper.store.rounds import save_rounds
from helper.store.sqlite.store import SqliteStore
from helper.store.table_rows import ShareRow
from tests.support.clock import FakeClock
from tests.support.fakes import (
    ACCEPTED_REPLY,
    CHAIN_ID,
    FIRST_NODE,
    HOUR_SECONDS,
    ROUND,
    SECOND_NODE,
    START_TIME,
    TIMEOUT_SECONDS,
    CountingClock,
    FakeNodeTransport,
    FakeProver,
    FakeRounds,
    FakeTrees,
    NodeReply,
    create_round,
    create_share,
    nullifier_of,
    wait_until,
)
from tests.support.sealed_fields import add_field_functions
from tests.support.tasks import running

P = ParamSpec("P")
T = TypeVar("T")


class WatchedStore(SqliteStore):
    """The real store. Records its calls by name; tests can make a method fail or observe it."""

    def __init__(self, path: Path, clock: FakeClock) -> None:
        super().__init__(path, clock=clock)
        self.path = path
        self.calls: list[str] = []
        self.failing_calls: set[str] = set()
        self.after_call: dict[str, Callable[[], None]] = {}

    def _record_call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing_calls:
            raise StoreError(f"{name} failed")

    async def run(self, op: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        name = getattr(op, "__name__", type(op).__name__)
        self._record_call(name)
        result = await super().run(op, *args, **kwargs)
        self.after_call.pop(f"crash {result}" if name == "record_crash" else name, lambda: None)()
        return result

    async def next_due_ms(self, rounds: Collection[bytes]) -> int | None:
        self._record_call("next_due_ms")
        due_ms = await super().next_due_ms(rounds)
        self.after_call.pop("next_due_ms", lambda: None)()
        return due_ms


class Pipeline:
    """All components between the database and the nodes."""

    def __init__(
        self,
        path: Path,
        *,
        clock: CountingClock,
        slots: int = 2,
        circuit: str = "auto",
        quick_retries: int = 5,
        prover: ProverPool | None = None,
        **limits: Any,
    ) -> None:
        self.clock = clock
        self.store = WatchedStore(path, clock)
        self.stats = Stats()
        self.trees = FakeTrees()
        clock_offset = clock.now() - clock.monotonic()
        self.rounds = FakeRounds(clock=lambda: clock.monotonic() + clock_offset)  # the chain's clock does not jump
        self.prover = FakeProver(clock, slots)
        self.nodes = FakeNodeTransport({FIRST_NODE: ACCEPTED_REPLY, SECOND_NODE: ACCEPTED_REPLY})
        nodes = create_nodes([("http://first", ""), ("http://second", "")], transport=self.nodes)
        self.endpoints = NodePool(nodes, clock=clock, chain_id=CHAIN_ID, **limits)
        self.circuits = CircuitChoice(
            circuit, clock=clock, store_counted=lambda key, value: self.store.run(set_meta, key, value)
        )
        common_parts: dict[str, Any] = {"store": self.store, "clock": clock, "stats": self.stats}
        self.retries = RetrySchedule(
            store=self.store,
            node_pool=self.endpoints,
            rounds=self.rounds,
            stats=self.stats,
            quick_retries=quick_retries,
        )
        self.proof_times = ProofTimes(slots, lambda: 0.1)
        reveal_parts: dict[str, Any] = {
            **common_parts,
            "node_pool": self.endpoints,
            "trees": self.trees,
            "circuits": self.circuits,
            "retries": self.retries,
        }
        self.revealer = Revealer(
            **reveal_parts,
            rounds=self.rounds,
            prover=prover or self.prover,
            proof_times=self.proof_times,
        )
        self.make_sender = partial(Sender, **reveal_parts, verifier=prover or self.prover)
        self.sender = self.make_sender()
        self.closing = RoundClosing(**common_parts, rounds=self.rounds, purge_after=24 * HOUR_SECONDS)
        self.listener = SimpleNamespace(is_ready=True, disputed_height=None, stalled_height=None, gap_count=0)
        self.gates = Gates(
            store=self.store,
            node_pool=self.endpoints,
            round_registry=self.rounds,
            tree_sync=self.trees,
            chain_sync=cast(ChainSync, None),
            block_follower=cast(BlockFollower, self.listener),
            circuit_choice=self.circuits,
            proof_times=self.proof_times,
            clock=clock,
        )
        self.gate_checks = 0
        self.dispatcher = Dispatcher(
            store=self.store,
            revealer=self.revealer,
            sender=self.sender,
            get_gate=self.gate,
            backlog=Backlog(
                store=self.store,
                proof_times=self.proof_times,
                limits=BacklogLimits(due_shares=slots, overdue_seconds=2.0),
                clock=clock,
                stats=self.stats,
            ),
            slots=slots,
            clock=clock,
            stats=self.stats,
        )
        self.height = 100
        self.show_block()

    def gate(self) -> DispatchGate:
        """Return the service's real gate decision for these components."""
        self.gate_checks += 1
        return self.gates.get_dispatch_gate()

    def show_block(self, blocks: int = 1, *, time: float | None = None, after: float = 0.0) -> None:
        """Make every node report a new block with this time (default: now), `after` so many seconds."""
        if after:
            self.clock.advance(after)
        self.height += blocks
        for endpoint in self.endpoints.nodes:
            if endpoint.health.head is not None:  # a probe before this block
                self.record_head(endpoint, endpoint.health.head)
            self.record_head(endpoint, BlockHead(CHAIN_ID, self.height, self.clock.now() if time is None else time))
        self.endpoints.apply_probes()

    def record_head(self, endpoint: Node, head: BlockHead) -> None:
        """Probe a node, which reports this block."""
        now = self.clock.monotonic()
        endpoint.health.record_probe(head, is_syncing=False, started_at=now, ended_at=now)

    async def next_block(self, count: int = 1) -> None:
        """Process new blocks without any of the helper's shares."""
        for _ in range(count):
            self.show_block(after=5)
            self.circuits.note_block()
            await self.sender.reconcile()

    def set_replies(self, reply: NodeReply) -> None:
        self.nodes.replies = {FIRST_NODE: reply, SECOND_NODE: reply}

    async def enqueue(self, *positions: int, submit_at: int = 0) -> None:
        """Enqueue shares and wake the dispatcher, like admission does."""
        for position in positions:
            share = create_share(position, submit_at)
            now = self.clock.now()
            await self.store.run(shares.EnqueueOperation(share, nullifier_of(share.primary_blind), now=now))
            self.dispatcher.wake_if_due(max(submit_at, now))

    async def claim_due_share(self) -> ShareRow:
        (queued,) = await self.store.run(shares.claim_due, now=self.clock.now(), limit=2, rounds=[ROUND])
        return queued

    async def claim_new_share(self, position: int = 1) -> ShareRow:
        await self.enqueue(position)
        return await self.claim_due_share()

    async def prepare_message(self, position: int = 1) -> int:
        """Store the message of a share without sending it. Returns the share's id."""
        queued = await self.claim_new_share(position)
        assert await self.revealer.prove(queued)
        return queued.id

    async def count_on_chain(self, *positions: int) -> list[int]:
        """Apply the newest block with these shares' nullifiers. Returns the confirmed ids."""
        spent = [(ROUND, nullifier_of(create_share(position).primary_blind)) for position in positions]
        return await self.store.run(apply_blocks, [(self.height, self.height)], spent)

    def query_rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Query the database file over a separate connection, which sees only committed data."""
        with contextlib.closing(sqlite3.connect(f"file:{self.store.path}?mode=ro", uri=True)) as file:
            return add_field_functions(file).execute(query, values).fetchall()

    def read_share(self, position: int, columns: str = "state") -> tuple[Any, ...] | None:
        """Return columns of one share on disk; None if it is not live."""
        rows = self.query_rows(f"SELECT {columns} FROM shares WHERE field(witness, 'tree_position') = ?", position)
        return rows[0] if rows else None

    def read_send_state(self) -> tuple[Any, ...]:
        """Return the send state of the only message: count, first and last height, node, outcome."""
        columns = "sends, first_sent_height, last_sent_height, last_endpoint, last_outcome"
        (row,) = self.query_rows(f"SELECT {columns} FROM reveals")
        return row

    def share_states(self) -> dict[int, int]:
        return dict(self.query_rows("SELECT field(witness, 'tree_position'), state FROM shares"))

    @contextlib.asynccontextmanager
    async def run_dispatcher(self) -> AsyncIterator[asyncio.Task[None]]:
        """Run the dispatcher. Yields after it is idle for the first time."""
        async with running(self.dispatcher.run()) as task:
            await self.settle_dispatcher()
            yield task

    async def settle_dispatcher(self) -> None:
        """Wake the dispatcher and wait until it is idle again."""
        turns = self.gate_checks
        self.dispatcher.wake()
        await wait_until(lambda: self.gate_checks > turns)
        idle_passes = 0
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while idle_passes < 5:  # a wake-up takes effect after a few event loop iterations
                await asyncio.sleep(0)
                idle_passes = idle_passes + 1 if self.clock.sleeper_count else 0

    async def advance_when_idle(self, seconds: float) -> None:
        """Advance the clock after the dispatcher is idle."""
        await self.settle_dispatcher()
        self.clock.advance(seconds)

    async def count_idle_turns(self) -> int:
        """Return the number of dispatcher iterations without events; 0 if it sleeps."""
        turns = self.gate_checks
        for _ in range(20):
            await self.store.count_shares()  # a call in the store's thread: enough time to detect a busy loop
        return self.gate_checks - turns


@contextlib.asynccontextmanager
async def open_pipeline(path: Path, *, clock: CountingClock | None = None, **settings: Any) -> AsyncIterator[Pipeline]:
    """Open a pipeline on a new database with one active round. Closes it at the end."""
    pipeline = Pipeline(path, clock=clock or CountingClock(float(START_TIME)), **settings)
    await pipeline.store.open()
    try:
        await pipeline.store.run(save_rounds, [to_stored_round(create_round(ROUND))], pipeline.clock.now())
        yield pipeline
    finally:
        await pipeline.store.close()
        await pipeline.endpoints.aclose()
