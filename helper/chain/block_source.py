"""Where a block's counted reveals come from: the consensus RPC in one question, or the REST block and its
transactions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import NoReturn

from helper.chain.copy_quorum import BlockDisputedError, CopyQuorum, SecondCopyMissingError
from helper.chain.gather import gather_limited
from helper.chain.node import Node
from helper.chain.node_pool import NodePool
from helper.chain.rest_client import HeightGoneError
from helper.chain.reveal_transaction import REVEAL_TAG, RevealMessage
from helper.chain.rpc_client import BlockResults, Spent
from helper.chain.verdicts import Verdict, verdict_of
from helper.errors import ChainAnswerError, ChainError, ChainUnavailable

_TX_AT_ONCE = 8


class BlockSource:
    """Blocks from whichever endpoint has them; where two are configured, two must show the same reveals.

    Every block with reveals is compared, not only those with ours: the requests then show nothing about our shares.

    Args:
        quorum: decides whether one copy of a block is enough.
        rests: whether an endpoint that fails is set aside for a while, as for every other call. Old blocks are read
            without that: a node that cannot return one of them is as good as before for shares that are due.
    """

    def __init__(self, endpoints: NodePool, quorum: CopyQuorum, *, rests: bool = True) -> None:
        self._endpoints = endpoints
        self._quorum = quorum
        self._rests = rests

    async def fetch(self, height: int, *, thorough: bool = False) -> BlockResults | None:
        """What a block did. None while it, or the fate of one of its reveals, is not known to any node yet.

        An RPC that says "not yet" is believed, unless `thorough`: then REST is asked too (some nodes keep no
        results of executed blocks).

        Raises `HeightGoneError` when everyone who may be asked says that the height is gone (with the lowest
        height that any of them has), `ChainUnavailable` when nobody could be asked, `ChainAnswerError` when everyone
        who was asked refused, `SecondCopyMissingError` while a second node has to show the reveals, and
        `BlockDisputedError` when nodes show different ones.
        """
        refused: ChainError | None = None
        gone: list[HeightGoneError] = []
        asked = to_come = False
        copies: list[tuple[Node, BlockResults]] = []
        sources = list(self._sources())
        while sources:
            endpoint, rpc = sources.pop(0)
            if to_come and not rpc and not thorough and not copies:
                break
            try:
                results = await (self._by_rpc if rpc else self._by_rest)(endpoint, height)
            except HeightGoneError as error:
                gone.append(error)
                continue
            except ChainError as error:
                if self._rests:
                    self._endpoints.failed(endpoint, error, rpc=rpc)
                refused, asked = error, asked or not isinstance(error, ChainUnavailable)
                continue
            if results is None:
                to_come = True
                continue
            if not copies and not (results.reveals and self._quorum.needs_two):
                return results
            copies.append((endpoint, results))
            sources.sort(key=lambda source: source[0] in [node for node, _ in copies])
            if (agreed := self._agreed(copies, height)) is not None:
                return agreed
        if copies:
            return self._judge(copies, height)
        return None if to_come else _nothing(height, gone, refused, asked=asked)

    async def fetch_leading(
        self, heights: Sequence[int], *, thorough: bool = False
    ) -> tuple[list[BlockResults], ChainError | None]:
        """Fetch blocks at the same time; those before the first that could not be had, and why it could not.

        The reason is None where every block is there, and where a block or the fate of a reveal in it is not known yet.
        """

        async def attempt(height: int) -> BlockResults | ChainError | None:
            try:
                return await self.fetch(height, thorough=thorough)
            except ChainError as error:
                return error

        leading: list[BlockResults] = []
        for result in await gather_limited(heights, attempt, len(heights)):
            if not isinstance(result, BlockResults):
                return leading, result
            leading.append(result)
        return leading, None

    def _agreed(self, copies: Sequence[tuple[Node, BlockResults]], height: int) -> BlockResults | None:
        """The copy that two nodes show, None without one. Nodes that show another one are set aside."""
        node, newest = copies[-1]
        if not any(other is not node and set(copy.reveals) == set(newest.reveals) for other, copy in copies[:-1]):
            return None
        self._quorum.note_agreement(height)
        right = {other for other, copy in copies if set(copy.reveals) == set(newest.reveals)}
        for other in {other for other, _ in copies} - right:
            self._endpoints.failed(other, ChainAnswerError(f"block {height}: two other nodes show different reveals"))
        return newest

    def _judge(self, copies: Sequence[tuple[Node, BlockResults]], height: int) -> BlockResults:
        """The only copy of a block, once it is enough."""
        names = sorted({node.name for node, _ in copies})
        if len(names) > 1:
            self._quorum.note_dispute(height, ", ".join(names))
            raise BlockDisputedError(f"block {height}: {', '.join(names)} show different reveals")
        if not self._quorum.accept_one(height):
            raise SecondCopyMissingError(f"block {height}: no second node has shown its reveals yet")
        return copies[0][1]

    def _sources(self) -> Iterator[tuple[Node, bool]]:
        for endpoint in self._endpoints.fresh_rpc:
            yield endpoint, True
        for endpoint in self._endpoints.fresh:
            yield endpoint, False

    async def _by_rpc(self, endpoint: Node, height: int) -> BlockResults | None:
        assert endpoint.rpc is not None
        return await endpoint.rpc.block_results(height)

    async def _by_rest(self, endpoint: Node, height: int) -> BlockResults | None:
        """Every reveal of the block is asked about, never only ours: the question tells nothing that the
        block does not.
        """
        block = await endpoint.client.block(height)
        if block is None:
            return None
        reveals = [tx for tx in block.txs if tx[:1] == REVEAL_TAG]
        fates = await gather_limited(reveals, lambda tx: self._counted(endpoint, tx, height), _TX_AT_ONCE)
        spent: list[Spent] = []
        for fate in fates:
            if fate is None:
                return None
            spent += fate
        return BlockResults(height, spent, [], [], block.head.time)

    async def _counted(self, endpoint: Node, tx: bytes, height: int) -> list[Spent] | None:
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


def _nothing(height: int, gone: list[HeightGoneError], refused: ChainError | None, *, asked: bool) -> NoReturn:
    """Raise the reason why no node has shown a block, as `BlockSource.fetch` documents."""
    if gone and refused is None:
        told = [error.lowest for error in gone if error.lowest is not None]
        raise HeightGoneError(f"block {height}: {gone[-1]}", min(told, default=None))
    if gone or asked:
        raise ChainAnswerError(f"block {height}: {refused}")
    raise ChainUnavailable(f"block {height}: {refused or 'no endpoint is fresh'}")
