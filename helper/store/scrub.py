"""Zeroes the unused space of a database's pages.

`secure_delete` zeroes what a deleted row occupied. It does not reach copies that SQLite itself left behind: when a
b-tree is rebalanced, a page may be laid out anew from its end, and the old bytes of rows that moved stay in the gap
between the page's cell pointers and its first cell (measured: some tenths of a percent of all deleted rows). Those
bytes mean nothing to SQLite, and here they are overwritten in the file.

This is safe only when the file holds the newest version of each page (the whole WAL is written back) and nobody writes
meanwhile: the writer thread calls it, right after a checkpoint. A reader never looks at a gap.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from typing import Final

WAL_HEADER: Final = 32
"""Bytes before a WAL's first frame. They change whenever it is begun anew."""
_FRAME_HEADER: Final = 24
_FILE_HEADER: Final = 100
_NUMBER: Final = struct.Struct(">I")
"""A frame begins with its page's number."""
_PAGE_HEAD: Final = struct.Struct(">BHHH")
"""A b-tree page begins with its kind, its first free block, how many cells it has, and where their content begins."""
_HEAD_LENGTHS: Final = {2: 12, 5: 12, 10: 8, 13: 8}
"""By kind: interior pages, then leaves."""
_ZEROS: Final = bytes(65536)
_FRAMES_AT_ONCE: Final = 16

MAX_PAGES: Final = 2**24 - 1
"""Beyond this many pages (64 GB) an overflow page could begin like a b-tree page; larger files are left alone."""


def note_stale(stale: set[int], wal_fd: int, frames: range, page_size: int) -> None:
    """Keep a set of pages in step with frames of a WAL: a page belongs to it whose newest copy has bytes in its gap.

    Args:
        stale: numbers of pages, from 1; changed.
        wal_fd: the WAL file, open for reading.
        frames: which of its frames, from 0; all are valid, as the checkpoint told.
        page_size: bytes of a page.

    Raises:
        OSError: they can not be read, or the file is shorter than they are.
    """
    step = _FRAME_HEADER + page_size
    read = bytearray(step * min(_FRAMES_AT_ONCE, len(frames)))
    for first in range(frames.start, frames.stop, _FRAMES_AT_ONCE):
        length = step * min(_FRAMES_AT_ONCE, frames.stop - first)
        if os.preadv(wal_fd, [read], WAL_HEADER + first * step) < length:
            raise OSError("the write-ahead log is shorter than what was written back from it")
        for at in range(0, length, step):
            (number,) = _NUMBER.unpack_from(read, at)
            gap = gap_of(read, number, at + _FRAME_HEADER, page_size)
            if gap is None or _is_zero(read, *gap):
                stale.discard(number)
            else:
                stale.add(number)


def gap_of(file: bytes | bytearray, number: int, at: int, page_size: int) -> tuple[int, int] | None:
    """Start and end of the unused gap of a b-tree page, counted as `at` is; None for any other page.

    Args:
        file: bytes with the page in them.
        number: its number, from 1; the first page begins with the file's header.
        at: where it begins.
        page_size: its length.
    """
    head = _FILE_HEADER if number == 1 else 0
    kind, _, cells, content = _PAGE_HEAD.unpack_from(file, at + head)
    length = _HEAD_LENGTHS.get(kind)
    if length is None:
        return None
    start, end = head + length + 2 * cells, content or 65536
    return (at + start, at + end) if start <= end <= page_size else None


def _is_zero(file: bytes | bytearray, start: int, end: int) -> bool:
    return file.startswith(_ZEROS[: end - start], start)


def scrub_pages(db_fd: int, numbers: Iterable[int], page_size: int, *, again: bool = False) -> int:
    """Zero the gaps of these pages in the file, and sync it when any was not zero.

    Args:
        db_fd: the database file, open for reading and writing.
        numbers: the pages, from 1; pages beyond the end of the file are passed over.
        page_size: bytes of a page.
        again: write zeros also where they seem to be.

    Returns:
        How many gaps were written.
    """
    cleaned = 0
    for number in sorted(numbers):
        offset = (number - 1) * page_size
        page = os.pread(db_fd, page_size, offset)
        if len(page) < page_size or number > MAX_PAGES:
            break
        gap = gap_of(page, number, 0, page_size)
        if gap is None:
            continue
        start, end = gap
        if again or not _is_zero(page, start, end):
            os.pwrite(db_fd, bytes(end - start), offset + start)
            cleaned += 1
    if cleaned:
        os.fsync(db_fd)
    return cleaned
