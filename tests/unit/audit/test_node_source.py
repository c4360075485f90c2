"""Blocks that are read from nodes."""

from __future__ import annotations

import tracemalloc
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from audit.node_source import NodeSource
from audit.source import LEAVES, AuditBlock
from helper.chain.chain_data import LeafBlock


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> NodeSource:
    async def probe_all() -> None:
        pass

    async def read_block(_: NodeSource, height: int) -> AuditBlock:
        return AuditBlock(height, 0.0, ())

    monkeypatch.setattr(NodeSource, "_read_block", read_block)
    pool = SimpleNamespace(greatest_height=20, probe_all=probe_all, head=SimpleNamespace(height=20))
    return NodeSource(cast("Any", SimpleNamespace(node_pool=pool)), bytes(32))


@pytest.mark.parametrize("first", [1, 3, 4, 5, 12, 13, 20, 21, 22, 100])
async def test_blocks_are_those_up_to_the_newest_one(source: NodeSource, first: int) -> None:
    assert [block.height async for block in source.blocks(first)] == list(range(first, 21))


async def test_blocks_take_no_memory_for_heights_that_a_node_only_claims(source: NodeSource) -> None:
    cast("Any", source)._node_pool.greatest_height = 4_000_000
    tracemalloc.start()
    try:
        async with aclosing(source.blocks(1)) as blocks:
            assert (await anext(blocks)).height == 1
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


class LeafClient:
    """A node that was asked for the leaves of these heights."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    async def query(self, _: str) -> object:
        return {"round": {"created_at_height": 3}}

    async def leaves(self, _: bytes, first: int, last: int) -> list[LeafBlock]:
        self.asked.append((first, last))
        return []


async def test_leaves_are_not_read_up_to_a_height_that_a_node_only_claims(source: NodeSource) -> None:
    client = LeafClient()
    cast("Any", source)._nodes.call = lambda fn: fn(client)
    cast("Any", source)._node_pool.greatest_height = 2**62
    assert await source.document(LEAVES) == {"blocks": []}
    assert client.asked == [(3, 20)]
