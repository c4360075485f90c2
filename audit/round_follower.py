"""Reads a round while it runs, and verifies the proofs of its reveals as their blocks arrive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Final

import anyio

from audit.block_cache import BlockCache
from audit.documents import FINALIZED, RoundFacts, parse_leaf_blocks, parse_round_facts
from audit.reveal_checks import BATCH_REVEALS, RevealChecks
from audit.source import LEAVES, ROUND, AuditBlock, AuditSource, DataMissing
from audit.transactions import decode
from audit.tree_checks import TreeChecks
from audit.verdicts import CHECKS, Findings
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import AuditError, ChainUnavailable, InvalidResponse

FOLLOW_SECONDS: Final = 5.0
"""Seconds between two reads of new blocks."""

VERIFY_SECONDS: Final = 60.0
"""Seconds after which new reveals are verified even if they are few. Each verification reads all leaves."""


class RoundFollower:
    """Reads the blocks of a running round into a cache, and verifies the proofs of the reveals in them.

    Args:
        cache: the blocks.
        new_source: creates a source that reads its documents again.
        round_id: 32 bytes.
        on_message: called with each problem that is found, and with the reason while no node responds.

    Attributes:
        valid_proofs: the ids of the proofs that are valid (`reveal_checks.proof_id`).
    """

    def __init__(
        self,
        cache: BlockCache,
        new_source: Callable[[], AuditSource],
        round_id: bytes,
        on_message: Callable[[str], None],
    ) -> None:
        self._cache = cache
        self._new_source = new_source
        self._round_id = round_id
        self._on_message = on_message
        self._unverified: list[tuple[AuditBlock, RevealMessage]] = []
        self._verified_at = anyio.current_time()
        self._read_height = 0  # blocks that are not stored, because a result is not known yet, are read again
        self.valid_proofs: set[bytes] = set()

    async def run(self) -> None:
        """Read blocks until the round is finalized.

        Raises:
            DataMissing: the nodes do not have the round, or have pruned a block.
            InvalidResponse: the round cannot be read.
        """
        first = 0
        while True:
            try:
                # read before the blocks: all blocks of a finalized round exist
                facts = parse_round_facts(await self._new_source().document(ROUND))
                await self._read_blocks(max(first, facts.created_at_height), facts)
                if facts.status == FINALIZED:
                    return
            except ChainUnavailable as error:
                self._on_message(f"waiting for a node: {error}")
            first = self._cache.next_height
            await anyio.sleep(FOLLOW_SECONDS)

    async def _read_blocks(self, first: int, facts: RoundFacts) -> None:
        async with aclosing(self._cache.blocks(first)) as blocks:
            async for block in blocks:
                if block.height > self._read_height:
                    self._read_height = block.height
                    self._unverified += [(block, message) for message in self._reveals(block)]
                is_late = anyio.current_time() - self._verified_at >= VERIFY_SECONDS
                if len(self._unverified) >= BATCH_REVEALS or (self._unverified and is_late):
                    await self._verify(facts)

    def _reveals(self, block: AuditBlock) -> list[RevealMessage]:
        """The counted reveals of a block. Those that cannot be decoded are left to the audit."""
        reveals = []
        for tx in block.txs:
            try:
                message = decode(tx.raw, self._round_id) if tx.code == 0 else None
            except AuditError:
                continue
            if isinstance(message, RevealMessage):
                reveals.append(message)
        return reveals

    async def _verify(self, facts: RoundFacts) -> None:
        """Verify the new reveals against the leaves that are published now.

        A reveal without a root is left to the audit: the node with the leaves may lag behind the one with the block.
        """
        unverified, self._unverified = self._unverified, []
        self._verified_at = anyio.current_time()
        findings = {check_id: Findings() for check_id in CHECKS}
        try:
            leaves = parse_leaf_blocks(await self._new_source().document(LEAVES))
        except (DataMissing, InvalidResponse):
            return
        roots = TreeChecks(leaves, findings).roots
        reveals = RevealChecks(facts, roots, findings, self.valid_proofs)
        try:
            for block, message in unverified:
                if message.anchor_height in roots:
                    await reveals.add(message, block.height, block.time)
            await reveals.verify_pending()
        finally:
            await reveals.cancel()
        for check_id in ("A3", "A4"):
            for problem in findings[check_id].problems:
                self._on_message(f"{check_id} will fail: {problem}")
