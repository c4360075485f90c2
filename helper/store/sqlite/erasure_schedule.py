"""When the writer checkpoints, erases and scrubs: the states of erasure and their transitions. Pure.

    event                           CLEAN      SCRUBBING  PENDING    BLOCKED    FAILED
    rows deleted                    PENDING    PENDING    –          –          –
    unscrubbed pages found          SCRUBBING  –          –          –          –
    last slice scrubbed             –          CLEAN      –          –          –
    WAL written back                –          –          –          –          (1)
    WAL truncated                   –          –          (2)        (2)        (2)
    truncation prevented by reader  –          –          BLOCKED    –          (3)
    disk error                      FAILED     FAILED     FAILED     FAILED     –

(1) PENDING if deleted rows are left, else (2). (2) SCRUBBING if unscrubbed pages are left, else CLEAN. (3) BLOCKED if
deleted rows are left, else (2).
"""

from __future__ import annotations

from enum import Enum
from typing import Final

ERASE_WITHIN_SECONDS: Final = 1.0
"""Maximum delay of erasure after a deletion, in seconds, if the writer is never idle."""
RETRY_SECONDS: Final = 0.05
"""Seconds until the next attempt if a reader prevented the truncation of the WAL."""
ERROR_RETRY_SECONDS: Final = 0.5
"""Seconds until the next attempt after a disk error."""
CHANGES_PER_CHECKPOINT: Final = 2000
"""Changed rows after which the WAL is written back."""
SLICE_PAUSE: Final = 0.01
"""Seconds between two slices if the writer is idle."""
SLICE_PAUSE_FACTOR: Final = 9
"""Pause before the next slice while there are writes, as a multiple of the last slice's duration: slices take a tenth
of the writer's time. Under load the writer is idle for moments a hundred times a second, so idleness is no criterion.
"""


class ErasureState(Enum):
    """What is left to erase."""

    CLEAN = "nothing is left to erase"
    SCRUBBING = "pages that a crashed process wrote are scrubbed in slices"
    PENDING = "deleted rows are erased when the writer is idle, at the deadline at the latest"
    BLOCKED = "deleted rows are left because a reader prevented the truncation of the WAL"
    FAILED = "the last checkpoint failed with a disk error"


class Action(Enum):
    """What the writer does between two batches."""

    NONE = "nothing"
    WRITE_BACK = "write the WAL back"
    ERASE = "write the WAL back, scrub the pages and truncate the WAL"


class ErasureSchedule:
    """Decides what is due. Times are monotonic; `changes` is the connection's total number of changed rows.

    Attributes:
        state: the current state.
        unscrubbed: number of pages, from page 1, in which a crashed process may have left stale bytes.
    """

    def __init__(self) -> None:
        self.state = ErasureState.CLEAN
        self.unscrubbed = 0
        self._deadline: float | None = None  # for the erasure of deleted rows; None if there are none
        self._retry_at = 0.0  # in FAILED
        self._checkpoint_changes = 0  # changes at the last checkpoint
        self._slice_changes = 0  # changes at the last slice
        self._next_slice_at = 0.0

    @property
    def is_pending(self) -> bool:
        """Whether something deleted may still be in the files."""
        return self._deadline is not None or self.unscrubbed > 0

    def next_action(self, now: float, *, is_idle: bool, changes: int) -> Action:
        """What is due now.

        Args:
            is_idle: no jobs are waiting for the writer.
        """
        if self.state is ErasureState.FAILED and now < self._retry_at:
            return Action.NONE
        if self._deadline is not None and (is_idle or now >= self._deadline):
            return Action.ERASE
        if changes - self._checkpoint_changes >= CHANGES_PER_CHECKPOINT or (is_idle and self.slice_due(now, changes)):
            return Action.WRITE_BACK
        return Action.NONE

    def slice_due(self, now: float, changes: int) -> bool:
        """Whether a checkpoint that starts now may scrub a slice of the unscrubbed pages."""
        return self.unscrubbed > 0 and (now >= self._next_slice_at or changes == self._slice_changes)

    def has_unwritten_changes(self, changes: int) -> bool:
        """Whether rows changed after the last checkpoint began."""
        return changes != self._checkpoint_changes

    def longest_wait(self) -> float | None:
        """Seconds that the writer may wait for jobs before it asks for the next action; None: no limit."""
        if self._deadline is not None:
            return RETRY_SECONDS
        return SLICE_PAUSE if self.unscrubbed else None

    def rows_deleted(self, now: float) -> None:
        """A committed transaction has deleted rows."""
        if self._deadline is None:
            self._deadline = now + ERASE_WITHIN_SECONDS
        if self.state in {ErasureState.CLEAN, ErasureState.SCRUBBING}:
            self.state = ErasureState.PENDING

    def pages_unscrubbed(self, pages: int) -> None:
        """Stale bytes may be in the first pages of the file."""
        self.unscrubbed = pages
        if self.state is ErasureState.CLEAN:
            self.state = self._without_deleted_rows()

    def checkpoint_begun(self, changes: int) -> None:
        """A checkpoint begins."""
        self._checkpoint_changes = changes

    def slice_scrubbed(self, pages: int, *, began: float, now: float, changes: int) -> None:
        """A slice was scrubbed, by a checkpoint that began at this time; so many pages are left."""
        self.unscrubbed = pages
        self._next_slice_at, self._slice_changes = now + SLICE_PAUSE_FACTOR * (now - began), changes
        if self.state is ErasureState.SCRUBBING:
            self.state = self._without_deleted_rows()

    def written_back(self) -> None:
        """A checkpoint without truncation ended without an error."""
        if self.state is ErasureState.FAILED:
            self.state = self._without_deleted_rows() if self._deadline is None else ErasureState.PENDING

    def erased(self) -> None:
        """The WAL was truncated: no deleted row is left."""
        self._deadline = None
        self.state = self._without_deleted_rows()

    def blocked_by_reader(self, now: float) -> None:
        """A reader prevented the truncation of the WAL."""
        if self._deadline is None:
            self.state = self._without_deleted_rows()
        else:
            self._deadline = max(self._deadline, now + RETRY_SECONDS)
            self.state = ErasureState.BLOCKED

    def failed(self, now: float) -> None:
        """A checkpoint failed with a disk error."""
        self._retry_at = now + ERROR_RETRY_SECONDS
        self.state = ErasureState.FAILED

    def _without_deleted_rows(self) -> ErasureState:
        return ErasureState.SCRUBBING if self.unscrubbed else ErasureState.CLEAN
