"""A chain's commitment tree, and a tree sync with fake nodes."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from helper.chain.commitment_trees import CommitmentTreeSync
from helper.chain.round_registry import RoundRegistry
from proofs import CommitmentTree
from tests.unit.chain.fakes import ChainStore, FakeNode, create_network


def encode_leaf(number: int) -> bytes:
    return number.to_bytes(32, "little")


class FakeTree:
    """A commitment tree that grows block by block: a height and its leaves."""

    def __init__(self, *blocks: tuple[int, ...]) -> None:
        self.tree = CommitmentTree()
        self.blocks: list[dict[str, Any]] = []
        self.roots: dict[int, dict[str, Any]] = {}
        for block in blocks:
            self.append(*block)

    def append(self, height: int, *numbers: int) -> None:
        block: dict[str, Any] = {"height": height, "leaves": [b64encode(encode_leaf(n)).decode() for n in numbers]}
        if len(self.tree):
            block["start_index"] = len(self.tree)
        self.blocks.append(block)
        self.tree.append(b"".join(map(encode_leaf, numbers)))
        root = b64encode(self.tree.root()).decode()
        self.roots[height] = {"next_index": len(self.tree), "root": root, "height": height}

    def publish_to(self, *nodes: FakeNode) -> None:
        height = self.blocks[-1]["height"]
        for node in nodes:
            node.leaf_blocks, node.roots = list(self.blocks), dict(self.roots)
            node.tree = self.roots[height] | {"next_index_at_root": len(self.tree)}
            node.height = max(node.height, height)

    def grow_on(self, nodes: Sequence[FakeNode], height: int, *numbers: int) -> None:
        """Append a block, and let these nodes serve the tree."""
        self.append(height, *numbers)
        self.publish_to(*nodes)


class TreeEnvironment:
    """A tree sync with one or more nodes."""

    def __init__(self, *hosts: str) -> None:
        self.clock, self.network, self.endpoints = create_network(*hosts or ("a",))
        self.nodes = list(self.network.nodes.values())
        for node in self.nodes:
            node.height = 100
        self.store = ChainStore(self.clock)
        self.rounds = RoundRegistry(self.store, self.endpoints)
        self.trees = CommitmentTreeSync(self.store, self.endpoints, self.rounds)

    async def start(self) -> None:
        await self.endpoints.probe_all()
        await self.rounds.sync()
        await self.trees.restore()

    async def start_synced(self) -> None:
        await self.start()
        await self.trees.sync(100)

    async def recreate_trees(self) -> CommitmentTreeSync:
        """Create the tree sync of a restarted process."""
        self.trees = CommitmentTreeSync(self.store, self.endpoints, self.rounds)
        await self.trees.restore()
        return self.trees

    async def sync_with_first(self, number: int) -> None:
        """Synchronize the trees; this node is asked first."""
        self.trees._syncs = 2 * number
        await self.trees.sync(100)

    def nodes_in_backoff(self) -> list[str]:
        return [name for name, reason in self.endpoints.unusable_reasons().items() if reason is not None]


async def sync_tree(*hosts: str) -> tuple[TreeEnvironment, FakeTree]:
    """Nodes that serve a tree of two leaves at height 60, which is synchronized."""
    env, chain = TreeEnvironment(*hosts), FakeTree((60, 1, 2))
    chain.publish_to(*env.nodes)
    await env.start_synced()
    return env, chain
