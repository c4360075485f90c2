"""The schedule of erasure: what is pending and due after each event."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helper.store.sqlite.erasure import (
    CHANGES_PER_CHECKPOINT,
    ERASE_WITHIN_SECONDS,
    ERROR_RETRY_SECONDS,
    RETRY_SECONDS,
    SLICE_PAUSE,
    SLICE_PAUSE_FACTOR,
    Action,
    ErasureSchedule,
)

NOW = 100.0

Step = Callable[[ErasureSchedule], None]


def deleted(schedule: ErasureSchedule) -> None:
    schedule.rows_deleted(NOW)


def find_pages(schedule: ErasureSchedule) -> None:
    schedule.unscrubbed = 5


def sliced(schedule: ErasureSchedule) -> None:
    schedule.slice_scrubbed(3, began=NOW, now=NOW, changes=0)


def scrubbed(schedule: ErasureSchedule) -> None:
    schedule.slice_scrubbed(0, began=NOW, now=NOW, changes=0)


def erased(schedule: ErasureSchedule) -> None:
    schedule.erased()


def blocked(schedule: ErasureSchedule) -> None:
    schedule.blocked_by_reader(NOW)


def failed(schedule: ErasureSchedule) -> None:
    schedule.failed(NOW)


def after(*steps: Step) -> ErasureSchedule:
    schedule = ErasureSchedule()
    for step in steps:
        step(schedule)
    return schedule


@pytest.mark.parametrize(
    ("steps", "is_pending", "wait"),
    [
        ([], False, None),
        ([failed], False, None),
        ([find_pages], True, SLICE_PAUSE),
        ([deleted], True, RETRY_SECONDS),
        ([deleted, find_pages], True, RETRY_SECONDS),
        ([deleted, blocked], True, RETRY_SECONDS),
        ([deleted, failed], True, RETRY_SECONDS),
        ([deleted, erased], False, None),
        ([deleted, find_pages, erased], True, SLICE_PAUSE),
        ([deleted, find_pages, scrubbed], True, RETRY_SECONDS),
        ([find_pages, scrubbed], False, None),
    ],
)
def test_pending_and_longest_wait_depend_on_what_is_left(
    steps: list[Step], is_pending: bool, wait: float | None
) -> None:
    schedule = after(*steps)
    assert (schedule.is_pending, schedule.longest_wait()) == (is_pending, wait)


@pytest.mark.parametrize(
    ("steps", "seconds", "is_idle", "changes", "action"),
    [
        ([], 0.0, True, 0, Action.NONE),
        ([], 0.0, True, CHANGES_PER_CHECKPOINT - 1, Action.NONE),
        ([], 0.0, False, CHANGES_PER_CHECKPOINT, Action.WRITE_BACK),
        ([deleted], 0.0, True, 0, Action.ERASE),
        ([deleted], 0.0, False, 0, Action.NONE),
        ([deleted], 0.0, False, CHANGES_PER_CHECKPOINT, Action.WRITE_BACK),
        ([deleted], ERASE_WITHIN_SECONDS - 0.01, False, 0, Action.NONE),
        ([deleted], ERASE_WITHIN_SECONDS, False, 0, Action.ERASE),
        ([deleted, blocked], 0.0, True, 0, Action.ERASE),
        ([deleted, blocked], ERASE_WITHIN_SECONDS - 0.01, False, 0, Action.NONE),
        ([deleted, blocked], ERASE_WITHIN_SECONDS, False, 0, Action.ERASE),
        ([find_pages], 0.0, True, 0, Action.WRITE_BACK),
        ([find_pages], 0.0, False, 0, Action.NONE),
        ([failed], ERROR_RETRY_SECONDS - 0.01, True, CHANGES_PER_CHECKPOINT, Action.NONE),
        ([failed], ERROR_RETRY_SECONDS, True, CHANGES_PER_CHECKPOINT, Action.WRITE_BACK),
        ([deleted, failed], ERROR_RETRY_SECONDS - 0.01, True, 0, Action.NONE),
        ([deleted, failed], ERROR_RETRY_SECONDS, True, 0, Action.ERASE),
        ([deleted, failed], ERROR_RETRY_SECONDS, False, 0, Action.NONE),
        ([deleted, failed], ERASE_WITHIN_SECONDS, False, 0, Action.ERASE),
        ([failed, deleted], ERASE_WITHIN_SECONDS, False, 0, Action.ERASE),
        ([deleted, erased], ERASE_WITHIN_SECONDS, True, 0, Action.NONE),
    ],
)
def test_next_action_depends_on_state_idleness_time_and_changes(
    steps: list[Step], seconds: float, is_idle: bool, changes: int, action: Action
) -> None:
    assert after(*steps).next_action(NOW + seconds, is_idle=is_idle, changes=changes) is action


def test_second_deletion_does_not_extend_the_deadline() -> None:
    schedule = after(deleted)
    schedule.rows_deleted(NOW + ERASE_WITHIN_SECONDS / 2)
    assert schedule.next_action(NOW + ERASE_WITHIN_SECONDS, is_idle=False, changes=0) is Action.ERASE


def test_blocked_erasure_past_its_deadline_is_retried_after_a_pause() -> None:
    schedule = after(deleted)
    late = NOW + 5 * ERASE_WITHIN_SECONDS
    schedule.blocked_by_reader(late)
    assert schedule.next_action(late + RETRY_SECONDS / 2, is_idle=False, changes=0) is Action.NONE
    assert schedule.next_action(late + RETRY_SECONDS, is_idle=False, changes=0) is Action.ERASE


def test_checkpoint_restarts_the_count_of_changes() -> None:
    schedule = ErasureSchedule()
    schedule.checkpoint_begun(CHANGES_PER_CHECKPOINT)
    assert not schedule.has_unwritten_changes(CHANGES_PER_CHECKPOINT)
    assert schedule.has_unwritten_changes(CHANGES_PER_CHECKPOINT + 1)
    assert schedule.next_action(NOW, is_idle=True, changes=2 * CHANGES_PER_CHECKPOINT - 1) is Action.NONE
    assert schedule.next_action(NOW, is_idle=True, changes=2 * CHANGES_PER_CHECKPOINT) is Action.WRITE_BACK


def test_slices_pause_in_proportion_to_their_duration_while_there_are_writes() -> None:
    schedule = after(find_pages)
    schedule.slice_scrubbed(4, began=NOW, now=NOW + 0.1, changes=7)
    end = NOW + 0.1 + SLICE_PAUSE_FACTOR * 0.1
    assert schedule.slice_due(NOW + 0.1, changes=7), "nothing was written since then"
    assert not schedule.slice_due(end - 0.01, changes=8)
    assert schedule.slice_due(end, changes=8)
    assert not after().slice_due(end, changes=8), "no page remains"


def test_wait_for_erasure_ignores_later_deletions() -> None:
    schedule = ErasureSchedule()
    schedule.rows_deleted(10.0)
    assert [schedule.is_pending_since(at) for at in (9.0, 10.0, 11.0)] == [False, True, True]
    schedule.erased()
    schedule.rows_deleted(12.0)
    assert schedule.is_pending
    assert not schedule.is_pending_since(11.0)
