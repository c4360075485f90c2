"""Reads the counted reveals of a block from as many nodes as must agree on them.

Every block is read alike, whether or not it contains shares of this helper, so requests reveal nothing about them. With
a consensus RPC this takes one request for each node; with REST, one for the block and one for each reveal in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from hashlib import sha256
from typing import Final, NamedTuple

from helper.chain.agreement import Pruned, agreed_block, agreed_height
from helper.chain.counted_reveals import is_counted
from helper.chain.limited_gather import gather_limited
from helper.chain.node import Node
from helper.chain.node_pool import NodePool
from helper.chain.rest_client import ChainClient, HeightPrunedError
from helper.chain.reveal_transaction import REVEAL_TAG, RevealMessage
from helper.chain.rpc_client import CountedNullifier
from helper.errors import ChainError, ChainResponseError

_CONCURRENT_TXS: Final = 8


class BlockReading(NamedTuple):
    """The result of reading a block.

    Attributes:
        reveals: the counted reveals, `Pruned` if no node has the block any more, None if too few nodes agree yet.
        time: the block's time in Unix seconds, if enough nodes have reported it or a later one.
        reason: why there is no agreement.
        is_disputed: whether nodes report different reveals.
    """

    reveals: frozenset[CountedNullifier] | Pruned | None
    time: float | None = None
    reason: str = ""
    is_disputed: bool = False


Reveals = frozenset[CountedNullifier]
ListUnspent = Callable[[Iterable[CountedNullifier]], Awaitable[list[CountedNullifier]]]


class BlockReader:
    """Reads blocks; see the module's docstring.

    Args:
        node_pool: the nodes.
        list_unspent: returns those nullifiers of stored rounds that are not known to be spent.
    """

    def __init__(
        self,
        node_pool: NodePool,
        list_unspent: Callable[[Iterable[CountedNullifier]], Awaitable[list[CountedNullifier]]],
    ) -> None:
        self._node_pool = node_pool
        self._list_unspent = list_unspent

    async def read(self, height: int, *, starts_backoff: bool, asks_both: bool) -> BlockReading:
        """Read a block from the usable nodes until enough agree.

        Args:
            height: a height that enough nodes have reached.
            starts_backoff: whether an error puts a node into backoff. Not for old blocks, because a node that cannot
                return them is still valid for due shares.
            asks_both: whether REST is used too if an RPC has no result: some nodes do not store results.
        """
        said: dict[str, Reveals | Pruned] = {}
        times, reasons = dict[str, float](), list[str]()
        for node, services in self._services().items():
            fact: Reveals | Pruned | None = None
            pruned = 0
            for is_rpc in services:
                try:
                    fact, time = await (_read_by_rpc(node, height) if is_rpc else read_by_rest(node.client, height))
                except ChainError as error:
                    reasons.append(f"{node.name}: {error}")
                    pruned += isinstance(error, HeightPrunedError)
                    if starts_backoff:
                        self._node_pool.record_error(node, error, rpc=is_rpc)
                    continue
                if time is not None:
                    times[node.name] = time
                if fact is not None or not asks_both:
                    break
            if pruned == 1 + (node.rpc is not None):  # each of its services
                fact = Pruned()
            if fact is None:
                continue
            said[node.name] = fact
            agreed = await self._find_agreed(said, height)
            if agreed is not None:
                time = agreed_height(times, self._node_pool.needed)
                return BlockReading(agreed, time, "; ".join(reasons))
        names = sorted(name for name, fact in said.items() if not isinstance(fact, Pruned))
        if len(names) >= self._node_pool.needed:
            return BlockReading(None, reason=f"{', '.join(names)} report different reveals", is_disputed=True)
        reasons = [f"only {name} reports its reveals" for name in names] + reasons
        return BlockReading(None, reason="; ".join(reasons) or "the nodes do not have its results yet")

    def _services(self) -> dict[Node, list[bool]]:
        """The usable nodes, each with its usable services; True is its RPC, which needs fewer requests and is first."""
        services: dict[Node, list[bool]] = {node: [True] for node in self._node_pool.usable_rpc_nodes}
        for node in self._node_pool.usable_nodes:
            services.setdefault(node, []).append(False)
        return services

    async def _find_agreed(self, said: Mapping[str, Reveals | Pruned], height: int) -> Reveals | Pruned | None:
        """What enough nodes report; nodes that contradict it go into backoff.

        If they differ, only unspent nullifiers of stored rounds are compared: a node without an RPC reports a reveal as
        counted in each block that contains it, since it has only its last result.
        """
        pool = self._node_pool
        agreed = agreed_block(said, pool.needed, len(pool.nodes))
        if agreed is None and len(said) >= pool.needed:
            blocks = {name: fact for name, fact in said.items() if not isinstance(fact, Pruned)}
            unspent = frozenset(await self._list_unspent(frozenset[CountedNullifier]().union(*blocks.values())))
            said = {**said, **{name: fact & unspent for name, fact in blocks.items()}}
            agreed = agreed_block(said, pool.needed, len(pool.nodes))
        for node in pool.nodes if isinstance(agreed, frozenset) and len(said) > pool.needed else ():
            if said.get(node.name, agreed) not in (agreed, Pruned()):
                error = ChainResponseError(f"block {height}: two other nodes report different reveals")
                pool.record_error(node, error)
        return agreed


async def _read_by_rpc(node: Node, height: int) -> tuple[Reveals | None, None]:
    assert node.rpc is not None
    reveals = await node.rpc.block_results(height)
    return (None if reveals is None else frozenset(reveals)), None


async def read_by_rest(client: ChainClient, height: int) -> tuple[Reveals | None, float | None]:
    """The counted reveals of a block and its time; None while the node lacks the block or the result of a reveal.

    Raises:
        HeightPrunedError: the node has pruned the block.
        ChainError: the node did not respond, or its response is invalid.
    """
    block = await client.block(height)
    if block is None:
        return None, None
    reveals = [tx for tx in block.txs if tx[:1] == REVEAL_TAG]
    results = await gather_limited(reveals, lambda tx: client.tx(sha256(tx).digest()), _CONCURRENT_TXS)
    counted = list[CountedNullifier]()
    for tx, result in zip(reveals, results, strict=True):
        was_counted = is_counted(result, height)
        if was_counted is None:
            return None, None
        if was_counted:
            message = RevealMessage.from_tx(tx)
            counted.append((message.round_id, message.nullifier))
    return frozenset(counted), block.head.time
