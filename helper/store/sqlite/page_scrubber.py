"""Zeroes the unused space of a database's pages.

`secure_delete` zeroes the space of a deleted row, but not stale copies of it. When SQLite rebalances a b-tree, it may
rewrite a page from its end, and old bytes of moved rows remain in the gap between the cell pointers of the page and its
first cell (measured: a few tenths of a percent of all deleted rows). SQLite ignores these bytes; this module overwrites
them in the file.

This is safe only if the file has the newest version of each page (the complete WAL is checkpointed) and no connection
writes at the same time. Therefore only the writer thread calls it, directly after a checkpoint. Readers never read a
gap.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from proofs import page_gap, pages_in_log

MAX_PAGES: Final = 2**24 - 1
"""Highest page that is scrubbed (64 GB). Above it, an overflow page could begin with the bytes of a b-tree page."""


def note_stale(stale: set[int], wal: Path, frames: range, page_size: int) -> None:
    """Update the set of pages with stale bytes from frames of a WAL.

    A page is stale if its newest copy has nonzero bytes in its gap.

    Args:
        stale: page numbers, from 1; modified.
        wal: the WAL file.
        frames: range of frame numbers, from 0; the checkpoint reported all of them as valid.
        page_size: bytes of a page.

    Raises:
        OSError: they cannot be read, or the file ends before them.
    """
    dirty, clean = pages_in_log(wal, frames.start, frames.stop, page_size)
    stale.difference_update(clean)
    stale.update(dirty)


def scrub_pages(db_fd: int, numbers: Iterable[int], page_size: int, *, again: bool = False) -> int:
    """Zero the gaps of these pages in the file, and sync it if any was not zero.

    Args:
        db_fd: the database file, open for reading and writing.
        numbers: the pages, from 1; pages past the end of the file are skipped.
        page_size: bytes of a page.
        again: write zeros even if the gap already contains only zeros.

    Returns:
        The number of gaps that were written.
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
