"""Client for a node's REST API, and parsers of its responses.

Each parser takes the decoded JSON of one response and raises `ChainResponseError` with the name of the first invalid
field.

Only `broadcast` and `tx` concern a single share: `broadcast` publishes it, and `tx` is used for public transactions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import anyio

from helper.chain.broadcast_outcome import (
    BroadcastOutcome,
    Verdict,
    classify_response,
    create_unanswered,
    sanitize_text,
)
from helper.chain.chain_data import (
    MAX_END,
    MAX_INT,
    MAX_LEAVES,
    Anchor,
    Block,
    BlockHead,
    BlockIds,
    LeafBlock,
    NodeInfo,
    OptionTotal,
    Proposal,
    Round,
    RoundList,
    RoundStatus,
    TxResult,
    create_head,
)
from helper.chain.json_fields import Fields, loads
from helper.chain.node_http import (
    BLOCK_LIMIT_BYTES,
    DEFAULT_LIMIT_BYTES,
    PAGE_LIMIT_BYTES,
    UNAVAILABLE_STATUSES,
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

MAX_ROUNDS = 8192
"""Maximum number of rounds in a list. Reading so many takes less than 0.1 s of the event loop."""
MAX_PROPOSALS = 256
"""Maximum number of a round's proposals, and of options of one. The chain allows 50 and 8."""
MAX_TITLE_CHARACTERS = 400
"""Maximum length of a title or label in characters. Longer ones are truncated."""
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
_STATUSES: Final = frozenset(status.value for status in RoundStatus)
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
        path = f"{_VOTE_PREFIX}/round/{round_id.hex()}"
        known = await self._find(path, "round", parse_round, absent="vote round not found")
        if known is not None and known.round_id != round_id:
            raise InvalidResponse("round: the node returned another round")
        return known

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
        path, parse = f"{_VOTE_PREFIX}/commitment-tree/{round_id.hex()}/{height}", partial(parse_tree_at, height=height)
        return await self._find(path, "tree", parse, absent="no commitment root at height")

    async def leaves(self, round_id: bytes, from_height: int, to_height: int) -> list[LeafBlock]:
        """All leaves of the heights from `from_height` to `to_height`."""
        reading = LeafReading(max(1, from_height))
        await self.read_leaves(round_id, reading, to_height, max_count=MAX_LEAVES)
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
        path = f"{_VOTE_PREFIX}/tx/{tx_hash.hex().upper()}"
        return await self._find(path, "tx", parse_tx, absent="tx not found", statuses=(200, 422))

    async def unready_reason(self) -> str | None:
        """Why the node accepts no reveals yet, None if it does or does not report it, as before v1.4."""

        def parse(response: NodeResponse) -> str | None:
            if response.status in _NO_ROUTE:
                return None
            return parse_readiness(_parse_body(response, "readiness", (200, 503)))

        return await parse_response(await self.get(f"{_VOTE_PREFIX}/readiness"), parse)

    async def broadcast(self, message: RevealMessage, progress: RequestProgress | None = None) -> BroadcastOutcome:
        """Send a reveal. Errors of the node or the network are not raised but part of the outcome."""
        try:
            response = await self.post(f"{_VOTE_PREFIX}/reveal-share", message.to_json(), progress)
        except NoResponse as error:
            return create_unanswered(str(error), may_be_sent=error.sent)
        except ChainResponseError as error:
            return BroadcastOutcome(Verdict.AMBIGUOUS, log=str(error))
        outcome = classify_response(response.status, response.body, retry_after=response.retry_after)
        expected_hash = message.tx_hash().hex().upper()
        if outcome.verdict is Verdict.ACCEPTED and outcome.tx_hash.upper() not in ("", expected_hash):
            log = "the node reports a different hash than that of the transaction sent"
            return BroadcastOutcome(Verdict.AMBIGUOUS, log)
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

    async def _find(
        self, path: str, source: str, parse: Callable[[object], T], *, absent: str, statuses: Sequence[int] = (200,)
    ) -> T | None:
        """The same for what the node may not have: None if the query failed with the text `absent` in its error."""

        def parse_found(response: NodeResponse) -> T | None:
            if _has_error_text(response, absent):
                return None
            return parse(_parse_body(response, source, statuses))

        return await parse_response(await self.get(path), parse_found)


def _parse_body(response: NodeResponse, source: str, statuses: Sequence[int] = (200,)) -> object:
    """The JSON of a response with one of these statuses. Raises an error with the node's message for any other."""
    if response.status in statuses:
        return loads(response.body, source)
    unavailable = response.status in UNAVAILABLE_STATUSES
    raise (ChainUnavailable if unavailable else InvalidResponse)(
        f"{source}: HTTP {response.status} {_error_text(response)}".rstrip()
    )


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


def parse_round(response: object) -> Round:
    """Parse `GET round/{id}`."""
    return _parse_round_fields(Fields(response, "response").child("round"))


def parse_rounds(response: object) -> RoundList:
    """Parse `GET rounds`.

    A round with an invalid field, with a status of a newer chain, or that is listed twice does not affect the others. A
    round without an id makes the entire response invalid.
    """
    valid: dict[bytes, Round] = {}
    invalid: dict[bytes, str] = {}
    unknown_status: dict[bytes, str] = {}
    listed = Fields(response, "response").children("rounds")
    if len(listed) > MAX_ROUNDS:
        raise InvalidResponse(f"rounds: {len(listed)}, more than {MAX_ROUNDS}")
    for fields in listed:
        round_id = fields.base64_bytes("vote_round_id", 32)
        if round_id in valid or round_id in invalid or round_id in unknown_status:
            invalid[round_id] = "listed twice"
            continue
        try:
            status = fields.uint("status")
            if status in _STATUSES:
                valid[round_id] = _parse_round_fields(fields)
            else:
                unknown_status[round_id] = f"status {status} is unknown to this version"
        except ChainResponseError as error:
            invalid[round_id] = str(error)
    return RoundList(
        [known for known in valid.values() if known.round_id not in invalid],
        invalid,
        {round_id: known for round_id, known in unknown_status.items() if round_id not in invalid},
    )


def _parse_round_fields(fields: Fields) -> Round:
    status = fields.uint("status")
    if status not in _STATUSES:
        raise fields.invalid_field("status", f"{status} is not a round status")
    proposals = fields.children("proposals")
    if max([len(proposals), *(len(proposal.items("options")) for proposal in proposals)]) > MAX_PROPOSALS:
        raise fields.invalid_field("proposals", f"has more than {MAX_PROPOSALS} proposals or options")
    return Round(
        round_id=fields.base64_bytes("vote_round_id", 32),
        status=RoundStatus(status),
        vote_end_time=fields.uint("vote_end_time", maximum=MAX_END),
        proposals=tuple(map(_parse_proposal, proposals)),
        created_at_height=fields.uint("created_at_height", maximum=MAX_INT),
        authority_key=_displayed(partial(fields.base64_bytes, "ea_pk", 32), b""),
    )


def _parse_proposal(fields: Fields) -> Proposal:
    options = fields.children("options")
    return Proposal(
        id=fields.uint("id", maximum=2**31),
        options=tuple(option.uint("index", maximum=2**31) for option in options),
        title=_displayed(partial(fields.text, "title"), "")[:MAX_TITLE_CHARACTERS],
        labels=tuple(_displayed(partial(option.text, "label"), "")[:MAX_TITLE_CHARACTERS] for option in options),
    )


def _displayed(parse: Callable[[], T], default: T) -> T:
    """A value that is only displayed. If it is invalid, the round is still used."""
    try:
        return parse()
    except InvalidResponse:
        return default


def parse_tree(response: object) -> Anchor | None:
    """Parse `GET commitment-tree/{id}/latest`: the newest root, None while the tree has none."""
    fields = Fields(response, "response").child("tree")
    if not fields.has("root"):
        return None
    if not fields.has("next_index_at_root"):
        raise fields.invalid_field("next_index_at_root", "missing although there is a root")
    return Anchor(
        height=fields.uint("height", maximum=MAX_INT),
        size=fields.uint("next_index_at_root", maximum=MAX_LEAVES),
        root=fields.base64_bytes("root", 32),
    )


def parse_tree_at(response: object, height: int) -> Anchor | None:
    """Parse `GET commitment-tree/{id}/{height}`: the root stored at that height, None if there is none."""
    fields = Fields(response, "response").child("tree")
    if not fields.has("root"):
        return None
    if fields.uint("height", maximum=MAX_INT) != height:
        raise fields.invalid_field("height", f"{fields.uint('height')} was returned for {height}")
    return Anchor(height, fields.uint("next_index", maximum=MAX_LEAVES), fields.base64_bytes("root", 32))


def parse_leaves(response: object) -> tuple[list[LeafBlock], int | None]:
    """Parse `GET commitment-tree/{id}/leaves`: one page, and the first height of the next one, None at the end."""
    fields = Fields(response, "response")
    blocks = [_parse_leaf_block(block) for block in fields.children("blocks")]
    return blocks, fields.uint("next_from_height", maximum=MAX_INT) or None


def _parse_leaf_block(fields: Fields) -> LeafBlock:
    leaves = [fields.decode(f"leaves[{i}]", leaf, 32) for i, leaf in enumerate(fields.items("leaves"))]
    return LeafBlock(
        height=fields.uint("height", maximum=MAX_INT),
        start_index=fields.uint("start_index", maximum=MAX_LEAVES),
        leaves=b"".join(leaves),
    )


def parse_head(response: object) -> BlockHead:
    """Parse the header of `GET blocks/latest` or `blocks/{height}`."""
    header = Fields(response, "response").child("block").child("header")
    return create_head(header.text("chain_id"), header.uint("height", maximum=MAX_INT), header.timestamp("time"))


def parse_block(response: object) -> Block:
    """Parse `GET blocks/{height}`: head and raw transactions."""
    head = parse_head(response)
    data = Fields(response, "response").child("block").child("data")
    return Block(head, tuple(data.decode(f"txs[{i}]", tx, None) for i, tx in enumerate(data.items("txs"))))


def parse_block_ids(response: object) -> BlockIds:
    """Parse the ids of `GET blocks/{height}`."""
    fields = Fields(response, "response")
    block_id = fields.child("block_id").text("hash") if fields.has("block_id") else ""
    return BlockIds(block_id, fields.child("block").child("header").text("app_hash"))


def parse_syncing(response: object) -> bool:
    """Parse `GET syncing`: whether the node is syncing."""
    fields = Fields(response, "response")
    if not fields.has("syncing"):
        raise fields.invalid_field("syncing", "missing")
    return fields.boolean("syncing")


def parse_node_info(response: object) -> NodeInfo:
    """Parse `GET node_info`: chain id, build version and node id."""
    fields = Fields(response, "response")
    version = fields.child("application_version").text("version") if fields.has("application_version") else ""
    default = fields.child("default_node_info")
    return NodeInfo(default.text("network"), version, default.text("default_node_id"))


def parse_tx(response: object) -> TxResult:
    """Parse `GET tx/{hash}`: code, height and log. The other fields are not reliable and not read."""
    fields = Fields(response, "response")
    if not fields.has("height"):
        raise fields.invalid_field("height", "missing")
    return TxResult(fields.uint("code", maximum=2**32), fields.uint("height", maximum=MAX_INT), fields.text("log"))


def parse_totals(response: object) -> list[OptionTotal]:
    """Parse `GET tally-results/{id}`: the options with votes."""
    return [
        OptionTotal(
            proposal_id=fields.uint("proposal_id", maximum=2**31),
            option=fields.uint("vote_decision", maximum=2**31),
            value=fields.uint("total_value", maximum=2**63),
        )
        for fields in Fields(response, "response").children("results")
    ]
