"""The chain as served by one node in one request: up to a height, and with injected faults."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from devnet.chain import Block, Chain, TxResult
from devnet.faults import FaultDecision
from devnet.lies import Liar
from devnet.rounds import LeafBlock, Round


class NodeView:
    """Read access to the chain for the routes."""

    def __init__(self, chain: Chain, decision: FaultDecision, node: str, liar: Liar) -> None:
        self.chain = chain
        self.node = node
        self.liar = liar
        self.fate = decision.fate
        self.switches = decision.switches
        self.height = min(decision.height, chain.height)
        self.chain_id = decision.switches.chain_id or chain.chain_id

    @property
    def max_anchor_height(self) -> int:
        """The height up to which this node knows roots in CheckTx."""
        return self.height - self.switches.anchor_unknown

    def block(self, height: int) -> Block | None:
        """A block, None for a future height."""
        block = self.liar.block(height, self.height) if height >= 1 else None
        return None if block is None else self._served_block(block)

    def latest_block(self) -> Block:
        """The newest block."""
        return self._served_block(self.liar.latest_block(self.height))

    def _served_block(self, block: Block) -> Block:
        return replace(block, results=(), events=()) if self.switches.empty_blocks else block

    def status(self, round_: Round) -> int | None:
        """A round's status on this node; None if the node does not know it."""
        known = round_.status_at(self.height)
        if known is not None and self.switches.round_status is not None:
            return self.switches.round_status or None
        return None if known is None else self.liar.status(known)

    def round(self, round_id: bytes) -> tuple[Round, int] | None:
        """A round and its status."""
        return next((served for served in self.rounds() if served[0].round_id == round_id), None)

    def rounds(self) -> list[tuple[Round, int]]:
        """All rounds, oldest first."""
        rounds = [*self.chain.rounds.values(), *filter(None, [self.liar.extra_round()])]
        served = [(self.liar.round(round_), self.status(round_)) for round_ in rounds]
        return [(round_, status) for round_, status in served if status is not None]

    def leaf_blocks(self, round_id: bytes, first: int, last: int) -> list[LeafBlock]:
        """The blocks in a range of heights that appended leaves to a round."""
        round_view = self.round(round_id)
        blocks = round_view[0].leaf_blocks if round_view else []
        return [block for block in blocks if first <= block.height <= min(last, self.height)]

    def served_root(self, block: LeafBlock) -> bytes:
        """A block's root as served by this node."""
        if not self.switches.wrong_root:
            return block.root
        wrong = bytearray(hashlib.sha256(b"wrong" + block.root).digest())
        wrong[31] &= 0x3F
        return bytes(wrong)

    def transaction(self, digest: bytes) -> TxResult | None:
        """An included transaction."""
        result = self.chain.transactions.get(digest)
        known = None if self.switches.hide_tx or result is None or result.height > self.height else result
        return self.liar.transaction(digest, known, self.height)

    def reveals(self, round_id: bytes) -> list[TxResult]:
        """The confirmed reveals of a round, in the chain's order."""
        true = [result for result in self.chain.reveals.get(round_id, []) if result.height <= self.height]
        return self.liar.reveals(true)

    def is_spent(self, round_id: bytes, nullifier: bytes) -> bool:
        """Return whether a nullifier is spent."""
        round_ = self.chain.rounds.get(round_id)
        at = round_.nullifiers.get(nullifier) if round_ else None
        return self.liar.is_spent(nullifier, at is not None and at <= self.height)
