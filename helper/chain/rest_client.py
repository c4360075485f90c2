"""Client for a node's REST API.

Only `broadcast` and `tx` concern a single share: `broadcast` publishes it, and `tx` is used for public transactions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import anyio

from helper.chain.broadcast_outcome import BroadcastOutcome, Verdict, classify_response, sanitize_text
from helper.chain.chain_data import (
    MAX_LEAVES,
    Anchor,
    Block,
    BlockHead,
    BlockIds,
    LeafBlock,
    NodeInfo,
    OptionTotal,
    Round,
    RoundList,
    TxResult,
    parse_block,
    parse_block_ids,
    parse_head,
    parse_leaves,
    parse_node_info,
    parse_round,
    parse_rounds,
    parse_syncing,
    parse_totals,
    parse_tree,
    parse_tree_at,
    parse_tx,
)
from helper.chain.json_fields import Fields, loads
from helper.chain.node_http import (
    BLOCK_LIMIT_BYTES,
    DEFAULT_LIMIT_BYTES,
    PAGE_LIMIT_BYTES,
    NodeHttp,
    NodeResponse,
    NoResponse,
    RequestProgress,
    ResponseTooLong,
    parse_response,
)
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import ChainResponseError, ChainUnavailable, InvalidResponse

T = TypeVar("T")

LEAF_WINDOW_BLOCKS = 1000
"""Maximum span of a request for leaves, in blocks (to − from)."""

COMMIT_SECONDS = 0.25
"""Seconds after which a query is repeated that a node refused because it was committing a block."""

_COMMITTING_TEXT = b"did not contain latest block height"
_VOTE_PREFIX = "/shielded-vote/v1"
_COSMOS_PREFIX = "/cosmos/base/tendermint/v1beta1"
_LOWEST_HEIGHT_PATTERN = re.compile(r"lowest (?:height )?is (\d{1,18})\b")
_QUERY_ERRORS = (400, 404, 500)  # chains before v1.3 respond 500 to every failed query, newer ones by its cause
_NO_ROUTE = (404, 405)
_LEAF_BYTES = 48  # approximate size of a leaf in a page
_UNREADY_REASONS: Final = {
    "not_started": "generating the verifying keys has not started",
    "warming": "the verifying keys are being generated",
    "failed": "generating the verifying keys failed",
}


class HeightPrunedError(ChainResponseError):
    """The node has pruned this height. Not a fault of the node.

    Attributes:
        lowest_height: the lowest height that the node has according to its message, None if there is none.
    """

    def __init__(self, message: str, lowest_height: int | None = None) -> None:
        match = _LOWEST_HEIGHT_PATTERN.search(message)
        super().__init__(message)
        self.lowest_height = int(match.group(1)) if lowest_height is None and match else lowest_height


def refusal_of_height(message: str) -> InvalidResponse | HeightPrunedError:
    """The error for a node's refusal of a block. Only a known text means that the node has pruned it."""
    return HeightPrunedError(message) if _LOWEST_HEIGHT_PATTERN.search(message) else InvalidResponse(message)


@dataclass(slots=True)
class LeafReading:
    """The leaves of a range of heights as far as they were read.

    Attributes:
        next_height: the first height that was not read.
        window: span of the next request, in blocks.
    """

    first: int
    next_height: int = field(init=False)
    window: int = LEAF_WINDOW_BLOCKS
    count: int = 0
    blocks: list[LeafBlock] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.next_height = self.first


class ChainClient(NodeHttp):
    """Client for one node's REST API.

    Every method except `broadcast` raises `ChainUnavailable` if the node did not respond and `ChainResponseError` if
    its response is invalid. `timeout` applies to each request.
    """

    async def get(
        self, path: str, params: dict[str, str] | None = None, *, limit: int = DEFAULT_LIMIT_BYTES
    ) -> NodeResponse:
        """Send a GET request as `NodeHttp.get` does, once more if the node was committing a block."""
        response = await super().get(path, params, limit=limit)
        if response.status < 400 or _COMMITTING_TEXT not in response.body:
            return response
        await anyio.sleep(COMMIT_SECONDS)
        return await super().get(path, params, limit=limit)

    async def rounds(self) -> RoundList:
        """All rounds of the chain."""
        return await self._get(f"{_VOTE_PREFIX}/rounds", parse_rounds, limit=PAGE_LIMIT_BYTES)

    async def round(self, round_id: bytes) -> Round | None:
        """The round with this id, None if the node does not know it."""

        def parse(response: NodeResponse) -> Round | None:
            if _has_error_text(response, "vote round not found"):
                return None
            parsed = parse_round(_parse_body(response, "round"))
            if parsed.round_id != round_id:
                raise InvalidResponse("round: the node returned another round")
            return parsed

        return await parse_response(await self.get(f"{_VOTE_PREFIX}/round/{round_id.hex()}"), parse)

    async def totals(self, round_id: bytes) -> list[OptionTotal]:
        """The result of a finalized round."""
        return await self._get(f"{_VOTE_PREFIX}/tally-results/{round_id.hex()}", parse_totals)

    async def query(self, path: str) -> object | None:
        """The JSON at a path of the voting module, None if the node does not serve it or knows no such round."""

        def parse(response: NodeResponse) -> object | None:
            if response.status in _NO_ROUTE or _has_error_text(response, "not found"):
                return None
            return _parse_body(response, path.partition("/")[0])

        return await parse_response(await self.get(f"{_VOTE_PREFIX}/{path}", limit=PAGE_LIMIT_BYTES), parse)

    async def tree_latest(self, round_id: bytes) -> Anchor | None:
        """The newest root of a round's tree, None while it has no leaves or the round is unknown."""
        return await self._get(f"{_VOTE_PREFIX}/commitment-tree/{round_id.hex()}/latest", parse_tree)

    async def tree_at(self, round_id: bytes, height: int) -> Anchor | None:
        """The root of a round's tree at a height, None if none was stored there."""

        def parse(response: NodeResponse) -> Anchor | None:
            if _has_error_text(response, "no commitment root at height"):
                return None
            return parse_tree_at(_parse_body(response, "tree"), height)

        response = await self.get(f"{_VOTE_PREFIX}/commitment-tree/{round_id.hex()}/{height}")
        return await parse_response(response, parse)

    async def leaves(
        self, round_id: bytes, from_height: int, to_height: int, *, max_count: int = MAX_LEAVES
    ) -> list[LeafBlock]:
        """All leaves of the heights from `from_height` to `to_height`. More than `max_count` leaves are an error."""
        reading = LeafReading(max(1, from_height))
        await self.read_leaves(round_id, reading, to_height, max_count=max_count)
        return reading.blocks

    async def read_leaves(
        self, round_id: bytes, reading: LeafReading, to_height: int, *, max_count: int, seconds: float = math.inf
    ) -> bool:
        """Continue to read leaves page by page, up to `to_height`, or until `seconds` have passed after a page.

        The span of a request is halved while a page is longer than `PAGE_LIMIT_BYTES`.

        More than `max_count` leaves are an error.

        Returns:
            Whether all were read.
        """
        end_at = anyio.current_time() + seconds
        while reading.next_height <= to_height:
            start = reading.next_height
            end = min(start + reading.window, to_height)
            try:
                blocks, next_height = await self._get(
                    f"{_VOTE_PREFIX}/commitment-tree/{round_id.hex()}/leaves",
                    parse_leaves,
                    params={"from_height": str(start), "to_height": str(end)},
                    limit=PAGE_LIMIT_BYTES,
                )
            except ResponseTooLong:
                if end == start:
                    raise
                reading.window = (end - start) // 2
                continue
            size = sum(len(block.leaves) for block in blocks) // 32
            reading.count += size
            if reading.count > max_count:
                raise ChainResponseError(f"leaves: the node returned more than {max_count}")
            if size * _LEAF_BYTES < PAGE_LIMIT_BYTES // 4:
                reading.window = min(LEAF_WINDOW_BLOCKS, 2 * reading.window + 1)
            if any(not start <= block.height <= end for block in blocks):
                raise InvalidResponse("leaves: a block outside the requested range")
            reading.blocks += [block for block in blocks if block.leaves]
            if next_height is not None and next_height <= start:
                raise InvalidResponse("leaves: next_from_height does not increase")
            reading.next_height = min(next_height or end + 1, end + 1)
            if anyio.current_time() >= end_at:
                break
        return reading.next_height > to_height

    async def latest_block(self) -> BlockHead:
        """The newest block's head."""
        return await self._get(f"{_COSMOS_PREFIX}/blocks/latest", parse_head, limit=BLOCK_LIMIT_BYTES)

    async def is_syncing(self) -> bool:
        """Whether the node is syncing."""
        return await self._get(f"{_COSMOS_PREFIX}/syncing", parse_syncing)

    async def node_info(self) -> NodeInfo:
        """The node's chain id and version."""
        return await self._get(f"{_COSMOS_PREFIX}/node_info", parse_node_info)

    async def block(self, height: int) -> Block | None:
        """The block at a height, None if it does not exist yet.

        Raises:
            HeightPrunedError: the node has pruned the block.
        """

        def parse(response: NodeResponse) -> Block | None:
            if response.status in _QUERY_ERRORS:
                message = Fields(loads(response.body, "block"), "block").text("message")
                if "bigger then the chain length" in message or "bigger than the chain length" in message:
                    return None
                raise refusal_of_height(f"block: {sanitize_text(message)}")
            block = parse_block(_parse_body(response, "block"))
            if block.head.height != height:
                raise InvalidResponse(f"block: height {block.head.height} was returned for {height}")
            return block

        return await parse_response(await self.get(f"{_COSMOS_PREFIX}/blocks/{height}", limit=BLOCK_LIMIT_BYTES), parse)

    async def block_ids(self, height: int) -> BlockIds | None:
        """The id of the block at a height and the app hash in its header, None if the node does not have the block."""

        def parse(response: NodeResponse) -> BlockIds | None:
            return None if response.status in _QUERY_ERRORS else parse_block_ids(_parse_body(response, "block"))

        return await parse_response(await self.get(f"{_COSMOS_PREFIX}/blocks/{height}", limit=BLOCK_LIMIT_BYTES), parse)

    async def tx(self, tx_hash: bytes) -> TxResult | None:
        """The result of a public transaction, None if the node does not know it.

        Events are not read: nodes before v1.5.0 alter their values, and the message itself has round and nullifier.
        """

        def parse(response: NodeResponse) -> TxResult | None:
            if _has_error_text(response, "tx not found"):
                return None
            return parse_tx(loads(response.body, "tx") if response.status == 422 else _parse_body(response, "tx"))

        return await parse_response(await self.get(f"{_VOTE_PREFIX}/tx/{tx_hash.hex().upper()}"), parse)

    async def unready_reason(self) -> str | None:
        """Why the node accepts no reveals yet, None if it does or does not report it, as before v1.4."""

        def parse(response: NodeResponse) -> str | None:
            if response.status in _NO_ROUTE:
                return None
            is_reported = response.status in (200, 503)
            document = loads(response.body, "readiness") if is_reported else _parse_body(response, "readiness")
            return parse_readiness(document)

        return await parse_response(await self.get(f"{_VOTE_PREFIX}/readiness"), parse)

    async def broadcast(self, message: RevealMessage, progress: RequestProgress | None = None) -> BroadcastOutcome:
        """Send a reveal. Errors of the node or the network are not raised but part of the outcome."""
        try:
            response = await self.post(f"{_VOTE_PREFIX}/reveal-share", message.to_json(), progress)
        except NoResponse as error:
            return replace(classify_response(None, None, error.sent), log=str(error))
        except ChainResponseError as error:
            return BroadcastOutcome(Verdict.AMBIGUOUS, log=str(error))
        outcome = classify_response(response.status, response.body, sent=True, retry_after=response.retry_after)
        expected_hash = message.tx_hash().hex().upper()
        if outcome.verdict is Verdict.ACCEPTED and outcome.tx_hash.upper() not in ("", expected_hash):
            return BroadcastOutcome(
                Verdict.AMBIGUOUS, outcome.code, "the node reports a different hash than that of the transaction sent"
            )
        return outcome

    async def validator_status(self, operator_address: str) -> str | None:
        """The staking status of a validator (`BOND_STATUS_…`), None if it has no staking record."""
        if not operator_address.isascii() or not operator_address.isalnum():
            raise ValueError("not an operator address")
        response = await self.get(f"/cosmos/staking/v1beta1/validators/{operator_address}")
        if response.status == 404:
            if Fields(loads(response.body, "validator"), "validator").uint("code") == 5:
                return None
            raise InvalidResponse("validator: HTTP 404")
        return Fields(_parse_body(response, "validator"), "validator").child("validator").text("status")

    async def _get(
        self,
        path: str,
        parse: Callable[[object], T],
        *,
        params: dict[str, str] | None = None,
        limit: int = DEFAULT_LIMIT_BYTES,
    ) -> T:
        response = await self.get(path, params, limit=limit)
        what = path.rsplit("/", 1)[-1]
        return await parse_response(response, lambda response: parse(_parse_body(response, what)))


def _parse_body(response: NodeResponse, source: str) -> object:
    """The JSON of a 200 response. Raises an error with the node's message for any other status."""
    if response.status in (502, 503, 504, 429):
        raise ChainUnavailable(f"{source}: HTTP {response.status} {_error_text(response)}".rstrip())
    if response.status != 200:
        raise InvalidResponse(f"{source}: HTTP {response.status} {_error_text(response)}".rstrip())
    return loads(response.body, source)


def _has_error_text(response: NodeResponse, text: str) -> bool:
    """Whether a query failed with this text in its error, regardless of the status that the node chose."""
    return response.status in _QUERY_ERRORS and text in _error_text(response)


def _error_text(response: NodeResponse) -> str:
    try:
        fields = Fields(loads(response.body, "error"), "error")
        return sanitize_text(fields.text("error") or fields.text("message"))
    except ChainResponseError:
        return ""


def parse_readiness(response: object) -> str | None:
    """Parse `GET readiness`: why the node accepts no reveals, None if it accepts them."""
    fields = Fields(response, "readiness")
    status, error = fields.text("status"), sanitize_text(fields.text("error"))
    if status == "ready":
        return None
    if status not in _UNREADY_REASONS:
        raise fields.invalid_field("status", "not a status of verifying keys")
    return _UNREADY_REASONS[status] + (f": {error}" if error else "")


def reports_unready_keys(body: bytes) -> bool:
    """Whether the body of a 503 says that the node's verifying keys are not ready, so that it processed nothing.

    Nodes before v1.4 have no status and report it as an error.
    """
    try:
        response = loads(body, "readiness")
        fields = Fields(response, "readiness")
        if fields.has("status"):
            return parse_readiness(response) is not None
        return "warming up" in fields.text("error")
    except InvalidResponse:
        return False
