"""Checkpoints the WAL and erases deleted rows from the files.

Only the writer thread checkpoints. It does so regularly, so that the WAL stays small. Soon after a deletion it also
truncates the WAL and scrubs the pages written since then (see `page_scrubber.py`). `erasure_schedule.py` decides when.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Final

import structlog

from helper.clock import Clock
from helper.store.sqlite.displacement import wal_path
from helper.store.sqlite.erasure_schedule import Action, ErasureSchedule, ErasureState
from helper.store.sqlite.errors import is_disk_full
from helper.store.sqlite.page_scrubber import note_stale, scrub_pages
from proofs import LOG_HEADER

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
    """Checkpoints and erases. Used only on the writer thread.

    Args:
        conn: the writing connection; no transaction is open when a method is called.
        path: the database file.
        clock: only its monotonic time is used.

    Attributes:
        scrubbed_gaps: number of gaps with stale bytes that were scrubbed.
    """

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
        self.scrubbed_gaps = 0

    @property
    def is_pending(self) -> bool:
        """Whether the files may still contain deleted data."""
        return self._schedule.is_pending

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
        """Run the due checkpoint or erasure. Called after each commit, and if no work arrives within `max_wait`.

        Args:
            idle: whether no jobs are waiting for the writer.
        """
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
        self._schedule.pages_unscrubbed(unscrubbed)
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
        if self._schedule.state is not ErasureState.FAILED:
            log.warning("checkpoint_failed", error=str(error))
        self._schedule.failed(self._clock.monotonic())

    def _try_checkpoint(self, *, truncate: bool) -> bool:
        began = self._clock.monotonic()
        self._schedule.checkpoint_begun(self._conn.total_changes)
        is_complete = self._write_back(began, erase=truncate) and (not truncate or self._truncate_wal())
        if not truncate:
            self._schedule.written_back()
        elif is_complete:
            self._schedule.erased()
        else:
            self._schedule.blocked_by_reader(began)
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
            self._schedule.pages_unscrubbed(int(self._conn.execute("PRAGMA page_count").fetchone()[0]))
            raise

    def _scrub_pages(self, pages: set[int]) -> None:
        # After a failed fsync, zeros in the page cache may not be on disk, so they are written again.
        failed = self._schedule.state is ErasureState.FAILED
        cleaned = scrub_pages(self._fd, pages, self._page_size, again=failed)
        pages.clear()
        self._is_cache_stale = self._is_cache_stale or cleaned > 0
        self.scrubbed_gaps += cleaned

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
