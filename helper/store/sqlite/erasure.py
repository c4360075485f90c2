"""Checkpoints the WAL, and erases deleted rows from the database, the WAL and the gaps of pages.

Only the writer thread checkpoints. It does so regularly, so that the WAL stays small. After a deletion it also
truncates the WAL within `ERASE_WITHIN` seconds, and scrubs the pages written since (see `page_scrubber.py`).
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Final

import structlog

from helper.clock import Clock
from helper.store.sqlite.errors import is_full
from helper.store.sqlite.page_scrubber import note_stale, scrub_pages
from proofs import LOG_HEADER

log = structlog.get_logger("helper.store")

ERASE_WITHIN: Final = 1.0
"""Maximum delay of erasure after a deletion, in seconds, if the writer is never idle."""
RETRY_AFTER: Final = 0.05
"""Seconds until the next attempt if a reader prevented the truncation of the WAL."""
RETRY_AFTER_ERROR: Final = 0.5
"""Seconds until the next attempt after a disk error."""
CHANGES_PER_CHECKPOINT: Final = 2000
"""Changed rows after which the WAL is written back."""
PAGES_AT_ONCE: Final = 16_384
"""Pages (64 MB) that are scrubbed before the start after a crash. The other pages of a larger file are scrubbed in
slices of `SLICE` pages while the writer works.
"""
SLICE: Final = 1000
"""Pages per slice. A slice takes a few milliseconds, so that wallets do not wait longer."""
SLICE_PAUSE: Final = 0.01
"""Seconds between two slices if the writer is idle."""
SLICE_REST: Final = 9
"""Pause before the next slice while there are writes, as a multiple of the last slice's duration: slices take a tenth
of the writer's time. Under load the writer is idle for moments a hundred times a second, so idleness is no criterion.
"""
PAGES_PER_SCRUB: Final = 1024
"""Pages with stale bytes in their gaps after which they are scrubbed even if nothing was deleted, so that a scrub
never takes long.
"""


class Eraser:
    """Checkpoints and erases; used on the writer thread only.

    Args:
        conn: the writing connection, outside a transaction when a method is called.
        path: the database file.
        clock: only its monotonic time is used.

    Attributes:
        erasures: how many times everything deleted was erased.
        gaps: number of gaps with stale bytes that were scrubbed.
    """

    def __init__(self, conn: sqlite3.Connection, path: Path, clock: Clock) -> None:
        self._conn = conn
        self._clock = clock
        self._wal = Path(f"{path}-wal")
        # Closing any descriptor of the file drops SQLite's own locks on it: this one stays open until every
        # connection of the process is closed.
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._page_size = int(conn.execute("PRAGMA page_size").fetchone()[0])
        self._stale: set[int] = set()  # pages of the file that may have stale bytes in their gaps
        self._seen = (b"", 0)  # the WAL's header, and the number of its frames that were examined
        self._cached = False  # the connection's cache may hold stale bytes that were scrubbed in the file
        self._last_changes = 0
        self._since: float | None = None
        self._unseen = 0  # number of pages, from page 1, in which a crashed process may have left stale bytes
        self._slice_until = 0.0  # when the pause after the last slice ends
        self._slice_changes = 0  # the connection's total changes at the last slice
        self._retry_at = 0.0
        self._rest_until = 0.0
        self._failed = False
        self.erasures = 0
        self.gaps = 0

    @property
    def pending(self) -> bool:
        """Whether something deleted may still be in the files."""
        return self._since is not None or self._unseen > 0

    def note_deleted(self) -> None:
        """Record that a committed transaction has deleted rows."""
        if self._since is None:
            self._since = self._clock.monotonic()

    def patience(self) -> float | None:
        """Seconds the writer may wait for work before it calls `tend` again; None: no limit."""
        if self._since is not None:
            return RETRY_AFTER
        return SLICE_PAUSE if self._unseen else None

    def tend(self, *, idle: bool) -> None:
        """Run the due checkpoint or erasure. Called after each commit, and when no work arrived in `patience`.

        Args:
            idle: no jobs are waiting for the writer.
        """
        now = self._clock.monotonic()
        if now < self._rest_until:
            return
        late = self._since is not None and now - self._since >= ERASE_WITHIN and now >= self._retry_at
        if self._since is not None and (idle or late):
            self._retry_at = 0.0 if self._checkpoint(truncate=True) else now + RETRY_AFTER
        elif self._conn.total_changes - self._last_changes >= CHANGES_PER_CHECKPOINT or (idle and self._slice_due(now)):
            self._checkpoint(truncate=False)

    def erase_all(self) -> None:
        """Erase immediately and scrub every page of the file, at the start after a crash.

        The first pages of a large file are scrubbed later, in slices, while `pending`. If the crashed process's last
        fsync failed, its WAL may be in the page cache only: the checkpoint writes all of it to the database and syncs.

        Raises:
            sqlite3.Error, OSError: it failed, for another reason than a full disk.
        """
        self.note_deleted()
        count = int(self._conn.execute("PRAGMA page_count").fetchone()[0])
        self._unseen = max(0, count - PAGES_AT_ONCE)
        self._stale.update(range(self._unseen + 1, count + 1))
        try:
            self._try_checkpoint(truncate=True)
        except (sqlite3.Error, OSError) as error:
            if not is_full(error):
                raise
            self._note_failure(error)

    def write_back(self) -> bool:
        """Write the WAL back. Returns whether the database file now holds everything that was committed."""
        return self._checkpoint(truncate=False)

    def finish(self) -> None:
        """Complete pending erasure before the connection is closed."""
        if self.pending or self._stale or self._conn.total_changes != self._last_changes:
            self._checkpoint(truncate=True)

    def close(self) -> None:
        """Close the file, after every connection of this process is closed."""
        os.close(self._fd)

    def _checkpoint(self, *, truncate: bool) -> bool:
        """Write the WAL back. Returns whether it is complete, including truncation if requested."""
        try:
            done = self._try_checkpoint(truncate=truncate)
        except (sqlite3.Error, OSError) as error:
            # The disk is full or failing: commits report it to their callers, and the checkpoint is retried.
            self._note_failure(error)
            return False
        self._failed = False
        return done

    def _note_failure(self, error: Exception) -> None:
        if not self._failed:
            log.warning("checkpoint_failed", error=str(error))
        self._failed = True
        self._rest_until = self._clock.monotonic() + RETRY_AFTER_ERROR

    def _try_checkpoint(self, *, truncate: bool) -> bool:
        began = self._clock.monotonic()
        self._last_changes = self._conn.total_changes
        _, frames, done = self._conn.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if frames > 0:
            self._note_stale(frames)
        if done != frames:
            return False  # a reader uses an older snapshot; the next attempt completes it
        if self._slice_due(began):
            self._see_some()
            now = self._clock.monotonic()
            self._slice_until, self._slice_changes = now + SLICE_REST * (now - began), self._conn.total_changes
        if truncate or len(self._stale) >= PAGES_PER_SCRUB:
            self._scrub(self._stale)
        if truncate:
            self._forget_cached()
            if not self._truncate():
                return False
            self._since = None
            self.erasures += 1
        return True

    def _slice_due(self, now: float) -> bool:
        """Whether the next slice of pages written by a crashed process may be scrubbed."""
        rested = now >= self._slice_until or self._conn.total_changes == self._slice_changes
        return self._unseen > 0 and rested

    def _see_some(self) -> None:
        """Scrub the next slice of pages written by a crashed process, after the WAL was written back."""
        rest = max(0, self._unseen - SLICE)
        self._scrub(set(range(rest + 1, self._unseen + 1)))
        self._forget_cached()
        self._unseen = rest

    def _note_stale(self, frames: int) -> None:
        """Examine the frames that are new since the last call; a restarted WAL has a different header."""
        try:
            with self._wal.open("rb") as file:
                head = file.read(LOG_HEADER)
            first = self._seen[1] if self._seen[0] == head else 0
            note_stale(self._stale, self._wal, range(min(first, frames), frames), self._page_size)
            self._seen = (head, frames)
        except OSError:
            # The next commit may restart the WAL, and the pages in it are not known: all pages are scrubbed.
            self._unseen = int(self._conn.execute("PRAGMA page_count").fetchone()[0])
            raise

    def _scrub(self, pages: set[int]) -> None:
        # After a failed fsync, zeros in the page cache may not be on the disk: they are written again.
        cleaned = scrub_pages(self._fd, pages, self._page_size, again=self._failed)
        pages.clear()
        self._cached = self._cached or cleaned > 0
        self.gaps += cleaned

    def _forget_cached(self) -> None:
        """Drop the connection's cache if it may hold scrubbed pages: it would write their old gaps again.

        The gaps may hold rows that are deleted now. Without a deletion the cache is more valuable.
        """
        if self._cached:
            self._conn.execute("PRAGMA shrink_memory")
            self._cached = False

    def _truncate(self) -> bool:
        """Truncate the WAL without waiting for readers, which would block the writer thread."""
        self._conn.execute("PRAGMA busy_timeout = 0")
        try:
            busy, _, _ = self._conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._conn.execute("PRAGMA busy_timeout = 5000")
        return not busy
