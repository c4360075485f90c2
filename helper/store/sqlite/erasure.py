"""Checkpoints the WAL and erases deleted rows from the files.

Only the writer thread checkpoints. It does so regularly, so that the WAL stays small. Soon after a deletion it also
truncates the WAL and scrubs the pages written since then. `ErasureSchedule`, which does no I/O, decides when.

`secure_delete` zeroes the space of a deleted row, but not stale copies of it. When SQLite rebalances a b-tree, it may
rewrite a page from its end, and old bytes of moved rows remain in the gap between the cell pointers of the page and its
first cell (measured: a few tenths of a percent of all deleted rows). SQLite ignores these bytes; they are overwritten
here in the file.

This is safe only if the file has the newest version of each page (the complete WAL is checkpointed) and no connection
writes at the same time. Therefore it is done only on the writer thread, directly after a checkpoint. Readers never read
a gap.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Final

import structlog

from helper.clock import Clock
from helper.store.sqlite.displacement import wal_path
from helper.store.sqlite.errors import is_disk_full
from proofs import LOG_HEADER, page_gap, pages_in_log

ERASE_WITHIN_SECONDS: Final = 1.0
"""Maximum delay of erasure after a deletion, in seconds, if the writer is never idle."""
RETRY_SECONDS: Final = 0.05
"""Seconds until the next attempt if a reader blocked the truncation of the WAL."""
ERROR_RETRY_SECONDS: Final = 0.5
"""Seconds until the next attempt after a disk error."""
CHANGES_PER_CHECKPOINT: Final = 2000
"""Changed rows after which the WAL is checkpointed."""
SLICE_PAUSE: Final = 0.01
"""Seconds between two slices if the writer is idle."""
SLICE_PAUSE_FACTOR: Final = 9
"""Pause before the next slice while there are writes, as a multiple of the last slice's duration.

With 9, slices take a tenth of the writer's time. Idle time is not a usable trigger: under load, the writer is briefly
idle 100 times per second.
"""


class Action(Enum):
    """Action of the writer between two batches."""

    NONE = "nothing"
    WRITE_BACK = "checkpoint the WAL"
    ERASE = "checkpoint the WAL, scrub the pages and truncate the WAL"


class ErasureSchedule:
    """Decides which action is due. No I/O.

    Times are monotonic; `changes` is the total number of rows that the connection has changed.

    Attributes:
        has_failed: whether a checkpoint failed with a disk error, and not everything was erased since.
        unscrubbed: number of pages, from page 1, in which a crashed process may have left stale bytes.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self.unscrubbed = 0
        self._deadline: float | None = None  # for the erasure of deleted rows; None if there are none
        self._pending_since: float | None = None  # the first of these deletions
        self._retry_at = 0.0  # after a failure
        self._checkpoint_changes = 0  # changes at the last checkpoint
        self._slice_changes = 0  # changes at the last slice
        self._next_slice_at = 0.0

    @property
    def is_pending(self) -> bool:
        """Whether the files may still contain deleted data."""
        return self._deadline is not None or self.unscrubbed > 0

    def is_pending_since(self, at: float) -> bool:
        """Whether the files may still contain data deleted until `at`, monotonic seconds."""
        since = self._pending_since
        return self.unscrubbed > 0 or (since is not None and since <= at)

    def pending_seconds(self, now: float) -> float:
        """Return the seconds since the first deletion that is not erased yet; 0 without one."""
        since = self._pending_since
        return 0.0 if since is None else max(0.0, now - since)

    def next_action(self, now: float, *, is_idle: bool, changes: int) -> Action:
        """Return the action that is due now. The writer is idle if no jobs are waiting for it."""
        if self.has_failed and now < self._retry_at:
            return Action.NONE
        if self._deadline is not None and (is_idle or now >= self._deadline):
            return Action.ERASE
        if changes - self._checkpoint_changes >= CHANGES_PER_CHECKPOINT or (is_idle and self.slice_due(now, changes)):
            return Action.WRITE_BACK
        return Action.NONE

    def slice_due(self, now: float, changes: int) -> bool:
        """Return whether a checkpoint that starts now may scrub a slice of the unscrubbed pages."""
        return self.unscrubbed > 0 and (now >= self._next_slice_at or changes == self._slice_changes)

    def has_unwritten_changes(self, changes: int) -> bool:
        """Return whether rows changed after the last checkpoint began."""
        return changes != self._checkpoint_changes

    def longest_wait(self) -> float | None:
        """Return the seconds the writer may wait for jobs before it calls `next_action`; None for no limit."""
        if self._deadline is not None:
            return RETRY_SECONDS
        return SLICE_PAUSE if self.unscrubbed else None

    def rows_deleted(self, now: float) -> None:
        """Record that a committed transaction has deleted rows."""
        if self._deadline is None:
            self._deadline = now + ERASE_WITHIN_SECONDS
            self._pending_since = now

    def checkpoint_begun(self, changes: int) -> None:
        """Record the start of a checkpoint."""
        self._checkpoint_changes = changes

    def slice_scrubbed(self, pages: int, *, began: float, now: float, changes: int) -> None:
        """Record that a slice was scrubbed, after a checkpoint that began at `began`; `pages` are still unscrubbed."""
        self.unscrubbed = pages
        self._next_slice_at, self._slice_changes = now + SLICE_PAUSE_FACTOR * (now - began), changes

    def erased(self) -> None:
        """Record that the WAL was truncated, so no deleted row remains."""
        self._deadline = self._pending_since = None

    def blocked_by_reader(self, now: float) -> None:
        """Record that a reader blocked the truncation of the WAL."""
        if self._deadline is not None:
            self._deadline = max(self._deadline, now + RETRY_SECONDS)

    def failed(self, now: float) -> None:
        """Record that a checkpoint failed with a disk error."""
        self._retry_at = now + ERROR_RETRY_SECONDS
        self.has_failed = True


MAX_PAGES: Final = 2**24 - 1
"""Highest page that is scrubbed (64 GB). Above it, an overflow page could begin with the bytes of a b-tree page."""


def note_stale(stale: set[int], wal: Path, frames: range, page_size: int) -> None:
    """Update the numbers (from 1) of pages with stale bytes from frames of a WAL (numbered from 0).

    A page is stale if its newest copy has nonzero bytes in its gap. The checkpoint reported all frames as valid.

    Raises:
        OSError: they cannot be read, or the file ends before them.
    """
    dirty, clean = pages_in_log(wal, frames.start, frames.stop, page_size)
    stale.difference_update(clean)
    stale.update(dirty)


def scrub_pages(db_fd: int, numbers: Iterable[int], page_size: int, *, again: bool = False) -> int:
    """Zero the gaps of these pages (numbered from 1) in the file, and sync it if any was not zero.

    Pages past the end of the file are skipped. With `again`, zeros are written even over zeros. Returns the number of
    gaps that were written.
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


log = structlog.get_logger("helper.store")

PAGES_AT_ONCE: Final = 16_384
"""Pages (64 MB) that are scrubbed before the start after a crash.

The other pages of a larger file are scrubbed in slices of `SLICE` pages while the writer runs.
"""
SLICE: Final = 1000
"""Pages per slice. A slice takes a few milliseconds, so that wallets do not wait noticeably."""
PAGES_PER_SCRUB: Final = 1024
"""Number of stale pages that triggers a scrub even if nothing was deleted, which limits the duration of a scrub."""


class Eraser:
    """Checkpoints and erases. Used only on the writer thread, and never while a transaction is open."""

    def __init__(self, conn: sqlite3.Connection, path: Path, clock: Clock) -> None:
        self._conn = conn
        self._clock = clock
        self._wal = wal_path(path)
        # Closing any descriptor of the file releases SQLite's own locks on it, so this one stays open until every
        # connection of the process is closed.
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._page_size = int(conn.execute("PRAGMA page_size").fetchone()[0])
        self._stale: set[int] = set()  # pages of the file that may have stale bytes in their gaps
        self._examined = (b"", 0)  # the WAL's header, and the number of its frames that were examined
        self._is_cache_stale = False  # the connection's cache may hold stale bytes that were scrubbed in the file
        self._schedule = ErasureSchedule()

    @property
    def is_pending(self) -> bool:
        """Whether the files may still contain deleted data."""
        return self._schedule.is_pending

    def is_pending_since(self, at: float) -> bool:
        """Whether the files may still contain data deleted until `at`, monotonic seconds. Any thread may call it."""
        return self._schedule.is_pending_since(at)

    @property
    def pending_seconds(self) -> float:
        """Seconds for which deleted rows have not been erased; 0 if there are none. Any thread may read it."""
        return self._schedule.pending_seconds(self._clock.monotonic())

    def record_deletion(self) -> None:
        """Record that a committed transaction has deleted rows."""
        self._schedule.rows_deleted(self._clock.monotonic())

    def max_wait(self) -> float | None:
        """Return the seconds the writer may wait for work before it calls `run_due` again; None for no limit."""
        return self._schedule.longest_wait()

    def run_due(self, *, idle: bool) -> None:
        """Run the due checkpoint or erasure. Called after each commit, and if no work arrives within `max_wait`."""
        action = self._schedule.next_action(self._clock.monotonic(), is_idle=idle, changes=self._conn.total_changes)
        if action is not Action.NONE:
            self._checkpoint(truncate=action is Action.ERASE)

    def erase_all(self) -> None:
        """Erase immediately and scrub every page of the file, at the start after a crash.

        The first pages of a large file are scrubbed later, in slices, while `is_pending`. If the last fsync of the
        crashed process failed, its WAL may be only in the page cache; the checkpoint writes it to the database and
        syncs.

        Raises:
            sqlite3.Error, OSError: it failed, except because the disk is full.
        """
        self.record_deletion()
        count = int(self._conn.execute("PRAGMA page_count").fetchone()[0])
        unscrubbed = max(0, count - PAGES_AT_ONCE)
        self._schedule.unscrubbed = unscrubbed
        self._stale.update(range(unscrubbed + 1, count + 1))
        try:
            self._try_checkpoint(truncate=True)
        except (sqlite3.Error, OSError) as error:
            if not is_disk_full(error):
                raise
            self._record_failure(error)

    def write_back(self) -> bool:
        """Checkpoint the WAL. Returns whether the database file now contains every commit."""
        return self._checkpoint(truncate=False)

    def finish(self) -> None:
        """Complete pending erasure before the connection is closed."""
        if self.is_pending or self._stale or self._schedule.has_unwritten_changes(self._conn.total_changes):
            self._checkpoint(truncate=True)

    def close(self) -> None:
        """Close the file. Call this after every connection of this process is closed."""
        os.close(self._fd)

    def _checkpoint(self, *, truncate: bool) -> bool:
        """Checkpoint the WAL. Returns whether it is complete, including truncation if requested."""
        try:
            return self._try_checkpoint(truncate=truncate)
        except (sqlite3.Error, OSError) as error:
            # The disk is full or failing: commits report it to their callers, and the checkpoint is retried.
            self._record_failure(error)
            return False

    def _record_failure(self, error: Exception) -> None:
        if not self._schedule.has_failed:
            log.warning("checkpoint_failed", error=str(error))
        self._schedule.failed(self._clock.monotonic())

    def _try_checkpoint(self, *, truncate: bool) -> bool:
        began = self._clock.monotonic()
        self._schedule.checkpoint_begun(self._conn.total_changes)
        is_complete = self._write_back(began, erase=truncate) and (not truncate or self._truncate_wal())
        if truncate and is_complete:
            self._schedule.erased()
        elif truncate:
            self._schedule.blocked_by_reader(began)
        if not self.is_pending and not self._stale:  # until then, all pages of the failed attempt are written again
            self._schedule.has_failed = False
        return is_complete

    def _write_back(self, began: float, *, erase: bool) -> bool:
        """Checkpoint the WAL and scrub the due pages. Returns whether the complete WAL was checkpointed."""
        _, frames, done = self._conn.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if frames > 0:
            self._examine_new_frames(frames)
        if done != frames:
            return False  # a reader uses an older snapshot; a later attempt completes the checkpoint
        if self._schedule.slice_due(began, self._conn.total_changes):
            self._scrub_slice(began)
        if erase or len(self._stale) >= PAGES_PER_SCRUB:
            self._scrub_pages(self._stale)
        if erase:
            self._drop_stale_cache()
        return True

    def _scrub_slice(self, began: float) -> None:
        """Scrub the next slice of pages written by a crashed process, after the WAL was checkpointed."""
        unscrubbed = self._schedule.unscrubbed
        left = max(0, unscrubbed - SLICE)
        self._scrub_pages(set(range(left + 1, unscrubbed + 1)))
        self._drop_stale_cache()
        self._schedule.slice_scrubbed(left, began=began, now=self._clock.monotonic(), changes=self._conn.total_changes)

    def _examine_new_frames(self, frames: int) -> None:
        """Examine the frames that are new since the last call; a restarted WAL has a different header."""
        try:
            with self._wal.open("rb") as file:
                head = file.read(LOG_HEADER)
            first = self._examined[1] if self._examined[0] == head else 0
            note_stale(self._stale, self._wal, range(min(first, frames), frames), self._page_size)
            self._examined = (head, frames)
        except OSError:
            # The next commit may restart the WAL before its pages are known, so all pages must be scrubbed.
            self._schedule.unscrubbed = int(self._conn.execute("PRAGMA page_count").fetchone()[0])
            raise

    def _scrub_pages(self, pages: set[int]) -> None:
        # After a failed fsync, zeros in the page cache may not be on disk, so they are written again.
        if scrub_pages(self._fd, pages, self._page_size, again=self._schedule.has_failed):
            self._is_cache_stale = True
        pages.clear()

    def _drop_stale_cache(self) -> None:
        """Drop the connection's cache if it may contain the stale bytes of scrubbed pages.

        Otherwise SQLite would write these bytes to the file again when it next changes such a page.
        """
        if self._is_cache_stale:
            self._conn.execute("PRAGMA shrink_memory")
            self._is_cache_stale = False

    def _truncate_wal(self) -> bool:
        """Truncate the WAL without waiting for readers, which would block the writer thread."""
        self._conn.execute("PRAGMA busy_timeout = 0")
        try:
            busy, _, _ = self._conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._conn.execute("PRAGMA busy_timeout = 5000")
        return not busy
