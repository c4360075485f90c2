"""Deadlines that are moved and cleared, on an event loop with a fake clock; stalled writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest

from helper.server.connection_io import Deadline, StallTimer


class FakeTimer:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[FakeTimer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, callback: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(at, callback))
        return self.timers[-1]

    def call_later(self, delay: float, callback: Callable[..., None], *arguments: object) -> FakeTimer:
        return self.call_at(self.now + delay, partial(callback, *arguments))

    def advance_to(self, now: float) -> None:
        while due := [timer for timer in self.pending_timers if timer.at <= now]:
            first = min(due, key=lambda timer: timer.at)
            self.timers.remove(first)
            self.now = first.at
            first.callback()
        self.now = now

    @property
    def pending_timers(self) -> list[FakeTimer]:
        return [timer for timer in self.timers if not timer.cancelled]


class DeadlineFixture:
    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.expirations: list[float] = []
        self.deadline = Deadline(
            cast("asyncio.AbstractEventLoop", self.loop), lambda: self.expirations.append(self.loop.time())
        )


@pytest.fixture
def fixture() -> DeadlineFixture:
    return DeadlineFixture()


def test_deadline_expires_once(fixture: DeadlineFixture) -> None:
    fixture.deadline.set(5)
    fixture.loop.advance_to(4.9)
    assert fixture.deadline
    assert fixture.expirations == []
    fixture.loop.advance_to(99)
    assert not fixture.deadline
    assert fixture.expirations == [5]


def test_deadline_moved_later_expires_at_last_time(fixture: DeadlineFixture) -> None:
    for start in range(100):
        fixture.loop.advance_to(start / 10)
        fixture.deadline.set(fixture.loop.now + 5)
        assert len(fixture.loop.pending_timers) == 1
    assert len(fixture.loop.timers) <= 2, "no timer is created per move"
    fixture.loop.advance_to(99)
    assert fixture.expirations == [9.9 + 5]


def test_deadline_moved_earlier_expires_then(fixture: DeadlineFixture) -> None:
    fixture.deadline.set(9)
    fixture.deadline.set(3)
    fixture.loop.advance_to(99)
    assert fixture.expirations == [3]


def test_deadline_cleared_does_not_expire(fixture: DeadlineFixture) -> None:
    fixture.deadline.set(5)
    fixture.deadline.clear()
    assert not fixture.deadline
    fixture.loop.advance_to(99)
    assert fixture.expirations == []
    assert fixture.loop.pending_timers == []


def test_deadline_cleared_and_set_expires_at_new_time(fixture: DeadlineFixture) -> None:
    fixture.deadline.set(5)
    fixture.deadline.clear()
    fixture.loop.advance_to(4)
    fixture.deadline.set(12)
    fixture.loop.advance_to(99)
    assert fixture.expirations == [12]


def test_deadline_set_in_callback_expires_again(fixture: DeadlineFixture) -> None:
    def set_again() -> None:
        fixture.expirations.append(fixture.loop.now)
        if len(fixture.expirations) < 3:
            deadline.set(fixture.loop.now + 5)

    deadline = Deadline(cast("asyncio.AbstractEventLoop", fixture.loop), set_again)
    deadline.set(5)
    fixture.loop.advance_to(99)
    assert fixture.expirations == [5, 10, 15]


def test_deadline_closed_leaves_no_timer(fixture: DeadlineFixture) -> None:
    fixture.deadline.set(5)
    fixture.deadline.close()
    assert not fixture.deadline
    assert fixture.loop.pending_timers == []


class Writing:
    def __init__(self) -> None:
        self.buffered = 100
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(("read", "aborted"), [(0, True), (1, False)])
def test_stall_timer_aborts_only_if_the_client_has_read_nothing(read: int, aborted: bool) -> None:
    loop, transport = FakeLoop(), Writing()
    timer = StallTimer(cast("asyncio.AbstractEventLoop", loop), 10)
    timer.start(cast("asyncio.WriteTransport", transport))
    transport.buffered -= read
    loop.advance_to(15)
    assert transport.aborted is aborted
    timer.stop()
    transport.aborted = False
    loop.advance_to(45)
    assert not transport.aborted
