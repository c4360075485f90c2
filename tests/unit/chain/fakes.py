"""Fake chain nodes over an httpx transport, with recorded responses, and a store in memory."""

from __future__ import annotations

import json
import sqlite3
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qs

import anyio
import httpx

from helper.chain.chain_data import BlockHead
from helper.chain.node_pool import NodePool, create_nodes
from helper.chain.rest_client import ChainClient, parse_round
from helper.chain.round_registry import RoundRegistry, to_stored_round
from helper.chain.rpc_client import RpcClient
from helper.errors import StoreError
from helper.store import messages
from helper.store.blocks import set_meta
from helper.store.ledger import LEDGER_KEY, Ledger, format_ledger, parse_ledger
from helper.store.messages import SentReveal
from helper.store.models import SpentNullifier, StoredRound
from helper.store.rounds import save_rounds
from helper.store.shares import EnqueueOperation, claim_due, enqueue_all
from helper.store.sqlite.schema import migrate_schema
from helper.store.sqlite.transaction import SqliteTransaction
from helper.store.table_rows import RevealRow, RoundRow, read_meta_value
from helper.store.transaction import DatabaseKeys
from tests.conftest import read_recorded_lines
from tests.support.clock import FakeClock
from tests.support.fakes import create_share
from tests.support.partial_store import PartialStore

ROUND_ID = bytes.fromhex("7a86c1e5de6fbdd2bf5be5f5f71bfd1da37f59585e0f6b3f21ea577eff0cb41e")
VOTE_END = 1795268195
CHAIN_ID = "svote-1"
EVERY_BLOCK = Ledger(1, 1000)
START = 1_795_268_000.0


def read_recorded(name: str, file: str = "exchanges.jsonl") -> dict[str, Any]:
    """Read the recorded exchange with this name."""
    recorded: dict[str, Any] = json.loads(_recorded_texts(file)[name])
    return recorded


@cache
def _recorded_texts(file: str) -> dict[str, str]:
    """The recorded exchanges by name, each as text, because tests change what they read."""
    return {row["name"]: json.dumps(row) for row in reversed(read_recorded_lines(file))}


def recorded_round(status: int) -> dict[str, Any]:
    value: dict[str, Any] = read_recorded(f"round, status {status}")["response"]["round"]
    return value


def json_response(status: int, value: object) -> httpx.Response:
    return httpx.Response(status, content=json.dumps(value).encode(), headers={"content-type": "application/json"})


def create_client(reply: Callable[[httpx.Request], Any] | httpx.Response, **settings: Any) -> ChainClient:
    """Create a client of a node that answers every request so. `settings` are those of the client."""
    return ChainClient("http://node", transport=create_transport(reply), **settings)


def create_rpc_client(reply: Callable[[httpx.Request], Any] | httpx.Response) -> RpcClient:
    return RpcClient("http://node", transport=create_transport(reply))


def create_transport(reply: Callable[[httpx.Request], Any] | httpx.Response) -> httpx.MockTransport:
    return httpx.MockTransport((lambda _: reply) if isinstance(reply, httpx.Response) else reply)


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
        urls = [(f"http://{host}:1317", f"http://{host}:26657" if rpc else "") for host in self.nodes]
        return NodePool(create_nodes(urls, timeout=timeout, transport=self), clock=clock, **settings)


def create_network(*names: str, now: float = START, **settings: Any) -> tuple[FakeClock, FakeNetwork, NodePool]:
    """Nodes with these names, and a pool of them. `settings` are those of the pool."""
    clock = FakeClock(now)
    network = FakeNetwork(**{name: FakeNode(clock) for name in names})
    return clock, network, network.create_node_pool(clock, **settings)


async def probe_network(*names: str, **settings: Any) -> tuple[FakeClock, FakeNetwork, NodePool]:
    """The same, after the first probe of the nodes."""
    created = create_network(*names, **settings)
    await created[2].probe_all()
    return created


def record_block(registry: RoundRegistry, time: float, ledger: Ledger = EVERY_BLOCK) -> None:
    """Have two nodes report block 400 with this time; by default, every block is read."""
    registry.record_blocks({name: BlockHead(CHAIN_ID, 400, time) for name in ("a", "b")}, ledger)


class ChainStore(PartialStore):
    """The real store's operations and statements, without its threads, on an SQLite database in memory.

    With a ledger, it is the database of a helper that knows the recorded round.
    """

    def __init__(self, clock: FakeClock, ledger: Ledger | None = None) -> None:
        self.conn = sqlite3.connect(":memory:", isolation_level=None)
        migrate_schema(self.conn)
        keys = DatabaseKeys(bytes(32), bytes(32))
        self._tx = SqliteTransaction(keys, self.conn, 1, clock=clock)
        self._clock = clock
        self._writer = cast(Any, SimpleNamespace(keys=keys, run=self._commit))
        self._reader = self._operator_reader = cast(Any, SimpleNamespace(fetch=self._fetch))
        self.is_full = False
        if ledger is not None:
            save_rounds(self._tx, [to_stored_round(parse_round({"round": recorded_round(1)}))], 0)
            self.set_ledger(ledger)

    async def _commit(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_full:
            raise StoreError("no space")
        self.conn.execute("BEGIN")
        try:
            result = op(self._tx, *args, **kwargs)
            self._tx.flush_counts()
        except BaseException:
            self.conn.execute("ROLLBACK")
            raise
        self.conn.execute("COMMIT")
        return result

    async def _fetch(self, name: str, params: Any = ()) -> Any:
        return self._tx.fetch_all(name, params)

    def set_ledger(self, ledger: Ledger) -> None:
        """Replace the ledger."""
        set_meta(self._tx, LEDGER_KEY, format_ledger(ledger))

    def add_share(self, number: int, nullifier: bytes = bytes(32)) -> None:
        """Store a share of this queue that is due. Its id is the number of shares so far, plus one."""
        enqueue_all(self._tx, [EnqueueOperation(create_share(number, 0, ROUND_ID), nullifier, 0.0)])
        self._tx.flush_counts()

    def add_sent(self, sent: SentReveal) -> None:
        """Store a share of this queue with its message."""
        self.add_share(sent.share_id, sent.nullifier)
        (queued,) = claim_due(self._tx, now=self._clock.now(), limit=1, rounds=(ROUND_ID,))
        messages.prepare(self._tx, queued.id, RevealRow(*sent.row[:6]))
        for _ in range(sent.row.sends):
            messages.mark_sending(
                self._tx, queued.id, height=sent.row.last_sent_height or 0, endpoint=sent.row.last_endpoint or ""
            )
            if sent.row.last_outcome is not None:
                messages.record_outcome(self._tx, queued.id, outcome=sent.row.last_outcome)
        self._tx.flush_counts()

    @property
    def ledger(self) -> Ledger | None:
        return parse_ledger(read_meta_value(self._tx.fetch_all("get_meta", (LEDGER_KEY,))))

    @property
    def spent(self) -> set[SpentNullifier]:
        query = "SELECT round_id, nullifier FROM spent JOIN round_keys ON no = round_no"
        return set(self.conn.execute(query).fetchall())

    @property
    def unconfirmed(self) -> list[int]:
        """The ids of this queue's shares that are not confirmed."""
        return [row[0] for row in self.conn.execute("SELECT id FROM shares ORDER BY id")]

    @property
    def stored_rounds(self) -> dict[bytes, StoredRound]:
        rows = self._tx.fetch_all("rounds")
        return {row[0]: RoundRow(*row[1:]).to_stored_round(row[0]) for row in rows}
