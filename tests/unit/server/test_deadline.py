"""Deadlines that are moved and cleared, on an event loop with a fake clock, and stalled writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from helper.server.deadline import Deadline, StallTimer


class Timer:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """An event loop with a fake clock and timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(at, callback))
        return self.timers[-1]

    def go_to(self, now: float) -> None:
        """Advance the time and run due timers."""
        while due := [timer for timer in self.waiting if timer.at <= now]:
            first = min(due, key=lambda timer: timer.at)
            self.timers.remove(first)
            self.now = first.at
            first.callback()
        self.now = now

    @property
    def waiting(self) -> list[Timer]:
        return [timer for timer in self.timers if not timer.cancelled]


class Scene:
    def __init__(self) -> None:
        self.loop = Loop()
        self.late: list[float] = []
        self.deadline = Deadline(
            cast("asyncio.AbstractEventLoop", self.loop), lambda: self.late.append(self.loop.time())
        )


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_deadline_expires_once(scene: Scene) -> None:
    scene.deadline.set(5)
    scene.loop.go_to(4.9)
    assert scene.deadline
    assert scene.late == []
    scene.loop.go_to(99)
    assert not scene.deadline
    assert scene.late == [5]


def test_deadline_moved_later_expires_at_last_time(scene: Scene) -> None:
    for start in range(100):
        scene.loop.go_to(start / 10)
        scene.deadline.set(scene.loop.now + 5)
        assert len(scene.loop.waiting) == 1
    assert len(scene.loop.timers) <= 2, "no timer is made for each move"
    scene.loop.go_to(99)
    assert scene.late == [9.9 + 5]


def test_deadline_moved_earlier_expires_then(scene: Scene) -> None:
    scene.deadline.set(9)
    scene.deadline.set(3)
    scene.loop.go_to(99)
    assert scene.late == [3]


def test_deadline_cleared_does_not_expire(scene: Scene) -> None:
    scene.deadline.set(5)
    scene.deadline.clear()
    assert not scene.deadline
    scene.loop.go_to(99)
    assert scene.late == []
    assert scene.loop.waiting == []


def test_deadline_cleared_and_set_expires_at_new_time(scene: Scene) -> None:
    scene.deadline.set(5)
    scene.deadline.clear()
    scene.loop.go_to(4)
    scene.deadline.set(12)
    scene.loop.go_to(99)
    assert scene.late == [12]


def test_deadline_set_in_callback_expires_again(scene: Scene) -> None:
    def again() -> None:
        scene.late.append(scene.loop.now)
        if len(scene.late) < 3:
            deadline.set(scene.loop.now + 5)

    deadline = Deadline(cast("asyncio.AbstractEventLoop", scene.loop), again)
    deadline.set(5)
    scene.loop.go_to(99)
    assert scene.late == [5, 10, 15]


def test_deadline_closed_leaves_no_timer(scene: Scene) -> None:
    scene.deadline.set(5)
    scene.deadline.close()
    assert not scene.deadline
    assert scene.loop.waiting == []


class Writing:
    """A transport with a write buffer."""

    def __init__(self) -> None:
        self.buffered = 100
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(("read", "aborted"), [(0, True), (1, False)])
def test_stall_timer_aborts_only_if_the_client_has_read_nothing(read: int, aborted: bool) -> None:
    loop, transport = asyncio.new_event_loop(), Writing()
    timer = StallTimer(loop, 0.01)
    timer.start(cast("asyncio.WriteTransport", transport))
    transport.buffered -= read
    loop.run_until_complete(asyncio.sleep(0.015))
    assert transport.aborted is aborted
    timer.stop()
    transport.aborted = False
    loop.run_until_complete(asyncio.sleep(0.03))
    assert not transport.aborted
    loop.close()
