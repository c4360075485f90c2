"""Simulated chain: blocks, rounds, commitment trees, a mempool and reveal verification."""

from __future__ import annotations

import asyncio
import bisect
import random
from dataclasses import dataclass, field, replace
from hashlib import sha256

import proofs
from helper.chain.chain_data import Anchor, BlockHead, LeafBlock, Proposal, Round, RoundStatus, TxResult
from helper.chain.reveal_transaction import RevealMessage
from tests.simulation.event_log import EventLog
from tests.simulation.fakes import SimTree, is_valid_proof, prove

CHAIN_ID = "svote-sim-1"
EPOCH = 1_795_268_000.0
"""Unix time at loop second 0."""
INDEX_DELAY_SECONDS = 0.5
"""Seconds until a node's transaction index contains a new block."""
BAD_PROOF_LOG = "invalid zero-knowledge proof: verification failed"

Refusal = tuple[int, str]


@dataclass(eq=False)
class SimRound:
    """A round and its commitment tree. A height is 0 until its block exists.

    Attributes:
        tree_sizes: (height, leaves under its root), ascending.
    """

    round_id: bytes
    vote_end_time: int
    proposals: tuple[Proposal, ...]
    created_height: int = 0
    tallying_height: int = 0
    finalized_height: int = 0
    tree: SimTree = field(default_factory=SimTree)
    tree_sizes: list[tuple[int, int]] = field(default_factory=list)
    pending_leaves: list[tuple[bytes, asyncio.Future[int]]] = field(default_factory=list)
    _served_rounds: dict[RoundStatus, Round] = field(default_factory=dict)

    def status(self, height: int) -> RoundStatus:
        if self.finalized_height and height >= self.finalized_height:
            return RoundStatus.FINALIZED
        return RoundStatus.TALLYING if self.tallying_height and height >= self.tallying_height else RoundStatus.ACTIVE

    def to_round(self, height: int) -> Round:
        """Return the round in a node's response format."""
        status = self.status(height)
        if status not in self._served_rounds:
            self._served_rounds[status] = Round(
                self.round_id, status, self.vote_end_time, self.proposals, self.created_height
            )
        return self._served_rounds[status]

    def tree_at(self, height: int) -> Anchor | None:
        """Return the newest root at a height."""
        index = bisect.bisect_right(self.tree_sizes, (height, 1 << 30))
        if not index:
            return None
        at, size = self.tree_sizes[index - 1]
        return Anchor(at, size, self.tree.root(size))

    def root_at_anchor(self, anchor_height: int) -> bytes | None:
        """Return the root stored at exactly this height."""
        index = bisect.bisect_left(self.tree_sizes, (anchor_height, 0))
        if index < len(self.tree_sizes) and self.tree_sizes[index][0] == anchor_height:
            return self.tree.root(self.tree_sizes[index][1])
        return None

    def leaves(self, first: int, last: int) -> list[LeafBlock]:
        blocks, start = [], 0
        for height, size in self.tree_sizes:
            if first <= height <= last:
                leaves = b"".join(self.tree.leaf(position) for position in range(start, size))
                blocks.append(LeafBlock(height, start, leaves))
            start = size
        return blocks


@dataclass(eq=False)
class SimBlock:
    """A block: its transactions with their codes, and the reveals it confirmed."""

    head: BlockHead
    txs: list[tuple[bytes, int]] = field(default_factory=list)
    reveals: list[tuple[bytes, bytes]] = field(default_factory=list)


@dataclass(eq=False)
class PendingTransaction:
    """A transaction in the mempool.

    Attributes:
        code: result code in the block; None applies the chain's rules.
    """

    tx: bytes
    message: RevealMessage
    not_before: float
    code: int | None = None


class SimChain:
    """The chain, independent of any node.

    Attributes:
        blocks: by height; index 0 is a placeholder.
        confirmed: height at which the chain counted each nullifier.
    """

    def __init__(self, rng: random.Random, event_log: EventLog, *, interval: tuple[float, float], circuit: str) -> None:
        self._rng = rng
        self._event_log = event_log
        self._interval = interval
        self.circuit = circuit
        genesis = BlockHead(CHAIN_ID, 1, EPOCH - interval[1])
        self.blocks = [SimBlock(genesis), SimBlock(genesis)]
        self.rounds: dict[bytes, SimRound] = {}
        self.confirmed: dict[tuple[bytes, bytes], int] = {}
        self.included: dict[bytes, list[TxResult]] = {}
        self.mempool: dict[bytes, PendingTransaction] = {}
        self.is_halted = False
        self.max_mempool_delay = 0.0
        self.max_block_reveals: int | None = None
        self.new_rounds: list[SimRound] = []
        self.new_block = asyncio.Event()

    @property
    def height(self) -> int:
        return len(self.blocks) - 1

    def head(self, height: int) -> BlockHead:
        return self.blocks[height].head

    def now(self) -> float:
        return EPOCH + asyncio.get_running_loop().time()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(*self._interval))
            if not self.is_halted:
                self.make_block()

    def make_block(self) -> None:
        time = max(self.now() - self._rng.random() * 0.5, self.head(self.height).time + 0.001)
        height = self.height + 1
        block = SimBlock(BlockHead(CHAIN_ID, height, time))
        for round_ in self.new_rounds:
            round_.created_height = height
            self.rounds[round_.round_id] = round_
            self._event_log.record(
                "round begins", round_.round_id, "height", height, "ends", round_.vote_end_time - EPOCH
            )
        self.new_rounds = []
        for round_ in self.rounds.values():
            self._advance_round(round_, height, time)
        self._include_transactions(block)
        self.blocks.append(block)
        produced, self.new_block = self.new_block, asyncio.Event()
        produced.set()

    def _advance_round(self, round_: SimRound, height: int, time: float) -> None:
        if not round_.tallying_height and time >= round_.vote_end_time:
            round_.tallying_height = height
            self._event_log.record("round ended", round_.round_id, "height", height)
        elif round_.tallying_height and not round_.finalized_height and height >= round_.tallying_height + 3:
            round_.finalized_height = height
        if round_.pending_leaves and not round_.tallying_height:
            waiting, round_.pending_leaves = round_.pending_leaves, []
            for leaf, position_future in waiting:
                round_.tree.append(authority_note(leaf) + leaf)
                if not position_future.done():
                    position_future.set_result(len(round_.tree) - 1)
            round_.tree_sizes.append((height, len(round_.tree)))

    def _include_transactions(self, block: SimBlock) -> None:
        now = asyncio.get_running_loop().time()
        ready = [pending for pending in self.mempool.values() if pending.not_before <= now]
        self._rng.shuffle(ready)
        for pending in ready[: self.max_block_reveals]:
            del self.mempool[pending.tx]
            code, refusal = pending.code, None
            if code is None:
                refusal = self.check_reveal(pending.message, block.head.height, time=block.head.time)
                code = refusal[0] if refusal else 0
            block.txs.append((pending.tx, code))
            log = "" if code == 0 else refusal[1] if refusal else "out of gas"
            self.included.setdefault(sha256(pending.tx).digest(), []).append(TxResult(code, block.head.height, log))
            spent = (pending.message.round_id, pending.message.nullifier)
            if code == 0:
                self.confirmed[spent] = block.head.height
                block.reveals.append(spent)
            self._event_log.record("included", spent[1], "code", code, "height", block.head.height)

    def find_indexed(self, tx_hash: bytes, height: int) -> TxResult | None:
        """Return the latest result for a hash from a node's index at this height.

        Transactions of the newest block are missing until `INDEX_DELAY_SECONDS` have passed.
        """
        entries = [
            entry
            for entry in self.included.get(tx_hash, [])
            if entry.height <= height and self.head(entry.height).time <= self.now() - INDEX_DELAY_SECONDS
        ]
        return entries[-1] if entries else None

    def check_reveal(self, message: RevealMessage, height: int, *, time: float) -> Refusal | None:
        """Return why a reveal is refused at a height, or None if it is valid."""
        round_ = self.rounds.get(message.round_id)
        if round_ is None or round_.created_height > height:
            return 1, "vote round not found"
        if round_.status(height) is not RoundStatus.ACTIVE:
            return 1, f"vote round is not active: {round_.status(height).name}"
        if time >= round_.vote_end_time:
            return 1, f"vote_end_time {round_.vote_end_time} <= block_time {int(time)}"
        return self._check_proof(round_, message, height)

    def _check_proof(self, round_: SimRound, message: RevealMessage, height: int) -> Refusal | None:
        """Check nullifier, anchor and proof; the round has already been checked."""
        counted = self.confirmed.get((message.round_id, message.nullifier))
        if counted is not None and counted <= height:
            return 1, f"nullifier already spent: {message.nullifier.hex()}"
        root = round_.root_at_anchor(message.anchor_height) if message.anchor_height <= height else None
        if root is None:
            return 1, f"invalid zero-knowledge proof: no commitment tree root at height {message.anchor_height}"
        if not is_valid_proof(self.circuit, message.proof, statement_of(message, root)):
            return 1, BAD_PROOF_LOG
        return None

    def submit_transaction(self, tx: bytes, message: RevealMessage, *, code: int | None = None) -> None:
        not_before = asyncio.get_running_loop().time() + self._rng.random() * self.max_mempool_delay
        self.mempool.setdefault(tx, PendingTransaction(tx, message, not_before, code))

    async def cast_vote(self, round_: SimRound, leaf: bytes) -> int:
        """Submit a vote commitment and return its position once it is in a block."""
        position: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        round_.pending_leaves.append((leaf, position))
        return await position


def prove_reveal(message: RevealMessage, circuit: str, root: bytes) -> RevealMessage:
    """Return the message with a valid proof."""
    return replace(message, proof=prove(circuit, statement_of(message, root)))


def authority_note(leaf: bytes) -> bytes:
    """Return the second leaf that a vote appends."""
    return sha256(b"van" + leaf).digest()


def statement_of(message: RevealMessage, root: bytes) -> proofs.Statement:
    return proofs.Statement(
        nullifier=message.nullifier,
        c1=message.enc_share[:32],
        c2=message.enc_share[32:],
        proposal_id=message.proposal_id,
        vote_decision=message.vote_decision,
        root=root,
        round_id=message.round_id,
    )
