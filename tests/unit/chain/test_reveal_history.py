"""Counted reveals of a block: order, unknown results, pruned blocks."""

from __future__ import annotations

from hashlib import sha256

import httpx
import pytest

from helper.chain.read_only_pool import ReadOnlyNodePool
from helper.chain.rest_client import HeightGoneError
from helper.chain.reveal_history import RevealHistory
from helper.errors import ChainError, ChainUnavailable
from tests.conftest import recorded_lines
from tests.recorded.test_models import message
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import CHAIN, Network, Node

ROWS = recorded_lines("reveals.jsonl")[:3]
TXS = [message(row["request"]).to_tx() for row in ROWS]


async def reader(clock: FakeClock, **nodes: Node) -> tuple[RevealHistory, Network]:
    network = Network(**nodes)
    endpoints = network.endpoints(clock)
    await endpoints.check()
    return RevealHistory(ReadOnlyNodePool(endpoints, transport=network)), network


async def test_reveals_returns_counted_reveals_in_block_order() -> None:
    clock = FakeClock()
    node = Node(clock)
    node.include(450, TXS[0], ROWS[0]["tx"])
    node.include(450, TXS[1], ROWS[1]["tx"] | {"code": 5})
    node.txs[450].append(b"\x09something else")
    node.include(450, TXS[2], ROWS[2]["tx"])
    blocks, _ = await reader(clock, a=node)
    counted = await blocks.reveals(450)
    assert [(reveal.height, reveal.raw) for reveal in counted] == [(450, TXS[0]), (450, TXS[2])]
    assert [reveal.message for reveal in counted] == [message(ROWS[0]["request"]), message(ROWS[2]["request"])]
    assert await blocks.reveals(451) == []
    assert (blocks.chain_id, blocks.head, blocks.whole) == (CHAIN, 463, True)
    asked = {path.rsplit("/", 1)[-1] for path in node.asked if "/tx/" in path}
    assert asked == {sha256(tx).hexdigest().upper() for tx in TXS}
    await blocks.aclose()


async def test_reveals_raises_while_result_is_unknown() -> None:
    clock = FakeClock()
    node = Node(clock)
    node.txs[450] = [TXS[0]]
    blocks, _ = await reader(clock, a=node)
    with pytest.raises(ChainUnavailable, match="not known yet"):
        await blocks.reveals(450)
    with pytest.raises(ChainUnavailable, match="not reached this height yet"):
        await blocks.reveals(464)
    assert blocks.whole
    await blocks.aclose()


async def test_reveals_same_transaction_is_in_counting_block_only() -> None:
    clock = FakeClock()
    node = Node(clock)
    node.include(448, TXS[0], ROWS[0]["tx"] | {"code": 5})
    node.include(450, TXS[0], ROWS[0]["tx"])
    blocks, _ = await reader(clock, a=node)
    by_height = {height: [reveal.raw for reveal in await blocks.reveals(height)] for height in (448, 450)}
    assert by_height == {448: [], 450: [TXS[0]]}
    node.include(449, TXS[1], ROWS[1]["tx"] | {"code": 5})
    node.txs[447] = node.txs[451] = [TXS[1]]
    assert await blocks.reveals(447) == []
    with pytest.raises(ChainUnavailable, match="not known yet"):
        await blocks.reveals(451)
    assert blocks.whole
    await blocks.aclose()


async def test_reveals_raises_gone_when_all_nodes_pruned_block() -> None:
    clock = FakeClock()
    nodes = {"a": Node(clock, lowest=400), "b": Node(clock, lowest=300)}
    blocks, _ = await reader(clock, **nodes)
    with pytest.raises(HeightGoneError) as caught:
        await blocks.reveals(5)
    assert caught.value.lowest == 300
    nodes["b"].faults["/blocks/"] = lambda _: httpx.Response(503)
    with pytest.raises(ChainError) as other:
        await blocks.reveals(5)
    assert not isinstance(other.value, HeightGoneError)
    assert await blocks.reveals(400) == []
    assert blocks.whole
    await blocks.aclose()
