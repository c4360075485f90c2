"""Fakes for the queue's environment: clock, provers, trees, rounds, nodes, and shares."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import httpx

from helper.chain.chain_data import Anchor, Round, RoundStatus
from helper.chain.commitment_trees import CommitmentTreeSync
from helper.chain.round_registry import RoundRegistry, RoundView
from helper.circuits import create_sample_share
from helper.core.share import Share
from helper.errors import ProofNotNeeded
from helper.reveal.prover_pool import ProverPool
from proofs import Proved
from tests.support.clock import FakeClock

START_TIME = 1_795_268_000
ROUND, OTHER_ROUND = bytes(range(32)), bytes(range(1, 33))
CHAIN_ID = "svote-test"
HOUR_SECONDS = 3600.0
TIMEOUT_SECONDS = 60.0
ANCHOR = Anchor(height=90, size=1000, root=b"\x0a" * 32)
FIRST_NODE, SECOND_NODE = "first:80", "second:80"


def create_share(position: int, submit_at: int = 0, round_id: bytes = ROUND) -> Share:
    """Create the share at this position. The bytes are deterministic."""
    rng = random.Random(position)
    blobs = {name: rng.randbytes(32) for name in ("shares_hash", "primary_blind", "c1", "c2")}
    return Share(
        round_id=round_id,
        share_index=position % 16,
        proposal_id=1,
        vote_decision=1,
        tree_position=position,
        submit_at=submit_at,
        share_comms=rng.randbytes(512),
        shares_hash=blobs["shares_hash"],
        primary_blind=blobs["primary_blind"],
        c1=blobs["c1"],
        c2=blobs["c2"],
    )


def create_provable_share(proposal_id: int = 1) -> tuple[Share, bytes]:
    """Create a share with a valid witness, and its path in a tree with one leaf."""
    share, path = create_sample_share()
    return replace(share, proposal_id=proposal_id), path


def nullifier_of(blind: bytes) -> bytes:
    """Return the nullifier that the fake prover computes from a witness."""
    return sha256(b"nullifier" + blind).digest()


async def wait_until(condition: Callable[[], object]) -> None:
    """Wait for a condition that other tasks make true, or, after many turns of the loop, threads and servers."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        for turn in itertools.count():
            if condition():
                return
            await asyncio.sleep(0 if turn < 500 else 0.001)


async def wait_for_length(items: Sequence[object], length: int) -> None:
    """Wait until a list has exactly this length."""
    await wait_until(lambda: len(items) >= length)
    assert len(items) == length


class CountingClock(FakeClock):
    """Counts active sleepers and calls of `sleep`."""

    sleep_count = 0
    sleeper_count = 0

    async def sleep(self, seconds: float) -> None:
        self.sleep_count += 1
        self.sleeper_count += 1
        try:
            await super().sleep(seconds)
        finally:
            self.sleeper_count -= 1


class FakeProver(ProverPool):
    """Proves and verifies immediately with limited concurrency. Tests can block or fail the proofs of a share."""

    def __init__(self, clock: FakeClock, slots: int) -> None:
        self._clock = clock
        self._free = asyncio.Semaphore(slots)
        self.started_proofs: list[tuple[int, float]] = []
        self.circuits: list[str] = []
        self.running = self.max_running = 0
        self.blocked: dict[int, asyncio.Event] = {}
        self.failures: dict[int, list[Exception]] = {}
        self.root = ANCHOR.root
        self.is_valid = True
        self.roots: dict[bytes, bytes] = {}
        self.verified: list[tuple[str, bytes]] = []

    @property
    def positions(self) -> list[int]:
        return [position for position, _ in self.started_proofs]

    def block(self, position: int) -> asyncio.Event:
        """Make a share's proofs wait for the returned event."""
        return self.blocked.setdefault(position, asyncio.Event())

    async def prove(
        self,
        circuit: str,
        share: Share,
        path: bytes,
        *,
        begin: Callable[[], Awaitable[bool]] | None = None,
        has_priority: bool = True,
    ) -> Proved:
        position = share.tree_position
        async with self._free:
            if begin is not None and not await begin():
                raise ProofNotNeeded("the proof is no longer needed")
            self.running += 1
            self.max_running = max(self.max_running, self.running)
            self.started_proofs.append((position, self._clock.now()))
            self.circuits.append(circuit)
            try:
                await asyncio.sleep(0)
                if position in self.blocked:
                    await self.blocked[position].wait()
                if self.failures.get(position):
                    raise self.failures[position].pop(0)
                proof = b"proof of %d" % len(self.started_proofs)
                self.roots[proof] = self.root
                return Proved(proof, nullifier_of(share.primary_blind), self.root)
            finally:
                self.running -= 1

    def root_of(self, proof: bytes) -> bytes | None:
        return self.roots.get(proof)

    async def verify(self, circuit: str, proof: bytes, statement: Any) -> bool:
        self.verified.append((circuit, statement.root))
        return self.is_valid


@dataclass
class FakeTrees(CommitmentTreeSync):
    newest: Anchor | None = ANCHOR
    unserved_roots: set[tuple[str, bytes]] = field(default_factory=set)

    def anchor(self, round_id: bytes) -> Anchor | None:
        return self.newest

    def serves_root(self, round_id: bytes, node: str, height: int, root: bytes) -> bool:
        return height == ANCHOR.height and (node, root) not in self.unserved_roots

    def find_anchor(
        self, round_id: bytes, position: int, get_leaf: Callable[[], bytes], *, previous: Anchor | None = None
    ) -> Anchor | None:
        return self.newest if self.newest is not None and position < self.newest.size else None

    def contradiction_reason(self, round_id: bytes) -> str | None:
        return None

    async def path(self, round_id: bytes, position: int, anchor: Anchor) -> bytes:
        return bytes(24 * 32)


@dataclass
class FakeRounds(RoundRegistry):
    end: int = START_TIME + 24 * 3600
    closed: set[bytes] = field(default_factory=set)
    forgotten: list[bytes] = field(default_factory=list)
    freeze_reasons: dict[bytes, str] = field(default_factory=dict)
    revision: int = 0
    clock: Callable[[], float] = lambda: float(START_TIME)

    def chain_now(self) -> float | None:
        return self.clock()

    def get(self, round_id: bytes) -> Round | None:
        return create_round(round_id, end=self.end) if round_id == ROUND else None

    def is_doubted(self, round_id: bytes) -> bool:
        return False

    def frozen_reason(self, round_id: bytes) -> str | None:
        return self.freeze_reasons.get(round_id)

    def frozen_shares(self) -> dict[bytes, int]:
        return {}

    def unconfirmed_reports(self) -> dict[bytes, str]:
        return dict(self.freeze_reasons)

    def all_rounds(self) -> list[Round]:
        return self.active_rounds()

    def active_rounds(self, *, with_frozen: bool = False) -> list[Round]:
        return [] if ROUND in self.closed else [create_round(ROUND, end=self.end)]

    def open_rounds(self) -> list[Round]:
        return self.active_rounds()

    def view(self, round_id: bytes) -> RoundView:
        known = self.get(round_id)
        return RoundView(known, True, True, True, latest_end=0 if known is None else known.vote_end_time)

    async def is_closed(self, round_id: bytes) -> bool:
        return round_id in self.closed

    def forget(self, round_id: bytes) -> None:
        self.forgotten.append(round_id)


def create_round(round_id: bytes, *, end: int = START_TIME + 24 * 3600) -> Round:
    return Round(round_id, RoundStatus.ACTIVE, end, (), 1)


NodeReply = Callable[[dict[str, Any]], Awaitable[httpx.Response]]


def reply_with(status: int, **reply: Any) -> NodeReply:
    """Create a node that sends this response to every reveal."""

    async def respond(body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(status, content=json.dumps(reply).encode())

    return respond


def fail_with(error: type[httpx.TransportError]) -> NodeReply:
    async def respond(body: dict[str, Any]) -> httpx.Response:
        raise error("broken")

    return respond


def refuse_with(log: str, code: int = 1) -> NodeReply:
    return reply_with(422, tx_hash="", code=code, log=log)


ACCEPTED_REPLY = reply_with(200, tx_hash="", code=0)
BAD_PROOF_REPLY = refuse_with("invalid zero-knowledge proof: no")


class FakeNodeTransport(httpx.AsyncBaseTransport):
    """Replaces the network. `posts` are the received reveals: node and body.

    Attributes:
        connecting: nodes whose connections are never established.
        transactions: responses to `/tx/HASH`, by node; the others do not know the transaction.
    """

    def __init__(self, replies: dict[str, NodeReply]) -> None:
        self.replies = replies
        self.transactions: dict[str, dict[str, object]] = {}
        self.connecting: set[str] = set()
        self.posts: list[tuple[str, bytes]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        name = f"{request.url.host}:80"
        if request.method == "GET":  # only `/tx/HASH` is requested
            if name in self.transactions:
                return httpx.Response(200, json=self.transactions[name])
            return httpx.Response(404, content=b'{"error": "tx not found"}')
        body = await request.aread()
        if name in self.connecting:
            await asyncio.Event().wait()
        self.posts.append((name, body))
        if trace := request.extensions.get("trace"):  # as httpcore reports a request that was written
            await trace("http11.send_request_headers.started", {})
            await trace("http11.send_request_body.complete", {})
        return await self.replies[name](json.loads(body))

    @property
    def posted_to(self) -> list[str]:
        return [name for name, _ in self.posts]
