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
from pathlib import Path
from typing import Final

from proofs import page_gap, pages_in_log

MAX_PAGES: Final = 2**24 - 1
"""Beyond this many pages (64 GB) an overflow page could begin like a b-tree page; larger files are left alone."""


def note_stale(stale: set[int], wal: Path, frames: range, page_size: int) -> None:
    """Keep a set of pages in step with frames of a WAL: a page belongs to it whose newest copy has bytes in its gap.

    Args:
        stale: numbers of pages, from 1; changed.
        wal: the WAL file.
        frames: which of its frames, from 0; all are valid, as the checkpoint told.
        page_size: bytes of a page.

    Raises:
        OSError: they can not be read, or the file is shorter than they are.
    """
    found, clean = pages_in_log(wal, frames.start, frames.stop, page_size)
    stale.difference_update(clean)
    stale.update(found)


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
        gap = page_gap(page, number)
        if gap is None:
            continue
        start, end = gap
        if again or page.count(0, start, end) < end - start:
            os.pwrite(db_fd, bytes(end - start), offset + start)
            cleaned += 1
    if cleaned:
        os.fsync(db_fd)
    return cleaned
