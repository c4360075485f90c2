"""Stores the blocks that an audit has read, so that an interrupted audit continues where it stopped.

The file has one line with the round, then one line for each block.
"""

from __future__ import annotations

import fcntl
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Final

import orjson

from audit.source import MAX_LINE_BYTES, AuditBlock, AuditSource, decode_block, encode_block
from helper.errors import AuditError, InvalidResponse

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
