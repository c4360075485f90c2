"""Reads blocks of the chain for the follower, the archive and the command line.

Every block is read alike, whether or not it contains shares of this helper, so requests reveal nothing about them. No
request contains a nullifier: all reveals of a round, or complete blocks, are read and filtered locally.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import combinations
from typing import Final, NamedTuple, TypeVar

import anyio

from helper.chain.agreement import Pruned, agreed_block
from helper.chain.chain_data import Anchor, Block, TxResult
from helper.chain.node import Node
from helper.chain.node_http import NoResponse
from helper.chain.node_pool import NodePool, ReadOnlyNodePool, gather_limited
from helper.chain.rest_client import ChainClient, HeightPrunedError
from helper.chain.reveal_transaction import (
    REVEAL_TAG,
    ROUND_TAGS,
    CountedReveal,
    RevealMessage,
    is_counted,
    parse_reveal,
    require_known,
)
from helper.chain.rpc_client import CountedNullifier
from helper.errors import ChainError, ChainResponseError, ChainUnavailable

R = TypeVar("R", bound=Hashable)

Reveals = frozenset[CountedNullifier]
ListUnspent = Callable[[Iterable[CountedNullifier]], Awaitable[list[CountedNullifier]]]

CONCURRENT_BLOCKS: Final = 8
"""Number of blocks that a search, or a loop of the follower, reads concurrently."""
CONCURRENT_REQUESTS: Final = 4
"""Number of concurrent requests of the archive."""
READ_SECONDS: Final = 20.0
"""Seconds in which a node must return a block with its results, so that one node keeps no block from being read. A
block may have any number of results, so the seconds double with each attempt at this block in which a node was late and
the others did not agree."""
MAX_DOUBLINGS: Final = 5
"""Maximum number of times that they double."""
MAX_COMPARED: Final = 256
"""Maximum number of nullifiers in which two nodes may differ and still be compared, as many as a block may count: a
false node may report thousands, and each of them is a query of the thread that stores shares."""
_CONCURRENT_TXS: Final = 8


class BlockReading(NamedTuple):
    """The result of reading a block.

    Attributes:
        reveals: the counted reveals, `Pruned` if no node has the block any more, None if too few nodes agree yet.
        reason: why there is no agreement.
        is_disputed: whether nodes report different reveals.
        is_late: whether there is no agreement and a node did not return the block in time.
        ignored: reveals about which nodes differ, left out because they were spent or of rounds that were not stored.
    """

    reveals: Reveals | Pruned | None
    reason: str = ""
    is_disputed: bool = False
    is_late: bool = False
    ignored: Reveals = frozenset()


class BlockReader:
    """Reads the counted reveals of a block from as many nodes as must agree on them.

    With a consensus RPC this takes one request for each node; with REST, one for the block and one for each reveal.

    Args:
        list_unspent: returns those nullifiers of stored rounds that are not known to be spent.
    """

    def __init__(self, node_pool: NodePool, list_unspent: ListUnspent) -> None:
        self._node_pool = node_pool
        self._list_unspent = list_unspent

    async def read(self, height: int, *, starts_backoff: bool, asks_both: bool, late_reads: int = 0) -> BlockReading:
        """Read a block from the usable nodes until enough agree.

        Args:
            height: a height that enough nodes have reached.
            starts_backoff: whether an error puts a node into backoff. Not for old blocks, because a node that cannot
                return them is still valid for due shares.
            asks_both: whether REST is used too if an RPC has no result: some nodes do not store results.
            late_reads: number of earlier attempts at this block in which a node was late.
        """
        said: dict[str, Reveals | Pruned] = {}
        reasons: list[str] = []
        seconds, is_late = READ_SECONDS * 2 ** min(late_reads, MAX_DOUBLINGS), False
        for node, services in self._node_pool.usable_services.items():
            fact: Reveals | Pruned | None = None
            pruned = 0
            for is_rpc in services:
                try:
                    with anyio.fail_after(seconds):
                        fact = await (_read_by_rpc(node, height) if is_rpc else read_by_rest(node.client, height))
                except (ChainError, TimeoutError) as failure:
                    late = NoResponse(f"block {height}: not read within {seconds:g} s", sent=True)
                    error = failure if isinstance(failure, ChainError) else late
                    is_late |= error is late
                    reasons.append(f"{node.name}: {error}")
                    pruned += isinstance(error, HeightPrunedError)
                    if starts_backoff:
                        self._node_pool.record_error(node, error, rpc=is_rpc)
                    continue
                if fact is not None or not asks_both:
                    break
            if pruned == 1 + (node.rpc is not None):  # each of its services
                fact = Pruned()
            if fact is None:
                continue
            said[node.name] = fact
            agreed, ignored = await self._find_agreed(said, height)
            if agreed is not None:
                return BlockReading(agreed, "; ".join(reasons), ignored=ignored)
        names = sorted(name for name, fact in said.items() if not isinstance(fact, Pruned))
        if len(names) >= self._node_pool.needed:
            reason = f"{', '.join(names)} report different reveals"
            return BlockReading(None, reason, is_disputed=True, is_late=is_late)
        reasons = [f"only {name} reports its reveals" for name in names] + reasons
        return BlockReading(None, "; ".join(reasons) or "the nodes do not have its results yet", is_late=is_late)

    async def _find_agreed(
        self, said: Mapping[str, Reveals | Pruned], height: int
    ) -> tuple[Reveals | Pruned | None, Reveals]:
        """What enough nodes report, and what was left out; nodes that contradict it go into backoff.

        If they differ, only unspent nullifiers of stored rounds are compared: a node without an RPC reports a reveal as
        counted in each block that contains it, since it has only its last result.
        """
        pool = self._node_pool
        agreed = agreed_block(said, pool.needed, len(pool.nodes))
        blocks = {name: fact for name, fact in said.items() if not isinstance(fact, Pruned)}
        ignored: Reveals = frozenset()
        if agreed is None and len(blocks) >= pool.needed:
            differences = [one ^ other for one, other in combinations(blocks.values(), 2)]
            doubtful = frozenset[CountedNullifier]().union(*(each for each in differences if len(each) <= MAX_COMPARED))
            if doubtful:
                ignored = doubtful.difference(await self._list_unspent(doubtful))
                said = {**said, **{name: fact - ignored for name, fact in blocks.items()}}
                agreed = agreed_block(said, pool.needed, len(pool.nodes))
        for node in pool.nodes if isinstance(agreed, frozenset) and len(said) > pool.needed else ():
            if said.get(node.name, agreed) not in (agreed, Pruned()):
                error = ChainResponseError(f"block {height}: two other nodes report different reveals")
                pool.record_error(node, error)
        return agreed, ignored


async def _read_by_rpc(node: Node, height: int) -> Reveals | None:
    assert node.rpc is not None
    reveals = await node.rpc.block_results(height)
    return None if reveals is None else frozenset(reveals)


async def read_by_rest(client: ChainClient, height: int) -> Reveals | None:
    """The counted reveals of a block; None while the node lacks the block or the result of a reveal."""
    block = await client.block(height)
    if block is None:
        return None
    reveals = await _read_results(block, REVEAL_TAG, lambda read: read(client))
    if any(counted is None for _, counted in reveals):
        return None
    messages = [RevealMessage.from_tx(raw) for raw, counted in reveals if counted]
    return frozenset((message.round_id, message.nullifier) for message in messages)


async def _read_results(
    block: Block, tags: bytes, call: Callable[[Callable[[ChainClient], Awaitable[bool | None]]], Awaitable[bool | None]]
) -> list[tuple[bytes, bool | None]]:
    """The transactions of a block with these tags, each with `is_counted`. Every one is looked up in the same way."""
    wanted = [raw for raw in block.txs if raw and raw[0] in tags]

    async def look_up(raw: bytes) -> bool | None:
        async def read(client: ChainClient) -> bool | None:
            return is_counted(await client.tx(sha256(raw).digest()), block.head.height)

        return await call(read)

    return list(zip(wanted, await gather_limited(wanted, look_up, _CONCURRENT_TXS), strict=True))


@dataclass(frozen=True, slots=True)
class HistoryBlock:
    """The voting transactions of a block that succeeded, in block order.

    Attributes:
        time: the block's time in Unix seconds.
        others: transactions that are not reveals, and whether each succeeded: True, or None if that is not known.
    """

    height: int
    time: float
    reveals: tuple[CountedReveal, ...]
    others: tuple[tuple[bytes, bool | None], ...]


class RevealHistory:
    """Reads the voting transactions of blocks for the archive, as nodes agree on them: the archive is never changed.

    It uses separate connections, which it closes, and does not affect the health of nodes, so it never delays a reveal.
    """

    def __init__(self, pool: ReadOnlyNodePool) -> None:
        self._pool = pool
        self._node_pool = pool.node_pool
        self._slots = anyio.Semaphore(CONCURRENT_REQUESTS)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._pool.aclose()

    @property
    def chain_id(self) -> str | None:
        """The chain's id, None until enough nodes have reported it."""
        return self._node_pool.chain_id

    @property
    def head(self) -> int:
        """The newest height that a usable node has reported, 0 before the first."""
        newest = self._node_pool.head
        return 0 if newest is None else newest.height

    @property
    def are_all_nodes_usable(self) -> bool:
        """Whether every configured node is usable."""
        return len(self._node_pool.usable_nodes) == len(self._node_pool.nodes)

    async def read_block(self, height: int) -> HistoryBlock:
        """The voting transactions of a block.

        Raises:
            HeightPrunedError: every usable node has pruned the block.
            ChainError: the block, or the result of one of its reveals, is not available.
        """

        async def read(client: ChainClient) -> Block:
            block = await client.block(height)
            if block is None:
                raise ChainUnavailable(f"block {height}: the node has not reached this height yet")
            return block

        block = await self._call(read)
        assert block is not None
        reveals: list[CountedReveal] = []
        others: list[tuple[bytes, bool | None]] = []
        for raw, counted in await _read_results(block, ROUND_TAGS, self._call):
            message = parse_reveal(raw)
            if message is None:
                others += [] if counted is False else [(raw, counted)]
            elif require_known(counted, height):
                reveals.append(CountedReveal(height, raw, message))
        return HistoryBlock(height, block.head.time, tuple(reveals), tuple(others))

    async def root_at(self, round_id: bytes, height: int) -> bytes | None:
        """The root of a round's tree stored at a height, None if there is none."""

        async def read(client: ChainClient) -> bytes | None:
            state = await client.tree_at(round_id, height)
            return None if state is None else state.root

        return await self._call(read)

    async def _call(self, request: Callable[[ChainClient], Awaitable[R | None]]) -> R | None:
        async with self._slots:
            return await self._pool.call_agreed(request)


class ChainLookups:
    """Lookups of public data on any usable node. `on_progress` is called with the height reached in a long search."""

    def __init__(self, node_pool: NodePool, on_progress: Callable[[int], None] = lambda _: None) -> None:
        self._node_pool = node_pool
        self._on_progress = on_progress

    async def find_transaction(self, tx_hash: bytes) -> tuple[TxResult, bytes | None] | None:
        """Return the result and the bytes of a transaction by its hash, None if no node has it in a block.

        The bytes are None if no node returns the block any more.
        """
        results = await self._node_pool.call_until(
            lambda node: node.client.tx(tx_hash), is_enough=lambda result: result is not None
        )
        if (result := results[-1]) is None:
            return None
        try:
            txs = await self._read_block(result.height)
        except ChainUnavailable:
            txs = []
        return result, next((tx for tx in txs if sha256(tx).digest() == tx_hash), None)

    async def find_reveal(
        self, round_ids: Collection[bytes], nullifier: bytes, heights: range | None = None
    ) -> CountedReveal | None:
        """The reveal that spent a nullifier, None if there is none. No index is searched, as it can have gaps.

        Args:
            round_ids: the rounds to search; all if it is empty.
            nullifier: 32 bytes; never sent to a node.
            heights: the blocks to search; by default, all since the rounds were created, the newest first.

        Raises:
            ChainUnavailable: no node responded, every node has pruned the blocks, or the result of a reveal with this
                nullifier is not known.
        """
        heights = await self._reveal_heights(round_ids) if heights is None else heights
        for start in range(0, len(heights), CONCURRENT_BLOCKS):
            batch = heights[start : start + CONCURRENT_BLOCKS]
            blocks = await gather_limited(batch, self._read_block, CONCURRENT_BLOCKS)
            for height, txs in zip(batch, blocks, strict=True):
                for raw in txs:
                    message = parse_reveal(raw)
                    if message is None or message.nullifier != nullifier:
                        continue
                    if round_ids and message.round_id not in round_ids:
                        continue
                    if require_known(is_counted(await self._result(raw), height), height):
                        return CountedReveal(height, raw, message)
            self._on_progress(batch[-1])
        return None

    async def _reveal_heights(self, round_ids: Collection[bytes]) -> range:
        """The blocks that may contain reveals of rounds, newest first."""
        rounds = (await self._node_pool.call(lambda client: client.rounds())).rounds
        created = [known.created_at_height for known in rounds if not round_ids or known.round_id in round_ids]
        head = self._node_pool.head
        return range(head.height, max(1, min(created)) - 1, -1) if created and head is not None else range(0)

    async def is_counted_in_block(self, raw: bytes, height: int) -> bool:
        """Whether a reveal was counted in the block at a height. False while the result is unknown."""
        result = await self._result(raw)
        if result is None or not is_counted(result, height):
            return False
        return result.height == height or raw in await self._read_block(height)

    async def _result(self, raw: bytes) -> TxResult | None:
        tx_hash = sha256(raw).digest()
        return await self._node_pool.call(lambda client: client.tx(tx_hash))

    async def _read_block(self, height: int) -> Sequence[bytes]:
        """The transactions of a block; none if it does not exist yet."""
        block = await self._node_pool.call(lambda client: client.block(height))
        return () if block is None else block.txs

    async def root_at(self, round_id: bytes, height: int) -> Anchor | None:
        """The root of a round's tree stored at a height, None if there is none."""
        return await self._node_pool.call(lambda client: client.tree_at(round_id, height))
