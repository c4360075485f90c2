"""Where a block's counted reveals come from: the consensus RPC in one question, or the REST block and its
transactions.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from helper.at_once import some_at_once
from helper.chain.client import HeightGoneError
from helper.chain.endpoint import Endpoint
from helper.chain.failover import Endpoints
from helper.chain.message import REVEAL_TAG, RevealMessage
from helper.chain.outcome import Verdict, verdict_of
from helper.chain.rpc import BlockResults, Spent
from helper.errors import ChainAnswerError, ChainError, ChainUnavailable

_TX_AT_ONCE = 8


class BlockSource:
    """Blocks from whichever endpoint has them."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    async def fetch(self, height: int, *, thorough: bool = False) -> BlockResults | None:
        """What a block did. None while it, or the fate of one of its reveals, is not known to any node yet.

        An RPC that says "not yet" is believed, unless `thorough`: then REST is asked too (some nodes keep no
        results of executed blocks).

        Raises `HeightGoneError` when everyone who may be asked says that the height is gone (with the lowest
        height that any of them has), `ChainUnavailable` when nobody could be asked, and `ChainAnswerError` when
        everyone who was asked refused.
        """
        refused: ChainError | None = None
        gone: list[HeightGoneError] = []
        asked = to_come = False
        for endpoint, rpc in self._sources():
            if to_come and not rpc and not thorough:
                break
            try:
                results = await (self._by_rpc if rpc else self._by_rest)(endpoint, height)
            except HeightGoneError as error:
                gone.append(error)
                continue
            except ChainError as error:
                self._endpoints.failed(endpoint, error, rpc=rpc)
                refused, asked = error, asked or not isinstance(error, ChainUnavailable)
                continue
            if results is not None:
                return results
            to_come = True
        if to_come:
            return None
        if gone and refused is None:
            told = [error.lowest for error in gone if error.lowest is not None]
            raise HeightGoneError(f"block {height}: {gone[-1]}", min(told, default=None))
        if gone or asked:
            raise ChainAnswerError(f"block {height}: {refused}")
        raise ChainUnavailable(f"block {height}: {refused or 'no endpoint is fresh'}")

    async def lowest(self, gone: int, there: int) -> int | None:
        """The lowest height above `gone`, which no node has, that a node has, found by halving; None when
        `there` is gone too. Raises as `fetch` does.
        """
        if not await self._has(there):
            return None
        while there - gone > 1:
            middle = (gone + there) // 2
            if await self._has(middle):
                there = middle
            else:
                gone = middle
        return there

    async def _has(self, height: int) -> bool:
        try:
            await self.fetch(height)
        except HeightGoneError:
            return False
        return True

    def _sources(self) -> Iterator[tuple[Endpoint, bool]]:
        for endpoint in self._endpoints.fresh_rpc:
            yield endpoint, True
        for endpoint in self._endpoints.fresh:
            yield endpoint, False

    async def _by_rpc(self, endpoint: Endpoint, height: int) -> BlockResults | None:
        assert endpoint.rpc is not None
        return await endpoint.rpc.block_results(height)

    async def _by_rest(self, endpoint: Endpoint, height: int) -> BlockResults | None:
        """Every reveal of the block is asked about, never only ours: the question tells nothing that the
        block does not.
        """
        block = await endpoint.client.block(height)
        if block is None:
            return None
        reveals = [tx for tx in block.txs if tx[:1] == REVEAL_TAG]
        fates = await some_at_once(reveals, lambda tx: self._counted(endpoint, tx, height), _TX_AT_ONCE)
        spent: list[Spent] = []
        for fate in fates:
            if fate is None:
                return None
            spent += fate
        return BlockResults(height, spent, [], [], block.head.time)

    async def _counted(self, endpoint: Endpoint, tx: bytes, height: int) -> list[Spent] | None:
        """The nullifier of an included reveal if it counted, nothing if it failed, None while the node does
        not say.

        The same bytes may be in several blocks, as they are sent again while they do not count. A node's index has one
        of these places, the last (CometBFT's `IndexerService` writes over what is there), and may lag behind the
        blocks. So a failure further down says nothing of this block yet; and one further up because the nullifier is
        spent says that it counted by then. One further up for another reason hides what came of it here, which is then
        taken for a failure too: the round was over by then.
        """
        result = await endpoint.client.tx(sha256(tx).digest())
        if result is None or (result.code and result.height < height):
            return None
        if result.code and (result.height == height or verdict_of(result.code, result.log) is not Verdict.SPENT):
            return []
        message = RevealMessage.from_tx(tx)
        return [(message.round_id, message.nullifier)]
