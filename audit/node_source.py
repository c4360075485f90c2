"""Reads the data of a round from the configured nodes.

All requests are for public data of a whole round. Results of transactions come from a node's consensus RPC, with one
request per block, or from its REST API, with one request per transaction.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from typing import Final, TypeVar

import anyio
import orjson
import structlog

from audit import source as sources
from audit.documents import digest_document, digest_unbound_fields, parse_round_facts
from audit.source import AuditBlock, AuditTx, DataMissing
from audit.transactions import decode_partial_entry, is_of_round
from helper.chain.agreement import agreed_fact
from helper.chain.chain_data import Block, LeafBlock
from helper.chain.json_fields import Fields
from helper.chain.node import Node
from helper.chain.node_http import DEFAULT_TIMEOUT_SECONDS
from helper.chain.node_pool import NodePool, ReadOnlyNodePool, gather_limited
from helper.chain.rest_client import ChainClient
from helper.chain.reveal_transaction import is_counted
from helper.chain.rpc_client import RpcClient
from helper.errors import AuditError, ChainError, ChainUnavailable, InvalidResponse

log = structlog.get_logger("helper.audit")

T = TypeVar("T")

PROBE_SECONDS: Final = 5.0
"""Seconds between two probes of the nodes."""

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each further attempt while no node responds."""

_WINDOW: Final = 8
"""Blocks that are read concurrently; the next ones are read while the previous ones are checked."""

_CONCURRENT_REQUESTS: Final = 8
_MAX_STORED_PARTIALS: Final = 10_000  # One request each. A chain has tens of validators and options.
_NEWEST_ATTEMPTS: Final = 30  # seconds: a node may be some blocks behind
_HEAD_ATTEMPTS: Final = 10
_HEAD_SECONDS: Final = 1.0
_DOCUMENT_SECONDS: Final = 1800.0  # of each node: leaves and roots of a large round need many requests


@asynccontextmanager
async def open_readers(
    nodes: NodePool, *, timeout: float = DEFAULT_TIMEOUT_SECONDS
) -> AsyncGenerator[ReadOnlyNodePool]:
    """Open readers of nodes, and probe the nodes meanwhile: one whose newest block is old is not used."""
    readers = ReadOnlyNodePool(nodes, timeout=timeout)
    monitoring = asyncio.create_task(nodes.monitor(PROBE_SECONDS))
    try:
        yield readers
    finally:
        monitoring.cancel()
        await asyncio.gather(monitoring, return_exceptions=True)
        await readers.aclose()


class NodeSource:
    """The data of one round on the usable nodes of a pool.

    Args:
        nodes: the nodes, which must have been probed.
        round_id: 32 bytes.
        node: the only node whose documents are read; None for all.
    """

    has_all_blocks = True

    def __init__(self, nodes: ReadOnlyNodePool, round_id: bytes, node: Node | None = None) -> None:
        self._nodes = nodes
        self._node_pool = nodes.node_pool
        self._round_id = round_id
        self._node = node
        self._leaves: list[LeafBlock] | None = None

    async def document(self, name: str) -> object:
        """Return a document.

        Raises:
            DataMissing: no node has it.
            ChainUnavailable: no node responded.
        """
        round_hex = self._round_id.hex()
        if name == sources.LEAVES:
            return {"blocks": [_leaf_block_to_json(block) for block in await self._read_leaves()]}
        if name == sources.ROOTS:
            return {"roots": await self._read_roots()}
        height = sources.parse_heads_name(name)
        if height is not None:
            return {"heads": await self._read_heads(height)}
        paths = {
            sources.ROUND: f"round/{round_hex}",
            sources.RESULTS: f"tally-results/{round_hex}",
            sources.SUMMARY: f"vote-summary/{round_hex}",
            sources.PARTIALS: f"partial-decryptions/{round_hex}",
        }
        proposal = name.removeprefix(sources.tally_document(0)[:-1])
        path = paths.get(name, f"tally/{round_hex}/{proposal}")
        document = await self._query(path)
        if document is None and name == sources.PARTIALS:
            document = await self._read_stored_partials()
        if document is None:
            raise DataMissing("not served by the node")
        return document

    async def _read_stored_partials(self) -> object | None:
        """The partial decryptions in the store of a node with RPC: chains before v1 do not serve them otherwise."""
        facts = parse_round_facts(await self.document(sources.ROUND))
        if len(facts.indices) * sum(len(options) for options in facts.options.values()) > _MAX_STORED_PARTIALS:
            return None
        keys = sorted(
            (index, proposal_id, decision)
            for proposal_id, options in facts.options.items()
            for decision in options
            for index in facts.indices.values()
        )
        for node in [node for node in self._node_pool.usable_rpc_nodes if self._node in (None, node)]:
            assert node.rpc is not None
            rpc = node.rpc

            async def read(key: tuple[int, int, int], rpc: RpcClient = rpc) -> dict[str, object] | None:
                stored = await rpc.partial_decryption(self._round_id, *key)
                return None if stored is None else _partial_to_json(key[0], stored)

            try:
                entries = await gather_limited(keys, read, _CONCURRENT_REQUESTS)
            except (ChainError, AuditError):
                continue
            return {"entries": [entry for entry in entries if entry is not None]}
        return None

    async def _call(self, fn: Callable[[ChainClient], Awaitable[T]]) -> T:
        """Call a node. Retries while none responds, and errors of an only node: they may pass.

        Raises:
            DataMissing: no node has the data, or only invalid responses.
            ChainUnavailable: no node responded.
        """
        passing = (ChainUnavailable,) if self._node is None else (ChainUnavailable, DataMissing)
        for seconds in RETRY_SECONDS:
            with suppress(*passing):
                return await self._call_once(fn)
            await anyio.sleep(seconds)
        return await self._call_once(fn)

    async def _call_once(self, fn: Callable[[ChainClient], Awaitable[T]]) -> T:
        try:
            return await self._nodes.call(fn, node=self._node)
        except ChainUnavailable:
            raise
        except ChainError as error:
            raise DataMissing(str(error)) from None

    async def _query(self, path: str) -> object | None:
        return await self._call(lambda client: client.query(path))

    async def _read_leaves(self) -> list[LeafBlock]:
        if self._leaves is None:
            document = await self._query(f"round/{self._round_id.hex()}")
            if document is None:
                raise DataMissing("no such round")
            created = Fields(document, "response").child("round").uint("created_at_height", maximum=2**62)

            async def read(client: ChainClient) -> list[LeafBlock]:
                # a page has few of the heights that one node may claim
                return await client.leaves(self._round_id, created, self._agreed_height())

            self._leaves = await self._call(read)
        return self._leaves

    async def _read_roots(self) -> list[dict[str, object]]:
        heights = [block.height for block in await self._read_leaves()]

        async def read(height: int) -> dict[str, object] | None:
            state = await self._call(lambda client: client.tree_at(self._round_id, height))
            return None if state is None else {"height": height, "root": _b64(state.root)}

        roots = await gather_limited(heights, read, _CONCURRENT_REQUESTS)
        return [root for root in roots if root is not None]

    async def _read_heads(self, height: int) -> list[dict[str, object]]:
        """What each usable node reports about a block and the round."""
        heads: list[dict[str, object]] = []
        for node in self._node_pool.usable_nodes:
            with suppress(ChainError):
                head = await self._read_head(node, height)
                heads += [] if head is None else [head]
        return heads

    async def _read_head(self, node: Node, height: int) -> dict[str, object] | None:
        """What a node reports, None if it lacks the block or the round. Waits, since the block may not exist yet."""
        for left in reversed(range(_HEAD_ATTEMPTS)):
            try:
                ids = await node.client.block_ids(height)
                document = await node.client.query(f"round/{self._round_id.hex()}")
            except ChainError:
                if not left:
                    raise
            else:
                if ids is not None and document is not None:
                    return {
                        "node": node.name,
                        "height": height,
                        "block_id": ids.block_id,
                        "app_hash": ids.app_hash,
                        "round": digest_unbound_fields(parse_round_facts(document)),
                    }
            if left:
                await anyio.sleep(_HEAD_SECONDS)
        return None

    async def blocks(self, first: int) -> AsyncGenerator[AuditBlock]:
        """Iterate over the blocks up to the newest agreed one. Reads ahead.

        Raises:
            DataMissing: no node has a block, for example because all have pruned it.
            ChainUnavailable: no node responded.
        """
        last = await self._wait_for_head()
        reading: asyncio.Task[list[AuditBlock]] | None = None
        try:
            for start in range(first, last + 1 + _WINDOW, _WINDOW):
                window = [] if reading is None else await reading
                heights = range(start, min(start + _WINDOW, last + 1))
                reading = asyncio.create_task(self._read_window(heights))
                for block in window:
                    yield block
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def _wait_for_head(self) -> int:
        """The agreed height.

        Waits for the newest height that any node reports: a round that it reports as finalized has its tally in a block
        up to it. Not for long, because a node may report any height.
        """
        pool = self._node_pool
        await pool.probe_all()
        newest = pool.greatest_height
        for _ in range(_NEWEST_ATTEMPTS):
            if (pool.agreed_height or 0) >= newest:
                break
            await anyio.sleep(_HEAD_SECONDS)
            await pool.probe_all()
        return self._agreed_height()

    def _agreed_height(self) -> int:
        height = self._node_pool.agreed_height
        if height is None:
            raise ChainUnavailable(f"fewer than {self._node_pool.needed} nodes report a height")
        return height

    async def _read_window(self, heights: range) -> list[AuditBlock]:
        return await gather_limited(heights, self._read_block, _WINDOW)

    async def _read_block(self, height: int) -> AuditBlock:
        async def read(client: ChainClient) -> Block:
            block = await client.block(height)
            if block is None:  # this node lags behind the newest one
                raise ChainUnavailable(f"block {height} is not available yet")
            return block

        block = await self._call(read)
        wanted = [at for at, raw in enumerate(block.txs) if is_of_round(raw, self._round_id)]
        codes = await self._read_codes(height, block.txs, wanted)
        return AuditBlock(
            height, block.head.time, tuple(AuditTx(block.txs[at], code) for at, code in zip(wanted, codes, strict=True))
        )

    async def _read_codes(self, height: int, txs: Sequence[bytes], wanted: list[int]) -> list[int | None]:
        """The codes of some transactions of a block, None for those that are not known."""
        if not wanted:
            return []
        for node in self._node_pool.usable_rpc_nodes:
            assert node.rpc is not None
            try:
                codes = await node.rpc.tx_codes(height)
            except ChainError as error:
                self._node_pool.record_error(node, error, rpc=True)
                continue
            if codes is not None and len(codes) == len(txs):
                return [codes[at] for at in wanted]

        async def look_up(raw: bytes) -> int | None:
            tx_hash = sha256(raw).digest()
            counted = is_counted(await self._call(lambda client: client.tx(tx_hash)), height)
            return None if counted is None else int(not counted)

        return await gather_limited([txs[at] for at in wanted], look_up, _CONCURRENT_REQUESTS)


class AgreedSource(NodeSource):
    """The documents of a round that enough nodes report alike. One false node decides nothing in them."""

    def __init__(self, nodes: ReadOnlyNodePool, round_id: bytes) -> None:
        super().__init__(nodes, round_id)
        self._sources = {node: NodeSource(nodes, round_id, node) for node in nodes.node_pool.nodes}
        self._differing: set[str] = set()

    async def document(self, name: str) -> object:
        """Return a document, of heads those that agree.

        Raises:
            DataMissing: enough nodes do not have it. Of two nodes, one may have no RPC for partial decryptions, which
                are also in the blocks, or may have pruned the block of the heads: these need two nodes that have them.
            ChainUnavailable: too few nodes report the same.
        """
        needed, is_heads = self._node_pool.needed, sources.parse_heads_name(name) is not None
        found: dict[str, bytes] = {}
        said: dict[str, str] = {}  # the digest of what each node serves, "" for nothing
        texts: dict[str, str] = {}
        agreed: str | None = None
        for node in [node for node in self._node_pool.usable_nodes if node in self._sources]:
            try:
                with anyio.fail_after(_DOCUMENT_SECONDS):
                    document = await self._read(node, name)
                found[node.name] = sources.encode_document(document)
                said[node.name] = digest_document(name, document, self._round_id)
                texts[node.name] = f"reports {said[node.name][:8]}"
            except (DataMissing, InvalidResponse) as error:
                said[node.name], texts[node.name] = "", str(error)
            except ChainError as error:
                texts[node.name] = str(error)
            except TimeoutError:
                del self._sources[node]  # it delays one document only
                texts[node.name] = f"not read within {_DOCUMENT_SECONDS:g} s"
            agreed = agreed or agreed_fact({key: digest for key, digest in said.items() if digest}, needed)
            if agreed and not is_heads:
                break
        reason = "; ".join(f"{node}: {text}" for node, text in texts.items())
        if not agreed:
            is_optional = is_heads or name == sources.PARTIALS
            is_served_alike = len(said) >= needed and len(set(said.values()) - {""}) == 1
            if list(said.values()).count("") >= needed or (is_optional and is_served_alike):
                raise DataMissing(reason)
            raise ChainUnavailable(f"{name}: too few nodes report the same ({reason or 'none is in sync'})")
        for node_name in {node for node, digest in said.items() if digest not in ("", agreed)} - self._differing:
            self._differing.add(node_name)
            log.error(
                "node_document_differs", endpoint=node_name, round=self._round_id.hex(), reason=f"{name}: {reason}"
            )
        alike = [found[node] for node, digest in said.items() if digest == agreed]
        if is_heads:
            return {"heads": [head for encoded in alike for head in orjson.loads(encoded)["heads"]]}
        return orjson.loads(min(alike, key=len))  # a false node can only add what no check reads

    async def _read(self, node: Node, name: str) -> object:
        height = sources.parse_heads_name(name)
        if height is None:
            return await self._sources[node].document(name)
        head = await self._read_head(node, height)
        if head is None:
            raise DataMissing("it lacks the block or the round")
        return {"heads": [head]}


def _leaf_block_to_json(block: LeafBlock) -> dict[str, object]:
    leaves = [_b64(block.leaves[at : at + 32]) for at in range(0, len(block.leaves), 32)]
    return {"height": block.height, "start_index": block.start_index, "leaves": leaves}


def _partial_to_json(index: int, stored: bytes) -> dict[str, object]:
    entry = decode_partial_entry(stored)
    return {
        "validator_index": index,
        "proposal_id": entry.proposal_id,
        "vote_decision": entry.decision,
        "partial_decrypt": _b64(entry.point),
        "dleq_proof": _b64(entry.proof),
    }


def _b64(value: bytes) -> str:
    return b64encode(value).decode()
