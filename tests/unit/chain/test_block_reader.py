"""Every reader of the chain decides in the same way whether a reveal was counted in a block."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import anyio
import httpx
import pytest

from helper.chain import block_reader
from helper.chain.block_reader import BlockReader, ChainLookups, RevealHistory, read_by_rest
from helper.chain.chain_data import TxResult
from helper.chain.node_pool import ReadOnlyNodePool
from helper.chain.rest_client import ChainClient, HeightPrunedError
from helper.chain.reveal_transaction import is_counted
from helper.chain.rpc_client import CountedNullifier
from helper.errors import ChainError, ChainUnavailable
from tests.conftest import read_recorded_lines
from tests.recorded.test_chain_data import message_from_request
from tests.recorded.test_proof_bundle import RECORDED_ROOT, create_evidence
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import CHAIN_ID, ROUND_ID, FakeNetwork, FakeNode, create_network, json_response, tx_hash
from tests.unit.chain.test_follower import Environment, reveal, sent_reveal

EVIDENCE = create_evidence(0)
RAW, MESSAGE = EVIDENCE.transaction, EVIDENCE.message
SPENT = "nullifier already spent: 01"

FIRST, SECOND = 310, 320
"""Heights of the two blocks that contain the reveal."""


@pytest.mark.parametrize(
    ("result", "counted"),
    [
        (None, None),
        (TxResult(0, 100, ""), True),
        (TxResult(0, 101, ""), False),
        (TxResult(0, 99, ""), False),
        (TxResult(1, 100, "invalid zero-knowledge proof"), False),
        (TxResult(1, 100, SPENT), False),
        (TxResult(1, 99, SPENT), None),
        (TxResult(1, 101, SPENT), True),
        (TxResult(2, 101, ""), True),
        (TxResult(1, 101, "vote round is not active"), False),
    ],
)
def test_is_counted(result: TxResult | None, counted: bool | None) -> None:
    assert is_counted(result, 100) is counted


# The result in the second block as indexed, and the block in which the reveal was counted.
included_twice = pytest.mark.parametrize(
    ("code", "log", "counted_at"),
    [(0, "", SECOND), (1, SPENT, FIRST), (1, "invalid zero-knowledge proof", None)],
    ids=["failed, then counted", "counted, then refused as a duplicate", "failed twice"],
)


def chain(clock: FakeClock, code: int, log: str) -> FakeNode:
    """A node with the same reveal in two blocks; its index has only the second."""
    node = FakeNode(clock)
    for height in (FIRST, SECOND):
        node.add_transaction(height, RAW, {"code": code, "log": log})
    tree = {"next_index": "3", "root": b64encode(RECORDED_ROOT).decode(), "height": str(MESSAGE.anchor_height)}
    node.faults["/commitment-tree/"] = lambda _: json_response(200, {"tree": tree})
    return node


async def list_all(nullifiers: Iterable[CountedNullifier]) -> list[CountedNullifier]:
    return list(nullifiers)


async def test_node_whose_results_do_not_end_delays_no_agreement_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_forever(_: bytes) -> TxResult | None:
        await anyio.sleep_forever()
        return None

    monkeypatch.setattr(block_reader, "READ_SECONDS", 0.01)
    clock = FakeClock()
    pool = FakeNetwork(**{name: chain(clock, 0, "") for name in ("liar", "b", "c")}).create_node_pool(clock)
    await pool.probe_all()
    monkeypatch.setattr(pool.nodes[0].client, "tx", wait_forever)
    with anyio.fail_after(10):
        reading = await BlockReader(pool, list_all).read(SECOND, starts_backoff=True, asks_both=False)
    assert reading.reveals == frozenset({(MESSAGE.round_id, MESSAGE.nullifier)})
    assert [node.name for node in pool.usable_nodes] == ["b:1317", "c:1317"]


async def test_block_is_read_although_every_node_needs_longer_than_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look_up_slowly(raw_hash: bytes) -> TxResult | None:
        if late_reads < 3:
            await anyio.sleep_forever()
        return await look_up(raw_hash)

    monkeypatch.setattr(block_reader, "READ_SECONDS", 0.001)
    clock = FakeClock()
    pool = FakeNetwork(**{name: chain(clock, 0, "") for name in "abc"}).create_node_pool(clock)
    await pool.probe_all()
    look_up = pool.nodes[0].client.tx
    for node in pool.nodes:
        monkeypatch.setattr(node.client, "tx", look_up_slowly)
    reader = BlockReader(pool, list_all)
    for late_reads, seconds in enumerate(("0.001", "0.002", "0.004")):
        reading = await reader.read(SECOND, starts_backoff=False, asks_both=False, late_reads=late_reads)
        assert (reading.reveals, reading.is_late) == (None, True)
        assert reading.reason.count(f"not read within {seconds} s") == 3
    late_reads = 10
    reading = await reader.read(SECOND, starts_backoff=False, asks_both=False, late_reads=late_reads)
    assert (reading.reveals, reading.is_late) == (frozenset({(MESSAGE.round_id, MESSAGE.nullifier)}), False)


@pytest.mark.parametrize(("nodes", "excess", "is_agreed"), [("ab", 0, True), ("ab", 1, False), ("abc", 1, True)])
async def test_reveals_that_two_nodes_report_differently_are_looked_up_within_a_limit(
    nodes: str, excess: int, monkeypatch: pytest.MonkeyPatch, *, is_agreed: bool
) -> None:
    async def read(client: ChainClient, _height: int) -> frozenset[CountedNullifier]:
        return common | {"a:1317": added, "c:1317": again}.get(client.name, frozenset())

    async def find_all_spent(nullifiers: Iterable[CountedNullifier]) -> list[CountedNullifier]:
        looked_up.append(frozenset(nullifiers))
        return []

    common, again, *others = (
        frozenset({(MESSAGE.round_id, number.to_bytes(32))}) for number in range(2 + block_reader.MAX_COMPARED + excess)
    )
    added, looked_up = frozenset[CountedNullifier]().union(*others), list[frozenset[CountedNullifier]]()
    monkeypatch.setattr(block_reader, "read_by_rest", read)
    clock = FakeClock()
    pool = FakeNetwork(**{name: chain(clock, 0, "") for name in nodes}).create_node_pool(clock)
    await pool.probe_all()
    reading = await BlockReader(pool, find_all_spent).read(SECOND, starts_backoff=False, asks_both=False)
    assert looked_up == {0: [added], 1: [again] if is_agreed else []}[excess]
    assert reading.reveals == (common if is_agreed else None)
    assert reading.ignored == (looked_up[0] if is_agreed else frozenset())


async def lookups(node: FakeNode, *, rpc: bool = False) -> ChainLookups:
    endpoints = FakeNetwork(a=node).create_node_pool(node.clock, rpc=rpc)
    await endpoints.probe_all()
    return ChainLookups(endpoints)


@included_twice
async def test_lookup_of_reveal_in_two_blocks_returns_counting_block(
    code: int, log: str, counted_at: int | None
) -> None:
    node = chain(FakeClock(), code, log)
    result = await (await lookups(node)).find_reveal([MESSAGE.round_id], MESSAGE.nullifier, range(300, 330))
    assert (result.height if result else None) == counted_at
    assert [await (await lookups(node)).is_counted_in_block(RAW, height) for height in (FIRST, SECOND)] == [
        counted_at == FIRST,
        counted_at == SECOND,
    ]
    assert not await (await lookups(node)).is_counted_in_block(RAW, FIRST - 1), "this block does not contain it"


async def test_lookup_raises_while_result_is_unknown() -> None:
    node = chain(FakeClock(), 0, "")
    node.results.clear()
    with pytest.raises(ChainUnavailable, match="not known yet"):
        await (await lookups(node)).find_reveal([MESSAGE.round_id], MESSAGE.nullifier, range(300, 330))
    assert not await (await lookups(node)).is_counted_in_block(RAW, FIRST)


@included_twice
async def test_follower_of_reveal_in_two_blocks_counts_it_once(code: int, log: str, counted_at: int | None) -> None:
    env = Environment(rpc=False, height=330, cursor=300)
    for height in (FIRST, SECOND):
        env.node.add_transaction(height, RAW, {"code": code, "log": log})
    await env.endpoints.probe_all()
    blocks = {height: await read_by_rest(env.endpoints.nodes[0].client, height) for height in (FIRST, SECOND)}
    counted = [height for height, reveals in blocks.items() if reveals]
    assert counted == ([counted_at] if counted_at else [])


async def test_lookup_reads_all_blocks_since_the_round_was_created() -> None:
    node = chain(FakeClock(), 1, SPENT)
    node.rounds[0] |= {"vote_round_id": b64encode(MESSAGE.round_id).decode()}
    result = await (await lookups(node, rpc=True)).find_reveal([MESSAGE.round_id], MESSAGE.nullifier)
    assert result is not None
    assert (result.height, sha256(result.raw).digest()) == (FIRST, MESSAGE.tx_hash())


@pytest.mark.parametrize(("log", "spent"), [(SPENT, [1]), ("invalid zero-knowledge proof", [])])
async def test_missed_blocks_check_counts_reveal_that_was_refused_as_spent(log: str, spent: list[int]) -> None:
    env = Environment(rpc=False, height=1000, cursor=100)
    env.node.lowest_height = 995
    env.node.add_transaction(500, reveal(1).to_tx(), {"code": 1, "log": log})
    env.store.add_sent(sent_reveal(1))
    await env.sync_rounds()
    await env.follow()
    assert env.spent == spent


ROWS = read_recorded_lines("reveals.jsonl")[:3]
TXS = [message_from_request(row["request"]).to_tx() for row in ROWS]


@asynccontextmanager
async def open_history(*nodes: FakeNode) -> AsyncIterator[RevealHistory]:
    """The history as these nodes serve it. No request to it makes a node unusable."""
    network = FakeNetwork(**dict(zip("abc", nodes, strict=False)))
    endpoints = network.create_node_pool(nodes[0].clock)
    await endpoints.probe_all()
    history = RevealHistory(ReadOnlyNodePool(endpoints, transport=network))
    yield history
    assert history.are_all_nodes_usable
    await history.aclose()


async def test_read_block_returns_counted_reveals_in_block_order() -> None:
    node = FakeNode(FakeClock())
    node.add_transaction(450, TXS[0], ROWS[0]["tx"])
    node.add_transaction(450, TXS[1], ROWS[1]["tx"] | {"code": 5})
    node.txs[450].append(b"\x09something else")
    node.add_transaction(450, TXS[2], ROWS[2]["tx"])
    async with open_history(node) as blocks:
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


async def test_read_block_raises_while_result_is_unknown() -> None:
    node = FakeNode(FakeClock())
    node.txs[450] = [TXS[0]]
    async with open_history(node) as blocks:
        with pytest.raises(ChainUnavailable, match="not known yet"):
            await blocks.read_block(450)
        with pytest.raises(ChainUnavailable, match="not reached this height yet"):
            await blocks.read_block(464)


async def test_read_block_returns_other_voting_transactions_that_did_not_fail() -> None:
    node = FakeNode(FakeClock())
    cast, failed, unknown = (tag + b"transaction" for tag in (b"\x03", b"\x02", b"\x0d"))
    node.add_transaction(450, cast, ROWS[0]["tx"])
    node.add_transaction(450, failed, ROWS[0]["tx"] | {"code": 5})
    node.txs[450] += [unknown, b"\x0aof the Cosmos SDK", b""]
    async with open_history(node) as blocks:
        block = await blocks.read_block(450)
        assert (block.height, block.reveals) == (450, ())
        assert block.others == ((cast, True), (unknown, None))
        assert block.time > 0


async def test_read_block_same_transaction_is_in_counting_block_only() -> None:
    node = FakeNode(FakeClock())
    node.add_transaction(448, TXS[0], ROWS[0]["tx"] | {"code": 5})
    node.add_transaction(450, TXS[0], ROWS[0]["tx"])
    async with open_history(node) as blocks:
        by_height = {
            height: [reveal.raw for reveal in (await blocks.read_block(height)).reveals] for height in (448, 450)
        }
        assert by_height == {448: [], 450: [TXS[0]]}
        node.add_transaction(449, TXS[1], ROWS[1]["tx"] | {"code": 5})
        node.txs[447] = node.txs[451] = [TXS[1]]
        assert (await blocks.read_block(447)).reveals == ()
        with pytest.raises(ChainUnavailable, match="not known yet"):
            await blocks.read_block(451)


async def test_read_block_raises_pruned_error_when_all_nodes_pruned_block() -> None:
    clock = FakeClock()
    nodes = {"a": FakeNode(clock, lowest_height=400), "b": FakeNode(clock, lowest_height=300)}
    async with open_history(*nodes.values()) as blocks:
        with pytest.raises(HeightPrunedError) as caught:
            await blocks.read_block(5)
        assert caught.value.lowest_height == 300
        nodes["b"].faults["/blocks/"] = lambda _: httpx.Response(503)
        with pytest.raises(ChainError) as other:
            await blocks.read_block(5)
        assert not isinstance(other.value, HeightPrunedError)
        with pytest.raises(ChainUnavailable, match="fewer than 2 chain nodes responded"):
            await blocks.read_block(400)


FALSE_NODES: dict[str, Callable[[FakeNode], Any]] = {
    "block without the reveal": lambda node: node.txs.clear(),
    "result of the reveal": lambda node: node.results[tx_hash(TXS[0])].update(code=5),
    "root": lambda node: node.roots[450].update(root=b64encode(bytes(32)).decode()),
}
EMPTY_NODES: dict[str, Callable[[FakeNode], Any]] = {
    "pruned block": lambda node: setattr(node, "lowest_height", 460),
    "no result": lambda node: node.results.clear(),
    "no index": lambda node: node.faults.update({"/tx/": lambda _: json_response(500, {"error": "no index"})}),
    "no root": lambda node: node.roots.clear(),
}


async def read_history(*changes: Callable[[FakeNode], Any]) -> tuple[list[bytes], bytes | None]:
    """The reveals and the root at a height, as nodes report them of which the first ones are changed."""
    clock = FakeClock()
    nodes = [FakeNode(clock) for _ in range(max(2, len(changes)))]
    for node in nodes:
        node.add_transaction(450, TXS[0], ROWS[0]["tx"])
        node.roots[450] = {"height": 450, "next_index": 1, "root": b64encode(RECORDED_ROOT).decode()}
    for node, change in zip(nodes, changes, strict=False):
        change(node)
    async with open_history(*nodes) as history:
        reveals = (await history.read_block(450)).reveals
        return [reveal.raw for reveal in reveals], await history.root_at(ROUND_ID, 450)


@pytest.mark.parametrize("change", FALSE_NODES.values(), ids=FALSE_NODES)
async def test_history_of_a_false_node_is_read_only_if_another_node_agrees(change: Callable[[FakeNode], Any]) -> None:
    assert await read_history(change, lambda _: None, lambda _: None) == ([TXS[0]], RECORDED_ROOT)
    with pytest.raises(ChainUnavailable, match="a:1317, b:1317 report different data"):
        await read_history(change)


async def test_one_node_of_two_does_not_have_a_block_given_up() -> None:
    _, network, endpoints = create_network("a", "b")
    network.nodes["a"].lowest_height, network.nodes["b"].syncing = 460, True
    await endpoints.probe_all()
    with pytest.raises(ChainUnavailable, match="fewer than 2 chain nodes are in sync"):
        await RevealHistory(ReadOnlyNodePool(endpoints, transport=network)).read_block(450)


async def test_history_of_a_false_node_waits_for_a_node_that_is_down() -> None:
    clock, network, endpoints = create_network("a", "b", "c")
    for name, code in (("a", 5), ("b", 0), ("c", 0)):
        network.nodes[name].add_transaction(450, TXS[0], ROWS[0]["tx"] | {"code": code})
    network.nodes["b"].results.clear()  # no index
    network.nodes["c"].syncing = True
    await endpoints.probe_all()
    history = RevealHistory(ReadOnlyNodePool(endpoints, transport=network))
    with pytest.raises(ChainUnavailable, match="fewer than 3 chain nodes responded"):
        await history.read_block(450)
    network.nodes["c"].syncing = False
    clock.advance(5)
    await endpoints.probe_all()
    with pytest.raises(ChainUnavailable, match="a:1317, b:1317, c:1317 report different data"):
        await history.read_block(450)


@pytest.mark.parametrize("change", EMPTY_NODES.values(), ids=EMPTY_NODES)
async def test_history_is_read_from_one_node_if_the_others_have_nothing(change: Callable[[FakeNode], Any]) -> None:
    assert await read_history(change) == ([TXS[0]], RECORDED_ROOT)
