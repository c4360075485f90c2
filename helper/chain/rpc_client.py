"""Client for a node's consensus RPC.

One request per block covers all shares. The RPC encodes all integers as strings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from helper.chain.broadcast_outcome import sanitize_text
from helper.chain.chain_data import MAX_INT, BlockHead, create_head
from helper.chain.json_fields import Fields, loads
from helper.chain.node_http import (
    BLOCK_LIMIT_BYTES,
    DEFAULT_LIMIT_BYTES,
    UNAVAILABLE_STATUSES,
    NodeHttp,
    NodeResponse,
    parse_response,
)
from helper.chain.rest_client import refusal_of_height
from helper.errors import ChainUnavailable, InvalidResponse

_NOT_YET_MESSAGES = ("less than or equal to the current", "not find results")

CountedNullifier = tuple[bytes, bytes]
"""A round id and a nullifier that was counted in the round."""

T = TypeVar("T")


class RpcClient(NodeHttp):
    """Client for one node's consensus RPC. Raises the same errors as `ChainClient`."""

    async def status(self) -> tuple[BlockHead, bool]:
        """The newest block, and whether the node is syncing."""
        return await self._call("/status", {}, _parse_status)

    async def block_results(self, height: int) -> list[CountedNullifier] | None:
        """The counted reveals of a block, None if it does not exist or is not executed yet.

        Raises:
            HeightPrunedError: the node has pruned the block.
        """
        try:
            return await self._results(height, _parse_reveals)
        except _RpcError as refusal:
            # "not find results": the block is stored but not executed yet, or its results were pruned.
            if any(piece in refusal.data for piece in _NOT_YET_MESSAGES):
                return None
            raise refusal_of_height(str(refusal)) from None

    async def tx_codes(self, height: int) -> list[int] | None:
        """The code of each transaction of a block, 0 if it succeeded. None if the node does not have the results."""
        try:
            return await self._results(height, lambda tx: [tx.uint("code", maximum=2**32)])
        except _RpcError:
            return None

    async def _results(self, height: int, parse: Callable[[Fields], list[T]]) -> list[T]:
        """What `parse` returns for each transaction of a block."""

        def parse_all(result: Fields) -> list[T]:
            if result.uint("height") != height:
                raise InvalidResponse(f"block_results: height {result.uint('height')} was returned for {height}")
            return [value for tx in result.children("txs_results") for value in parse(tx)]

        return await self._call("/block_results", {"height": str(height)}, parse_all, limit=BLOCK_LIMIT_BYTES)

    async def is_spent(self, round_id: bytes, nullifier: bytes) -> bool:
        """Whether a nullifier is spent. Only for nullifiers that are public, or for a trusted node."""
        return await self._stored_value(b"\x01\x02" + round_id + nullifier) == b"\x01"

    async def partial_decryption(self, round_id: bytes, index: int, proposal_id: int, decision: int) -> bytes | None:
        """A validator's partial decryption of one sum as stored: a protobuf message; None if there is none.

        Args:
            index: the validator's index in the key ceremony.
        """
        numbers = b"".join(number.to_bytes(4, "big") for number in (index, proposal_id, decision))
        return await self._stored_value(b"\x12" + round_id + numbers)

    async def _stored_value(self, key: bytes) -> bytes | None:
        """The value of a key in the store of the voting module, None if there is none."""
        query = {"path": '"/store/vote/key"', "data": f"0x{key.hex()}"}
        response = await self._call("/abci_query", query, lambda result: result.child("response"))
        if response.uint("code"):
            raise InvalidResponse(f"abci_query: code {response.uint('code')}")
        return response.decode("value", response.value("value"), None) if response.has("value") else None

    async def _call(
        self, path: str, params: dict[str, str], parse: Callable[[Fields], T], *, limit: int = DEFAULT_LIMIT_BYTES
    ) -> T:
        response = await self.get(path, params, limit=limit)
        return await parse_response(response, lambda response: parse(_parse_result(response, path[1:])))


class _RpcError(InvalidResponse):
    def __init__(self, source: str, data: str) -> None:
        super().__init__(f"{source}: {data}")
        self.data = data


def _parse_result(response: NodeResponse, source: str) -> Fields:
    """The result in a response. Raises an error with the node's message if there is none."""
    if response.status in UNAVAILABLE_STATUSES:
        raise ChainUnavailable(f"{source}: HTTP {response.status}")
    fields = Fields(loads(response.body, source), source)
    if fields.has("error"):
        error = fields.child("error")
        raise _RpcError(source, sanitize_text(error.text("data") or error.text("message")))
    if response.status != 200:
        raise InvalidResponse(f"{source}: HTTP {response.status}")
    return fields.child("result")


def _parse_status(result: Fields) -> tuple[BlockHead, bool]:
    sync = result.child("sync_info")
    head = create_head(
        result.child("node_info").text("network"),
        sync.uint("latest_block_height", maximum=MAX_INT),
        sync.timestamp("latest_block_time"),
    )
    return head, sync.boolean("catching_up")


def _parse_reveals(tx: Fields) -> list[CountedNullifier]:
    """The shares that a transaction counted; none if it failed."""
    if tx.uint("code"):
        return []
    reveals: list[CountedNullifier] = []
    for event in tx.children("events"):
        kind = event.text("type")
        if kind == "reveal_share":
            values = _parse_attributes(event)
            reveals.append((values.hex_bytes("vote_round_id"), values.hex_bytes("share_nullifier")))
        elif kind == "reveal_pool_share":
            reveals += _parse_pool_reveal(_parse_attributes(event))
    return reveals


def _parse_pool_reveal(values: Fields) -> list[CountedNullifier]:
    """The share that a reveal for a delegate's pool counted.

    No chain emits this event yet, so the names of its attributes are those of the plan or of `reveal_share`. An event
    in another form is ignored: no share of this helper is for a pool, and an error would stop the block follower.
    """
    try:
        round_id = values.hex_bytes("round" if values.has("round") else "vote_round_id")
        return [(round_id, values.hex_bytes("share_nf" if values.has("share_nf") else "share_nullifier"))]
    except InvalidResponse:
        return []


def _parse_attributes(event: Fields) -> Fields:
    pairs = {pair.text("key"): pair.text("value") for pair in event.children("attributes")}
    return Fields(pairs, f"{event.path}({event.text('type')})")
