"""Blocks that are read from nodes."""

from __future__ import annotations

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
    monkeypatch.setattr("audit.node_source._HEAD_SECONDS", 0.0)
    pool = SimpleNamespace(greatest_height=20, probe_all=probe_all, head=SimpleNamespace(height=20))
    return NodeSource(cast("Any", SimpleNamespace(node_pool=pool)), bytes(32))


@pytest.mark.parametrize("first", [1, 3, 4, 5, 12, 13, 20, 21, 22, 100])
async def test_blocks_are_those_up_to_the_newest_one(source: NodeSource, first: int) -> None:
    assert [block.height async for block in source.blocks(first)] == list(range(first, 21))


async def test_blocks_end_below_a_height_that_a_node_only_claims(source: NodeSource) -> None:
    cast("Any", source)._node_pool.greatest_height = 2**62
    assert [block.height async for block in source.blocks(3)] == list(range(3, 21))


async def test_blocks_include_the_newest_one_of_a_node_that_others_reach_soon(source: NodeSource) -> None:
    pool = cast("Any", source)._node_pool
    pool.greatest_height = 21

    async def probe_all() -> None:
        pool.probes += 1
        pool.head.height = 20 + (pool.probes > 2)

    pool.probes, pool.probe_all = 0, probe_all
    assert [block.height async for block in source.blocks(3)] == list(range(3, 22))


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
