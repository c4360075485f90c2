"""Archive of a recorded round, written as the helper writes it."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence

from audit.archive_source import archive_documents
from helper.chain.block_reader import HistoryBlock, RevealHistory
from helper.chain.chain_data import Round, RoundStatus
from helper.chain.reveal_transaction import CountedReveal, parse_reveal
from helper.operations.archive_writer import ArchiveWriter
from helper.operations.archived_objects import PART_BLOCKS
from tests.support.audit_rounds import MemorySource
from tests.support.bucket import MemoryBucket
from tests.support.clock import JumpingClock

CHAIN_ID = "svote-1"


class SourceHistory(RevealHistory):
    """The blocks of a recorded round as a chain that continues with empty blocks."""

    chain_id: str | None = CHAIN_ID
    head: int = 0
    are_all_nodes_usable: bool = True

    def __init__(self, source: MemorySource) -> None:
        self._source = source
        self._blocks = {block.height: block for block in source.block_list}
        self.head = (max(self._blocks) // PART_BLOCKS + 1) * PART_BLOCKS + PART_BLOCKS - 1

    async def read_block(self, height: int) -> HistoryBlock:
        block = self._blocks.get(height)
        if block is None:
            return HistoryBlock(height, 2_000_000_000.0 if height > max(self._blocks) else 0.0, (), ())
        assert block.time is not None
        reveals: list[CountedReveal] = []
        others: list[tuple[bytes, bool | None]] = []
        for tx in block.txs:
            message = parse_reveal(tx.raw)
            if message is not None and tx.code == 0:
                reveals.append(CountedReveal(height, tx.raw, message))
            elif message is None and tx.code in (0, None):
                others.append((tx.raw, True if tx.code == 0 else None))
        return HistoryBlock(height, block.time, tuple(reveals), tuple(others))

    async def root_at(self, round_id: bytes, height: int) -> bytes | None:
        roots = self._source.documents["roots"]["roots"]
        return next((b64decode(entry["root"]) for entry in roots if entry["height"] == height), None)

    async def aclose(self) -> None:
        pass


async def archive_round(source: MemorySource, *, documents: bool = True) -> MemoryBucket:
    """Write the archive of a round: all parts of its blocks and, unless disabled, its documents."""
    bucket, history = MemoryBucket(), SourceHistory(source)
    created = source.block_list[0].height
    rounds: Sequence[Round] = [Round(source.round_id, RoundStatus.FINALIZED, 2_000_000_000, (), created)]
    writer = ArchiveWriter(bucket, history, rounds=lambda: rounds, clock=JumpingClock(), interval_seconds=60)
    while await writer.write_next_part():
        pass
    if documents:
        await archive_documents(bucket, source, source.round_id, chain_id=CHAIN_ID, height=writer.archived_height)
    return bucket


def remove_blocks(bucket: MemoryBucket) -> None:
    """Remove everything except the reveals."""
    for name in [name for name in bucket.objects if name.startswith(("blocks/", "rounds/"))]:
        del bucket.objects[name]
