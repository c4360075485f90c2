"""Client for a node's consensus RPC.

One request per block covers all shares. The RPC encodes all integers as strings.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx

from helper.chain.counted_reveals import shows_spent
from helper.chain.json_fields import Fields, loads
from helper.chain.models import BlockHead, TxResult, make_head
from helper.chain.node_http import BLOCK, PAGE, SMALL, TIMEOUT, Answer, NodeHttp, parse_answer
from helper.chain.rest_client import HeightGoneError
from helper.chain.verdicts import presentable
from helper.errors import ChainUnavailable, InvalidAnswer

TXS = 100
"""Transactions per page of a search."""

_NOT_YET = ("less than or equal to the current", "not find results")

Spent = tuple[bytes, bytes]
"""A round id and a nullifier that was counted in the round."""

_IndexedTx = tuple[TxResult, Fields, list[Spent]]
"""A search result: the transaction's result, its fields and the shares that it counted."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BlockResults:
    """Counted reveals of one block.

    Attributes:
        reveals: (round id, nullifier) of each counted share; failed transactions are not included.
        time: the block's time if the source reports it, else None.
    """

    height: int
    reveals: list[Spent]
    time: float | None = None


class RpcClient:
    """Client for one node's consensus RPC. Raises the same errors as `ChainClient`.

    Attributes:
        name: host and port, for logs.
    """

    def __init__(
        self, url: str, *, timeout: float = TIMEOUT, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._http = NodeHttp(url, timeout=timeout, transport=transport)
        self.name = self._http.name

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    @property
    def slow(self) -> bool:
        """Whether a call has been in progress for a long time."""
        return self._http.slow

    async def status(self) -> tuple[BlockHead, bool]:
        """The newest block, and whether the node is syncing."""
        return await self._call("/status", {}, _parse_status)

    async def block_results(self, height: int) -> BlockResults | None:
        """The counted reveals of a block, None if it does not exist or is not executed yet.

        Raises:
            HeightGoneError: the node has pruned the block.
        """
        try:
            return await self._call(
                "/block_results", {"height": str(height)}, lambda result: _results_of(result, height), limit=BLOCK
            )
        except _RefusedError as refusal:
            # "not find results": the block is stored but not executed yet, or its results were pruned.
            if any(piece in refusal.data for piece in _NOT_YET):
                return None
            raise HeightGoneError(f"block_results: {refusal.data}") from None

    async def tx_search_reveals(self, round_id: bytes, first: int, last: int) -> list[tuple[int, bytes]]:
        """(height, nullifier) of every share of a round counted in the blocks `first` to `last`, oldest first.

        Raises:
            InvalidAnswer: a counted reveal was included again, and the index has only the later refusal.
        """
        counted: list[tuple[int, bytes]] = []
        async for result, _, reveals in self._reveals_of(round_id, f" AND tx.height>={first} AND tx.height<={last}"):
            if result.code and shows_spent(result):
                raise InvalidAnswer(f"tx_search: the index hides a reveal that block {result.height} contains again")
            if first <= result.height <= last:
                counted += [(result.height, nullifier) for round_, nullifier in reveals if round_ == round_id]
        return counted

    async def reveal_transactions(self, round_id: bytes) -> AsyncIterator[tuple[TxResult, bytes]]:
        """Result and bytes of every indexed reveal of a round, oldest first, read page by page."""
        async for result, tx, _ in self._reveals_of(round_id):
            yield result, tx.decode("tx", tx.text("tx"), None)

    async def _reveals_of(self, round_id: bytes, condition: str = "") -> AsyncIterator[_IndexedTx]:
        """The indexed transactions of a round that meet a further condition in the RPC's query language."""
        query = f"\"reveal_share.vote_round_id='{round_id.hex()}'{condition}\""
        count, page, total = 0, 1, 1
        while count < total:
            try:
                txs, total = await self._call(
                    "/tx_search",
                    {"query": query, "per_page": str(TXS), "page": str(page), "order_by": '"asc"'},
                    _parse_search,
                    limit=PAGE,
                )
            except _RefusedError as refusal:
                if page > 1 and "page should be within" in refusal.data:
                    return
                raise
            for tx in txs:
                yield tx
            count, page = count + len(txs), page + 1
            if not txs:
                return

    async def spent(self, round_id: bytes, nullifier: bytes) -> bool:
        """Whether a nullifier is spent. Only for nullifiers that are public, or for a trusted node."""
        key = b"\x01\x02" + round_id + nullifier
        query = {"path": '"/store/vote/key"', "data": f"0x{key.hex()}"}
        response = await self._call("/abci_query", query, lambda result: result.child("response"))
        if response.uint("code"):
            raise InvalidAnswer(f"abci_query: code {response.uint('code')}")
        if not response.has("value"):
            return False
        return response.decode("value", response.text("value"), None) == b"\x01"

    async def _call(self, path: str, params: dict[str, str], parse: Callable[[Fields], T], *, limit: int = SMALL) -> T:
        answer = await self._http.get(path, params, limit=limit)
        return await parse_answer(answer, lambda answer: parse(_result(answer, path[1:])))


class _RefusedError(InvalidAnswer):
    """The RPC returned an error."""

    def __init__(self, what: str, data: str) -> None:
        super().__init__(f"{what}: {data}")
        self.data = data


def _result(answer: Answer, what: str) -> Fields:
    """The result in an answer. Raises an error with the node's message if there is none."""
    if answer.status in (502, 503, 504, 429):
        raise ChainUnavailable(f"{what}: HTTP {answer.status}")
    fields = Fields(loads(answer.body, what), what)
    if fields.has("error"):
        error = fields.child("error")
        raise _RefusedError(what, presentable(error.text("data") or error.text("message")))
    if answer.status != 200:
        raise InvalidAnswer(f"{what}: HTTP {answer.status}")
    return fields.child("result")


def _parse_status(result: Fields) -> tuple[BlockHead, bool]:
    sync = result.child("sync_info")
    head = make_head(
        result.child("node_info").text("network"),
        sync.uint("latest_block_height", maximum=2**62),
        sync.moment("latest_block_time"),
    )
    return head, sync.flag("catching_up")


def _results_of(result: Fields, height: int) -> BlockResults:
    if result.uint("height") != height:
        raise InvalidAnswer(f"block_results: height {result.uint('height')} was returned for {height}")
    return BlockResults(height, [spent for tx in result.children("txs_results") for spent in _reveals(tx)])


def _parse_search(result: Fields) -> tuple[list[_IndexedTx], int]:
    """The transactions of a page of a search, and the total of all pages."""
    txs = result.children("txs")
    if len(txs) > TXS:
        raise InvalidAnswer(f"tx_search: {len(txs)} transactions on a page of {TXS}")
    return [_indexed(tx) for tx in txs], result.uint("total_count")


def _indexed(tx: Fields) -> _IndexedTx:
    fields = tx.child("tx_result")
    result = TxResult(fields.uint("code", maximum=2**32), tx.uint("height", maximum=2**62), fields.text("log"))
    return result, tx, _reveals(fields)


def _reveals(tx: Fields) -> list[Spent]:
    """The shares that a transaction counted; none if it failed."""
    if tx.uint("code"):
        return []
    events = (event for event in tx.children("events") if event.text("type") == "reveal_share")
    values = (_attributes(event) for event in events)
    return [(value.digest("vote_round_id"), value.digest("share_nullifier")) for value in values]


def _attributes(event: Fields) -> Fields:
    pairs = {pair.text("key"): pair.text("value") for pair in event.children("attributes")}
    return Fields(pairs, f"{event.where}({event.text('type')})")
