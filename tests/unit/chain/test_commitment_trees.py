"""Commitment-tree sync: growth, verification of roots, damaged trees, contradicting nodes."""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import anyio
import httpx
import pytest
from structlog.testing import capture_logs

from helper.chain import commitment_trees
from helper.chain.chain_data import Anchor
from helper.chain.commitment_trees import CONCURRENT_ROUNDS, MAX_ANCHORS, WAKES_PER_ITERATION
from helper.chain.node_http import NoResponse
from helper.chain.rest_client import ChainClient
from helper.core.refusals import PauseReason
from helper.errors import ChainUnavailable, StoreError
from helper.store import rounds
from tests.unit.chain.fakes import ROUND_ID, FakeNode, json_response, read_recorded, recorded_round
from tests.unit.chain.tree_fixtures import FakeTree, TreeEnvironment, encode_leaf, sync_tree

ROOT = b64decode(read_recorded("tree, latest")["response"]["tree"]["root"])
OTHER_ROUND = bytes([1]) * 32


@asynccontextmanager
async def holding_shares(env: TreeEnvironment, *shares: tuple[bytes, int]) -> AsyncIterator[list[tuple[bytes, int]]]:
    """Hold shares (round, position of the leaf) until there is news. Yields those that continue."""
    released: list[tuple[bytes, int]] = []

    async def hold(round_id: bytes, position: int) -> None:
        await env.trees.wait_for_news(round_id, position, 30)
        released.append((round_id, position))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for share in shares:
                group.start_soon(hold, *share)
            await anyio.wait_all_tasks_blocked()
            yield released
            group.cancel_scope.cancel()


async def test_tree_sync_matches_recorded_tree() -> None:
    env = TreeEnvironment()
    await env.start()
    assert env.trees.anchor(ROUND_ID) is None
    await env.trees.sync(100)
    anchor = env.trees.anchor(ROUND_ID)
    assert anchor == Anchor(84, 3, ROOT)
    assert env.trees.anchor_at(ROUND_ID, 84) == anchor
    assert env.trees.anchor_at(ROUND_ID, 85) is None
    assert env.trees.last_size(ROUND_ID) == 3
    vote = env.trees.leaf(ROUND_ID, 2)
    assert vote == b64decode(read_recorded("leaves")["response"]["blocks"][1]["leaves"][1])
    assert [env.trees.leaf(ROUND_ID, position) for position in (-1, 3)] == [None, None]
    assert len(await env.trees.path(ROUND_ID, 2, anchor)) == 24 * 32
    assert await env.store.load_leaves(ROUND_ID) == (
        b"".join(b64decode(x) for block in read_recorded("leaves")["response"]["blocks"] for x in block["leaves"]),
        84,
    )


async def test_tree_sync_growth_preserves_paths_of_older_anchors() -> None:
    env, chain = await sync_tree()
    first = env.trees.anchor(ROUND_ID)
    assert first is not None
    path = await env.trees.path(ROUND_ID, 1, first)
    chain.append(70, 3)
    chain.grow_on(env.nodes, 90, 4, 5)
    before = len(env.nodes[0].requests)
    await env.trees.sync(100)
    assert env.trees.anchor(ROUND_ID) == Anchor(90, 5, chain.tree.root())
    assert env.trees.anchor_at(ROUND_ID, 60) == first
    assert await env.trees.path(ROUND_ID, 1, first) == path
    new_requests = env.nodes[0].requests[before:]
    assert [path.rsplit("/", 1)[1] for path in new_requests] == ["latest", "leaves?from_height=61&to_height=90"]
    before = len(env.nodes[0].requests)
    await env.trees.sync(101)
    assert len(env.nodes[0].requests) == before + 1, "nothing is new: one request"


async def test_root_that_nodes_report_again_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    env, chain, computed, run_sync = TreeEnvironment("a", "b"), FakeTree(), list[str](), anyio.to_thread.run_sync

    async def record(function: Any, *args: Any) -> Any:
        computed.append(function.__name__)
        return await run_sync(function, *args)

    chain.grow_on(env.nodes, 60, 1, 2)
    await env.start()
    monkeypatch.setattr(anyio.to_thread, "run_sync", record)
    for appended, expected in (((), ["append", "root"]), ((), []), ((3,), ["append", "root"])):
        if appended:
            chain.grow_on(env.nodes, 70, *appended)
        computed.clear()
        await env.trees.sync(100)
        assert computed == expected


async def test_leaves_are_appended_in_parts_because_readers_of_the_tree_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    env, chain = TreeEnvironment(), FakeTree((60, *range(1, 11)))
    sizes, run_sync = list[int](), anyio.to_thread.run_sync

    async def record(function: Any, *args: Any) -> Any:
        if function.__name__ == "append":
            sizes.append(len(args[0]) // 32)
        return await run_sync(function, *args)

    monkeypatch.setattr(commitment_trees, "APPENDED_LEAVES", 4)
    monkeypatch.setattr(anyio.to_thread, "run_sync", record)
    chain.publish_to(*env.nodes)
    await env.start_synced()
    assert sizes == [4, 4, 2]
    assert env.trees.anchor(ROUND_ID) == Anchor(60, 10, chain.tree.root())


async def test_tree_restored_after_restart_is_verified_before_use() -> None:
    env, chain = TreeEnvironment(), FakeTree()
    for height in range(60, 70):
        chain.grow_on(env.nodes, height, *range(height * 1000, height * 1000 + 300))
    await env.start_synced()
    assert len(await env.store.load_subtrees(ROUND_ID)) == 2 * 1023 * 32
    trees = await env.recreate_trees()
    assert trees.anchor(ROUND_ID) is None
    assert trees.leaf(ROUND_ID, 0) is None
    assert (trees.anchor(ROUND_ID), trees.last_size(ROUND_ID)) == (None, 3000)
    before = len(env.nodes[0].requests)
    await trees.sync(100)
    assert trees.anchor(ROUND_ID) == Anchor(69, 3000, chain.tree.root())
    assert trees.leaf(ROUND_ID, 2999) == encode_leaf(69_299)
    assert len(env.nodes[0].requests) == before + 1, "no leaf is fetched again"


@pytest.mark.parametrize("damage", ["leaves", "subtrees", "encoding", "length"])
async def test_tree_sync_refetches_damaged_stored_tree(damage: str) -> None:
    env, chain = TreeEnvironment(), FakeTree((60, *range(1, 1101)))
    chain.publish_to(*env.nodes)
    await env.start_synced()
    leaves, _ = await env.store.load_leaves(ROUND_ID)
    nodes = await env.store.load_subtrees(ROUND_ID)
    statement, value = {
        "leaves": ("UPDATE tree_leaves SET leaves = ?", leaves[:-32] + encode_leaf(7)),
        "encoding": ("UPDATE tree_leaves SET leaves = ?", leaves[:-32] + b"\xff" * 32),
        "subtrees": ("UPDATE tree_subtrees SET nodes = ?", nodes[:-32] + encode_leaf(7)),
        "length": ("INSERT INTO tree_subtrees SELECT round_no, 1, ? FROM tree_subtrees", nodes),
    }[damage]
    env.store.conn.execute(statement, (value,))
    trees = await env.recreate_trees()
    with capture_logs() as logs:
        await trees.sync(100)
    assert trees.anchor(ROUND_ID) == Anchor(60, 1100, chain.tree.root())
    assert env.nodes_in_backoff() == []
    assert (await env.store.load_leaves(ROUND_ID))[0] == leaves
    assert logs or damage in ("encoding", "length"), "missing blocks are found and reported when they are read"


def corrupt_node(node: FakeNode, kind: str) -> None:
    """Make a node's tree contradict itself."""
    match kind:
        case "root":
            node.tree = node.tree | {"root": b64encode(encode_leaf(99)).decode()}
        case "missing":
            node.leaf_blocks = node.leaf_blocks[:-1]
        case "order":
            node.leaf_blocks = node.leaf_blocks[:1] + node.leaf_blocks[:0:-1]
        case "encoding":
            node.leaf_blocks[-1] = node.leaf_blocks[-1] | {"leaves": [b64encode(b"\xff" * 32).decode()]}
        case "leaf":
            node.leaf_blocks[-1] = node.leaf_blocks[-1] | {"leaves": [b64encode(encode_leaf(98)).decode()]}
        case "size":
            node.tree = node.tree | {"next_index_at_root": 9}


CORRUPTIONS = ["root", "missing", "order", "encoding", "leaf", "size"]


@pytest.mark.parametrize("kind", CORRUPTIONS)
async def test_tree_sync_root_mismatch_puts_node_into_backoff(kind: str) -> None:
    env, chain = await sync_tree("liar", "honest")
    first = env.trees.anchor(ROUND_ID)
    for height in (70, 80, 90):
        chain.grow_on(env.nodes, height, height)
    corrupt_node(env.nodes[0], kind)
    with capture_logs() as logs:
        await env.sync_with_first(0)
    assert [log["endpoint"] for log in logs if log["event"] == "node_not_fresh"] == ["liar:1317"]
    assert f"tree of round {ROUND_ID.hex()[:8]}" in logs[0]["reason"]
    assert env.trees.anchor(ROUND_ID) == Anchor(90, 5, chain.tree.root())
    assert first is not None
    assert env.trees.anchor_at(ROUND_ID, 60) == first


@pytest.mark.parametrize("kind", CORRUPTIONS)
async def test_tree_sync_with_only_faulty_node_changes_nothing(kind: str) -> None:
    env, chain = await sync_tree()
    first, stored = env.trees.anchor(ROUND_ID), await env.store.load_leaves(ROUND_ID)
    for height in (70, 80, 90):
        chain.grow_on(env.nodes, height, height)
    corrupt_node(env.nodes[0], kind)
    with pytest.raises(ChainUnavailable):
        await env.trees.sync(100)
    assert env.trees.anchor(ROUND_ID) == first
    assert env.trees.last_size(ROUND_ID) == 2
    assert env.trees.leaf(ROUND_ID, 2) is None
    assert await env.store.load_leaves(ROUND_ID) == stored
    env.clock.advance(1)
    chain.publish_to(*env.nodes)
    await env.trees.sync(101)
    assert env.trees.anchor(ROUND_ID) == Anchor(90, 5, chain.tree.root()), "the node is honest and in sync again"


async def test_tree_contradicted_twice_by_all_nodes_is_blocked() -> None:
    env, chain = await sync_tree()
    other = FakeTree((60, 7, 8))
    other.publish_to(*env.nodes)
    for reason in (None, PauseReason.ROUND_TREE_CONTRADICTED):
        with pytest.raises(ChainUnavailable):
            await env.trees.sync(101)
        assert env.trees.contradiction_reason(ROUND_ID) == reason
        env.clock.advance(2)
    env.nodes[0].faults["/commitment-tree/"] = lambda _: httpx.Response(503)
    with pytest.raises(ChainUnavailable):
        await env.trees.sync(101)
    assert env.trees.contradiction_reason(ROUND_ID), "no other node has reported it since"
    env.nodes[0].faults.clear()
    env.clock.advance(10)
    chain.publish_to(*env.nodes)
    await env.trees.sync(102)
    assert env.trees.contradiction_reason(ROUND_ID) is None


@pytest.mark.parametrize("hosts", [("liar", "honest"), ("honest", "liar"), ("liar", "honest", "other")])
async def test_leaf_that_one_node_invents_is_never_stored(hosts: tuple[str, ...]) -> None:
    env, chain = await sync_tree(*hosts)
    false = FakeTree((60, 1, 2))
    false.append(70, *range(100, 150))
    liar = env.nodes[hosts.index("liar")]
    for height, number in ((80, 3), (90, 4)):
        chain.append(height, number)
        false.append(height, number)
        chain.publish_to(*env.nodes)
        false.publish_to(liar)
        await env.trees.sync(100)
        size = len(chain.tree)
        anchor = env.trees.find_anchor(ROUND_ID, size - 1, partial(encode_leaf, number))
        assert anchor == Anchor(height, size, chain.tree.root())
        assert await env.trees.path(ROUND_ID, size - 1, anchor) == chain.tree.path(size - 1, size)
        assert env.trees.find_anchor(ROUND_ID, 2, partial(encode_leaf, 7)) in {None, anchor}
        agreed_size = size if len(hosts) > 2 else 2
        assert await env.store.load_leaves(ROUND_ID) == (
            leaves_of(chain, agreed_size),
            height if agreed_size > 2 else 60,
        )
        assert env.trees.leaf(ROUND_ID, 2) == (encode_leaf(3) if agreed_size > 2 else None)
        assert "honest:1317" not in env.nodes_in_backoff()
    chain.publish_to(*env.nodes)
    env.clock.advance(60)
    await env.endpoints.probe_all()
    await env.trees.sync(101)
    assert await env.store.load_leaves(ROUND_ID) == (leaves_of(chain, 4), 90)
    assert env.trees.leaf(ROUND_ID, 3) == encode_leaf(4)


async def test_proofs_of_a_share_use_the_trees_of_different_nodes_in_turn() -> None:
    env, chain, false = TreeEnvironment("a", "b"), FakeTree(), FakeTree()
    for tree, other in ((chain, 7), (false, 8)):
        tree.append(60, 1, 2)
        tree.append(70, other, 3)
    chain.publish_to(env.nodes[0])
    false.publish_to(env.nodes[1])
    await env.start()
    await env.trees.sync(100)
    roots = {chain.tree.root(): "a:1317", false.tree.root(): "b:1317"}
    previous, chosen = None, []
    for _ in range(4):
        anchor = env.trees.find_anchor(ROUND_ID, 3, partial(encode_leaf, 3), previous=previous)
        assert anchor is not None
        previous = anchor
        chosen.append(roots[anchor.root])
        served = [name for name in roots.values() if env.trees.serves_root(ROUND_ID, name, anchor.height, anchor.root)]
        assert served == chosen[-1:]
    assert sorted(chosen[:2]) == sorted(roots.values())
    assert chosen[2:] == chosen[:2]


@pytest.mark.parametrize("hosts", [("liar", "honest"), ("honest", "liar")])
async def test_node_that_adds_leaves_to_those_of_another_hides_no_root(hosts: tuple[str, ...]) -> None:
    env, chain = await sync_tree(*hosts)
    liar, honest = env.nodes[hosts.index("liar")], env.nodes[hosts.index("honest")]
    chain.append(70, 3)
    previous, chosen = None, []
    for number in range(100, 104):  # the liar changes its tree before each proof
        false = FakeTree((60, 1, 2), (70, 3, number))
        chain.publish_to(honest)
        false.publish_to(liar)
        for _ in range(2):
            await env.trees.sync(100)
        anchor = env.trees.find_anchor(ROUND_ID, 2, partial(encode_leaf, 3), previous=previous)
        assert anchor is not None
        assert len(await env.trees.path(ROUND_ID, 2, anchor)) == 24 * 32
        previous = anchor
        chosen.append(anchor.root == chain.tree.root())
        assert env.trees.serves_root(ROUND_ID, "honest:1317", anchor.height, anchor.root) is chosen[-1]
        assert env.trees.serves_root(ROUND_ID, "liar:1317", anchor.height, anchor.root) is not chosen[-1]
    assert chosen in ([True, False] * 2, [False, True] * 2), "each second proof is for the honest node's root"


async def test_share_of_another_leaf_than_the_agreed_one_is_not_proven() -> None:
    env, chain = await sync_tree()
    assert env.trees.find_anchor(ROUND_ID, 1, partial(encode_leaf, 2)) == Anchor(60, 2, chain.tree.root())
    assert env.trees.find_anchor(ROUND_ID, 1, partial(encode_leaf, 3)) is None


async def test_leaves_of_a_false_node_are_proven_only_while_no_other_node_is_usable() -> None:
    env, chain = await sync_tree("liar", "honest", "other")
    liar, *others = env.nodes
    anchors, logged = [], []
    for height in range(70, 76):  # the liar always adds one leaf to the true ones
        chain.grow_on(others, height, height)
        false = FakeTree((60, 1, 2), *((known, known) for known in range(70, height + 1)), (height + 1, 1000 + height))
        false.publish_to(liar)
        for first in (1, 0):
            with capture_logs() as logs:
                await env.sync_with_first(first)
            logged += [(log["endpoint"], log["height"]) for log in logs if log["event"] == "node_root_contradicted"]
            get_leaf = partial(encode_leaf, 1000 + height)
            anchors.append(env.trees.find_anchor(ROUND_ID, len(chain.tree), get_leaf))
        assert env.trees.find_anchor(ROUND_ID, len(chain.tree) - 1, partial(encode_leaf, height)) is not None
    assert anchors[1] is not None, "nothing contradicts it yet"
    assert logged == [("liar:1317", 71)], "once"
    assert anchors[-4:] == [None] * 4
    tree = env.trees._trees[ROUND_ID]
    assert tree.false_nodes == {"liar:1317"}
    assert tree.served["liar:1317"].root == false.tree.root()
    for node in env.endpoints.nodes[1:]:
        env.endpoints.start_backoff(node, "restarts")
    anchor = env.trees.find_anchor(ROUND_ID, len(chain.tree), get_leaf)
    assert anchor is not None
    assert anchor.root == false.tree.root()


@pytest.mark.parametrize("hosts", [("liar", "honest"), ("honest", "liar")])
async def test_true_root_at_a_false_height_is_used_for_every_second_proof_only(hosts: tuple[str, ...]) -> None:
    env, chain = await sync_tree(*hosts)
    liar = env.nodes[hosts.index("liar")]
    chain.grow_on(env.nodes, 70, 3)
    liar.tree, liar.roots = liar.tree | {"height": 90}, {}
    for _ in range(2):
        await env.trees.sync(100)
    previous, heights = None, []
    for _ in range(4):
        previous = env.trees.find_anchor(ROUND_ID, 2, partial(encode_leaf, 3), previous=previous)
        assert previous is not None
        heights.append(previous.height)
        assert env.trees.serves_root(ROUND_ID, "honest:1317", previous.height, previous.root) is (heights[-1] == 70)
    assert heights in ([70, 90] * 2, [90, 70] * 2)


async def test_root_below_the_creation_of_its_round_is_refused() -> None:
    env, chain = await sync_tree("liar", "honest")
    chain.grow_on(env.nodes, 70, 3)
    env.nodes[0].tree, env.nodes[0].roots = env.nodes[0].tree | {"height": 0}, {}
    for _ in range(2):
        await env.trees.sync(100)
    assert not env.trees.serves_root(ROUND_ID, "liar:1317", 0, chain.tree.root())
    anchor = env.trees.find_anchor(ROUND_ID, 2, partial(encode_leaf, 3))
    assert anchor is not None
    assert anchor.height == 70


@pytest.mark.parametrize("hosts", [("liar", "honest"), ("honest", "liar"), ("liar", "honest", "other")])
async def test_leaves_without_end_keep_no_other_leaf_from_wallets(
    hosts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commitment_trees, "MAX_READ_SECONDS", 0.0)
    requests = 0

    def serve_no_leaves(_: httpx.Request) -> httpx.Response:
        nonlocal requests
        requests += 1
        assert requests < 100, "reading the leaves does not end"
        return json_response(200, {})

    env, chain = await sync_tree(*hosts)
    liar = env.nodes[hosts.index("liar")]
    liar.height = 10**12
    liar.faults["/leaves"] = serve_no_leaves
    await env.endpoints.probe_all()
    for height, number in ((70, 3), (80, 4)):
        chain.grow_on([node for node in env.nodes if node is not liar], height, number)
        liar.tree |= {"height": 10**12, "next_index_at_root": 100, "root": b64encode(encode_leaf(9)).decode()}
        for _ in range(2):
            await env.trees.sync(100)
        anchor = env.trees.find_anchor(ROUND_ID, number - 1, partial(encode_leaf, number))
        assert anchor == Anchor(height, number, chain.tree.root())


@pytest.mark.parametrize("hosts", [("liar", "honest"), ("honest", "liar")])
async def test_leaves_that_only_one_node_serves_are_limited(
    hosts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commitment_trees, "MAX_UNAGREED_LEAVES", 20)
    env, chain = await sync_tree(*hosts)
    liar, honest = env.nodes[hosts.index("liar")], env.nodes[hosts.index("honest")]
    false = FakeTree((60, 1, 2))
    for height in range(61, 69):
        false.append(height, *range(100 * height, 100 * height + 8))
        false.publish_to(liar)
        chain.grow_on([honest], height, height)
        env.clock.advance(60)
        await env.endpoints.probe_all()
        await env.trees.sync(100)
    tree = env.trees._trees[ROUND_ID]
    assert len(tree.branch_of("liar:1317").tree) == 2 + 16
    assert len(tree.branch_of("honest:1317").tree) == 2 + 8
    chain.publish_to(liar)
    env.clock.advance(60)
    await env.endpoints.probe_all()
    await env.trees.sync(101)
    assert env.trees.anchor(ROUND_ID) == Anchor(68, 10, chain.tree.root())
    for height in range(69, 73):
        chain.grow_on(env.nodes, height, *range(100 * height, 100 * height + 15))
        await env.trees.sync(101)
    assert env.trees.last_size(ROUND_ID) == 10 + 60, "agreed leaves do not count"


async def test_leaves_that_take_long_are_read_in_several_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commitment_trees, "MAX_READ_SECONDS", 0.0)
    env, chain = TreeEnvironment("a", "b"), FakeTree((60, 1), (3000, 2), (6000, 3))
    chain.publish_to(*env.nodes)
    await env.start()
    syncs = 0
    while env.trees.leaf(ROUND_ID, 2) is None:
        await env.trees.sync(6000)
        syncs += 1
    assert syncs > 1
    for node in env.nodes:
        requests = [path for path in node.requests if "/leaves?" in path]
        assert len(requests) == len(set(requests)), "no page is read twice"


@pytest.mark.parametrize("is_false", [False, True])
async def test_leaves_that_take_long_to_append_delay_no_other_leaf(
    monkeypatch: pytest.MonkeyPatch, *, is_false: bool
) -> None:
    monkeypatch.setattr(commitment_trees, "MAX_READ_SECONDS", 0.0)
    monkeypatch.setattr(commitment_trees, "APPENDED_LEAVES", 4)
    env, chain = await sync_tree("large", "honest")
    large = FakeTree((60, 1, 2), (61, *range(100, 120)))
    large.publish_to(env.nodes[0])
    if is_false:
        env.nodes[0].tree["root"] = b64encode(encode_leaf(9)).decode()
    chain.grow_on(env.nodes[1:], 70, 3)
    await env.endpoints.probe_all()
    await env.sync_with_first(0)
    tree = env.trees._trees[ROUND_ID]
    assert tree.served["honest:1317"] == Anchor(70, 3, chain.tree.root())
    assert [len(reading.tree or ()) for reading in tree.readings.values()] == [2 + 4]
    for _ in range(12):
        await env.trees.sync(100)
    assert tree.served["large:1317"].size == (2 if is_false else 22)
    assert tree.served["honest:1317"] == Anchor(70, 3, chain.tree.root())
    assert env.nodes_in_backoff() == (["large:1317"] if is_false else [])


@pytest.mark.parametrize("fails", [False, True])
async def test_leaves_of_an_unfinished_reading_are_joined(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    async def read_one_page(client: ChainClient, path: str, *args: Any, params: Any = None, **options: Any) -> Any:
        if path.endswith("/leaves") and params["from_height"] != "55":
            raise NoResponse("connection reset", sent=True)
        return await get(client, path, *args, params=params, **options)

    env, chain = TreeEnvironment("a", "b"), FakeTree(*((60 + number, 1 + number) for number in range(50)), (6000, 60))
    chain.publish_to(*env.nodes)
    with monkeypatch.context() as patch:
        get = ChainClient._get
        patch.setattr(*(ChainClient, "_get", read_one_page) if fails else (commitment_trees, "MAX_READ_SECONDS", 0.0))
        await env.start()
        with suppress(ChainUnavailable):
            await env.trees.sync(6000)
    readings = env.trees._trees[ROUND_ID].readings
    assert [[len(block.leaves) for block in reading.blocks] for reading in readings.values()] == [[50 * 32]] * 2
    env.clock.advance(60)
    await env.endpoints.probe_all()
    while env.trees.leaf(ROUND_ID, 50) is None:
        await env.trees.sync(6000)
    assert env.trees.anchor(ROUND_ID) == Anchor(6000, 51, chain.tree.root())


async def test_leaves_without_end_end_a_sync_while_no_other_node_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commitment_trees, "MAX_READ_SECONDS", 0.0)
    env, chain = await sync_tree("liar", "honest")
    liar, honest = env.nodes
    chain.append(70, 3)
    env.endpoints.start_backoff(env.endpoints.nodes[1], "restarts")
    liar.height = 10**12
    liar.faults["/leaves"] = lambda _: json_response(200, {})
    liar.tree |= {"height": 10**12, "next_index_at_root": 100, "root": b64encode(encode_leaf(9)).decode()}
    await env.endpoints.probe_all()
    assert [node.name for node in env.endpoints.usable_nodes] == ["liar:1317"]
    for _ in range(3):
        await env.trees.sync(100)
    assert len([path for path in liar.requests if "/leaves?" in path]) <= 8, "a page for each sync, and those before"
    chain.publish_to(honest)
    env.clock.advance(60)
    await env.endpoints.probe_all()
    for _ in range(2):
        await env.trees.sync(100)
    assert env.trees.find_anchor(ROUND_ID, 2, partial(encode_leaf, 3)) == Anchor(70, 3, chain.tree.root())


@pytest.mark.parametrize("is_false", [False, True])
async def test_leaves_that_take_long_are_read_although_another_node_adds_some_at_each_sync(
    monkeypatch: pytest.MonkeyPatch, *, is_false: bool
) -> None:
    monkeypatch.setattr(commitment_trees, "MAX_READ_SECONDS", 0.0)
    env, chain = TreeEnvironment("liar", "honest"), FakeTree((60, 1), (3000, 2), (6000, 3), (9000, 4))
    liar, honest = env.nodes
    chain.publish_to(honest)
    part = FakeTree((60, 1))
    part.publish_to(liar)
    await env.start()
    for number in range(12):
        part.append(61 + number, 100 + number if is_false else 2 + number)
        part.publish_to(liar)
        await env.trees.sync(100)
    tree = env.trees._trees[ROUND_ID]
    assert tree.served["honest:1317"] == Anchor(9000, 4, chain.tree.root())
    assert not tree.readings


async def test_leaves_that_take_long_are_read_although_the_height_of_the_round_changes_at_each_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commitment_trees, "MAX_READ_SECONDS", 0.0)
    env, chain = TreeEnvironment("liar", "honest"), FakeTree((60, 1), (3000, 2), (6000, 3), (9000, 4))
    liar, honest = env.nodes
    chain.publish_to(honest)
    FakeTree((2, 100)).publish_to(liar)
    liar.rounds = [{**listed, "created_at_height": "50"} for listed in liar.rounds]
    await env.start()
    for number in range(24):
        await env.trees.sync(100)
        liar.rounds = [{**listed, "created_at_height": str(49 - number)} for listed in liar.rounds]
        await env.rounds.sync()
    assert env.trees._trees[ROUND_ID].served["honest:1317"] == Anchor(9000, 4, chain.tree.root())


async def test_tree_is_read_although_its_round_was_first_listed_with_a_later_height() -> None:
    env, chain = TreeEnvironment("liar", "honest"), FakeTree((60, 1, 2))
    liar, honest = env.nodes
    chain.publish_to(*env.nodes)
    listed = honest.rounds
    honest.rounds, liar.rounds = [], [{**each, "created_at_height": "75"} for each in listed]
    await env.start()
    with suppress(ChainUnavailable):
        await env.trees.sync(100)
    honest.rounds = liar.rounds = listed
    for _ in range(3):
        env.clock.advance(60)
        await env.endpoints.probe_all()
        await env.rounds.sync()
        with suppress(ChainUnavailable):
            await env.trees.sync(100)
    assert env.trees._trees[ROUND_ID].served["honest:1317"] == Anchor(60, 2, chain.tree.root())


def leaves_of(chain: FakeTree, size: int) -> bytes:
    return b"".join(chain.tree.leaf(position) for position in range(size))


async def test_false_stored_tree_is_replaced_although_it_is_larger() -> None:
    env, chain, false = TreeEnvironment(), FakeTree((60, 1, 2)), FakeTree((60, *range(100, 150)))
    false.publish_to(*env.nodes)
    await env.start_synced()
    chain.publish_to(*env.nodes)
    trees = await env.recreate_trees()
    await trees.sync(100)
    assert trees.leaf(ROUND_ID, 0) == encode_leaf(1)
    assert await env.store.load_leaves(ROUND_ID) == (leaves_of(chain, 2), 60)


async def test_root_of_the_node_that_is_behind_is_agreed() -> None:
    env, chain = await sync_tree("ahead", "behind")
    for height, number in ((70, 3), (80, 4), (90, 5)):
        chain.publish_to(env.nodes[1])
        chain.grow_on(env.nodes[:1], height, number)
        await env.sync_with_first(0)
        assert env.trees.anchor(ROUND_ID) == Anchor(height, len(chain.tree), chain.tree.root())
        assert env.trees.leaf(ROUND_ID, len(chain.tree) - 2) == encode_leaf(number - 1)
        assert (await env.store.load_leaves(ROUND_ID))[0] == leaves_of(chain, len(chain.tree) - 1)
    chain.publish_to(env.nodes[1])
    await env.trees.sync(100)
    before = [len(node.requests) for node in env.nodes]
    for _ in range(4):
        await env.trees.sync(101)
    assert [len(node.requests) for node in env.nodes] == [n + 2 for n in before], (
        "nothing is new: each is asked in turn"
    )
    assert env.nodes_in_backoff() == []


async def test_only_the_node_that_delays_the_comparison_of_roots_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    env, chain = await sync_tree("ahead", "behind")
    ahead, behind = env.endpoints.nodes
    chain.grow_on(env.nodes, 101, 3)
    chain.grow_on(env.nodes[:1], 102, 4)
    await env.endpoints.probe_all()
    tree_at = ahead.client.tree_at

    async def respond_late(*args: Any) -> Any:
        env.clock.advance(8.0)
        return await tree_at(*args)

    monkeypatch.setattr(ahead.client, "tree_at", respond_late)
    await env.sync_with_first(0)
    assert env.trees.leaf(ROUND_ID, 2) is not None, "the root of height 101 is agreed"
    now = env.clock.monotonic()
    assert [node.left_out_until > now for node in (ahead, behind)] == [True, False]


async def test_node_behind_what_others_agree_on_stays_in_use() -> None:
    env, chain = await sync_tree("a", "b", "behind")
    for height, number in ((70, 3), (80, 4)):
        chain.grow_on(env.nodes[:2], height, number)
        for first in (0, 1, 2):
            await env.sync_with_first(first)
        assert env.trees.leaf(ROUND_ID, number - 1) == encode_leaf(number)
    assert env.nodes_in_backoff() == [], "its root is an earlier one of the same tree"


@pytest.mark.parametrize("has_tree", [True, False])
@pytest.mark.parametrize("hosts", [("liar", "honest"), ("honest", "liar"), ("liar", "honest", "other")])
async def test_node_that_hides_leaves_keeps_them_from_no_wallet(hosts: tuple[str, ...], *, has_tree: bool) -> None:
    env, chain = TreeEnvironment(*hosts), FakeTree()
    liar = hosts.index("liar")
    honest = [node for number, node in enumerate(env.nodes) if number != liar]
    chain.grow_on(env.nodes, 60, 1)
    if not has_tree:
        env.nodes[liar].tree, env.nodes[liar].roots, env.nodes[liar].height = {}, {}, 50
    await env.start_synced()
    for height, number in ((65, 2), (70, 3)):
        chain.grow_on(honest, height, number)
        for _ in range(3):  # after the two syncs of a block, and the first one of the next
            await env.trees.sync(100)
        anchor = Anchor(height, number, chain.tree.root())
        assert env.trees.find_anchor(ROUND_ID, number - 1, partial(encode_leaf, number)) == anchor
        assert (env.trees.leaf(ROUND_ID, number - 1) is None) is (len(hosts) == 2)
    if len(hosts) > 2:
        chain.grow_on(honest, 75, 4)
        await env.sync_with_first(liar)
        assert env.trees.last_size(ROUND_ID) == 4, "it is behind what is agreed, so the next node is asked at once"


async def test_root_that_was_agreed_before_a_restart_is_agreed_although_nodes_differ_since() -> None:
    env, chain = await sync_tree("a", "b")
    other = FakeTree((60, 1, 2))
    agreed = Anchor(60, 2, chain.tree.root())
    chain.append(70, 3)
    other.append(70, 7, 8)
    for tree, node in zip((chain, other), env.nodes, strict=True):
        tree.publish_to(node)
    trees = await env.recreate_trees()
    for _ in range(3):
        await trees.sync(100)
        assert trees.find_anchor(ROUND_ID, 1, partial(encode_leaf, 2)) == agreed
    for number, tree in ((3, chain), (7, other)):
        anchor = trees.find_anchor(ROUND_ID, 2, partial(encode_leaf, number))
        assert anchor == Anchor(70, len(tree.tree), tree.tree.root()), "each node's newest tree is in memory"


async def test_root_of_a_fork_is_an_anchor_while_stored_leaves_are_not_confirmed() -> None:
    env, _ = await sync_tree("a", "b")
    other = FakeTree((60, 7, 8))
    other.publish_to(env.nodes[0])
    env.network.nodes.pop("b")
    trees = await env.recreate_trees()
    await trees.sync(100)
    assert trees.anchor(ROUND_ID) == Anchor(60, 2, other.tree.root()), "its shares are dispatched"


async def test_leaves_of_the_only_responding_node_are_used_and_stored_once_agreed() -> None:
    env, chain = await sync_tree("a", "b")
    silent = env.network.nodes.pop("b")
    chain.grow_on(env.nodes, 80, 3)
    await env.endpoints.probe_all()
    await env.trees.sync(100)
    assert env.trees.find_anchor(ROUND_ID, 2, partial(encode_leaf, 3)) == Anchor(80, 3, chain.tree.root())
    assert env.trees.leaf(ROUND_ID, 2) is None
    assert await env.store.load_leaves(ROUND_ID) == (leaves_of(chain, 2), 60)
    env.network.nodes["b"] = silent
    env.clock.advance(60)
    await env.endpoints.probe_all()
    before = len(env.nodes[0].requests)
    await env.trees.sync(101)
    assert await env.store.load_leaves(ROUND_ID) == (leaves_of(chain, 3), 80)
    assert len(env.nodes[0].requests) == before + 1, "the leaves are not fetched again"


async def test_anchors_in_memory_are_limited() -> None:
    env, chain = TreeEnvironment(), FakeTree()
    await env.start()
    for height in range(101, 101 + 2 * MAX_ANCHORS):
        chain.grow_on(env.nodes, height, height)
        await env.trees.sync(height)
    known = [height for height in range(101, height + 1) if env.trees.anchor_at(ROUND_ID, height) is not None]
    assert known == list(range(height - MAX_ANCHORS + 1, height + 1))


async def test_tree_sync_rejects_root_far_above_newest_block() -> None:
    env, chain = TreeEnvironment("liar", "honest"), FakeTree((60, 1, 2))
    chain.publish_to(*env.nodes)
    await env.start()
    env.nodes[0].tree = env.nodes[0].tree | {"height": 2**40}
    await env.trees.sync(100)
    assert env.trees.anchor(ROUND_ID) == Anchor(60, 2, chain.tree.root())
    assert not any("/leaves" in path for path in env.nodes[0].requests)


async def test_tree_sync_rejects_other_root_at_known_height() -> None:
    env, _ = await sync_tree("a", "b")
    FakeTree((60, 7, 8)).publish_to(env.nodes[0])
    await env.sync_with_first(0)
    assert env.nodes_in_backoff() == ["a:1317"]
    assert "belongs to another tree" in str(env.endpoints.unusable_reasons()["a:1317"])
    for head in (101, 102, 103):
        await env.trees.sync(head)
        env.clock.advance(3)
        assert env.trees.contradiction_reason(ROUND_ID) is None, "the other node has the stored tree"


async def test_tree_sync_puts_node_without_tree_into_backoff() -> None:
    env = TreeEnvironment()
    await env.start_synced()
    env.nodes[0].tree = {}
    with pytest.raises(ChainUnavailable, match="has no leaves at a height where it had them"):
        await env.trees.sync(100)
    assert env.trees.last_size(ROUND_ID) == 3


async def test_tree_sync_stores_leaves_later_after_disk_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.chain.commitment_trees._MAX_LEAVES_PER_ROW", 2)
    env = TreeEnvironment()
    await env.start()
    env.store.is_full = True
    with pytest.raises(StoreError):
        await env.trees.sync(100)
    assert env.trees.last_size(ROUND_ID) == 3, "it was checked, so it may be used"
    env.store.is_full = False
    await env.trees.sync(101)
    rows = env.store.conn.execute("SELECT height FROM tree_leaves ORDER BY start_index")
    assert [height for (height,) in rows] == [0, 84], "only the last row completes the leaves of a height"


async def test_tree_sync_stores_leaves_again_that_the_database_has_lost() -> None:
    env, chain = TreeEnvironment(), FakeTree()
    await env.start()
    for height, number in ((60, 1), (70, 2), (80, 3)):
        chain.grow_on(env.nodes, height, number)
        await env.trees.sync(100)
    env.store.conn.execute("DELETE FROM tree_leaves WHERE start_index > 0")
    chain.grow_on(env.nodes, 90, 4)

    await env.trees.sync(101)

    stored = b"".join(env.trees.leaf(ROUND_ID, index) or b"" for index in range(4))
    assert await env.store.load_leaves(ROUND_ID) == (stored, 90)
    rows = env.store.conn.execute("SELECT height FROM tree_leaves ORDER BY start_index")
    assert rows.fetchall() == [(60,), (90,)]


async def test_tree_sync_of_round_without_leaves_has_no_anchor() -> None:
    env = TreeEnvironment()
    env.nodes[0].tree = {}
    await env.start_synced()
    assert (env.trees.last_size(ROUND_ID), env.trees.anchor(ROUND_ID)) == (0, None)
    assert env.trees.leaf(b"\x11" * 32, 0) is None


async def test_tree_sync_reads_trees_concurrently_within_limit() -> None:
    env = TreeEnvironment()
    identifiers = [number.to_bytes(32, "little") for number in range(1, 2 * CONCURRENT_ROUNDS + 1)]
    env.nodes[0].rounds = [recorded_round(1) | {"vote_round_id": b64encode(each).decode()} for each in identifiers]
    await env.start()
    respond, in_flight, most, is_full = env.nodes[0].handle, 0, 0, anyio.Event()

    async def respond_when_full(request: httpx.Request) -> httpx.Response:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        if in_flight == CONCURRENT_ROUNDS:
            is_full.set()
        await is_full.wait()
        in_flight -= 1
        return await respond(request)

    env.nodes[0].handle = respond_when_full  # type: ignore[method-assign]
    with anyio.fail_after(20):
        await env.trees.sync(100)
    assert most == CONCURRENT_ROUNDS
    assert [env.trees.last_size(each) for each in identifiers] == [3] * len(identifiers)


async def test_tree_sync_ignores_inactive_rounds() -> None:
    env = TreeEnvironment()
    env.nodes[0].rounds = [recorded_round(1) | {"status": 2}]
    await env.start_synced()
    assert not any("commitment-tree" in path for path in env.nodes[0].requests)


async def test_wait_for_news_sends_no_request_and_ends_with_a_sync() -> None:
    env = TreeEnvironment()
    await env.start()
    before = list(env.nodes[0].requests)
    await env.trees.wait_for_news(ROUND_ID, 2, 0.01)
    assert env.nodes[0].requests == before
    async with holding_shares(env, (ROUND_ID, 2)) as released:
        assert env.nodes[0].requests == before
        await env.trees.sync(100)
        await anyio.wait_all_tasks_blocked()
        assert released == [(ROUND_ID, 2)]


async def test_news_concerns_only_shares_of_a_changed_round_or_at_a_new_leaf() -> None:
    env, chain = TreeEnvironment("a", "b"), FakeTree()
    chain.append(60, 1, 2)
    chain.publish_to(*env.nodes)
    await env.start()
    await env.trees.sync(100)
    covered, next_leaf, later, other_round = (ROUND_ID, 1), (ROUND_ID, 2), (ROUND_ID, 3), (OTHER_ROUND, 2)
    async with holding_shares(env, covered, next_leaf, later, other_round) as released:

        async def synchronize() -> list[tuple[bytes, int]]:
            released.clear()
            await env.rounds.sync(100)
            await env.sync_with_first(0)
            await anyio.wait_all_tasks_blocked()
            return sorted(released)

        assert await synchronize() == []
        chain.append(90, 3)
        chain.publish_to(env.nodes[0])
        assert await synchronize() == [covered, next_leaf], "a leaf that only one node serves is accepted"
        chain.publish_to(*env.nodes)
        assert await synchronize() == [], "both were released"
        for node in env.nodes:
            node.rounds = [node.rounds[0] | {"status": 2}]
        assert await synchronize() == [later]


async def test_shares_with_news_continue_a_few_at_a_time() -> None:
    env = TreeEnvironment()
    await env.start()
    async with holding_shares(env, *[(ROUND_ID, 2)] * 100) as released:
        await env.trees.sync(100)
        counts = [len(released)]
        while counts[-1] < 100:
            await asyncio.sleep(0)
            counts.append(len(released))
    assert max(later - earlier for earlier, later in pairwise(counts)) <= WAKES_PER_ITERATION


async def test_wait_for_news_ends_with_a_sync_already_begun() -> None:
    env = TreeEnvironment()
    await env.start()
    gate = anyio.Event()
    load = env.endpoints.call_until

    async def slow(*args: Any, **kwargs: Any) -> Any:
        await gate.wait()
        return await load(*args, **kwargs)

    env.endpoints.call_until = slow  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        group.start_soon(env.trees.sync, 100)
        await anyio.wait_all_tasks_blocked()
        async with holding_shares(env, (ROUND_ID, 2)) as released:
            assert released == []
            gate.set()
            await anyio.wait_all_tasks_blocked()
            assert released, "the sync may have found the leaf; another one would take longer than wallets wait"


async def test_share_need_not_wait_for_a_slow_node_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    env = TreeEnvironment("a", "b")
    await env.start()
    gate = anyio.Event()
    call_until = env.endpoints.call_until

    async def call(fn: Callable[[Any], Any], **settings: Any) -> Any:
        async def call_second_late(node: Any) -> Any:
            if node is env.endpoints.nodes[1]:
                await gate.wait()
            return await fn(node)

        return await call_until(call_second_late, **settings)

    monkeypatch.setattr(env.endpoints, "call_until", call)
    async with anyio.create_task_group() as group, holding_shares(env, (ROUND_ID, 2)) as released:
        group.start_soon(env.trees.sync, 100)
        await anyio.wait_all_tasks_blocked()
        assert released, "one node serves its leaf"
        gate.set()


async def test_tree_stays_until_its_round_is_purged() -> None:
    env = TreeEnvironment()
    await env.start_synced()
    vote = env.trees.leaf(ROUND_ID, 2)
    env.nodes[0].rounds = [recorded_round(1) | {"status": 3}]
    await env.rounds.sync(100)
    await env.store.run(rounds.mark_closed, ROUND_ID, 1.0)
    await env.trees.sync(100)
    assert env.trees.leaf(ROUND_ID, 2) == vote
    trees = await env.recreate_trees()
    assert (trees.leaf(ROUND_ID, 2), trees.stored_leaf(ROUND_ID, 2)) == (None, vote), "it is not verified yet"
    assert [trees.stored_leaf(ROUND_ID, position) for position in (-1, 3)] == [None, None]
    env.rounds.forget(ROUND_ID)
    await trees.sync(100)
    assert trees.stored_leaf(ROUND_ID, 2) is None


def add_broken_round(node: FakeNode) -> None:
    """Add a second, older round for whose tree the node returns invalid data."""
    raw = recorded_round(1)
    first = raw | {"vote_round_id": b64encode(OTHER_ROUND).decode(), "created_at_height": "1"}
    node.rounds = [first, raw]
    node.faults[f"/commitment-tree/{OTHER_ROUND.hex()}/"] = lambda _: httpx.Response(200, content=b'{"tree": 5}')


async def test_tree_sync_failure_of_one_round_does_not_stop_others() -> None:
    env = TreeEnvironment()
    add_broken_round(env.nodes[0])
    await env.start()
    assert [known.round_id for known in env.rounds.active_rounds()] == [OTHER_ROUND, ROUND_ID]
    with capture_logs() as logs:
        await env.trees.sync(100)
    assert [log["round"] for log in logs if log["event"] == "tree_sync_failed"] == [OTHER_ROUND.hex()[:8]]
    assert env.nodes_in_backoff() == []
    assert env.trees.last_size(ROUND_ID) == 3
    before = len(env.nodes[0].requests)
    await env.trees.sync(100)
    new_requests = env.nodes[0].requests[before:]
    assert not any(OTHER_ROUND.hex() in path for path in new_requests), "the next attempt is delayed"
    path = f"/commitment-tree/{OTHER_ROUND.hex()}/"
    env.nodes[0].faults[path] = lambda _: httpx.Response(200, content=b'{"tree": {}}')
    env.clock.advance(2)
    with capture_logs() as logs:
        await env.trees.sync(100)
    assert OTHER_ROUND.hex()[:8] in [log["round"] for log in logs if log["event"] == "tree_sync_recovered"]


async def test_tree_sync_backs_off_while_all_rounds_fail() -> None:
    env = TreeEnvironment()
    await env.start()
    env.nodes[0].faults["/commitment-tree/"] = lambda _: httpx.Response(500)
    for _ in range(60):
        with pytest.raises(ChainUnavailable, match="latest: HTTP 500"):
            await env.trees.sync(100)
        env.clock.advance(1)
    assert 5 <= sum("/commitment-tree/" in path for path in env.nodes[0].requests) <= 7
    assert env.nodes_in_backoff() == []
    assert env.trees.contradiction_reason(ROUND_ID) is None, "a node without a tree does not contradict another"
    env.nodes[0].faults.clear()
    env.clock.advance(30)
    await env.trees.sync(100)
    assert env.trees.last_size(ROUND_ID) == 3


async def test_tree_restore_failure_of_one_round_does_not_stop_others(monkeypatch: pytest.MonkeyPatch) -> None:
    env = TreeEnvironment()
    env.nodes[0].rounds.insert(0, recorded_round(1) | {"vote_round_id": b64encode(OTHER_ROUND).decode()})
    await env.start_synced()
    load = env.store.load_leaves

    async def fails(round_id: bytes) -> tuple[bytes, int]:
        if round_id == OTHER_ROUND:
            raise StoreError("unreadable")
        return await load(round_id)

    monkeypatch.setattr(env.store, "load_leaves", fails)
    trees = await env.recreate_trees()
    assert trees.stored_leaf(ROUND_ID, 2) is not None
