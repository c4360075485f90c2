"""Detects whether commits to the database succeed and its files are at their path."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from helper.clock import Clock
from helper.errors import StoreDisplaced, StoreError
from helper.store.sqlite.errors import is_disk_full, is_environment_error, translate

log = structlog.get_logger("helper.store")

PROBE_SECONDS: Final = 0.5
"""Seconds between two probes of a disk on which the last commit failed."""
LOCATION_CHECK_SECONDS: Final = 5.0
"""Seconds after which an idle writer checks again that the database is at its path; a busy one does at each commit."""
MIN_FREE_BYTES: Final = 2**20
"""Free bytes required to consider a full disk healthy again: a small commit can succeed when a share would not fit."""


class DiskHealth:
    """Reason why the database cannot be written. Updated by the writer thread, read from any thread.

    Args:
        path: the database file.
        clock: only its monotonic time is used.

    Attributes:
        reason: why the last commit failed, None if it succeeded.
        displaced: description of the file that is not at its path, None if both are.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._folder = path.parent
        self._clock = clock
        self._probe_at = 0.0
        self._is_disk_full = False
        self._path = path
        self.reason: str | None = None
        self.displaced: str | None = None

    def record_location(self, displaced: str | None) -> None:
        """Record which of the files is not at its path, None if both are."""
        if displaced == self.displaced:
            return
        self.displaced = displaced
        if displaced is None:
            log.info("database_back_in_place", path=str(self._path))
        else:
            log.error("database_displaced", reason=displaced, path=str(self._path), advice=StoreDisplaced.advice)

    def record_failure(self, error: Exception) -> None:
        """Record a failed commit, if the disk caused it."""
        if not is_environment_error(error):
            return
        if self.reason is None:
            log.error("database_write_failed", error=str(error), advice=StoreError.advice)
        self.reason = str(translate(error))
        self._is_disk_full = is_disk_full(error)
        self._probe_at = self._clock.monotonic() + PROBE_SECONDS

    def record_success(self) -> None:
        """Record a successful probe. Other commits prove nothing: SQLite does not sync a commit without changes."""
        if self.reason is None:
            return
        if self._is_disk_full and not self._has_room():
            self._probe_at = self._clock.monotonic() + PROBE_SECONDS
            return
        self.reason = None
        log.info("database_write_recovered")

    def max_wait(self, limit: float | None) -> float | None:
        """Return the seconds the writer may wait for work, at most `limit` (None: no limit)."""
        interval = LOCATION_CHECK_SECONDS if self.reason is None and self.displaced is None else PROBE_SECONDS
        return interval if limit is None else min(limit, interval)

    @property
    def is_probe_due(self) -> bool:
        """Whether it is time to probe the disk."""
        return self.reason is not None and self._clock.monotonic() >= self._probe_at

    def _has_room(self) -> bool:
        with suppress(OSError):
            usage = os.statvfs(self._folder)
            return usage.f_bavail * usage.f_frsize >= MIN_FREE_BYTES
        return True
