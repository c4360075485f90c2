"""Public lookups on a recorded chain: transactions, confirmed reveals, roots. No request contains a nullifier."""

from __future__ import annotations

from hashlib import sha256

import pytest

from helper.chain.block_reader import ChainLookups
from helper.chain.chain_data import Anchor, TxResult
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import ChainUnavailable
from tests.conftest import read_recorded_lines
from tests.recorded.test_chain_data import ROUND_ID, create_client, message_from_request
from tests.recorded.test_proof_bundle import RECORDED_ROOT
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import FakeNetwork, FakeNode, json_response

NOW = 1_795_268_010.0
ROWS = read_recorded_lines("reveals.jsonl")
RECORDED_REVEALS = [(message_from_request(row["request"]), int(row["tx"]["height"])) for row in ROWS]
RESULTS = {reveal.nullifier: row["tx"] for (reveal, _), row in zip(RECORDED_REVEALS, ROWS, strict=True)}


def create_recorded_node() -> FakeNode:
    """Create a node of the recorded chain."""
    node = FakeNode(FakeClock(NOW), height=120)
    for reveal, height in RECORDED_REVEALS:
        if height not in node.txs:
            node.add_transaction(height, b"\x04not protobuf", {"code": 0, "log": ""})
        node.add_transaction(height, reveal.to_tx(), RESULTS[reveal.nullifier])
    return node


async def create_lookup_chain(node: FakeNode, *, rpc: bool) -> ChainLookups:
    endpoints = FakeNetwork(node=node).create_node_pool(node.clock, rpc=rpc)
    await endpoints.probe_all()
    assert endpoints.has_usable_node
    node.requests.clear()
    return ChainLookups(endpoints)


@pytest.mark.parametrize("rpc", [True, False])
async def test_reveal_lookup_sends_no_nullifier(*, rpc: bool) -> None:
    node = create_recorded_node()
    chain = await create_lookup_chain(node, rpc=rpc)
    for reveal, height in (RECORDED_REVEALS[0], RECORDED_REVEALS[-1]):
        result = await chain.find_reveal([ROUND_ID], reveal.nullifier)
        assert result is not None
        assert (result.height, result.message) == (height, reveal)
        assert RevealMessage.from_tx(result.raw) == reveal
        assert not any(reveal.nullifier.hex() in url.lower() for url in node.requests)
    assert await chain.find_reveal([ROUND_ID], b"\x07" * 32) is None
    assert await chain.find_reveal([b"\x01" * 32], RECORDED_REVEALS[0][0].nullifier) is None
    assert await chain.find_reveal([], RECORDED_REVEALS[0][0].nullifier) is not None


async def test_reveal_lookup_searches_given_blocks_only() -> None:
    node = create_recorded_node()
    chain = await create_lookup_chain(node, rpc=True)
    reveal, height = RECORDED_REVEALS[0]
    assert await chain.find_reveal([ROUND_ID], reveal.nullifier, range(height + 1, height + 5)) is None
    result = await chain.find_reveal([ROUND_ID], reveal.nullifier, range(height - 3, height + 1))
    assert result is not None
    assert await chain.find_reveal([b"\x01" * 32], reveal.nullifier, range(height, height + 1)) is None


async def test_reveal_lookup_ignores_failed_transaction() -> None:
    reveal, height = RECORDED_REVEALS[0]
    failed = reveal.to_tx() + b"\xf8\x01\x01"
    node = create_recorded_node()
    node.add_transaction(height, failed, {"code": 1, "log": "nullifier already spent: " + "ab" * 32})
    node.txs[height].insert(0, node.txs[height].pop())
    failure = json_response(422, node.results[sha256(failed).hexdigest().upper()])
    node.faults[sha256(failed).hexdigest().upper()] = lambda _: failure
    chain = await create_lookup_chain(node, rpc=False)

    result = await chain.find_reveal([ROUND_ID], reveal.nullifier)

    assert result is not None
    assert result.raw == reveal.to_tx()
    transaction = await chain.find_transaction(sha256(failed).digest())
    assert transaction is not None
    assert (transaction[0].height, transaction[0].code, transaction[1]) == (height, 1, failed)


async def test_transaction_lookup_returns_bytes_if_available() -> None:
    node = create_recorded_node()
    chain = await create_lookup_chain(node, rpc=True)
    reveal, height = RECORDED_REVEALS[0]
    assert await chain.find_transaction(reveal.tx_hash()) == (TxResult(0, height, ""), reveal.to_tx())
    assert await chain.find_transaction(b"\xab" * 32) is None
    node.lowest_height = 119
    transaction = await chain.find_transaction(reveal.tx_hash())
    assert transaction is not None
    assert transaction[1] is None
    with pytest.raises(ChainUnavailable):
        await chain.find_reveal([ROUND_ID], reveal.nullifier, range(height, height + 1))


async def test_root_lookup_returns_root_at_height() -> None:
    assert await create_client("tree at a height with a root").tree_at(ROUND_ID, 84) == Anchor(84, 3, RECORDED_ROOT)
    assert await create_client("tree at a height without a root").tree_at(ROUND_ID, 85) is None
