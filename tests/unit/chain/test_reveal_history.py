"""Counted reveals of a block: order, unknown results, pruned blocks."""

from __future__ import annotations

from hashlib import sha256

import httpx
import pytest

from helper.chain.node_pool import ReadOnlyNodePool
from helper.chain.rest_client import HeightPrunedError
from helper.chain.reveal_history import RevealHistory
from helper.errors import ChainError, ChainUnavailable
from tests.conftest import read_recorded_lines
from tests.recorded.test_chain_data import message_from_request
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import CHAIN_ID, FakeNetwork, FakeNode

ROWS = read_recorded_lines("reveals.jsonl")[:3]
TXS = [message_from_request(row["request"]).to_tx() for row in ROWS]


async def create_history(clock: FakeClock, **nodes: FakeNode) -> tuple[RevealHistory, FakeNetwork]:
    network = FakeNetwork(**nodes)
    endpoints = network.create_node_pool(clock)
    await endpoints.probe_all()
    return RevealHistory(ReadOnlyNodePool(endpoints, transport=network)), network


async def test_read_block_returns_counted_reveals_in_block_order() -> None:
    clock = FakeClock()
    node = FakeNode(clock)
    node.add_transaction(450, TXS[0], ROWS[0]["tx"])
    node.add_transaction(450, TXS[1], ROWS[1]["tx"] | {"code": 5})
    node.txs[450].append(b"\x09something else")
    node.add_transaction(450, TXS[2], ROWS[2]["tx"])
    blocks, _ = await create_history(clock, a=node)
    counted = (await blocks.read_block(450)).reveals
    assert [(reveal.height, reveal.raw) for reveal in counted] == [(450, TXS[0]), (450, TXS[2])]
    assert [reveal.message for reveal in counted] == [
        message_from_request(ROWS[0]["request"]),
        message_from_request(ROWS[2]["request"]),
    ]
    assert (await blocks.read_block(451)).reveals == ()
    assert (blocks.chain_id, blocks.head, blocks.are_all_nodes_usable) == (CHAIN_ID, 463, True)
    looked_up = {path.rsplit("/", 1)[-1] for path in node.requests if "/tx/" in path}
    assert looked_up == {sha256(tx).hexdigest().upper() for tx in TXS}
    await blocks.aclose()


async def test_read_block_raises_while_result_is_unknown() -> None:
    clock = FakeClock()
    node = FakeNode(clock)
    node.txs[450] = [TXS[0]]
    blocks, _ = await create_history(clock, a=node)
    with pytest.raises(ChainUnavailable, match="not known yet"):
        await blocks.read_block(450)
    with pytest.raises(ChainUnavailable, match="not reached this height yet"):
        await blocks.read_block(464)
    assert blocks.are_all_nodes_usable
    await blocks.aclose()


async def test_read_block_returns_other_voting_transactions_that_did_not_fail() -> None:
    clock = FakeClock()
    node = FakeNode(clock)
    cast, failed, unknown = (tag + b"transaction" for tag in (b"\x03", b"\x02", b"\x0d"))
    node.add_transaction(450, cast, ROWS[0]["tx"])
    node.add_transaction(450, failed, ROWS[0]["tx"] | {"code": 5})
    node.txs[450] += [unknown, b"\x0aof the Cosmos SDK", b""]
    blocks, _ = await create_history(clock, a=node)
    block = await blocks.read_block(450)
    assert (block.height, block.reveals) == (450, ())
    assert block.others == ((cast, True), (unknown, None))
    assert block.time > 0
    await blocks.aclose()


async def test_read_block_same_transaction_is_in_counting_block_only() -> None:
    clock = FakeClock()
    node = FakeNode(clock)
    node.add_transaction(448, TXS[0], ROWS[0]["tx"] | {"code": 5})
    node.add_transaction(450, TXS[0], ROWS[0]["tx"])
    blocks, _ = await create_history(clock, a=node)
    by_height = {height: [reveal.raw for reveal in (await blocks.read_block(height)).reveals] for height in (448, 450)}
    assert by_height == {448: [], 450: [TXS[0]]}
    node.add_transaction(449, TXS[1], ROWS[1]["tx"] | {"code": 5})
    node.txs[447] = node.txs[451] = [TXS[1]]
    assert (await blocks.read_block(447)).reveals == ()
    with pytest.raises(ChainUnavailable, match="not known yet"):
        await blocks.read_block(451)
    assert blocks.are_all_nodes_usable
    await blocks.aclose()


async def test_read_block_raises_pruned_error_when_all_nodes_pruned_block() -> None:
    clock = FakeClock()
    nodes = {"a": FakeNode(clock, lowest_height=400), "b": FakeNode(clock, lowest_height=300)}
    blocks, _ = await create_history(clock, **nodes)
    with pytest.raises(HeightPrunedError) as caught:
        await blocks.read_block(5)
    assert caught.value.lowest_height == 300
    nodes["b"].faults["/blocks/"] = lambda _: httpx.Response(503)
    with pytest.raises(ChainError) as other:
        await blocks.read_block(5)
    assert not isinstance(other.value, HeightPrunedError)
    assert (await blocks.read_block(400)).reveals == ()
    assert blocks.are_all_nodes_usable
    await blocks.aclose()
