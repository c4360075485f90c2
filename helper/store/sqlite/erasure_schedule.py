"""Schedule of checkpoints, erasure and scrubbing, as a state machine. Pure.

    event                           CLEAN      SCRUBBING  PENDING    BLOCKED    FAILED
    rows deleted                    PENDING    PENDING    –          –          –
    unscrubbed pages found          SCRUBBING  –          –          –          –
    last slice scrubbed             –          CLEAN      –          –          –
    WAL checkpointed                –          –          –          –          (1)
    WAL truncated                   –          –          (2)        (2)        (2)
    truncation blocked by reader    –          –          BLOCKED    –          (3)
    disk error                      FAILED     FAILED     FAILED     FAILED     –

(1) PENDING if deleted rows remain, else (2). (2) SCRUBBING if unscrubbed pages remain, else CLEAN. (3) BLOCKED if
deleted rows remain, else (2).
"""

from __future__ import annotations

from enum import Enum
from typing import Final

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


class ErasureState(Enum):
    """State of erasure."""

    CLEAN = "nothing is left to erase"
    SCRUBBING = "pages that a crashed process wrote are scrubbed in slices"
    PENDING = "deleted rows are erased when the writer is idle, at the deadline at the latest"
    BLOCKED = "deleted rows remain because a reader blocked the truncation of the WAL"
    FAILED = "the last checkpoint failed with a disk error"


class Action(Enum):
    """Action of the writer between two batches."""

    NONE = "nothing"
    WRITE_BACK = "checkpoint the WAL"
    ERASE = "checkpoint the WAL, scrub the pages and truncate the WAL"


class ErasureSchedule:
    """Decides which action is due.

    Times are monotonic; `changes` is the total number of rows that the connection has changed.

    Attributes:
        state: the current state.
        unscrubbed: number of pages, from page 1, in which a crashed process may have left stale bytes.
    """

    def __init__(self) -> None:
        self.state = ErasureState.CLEAN
        self.unscrubbed = 0
        self._deadline: float | None = None  # for the erasure of deleted rows; None if there are none
        self._pending_since: float | None = None  # the first of these deletions
        self._retry_at = 0.0  # in FAILED
        self._checkpoint_changes = 0  # changes at the last checkpoint
        self._slice_changes = 0  # changes at the last slice
        self._next_slice_at = 0.0

    @property
    def is_pending(self) -> bool:
        """Whether the files may still contain deleted data."""
        return self._deadline is not None or self.unscrubbed > 0

    def pending_seconds(self, now: float) -> float:
        """Return the seconds since the first deletion that is not erased yet; 0 without one."""
        since = self._pending_since
        return 0.0 if since is None else max(0.0, now - since)

    def next_action(self, now: float, *, is_idle: bool, changes: int) -> Action:
        """Return the action that is due now.

        Args:
            now: monotonic time.
            is_idle: whether no jobs are waiting for the writer.
            changes: rows changed so far.
        """
        if self.state is ErasureState.FAILED and now < self._retry_at:
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
        if self.state in {ErasureState.CLEAN, ErasureState.SCRUBBING}:
            self.state = ErasureState.PENDING

    def pages_unscrubbed(self, pages: int) -> None:
        """Record that the first `pages` pages of the file may contain stale bytes."""
        self.unscrubbed = pages
        if self.state is ErasureState.CLEAN:
            self.state = self._without_deleted_rows()

    def checkpoint_begun(self, changes: int) -> None:
        """Record the start of a checkpoint."""
        self._checkpoint_changes = changes

    def slice_scrubbed(self, pages: int, *, began: float, now: float, changes: int) -> None:
        """Record that a slice was scrubbed.

        Args:
            pages: number of pages that are still unscrubbed.
            began: monotonic time at which the checkpoint began.
            now: monotonic time.
            changes: rows changed so far.
        """
        self.unscrubbed = pages
        self._next_slice_at, self._slice_changes = now + SLICE_PAUSE_FACTOR * (now - began), changes
        if self.state is ErasureState.SCRUBBING:
            self.state = self._without_deleted_rows()

    def written_back(self) -> None:
        """Record a successful checkpoint without truncation."""
        if self.state is ErasureState.FAILED:
            self.state = self._without_deleted_rows() if self._deadline is None else ErasureState.PENDING

    def erased(self) -> None:
        """Record that the WAL was truncated, so no deleted row remains."""
        self._deadline = self._pending_since = None
        self.state = self._without_deleted_rows()

    def blocked_by_reader(self, now: float) -> None:
        """Record that a reader blocked the truncation of the WAL."""
        if self._deadline is None:
            self.state = self._without_deleted_rows()
        else:
            self._deadline = max(self._deadline, now + RETRY_SECONDS)
            self.state = ErasureState.BLOCKED

    def failed(self, now: float) -> None:
        """Record that a checkpoint failed with a disk error."""
        self._retry_at = now + ERROR_RETRY_SECONDS
        self.state = ErasureState.FAILED

    def _without_deleted_rows(self) -> ErasureState:
        return ErasureState.SCRUBBING if self.unscrubbed else ErasureState.CLEAN
