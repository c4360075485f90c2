"""Typed values of chain data. Ids, roots and leaves are raw bytes; times are Unix seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from helper.errors import InvalidResponse

MAX_LEAVES = 2**24
MAX_INT = 2**62
"""Maximum of heights. Sums of them fit into the store's 64 bits."""
MAX_END = 2**53
"""Maximum end of a round, in Unix seconds. A share may be due then, and in milliseconds it fits into 64 bits."""


class RoundStatus(IntEnum):
    """Status of a voting round, numbered as on the chain."""

    ACTIVE = 1
    TALLYING = 2
    FINALIZED = 3
    PENDING = 4


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
    txs: tuple[bytes, ...]


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


def create_head(chain_id: str, height: int, time: float) -> BlockHead:
    """Create a head. Raises `InvalidResponse` if the chain id or the height is missing."""
    # `Fields.text` has replaced control characters with spaces, and no chain id contains a space.
    if not chain_id or len(chain_id) > 128 or " " in chain_id or not chain_id.isprintable():
        raise InvalidResponse("response: the block has no valid chain id")
    if height < 1:
        raise InvalidResponse("response: the block has no height")
    return BlockHead(chain_id, height, time)


@dataclass(frozen=True, slots=True)
class OptionTotal:
    """Total of one option in a finalized round."""

    proposal_id: int
    option: int
    value: int
