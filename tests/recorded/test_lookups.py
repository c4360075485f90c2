"""What is public on a recorded chain: transactions, counted reveals, roots; none is asked for by a nullifier."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import httpx
import pytest

from helper.chain.lookups import ChainLookups
from helper.chain.models import TreeState
from helper.chain.node_pool import NodePool, create_nodes
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import ChainUnavailable
from tests.conftest import recorded_lines
from tests.recorded.test_models import ROUND_ID, client, message
from tests.recorded.test_proof_bundle import ROOT
from tests.support.clock import FakeClock

CHAIN = "svote-1"
TIME = "2026-11-21T13:33:30Z"
NOW = 1_795_268_010.0
REVEALS = [(message(row["request"]), int(row["tx"]["height"])) for row in recorded_lines("reveals.jsonl")]
ROUND = next(row for row in recorded_lines("exchanges.jsonl") if row["name"] == "round, status 3")["response"]
ROUNDS = next(row for row in recorded_lines("exchanges.jsonl") if row["name"] == "rounds")["response"]


class Node:
    """A node of the recorded chain, with an index of transactions or without; notes what it was asked."""

    def __init__(self, *, index: bool, failed: set[str] | None = None) -> None:
        self.index = index
        self.failed = failed or set()
        self.asked: list[str] = []
        self.gone = False
        self.blocks: dict[int, list[bytes]] = {}
        for reveal, height in REVEALS:
            self.blocks.setdefault(height, [b"\x04not protobuf"]).append(reveal.to_tx())

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(str(request.url))
        status, answer = self.answer(path, dict(request.url.params))
        return httpx.Response(status, content=json.dumps(answer).encode())

    def answer(self, path: str, params: dict[str, str]) -> tuple[int, Any]:
        kind, last = path.rsplit("/", 2)[-2:]
        sync = {"latest_block_height": "120", "latest_block_time": TIME, "catching_up": False}
        fixed = {
            "latest": self.block(120),
            "syncing": {"syncing": False},
            "rounds": ROUNDS,
            ROUND_ID.hex(): ROUND,
            "status": {"result": {"node_info": {"network": CHAIN}, "sync_info": sync}},
        }
        if last in fixed:
            return 200, fixed[last]
        if kind == "blocks":
            gone = {"code": 3, "message": "height is not available, lowest height is 119"}
            return (400, gone) if self.gone else (200, self.block(int(last)))
        if kind == "tx":
            return self.tx(last)
        assert last == "tx_search"
        if not self.index:
            return 500, {"error": {"message": "Internal error", "data": "transaction indexing is disabled"}}
        return 200, {"result": self.search(int(params["page"]), int(params["per_page"]))}

    def block(self, height: int) -> dict[str, Any]:
        header = {"chain_id": CHAIN, "height": str(height), "time": TIME}
        txs = [_b64(tx) for tx in self.blocks.get(height, [])]
        return {"block": {"header": header, "data": {"txs": txs}}}

    def tx(self, tx_hash: str) -> tuple[int, Any]:
        for height, txs in self.blocks.items():
            if any(sha256(tx).hexdigest().upper() == tx_hash for tx in txs):
                code = int(tx_hash in self.failed)
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
            for reveal, _ in REVEALS
        ]
        rows = [
            {"height": str(height), "tx": _b64(reveal.to_tx()), "tx_result": {"code": 0, "events": [event]}}
            for (reveal, height), event in zip(REVEALS, events, strict=True)
        ]
        return {"txs": rows[(page - 1) * size : page * size], "total_count": str(len(rows))}


def _b64(value: bytes) -> str:
    from base64 import b64encode  # noqa: PLC0415

    return b64encode(value).decode()


async def chain_of(node: Node, *, rpc: bool) -> ChainLookups:
    made = create_nodes(["http://node:1317"], ["http://node:26657"] if rpc else [], transport=httpx.MockTransport(node))
    endpoints = NodePool(made, clock=FakeClock(NOW))
    await endpoints.check()
    assert endpoints.usable
    node.asked.clear()
    return ChainLookups(endpoints)


@pytest.fixture(params=["index", "no index", "no rpc"])
async def found_by(request: pytest.FixtureRequest) -> tuple[Node, ChainLookups]:
    """The same chain by a node's index, and by whole blocks."""
    node = Node(index=request.param == "index")
    return node, await chain_of(node, rpc=request.param != "no rpc")


async def test_a_counted_reveal_is_found_and_its_nullifier_is_in_no_question(
    found_by: tuple[Node, ChainLookups],
) -> None:
    node, chain = found_by
    for reveal, height in (REVEALS[0], REVEALS[-1]):
        found = await chain.counted_reveal([ROUND_ID], reveal.nullifier)
        assert found is not None
        assert (found.height, found.message) == (height, reveal)
        assert RevealMessage.from_tx(found.raw) == reveal
        assert not any(reveal.nullifier.hex() in url.lower() for url in node.asked)
    assert await chain.counted_reveal([ROUND_ID], b"\x07" * 32) is None
    assert await chain.counted_reveal([], REVEALS[0][0].nullifier) is None
    assert await chain.rounds() == [ROUND_ID]


async def test_some_blocks_alone_can_be_searched() -> None:
    node = Node(index=True)
    chain = await chain_of(node, rpc=True)
    reveal, height = REVEALS[0]
    assert await chain.counted_reveal([ROUND_ID], reveal.nullifier, range(height + 1, height + 5)) is None
    found = await chain.counted_reveal([ROUND_ID], reveal.nullifier, range(height - 3, height + 1))
    assert found is not None
    assert not any("tx_search" in url for url in node.asked)
    assert await chain.counted_reveal([b"\x01" * 32], reveal.nullifier, range(height, height + 1)) is None


async def test_a_failed_reveal_of_the_same_nullifier_is_not_taken_for_the_counted_one() -> None:
    reveal, height = REVEALS[0]
    failed = reveal.to_tx() + b"\xf8\x01\x01"
    node = Node(index=False, failed={sha256(failed).hexdigest().upper()})
    node.blocks[height].insert(0, failed)
    chain = await chain_of(node, rpc=False)

    found = await chain.counted_reveal([ROUND_ID], reveal.nullifier)

    assert found is not None
    assert found.raw == reveal.to_tx()
    told = await chain.transaction(sha256(failed).digest())
    assert told is not None
    assert (told.height, told.code, told.raw) == (height, 1, failed)


async def test_a_transaction_is_told_with_its_bytes_where_there_are_any() -> None:
    node = Node(index=True)
    chain = await chain_of(node, rpc=True)
    reveal, height = REVEALS[0]
    told = await chain.transaction(reveal.tx_hash())
    assert told is not None
    assert (told.height, told.code, told.log, told.raw) == (height, 0, "", reveal.to_tx())
    assert await chain.transaction(b"\xab" * 32) is None
    node.gone = True
    told = await chain.transaction(reveal.tx_hash())
    assert told is not None
    assert told.raw is None
    with pytest.raises(ChainUnavailable):
        await chain.counted_reveal([ROUND_ID], reveal.nullifier, range(height, height + 1))


async def test_a_root_is_that_of_its_height() -> None:
    assert await client("tree at a height with a root").tree_at(ROUND_ID, 84) == TreeState(3, ROOT, 84)
    assert await client("tree at a height without a root").tree_at(ROUND_ID, 85) is None
