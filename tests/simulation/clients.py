"""`ChainClient` and `RpcClient` over the simulated nodes, without HTTP."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeVar

from helper.chain.chain_data import (
    Anchor,
    Block,
    BlockHead,
    NodeInfo,
    RoundList,
    RoundStatus,
    TxResult,
)
from helper.chain.node import Node
from helper.chain.node_http import RESPONSE_WAIT_SECONDS, SLOW_CALL_SECONDS, NodeResponse, RequestProgress
from helper.chain.rest_client import ChainClient, HeightPrunedError, LeafReading
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.rpc_client import CountedNullifier, RpcClient
from helper.errors import ChainResponseError
from tests.simulation.liar import Lie
from tests.simulation.node import NodeFault, SimNode

T = TypeVar("T")


class _Sender(ChainClient):
    """Posts one reveal to a node."""

    def __init__(self, node: SimNode, message: RevealMessage) -> None:
        self._node = node
        self._message = message

    async def post(self, path: str, body: dict[str, object], progress: RequestProgress | None = None) -> NodeResponse:
        await self._node.connect_to_send()
        if progress is not None:
            await progress.trace("http11.send_request_headers.started", {})
            await progress.trace("http11.send_request_body.complete", {})
        return await self._node.receive_reveal(self._message)


UNKNOWN_ERROR = b'{"code": 13, "message": "disk is busy", "error": {"code": -32603, "data": "disk is busy"}}'
"""An error text that no version of the helper knows, for REST and RPC."""


class _Failing:
    """Gets `UNKNOWN_ERROR` for every request, which the real client interprets."""

    def __init__(self) -> None:
        self.name = "failing"

    async def get(self, path: str, params: Any = None, *, limit: int = 0) -> NodeResponse:
        return NodeResponse(500, UNKNOWN_ERROR)


class _FailingClient(_Failing, ChainClient):
    pass


class _FailingRpc(_Failing, RpcClient):
    pass


class ServiceRun:
    """Kill flag of one service run."""

    is_killed = False

    async def block_if_killed(self) -> None:
        if self.is_killed:
            await asyncio.get_running_loop().create_future()


class _PendingCalls:
    """Calls in flight to a node and one of its endpoints."""

    def __init__(self, node: SimNode, service_run: ServiceRun, *, rpc: bool = False) -> None:
        self._node = node
        self._service_run = service_run
        self._rpc = rpc
        self._started_at: list[float] = []

    @property
    def is_slow(self) -> bool:
        """Whether one of these calls takes long."""
        return bool(self._started_at) and asyncio.get_running_loop().time() - self._started_at[0] > SLOW_CALL_SECONDS

    async def reach_node(self) -> SimNode:
        if self._service_run.is_killed:
            await self._service_run.block_if_killed()
        started_at = asyncio.get_running_loop().time()
        self._started_at.append(started_at)
        try:
            await self._node.simulate_request(rpc=self._rpc)
        finally:
            self._started_at.remove(started_at)
        return self._node

    async def run_broadcast(self, call: Coroutine[Any, Any, T]) -> T:
        if self._service_run.is_killed:
            call.close()
            await self._service_run.block_if_killed()
        started_at = asyncio.get_running_loop().time()
        self._started_at.append(started_at)
        try:
            return await call
        finally:
            self._started_at.remove(started_at)


class SimClient(ChainClient):
    """`ChainClient` without HTTP. It uses the real interpretation of broadcast responses."""

    def __init__(self, node: SimNode, service_run: ServiceRun) -> None:
        self.node = node
        self.name = node.name
        self._service_run = service_run
        self._calls = _PendingCalls(node, service_run)
        self._reach_node = self._calls.reach_node

    @property
    def is_slow(self) -> bool:
        return self._calls.is_slow

    @property
    def response_wait(self) -> float:
        return RESPONSE_WAIT_SECONDS

    async def aclose(self) -> None:
        return

    async def rounds(self) -> RoundList:
        node = await self._reach_node()
        if node.fault is NodeFault.OTHER_CHAIN:
            return RoundList([], {})
        served_rounds = [
            sim_round.to_round(node.height)
            for sim_round in node.chain.rounds.values()
            if node.has_round(sim_round.round_id)
        ]
        if node.fault is NodeFault.PENDING:
            served_rounds = [replace(sim_round, status=RoundStatus.PENDING) for sim_round in served_rounds]
        return RoundList(node.liar.rounds(served_rounds), {})

    async def tree_latest(self, round_id: bytes) -> Anchor | None:
        return await self._tree_at(round_id, 1 << 62)

    async def _tree_at(self, round_id: bytes, height: int) -> Anchor | None:
        """The newest root up to a height."""
        node = await self._reach_node()
        if not node.has_round(round_id):
            return None
        state = node.liar.tree(node.chain.rounds[round_id]).tree_at(min(height, node.height))
        if state is not None and node.fault is NodeFault.WRONG_ROOT:
            return replace(state, root=sha256(state.root).digest())
        return state

    async def tree_at(self, round_id: bytes, height: int) -> Anchor | None:
        state = await self._tree_at(round_id, height)
        return state if state is not None and state.height == height else None

    async def read_leaves(
        self, round_id: bytes, reading: LeafReading, to_height: int, *, max_count: int, seconds: float = math.inf
    ) -> bool:
        node = await self._reach_node()
        if node.has_round(round_id):
            tree = node.liar.tree(node.chain.rounds[round_id])
            reading.blocks += tree.leaves(reading.next_height, min(to_height, node.height))
        reading.next_height = to_height + 1
        return True

    async def latest_block(self) -> BlockHead:
        return (await self._reach_node()).served_head()

    async def is_syncing(self) -> bool:
        await self._service_run.block_if_killed()
        return self.node.fault is NodeFault.SYNCING

    async def node_info(self) -> NodeInfo:
        node = await self._reach_node()
        return NodeInfo(node.served_head().chain_id, "")

    async def block(self, height: int) -> Block | None:
        node = await self._reach_node()
        if node.liar.tells(Lie.ERROR_TEXTS):
            return await _FailingClient().block(height)
        block = node.liar.block(height, node.height)
        if block is None:
            return None
        _raise_if_pruned(node, height)
        return Block(block.head, tuple(tx for tx, _ in block.txs))

    async def tx(self, tx_hash: bytes) -> TxResult | None:
        node = await self._reach_node()
        if node.fault is NodeFault.NO_INDEX:
            raise ChainResponseError("tx: HTTP 500: transaction indexing is disabled")
        return node.liar.find_transaction(tx_hash, node.chain.find_indexed(tx_hash, node.height), node.height)

    async def broadcast(self, message: RevealMessage, progress: RequestProgress | None = None) -> Any:
        outcome = await self._calls.run_broadcast(_Sender(self.node, message).broadcast(message, progress))
        await self._service_run.block_if_killed()
        return outcome


def _raise_if_pruned(node: SimNode, height: int) -> None:
    lowest = node.height - 15
    if node.fault is NodeFault.PRUNED and height < lowest:
        raise HeightPrunedError(f"block: height {height} is not available, lowest height is {lowest}")


class SimRpc(RpcClient):
    def __init__(self, node: SimNode, service_run: ServiceRun) -> None:
        self.node = node
        self.name = f"rpc.{node.name}"
        self._calls = _PendingCalls(node, service_run, rpc=True)
        self._reach_node = self._calls.reach_node

    @property
    def is_slow(self) -> bool:
        return self._calls.is_slow

    async def aclose(self) -> None:
        return

    async def status(self) -> tuple[BlockHead, bool]:
        node = await self._reach_node()
        return node.served_head(), node.fault is NodeFault.SYNCING

    async def block_results(self, height: int) -> list[CountedNullifier] | None:
        node = await self._reach_node()
        if node.liar.tells(Lie.ERROR_TEXTS):
            return await _FailingRpc().block_results(height)
        block = node.liar.block(height, node.height)
        if block is None:
            return None
        _raise_if_pruned(node, height)
        return list(block.reveals)

    async def is_spent(self, round_id: bytes, nullifier: bytes) -> bool:
        node = await self._reach_node()
        is_spent = node.chain.confirmed.get((round_id, nullifier), 1 << 40) <= node.height
        return node.liar.is_spent(nullifier, is_spent)


def create_node(node: SimNode, service_run: ServiceRun, *, rpc: bool) -> Node:
    return Node(SimClient(node, service_run), SimRpc(node, service_run) if rpc else None)
