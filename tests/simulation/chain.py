"""The simulated chain: blocks, rounds, trees, a mempool, and what a block does with a reveal."""

from __future__ import annotations

import asyncio
import bisect
import random
from dataclasses import dataclass, field
from hashlib import sha256

import proofs
from helper.chain.models import BlockHead, LeafBlock, Proposal, Round, RoundStatus, TreeState, TxResult
from helper.chain.reveal_transaction import RevealMessage
from tests.simulation.event_log import Story
from tests.simulation.fakes import SimTree, verifies

CHAIN_ID = "svote-sim-1"
EPOCH = 1_795_268_000.0
"""Unix time at the loop's second 0."""
INDEX_SECONDS = 0.5
"""For how long a node's index of transactions lacks a new block."""

Refusal = tuple[int, str]


@dataclass(eq=False)
class SimRound:
    """A round and its tree. Heights are 0 until their block is there.

    Attributes:
        growth: (height, leaves under its root), ascending.
    """

    round_id: bytes
    vote_end_time: int
    proposals: tuple[Proposal, ...]
    created: int = 0
    tallying: int = 0
    finalized: int = 0
    tree: SimTree = field(default_factory=SimTree)
    growth: list[tuple[int, int]] = field(default_factory=list)
    waiting: list[tuple[bytes, asyncio.Future[int]]] = field(default_factory=list)
    _told: dict[RoundStatus, Round] = field(default_factory=dict)

    def status(self, height: int) -> RoundStatus:
        """Where it stands after a block."""
        if self.finalized and height >= self.finalized:
            return RoundStatus.FINALIZED
        return RoundStatus.TALLYING if self.tallying and height >= self.tallying else RoundStatus.ACTIVE

    def told(self, height: int) -> Round:
        """As a node tells it."""
        status = self.status(height)
        if status not in self._told:
            self._told[status] = Round(self.round_id, status, self.vote_end_time, self.proposals, self.created)
        return self._told[status]

    def tree_at(self, height: int) -> TreeState | None:
        """The newest root of a height."""
        place = bisect.bisect_right(self.growth, (height, 1 << 30))
        if not place:
            return None
        at, size = self.growth[place - 1]
        return TreeState(size, self.tree.root(size), at)

    def root_of(self, anchor: int) -> bytes | None:
        """The root that was stored at exactly this height."""
        place = bisect.bisect_left(self.growth, (anchor, 0))
        if place < len(self.growth) and self.growth[place][0] == anchor:
            return self.tree.root(self.growth[place][1])
        return None

    def leaves(self, first: int, last: int) -> list[LeafBlock]:
        """What the blocks from one height to another appended."""
        blocks, start = [], 0
        for height, size in self.growth:
            if first <= height <= last:
                leaves = b"".join(self.tree.leaf(position) for position in range(start, size))
                blocks.append(LeafBlock(height, start, leaves))
            start = size
        return blocks


@dataclass(eq=False)
class SimBlock:
    """A block: its transactions with their codes, and the reveals that counted."""

    head: BlockHead
    txs: list[tuple[bytes, int]] = field(default_factory=list)
    reveals: list[tuple[bytes, bytes]] = field(default_factory=list)


@dataclass(eq=False)
class Pending:
    """A transaction in the mempool.

    Attributes:
        not_before: loop time of the first block that may take it.
        code: what the block says, None to judge by the rules.
    """

    tx: bytes
    message: RevealMessage
    not_before: float
    code: int | None = None


class SimChain:
    """The chain itself, apart from any node.

    Attributes:
        blocks: by height; the first is no block.
        counted: the height at which each nullifier counted.
        halted: no block is made.
        delay: seconds that a transaction stays in the mempool at most.
    """

    def __init__(self, dice: random.Random, story: Story, *, interval: tuple[float, float], circuit: str) -> None:
        self._dice = dice
        self._story = story
        self._interval = interval
        self.circuit = circuit
        genesis = BlockHead(CHAIN_ID, 1, EPOCH - interval[1])
        self.blocks = [SimBlock(genesis), SimBlock(genesis)]
        self.rounds: dict[bytes, SimRound] = {}
        self.counted: dict[tuple[bytes, bytes], int] = {}
        self.included: dict[bytes, list[TxResult]] = {}
        self.mempool: dict[bytes, Pending] = {}
        self.halted = False
        self.delay = 0.0
        self.new_rounds: list[SimRound] = []
        self.new_block = asyncio.Event()

    @property
    def height(self) -> int:
        """Of the newest block."""
        return len(self.blocks) - 1

    def head(self, height: int) -> BlockHead:
        """A block's head."""
        return self.blocks[height].head

    def now(self) -> float:
        """The true unix time."""
        return EPOCH + asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Make blocks for ever."""
        while True:
            await asyncio.sleep(self._dice.uniform(*self._interval))
            if not self.halted:
                self.make_block()

    def make_block(self) -> None:
        """The next block."""
        time = max(self.now() - self._dice.random() * 0.5, self.head(self.height).time + 0.001)
        height = self.height + 1
        block = SimBlock(BlockHead(CHAIN_ID, height, time))
        for one in self.new_rounds:
            one.created = height
            self.rounds[one.round_id] = one
            self._story.tell("round begins", one.round_id, "height", height, "ends", one.vote_end_time - EPOCH)
        self.new_rounds = []
        for one in self.rounds.values():
            self._move(one, height, time)
        self._take_txs(block)
        self.blocks.append(block)
        done, self.new_block = self.new_block, asyncio.Event()
        done.set()

    def _move(self, one: SimRound, height: int, time: float) -> None:
        if not one.tallying and time >= one.vote_end_time:
            one.tallying = height
            self._story.tell("round is over", one.round_id, "height", height)
        elif one.tallying and not one.finalized and height >= one.tallying + 3:
            one.finalized = height
        if one.waiting and not one.tallying:
            waiting, one.waiting = one.waiting, []
            for leaf, told in waiting:
                one.tree.append(digest_of_van(leaf) + leaf)
                if not told.done():
                    told.set_result(len(one.tree) - 1)
            one.growth.append((height, len(one.tree)))

    def _take_txs(self, block: SimBlock) -> None:
        now = asyncio.get_running_loop().time()
        ready = [pending for pending in self.mempool.values() if pending.not_before <= now]
        self._dice.shuffle(ready)
        for pending in ready:
            del self.mempool[pending.tx]
            code, refusal = pending.code, None
            if code is None:
                refusal = self.judge(pending.message, block.head.height, time=block.head.time)
                code = refusal[0] if refusal else 0
            block.txs.append((pending.tx, code))
            log = "" if code == 0 else refusal[1] if refusal else "out of gas"
            self.included.setdefault(sha256(pending.tx).digest(), []).append(TxResult(code, block.head.height, log))
            spent = (pending.message.round_id, pending.message.nullifier)
            if code == 0:
                self.counted[spent] = block.head.height
                block.reveals.append(spent)
            self._story.tell("included", spent[1], "code", code, "height", block.head.height)

    def indexed(self, tx_hash: bytes, height: int) -> TxResult | None:
        """What the index of a node at this height has: the last place of these bytes, but for the newest block's while
        it is very new.
        """
        there = [
            one
            for one in self.included.get(tx_hash, [])
            if one.height <= height and self.head(one.height).time <= self.now() - INDEX_SECONDS
        ]
        return there[-1] if there else None

    def judge(self, message: RevealMessage, height: int, *, time: float) -> Refusal | None:
        """Why a reveal is refused at a height, None when it is not."""
        one = self.rounds.get(message.round_id)
        if one is None or one.created > height:
            return 1, "vote round not found"
        if one.status(height) is not RoundStatus.ACTIVE:
            return 1, f"vote round is not active: {one.status(height).name}"
        if time >= one.vote_end_time:
            return 1, f"vote_end_time {one.vote_end_time} <= block_time {int(time)}"
        return self._judge_proof(one, message, height)

    def _judge_proof(self, one: SimRound, message: RevealMessage, height: int) -> Refusal | None:
        """The same, once its round is found to take it."""
        counted = self.counted.get((message.round_id, message.nullifier))
        if counted is not None and counted <= height:
            return 1, f"nullifier already spent: {message.nullifier.hex()}"
        root = one.root_of(message.anchor_height) if message.anchor_height <= height else None
        if root is None:
            return 1, f"invalid zero-knowledge proof: no commitment tree root at height {message.anchor_height}"
        if not verifies(self.circuit, message.proof, statement_of(message, root)):
            return 1, "invalid zero-knowledge proof: verification failed"
        return None

    def submit(self, tx: bytes, message: RevealMessage, *, delay: float = 0.0, code: int | None = None) -> None:
        """Put a transaction into the mempool."""
        now = asyncio.get_running_loop().time()
        self.mempool.setdefault(tx, Pending(tx, message, now + delay + self._dice.random() * self.delay, code))

    def is_counted(self, nullifier: bytes) -> bool:
        """Whether any round counted this nullifier."""
        return any((round_id, nullifier) in self.counted for round_id in self.rounds)

    async def cast(self, one: SimRound, leaf: bytes) -> int:
        """Put a vote commitment on the chain; its position once it is there."""
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        one.waiting.append((leaf, told))
        return await told


def digest_of_van(leaf: bytes) -> bytes:
    """The other leaf that a vote appends."""
    return sha256(b"van" + leaf).digest()


def statement_of(message: RevealMessage, root: bytes) -> proofs.Statement:
    """What a reveal claims."""
    return proofs.Statement(
        nullifier=message.nullifier,
        c1=message.enc_share[:32],
        c2=message.enc_share[32:],
        proposal_id=message.proposal_id,
        vote_decision=message.vote_decision,
        root=root,
        round_id=message.round_id,
    )
