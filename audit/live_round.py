"""Reads a round while it runs, verifies the proofs of its reveals, and stores the blocks that it has read.

An interrupted audit continues from the stored blocks. Their file has one line with the round, then one line for each
block.
"""

from __future__ import annotations

import fcntl
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Final

import anyio
import orjson

from audit.check_results import CHECKS, Findings
from audit.documents import FINALIZED, RoundFacts, parse_leaf_blocks, parse_round_facts
from audit.round_checks import BATCH_REVEALS, RevealChecks, TreeChecks
from audit.source import LEAVES, MAX_LINE_BYTES, ROUND, AuditBlock, AuditSource, DataMissing, decode_block, encode_block
from audit.transactions import decode
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import AuditError, ChainUnavailable, InvalidResponse

_FORMAT: Final = "svote-helper audit blocks 1"


class BlockCache:
    """A source whose blocks are stored in a file.

    Args:
        source: the source of documents and further blocks. It has all blocks.
        path: the file; created if it does not exist.
        round_id: 32 bytes.

    Raises:
        AuditError: the file is of another round, is not a cache, or is used by another audit.
    """

    has_all_blocks = True

    def __init__(self, source: AuditSource, path: Path, round_id: bytes) -> None:
        self._source = source
        self._path = path
        self._first_height = self._next_height = 0
        self._file = path.open("ab+")
        try:
            self._open(round_id)
        except BaseException:
            self._file.close()
            raise

    def _open(self, round_id: bytes) -> None:
        """Lock and check the file. Removes a last line that was not written completely."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AuditError(f"{self._path} is used by another audit") from None
        header = orjson.dumps({"format": _FORMAT, "round": round_id.hex()}) + b"\n"
        self._file.seek(0)
        line = self._file.readline(len(header) + 1)
        if not line or (not line.endswith(b"\n") and header.startswith(line)):
            self._file.truncate(0)
            self._file.write(header)
            self._file.flush()
        elif line != header:
            raise AuditError(f"{self._path} has no blocks of this round")
        self._start = len(header)
        for block in self._read():
            self._first_height = self._first_height or block.height
            self._next_height = block.height + 1

    @property
    def next_height(self) -> int:
        """The height after the last stored block, 0 without one."""
        return self._next_height

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    async def document(self, name: str) -> object:
        """Return a document of the source."""
        return await self._source.document(name)

    async def blocks(self, first: int) -> AsyncGenerator[AuditBlock]:
        """Iterate over the stored blocks from a height on, then over further ones of the source, which are stored.

        If the first block is before the stored ones, for example because a node had reported another one, all blocks
        are read from the source.
        """
        height = first
        for block in self._read() if self._first_height <= first < self._next_height else ():
            if block.height >= first:
                yield block
                height = block.height + 1
        async with aclosing(self._source.blocks(height)) as blocks:
            async for block in blocks:
                self._append(block)
                yield block

    def _read(self) -> Iterator[AuditBlock]:
        """Iterate over the stored blocks, which follow each other. Removes anything after the last complete one."""
        at, height = self._start, 0
        while True:
            self._file.seek(at)
            line = self._file.readline(MAX_LINE_BYTES)
            if not line:
                return
            try:
                block = decode_block(line)
            except (ValueError, InvalidResponse):
                block = None
            if block is None or not line.endswith(b"\n") or (height and block.height != height):
                self._file.truncate(at)
                return
            at, height = at + len(line), block.height + 1
            yield block

    def _append(self, block: AuditBlock) -> None:
        """Store a block, unless a result in it is not known yet or the block before it is not stored."""
        is_known = all(tx.code is not None for tx in block.txs)
        if is_known and self._next_height in (0, block.height):
            self._file.write(encode_block(block))
            self._file.flush()
            self._first_height = self._first_height or block.height
            self._next_height = block.height + 1


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
