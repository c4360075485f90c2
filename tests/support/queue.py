"""The queue's whole line: real parts, a real database; only provers, nodes, trees and rounds are stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx

from helper.app import Service
from helper.attempts import Attempts
from helper.broadcast import Broadcaster
from helper.chain.failover import Endpoints, make_endpoints
from helper.chain.message import RevealMessage
from helper.chain.models import BlockHead, Round, RoundStatus
from helper.circuits import CircuitChoice
from helper.errors import StoreError
from helper.processor import Gate, Processor
from helper.prover import ProofJob
from helper.prover.pool import Proof
from helper.retention import Retention
from helper.reveal import Revealer
from helper.share import Share
from helper.store.base import QueuedShare
from helper.store.sqlite import SqliteStore
from helper.telemetry.stats import Stats
from helper.tree import Anchor
from tests.support.clock import FakeClock

START = 1_795_268_000
ROUND, OTHER_ROUND = bytes(range(32)), bytes(range(1, 33))
CHAIN = "svote-test"
HOUR = 3600.0
PATIENCE = 10.0
ANCHOR = Anchor(height=90, size=1000, root=b"\x0a" * 32)
FIRST, SECOND = "first:80", "second:80"


def make_share(position: int, submit_at: int = 0, round_id: bytes = ROUND) -> Share:
    """The share of this position: always the same bytes."""
    dice = random.Random(position)
    blobs = {name: dice.randbytes(32) for name in ("shares_hash", "primary_blind", "c1", "c2")}
    return Share(
        round_id=round_id,
        share_index=position % 16,
        proposal_id=1,
        vote_decision=1,
        tree_position=position,
        submit_at=submit_at,
        share_comms=dice.randbytes(512),
        **blobs,
    )


def nullifier_of(blind: bytes) -> bytes:
    """What the stand-in prover computes from a witness."""
    return sha256(b"nullifier" + blind).digest()


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that other tasks bring about."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0)


async def until_length(things: Sequence[object], number: int) -> None:
    """Wait for a list to have grown to this length."""
    await until(lambda: len(things) >= number)
    assert len(things) == number


class CountingClock(FakeClock):
    """Knows who sleeps, and how often somebody began to."""

    sleeps = 0
    asleep = 0

    async def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.asleep += 1
        try:
            await super().sleep(seconds)
        finally:
            self.asleep -= 1


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

    async def release(self, share_id: int) -> bool:
        self._note("release")
        return await super().release(share_id)

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
        return await super().next_due_ms(rounds)


class FakeProver:
    """Makes and checks proofs at once, a fixed number together, unless the test holds one or lets it fail."""

    def __init__(self, clock: FakeClock, slots: int) -> None:
        self._clock = clock
        self._free = asyncio.Semaphore(slots)
        self.begun: list[tuple[int, float]] = []
        self.circuits: list[str] = []
        self.running = self.most = 0
        self.held: dict[int, asyncio.Event] = {}
        self.failures: dict[int, list[Exception]] = {}
        self.root = ANCHOR.root
        self.valid = True
        self.verified: list[tuple[str, bytes]] = []

    @property
    def positions(self) -> list[int]:
        """The shares whose proofs were begun, in order."""
        return [position for position, _ in self.begun]

    def hold(self, position: int) -> asyncio.Event:
        """Let a share's proofs wait for this event."""
        return self.held.setdefault(position, asyncio.Event())

    async def prove(self, job: ProofJob, *, started: Callable[[], None] = lambda: None) -> Proof:
        async with self._free:
            self.running += 1
            self.most = max(self.most, self.running)
            self.begun.append((job.position, self._clock.now()))
            self.circuits.append(job.circuit)
            started()
            try:
                await asyncio.sleep(0)
                if job.position in self.held:
                    await self.held[job.position].wait()
                if self.failures.get(job.position):
                    raise self.failures[job.position].pop(0)
                return Proof(b"proof of %d" % len(self.begun), nullifier_of(job.primary_blind), self.root, seconds=0.1)
            finally:
                self.running -= 1

    async def verify(self, circuit: str, proof: bytes, *, root: bytes, **statement: Any) -> bool:
        self.verified.append((circuit, root))
        return self.valid


@dataclass
class FakeTrees:
    """One tree a round, all alike."""

    newest: Anchor | None = ANCHOR
    known: dict[int, Anchor] = field(default_factory=lambda: {ANCHOR.height: ANCHOR})

    def anchor(self, round_id: bytes) -> Anchor | None:
        return self.newest

    def anchor_at(self, round_id: bytes, height: int) -> Anchor | None:
        return self.known.get(height)

    async def path(self, round_id: bytes, position: int, anchor: Anchor) -> bytes:
        return bytes(24 * 32)


@dataclass
class FakeRounds:
    """Rounds that the test closes."""

    end: int = START + 24 * 3600
    closed: set[bytes] = field(default_factory=set)
    forgotten: list[bytes] = field(default_factory=list)
    hold: asyncio.Event | None = None

    def active(self) -> list[Round]:
        return [] if ROUND in self.closed else [make_round(ROUND, end=self.end)]

    async def is_closed(self, round_id: bytes) -> bool:
        if self.hold is not None:
            await self.hold.wait()
        return round_id in self.closed

    def forget(self, round_id: bytes) -> None:
        self.forgotten.append(round_id)


def make_round(round_id: bytes, *, end: int = START + 24 * 3600) -> Round:
    return Round(round_id, RoundStatus.ACTIVE, end, (), 1)


Answer = Callable[[RevealMessage], Awaitable[httpx.Response]]


def says(status: int, **body: Any) -> Answer:
    """A node that gives this answer to every reveal."""

    async def answer(message: RevealMessage) -> httpx.Response:
        return httpx.Response(status, content=json.dumps(body).encode())

    return answer


def breaks(error: type[httpx.TransportError]) -> Answer:
    """A node to which every connection ends in this way."""

    async def answer(message: RevealMessage) -> httpx.Response:
        raise error("broken")

    return answer


def refuses(log: str, code: int = 1) -> Answer:
    """A node that refuses with these words."""
    return says(422, tx_hash="", code=code, log=log)


ACCEPTS = says(200, tx_hash="", code=0)
BAD_PROOF = refuses("invalid zero-knowledge proof: no")


class Nodes(httpx.AsyncBaseTransport):
    """Takes the place of the network. `posts` are the reveals that came: which node, and the body."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.posts: list[tuple[str, bytes]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        name = f"{request.url.host}:80"
        body = await request.aread()
        self.posts.append((name, body))
        return await self.answers[name](cast(RevealMessage, json.loads(body)))

    @property
    def asked(self) -> list[str]:
        """The nodes that were sent to, in order."""
        return [name for name, _ in self.posts]


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
        self.rounds = FakeRounds()
        self.prover = FakeProver(clock, slots)
        self.nodes = Nodes({FIRST: ACCEPTS, SECOND: ACCEPTS})
        made = make_endpoints(["http://first", "http://second"], transport=self.nodes)
        self.endpoints = Endpoints(made, clock=clock, chain_id=CHAIN, **limits)
        self.circuits = CircuitChoice(circuit, clock=clock, remember=self.store.set_meta)
        common: dict[str, Any] = {"store": self.store, "clock": clock, "stats": self.stats}
        self.attempts = Attempts(**common, maximum=maximum)
        way: dict[str, Any] = {
            **common,
            "trees": self.trees,
            "endpoints": self.endpoints,
            "circuits": self.circuits,
            "attempts": self.attempts,
        }
        self.revealer = Revealer(**way, prover=self.prover)
        self.broadcaster = Broadcaster(**way, verifier=self.prover)
        self.retention = Retention(**common, rounds=self.rounds, purge_after=24 * HOUR)
        self.turns = 0
        self.processor = Processor(
            store=self.store,
            revealer=self.revealer,
            broadcaster=self.broadcaster,
            retention=self.retention,
            gate=self.gate,
            slots=slots,
            clock=clock,
        )
        self.height = 100
        self.block()

    def gate(self) -> Gate:
        """The service's own judgement, over these parts."""
        self.turns += 1
        chain = SimpleNamespace(clock_skew_seconds=120)
        parts = SimpleNamespace(
            endpoints=self.endpoints,
            rounds=self.rounds,
            trees=self.trees,
            circuits=self.circuits,
            config=SimpleNamespace(chain=chain),
        )
        return Service.gate(cast(Service, parts))

    def block(self, blocks: int = 1, *, time: float | None = None) -> None:
        """Let every node show a new block of this time (now)."""
        self.height += blocks
        now = self.clock.now()
        for endpoint in self.endpoints.all:
            endpoint.health.saw(BlockHead(CHAIN, self.height, now if time is None else time), syncing=False, now=now)

    async def put(self, *positions: int, submit_at: int = 0) -> None:
        """Enqueue shares and wake the processor, as intake does."""
        for position in positions:
            share = make_share(position, submit_at)
            await self.store.enqueue(share, nullifier_of(share.primary_blind), now=self.clock.now())
        self.processor.wake()

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


def others(positions: Sequence[int], taken: Sequence[int]) -> list[int]:
    """The positions that were not taken, in order."""
    return [position for position in positions if position not in taken]
