"""What a false node changes in its answers. Its lies are consistent with each other, unlike those of a broken node.

A lie never depends on which shares wait in the service. While a node has no lies, its answers are unchanged.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum
from typing import Any

from helper.chain.chain_data import BlockHead, LeafBlock, Proposal, Round, RoundStatus, TxResult
from helper.chain.reveal_transaction import RevealMessage
from tests.simulation.chain import BAD_PROOF_LOG, SimBlock, SimChain, SimRound
from tests.simulation.fakes import SimTree

BRIEF_SECONDS = 10.0
YEAR_SECONDS = 31_536_000.0
EARLIER_END_SECONDS = 600
"""Seconds by which a false end of a round is at most too early."""


class Lie(Enum):
    """Lies of a node. Any of them may be combined."""

    AHEAD = "reports a height that is 60 too high"
    AHEAD_BRIEFLY = "reports a height that is 90 too high for some seconds"
    AHEAD_GROWING = "reports a height that rises by one each second"
    LOW = "reports a height that is 120 too low"
    ONE_HEIGHT = "reports one height, with the current time"
    EMPTY_BLOCKS = "serves blocks without transactions"
    FUTURE_BLOCKS = "serves 50 empty blocks above its newest one"
    FORGED_TIME = "reports heads two minutes and blocks ten years ahead"
    OLD_HEADS = "reports heads two minutes old"
    FALSE_END = "lists rounds with another vote_end_time"
    FALSE_PROPOSALS = "lists rounds with other proposals"
    FALSE_CREATED = "lists rounds with another created_at_height"
    FALSE_STATUS = "lists rounds with another status"
    FALSE_TREE = "serves trees with invented leaves and matching roots"
    EXTENDED_TREE = "serves the true trees and one more leaf, another one for each block"
    FALSE_SPENT = "reports every nullifier as spent"
    FALSE_CIRCUIT = "refuses valid proofs and accepts those of another circuit"
    ERROR_TEXTS = "answers requests for blocks with errors that no version knows"
    INVENTED_BLOCK = "serves blocks far above the chain's that contain the reveals sent to it"
    NO_ROUNDS = "lists no round"
    EXTRA_ROUND = "lists a round that does not exist"
    DISPUTE = "adds a reveal to each block"
    INDEX_GAPS = "its index of transactions lacks every second one"
    BAD_RESULTS = "reports a refused proof as the result of each transaction"
    TWIN = "serves another chain from its present height on"
    SWALLOW = "accepts reveals without forwarding them"


FALSE_HEIGHTS: dict[Lie, Callable[[float], int]] = {
    Lie.AHEAD: lambda seconds: 60,
    Lie.AHEAD_BRIEFLY: lambda seconds: 90 if seconds < BRIEF_SECONDS else 0,
    Lie.AHEAD_GROWING: int,
    Lie.LOW: lambda seconds: -120,
    Lie.FUTURE_BLOCKS: lambda seconds: 50,
    Lie.INVENTED_BLOCK: lambda seconds: 85,
}
"""Blocks by which the reported height is too high, by the seconds since the lie began. The greatest one counts."""
SCRIPTED_LIES = frozenset({Lie.EXTENDED_TREE, Lie.FALSE_CIRCUIT})
"""Lies that no seed draws."""
SWALLOWING = frozenset({Lie.INVENTED_BLOCK, Lie.TWIN, Lie.SWALLOW})
"""Lies of a node that accepts reveals and forwards none."""


class Liar:
    """The lies of one node, and the false chain that they make up."""

    def __init__(self, chain: SimChain) -> None:
        self._chain = chain
        self._rng = random.Random(0)
        self.lies: frozenset[Lie] = frozenset()
        self._started_at = 0.0
        self._fork_height = 0
        self._own_blocks: dict[int, list[RevealMessage]] = {}  # of the false chain, by height
        self._disputed: dict[int, RevealMessage] = {}
        self._own_results: dict[bytes, int] = {}  # heights of both, by hash
        self._invented_leaves = b""
        self._trees: dict[tuple[bytes, int], tuple[list[tuple[int, int]], SimTree]] = {}
        self._change_end: Callable[[int], int] = lambda end: end
        self._status = RoundStatus.ACTIVE
        self._created_by = 0
        self._extra_id = b""

    def begin(self, lies: Iterable[Lie], height: int, rng: random.Random) -> None:
        """Start to lie at a height, or stop if there are no lies. `rng` draws what is invented."""
        self._rng = rng
        self.lies = frozenset(lies)
        self._started_at, self._fork_height = asyncio.get_running_loop().time(), height
        self._own_blocks, self._disputed, self._own_results, self._trees = {}, {}, {}, {}
        self._invented_leaves = rng.randbytes(32 * rng.choice((1, 2, 50)))
        shift = rng.choice((-EARLIER_END_SECONDS, 60, 86_400))
        self._change_end = lambda end: end + shift
        self._status = rng.choice((RoundStatus.PENDING, RoundStatus.TALLYING, RoundStatus.FINALIZED))
        self._created_by = rng.choice((-1, 1, 1000))
        self._extra_id = rng.randbytes(32)

    def tells(self, *lies: Lie) -> bool:
        """Whether any of these lies is active."""
        return bool(self.lies) and not self.lies.isdisjoint(lies)

    # Blocks

    def false_height(self, height: int) -> int:
        """The height that the node reports instead of `height`."""
        if not self.lies:
            return height
        seconds = asyncio.get_running_loop().time() - self._started_at
        height = self._fork_height if self.tells(Lie.ONE_HEIGHT) else height
        shift = max((FALSE_HEIGHTS[lie](seconds) for lie in self.lies & FALSE_HEIGHTS.keys()), default=0)
        return max(1, height + shift)

    def head(self, head: BlockHead) -> BlockHead:
        """The newest block that the node reports."""
        if not self.lies:
            return head
        shift = 119 * self.tells(Lie.FORGED_TIME) - 121 * self.tells(Lie.OLD_HEADS)
        return replace(head, height=self.false_height(head.height), time=head.time + shift)

    def block(self, height: int, newest: int) -> SimBlock | None:
        """A block as the node serves it; None if there is none. `newest` is the height of its newest true block."""
        if not self.lies:
            return self._chain.blocks[height] if height <= newest else None
        is_own = height > newest or (self.tells(Lie.TWIN) and height > self._fork_height)
        if height > (self.false_height(newest) if self.tells(Lie.FUTURE_BLOCKS, Lie.INVENTED_BLOCK) else newest):
            return None
        true = self._chain.blocks[min(height, newest)]
        block = SimBlock(replace(true.head, height=height), [*true.txs], [*true.reveals])
        added = self._own_blocks.get(height, []) if is_own else []
        if is_own or self.tells(Lie.EMPTY_BLOCKS):
            block.txs, block.reveals = [], []
        if self.tells(Lie.DISPUTE):
            added = [*added, self._dispute(height)]
        block.txs += [(message.to_tx(), 0) for message in added]
        block.reveals += [(message.round_id, message.nullifier) for message in added]
        if self.tells(Lie.FORGED_TIME):
            block.head = replace(block.head, time=block.head.time + 10 * YEAR_SECONDS)
        return block

    def _dispute(self, height: int) -> RevealMessage:
        if height not in self._disputed:
            round_id = next(iter(self._chain.rounds), bytes(32))
            nullifier, enc_share = self._rng.randbytes(32), self._rng.randbytes(64)
            message = RevealMessage(nullifier, enc_share, 1, 0, b"proof", round_id, 1)
            self._disputed[height], self._own_results[message.tx_hash()] = message, height
        return self._disputed[height]

    def find_transaction(self, tx_hash: bytes, true: TxResult | None, newest: int) -> TxResult | None:
        if self.tells(Lie.FALSE_SPENT):
            return TxResult(0, newest, "")
        if self.tells(Lie.BAD_RESULTS):
            return TxResult(1, newest, BAD_PROOF_LOG)
        if tx_hash in self._own_results:
            return TxResult(0, self._own_results[tx_hash], "")
        is_hidden = self.tells(Lie.INDEX_GAPS) and tx_hash[0] % 2
        is_other = self.tells(Lie.TWIN) and true is not None and true.height > self._fork_height
        return None if is_hidden or is_other else true

    def is_spent(self, nullifier: bytes, true: bool) -> bool:
        """Whether the node reports a nullifier as spent."""
        is_own = any(message.nullifier == nullifier for own in self._own_blocks.values() for message in own)
        return true or self.tells(Lie.FALSE_SPENT) or is_own

    # Reveals

    def answer_reveal(self, message: RevealMessage, newest: int) -> tuple[int, dict[str, Any]] | None:
        """The answer to a reveal that the node does not forward; None if it behaves as usual."""
        if self.tells(Lie.FALSE_SPENT):
            return 422, {"code": 1, "log": f"nullifier already spent: {message.nullifier.hex()}", "tx_hash": ""}
        if self.tells(Lie.FALSE_CIRCUIT):
            refusal = self._chain.check_reveal(message, newest, time=self._chain.head(newest).time)
            if refusal is None:
                return 422, {"code": 1, "log": BAD_PROOF_LOG, "tx_hash": ""}
            if refusal[1] == BAD_PROOF_LOG:
                return 200, {"code": 0, "tx_hash": message.tx_hash().hex().upper()}
        if not self.lies & SWALLOWING:
            return None
        if self.tells(Lie.INVENTED_BLOCK, Lie.TWIN):
            height = self._own_results[message.tx_hash()] = self.false_height(newest) + 1
            self._own_blocks.setdefault(height, []).append(message)
        return 200, {"code": 0, "tx_hash": message.tx_hash().hex().upper()}

    # Rounds and trees

    def rounds(self, rounds: list[Round]) -> list[Round]:
        changes: dict[Lie, Callable[[Round], Round]] = {
            Lie.FALSE_END: lambda known: replace(known, vote_end_time=self._change_end(known.vote_end_time)),
            Lie.FALSE_PROPOSALS: lambda known: replace(known, proposals=(Proposal(9, (0,)),)),
            Lie.FALSE_CREATED: lambda known: replace(
                known, created_at_height=max(1, known.created_at_height + self._created_by)
            ),
            Lie.FALSE_STATUS: lambda known: replace(known, status=self._status),
        }
        if self.tells(Lie.NO_ROUNDS):
            rounds = []
        for lie, change in changes.items():
            if self.tells(lie):
                rounds = [change(known) for known in rounds]
        if self.tells(Lie.EXTRA_ROUND):
            end = int(self._chain.now()) + 3600
            rounds = [*rounds, Round(self._extra_id, RoundStatus.ACTIVE, end, (Proposal(1, (0, 1)),), 1)]
        return rounds

    def tree(self, round_: SimRound) -> SimRound:
        if not self.tells(Lie.FALSE_TREE, Lie.EXTENDED_TREE, Lie.TWIN):
            return round_
        key = (round_.round_id, self._chain.height if self.tells(Lie.EXTENDED_TREE) else len(round_.tree_sizes))
        if key not in self._trees:
            self._trees[key] = self._create_tree(round_)
        sizes, tree = self._trees[key]
        return replace(round_, tree=tree, tree_sizes=sizes)

    def _create_tree(self, round_: SimRound) -> tuple[list[tuple[int, int]], SimTree]:
        """The true leaves up to the height at which the lie began, then invented ones, then (no twin) the true ones."""
        blocks = round_.leaves(0, self._fork_height)
        if self.tells(Lie.FALSE_TREE, Lie.TWIN):
            blocks.append(LeafBlock(max(self._fork_height, round_.created_height), 0, self._invented_leaves))
        if not self.tells(Lie.TWIN):
            blocks += round_.leaves(self._fork_height + 1, 1 << 40)
        if self.tells(Lie.EXTENDED_TREE):
            blocks.append(LeafBlock(max(self._chain.height, round_.created_height), 0, self._rng.randbytes(32)))
        sizes: dict[int, int] = {}
        tree = SimTree()
        for block in blocks:
            tree.append(block.leaves)
            sizes[block.height] = len(tree)
        return sorted(sizes.items()), tree
