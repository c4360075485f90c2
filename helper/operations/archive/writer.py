"""Writes the proof bundles of all confirmed reveals to the archive, in parts of `PART` blocks.

The writer proceeds block by block. What it reads, when, and in which order does not depend on what this helper sent or
is about to send. No other component waits for it; failed writes are retried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Final, Protocol

import anyio.to_thread
import structlog

from helper.chain.counted_reveals import CountedReveal
from helper.chain.gather import gather_limited
from helper.chain.models import Round
from helper.chain.rest_client import HeightGoneError
from helper.clock import Clock
from helper.errors import BucketError, BucketRefused, HelperError, ProofBundleError
from helper.object_store.bucket import Bucket
from helper.observability.service_state import ArchiveState
from helper.operations.archive.object_names import (
    PART,
    Entry,
    Progress,
    bundle_name,
    heights_of,
    index_name,
    part_of,
    progress_name,
    write_index,
)
from helper.operations.proof_bundle import ProofBundle, circuit_of, pack
from proofs import CircuitInfo

log = structlog.get_logger("helper.operations")

PAUSES: Final = (2.0, 4.0)
"""Seconds before the second and third attempt of a write."""
CONCURRENCY: Final = 4
"""Blocks that are processed concurrently, and bundles of one block."""
BATCH_BLOCKS: Final = 8
"""Blocks whose bundles are in memory at the same time."""
BATCH_PAUSE: Final = 0.05
"""Seconds between two batches, so that a long backlog does not delay the service."""
GONE_TIMEOUT: Final = 3600.0
"""Seconds after which a block is skipped if the reachable nodes have pruned it and the others stay unreachable."""


class Blocks(Protocol):
    """Source of confirmed reveals. `helper.chain.reveal_history.RevealHistory` in production."""

    @property
    def chain_id(self) -> str | None:
        """The chain id, None while unknown."""
        ...

    @property
    def head(self) -> int:
        """The newest height, 0 while unknown."""
        ...

    @property
    def whole(self) -> bool:
        """Whether all nodes are reachable."""
        ...

    async def reveals(self, height: int) -> list[CountedReveal]:
        """Return the confirmed reveals of a block."""
        ...

    async def root_at(self, round_id: bytes, height: int) -> bytes | None:
        """Return the root of a round's commitment tree at a height."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class ArchiveWriter:
    """Writes the archive. Two writers produce the same objects with the same content.

    Args:
        bucket: the archive's bucket.
        blocks: the source of confirmed reveals.
        rounds: the chain's rounds, None while unknown.
        circuits: the known circuits.
        clock: the time.
        every: seconds between two checks for new blocks.
        mine: whether this host writes the archive; a second host would only repeat the work.
    """

    def __init__(
        self,
        bucket: Bucket,
        blocks: Blocks,
        *,
        rounds: Callable[[], Sequence[Round] | None],
        circuits: Mapping[str, CircuitInfo],
        clock: Clock,
        every: float,
        mine: Callable[[], bool] = lambda: True,
    ) -> None:
        self._bucket = bucket
        self._blocks = blocks
        self._rounds = rounds
        self._circuits = circuits
        self._clock = clock
        self._every = every
        self._mine = mine
        self._next: int | None = None
        self._read: dict[int, list[tuple[bytes, Entry]]] = {}  # entries of the current part, by height
        self._roots: dict[tuple[bytes, int], bytes | None] = {}
        self._gone: tuple[int, float] | None = None  # a pruned height, and when it was first reported (monotonic)
        self._lowest = 0  # all nodes have pruned the blocks below
        self._problem = ""

    @property
    def through(self) -> int:
        """The height up to which all blocks are archived, 0 while unknown."""
        return 0 if self._next is None else max(0, heights_of(self._next).start - 1)

    def facts(self) -> ArchiveState:
        """Progress, lag and current problem, for operators."""
        head = self._blocks.head
        return {
            "through": self.through,
            "behind": max(0, head - self.through) if self.through and head else None,
            "problem": self._problem or None,
        }

    async def run(self) -> None:
        """Write parts until cancelled. Errors are logged and retried."""
        try:
            while True:
                progressed = False
                try:
                    progressed = await self.step()
                    self._problem = ""
                except HelperError as error:
                    self._report(str(error), error.advice)
                except Exception as error:  # an archive failure must not stop the service
                    self._problem = f"internal error: {type(error).__name__}"
                    log.exception("archive_write_crashed")
                await self._clock.sleep(BATCH_PAUSE if progressed else self._every)
        finally:
            with anyio.CancelScope(shield=True):
                await self._blocks.aclose()

    def _report(self, reason: str, advice: str) -> None:
        """Log a problem when it first occurs."""
        if reason != self._problem:
            self._problem = reason
            log.warning("archive_write_failed", reason=reason, advice=advice)

    async def step(self) -> bool:
        """Write the next part if the chain has all its blocks. Returns False if there was nothing to do.

        Raises:
            HelperError: the archive cannot be written, or the chain cannot be read.
        """
        chain_id = self._blocks.chain_id
        if chain_id is None or not self._blocks.head:
            return False
        if not self._mine():
            self._forget()
            self._next = None  # another host writes now: read the progress again when this host takes over
            return False
        if self._next is None:
            self._next = await self._begin(chain_id)
        if self._next is None:
            return False
        self._next = max(self._next, part_of(self._lowest))
        heights = heights_of(self._next)
        if heights[-1] > self._blocks.head:
            return False
        await self._write_part(self._next, heights, chain_id)
        await self._write(progress_name(chain_id), Progress(chain_id=chain_id, next_part=self._next + 1).to_bytes())
        self._next += 1
        self._forget()
        return True

    def _forget(self) -> None:
        """Drop the data of the current part."""
        self._gone = None
        self._read.clear()
        self._roots.clear()

    async def _begin(self, chain_id: str) -> int | None:
        """The first part to write: after the stored progress, else at the creation of the oldest known round.

        Raises:
            ProofBundleError: the stored progress is ahead of the chain.
        """
        name = progress_name(chain_id)
        stored = await self._bucket.get(name)
        if stored is not None:
            part = Progress.from_bytes(stored.body).next_part
            end = heights_of(part)[0] - 1
            if end > self._blocks.head + PART:  # a smaller difference may be a node that is behind
                raise ProofBundleError(
                    f"the archive ends at block {end}, but the chain is at block {self._blocks.head}",
                    advice=f"If the chain was restarted with the same id, set [archive] place to a new path. "
                    f"If {name} was altered, delete it.",
                )
            return part
        rounds = self._rounds()
        if rounds is None:
            return None
        start = min((known.created_at_height for known in rounds), default=self._blocks.head)
        log.info("archive_started", height=start, chain_id=chain_id)
        return part_of(start)

    async def _write_part(self, part: int, heights: range, chain_id: str) -> None:
        """Write all bundles of these blocks, then the index parts that list them."""
        for start in range(0, len(heights), BATCH_BLOCKS):
            batch = [height for height in heights[start : start + BATCH_BLOCKS] if height not in self._read]
            if batch:
                await gather_limited(batch, lambda height: self._write_block(height, chain_id), CONCURRENCY)
                await self._clock.sleep(BATCH_PAUSE)
        rounds: defaultdict[bytes, list[Entry]] = defaultdict(list)
        for height in heights:
            for round_id, entry in self._read[height]:
                rounds[round_id].append(entry)
        for round_id, entries in rounds.items():
            await self._write(index_name(round_id, part), write_index(entries))
        if rounds:
            count = sum(map(len, rounds.values()))
            log.info("archive_part_written", height=heights[-1], count=count, rounds=len(rounds))

    async def _write_block(self, height: int, chain_id: str) -> None:
        reveals: list[CountedReveal] = []
        if height >= self._lowest:
            try:
                reveals = await self._blocks.reveals(height)
            except HeightGoneError as error:
                self._skip_pruned(height, error)
        written = await gather_limited(reveals, lambda reveal: self._write_reveal(reveal, chain_id), CONCURRENCY)
        self._read[height] = [entry for entry in written if entry is not None]

    async def _write_reveal(self, reveal: CountedReveal, chain_id: str) -> tuple[bytes, Entry] | None:
        """Write the bundle of a reveal. Logs and returns None if no bundle can be made of it."""
        message = reveal.message
        try:
            evidence = ProofBundle(
                chain_id=chain_id,
                height=reveal.height,
                transaction=reveal.raw,
                circuit=circuit_of(self._circuits, message.proof),
                root=await self._root(message.round_id, message.anchor_height),
            )
            bundle = await anyio.to_thread.run_sync(pack, evidence)
        except ProofBundleError as error:
            log.error("archive_reveal_skipped", height=reveal.height, reason=str(error))
            return None
        await self._write(bundle_name(message.round_id, evidence.tx_hash), bundle)
        return message.round_id, Entry(
            height=reveal.height,
            transaction=evidence.tx_hash,
            nullifier=message.nullifier.hex(),
            sha256=sha256(bundle).hexdigest(),
        )

    async def _root(self, round_id: bytes, height: int) -> bytes:
        key = round_id, height
        if key not in self._roots:
            self._roots[key] = await self._blocks.root_at(round_id, height)
        root = self._roots[key]
        if root is None:
            raise ProofBundleError(f"no node has the round's root at the anchor height {height}")
        return root

    async def _write(self, name: str, body: bytes) -> None:
        """Write an object, in up to three attempts."""
        for pause in PAUSES:
            try:
                await self._bucket.put(name, body)
            except BucketRefused:
                raise
            except BucketError:
                await self._clock.sleep(pause)
            else:
                return
        await self._bucket.put(name, body)

    def _skip_pruned(self, height: int, gone: HeightGoneError) -> None:
        """Skip a pruned block and all blocks below the lowest available height.

        Raises:
            HeightGoneError: an unreachable node may still have the block.
        """
        now = self._clock.monotonic()
        if self._gone is None or height < self._gone[0]:
            self._gone = (height, now)
        if not self._blocks.whole and now - self._gone[1] < GONE_TIMEOUT:
            raise gone
        lowest = gone.lowest if gone.lowest is not None and height < gone.lowest <= self._blocks.head else height + 1
        if lowest <= self._lowest:
            return
        self._lowest = lowest
        log.error(
            "archive_blocks_missing",
            height=height,
            count=lowest - height,
            reason="all nodes have pruned these blocks",
            advice="Configure a node that keeps the blocks of an entire round.",
        )
