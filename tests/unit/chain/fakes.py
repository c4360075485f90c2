"""Fake chain nodes over an httpx transport, with recorded responses, and an in-memory store."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qs

import anyio
import httpx

from helper.chain.node_pool import NodePool, create_nodes
from helper.core.share import ShareState
from helper.errors import LeavesMissing, StoreError
from helper.store.ledger import BlockRange, Ledger, add, begin_rescan, give_up, start_ledger, take_out, truncate
from helper.store.models import RoundLike, SentReveal, SpentNullifier, StoredRound
from tests.conftest import read_recorded_lines
from tests.support.clock import FakeClock
from tests.support.partial_store import PartialStore

ROUND_ID = bytes.fromhex("7a86c1e5de6fbdd2bf5be5f5f71bfd1da37f59585e0f6b3f21ea577eff0cb41e")
VOTE_END = 1795268195
CHAIN_ID = "svote-1"


def read_recorded(name: str, file: str = "exchanges.jsonl") -> dict[str, Any]:
    """Read the recorded exchange with this name."""
    return next(row for row in read_recorded_lines(file) if row["name"] == name)


def recorded_round(status: int) -> dict[str, Any]:
    value: dict[str, Any] = read_recorded(f"round, status {status}")["response"]["round"]
    return value


def json_response(status: int, value: object) -> httpx.Response:
    return httpx.Response(status, content=json.dumps(value).encode(), headers={"content-type": "application/json"})


def format_timestamp(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat().replace("+00:00", "Z")


def tx_hash(tx: bytes) -> str:
    return sha256(tx).hexdigest().upper()


Handler = Callable[[httpx.Request], httpx.Response]


@dataclass
class FakeNode:
    """A chain node. Blocks are empty except those in `txs`; `faults` replaces responses by a part of the path."""

    clock: FakeClock
    height: int = 463
    chain_id: str = CHAIN_ID
    age: float = 0.0
    syncing: bool = False
    hangs: bool = False
    rounds: list[dict[str, Any]] = field(default_factory=lambda: [recorded_round(1)])
    leaf_blocks: list[dict[str, Any]] = field(
        default_factory=lambda: list(read_recorded("leaves")["response"]["blocks"])
    )
    tree: dict[str, Any] = field(default_factory=lambda: dict(read_recorded("tree, latest")["response"]["tree"]))
    roots: dict[int, dict[str, Any]] = field(default_factory=dict)
    txs: dict[int, list[bytes]] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    faults: dict[str, Handler] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    lowest_height: int = 1
    reports_lowest_height: bool = True
    spent_nullifiers: set[bytes] = field(default_factory=set)

    async def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.requests.append(request.url.raw_path.decode())
        if self.hangs:
            await anyio.sleep_forever()
        for piece, fault in self.faults.items():
            if piece in path:
                return fault(request)
        query = {key: values[0] for key, values in parse_qs(request.url.query.decode()).items()}
        name = path.rsplit("/", 1)[-1]
        if "/blocks/" in path:
            return self._block(self.height if name == "latest" else int(name))
        if "/commitment-tree/" in path:
            return self._tree(name, query)
        routes: dict[str, Callable[[], httpx.Response]] = {
            "syncing": lambda: json_response(200, {"syncing": self.syncing}),
            "rounds": lambda: json_response(200, {"rounds": self.rounds}),
            "status": lambda: json_response(200, {"result": self._status()}),
            "block_results": lambda: self._results(int(query["height"])),
            "tx_search": lambda: self._search(query),
            "abci_query": lambda: self._abci_query(query["data"]),
        }
        if name in routes:
            return routes[name]()
        if "/tx/" in path:
            result = self.results.get(name)
            return json_response(200, result) if result else json_response(404, {"error": "tx not found"})
        return httpx.Response(404, content=b"404 page not found")

    def add_transaction(self, height: int, tx: bytes, result: dict[str, Any]) -> None:
        """Add a transaction to a block, with the response of `GET /tx` (a recorded `tx`)."""
        self.txs.setdefault(height, []).append(tx)
        self.results[tx_hash(tx)] = result | {"height": str(height)}

    def _time(self, height: int) -> float:
        return self.clock.now() - self.age - (self.height - height) * 5

    def _block(self, height: int) -> httpx.Response:
        if height > self.height:
            return json_response(400, read_recorded("block to come", "blocks.jsonl")["response"])
        if height < self.lowest_height:
            return json_response(500, {"code": 2, "message": self._pruned_message(height), "details": []})
        header = {"chain_id": self.chain_id, "height": str(height), "time": format_timestamp(self._time(height))}
        txs = [b64encode(tx).decode() for tx in self.txs.get(height, [])]
        return json_response(200, {"block": {"header": header, "data": {"txs": txs}}})

    def _tree(self, name: str, query: dict[str, str]) -> httpx.Response:
        if name == "latest":
            return json_response(200, {"tree": self.tree})
        if name != "leaves":
            root = self.roots.get(int(name))
            error = read_recorded("tree at a height without a root")["response"]
            return json_response(200, {"tree": root}) if root is not None else json_response(500, error)
        first, last = int(query["from_height"]), int(query["to_height"])
        if last - first > 1000:
            return json_response(500, read_recorded("leaves, range too long")["response"])
        blocks = [block for block in self.leaf_blocks if first <= block["height"] <= last]
        return json_response(200, {"blocks": blocks} if blocks else {})

    def _status(self) -> dict[str, Any]:
        return {
            "node_info": {"network": self.chain_id},
            "sync_info": {
                "latest_block_height": str(self.height),
                "latest_block_time": format_timestamp(self._time(self.height)),
                "catching_up": self.syncing,
            },
        }

    def _results(self, height: int) -> httpx.Response:
        if height > self.height:
            return json_response(500, read_recorded("block results of a height to come", "blocks.jsonl")["response"])
        if height < self.lowest_height:
            error = {"code": -32603, "message": "Internal error", "data": self._pruned_message(height)}
            return json_response(500, {"error": error})
        txs = [self.results[tx_hash(tx)] for tx in self.txs.get(height, [])]
        events = self.events.get(height)
        return json_response(
            200, {"result": {"height": str(height), "txs_results": txs or None, "finalize_block_events": events}}
        )

    def _pruned_message(self, height: int) -> str:
        return (
            f"height {height} is not available"
            + f", lowest height is {self.lowest_height}" * self.reports_lowest_height
        )

    def _abci_query(self, key: str) -> httpx.Response:
        value = "AQ==" if bytes.fromhex(key[2:])[34:] in self.spent_nullifiers else None
        return json_response(200, {"result": {"response": {"code": 0, "value": value}}})

    def _search(self, query: dict[str, str]) -> httpx.Response:
        size, page = int(query["per_page"]), int(query["page"])
        bounds = dict(re.findall(r"tx\.height(>=|<=)([0-9]+)", query["query"]))
        heights = range(int(bounds.get(">=", 0)), int(bounds.get("<=", self.height)) + 1)
        every = [
            {
                "height": str(height),
                "tx": b64encode(tx).decode(),
                "tx_result": self.results[tx_hash(tx)],
            }
            for height in sorted(self.txs)
            if height in heights
            for tx in self.txs[height]
        ]
        matches = every[(page - 1) * size : page * size]
        return json_response(200, {"result": {"txs": matches, "total_count": str(len(every))}})


class FakeNetwork(httpx.AsyncBaseTransport):
    """Nodes by host name; a host without a node refuses connections."""

    def __init__(self, **nodes: FakeNode) -> None:
        self.nodes = nodes

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        node = self.nodes.get(request.url.host)
        if node is None:
            raise httpx.ConnectError("connection refused", request=request)
        return await node.handle(request)

    def create_node_pool(
        self, clock: FakeClock, *, rpc: bool = False, timeout: float = 5.0, **settings: Any
    ) -> NodePool:
        """Create a pool of all nodes, in order; `rpc` adds an RPC on the same host."""
        urls = [f"http://{host}:1317" for host in self.nodes]
        rpcs = [f"http://{host}:26657" for host in self.nodes] if rpc else []
        return NodePool(create_nodes(urls, rpcs, timeout=timeout, transport=self), clock=clock, **settings)


class MemoryStore(PartialStore):
    """An in-memory store with the methods that the chain package uses."""

    def __init__(self) -> None:
        self.stored_rounds: dict[bytes, StoredRound] = {}
        self.spent: list[SpentNullifier] = []
        self.ledger: Ledger | None = None
        self.applied: list[BlockRange] = []
        self.own_nullifiers: dict[SpentNullifier, int] = {}
        self.sent: list[SentReveal] = []
        self.with_shares: set[bytes] = set()
        self.leaves: dict[bytes, list[tuple[int, bytes]]] = {}
        self.subtrees: dict[bytes, bytes] = {}
        self.meta: dict[str, str] = {}
        self.is_full = False

    async def save_rounds(self, rounds: Sequence[RoundLike], now: float) -> None:
        for listed in rounds:
            known = self.stored_rounds.get(listed.round_id)
            self.stored_rounds[listed.round_id] = StoredRound(
                round_id=listed.round_id,
                status=int(listed.status),
                vote_end_time=listed.vote_end_time,
                created_at_height=listed.created_at_height,
                proposals=tuple((proposal.id, tuple(proposal.options)) for proposal in listed.proposals),
                closed_at=known.closed_at if known else None,
                alerted_at=None,
            )

    async def list_rounds(self) -> list[StoredRound]:
        return list(self.stored_rounds.values())

    async def mark_closed(self, round_id: bytes, now: float) -> None:
        self.stored_rounds[round_id] = replace(self.stored_rounds[round_id], closed_at=now)

    async def apply_blocks(
        self, heights: Sequence[BlockRange], spent: Sequence[SpentNullifier], *, now: float
    ) -> list[int]:
        self.ledger = self.ledger or start_ledger(heights[0][0])
        for first, last in heights:
            self.ledger = take_out(self.ledger, first, last)
        self.applied += heights
        return await self.add_spent(spent)

    async def add_spent(self, spent: Sequence[SpentNullifier]) -> list[int]:
        self.spent += [reveal for reveal in spent if reveal not in self.spent]
        self.sent = [reveal for reveal in self.sent if (reveal.round_id, reveal.nullifier) not in spent]
        return [self.own_nullifiers.pop(reveal) for reveal in spent if reveal in self.own_nullifiers]

    async def list_unconfirmed(self, *, limit: int = 1000, after_id: int = 0) -> list[SentReveal]:
        return [reveal for reveal in self.sent if reveal.share_id > after_id][:limit]

    async def count_shares(self) -> dict[bytes, dict[ShareState, int]]:
        return {round_id: {ShareState.RECEIVED: 1} for round_id in self.with_shares}

    async def list_unspent(self, nullifiers: Iterable[SpentNullifier]) -> list[SpentNullifier]:
        return [nullifier for nullifier in nullifiers if nullifier not in self.spent]

    async def get_ledger(self) -> Ledger | None:
        return self.ledger

    async def begin_ledger(self, first: int) -> None:
        self.ledger = self.ledger or start_ledger(first)

    async def give_up_blocks(self, last: int) -> None:
        assert self.ledger is not None
        self.ledger = give_up(self.ledger, last)

    async def move_back(self, last: int, *, first: int) -> None:
        assert self.ledger is not None
        self.ledger = add(truncate(self.ledger, last), min(first, last + 1), last)

    async def begin_rescan(self, first: int) -> Ledger:
        assert self.ledger is not None
        self.ledger = begin_rescan(self.ledger, first)
        return self.ledger

    async def save_leaves(self, round_id: bytes, height: int, start_index: int, leaves: bytes) -> None:
        if self.is_full:
            raise StoreError("no space")
        rows = self.leaves.setdefault(round_id, [])
        stored = sum(len(row) for _, row in rows) // 32
        if stored < start_index:
            raise LeavesMissing(stored)
        assert stored == start_index
        rows.append((height, leaves))

    async def load_leaves(self, round_id: bytes) -> tuple[bytes, int]:
        rows = self.leaves.get(round_id, [])
        return b"".join(row for _, row in rows), max((height for height, _ in rows), default=0)

    async def save_subtrees(self, round_id: bytes, first_index: int, subtrees: bytes) -> None:
        self.subtrees[round_id] = self.subtrees.get(round_id, b"")[: first_index * 1023 * 32] + subtrees

    async def load_subtrees(self, round_id: bytes) -> bytes:
        return self.subtrees.get(round_id, b"")

    async def delete_tree(self, round_id: bytes) -> None:
        self.leaves.pop(round_id, None)
        self.subtrees.pop(round_id, None)

    async def get_meta(self, key: str) -> str | None:
        return self.meta.get(key)

    async def set_meta(self, key: str, value: str) -> None:
        self.meta[key] = value
