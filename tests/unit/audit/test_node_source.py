"""Blocks that are read from nodes."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import anyio
import httpx
import pytest
from structlog.testing import capture_logs

from audit.documents import digest_document
from audit.node_source import AgreedSource, NodeSource
from audit.source import LEAVES, AuditBlock, DataMissing
from helper.chain.agreement import AGREEING_NODES
from helper.chain.chain_data import LeafBlock
from helper.chain.node_pool import NodePool, ReadOnlyNodePool, create_nodes
from helper.clock import SystemClock
from helper.errors import ChainUnavailable
from tests.support.audit_rounds import RecordedNodes, threshold_round


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> NodeSource:
    async def probe_all() -> None:
        pass

    async def read_block(_: NodeSource, height: int) -> AuditBlock:
        return AuditBlock(height, 0.0, ())

    monkeypatch.setattr(NodeSource, "_read_block", read_block)
    monkeypatch.setattr("audit.node_source._HEAD_SECONDS", 0.0)
    pool = SimpleNamespace(greatest_height=20, probe_all=probe_all, agreed_height=20, needed=2)
    return NodeSource(cast("Any", SimpleNamespace(node_pool=pool)), bytes(32))


@pytest.mark.parametrize("first", [1, 3, 4, 5, 12, 13, 20, 21, 22, 100])
async def test_blocks_are_those_up_to_the_newest_one(source: NodeSource, first: int) -> None:
    assert [block.height async for block in source.blocks(first)] == list(range(first, 21))


async def test_blocks_end_below_a_height_that_a_node_only_claims(source: NodeSource) -> None:
    cast("Any", source)._node_pool.greatest_height = 2**62
    assert [block.height async for block in source.blocks(3)] == list(range(3, 21))


async def test_blocks_of_one_node_of_several_are_not_read(source: NodeSource) -> None:
    cast("Any", source)._node_pool.agreed_height = None
    with pytest.raises(ChainUnavailable, match="fewer than 2 nodes"):
        await anext(source.blocks(3))


async def test_blocks_include_the_newest_one_of_a_node_that_others_reach_soon(source: NodeSource) -> None:
    pool = cast("Any", source)._node_pool
    pool.greatest_height = 21

    async def probe_all() -> None:
        pool.probes += 1
        pool.agreed_height = 20 + (pool.probes > 2)

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
    cast("Any", source)._nodes.call = lambda fn, *, node: fn(client)
    cast("Any", source)._node_pool.greatest_height = 2**62
    assert await source.document(LEAVES) == {"blocks": []}
    assert client.asked == [(3, 20)]


# ---------------------------------------------------------------------- documents that nodes agree on

PREFIX, ROUND_HEX = "/shielded-vote/v1", threshold_round().round_id.hex()
FALSE_DOCUMENTS = {
    "round": (f"{PREFIX}/round/{ROUND_HEX}", '"title":"', '"title":"Not '),
    "results": (f"{PREFIX}/tally-results/{ROUND_HEX}", '"total_value":', '"total_value":1'),
    "summary": (f"{PREFIX}/vote-summary/{ROUND_HEX}", '"ballot_count":', '"ballot_count":1'),
    "tally/1": (f"{PREFIX}/tally/{ROUND_HEX}/1", '{"1":', '{"2":'),
    "leaves": (f"{PREFIX}/commitment-tree/{ROUND_HEX}/leaves", '"start_index":', '"start_index":1'),
    "heads/287": ("/cosmos/base/tendermint/v1beta1/blocks/287", '"hash":"', '"hash":"A'),
}
"""Path of each document, a part of it, and what a false node has in its place."""
falsified = pytest.mark.parametrize("name", FALSE_DOCUMENTS)


@asynccontextmanager
async def open_agreed(
    monkeypatch: pytest.MonkeyPatch,
    *hosts: str,
    silent: str = "",
    agree: int = AGREEING_NODES,
) -> AsyncIterator[tuple[RecordedNodes, AgreedSource]]:
    """The recorded round on these nodes. One of them may never respond."""
    monkeypatch.setattr("audit.node_source.RETRY_SECONDS", ())
    monkeypatch.setattr("audit.node_source._HEAD_SECONDS", 0.0)
    nodes = RecordedNodes(threshold_round())

    async def respond(request: httpx.Request) -> httpx.Response:
        response = nodes.respond(request)
        if request.url.host == silent:
            await anyio.sleep_forever()
        return response

    created = create_nodes([(f"http://{host}", "") for host in hosts], transport=nodes.transport())
    pool = NodePool(created, clock=SystemClock(), agree=agree)
    await pool.probe_all()
    readers = ReadOnlyNodePool(pool, transport=httpx.MockTransport(respond))
    yield nodes, AgreedSource(readers, nodes.source.round_id)


def alter(nodes: RecordedNodes, name: str, true: str, false: str, host: str = "false") -> None:
    """Have one node respond with another text than the others."""
    path = FALSE_DOCUMENTS[name][0]
    text = nodes.respond(httpx.Request("GET", f"http://one{path}?from_height=1&to_height=1000")).text
    assert true in text
    nodes.faults[host, path] = httpx.Response(200, text=text.replace(true, false, 1))


@falsified
async def test_false_node_that_responds_first_decides_no_document(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    async with open_agreed(monkeypatch, "one", "two") as (_, honest):
        document = await honest.document(name)
    async with open_agreed(monkeypatch, "false", "one", "two") as (nodes, agreed):
        alter(nodes, name, *FALSE_DOCUMENTS[name][1:])
        with capture_logs() as logs:
            assert [await agreed.document(name) for _ in range(2)] == [document] * 2
        assert [(line["event"], line["endpoint"]) for line in logs] == [("node_document_differs", "false:80")]


@falsified
async def test_document_about_which_two_nodes_differ_is_not_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    async with open_agreed(monkeypatch, "false", "one") as (nodes, agreed):
        alter(nodes, name, *FALSE_DOCUMENTS[name][1:])
        with pytest.raises(ChainUnavailable, match=f"{name}: .*false:80: reports .*; one:80: reports"):
            await agreed.document(name)


async def test_nodes_of_different_versions_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_agreed(monkeypatch, "false", "one") as (nodes, agreed):
        document = await agreed.document("summary")
        alter(nodes, "summary", "{", '{"new": [' + "[" * 300 + "]" * 301 + ", ")
        with pytest.raises(ChainUnavailable, match="nested too deeply"):
            await agreed.document("summary")
        alter(nodes, "summary", "{", '{"vote_power": "a field that no check reads", ')
        assert await agreed.document("summary") == document, "the shortest one"


def test_nodes_agree_whatever_the_order_and_the_spelling_of_values() -> None:
    first = {"vote_round_id": b64encode(bytes(32)).decode(), "proposal_id": 1, "total_value": 5}
    second = {**first, "vote_decision": 1}
    spelled = {**first, "vote_decision": None, "proposal_id": "1", "total_value": "5", "new": 0.5}
    documents = [{"results": [first, second]}, {"results": [second, first]}, {"results": [spelled, second]}]
    assert len({digest_document("results", document, bytes(32)) for document in documents}) == 1


async def test_node_that_lacks_a_document_decides_only_what_another_source_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_agreed(monkeypatch, "false", "one") as (nodes, agreed):
        for path, *_ in FALSE_DOCUMENTS.values():
            nodes.faults["false", path] = httpx.Response(404, text="404 page not found")
        for name in ("round", "results", "summary", "tally/1"):
            with pytest.raises(ChainUnavailable, match="false:80: not served by the node; one:80: reports"):
                await agreed.document(name)
        nodes.faults["one", f"{PREFIX}/partial-decryptions/{ROUND_HEX}"] = httpx.Response(200, json={"entries": []})
        for name in ("partials", "heads/287"):
            with pytest.raises(DataMissing, match="one:80: reports"):
                await agreed.document(name)
        for path in (f"{PREFIX}/partial-decryptions/{ROUND_HEX}", FALSE_DOCUMENTS["heads/287"][0]):
            nodes.faults["false", path] = httpx.Response(503)
        for name in ("partials", "heads/287"):
            with pytest.raises(ChainUnavailable):
                await agreed.document(name)


async def test_one_node_that_is_enough_is_one_that_has_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_agreed(monkeypatch, "false", "one", agree=1) as (nodes, agreed):
        for name, (path, *_) in FALSE_DOCUMENTS.items():
            nodes.faults["false", path] = httpx.Response(500, json={"error": "internal error"})
            assert await agreed.document(name), name


async def test_one_error_of_a_node_leaves_no_document_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingOnce(RecordedNodes):
        def respond(self, request: httpx.Request) -> httpx.Response:
            response = super().respond(request)
            self.faults.pop((request.url.host, request.url.path), None)
            return response

    monkeypatch.setitem(globals(), "RecordedNodes", FailingOnce)
    async with open_agreed(monkeypatch, "false", "one", "two") as (nodes, agreed):
        monkeypatch.setattr("audit.node_source.RETRY_SECONDS", (0.0,))
        path = FALSE_DOCUMENTS["results"][0]
        expected = await agreed.document("results")
        nodes.faults["one", path] = httpx.Response(500, json={"error": "internal error"})
        nodes.faults["false", path] = httpx.Response(404, text="404 page not found")
        assert await agreed.document("results") == expected


async def test_slow_node_delays_one_document_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("audit.node_source._DOCUMENT_SECONDS", 0.2)
    async with open_agreed(monkeypatch, "false", "one", "two", silent="false") as (nodes, agreed):
        nodes.requests.clear()
        for name in ("round", "results", "summary", "leaves"):
            await agreed.document(name)
        assert [path for host, path in nodes.requests if host == "false"] == [FALSE_DOCUMENTS["round"][0]]
