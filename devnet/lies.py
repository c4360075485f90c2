"""Lies of a node: what it makes up, and how its answers stay consistent with it.

A fault of `devnet.faults` breaks single responses. A lie is one false view of the chain that all routes of the node
share. Lies may be combined.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Literal, get_args

import proofs
from devnet.chain import Block, Chain, TxResult, reveal_attributes
from devnet.rounds import ACTIVE, FINALIZED, PENDING, TALLYING, LeafBlock, Round
from devnet.tx import Reveal, encode, tx_hash

Lie = Literal[
    "ahead",
    "ahead_briefly",
    "ahead_growing",
    "one_height",
    "empty_blocks",
    "future_blocks",
    "forged_time",
    "false_end",
    "false_proposals",
    "false_created",
    "false_status",
    "false_tree",
    "extended_tree",
    "false_spent",
    "error_texts",
    "invented_block",
    "extra_round",
    "dispute",
    "index_gaps",
    "twin",
    "swallow",
]
LIES: Final[tuple[Lie, ...]] = get_args(Lie)

_BRIEF_BLOCKS = 5
_TEN_YEARS_NS = 10 * 31_536_000 * 10**9
_HEAD_AHEAD_NS = 119 * 10**9
_FALSE_HEIGHTS: dict[Lie, Callable[[int], int]] = {
    "ahead": lambda _: 60,
    "ahead_briefly": lambda blocks: 90 if blocks < _BRIEF_BLOCKS else 0,
    "ahead_growing": lambda blocks: blocks,
    "future_blocks": lambda _: 50,
    "invented_block": lambda _: 85,
}
"""Blocks by which the reported height is too high, by the number of blocks since the lie began."""


class Liar:
    """The lies of one node, and what it has made up.

    Attributes:
        lies: the active lies.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._rng = random.Random(0)
        self.lies: frozenset[Lie] = frozenset()
        self._since = 0
        self._own_reveals: dict[int, list[Reveal]] = {}  # by the height of the false block that contains them
        self._disputed: dict[int, Reveal] = {}
        self._invented_leaves: list[bytes] = []
        self._trees: dict[tuple[bytes, int], Round] = {}
        self._end_shift = self._created_shift = 0
        self._status = ACTIVE
        self._extra_id = b""
        self._is_indexed: dict[bytes, bool] = {}  # by hash: whether the index with gaps has a transaction

    def begin(self, lies: Sequence[Lie], height: int, seed: int | None) -> None:
        """Start to lie at a height, or stop if there are no lies."""
        rng = self._rng = random.Random(0 if seed is None else seed)
        self.lies, self._since = frozenset(lies), height
        self._own_reveals, self._disputed, self._trees, self._is_indexed = {}, {}, {}, {}
        self._invented_leaves = [_random_leaf(rng) for _ in range(rng.choice((1, 2, 50)))]
        self._end_shift, self._created_shift = rng.choice((-600, 60, 86_400)), rng.choice((-1, 1, 1000))
        self._status = rng.choice((PENDING, TALLYING, FINALIZED))
        self._extra_id = _random_leaf(rng)

    def tells(self, *lies: Lie) -> bool:
        """Whether any of these lies is active."""
        return not self.lies.isdisjoint(lies)

    # Blocks

    def false_height(self, newest: int) -> int:
        """The height that the node reports instead of `newest`."""
        blocks = newest - self._since
        newest = self._since if self.tells("one_height") else newest
        return newest + max((_FALSE_HEIGHTS[lie](blocks) for lie in self.lies if lie in _FALSE_HEIGHTS), default=0)

    def latest_block(self, newest: int) -> Block:
        """The newest block that the node reports."""
        height = self.false_height(newest)
        block = self.block(height, newest) or replace(self._chain.blocks[newest - 1], height=height, results=())
        if not self.tells("forged_time", "one_height"):
            return block
        ahead_ns = _HEAD_AHEAD_NS if self.tells("forged_time") else 0
        return replace(block, time_ns=self._chain.blocks[newest - 1].time_ns + ahead_ns)

    def block(self, height: int, newest: int) -> Block | None:
        """A block as the node serves it, None for a future height. `newest` is the height of its newest true block."""
        if height > (self.false_height(newest) if self.tells("future_blocks", "invented_block") else newest):
            return None
        block = replace(self._chain.blocks[min(height, newest) - 1], height=height)
        is_own = height > newest or (self.tells("twin") and height > self._since)
        if is_own or self.tells("empty_blocks"):
            block = replace(block, results=(), events=())
        added = [*self._own_reveals.get(height, [])] if is_own else []
        if self.tells("dispute"):
            added.append(self._dispute(height))
        results = [_counted(reveal, height, len(block.results) + number) for number, reveal in enumerate(added)]
        time_ns = block.time_ns + (_TEN_YEARS_NS if self.tells("forged_time") else 0)
        return replace(block, results=(*block.results, *results), time_ns=time_ns)

    def _dispute(self, height: int) -> Reveal:
        if height not in self._disputed:
            round_id, rng = next(iter(self._chain.rounds), bytes(32)), self._rng
            self._disputed[height] = Reveal(_random_leaf(rng), rng.randbytes(64), 1, 0, b"proof", round_id, 1)
        return self._disputed[height]

    def transaction(self, digest: bytes, true: TxResult | None, newest: int) -> TxResult | None:
        """An included transaction as the node serves it."""
        own = [*self._own_reveals.items(), *((height, [reveal]) for height, reveal in self._disputed.items())]
        for height, reveals in own:
            for reveal in reveals:
                if tx_hash(encode(reveal)) == digest and height <= self.false_height(newest):
                    return _counted(reveal, height, 0)
        if self.tells("false_spent") and true is None:
            return replace(_counted(self._dispute(0), newest, 0), hash=digest)
        is_other = self.tells("twin") and true is not None and true.height > self._since
        return None if is_other or (true is not None and self._is_in_gap(digest)) else true

    def reveals(self, true: list[TxResult]) -> list[TxResult]:
        """The confirmed reveals that a search of the node's index returns."""
        if self.tells("twin"):
            true = [result for result in true if result.height <= self._since]
        return [result for result in true if not self._is_in_gap(result.hash)]

    def _is_in_gap(self, digest: bytes) -> bool:
        """Whether the index lacks a transaction: every second one that was asked for."""
        return self.tells("index_gaps") and not self._is_indexed.setdefault(digest, len(self._is_indexed) % 2 == 0)

    def is_spent(self, nullifier: bytes, true: bool) -> bool:
        """Whether the node reports a nullifier as spent."""
        own = {reveal.nullifier for reveals in self._own_reveals.values() for reveal in reveals}
        return true or self.tells("false_spent") or nullifier in own

    def take_reveal(self, reveal: Reveal, newest: int) -> tuple[int, str] | None:
        """Code and log of the answer to a reveal that the node does not forward; None if it behaves as usual."""
        if self.tells("false_spent"):
            return 1, f"nullifier already spent: {reveal.nullifier.hex()}"
        if self.tells("invented_block", "twin"):
            self._own_reveals.setdefault(self.false_height(newest) + 1, []).append(reveal)
            return 0, ""
        return (0, "") if self.tells("swallow") else None

    # Rounds and trees

    def extra_round(self) -> Round | None:
        """A round that does not exist."""
        if not self.tells("extra_round"):
            return None
        fields = {
            "vote_round_id": self._extra_id.hex(),
            "vote_end_time": self._chain.blocks[self._since - 1].time + 3600,
            "proposals": [{"options": ["Support", "Oppose"]}],
            "ea_pk": bytes(32).hex(),
        }
        round_ = Round(fields, self._since, self._chain.blocks[self._since - 1].time)
        round_.set_status(self._since, ACTIVE)
        return round_

    def status(self, true: int) -> int:
        """The status of each round that the node reports."""
        return self._status if self.tells("false_status") else true

    def round(self, true: Round) -> Round:
        """A round as the node serves it."""
        if not self.tells("false_end", "false_proposals", "false_created", "false_tree", "extended_tree", "twin"):
            return true
        is_tree_false = self.tells("false_tree", "extended_tree", "twin")
        round_ = self._with_false_tree(true) if is_tree_false else copy.copy(true)
        if self.tells("false_end"):
            round_.vote_end_time = true.vote_end_time + self._end_shift
        if self.tells("false_proposals"):
            round_.proposals = [{"id": 9, "title": "", "description": "", "options": ["Support"]}]
        if self.tells("false_created"):
            round_.created_at_height = max(1, true.created_at_height + self._created_shift)
        return round_

    def _with_false_tree(self, true: Round) -> Round:
        """The round with the true leaves up to the lie's height, invented ones and, unless it is a twin, later ones.

        An extended tree has all true leaves and then one more, another one for each block.
        """
        newest, is_extended = len(self._chain.blocks), self.tells("extended_tree")
        key = (true.round_id, newest if is_extended else len(true.leaf_blocks))
        if key not in self._trees:
            round_ = self._trees[key] = copy.copy(true)
            round_.tree, round_.leaf_blocks = proofs.CommitmentTree(), []
            at = max(self._since, true.created_at_height)
            before = [block for block in true.leaf_blocks if block.height <= at]
            after = [] if self.tells("twin") else true.leaf_blocks[len(before) :]
            for height, leaves in [
                *((block.height, _leaves(true, block)) for block in before),
                *([(at, tuple(self._invented_leaves))] if self.tells("false_tree", "twin") else []),
                *((block.height, _leaves(true, block)) for block in after),
                *([(newest, (_random_leaf(self._rng),))] if is_extended else []),
            ]:
                round_.append_leaves(height, leaves)
                round_.compute_block_root(height)
        return copy.copy(self._trees[key])


def _leaves(round_: Round, block: LeafBlock) -> tuple[bytes, ...]:
    return tuple(round_.tree.leaf(block.start + offset) for offset in range(block.count))


def _random_leaf(rng: random.Random) -> bytes:
    """32 bytes that encode a field element."""
    return rng.randbytes(31) + b"\0"


def _counted(reveal: Reveal, height: int, index: int) -> TxResult:
    """The result of a reveal that the false chain counts."""
    raw = encode(reveal)
    event = ("reveal_share", reveal_attributes(reveal))
    return TxResult(raw, tx_hash(raw), height, index, 0, "", "MsgRevealShare", (event,))
