"""Checkpoints, and with them erasure: of a deleted row nothing stays in the database, its WAL or the gaps of its pages.

Only the writer thread checkpoints. The WAL is written back from time to time anyway, so that it stays small; after a
deletion it is also truncated, within `ERASE_WITHIN` seconds, and the pages written since are scrubbed (see `scrub.py`).
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
"""Seconds after a deletion in which erasure begins even when the writer is never idle."""
RETRY_AFTER: Final = 0.05
"""Seconds until the next try when a reader kept the WAL from being truncated."""
RETRY_AFTER_ERROR: Final = 0.5
"""And when the disk did."""
CHANGES_PER_CHECKPOINT: Final = 2000
"""Changed rows after which the WAL is written back."""
PAGES_AT_ONCE: Final = 16_384
"""Pages of a file (64 MB) that is looked through before a start after a crash; of a larger one the rest is looked
through a `SLICE` at a time, beside the writer's work.
"""
SLICE: Final = 1000
"""Pages, some milliseconds' worth: wallets wait no longer."""
SLICE_PAUSE: Final = 0.01
"""Seconds between two slices when the writer has nothing to do."""
SLICE_REST: Final = 9
"""Times as long as a slice took is the rest before the next while there is something to write: between shares that come
one lot after the other the writer has nothing to do a hundred times a second, and a tenth of its time is enough.
"""
PAGES_PER_SCRUB: Final = 1024
"""Pages with stale bytes in their gaps after which these are scrubbed even when nothing was deleted, so that it never
takes long.
"""


class Eraser:
    """Writes the WAL back and erases; belongs to the writer thread.

    Args:
        conn: the writing connection, outside a transaction when a method is called.
        path: the database file.
        clock: only its monotonic time is used.

    Attributes:
        erasures: how often everything deleted was erased.
        gaps: how many gaps held stale bytes.
    """

    def __init__(self, conn: sqlite3.Connection, path: Path, clock: Clock) -> None:
        self._conn = conn
        self._clock = clock
        self._wal = Path(f"{path}-wal")
        # Closing any descriptor of the file would drop SQLite's own locks on it: this one stays open until
        # every connection of the process is closed.
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._page_size = int(conn.execute("PRAGMA page_size").fetchone()[0])
        self._stale: set[int] = set()  # pages of the file that have, or may have, stale bytes in their gaps
        self._seen = (b"", 0)  # the WAL's header, and how many frames after it were looked at
        self._cached = False  # the connection's cache may hold stale bytes that the file has no more
        self._last_changes = 0
        self._since: float | None = None
        self._unseen = 0  # pages, from the first on, that a crashed process may have left stale bytes in
        self._slice_until = 0.0  # when the rest after the last slice ends
        self._slice_changes = 0  # and how much had been changed then
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
        """Something was deleted by a transaction that is committed now."""
        if self._since is None:
            self._since = self._clock.monotonic()

    def patience(self) -> float | None:
        """Seconds that the writer may wait for work before it calls `tend` again, None for ever."""
        if self._since is not None:
            return RETRY_AFTER
        return SLICE_PAUSE if self._unseen else None

    def tend(self, *, idle: bool) -> None:
        """Do what is due: after each commit, and when the writer waited in vain.

        Args:
            idle: nothing waits for the writer.
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
        """Erase now, and look through every page of the file: at the start after a crash. Of a great file the first
        pages are looked through later, while `pending`.

        What the crashed process had in the WAL may be in the kernel's memory only, when its last fsync failed. Here
        all of it is written anew, into the database, and synced.

        Raises:
            sqlite3.Error, OSError: that failed, other than for want of space.
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
        """Write the WAL back; whether the database file now holds all that was committed."""
        return self._checkpoint(truncate=False)

    def finish(self) -> None:
        """Erase what is still to be erased, before the connection is closed."""
        if self.pending or self._stale or self._conn.total_changes != self._last_changes:
            self._checkpoint(truncate=True)

    def close(self) -> None:
        """Let go of the file, after every connection of this process is closed."""
        os.close(self._fd)

    def _checkpoint(self, *, truncate: bool) -> bool:
        """Write the WAL back; whether all that was wished is done."""
        try:
            done = self._try_checkpoint(truncate=truncate)
        except (sqlite3.Error, OSError) as error:
            # A full or failing disk: commits report it to callers, and this is tried again.
            self._note_failure(error)
            return False
        self._failed = False
        return done

    def _note_failure(self, error: Exception) -> None:
        if not self._failed:
            log.warning("the write-ahead log could not be written back", error=str(error))
        self._failed = True
        self._rest_until = self._clock.monotonic() + RETRY_AFTER_ERROR

    def _try_checkpoint(self, *, truncate: bool) -> bool:
        began = self._clock.monotonic()
        self._last_changes = self._conn.total_changes
        _, frames, done = self._conn.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if frames > 0:
            self._note_stale(frames)
        if done != frames:
            return False  # a reader holds an older state; the rest follows when it is gone
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
        """Whether the next slice of what a crashed process left may be looked through."""
        rested = now >= self._slice_until or self._conn.total_changes == self._slice_changes
        return self._unseen > 0 and rested

    def _see_some(self) -> None:
        """Look through the next slice of what a crashed process left; the WAL is written back."""
        rest = max(0, self._unseen - SLICE)
        self._scrub(set(range(rest + 1, self._unseen + 1)))
        self._forget_cached()
        self._unseen = rest

    def _note_stale(self, frames: int) -> None:
        """Look at the frames that are new since the last time; a WAL that was begun anew has another header."""
        try:
            with self._wal.open("rb") as file:
                head = file.read(LOG_HEADER)
            first = self._seen[1] if self._seen[0] == head else 0
            note_stale(self._stale, self._wal, range(min(first, frames), frames), self._page_size)
            self._seen = (head, frames)
        except OSError:
            # The next commit may begin the WAL anew, and which pages it held is not known: all are looked through.
            self._unseen = int(self._conn.execute("PRAGMA page_count").fetchone()[0])
            raise

    def _scrub(self, pages: set[int]) -> None:
        # After a failed fsync the kernel shows zeros that may not be on the disk: they are written again.
        cleaned = scrub_pages(self._fd, pages, self._page_size, again=self._failed)
        pages.clear()
        self._cached = self._cached or cleaned > 0
        self.gaps += cleaned

    def _forget_cached(self) -> None:
        """Have the connection read anew what it holds of pages that were scrubbed: with them it would write their gaps
        again, and what was in a gap may be deleted now. While nothing is, the cache is worth more.
        """
        if self._cached:
            self._conn.execute("PRAGMA shrink_memory")
            self._cached = False

    def _truncate(self) -> bool:
        """Empty the WAL without waiting for readers: the thread must not stand still."""
        self._conn.execute("PRAGMA busy_timeout = 0")
        try:
            busy, _, _ = self._conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._conn.execute("PRAGMA busy_timeout = 5000")
        return not busy
