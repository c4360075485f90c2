"""Public lookups on a recorded chain: transactions, confirmed reveals, roots. No request contains a nullifier."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import httpx
import pytest

from helper.chain.block_reader import ChainLookups
from helper.chain.chain_data import TreeState
from helper.chain.node_pool import NodePool, create_nodes
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import ChainUnavailable
from tests.conftest import read_recorded_lines
from tests.recorded.test_chain_data import ROUND_ID, create_client, message_from_request
from tests.recorded.test_proof_bundle import RECORDED_ROOT
from tests.support.clock import FakeClock

CHAIN_ID = "svote-1"
BLOCK_TIME = "2026-11-21T13:33:30Z"
NOW = 1_795_268_010.0
RECORDED_REVEALS = [
    (message_from_request(row["request"]), int(row["tx"]["height"])) for row in read_recorded_lines("reveals.jsonl")
]
RECORDED_ROUND = next(row for row in read_recorded_lines("exchanges.jsonl") if row["name"] == "round, status 3")[
    "response"
]
RECORDED_ROUNDS = next(row for row in read_recorded_lines("exchanges.jsonl") if row["name"] == "rounds")["response"]


class RecordedNode:
    """A node of the recorded chain, with or without a transaction index. Records its requests."""

    def __init__(self, *, index: bool, failed: set[str] | None = None) -> None:
        self.has_index = index
        self.failed_hashes = failed or set()
        self.requests: list[str] = []
        self.is_pruned = False
        self.blocks: dict[int, list[bytes]] = {}
        for reveal, height in RECORDED_REVEALS:
            self.blocks.setdefault(height, [b"\x04not protobuf"]).append(reveal.to_tx())

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.requests.append(str(request.url))
        status, response = self.respond(path, dict(request.url.params))
        return httpx.Response(status, content=json.dumps(response).encode())

    def respond(self, path: str, params: dict[str, str]) -> tuple[int, Any]:
        kind, last = path.rsplit("/", 2)[-2:]
        sync = {"latest_block_height": "120", "latest_block_time": BLOCK_TIME, "catching_up": False}
        fixed = {
            "latest": self.block(120),
            "syncing": {"syncing": False},
            "rounds": RECORDED_ROUNDS,
            ROUND_ID.hex(): RECORDED_ROUND,
            "status": {"result": {"node_info": {"network": CHAIN_ID}, "sync_info": sync}},
        }
        if last in fixed:
            return 200, fixed[last]
        if kind == "blocks":
            pruned_error = {"code": 3, "message": "height is not available, lowest height is 119"}
            return (400, pruned_error) if self.is_pruned else (200, self.block(int(last)))
        if kind == "tx":
            return self.tx(last)
        assert last == "tx_search"
        if not self.has_index:
            return 500, {"error": {"message": "Internal error", "data": "transaction indexing is disabled"}}
        return 200, {"result": self.search(int(params["page"]), int(params["per_page"]))}

    def block(self, height: int) -> dict[str, Any]:
        header = {"chain_id": CHAIN_ID, "height": str(height), "time": BLOCK_TIME}
        txs = [_b64(tx) for tx in self.blocks.get(height, [])]
        return {"block": {"header": header, "data": {"txs": txs}}}

    def tx(self, tx_hash: str) -> tuple[int, Any]:
        for height, txs in self.blocks.items():
            if any(sha256(tx).hexdigest().upper() == tx_hash for tx in txs):
                code = int(tx_hash in self.failed_hashes)
                log = "nullifier already spent: " + "ab" * 32 if code else ""
                return 422 if code else 200, {"code": code, "height": str(height), "log": log}
        return 404, {"error": "tx not found"}

    def search(self, page: int, size: int) -> dict[str, Any]:
        events = [
            {
                "type": "reveal_share",
                "attributes": [
                    {"key": "vote_round_id", "value": ROUND_ID.hex()},
                    {"key": "share_nullifier", "value": reveal.nullifier.hex()},
                ],
            }
            for reveal, _ in RECORDED_REVEALS
        ]
        rows = [
            {"height": str(height), "tx": _b64(reveal.to_tx()), "tx_result": {"code": 0, "events": [event]}}
            for (reveal, height), event in zip(RECORDED_REVEALS, events, strict=True)
        ]
        return {"txs": rows[(page - 1) * size : page * size], "total_count": str(len(rows))}


def _b64(value: bytes) -> str:
    from base64 import b64encode  # noqa: PLC0415

    return b64encode(value).decode()


async def create_lookup_chain(node: RecordedNode, *, rpc: bool) -> ChainLookups:
    nodes = create_nodes(
        ["http://node:1317"], ["http://node:26657"] if rpc else [], transport=httpx.MockTransport(node)
    )
    endpoints = NodePool(nodes, clock=FakeClock(NOW))
    await endpoints.probe_all()
    assert endpoints.has_usable_node
    node.requests.clear()
    return ChainLookups(endpoints)


@pytest.fixture(params=["index", "no index", "no rpc"])
async def lookup_chain(request: pytest.FixtureRequest) -> tuple[RecordedNode, ChainLookups]:
    """The same chain, read through a node's index or through whole blocks."""
    node = RecordedNode(index=request.param == "index")
    return node, await create_lookup_chain(node, rpc=request.param != "no rpc")


async def test_reveal_lookup_sends_no_nullifier(
    lookup_chain: tuple[RecordedNode, ChainLookups],
) -> None:
    node, chain = lookup_chain
    for reveal, height in (RECORDED_REVEALS[0], RECORDED_REVEALS[-1]):
        result = await chain.find_reveal([ROUND_ID], reveal.nullifier)
        assert result is not None
        assert (result.height, result.message) == (height, reveal)
        assert RevealMessage.from_tx(result.raw) == reveal
        assert not any(reveal.nullifier.hex() in url.lower() for url in node.requests)
    assert await chain.find_reveal([ROUND_ID], b"\x07" * 32) is None
    assert await chain.find_reveal([], RECORDED_REVEALS[0][0].nullifier) is None
    assert await chain.round_ids() == [ROUND_ID]


async def test_reveal_lookup_searches_given_blocks_only() -> None:
    node = RecordedNode(index=True)
    chain = await create_lookup_chain(node, rpc=True)
    reveal, height = RECORDED_REVEALS[0]
    assert await chain.find_reveal([ROUND_ID], reveal.nullifier, range(height + 1, height + 5)) is None
    result = await chain.find_reveal([ROUND_ID], reveal.nullifier, range(height - 3, height + 1))
    assert result is not None
    assert not any("tx_search" in url for url in node.requests)
    assert await chain.find_reveal([b"\x01" * 32], reveal.nullifier, range(height, height + 1)) is None


async def test_reveal_lookup_ignores_failed_transaction() -> None:
    reveal, height = RECORDED_REVEALS[0]
    failed = reveal.to_tx() + b"\xf8\x01\x01"
    node = RecordedNode(index=False, failed={sha256(failed).hexdigest().upper()})
    node.blocks[height].insert(0, failed)
    chain = await create_lookup_chain(node, rpc=False)

    result = await chain.find_reveal([ROUND_ID], reveal.nullifier)

    assert result is not None
    assert result.raw == reveal.to_tx()
    transaction = await chain.find_transaction(sha256(failed).digest())
    assert transaction is not None
    assert (transaction.height, transaction.code, transaction.raw) == (height, 1, failed)


async def test_transaction_lookup_returns_bytes_if_available() -> None:
    node = RecordedNode(index=True)
    chain = await create_lookup_chain(node, rpc=True)
    reveal, height = RECORDED_REVEALS[0]
    transaction = await chain.find_transaction(reveal.tx_hash())
    assert transaction is not None
    assert (transaction.height, transaction.code, transaction.log, transaction.raw) == (height, 0, "", reveal.to_tx())
    assert await chain.find_transaction(b"\xab" * 32) is None
    node.is_pruned = True
    transaction = await chain.find_transaction(reveal.tx_hash())
    assert transaction is not None
    assert transaction.raw is None
    with pytest.raises(ChainUnavailable):
        await chain.find_reveal([ROUND_ID], reveal.nullifier, range(height, height + 1))


async def test_root_lookup_returns_root_at_height() -> None:
    assert await create_client("tree at a height with a root").tree_at(ROUND_ID, 84) == TreeState(3, RECORDED_ROOT, 84)
    assert await create_client("tree at a height without a root").tree_at(ROUND_ID, 85) is None
