"""Writes the bundles of all the chain's counted reveals into the archive, part by part, beside the service.

It goes by blocks alone: what this helper sent or is about to send plays no part in what it reads, when, or in which
order. Nothing waits for it: what fails is tried again, and at last left for the next look.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, Protocol

import anyio.to_thread
import structlog

from helper.chain.gather import gather_limited
from helper.chain.lookups import CountedReveal
from helper.chain.models import Round
from helper.chain.rest_client import HeightGoneError
from helper.clock import Clock
from helper.errors import BucketError, BucketRefused, HelperError, ProofBundleError
from helper.object_store.bucket import Bucket
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

log = structlog.get_logger("helper.archive")

PAUSES: Final = (2.0, 4.0)
"""Seconds before the second and the third try of a write."""
AT_ONCE: Final = 4
"""Blocks that are worked on at once, and bundles of one block."""
LOT: Final = 8
"""Blocks whose bundles are in memory at once."""
BREATH: Final = 0.05
"""Seconds between two lots, so that a long way to go takes nobody's turn."""
GIVEN_UP: Final = 3600.0
"""Seconds after which a block that those nodes have no more who can be asked is left out, though others can not."""


class Blocks(Protocol):
    """Where counted reveals come from (`helper.chain.reveal_history.RevealHistory`)."""

    @property
    def chain_id(self) -> str | None:
        """The chain's id, None while no node has told it."""
        ...

    @property
    def head(self) -> int:
        """The newest height; 0 while there is none."""
        ...

    @property
    def whole(self) -> bool:
        """Whether every node may be asked now."""
        ...

    async def reveals(self, height: int) -> list[CountedReveal]:
        """The reveals of a block that counted."""
        ...

    async def root_at(self, round_id: bytes, height: int) -> bytes | None:
        """A round's root as it was stored at a height."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class ArchiveWriter:
    """The one that writes. Two of them write the same bytes under the same names.

    Args:
        bucket: the archive's place.
        blocks: the chain.
        rounds: the chain's rounds, None while they are not known.
        circuits: the circuits that are known here.
        clock: the time.
        every: seconds between two looks.
        mine: whether this host is the one of several that writes; another one's work would only be done twice.
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
        self._read: dict[int, list[tuple[bytes, Entry]]] = {}  # of the part under way: height -> what it has
        self._roots: dict[tuple[bytes, int], bytes | None] = {}
        self._gone: tuple[int, float] | None = None  # a height that is gone, and since when that is known
        self._below = 0  # no block below has any node
        self._told = ""

    @property
    def through(self) -> int:
        """The newest height that is in the archive with all before it; 0 while that is not known."""
        return 0 if self._next is None else max(0, heights_of(self._next).start - 1)

    def facts(self) -> dict[str, Any]:
        """For operators: how far it is, how far it could be, and what keeps it up."""
        head = self._blocks.head
        return {
            "through": self.through,
            "behind": max(0, head - self.through) if self.through and head else None,
            "problem": self._told or None,
        }

    async def run(self) -> None:
        """Write for ever. Nothing that goes wrong ends it."""
        try:
            while True:
                moved = False
                try:
                    moved = await self.step()
                    self._told = ""
                except HelperError as error:
                    self._tell(str(error), error.advice)
                except Exception as error:  # whatever it is: an archive that fails must not end a helper that reveals
                    self._told = f"an error of the helper's own: {type(error).__name__}"
                    log.exception("the archive was not written")
                await self._clock.sleep(BREATH if moved else self._every)
        finally:
            with anyio.CancelScope(shield=True):
                await self._blocks.aclose()

    def _tell(self, reason: str, advice: str) -> None:
        """A line for each trouble, not for each look."""
        if reason != self._told:
            self._told = reason
            log.warning("the archive was not written, and is again later", reason=reason, advice=advice)

    async def step(self) -> bool:
        """Write the next part, if the chain has all its blocks; False when there was nothing to do yet.

        Raises:
            HelperError: it could not be written, or not be read from the chain.
        """
        chain_id = self._blocks.chain_id
        if chain_id is None or not self._blocks.head:
            return False
        if not self._mine():
            self._forget()
            self._next = None  # whoever writes now goes on; how far that is by then is read again
            return False
        if self._next is None:
            self._next = await self._begin(chain_id)
        if self._next is None:
            return False
        self._next = max(self._next, part_of(self._below))
        heights = heights_of(self._next)
        if heights[-1] > self._blocks.head:
            return False
        await self._write_part(self._next, heights, chain_id)
        await self._keep(progress_name(chain_id), Progress(chain_id=chain_id, next_part=self._next + 1).to_bytes())
        self._next += 1
        self._forget()
        return True

    def _forget(self) -> None:
        """What was read for a part."""
        self._gone = None
        self._read.clear()
        self._roots.clear()

    async def _begin(self, chain_id: str) -> int | None:
        """The first part to write: where the archive ends, else where the oldest round that is known begins.

        Raises:
            EvidenceError: it ends where the chain has not come to, so that it would be waited for, and for what.
        """
        name = progress_name(chain_id)
        found = await self._bucket.get(name)
        if found is not None:
            part = Progress.from_bytes(found.body).next_part
            ends = heights_of(part)[0] - 1
            if ends > self._blocks.head + PART:  # less may be a node that is behind the one that was asked before
                raise ProofBundleError(
                    f"the archive goes to block {ends}, and the chain to {self._blocks.head}",
                    advice=f"If the chain was begun anew under its old id, give [archive] place a new path; if {name} "
                    "is not what was written there, delete it.",
                )
            return part
        rounds = self._rounds()
        if rounds is None:
            return None
        start = min((known.created_at_height for known in rounds), default=self._blocks.head)
        log.info("an archive begins", height=start, chain_id=chain_id)
        return part_of(start)

    async def _write_part(self, part: int, heights: range, chain_id: str) -> None:
        """All bundles of these blocks, then the indices that name them."""
        for start in range(0, len(heights), LOT):
            lot = [height for height in heights[start : start + LOT] if height not in self._read]
            if lot:
                await gather_limited(lot, lambda height: self._write_block(height, chain_id), AT_ONCE)
                await self._clock.sleep(BREATH)
        rounds: defaultdict[bytes, list[Entry]] = defaultdict(list)
        for height in heights:
            for round_id, entry in self._read[height]:
                rounds[round_id].append(entry)
        for round_id, entries in rounds.items():
            await self._keep(index_name(round_id, part), write_index(entries))
        if rounds:
            count = sum(map(len, rounds.values()))
            log.info("archived", height=heights[-1], count=count, rounds=len(rounds))

    async def _write_block(self, height: int, chain_id: str) -> None:
        reveals: list[CountedReveal] = []
        if height >= self._below:
            try:
                reveals = await self._blocks.reveals(height)
            except HeightGoneError as error:
                self._leave_out(height, error)
        written = await gather_limited(reveals, lambda reveal: self._write_reveal(reveal, chain_id), AT_ONCE)
        self._read[height] = [one for one in written if one is not None]

    async def _write_reveal(self, reveal: CountedReveal, chain_id: str) -> tuple[bytes, Entry] | None:
        """A reveal's bundle; None for one that none can be made of, which is told."""
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
            log.error("a counted reveal is not archived", height=reveal.height, reason=str(error))
            return None
        await self._keep(bundle_name(message.round_id, evidence.tx_hash), bundle)
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
            raise ProofBundleError(f"no node has the round's root at the anchor's height {height}")
        return root

    async def _keep(self, name: str, body: bytes) -> None:
        """Write an object, in three tries."""
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

    def _leave_out(self, height: int, gone: HeightGoneError) -> None:
        """A block that is gone: leave it out with those before the lowest that there is, where that is certain.

        Raises:
            HeightGoneError: what was said, while there is a node that could not be asked.
        """
        now = self._clock.monotonic()
        if self._gone is None or height < self._gone[0]:
            self._gone = (height, now)
        if not self._blocks.whole and now - self._gone[1] < GIVEN_UP:
            raise gone
        lowest = gone.lowest if gone.lowest is not None and height < gone.lowest <= self._blocks.head else height + 1
        if lowest <= self._below:
            return
        self._below = lowest
        log.error(
            "blocks are missing in the archive",
            height=height,
            count=lowest - height,
            reason="no node has them any more",
            advice="Give the helper a node that keeps the blocks of a whole round.",
        )
