"""Typed values of chain data, and parsers of a node's JSON.

Ids, roots and leaves are raw bytes; times are Unix seconds. Each parser takes the decoded JSON of one response and
raises `ChainResponseError` with the name of the first invalid field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import partial
from typing import TypeVar

from helper.chain.json_fields import Fields
from helper.errors import ChainResponseError, InvalidResponse

T = TypeVar("T")

MAX_LEAVES = 2**24
MAX_ROUNDS = 8192
"""Maximum number of rounds in a list. Reading so many takes less than 0.1 s of the event loop."""
MAX_PROPOSALS = 256
"""Maximum number of a round's proposals, and of options of one. The chain allows 50 and 8."""
MAX_INT = 2**62
"""Maximum of heights and times. Sums of them fit into the store's 64 bits."""
MAX_TEXT_LENGTH = 400
"""Maximum length of a title or label in characters. Longer ones are truncated."""


class RoundStatus(IntEnum):
    """Status of a voting round, numbered as on the chain."""

    ACTIVE = 1
    TALLYING = 2
    FINALIZED = 3
    PENDING = 4


_STATUSES = frozenset(status.value for status in RoundStatus)

ENDED_STATUSES = (RoundStatus.TALLYING, RoundStatus.FINALIZED)
"""The statuses of a round that accepts no more votes."""


class RoundAuthentication(StrEnum):
    """Result of checking the signatures of a round in the published voting configuration.

    Information for people; it never affects shares. Wallets vote only in rounds that are authenticated.
    """

    AUTHENTICATED = "authenticated"
    """A signature by a trusted key is valid."""
    KEY_MISMATCH = "key_mismatch"
    """A signature is valid, but for another public key of the election authority than the chain's."""
    NO_VALID_SIGNATURE = "no_valid_signature"
    """No signature by a trusted key is valid."""
    UNSUPPORTED_VERSION = "unsupported_version"
    """The entry has an `auth_version` other than 2."""
    NOT_LISTED = "not_listed"
    """The configuration has no entry for the round."""
    UNKNOWN = "unknown"
    """There is no configuration yet, or its trusted keys are not known."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposal of a round: id and the option indices that a vote may choose.

    Its texts, the title and the label of each option, are only displayed: nodes need not agree on them.
    """

    id: int
    options: tuple[int, ...]
    title: str = field(default="", compare=False)
    labels: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Round:
    """A voting round.

    Attributes:
        round_id: 32 bytes.
        vote_end_time: Unix seconds; the chain counts a reveal only in a block before it.
        created_at_height: no leaf of the round's tree is in an earlier block.
        authority_key: public key of the election authority, 32 bytes; empty if there is no valid one. Not compared.
    """

    round_id: bytes
    status: RoundStatus
    vote_end_time: int
    proposals: tuple[Proposal, ...]
    created_at_height: int
    authority_key: bytes = field(default=b"", compare=False)


@dataclass(frozen=True, slots=True)
class Anchor:
    """A root of a round's tree that the chain stored at `height`, over the first `size` leaves."""

    height: int
    size: int
    root: bytes


@dataclass(frozen=True, slots=True)
class LeafBlock:
    """Leaves that one block appended, starting at `start_index`: 32 bytes each, concatenated."""

    height: int
    start_index: int
    leaves: bytes


@dataclass(frozen=True, slots=True)
class BlockHead:
    """A block's chain id, height and time (Unix seconds)."""

    chain_id: str
    height: int
    time: float


@dataclass(frozen=True, slots=True)
class Block:
    """A block with its raw transactions, including failed ones."""

    head: BlockHead
    txs: list[bytes]


@dataclass(frozen=True, slots=True)
class BlockIds:
    """The id of a block, and the app hash in its header: the state before it. Base64; "" if not reported."""

    block_id: str
    app_hash: str


@dataclass(frozen=True, slots=True)
class TxResult:
    """Result of an included transaction: code 0 is success, anything else failure."""

    code: int
    height: int
    log: str


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Chain id, build version ("" in development builds) and id of a node ("" if it reports none)."""

    chain_id: str
    version: str
    node_id: str = ""


def find_same_nodes(nodes: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The names of nodes that report the id of an earlier one, each with the name of that one.

    Each node is given by its name and reported id, which is "" if unknown.
    """
    same, first = [], dict[str, str]()
    for name, node_id in nodes:
        if node_id in first:
            same.append((name, first[node_id]))
        elif node_id:
            first[node_id] = name
    return same


@dataclass(frozen=True, slots=True)
class RoundList:
    """The chain's rounds.

    Attributes:
        invalid: why each invalid round is invalid, by round id.
        unknown_status: which statuses this version does not know, by round id.
    """

    rounds: list[Round]
    invalid: dict[bytes, str]
    unknown_status: dict[bytes, str] = field(default_factory=dict)


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
    try:
        status = RoundStatus(fields.uint("status"))
    except ValueError:
        raise fields.invalid_field("status", f"{fields.uint('status')} is not a round status") from None
    proposals = fields.children("proposals")
    if max([len(proposals), *(len(proposal.items("options")) for proposal in proposals)]) > MAX_PROPOSALS:
        raise fields.invalid_field("proposals", f"has more than {MAX_PROPOSALS} proposals or options")
    return Round(
        round_id=fields.base64_bytes("vote_round_id", 32),
        status=status,
        vote_end_time=fields.uint("vote_end_time", maximum=MAX_INT),
        proposals=tuple(map(_parse_proposal, proposals)),
        created_at_height=fields.uint("created_at_height", maximum=MAX_INT),
        authority_key=_displayed(partial(fields.base64_bytes, "ea_pk", 32), b""),
    )


def _parse_proposal(fields: Fields) -> Proposal:
    options = fields.children("options")
    return Proposal(
        id=fields.uint("id", maximum=2**31),
        options=tuple(option.uint("index", maximum=2**31) for option in options),
        title=_displayed(partial(fields.text, "title"), "")[:MAX_TEXT_LENGTH],
        labels=tuple(_displayed(partial(option.text, "label"), "")[:MAX_TEXT_LENGTH] for option in options),
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


def create_head(chain_id: str, height: int, time: float) -> BlockHead:
    """Create a head. Raises `InvalidResponse` if the chain id or the height is missing."""
    # `Fields.text` has replaced control characters with spaces, and no chain id contains a space.
    if not chain_id or len(chain_id) > 128 or " " in chain_id or not chain_id.isprintable():
        raise InvalidResponse("response: the block has no valid chain id")
    if height < 1:
        raise InvalidResponse("response: the block has no height")
    return BlockHead(chain_id, height, time)


def parse_block(response: object) -> Block:
    """Parse `GET blocks/{height}`: head and raw transactions."""
    head = parse_head(response)
    data = Fields(response, "response").child("block").child("data")
    return Block(head, [data.decode(f"txs[{i}]", tx, None) for i, tx in enumerate(data.items("txs"))])


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


@dataclass(frozen=True, slots=True)
class OptionTotal:
    """Total of one option in a finalized round."""

    proposal_id: int
    option: int
    value: int


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
