"""Models parse the recorded responses, and the recorded transactions are encoded byte for byte."""

from __future__ import annotations

import json
from base64 import b64decode
from hashlib import sha256
from typing import Any

import httpx
import pytest

from helper.chain.broadcast_outcome import Verdict
from helper.chain.chain_data import Anchor, LeafBlock, RoundStatus
from helper.chain.rest_client import ChainClient, HeightPrunedError
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.rpc_client import RpcClient
from helper.errors import ChainResponseError
from tests.conftest import RECORDED, read_recorded_lines
from tests.support.payloads import reveal_fields

ROUND_ID = bytes.fromhex("7a86c1e5de6fbdd2bf5be5f5f71bfd1da37f59585e0f6b3f21ea577eff0cb41e")


def create_replay_transport(*names: str) -> httpx.MockTransport:
    """Create a node that returns the recorded responses with these names, each at its path."""
    rows = [
        row for file in ("exchanges", "blocks", "other-round-events") for row in read_recorded_lines(f"{file}.jsonl")
    ]
    chosen = {row["path"].split("?")[0]: row for row in rows if row["name"] in names}
    assert len(chosen) == len(names)

    def handle(request: httpx.Request) -> httpx.Response:
        row = chosen[request.url.path]
        return httpx.Response(row["status"], content=json.dumps(row["response"]).encode())

    return httpx.MockTransport(handle)


def create_client(*names: str) -> ChainClient:
    return ChainClient("http://node:1317", transport=create_replay_transport(*names))


def create_rpc_client(*names: str) -> RpcClient:
    return RpcClient("http://node:26657", transport=create_replay_transport(*names))


@pytest.mark.parametrize("status", [4, 1, 3])
async def test_round_status_is_parsed(status: int) -> None:
    round_ = await create_client(f"round, status {status}").round(ROUND_ID)
    assert round_ is not None
    assert (round_.round_id, round_.status, round_.vote_end_time) == (ROUND_ID, RoundStatus(status), 1795268195)
    assert round_.created_at_height == 55
    assert [(p.id, p.options) for p in round_.proposals] == [(1, (0, 1)), (2, (0, 1))]


async def test_rounds_list_and_unknown_round_parse() -> None:
    assert [listed.round_id for listed in (await create_client("rounds").rounds()).rounds] == [ROUND_ID]
    assert await create_client("unknown round").round(b"\x11" * 32) is None


async def test_tree_and_leaves_are_parsed() -> None:
    state = await create_client("tree, latest").tree_latest(ROUND_ID)
    root = b64decode("6seWJ65Nj5gUfTvYPqNkC+gEWXQv8jGEYt94JCfHXRk=")
    assert state == Anchor(84, 3, root)
    assert await create_client("tree of a round with no leaf yet").tree_latest(ROUND_ID) is None
    blocks = await create_client("leaves").leaves(ROUND_ID, 1, 100)
    assert [(each.height, each.start_index, len(each.leaves) // 32) for each in blocks] == [(58, 0, 1), (84, 1, 2)]
    assert isinstance(blocks[0], LeafBlock)
    assert blocks[0].leaves.hex().startswith("6d439229")
    assert await create_client("leaves, no leaf in range").leaves(ROUND_ID, 100, 200) == []
    with pytest.raises(ChainResponseError, match="block range 1999 exceeds maximum 1000"):
        await create_client("leaves, range too long").leaves(ROUND_ID, 1, 1000)


async def test_node_health_is_parsed() -> None:
    head = await create_client("latest block").latest_block()
    assert (head.chain_id, head.height) == ("svote-1", 463)
    assert head.time == pytest.approx(1795268515.104453)
    assert await create_client("syncing").is_syncing() is False
    info = await create_client("node info").node_info()
    assert (info.chain_id, info.version) == ("svote-1", "")
    head, is_syncing = await create_rpc_client("status").status()
    assert (head.chain_id, head.height, is_syncing) == ("svote-1", 1283, False)


async def test_validator_is_parsed() -> None:
    address = "svvaloper1p2amg2qs5ze7h6hz85vqzwwg300sdunsy3l6em"
    assert await create_client("one validator").validator_status(address) == "BOND_STATUS_BONDED"
    unknown_validator = "svvaloper1qqqsyqcyq5rqwzqfpg9scrgwpugpzysnpuylqc"
    assert await create_client("no such validator").validator_status(unknown_validator) is None


def message_from_request(request: dict[str, Any]) -> RevealMessage:
    return RevealMessage(**reveal_fields(request))


def test_reveal_message_encodes_recorded_bytes(recorded_reveals: list[dict[str, Any]]) -> None:
    for row in recorded_reveals:
        reveal = message_from_request(row["request"])
        assert reveal.tx_hash().hex().upper() == row["response"]["tx_hash"]
        assert reveal.to_json() == row["request"]
        assert RevealMessage.from_tx(reveal.to_tx()) == reveal
        assert row["request"]["share_nullifier"] not in repr(reveal)
        assert reveal.nullifier.hex() not in repr(reveal)


def test_reveal_message_omits_zero_values(recorded_reveals: list[dict[str, Any]]) -> None:
    reveal = message_from_request(recorded_reveals[0]["request"] | {"vote_decision": 0})
    assert len(reveal.to_tx()) == len(message_from_request(recorded_reveals[0]["request"]).to_tx()) - 2
    assert RevealMessage.from_tx(reveal.to_tx()).vote_decision == 0


@pytest.mark.parametrize("tx", [b"", b"\x05abc", b"\x04\xff\xff\xff", b"\x04"])
def test_reveal_message_from_other_transaction_raises_error(tx: bytes) -> None:
    with pytest.raises(ChainResponseError):
        RevealMessage.from_tx(tx)


async def test_block_is_parsed() -> None:
    block = await create_client("block with raw transactions").block(106)
    assert block is not None
    assert block.head.height == 106
    assert block.head.time == pytest.approx(1795268003.562910)
    hashes = {row["hash"] for row in read_recorded_lines("blocks.jsonl")[0]["response"]["result"]["txs"]}
    assert hashes <= {sha256(tx).hexdigest().upper() for tx in block.txs}
    assert all(RevealMessage.from_tx(tx).round_id == ROUND_ID for tx in block.txs)
    assert await create_client("block to come").block(99999999) is None


async def test_block_results_are_parsed() -> None:
    results = await create_rpc_client("block results 106").block_results(106)
    block = await create_client("block with raw transactions").block(106)
    assert results is not None
    assert block is not None
    assert results == [(ROUND_ID, RevealMessage.from_tx(tx).nullifier) for tx in block.txs]
    assert await create_rpc_client("block results of a height to come").block_results(99999999) is None
    with pytest.raises(ChainResponseError, match="height 106 was returned for 105"):
        await create_rpc_client("block results 106").block_results(105)


@pytest.mark.parametrize(
    ("name", "height"),
    [
        ("block results 85: cast_vote, commitment_tree_root, message", 85),
        ("block results 286: round_status_change", 286),
    ],
)
async def test_block_results_without_reveals(name: str, height: int) -> None:
    results = await create_rpc_client(name).block_results(height)
    assert results is not None
    assert results == []


async def test_nullifier_query_is_parsed() -> None:
    responses = json.loads((RECORDED / "abci-query.json").read_text())
    queries: list[str] = []

    def query(request: httpx.Request) -> httpx.Response:
        queries.append(request.url.params["data"])
        kind = "absent" if request.url.params["data"].endswith("00" * 32) else "present"
        return httpx.Response(200, content=json.dumps(responses[kind]).encode())

    node = RpcClient("http://node", transport=httpx.MockTransport(query))
    key = b64decode(responses["present"]["result"]["response"]["key"])
    assert await node.is_spent(ROUND_ID, key[-32:])
    assert not await node.is_spent(ROUND_ID, bytes(32))
    assert queries[0] == f"0x{key.hex()}"


async def test_broadcast_matches_recorded_exchange(recorded_reveals: list[dict[str, Any]]) -> None:
    sent: list[httpx.Request] = []
    row = recorded_reveals[0]

    def node(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, content=json.dumps(row["response"]).encode())

    chain = ChainClient("http://node", transport=httpx.MockTransport(node))
    outcome = await chain.broadcast(message_from_request(row["request"]))
    assert outcome.verdict is Verdict.ACCEPTED
    assert (sent[0].method, sent[0].url.path) == ("POST", "/shielded-vote/v1/reveal-share")
    assert json.loads(sent[0].content) == row["request"]
    other = await chain.broadcast(message_from_request(recorded_reveals[1]["request"]))
    assert other.verdict is Verdict.AMBIGUOUS, "the node returned the hash of another transaction"


async def test_tx_lookup_is_parsed(recorded_reveals: list[dict[str, Any]]) -> None:
    row = recorded_reveals[0]
    tx_hash = bytes.fromhex(row["response"]["tx_hash"])

    def node(request: httpx.Request) -> httpx.Response:
        assert request.url.path == f"/shielded-vote/v1/tx/{row['response']['tx_hash']}"
        return httpx.Response(200, content=json.dumps(row["tx"]).encode())

    result = await ChainClient("http://node", transport=httpx.MockTransport(node)).tx(tx_hash)
    assert result is not None
    assert (result.code, result.height) == (0, 106)
    assert await create_client("tx not found").tx(bytes.fromhex("AB" * 32)) is None


async def test_pruned_block_is_distinct_from_future_block() -> None:
    body = b'{"code":3,"message":"height 5 is not available, lowest height is 100","details":[]}'
    node = httpx.MockTransport(lambda _: httpx.Response(400, content=body))
    with pytest.raises(HeightPrunedError, match="lowest height is 100"):
        await ChainClient("http://node", transport=node).block(5)
