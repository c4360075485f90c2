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
from collections.abc import Iterable
from typing import Final

_WAL_HEADER: Final = 32
_FRAME_HEADER: Final = 24
_FILE_HEADER: Final = 100
_INTERIOR: Final = frozenset({2, 5})
_LEAF: Final = frozenset({10, 13})

MAX_PAGES: Final = 2**24 - 1
"""Beyond this many pages (64 GB) an overflow page could begin like a b-tree page; larger files are left alone."""


def wal_pages(wal_fd: int, frames: int, page_size: int) -> set[int]:
    """Numbers of the pages that the first `frames` frames of a WAL hold.

    Args:
        wal_fd: the WAL file, open for reading.
        frames: how many frames are valid, as the checkpoint told.
        page_size: bytes of a page.
    """
    step = _FRAME_HEADER + page_size
    return {int.from_bytes(os.pread(wal_fd, 4, _WAL_HEADER + index * step), "big") for index in range(frames)}


def gap_of(page: bytes, number: int) -> tuple[int, int] | None:
    """Start and end of the unused gap of a b-tree page, None for any other page.

    Args:
        page: the page's bytes.
        number: its number, from 1; the first page begins with the file's header.
    """
    head = _FILE_HEADER if number == 1 else 0
    kind = page[head]
    if kind in _LEAF:
        pointers = head + 8
    elif kind in _INTERIOR:
        pointers = head + 12
    else:
        return None
    start = pointers + 2 * int.from_bytes(page[head + 3 : head + 5], "big")
    end = int.from_bytes(page[head + 5 : head + 7], "big") or 65536
    return (start, end) if start <= end <= len(page) else None


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
        gap = gap_of(page, number)
        if gap is None:
            continue
        start, end = gap
        if again or page.count(0, start, end) != end - start:
            os.pwrite(db_fd, bytes(end - start), offset + start)
            cleaned += 1
    if cleaned:
        os.fsync(db_fd)
    return cleaned
