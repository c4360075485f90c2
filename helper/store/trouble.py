"""Whether the disk takes commits: what those look at who do not write, and when it is tried again."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from helper.clock import Clock
from helper.errors import StoreError
from helper.store.failure import is_environment, is_full, translate

log = structlog.get_logger("helper.store")

PROBE_EVERY: Final = 0.5
"""Seconds between two tries of a disk that did not take the last commit."""
ROOM: Final = 2**20
"""Bytes that must be free before a disk that was full counts as well: a small commit may fit where shares do not."""


class Trouble:
    """The disk's, as the writing thread meets it.

    Args:
        path: the database file.
        clock: only its monotonic time is used.

    Attributes:
        reason: why the disk did not take the last commit, None while it does; read from any thread.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._folder = path.parent
        self._clock = clock
        self._probe_at = 0.0
        self._full = False
        self.reason: str | None = None

    def note(self, error: Exception) -> None:
        """A commit failed; it is trouble when the disk is at fault."""
        if not is_environment(error):
            return
        if self.reason is None:
            log.error("the database can not be written", error=str(error), advice=StoreError.advice)
        self.reason = str(translate(error))
        self._full = is_full(error)
        self._probe_at = self._clock.monotonic() + PROBE_EVERY

    def written(self) -> None:
        """A probe went well. Other commits say nothing: what they change may be nothing, and then nothing is synced."""
        if self.reason is None:
            return
        if self._full and not self._has_room():
            self._probe_at = self._clock.monotonic() + PROBE_EVERY
            return
        self.reason = None
        log.info("the database can be written again")

    def patience(self, patience: float | None) -> float | None:
        """Seconds that the writer may wait for work, where it would else wait so long (None for ever)."""
        if self.reason is None:
            return patience
        return PROBE_EVERY if patience is None else min(patience, PROBE_EVERY)

    @property
    def probe_due(self) -> bool:
        """Whether the disk is to be tried now."""
        return self.reason is not None and self._clock.monotonic() >= self._probe_at

    def _has_room(self) -> bool:
        with suppress(OSError):
            about = os.statvfs(self._folder)
            return about.f_bavail * about.f_frsize >= ROOM
        return True
