"""Client for a node's REST API.

Only `broadcast` and `tx` concern a single share: the first publishes it, the second is used for public transactions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import httpx

from helper.chain.json_fields import Fields, loads
from helper.chain.models import (
    MAX_LEAVES,
    Block,
    BlockHead,
    LeafBlock,
    NodeInfo,
    Round,
    RoundList,
    TreeState,
    TxResult,
    parse_block,
    parse_head,
    parse_leaves,
    parse_node_info,
    parse_round,
    parse_rounds,
    parse_syncing,
    parse_tree,
    parse_tree_at,
    parse_tx,
)
from helper.chain.node_http import (
    BLOCK,
    CONNECTIONS,
    PAGE,
    SMALL,
    TIMEOUT,
    Answer,
    AnswerTooLong,
    NodeHttp,
    Unanswered,
    parse_answer,
)
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.round_listing import ListedRound, Total, parse_listing, parse_totals
from helper.chain.verdicts import Outcome, Verdict, classify, presentable
from helper.errors import ChainAnswerError, ChainUnavailable, InvalidAnswer

T = TypeVar("T")

LEAF_WINDOW = 1000
"""Maximum span of a request for leaves, in blocks (to − from)."""

_VOTE = "/shielded-vote/v1"
_COSMOS = "/cosmos/base/tendermint/v1beta1"
_LOWEST = re.compile(r"lowest (?:height )?is (\d{1,18})\b")
_LEAF_BYTES = 48  # approximate size of a leaf in a page


class HeightGoneError(ChainAnswerError):
    """The node has pruned this height. Not a fault of the node.

    Attributes:
        lowest: the lowest height that the node reports to have, None if it reports none.
    """

    def __init__(self, message: str, lowest: int | None = None) -> None:
        match = _LOWEST.search(message)
        super().__init__(message)
        self.lowest = int(match.group(1)) if lowest is None and match else lowest


class ChainClient:
    """Client for one node's REST API.

    Every method except `broadcast` raises `ChainUnavailable` if the node did not answer and `ChainAnswerError` if its
    answer is invalid. `timeout` applies to each request.

    Attributes:
        name: host and port, for logs.
        url: the configured URL; may contain credentials, so it is never logged.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = TIMEOUT,
        transport: httpx.AsyncBaseTransport | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        self._http = NodeHttp(url, timeout=timeout, transport=transport, connections=connections)
        self.name = self._http.name
        self.url = url

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    @property
    def slow(self) -> bool:
        """Whether a call has been in progress for a long time."""
        return self._http.slow

    async def rounds(self) -> RoundList:
        """All rounds of the chain."""
        return await self._get(f"{_VOTE}/rounds", parse_rounds, limit=PAGE)

    async def round(self, round_id: bytes) -> Round | None:
        """The round with this id, None if the node does not know it."""

        def parse(answer: Answer) -> Round | None:
            if answer.status == 500 and "vote round not found" in _error(answer):
                return None
            parsed = parse_round(_value(answer, "round"))
            if parsed.round_id != round_id:
                raise InvalidAnswer("round: the node returned another round")
            return parsed

        return await parse_answer(await self._http.get(f"{_VOTE}/round/{round_id.hex()}"), parse)

    async def listing(self) -> list[ListedRound]:
        """All rounds with titles and labels, for display."""
        return await self._get(f"{_VOTE}/rounds", parse_listing, limit=PAGE)

    async def totals(self, round_id: bytes) -> list[Total]:
        """The result of a finalized round."""
        return await self._get(f"{_VOTE}/tally-results/{round_id.hex()}", parse_totals)

    async def tree_latest(self, round_id: bytes) -> TreeState | None:
        """The newest root of a round's tree, None while it has no leaves or the round is unknown."""
        return await self._get(f"{_VOTE}/commitment-tree/{round_id.hex()}/latest", parse_tree)

    async def tree_at(self, round_id: bytes, height: int) -> TreeState | None:
        """The root of a round's tree at a height, None if none was stored there."""

        def parse(answer: Answer) -> TreeState | None:
            if answer.status == 500 and "no commitment root at height" in _error(answer):
                return None
            return parse_tree_at(_value(answer, "tree"), height)

        answer = await self._http.get(f"{_VOTE}/commitment-tree/{round_id.hex()}/{height}")
        return await parse_answer(answer, parse)

    async def leaves(
        self, round_id: bytes, from_height: int, to_height: int, *, most: int = MAX_LEAVES
    ) -> list[LeafBlock]:
        """All leaves of the heights from `from_height` to `to_height`, read page by page.

        The span of a request is halved while a page is longer than `PAGE` bytes.

        Args:
            round_id: the round.
            from_height: the first height.
            to_height: the last height, included.
            most: maximum number of leaves; more are an error.
        """
        blocks: list[LeafBlock] = []
        start, window, count = max(1, from_height), LEAF_WINDOW, 0
        while start <= to_height:
            end = min(start + window, to_height)
            try:
                page = await self._get(
                    f"{_VOTE}/commitment-tree/{round_id.hex()}/leaves",
                    parse_leaves,
                    params={"from_height": str(start), "to_height": str(end)},
                    limit=PAGE,
                )
            except AnswerTooLong:
                if end == start:
                    raise
                window = (end - start) // 2
                continue
            size = sum(len(block.leaves) for block in page.blocks) // 32
            count += size
            if count > most:
                raise ChainAnswerError(f"leaves: the node returned more than {most}")
            if size * _LEAF_BYTES < PAGE // 4:
                window = min(LEAF_WINDOW, 2 * window + 1)
            if any(not start <= block.height <= end for block in page.blocks):
                raise InvalidAnswer("leaves: a block outside the requested range")
            blocks += page.blocks
            if page.next_from_height is not None and page.next_from_height <= start:
                raise InvalidAnswer("leaves: next_from_height does not increase")
            start = min(page.next_from_height or end + 1, end + 1)
        return blocks

    async def latest_block(self) -> BlockHead:
        """The newest block's head."""
        return await self._get(f"{_COSMOS}/blocks/latest", parse_head, limit=BLOCK)

    async def syncing(self) -> bool:
        """Whether the node is syncing."""
        return await self._get(f"{_COSMOS}/syncing", parse_syncing)

    async def node_info(self) -> NodeInfo:
        """The node's chain id and version."""
        return await self._get(f"{_COSMOS}/node_info", parse_node_info)

    async def block(self, height: int) -> Block | None:
        """The block at a height, None if it does not exist yet.

        Raises:
            HeightGoneError: the node has pruned the block.
        """

        def parse(answer: Answer) -> Block | None:
            if answer.status in (400, 404, 500):
                message = Fields(loads(answer.body, "block"), "block").text("message")
                if "bigger then the chain length" in message or "bigger than the chain length" in message:
                    return None
                raise HeightGoneError(f"block: {presentable(message)}")
            block = parse_block(_value(answer, "block"))
            if block.head.height != height:
                raise InvalidAnswer(f"block: height {block.head.height} was returned for {height}")
            return block

        return await parse_answer(await self._http.get(f"{_COSMOS}/blocks/{height}", limit=BLOCK), parse)

    async def tx(self, tx_hash: bytes) -> TxResult | None:
        """The result of a transaction that is already public, None if the node does not know it (yet)."""

        def parse(answer: Answer) -> TxResult | None:
            if answer.status == 404:
                return None
            return parse_tx(loads(answer.body, "tx") if answer.status == 422 else _value(answer, "tx"))

        return await parse_answer(await self._http.get(f"{_VOTE}/tx/{tx_hash.hex().upper()}"), parse)

    async def broadcast(self, message: RevealMessage) -> Outcome:
        """Send a reveal. Errors of the node or the network are not raised but part of the outcome."""
        try:
            answer = await self._http.post(f"{_VOTE}/reveal-share", message.to_json())
        except Unanswered as error:
            return replace(classify(None, None, error.sent), log=str(error))
        except ChainAnswerError as error:
            return Outcome(Verdict.AMBIGUOUS, log=str(error))
        outcome = classify(answer.status, answer.body, sent=True)
        ours = message.tx_hash().hex().upper()
        if outcome.verdict is Verdict.ACCEPTED and outcome.tx_hash.upper() not in ("", ours):
            return Outcome(
                Verdict.AMBIGUOUS, outcome.code, "the node reports the hash of another transaction than was sent"
            )
        return outcome

    async def validator(self, operator_address: str) -> str | None:
        """The staking status of a validator (`BOND_STATUS_…`), None if it has no staking record."""
        if not operator_address.isascii() or not operator_address.isalnum():
            raise ValueError("not an operator address")
        answer = await self._http.get(f"/cosmos/staking/v1beta1/validators/{operator_address}")
        if answer.status == 404:
            if Fields(loads(answer.body, "validator"), "validator").uint("code") == 5:
                return None
            raise InvalidAnswer("validator: HTTP 404")
        return Fields(_value(answer, "validator"), "validator").child("validator").text("status")

    async def _get(
        self,
        path: str,
        parse: Callable[[object], T],
        *,
        params: dict[str, str] | None = None,
        limit: int = SMALL,
    ) -> T:
        answer = await self._http.get(path, params, limit=limit)
        what = path.rsplit("/", 1)[-1]
        return await parse_answer(answer, lambda answer: parse(_value(answer, what)))


def _value(answer: Answer, what: str) -> object:
    """The JSON of a 200 answer. Raises an error with the node's message for any other status."""
    if answer.status in (502, 503, 504, 429):
        raise ChainUnavailable(f"{what}: HTTP {answer.status} {_error(answer)}".rstrip())
    if answer.status != 200:
        raise InvalidAnswer(f"{what}: HTTP {answer.status} {_error(answer)}".rstrip())
    return loads(answer.body, what)


def _error(answer: Answer) -> str:
    try:
        fields = Fields(loads(answer.body, "error"), "error")
        return presentable(fields.text("error") or fields.text("message"))
    except ChainAnswerError:
        return ""
