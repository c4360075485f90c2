"""`ChainClient` and `RpcClient` without HTTP, over the simulated nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeVar, cast

from helper.chain.models import (
    MAX_LEAVES,
    Block,
    BlockHead,
    LeafBlock,
    NodeInfo,
    RoundList,
    RoundStatus,
    TreeState,
    TxResult,
)
from helper.chain.node import Node
from helper.chain.node_http import SLOW, Answer, NodeHttp
from helper.chain.rest_client import ChainClient, HeightGoneError
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.rpc_client import BlockResults, RpcClient
from tests.simulation.node import Fault, SimNode

T = TypeVar("T")


class _Line:
    """What `ChainClient.broadcast` posts through."""

    def __init__(self, client: SimClient) -> None:
        self._client = client
        self.message: RevealMessage | None = None

    async def post(self, path: str, body: dict[str, object]) -> Answer:
        assert self.message is not None
        return await self._client.node.take(self.message)


class Life:
    """Whether the service that asks still lives."""

    dead = False

    async def check(self) -> None:
        """Never returns for one that was killed."""
        if self.dead:
            await asyncio.get_running_loop().create_future()


class _Calls:
    """The calls to a node, and to one of its services, that are under way."""

    def __init__(self, node: SimNode, life: Life, *, rpc: bool = False) -> None:
        self._node = node
        self._life = life
        self._rpc = rpc
        self._began: list[float] = []

    @property
    def slow(self) -> bool:
        """Whether one of them takes long."""
        return bool(self._began) and asyncio.get_running_loop().time() - self._began[0] > SLOW

    async def reach(self) -> SimNode:
        """The node, once a question of a service that lives has reached it."""
        if self._life.dead:
            await self._life.check()
        began = asyncio.get_running_loop().time()
        self._began.append(began)
        try:
            await self._node.reach(rpc=self._rpc)
        finally:
            self._began.remove(began)
        return self._node

    async def send(self, call: Coroutine[Any, Any, T]) -> T:
        """A broadcast of a service that lives."""
        if self._life.dead:
            call.close()
            await self._life.check()
        began = asyncio.get_running_loop().time()
        self._began.append(began)
        try:
            return await call
        finally:
            self._began.remove(began)


class SimClient(ChainClient):
    """`ChainClient` without HTTP. What a broadcast's answer means is still the real one's word."""

    def __init__(self, node: SimNode, life: Life) -> None:
        self.node = node
        self.name = node.name
        self._life = life
        self._calls = _Calls(node, life)
        self._reach = self._calls.reach

    @property
    def slow(self) -> bool:
        return self._calls.slow

    async def aclose(self) -> None:
        return

    async def rounds(self) -> RoundList:
        node = await self._reach()
        if node.fault is Fault.OTHER_CHAIN:
            return RoundList([], {})
        told = [one.told(node.height) for one in node.chain.rounds.values() if node.knows(one.round_id)]
        if node.fault is Fault.PENDING:
            told = [replace(one, status=RoundStatus.PENDING) for one in told]
        return RoundList(told, {})

    async def tree_latest(self, round_id: bytes) -> TreeState | None:
        node = await self._reach()
        if not node.knows(round_id):
            return None
        state = node.chain.rounds[round_id].tree_at(node.height)
        if state is not None and node.fault is Fault.WRONG_ROOT:
            return replace(state, root=sha256(state.root).digest())
        return state

    async def leaves(
        self, round_id: bytes, from_height: int, to_height: int, *, most: int = MAX_LEAVES
    ) -> list[LeafBlock]:
        node = await self._reach()
        if not node.knows(round_id):
            return []
        return node.chain.rounds[round_id].leaves(from_height, min(to_height, node.height))

    async def latest_block(self) -> BlockHead:
        return (await self._reach()).head()

    async def syncing(self) -> bool:
        await self._life.check()
        return self.node.fault is Fault.SYNCING

    async def node_info(self) -> NodeInfo:
        node = await self._reach()
        return NodeInfo(node.head().chain_id, "")

    async def block(self, height: int) -> Block | None:
        node = await self._reach()
        if height > node.height:
            return None
        _refuse_pruned(node, height)
        block = node.chain.blocks[height]
        return Block(block.head, [tx for tx, _ in block.txs])

    async def tx(self, tx_hash: bytes) -> TxResult | None:
        node = await self._reach()
        return node.chain.indexed(tx_hash, node.height)

    async def broadcast(self, message: RevealMessage) -> Any:
        line = _Line(self)
        line.message = message
        sender = ChainClient.__new__(ChainClient)
        sender._http = cast(NodeHttp, line)
        outcome = await self._calls.send(sender.broadcast(message))
        await self._life.check()
        return outcome


def _refuse_pruned(node: SimNode, height: int) -> None:
    lowest = node.height - 15
    if node.fault is Fault.PRUNED and height < lowest:
        raise HeightGoneError(f"block: height {height} is not available, lowest height is {lowest}")


class SimRpc(RpcClient):
    """`RpcClient` without HTTP."""

    def __init__(self, node: SimNode, life: Life) -> None:
        self.node = node
        self.name = f"rpc.{node.name}"
        self._calls = _Calls(node, life, rpc=True)
        self._reach = self._calls.reach

    @property
    def slow(self) -> bool:
        return self._calls.slow

    async def aclose(self) -> None:
        return

    async def status(self) -> tuple[BlockHead, bool]:
        node = await self._reach()
        return node.head(), node.fault is Fault.SYNCING

    async def block_results(self, height: int) -> BlockResults | None:
        node = await self._reach()
        if height > node.height:
            return None
        _refuse_pruned(node, height)
        return BlockResults(height, list(node.chain.blocks[height].reveals))

    async def tx_search_reveals(self, round_id: bytes, first: int, last: int) -> list[tuple[int, bytes]]:
        node = await self._reach()
        found = [(at, one[1]) for one, at in node.chain.counted.items() if one[0] == round_id]
        return sorted((at, nullifier) for at, nullifier in found if first <= at <= min(last, node.height))

    async def spent(self, round_id: bytes, nullifier: bytes) -> bool:
        node = await self._reach()
        return node.chain.counted.get((round_id, nullifier), 1 << 40) <= node.height


def endpoint_of(node: SimNode, life: Life, *, rpc: bool) -> Node:
    """A node as one life of the service knows it."""
    return Node(SimClient(node, life), SimRpc(node, life) if rpc else None)
