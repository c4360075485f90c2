"""Writes the proof bundles of all confirmed reveals, and the other voting transactions, to the archive.

The writer proceeds in parts of `PART_BLOCKS` blocks. The content, time and order of its requests do not depend on the
shares of this helper. No other component waits for it. Failed writes are retried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Final

import anyio.to_thread
import structlog

from helper.chain.block_reader import RevealHistory
from helper.chain.chain_data import Round
from helper.chain.node_pool import gather_limited
from helper.chain.rest_client import HeightPrunedError
from helper.chain.reveal_transaction import CountedReveal
from helper.clock import Clock
from helper.errors import ChainUnavailable, HelperError, ProofBundleError
from helper.object_store import Bucket
from helper.observability.service_state import ArchiveState
from helper.operations.archived_objects import (
    PART_BLOCKS,
    IndexEntry,
    Progress,
    blocks_name,
    bundle_name,
    encode_block,
    encode_index,
    group_blocks,
    index_name,
    parse_object,
    part_heights,
    part_of_height,
    progress_name,
)
from helper.operations.proof_bundle import ProofBundle, find_circuit, pack_bundle

log = structlog.get_logger("helper.operations")

CONCURRENCY: Final = 4
"""Blocks that are processed concurrently, and bundles of one block."""
BATCH_BLOCKS: Final = 8
"""Blocks whose bundles are in memory at the same time."""
BATCH_PAUSE_SECONDS: Final = 0.05
"""Seconds between two batches, so that a long backlog does not delay the service."""
UNKNOWN_RESULT_BLOCKS: Final = PART_BLOCKS
"""Age of a block, in blocks, from which a transaction is archived even if its result is unknown."""
PRUNED_TIMEOUT_SECONDS: Final = 3600.0
"""Seconds after which a block is skipped if the reachable nodes have pruned it and the others stay unreachable."""


class ArchiveWriter:
    """Writes the archive. Two writers produce the same objects with the same content.

    Args:
        history: reads the blocks; closed with the writer.
        rounds: the agreed rounds, None while unknown.
        is_writer: whether this host writes the archive; a second writer would write the same objects again.
    """

    def __init__(
        self,
        bucket: Bucket,
        history: RevealHistory,
        *,
        rounds: Callable[[], Sequence[Round] | None],
        clock: Clock,
        interval_seconds: float,
        is_writer: Callable[[], bool] = lambda: True,
    ) -> None:
        self._bucket = bucket
        self._history = history
        self._rounds = rounds
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._is_writer = is_writer
        self._next_part: int | None = None
        # entries of the current part
        self._entries_by_height: dict[int, list[tuple[bytes, IndexEntry]]] = {}
        self._lines_by_height: dict[int, bytes] = {}
        self._roots: dict[tuple[bytes, int], bytes | None] = {}
        self._pruned: tuple[int, float] | None = None  # a pruned height, and when it was first reported (monotonic)
        self._lowest_height = 0  # all nodes have pruned the blocks below
        self._problem = ""

    @property
    def archived_height(self) -> int:
        """The height up to which all blocks are archived, 0 while unknown."""
        return 0 if self._next_part is None else max(0, part_heights(self._next_part).start - 1)

    def collect_status(self) -> ArchiveState:
        """Progress, lag and current problem, for operators."""
        head = self._history.head
        return ArchiveState(
            through=self.archived_height,
            behind=max(0, head - self.archived_height) if self.archived_height and head else None,
            problem=self._problem or None,
        )

    async def run(self) -> None:
        """Write parts until cancelled. Errors are logged and retried."""
        while True:
            progressed = False
            try:
                progressed = await self.write_next_part()
                self._problem = ""
            except HelperError as error:
                if str(error) != self._problem:
                    log.warning("archive_write_failed", reason=str(error), advice=error.advice)
                self._problem = str(error)
            except Exception as error:  # shown in the status, and retried at the usual interval
                self._problem = f"internal error: {type(error).__name__}"
                log.exception("archive_write_crashed")
            await self._clock.sleep(BATCH_PAUSE_SECONDS if progressed else self._interval_seconds)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._history.aclose()

    async def write_next_part(self) -> bool:
        """Write the next part if the chain has all its blocks. Returns whether it was written.

        Raises:
            HelperError: the archive cannot be written, or the chain cannot be read.
        """
        chain_id = self._history.chain_id
        if chain_id is None or not self._history.head:
            return False
        if not self._is_writer():
            self._clear_part()
            self._next_part = None  # another host writes now: read the progress again when this host takes over
            return False
        if self._next_part is None:
            self._next_part = await self._find_first_part(chain_id)
        if self._next_part is None:
            return False
        self._next_part = max(self._next_part, part_of_height(self._lowest_height))
        heights = part_heights(self._next_part)
        if heights[-1] > self._history.head:
            return False
        await self._write_part(self._next_part, heights, chain_id)
        progress = Progress(chain_id=chain_id, next_part=self._next_part + 1)
        await self._bucket.put(progress_name(chain_id), progress.to_line())
        self._next_part += 1
        self._clear_part()
        return True

    def _clear_part(self) -> None:
        self._pruned = None
        self._entries_by_height.clear()
        self._lines_by_height.clear()
        self._roots.clear()

    async def _find_first_part(self, chain_id: str) -> int | None:
        """The first part to write: from the stored progress, else from the oldest agreed round, None without one.

        Raises:
            ProofBundleError: the stored progress is ahead of the chain.
        """
        name = progress_name(chain_id)
        stored = await self._bucket.get(name)
        if stored is not None:
            part = parse_object(Progress, stored.body).next_part
            end = part_heights(part)[0] - 1
            if end > self._history.head + PART_BLOCKS:  # a smaller difference may be a node that is behind
                raise ProofBundleError(
                    f"the archive ends at block {end}, but the chain is at block {self._history.head}",
                    advice=f"If the chain was restarted with the same id, set [archive] place to a new path. "
                    f"If {name} was altered, delete it.",
                )
            return part
        rounds = self._rounds()
        if not rounds:  # perhaps none is agreed yet
            return None
        start = min(known.created_at_height for known in rounds)
        log.info("archive_started", height=start, chain_id=chain_id)
        return part_of_height(start)

    async def _write_part(self, part: int, heights: range, chain_id: str) -> None:
        """Write all bundles of these blocks, then the blocks, then the index parts that list the bundles."""
        for start in range(0, len(heights), BATCH_BLOCKS):
            batch = [
                height for height in heights[start : start + BATCH_BLOCKS] if height not in self._entries_by_height
            ]
            if batch:
                await gather_limited(batch, lambda height: self._write_block(height, chain_id), CONCURRENCY)
                await self._clock.sleep(BATCH_PAUSE_SECONDS)
        rounds: defaultdict[bytes, list[IndexEntry]] = defaultdict(list)
        for height in heights:
            for round_id, entry in self._entries_by_height[height]:
                rounds[round_id].append(entry)
        for written, content in group_blocks(sorted(self._lines_by_height.items())):
            await self._bucket.put(blocks_name(chain_id, written), content)
        for round_id, entries in rounds.items():
            await self._bucket.put(index_name(round_id, part), encode_index(entries))
        if rounds:
            count = sum(map(len, rounds.values()))
            log.info("archive_part_written", height=heights[-1], count=count, rounds=len(rounds))

    async def _write_block(self, height: int, chain_id: str) -> None:
        """Write the bundles of a block.

        Raises:
            ChainError: the block is not available, or the result of a recent transaction is not known yet.
        """
        if height < self._lowest_height:
            self._entries_by_height[height] = []
            return
        try:
            block = await self._history.read_block(height)
        except HeightPrunedError as error:
            self._skip_pruned(height, error)
            self._entries_by_height[height] = []
            return
        is_recent = height > self._history.head - UNKNOWN_RESULT_BLOCKS
        if is_recent and any(known is None for _, known in block.others):
            raise ChainUnavailable(f"block {height}: the result of a transaction in it is not known yet")
        written = await gather_limited(block.reveals, lambda reveal: self._write_reveal(reveal, chain_id), CONCURRENCY)
        self._lines_by_height[height] = encode_block(block)
        self._entries_by_height[height] = [entry for entry in written if entry is not None]

    async def _write_reveal(self, reveal: CountedReveal, chain_id: str) -> tuple[bytes, IndexEntry] | None:
        """Write the bundle of a reveal. Logs an error and returns None if the bundle cannot be created."""
        message = reveal.message
        try:
            proof_bundle = ProofBundle(
                chain_id=chain_id,
                height=reveal.height,
                transaction=reveal.raw,
                circuit=find_circuit(message.proof),
                root=await self._get_root(message.round_id, message.anchor_height),
            )
            bundle = await anyio.to_thread.run_sync(pack_bundle, proof_bundle)
        except ProofBundleError as error:
            log.error("archive_reveal_skipped", height=reveal.height, reason=str(error))
            return None
        await self._bucket.put(bundle_name(message.round_id, proof_bundle.tx_hash), bundle)
        return message.round_id, IndexEntry(
            height=reveal.height,
            transaction=proof_bundle.tx_hash,
            nullifier=message.nullifier.hex(),
            sha256=sha256(bundle).hexdigest(),
        )

    async def _get_root(self, round_id: bytes, height: int) -> bytes:
        key = round_id, height
        if key not in self._roots:
            self._roots[key] = await self._history.root_at(round_id, height)
        root = self._roots[key]
        if root is None:
            raise ProofBundleError(f"no node has the round's root at the anchor height {height}")
        return root

    def _skip_pruned(self, height: int, error: HeightPrunedError) -> None:
        """Skip a pruned block and all blocks below the lowest available height.

        Raises:
            HeightPrunedError: an unreachable node may still have the block.
        """
        now = self._clock.monotonic()
        if self._pruned is None or height < self._pruned[0]:
            self._pruned = (height, now)
        if not self._history.are_all_nodes_usable and now - self._pruned[1] < PRUNED_TIMEOUT_SECONDS:
            raise error
        lowest = (
            error.lowest_height
            if error.lowest_height is not None and height < error.lowest_height <= self._history.head
            else height + 1
        )
        if lowest <= self._lowest_height:
            return
        self._lowest_height = lowest
        log.error(
            "archive_blocks_missing",
            height=height,
            count=lowest - height,
            reason="all nodes have pruned these blocks",
            advice="Configure a node that keeps the blocks of an entire round.",
        )
