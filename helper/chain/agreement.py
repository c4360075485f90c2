"""Decides what the configured nodes report alike. Pure. Nothing else compares the reports of nodes.

A fact is agreed once `needed` nodes report it: two, or one if only one is configured. One false node among several can
delay an agreement; it can never cause a false one. A node that is silent or behind supports nothing.

The caller leaves out nodes of another chain. It keeps one statement per node and kind of fact, the newest one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Final, Generic, NamedTuple, TypeVar

from helper.chain.chain_data import BlockHead, Proposal, Round, RoundStatus

AGREEING_NODES: Final = 2
"""Nodes that must report a fact alike, if at least that many are configured."""

F = TypeVar("F", bound=Hashable)
B = TypeVar("B", bound=Hashable)
N = TypeVar("N", int, float)


class Said(NamedTuple, Generic[F]):
    """A fact that a node reported, and its newest height before the request."""

    height: int
    fact: F


class Pruned(NamedTuple):
    """A node's statement that it has deleted a block. Its lowest height is no part of the fact."""


class RoundFacts(NamedTuple):
    """What nodes agree on about a round. A field is None until it is agreed.

    Attributes:
        status: the latest status that enough nodes have reached; the chain's own may be later.
        height: the agreed height when a field last changed, at least that of the round's creation. Statements from
            below it do not count.
    """

    created_at_height: int | None = None
    vote_end_time: int | None = None
    proposals: tuple[Proposal, ...] | None = None
    status: RoundStatus | None = None
    height: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether every field is agreed."""
        return None not in self[:4]


_STATUSES: Final = (RoundStatus.PENDING, RoundStatus.ACTIVE, RoundStatus.TALLYING, RoundStatus.FINALIZED)
"""The statuses in the order in which the chain sets them."""


def needed_nodes(configured: int, agree: int = AGREEING_NODES) -> int:
    """How many nodes must report a fact alike, given the operator's setting `agree`."""
    return max(1, min(configured, agree))


def agreed_fact(said: Mapping[str, F], needed: int) -> F | None:
    """The fact that enough nodes report, and more nodes than any other. None if there is none."""
    counts = Counter(said.values())
    most = max(counts.values(), default=0)
    facts = [fact for fact, count in counts.items() if count == most]
    return facts[0] if most >= needed and len(facts) == 1 else None


def agreed_height(heads: Mapping[str, N], needed: int) -> N | None:
    """The greatest height, or block time, that enough nodes have reached; None if too few nodes report one.

    Nodes rarely report equal heads, and a node at a height has all blocks below it.
    """
    return sorted(heads.values(), reverse=True)[needed - 1] if len(heads) >= needed else None


def agreed_height_at(heads: Iterable[BlockHead], needed: int, time: float) -> int | None:
    """The lowest height by which enough nodes report that the chain has reached a time; None if too few do.

    Height and time are of the same node, because a node may be right about one and false about the other.
    """
    heights = sorted(head.height for head in heads if head.time >= time)
    return heights[needed - 1] if len(heights) >= needed else None


def agreed_block(said: Mapping[str, B | Pruned], needed: int, configured: int) -> B | Pruned | None:
    """The content of a block that enough nodes report. An empty block is a content like any other.

    `Pruned` needs every configured node: a height is not given up while a node may still have the block.
    """
    block = agreed_fact({node: fact for node, fact in said.items() if not isinstance(fact, Pruned)}, needed)
    if block is not None:
        return block
    pruned = sum(isinstance(fact, Pruned) for fact in said.values())
    return Pruned() if pruned >= max(configured, 1) else None


def agreed_round(said: Mapping[str, Said[Round]], needed: int, *, known: RoundFacts, height: int) -> RoundFacts:
    """What nodes agree on about a round after these statements, field by field.

    An agreed field keeps its value until enough nodes report another one. The height of creation never changes, and the
    status only advances: a node that reports a later status supports the earlier ones too.

    Args:
        said: each node's newest listing of the round; nodes that do not list it are absent.
        known: what was agreed before; `RoundFacts()` at the first listing.
        height: the agreed height now.
    """
    rounds = {node: fact for node, (at, fact) in said.items() if at >= known.height}
    created = agreed_fact({node: fact.created_at_height for node, fact in rounds.items()}, needed)
    end = agreed_fact({node: fact.vote_end_time for node, fact in rounds.items()}, needed)
    proposals = agreed_fact({node: fact.proposals for node, fact in rounds.items()}, needed)
    reached = agreed_height({node: _STATUSES.index(fact.status) for node, fact in rounds.items()}, needed)
    status = known.status
    if reached is not None and (status is None or reached > _STATUSES.index(status)):
        status = _STATUSES[reached]
    facts = RoundFacts(
        created if known.created_at_height is None else known.created_at_height,
        known.vote_end_time if end is None else end,
        known.proposals if proposals is None else proposals,
        status,
        known.height,
    )
    # A node below the round's creation cannot list it, however low another node's height makes the agreed one.
    return facts if facts == known else facts._replace(height=max(height, known.height, facts.created_at_height or 0))
