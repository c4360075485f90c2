"""One arbitrary liar among the nodes: what `helper.chain.agreement` and `helper.chain.ledger` make of every statement.

The models hold no second rule of agreement. They draw what the chain and each node do, call the real functions, and
compare the result with the true chain, which no function sees. An honest node may be silent, behind or slow; the liar
says anything, and something else each time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import NamedTuple

from helper.chain import agreement
from helper.chain.agreement import Pruned, RoundFacts, Said
from helper.chain.chain_data import Proposal, Round, RoundStatus
from helper.store import ledger
from helper.store.ledger import Ledger
from tests.explorer.search import BrokenPromiseError, Exploration, Label, explore, replace_at

LIAR = "liar"
Block = tuple[int, tuple[str, ...]]  # height and reveals
ROUND_HEIGHTS = {"A": (1, 2), "B": (2, 4)}
"""First and last height of the reveals of two rounds."""


@cache
def true_block(height: int) -> Block:
    """The block of the true chain: one reveal of each round that is open at this height."""
    reveals = (f"{name}{height}" for name, (first, last) in ROUND_HEIGHTS.items() if first <= height <= last)
    return height, tuple(reveals)


@dataclass(frozen=True)
class Nodes:
    """The configured nodes.

    Attributes:
        honest: number of honest nodes.
        has_liar: whether one more node lies.
        pruned: greatest height that each honest node has pruned.
        greatest: the greatest height of the true chain.
    """

    honest: int = 2
    has_liar: bool = True
    pruned: tuple[int, ...] = (0, 0)
    greatest: int = 4

    @property
    def configured(self) -> int:
        return self.honest + self.has_liar

    @property
    def needed(self) -> int:
        """Number of nodes that must agree."""
        return agreement.needed_nodes(self.configured)


class BlockState(NamedTuple):
    """The true height, the height of each honest node, and what the service has stored or tried.

    Attributes:
        stored: what was stored for each height from 0; None before.
        deferred: heights whose last attempt failed. Lost in a crash.
    """

    chain: int
    heads: tuple[int, ...]
    ledger: Ledger
    stored: tuple[Block | Pruned | None, ...]
    deferred: frozenset[int] = frozenset()


class BlocksModel:
    """Heads and blocks: a lie may delay a height, never skip it, and after it every height is read."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._names = [f"honest{number}" for number in range(nodes.honest)]
        self._finished = set[tuple[int, Ledger]]()
        self._false_heads = (None, *range(nodes.greatest + 2)) if nodes.has_liar else (None,)
        self._lies: tuple[str | Pruned | None, ...] = (None,)
        if nodes.has_liar:
            self._lies = (None, "true", "empty", "other", Pruned())

    def initial(self) -> BlockState:
        nodes = self._nodes
        return BlockState(0, (0,) * nodes.honest, ledger.start_ledger(1), (None,) * (nodes.greatest + 1))

    def steps(self, state: BlockState) -> Iterator[tuple[Label, BlockState]]:
        if state.chain < self._nodes.greatest:
            yield ("grow",), state._replace(chain=state.chain + 1)
        for number, head in enumerate(state.heads):
            if head < state.chain:
                yield ("catch_up", number), state._replace(heads=replace_at(state.heads, number, head + 1))
        if state.deferred:
            yield ("wait_or_crash",), state._replace(deferred=frozenset())
        yield ("rescan",), state._replace(ledger=_stored(ledger.mark_unread(state.ledger, 1, state.chain)))
        for is_silent in product((False, True), repeat=self._nodes.honest):
            heads = {self._names[n]: head for n, head in enumerate(state.heads) if not is_silent[n]}
            agreed = {
                agreement.agreed_height(heads if false is None else heads | {LIAR: false}, self._nodes.needed): false
                for false in self._false_heads
            }
            for agreed_head, false_head in agreed.items():
                for lie in self._lies if agreed_head is not None else ():
                    after = self._read(state, [*heads], agreed_head, lie)
                    if after is not None:
                        yield ("read", "from", *heads, "false head", false_head, "lie", lie), after

    def _read(
        self, state: BlockState, speaking: Collection[str], head: int | None, lie: str | Pruned | None
    ) -> BlockState | None:
        """Select the next height up to the agreed one and read it from all nodes; None if there is none."""
        nodes = self._nodes
        if head is None or head > state.chain:
            raise BrokenPromiseError(f"the agreed height {head} is above the chain's")
        retry_at = dict.fromkeys(state.deferred, 1.0)
        selected = ledger.next_heights(state.ledger, (0, head), retry_at, 0.0, 1)
        unread = {height for height in range(1, head + 1) if not ledger.is_read(state.ledger, height, height)}
        if [*selected] != sorted(unread - state.deferred, reverse=True)[:1]:
            raise BrokenPromiseError(f"{selected} was selected of {unread} without {set(state.deferred)}")
        if not selected:
            return None
        height = selected[0]
        said: dict[str, Block | Pruned] = {}
        for number, name in enumerate(self._names):
            if name in speaking and height <= state.heads[number]:
                said[name] = Pruned() if height <= nodes.pruned[number] else true_block(height)
        if isinstance(lie, Pruned):
            said[LIAR] = lie
        elif lie is not None:
            said[LIAR] = {"true": true_block(height), "empty": (height, ()), "other": (height, ("X",))}[lie]
        block = agreement.agreed_block(said, nodes.needed, nodes.configured)
        if block is None:
            return state._replace(deferred=state.deferred | {height})
        return state._replace(
            ledger=_stored(ledger.mark_read(state.ledger, height, height)),
            stored=replace_at(state.stored, height, block),
        )

    def check(self, state: BlockState) -> None:
        read = [height for height in range(1, state.ledger.top + 1) if ledger.is_read(state.ledger, height, height)]
        canonical = ledger.start_ledger(1)
        for height in read:
            canonical = ledger.mark_read(canonical, height, height)
            is_pruned = (
                isinstance(state.stored[height], Pruned) and min(self._nodes.pruned[: self._nodes.honest]) >= height
            )
            if state.stored[height] != true_block(height) and not is_pruned:
                raise BrokenPromiseError(f"height {height} counts as read, but {state.stored[height]} is stored")
        if state.ledger != canonical:
            raise BrokenPromiseError(f"the ledger is {state.ledger}, but these heights were read: {read}")
        for name, (first, last) in ROUND_HEIGHTS.items():
            blocks = [block for block in state.stored if block is not None and not isinstance(block, Pruned)]
            reveals = {reveal for _, block_reveals in blocks for reveal in block_reveals}
            missing = [f"{name}{height}" for height in range(first, last + 1) if f"{name}{height}" not in reveals]
            if (
                ledger.is_read(state.ledger, first, last)
                and missing
                and not max(self._nodes.pruned[: self._nodes.honest])
            ):
                raise BrokenPromiseError(f"round {name} may close, but {missing} would be reported as failed")
        if (state.chain, state.ledger) not in self._finished:
            self._check_finish(state)
            self._finished.add((state.chain, state.ledger))

    def _check_finish(self, state: BlockState) -> None:
        """Check that every height is read once all nodes are honest and in sync."""
        nodes = self._nodes
        position = state.ledger
        unread = ledger.count_heights(ledger.find_unread(position, 0, state.chain))
        for height in ledger.next_heights(position, (0, state.chain), {}, 0.0, nodes.greatest):
            copies = sum(height > lowest for lowest in nodes.pruned[: nodes.honest]) + nodes.has_liar
            said: dict[str, Block | Pruned] = {str(number): true_block(height) for number in range(copies)}
            said |= {str(number): Pruned() for number in range(copies, nodes.configured)}
            if agreement.agreed_block(said, nodes.needed, nodes.configured) is None and copies >= nodes.needed:
                raise BrokenPromiseError(f"height {height} is not read although {copies} nodes have it")
            position, unread = ledger.mark_read(position, height, height), unread - 1
        if unread or not ledger.is_read(position, 1, state.chain):
            raise BrokenPromiseError(f"{position} does not contain every height up to {state.chain}")


class RoundState(NamedTuple):
    """The true height, the height of each honest node, and what is agreed on the round."""

    chain: int
    heads: tuple[int, ...]
    known: RoundFacts


OPTIONS, OTHER_OPTIONS = (Proposal(1, (0, 1)),), (Proposal(2, (0,)),)
FALSE_END = 99


def true_round(name: str, height: int) -> Round | None:
    """A round of the true chain. A's end is postponed at 2 and A is tallied from 4; B begins at 2 as PENDING."""
    if name == "A" and height >= 1:
        status = RoundStatus.TALLYING if height >= 4 else RoundStatus.ACTIVE
        return Round(b"A", status, 30 if height < 2 else 40, OPTIONS, 1)
    if name == "B" and height >= 2:
        status = RoundStatus.PENDING if height < 3 else RoundStatus.ACTIVE
        return Round(b"B", status, 50, OPTIONS if height < 4 else OTHER_OPTIONS, 2)
    return None


class RoundsModel:
    """Rounds: every agreed field was true, and after a lie every field is as on the chain."""

    def __init__(self, name: str, nodes: Nodes) -> None:
        self._name, self._nodes = name, nodes
        self._history = [true_round(name, height) for height in range(nodes.greatest + 1)]
        ends = {known.vote_end_time for known in self._history if known is not None} | {FALSE_END}
        lies = product((0, 1 << 40), sorted(ends), RoundStatus, (OPTIONS, OTHER_OPTIONS), (1, 2))
        self._lies = [
            Said(head, Round(name.encode(), status, end, options, at)) for head, end, status, options, at in lies
        ]
        self._outcomes = cache(self._find_outcomes)  # few of its inputs differ between states

    def initial(self) -> RoundState:
        return RoundState(0, (0,) * self._nodes.honest, RoundFacts())

    def steps(self, state: RoundState) -> Iterator[tuple[Label, RoundState]]:
        nodes = self._nodes
        if state.chain < nodes.greatest:
            yield ("grow",), state._replace(chain=state.chain + 1)
        for number, head in enumerate(state.heads):
            if head < state.chain:
                yield ("catch_up", number), state._replace(heads=replace_at(state.heads, number, head + 1))
        # An answer may be older than a node's newest head.
        for heights in product(*([None, *range(max(0, head - 1), head + 1)] for head in state.heads)):
            for lie, after in self._outcomes(heights, state.known).items():
                if after != state.known:
                    yield ("list", heights, "lie", lie), RoundState(state.chain, state.heads, after)

    def _find_outcomes(
        self, heights: tuple[int | None, ...], known: RoundFacts
    ) -> dict[Said[Round] | None, RoundFacts]:
        """What may be agreed after honest nodes have listed the round at these heights, each with one lie as cause."""
        alone = self._list(heights, None, known)
        self._check_step(known, alone)
        outcomes: dict[RoundFacts, Said[Round] | None] = {alone: None}
        for lie in self._lies if self._nodes.has_liar else ():
            after = self._list(heights, lie, known)
            outcomes.setdefault(after, lie)
            if len(heights) > 1 and len(set(heights)) == 1 and heights[0] is not None and after[:4] != alone[:4]:
                raise BrokenPromiseError(f"{lie} changes what two nodes report alike")
        return {lie: after for after, lie in outcomes.items()}

    def _list(self, heights: tuple[int | None, ...], lie: Said[Round] | None, known: RoundFacts) -> RoundFacts:
        """What is agreed after honest nodes have listed the round at these heights, and the liar its lie."""
        heads = {f"honest{number}": height for number, height in enumerate(heights) if height is not None}
        said = {
            name: Said(height, listed)
            for name, height in heads.items()
            if (listed := self._history[height]) is not None
        }
        if lie is not None:
            heads[LIAR], said[LIAR] = lie.height, lie
        height = agreement.agreed_height(heads, self._nodes.needed)
        return known if height is None else agreement.agreed_round(said, self._nodes.needed, known=known, height=height)

    def _check_step(self, before: RoundFacts, after: RoundFacts) -> None:
        """Without a liar, no late answer changes a field back."""
        if not self._nodes.has_liar and self._version(after) < self._version(before):
            raise BrokenPromiseError(f"{before} went back to {after}")

    def _version(self, known: RoundFacts) -> tuple[int, int]:
        """When the agreed end and proposals were first true."""
        ends = [listed.vote_end_time if listed else None for listed in self._history]
        proposals = [listed.proposals if listed else None for listed in self._history]
        return ends.index(known.vote_end_time), proposals.index(known.proposals)

    def check(self, state: RoundState) -> None:
        past = [listed for listed in self._history[: state.chain + 1] if listed is not None]
        for field in ("created_at_height", "vote_end_time", "proposals"):
            value = getattr(state.known, field)
            if value is not None and value not in [getattr(listed, field) for listed in past]:
                raise BrokenPromiseError(f"{field} {value} is agreed, but was never true")
        order = [RoundStatus.PENDING, RoundStatus.ACTIVE, RoundStatus.TALLYING, RoundStatus.FINALIZED]
        status = state.known.status
        if status is not None and not any(order.index(status) <= order.index(listed.status) for listed in past):
            raise BrokenPromiseError(f"status {status.name} is agreed, but the chain has not reached it")
        if state.known.height > state.chain:
            raise BrokenPromiseError(f"statements below {state.known.height} do not count, above the chain's height")
        truth = self._history[state.chain]
        if truth is not None:
            said = {str(number): Said(state.chain, truth) for number in range(self._nodes.configured)}
            after = agreement.agreed_round(said, self._nodes.needed, known=state.known, height=state.chain)
            expected = (truth.created_at_height, truth.vote_end_time, truth.proposals, truth.status)
            if after[:4] != expected:
                raise BrokenPromiseError(f"after the lie, {after} is agreed instead of {expected}")


def _stored(position: Ledger) -> Ledger:
    loaded = ledger.parse_ledger(ledger.format_ledger(position))
    assert loaded is not None
    return loaded


def all_explorations(greatest: int) -> Mapping[str, Callable[[], Exploration]]:
    """The exploration of every model up to a height, by name."""
    three, two, honest = Nodes(greatest=greatest), Nodes(1, True, (0,), greatest), Nodes(2, False, greatest=greatest)
    blocks = {
        "two honest nodes": honest,
        "one honest node": replace(honest, honest=1),
        "one liar of two": two,
        "one liar of three": three,
        "one liar of three, one node has pruned height 1": replace(three, pruned=(1, 0)),
        "one liar of three, two nodes have pruned height 1": replace(three, pruned=(1, 1)),
    }
    rounds = {"two honest nodes": honest, "one liar of two": two, "one liar of three": three}
    return {f"blocks, {name}": partial(explore, BlocksModel(nodes)) for name, nodes in blocks.items()} | {
        f"round {name}, {which}": partial(explore, RoundsModel(name, nodes))
        for which, nodes in rounds.items()
        for name in "AB"
    }
