"""Limits of connections: which ones are closed for others, and deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from helper.server.connection_limits import (
    IDLE_SECONDS,
    MAX_CLOSING,
    UNCOUNTED_BYTES,
    ConnectionEvictor,
    ConnectionProgress,
    Deadline,
)

GRACE_SECONDS = 4.0
MAX_PENDING_BYTES = 100_000


class Connections:
    def __init__(self) -> None:
        self.evictor = ConnectionEvictor(GRACE_SECONDS, MAX_PENDING_BYTES)
        self.evicted: list[str] = []
        self.not_evictable: set[str] = set()
        self.progress: dict[str, ConnectionProgress] = {}

    def open(self, name: str, now: float) -> ConnectionProgress:
        progress = ConnectionProgress(lambda: name not in self.not_evictable, lambda: self.evicted.append(name))
        self.progress[name] = progress
        self.evictor.add(progress, now)
        return progress

    def receive(self, name: str, size: int, now: float) -> None:
        self.evictor.add_pending(self.progress[name], size, now)


def test_make_room_closes_connection_with_fewest_bytes_per_second() -> None:
    connections = Connections()
    for name in ("sending", "dripping"):
        connections.open(name, 0)
    connections.receive("dripping", 2_000, 4.9)  # progress a moment ago does not protect it
    connections.receive("sending", 20_000, 1)
    assert connections.evictor.make_room(1, 5)
    assert connections.evicted == ["dripping"]
    assert connections.evictor.make_room(2, 5.1)
    assert connections.evicted == ["dripping", "sending"]


def test_make_room_closes_idle_connection_before_slow_one() -> None:
    connections = Connections()
    connections.open("silent", 0)
    connections.open("idle", 8).is_idle = True
    assert connections.evictor.make_room(1, 10)
    assert connections.evicted == ["idle"]


def test_make_room_spares_new_and_answered_connections() -> None:
    connections = Connections()
    connections.open("answered", 0)
    connections.not_evictable.add("answered")
    connections.open("new", 10 - GRACE_SECONDS + 0.1)
    connections.open("idle", 10 - IDLE_SECONDS + 0.1).is_idle = True
    assert not connections.evictor.make_room(1, 10)
    assert connections.evicted == []


def test_make_room_closes_idle_connection_of_proxy_last() -> None:
    connections = Connections()
    for name in ("earlier", "later", "busy"):
        connections.open(name, {"earlier": 1}.get(name, 2)).is_proxy = True
        connections.progress[name].is_idle = name != "busy"
    connections.open("slow", 3)
    for count in range(1, 5):
        assert connections.evictor.make_room(count, 9 + count)
    assert connections.evicted == ["busy", "slow", "earlier", "later"]


def test_make_room_after_failure_examines_connections_again_later() -> None:
    connections = Connections()
    connections.open("new", 10 - GRACE_SECONDS)
    assert not connections.evictor.make_room(1, 9.99)
    assert not connections.evictor.make_room(1, 10), "examined a moment ago"
    assert connections.evictor.make_room(1, 10.1)


def test_make_room_closes_as_many_as_necessary() -> None:
    connections = Connections()
    for number in range(4):
        connections.open(str(number), number / 10)
    assert connections.evictor.make_room(2, 10)
    assert connections.evicted == ["0", "1"]
    assert connections.evictor.make_room(2, 10), "both are being closed"
    connections.evictor.discard(connections.progress["0"])
    assert connections.evictor.make_room(1, 10)
    assert connections.evicted == ["0", "1"]
    connections.progress["2"].started_at = 9.9  # it has sent its request since
    assert connections.evictor.make_room(2, 10.1)
    assert connections.evicted == ["0", "1", "3"]


def test_make_room_limits_connections_being_closed() -> None:
    connections = Connections()
    for number in range(2 * MAX_CLOSING):
        connections.open(str(number), 0)
    assert connections.evictor.make_room(MAX_CLOSING, 10)
    closed = set(connections.evicted)
    assert not connections.evictor.make_room(MAX_CLOSING + 1, 11)
    assert set(connections.evicted) == closed


def test_make_room_at_limit_aborts_connection_that_is_closing() -> None:
    connections = Connections()
    connections.open("lingering", 0)
    assert connections.evictor.make_room(1, 10)
    assert not connections.evictor.make_room(MAX_CLOSING + 1, 10)
    assert connections.evicted == ["lingering", "lingering"]


def test_make_room_of_many_connections_closes_some_for_the_next_ones() -> None:
    connections = Connections()
    for number in range(64):
        connections.open(str(number), number / 100)
    assert connections.evictor.make_room(1, 10)
    assert connections.evicted == ["0", "1", "2"]
    assert connections.evictor.make_room(3, 10), "no scan is necessary"


def test_pending_bytes_above_limit_close_largest_request() -> None:
    connections = Connections()
    for name in ("share", "body", "vote", "answered"):
        connections.open(name, 0)
    connections.receive("share", UNCOUNTED_BYTES, 1)
    connections.receive("body", UNCOUNTED_BYTES + 35_000, 2)
    connections.receive("answered", UNCOUNTED_BYTES + 40_000, 2)
    connections.not_evictable.add("answered")
    connections.receive("vote", UNCOUNTED_BYTES + 25_000, 3)
    assert connections.evicted == []
    connections.receive("vote", 1, 4)
    assert connections.evicted == ["body"]


def test_pending_bytes_of_small_requests_do_not_count() -> None:
    connections = Connections()
    for number in range(10):
        connections.open(str(number), 0)
        connections.receive(str(number), UNCOUNTED_BYTES, number)
    connections.open("vote", 0)
    connections.receive("vote", UNCOUNTED_BYTES + MAX_PENDING_BYTES, 11)
    assert connections.evicted == []


def test_pending_bytes_of_complete_request_do_not_count() -> None:
    connections = Connections()
    for name in ("complete", "closed", "sending"):
        connections.open(name, 0)
        connections.receive(name, UNCOUNTED_BYTES if name == "sending" else UNCOUNTED_BYTES + 40_000, 1)
    connections.evictor.clear_pending(connections.progress["complete"])
    connections.evictor.discard(connections.progress["closed"])
    connections.receive("sending", MAX_PENDING_BYTES, 2)
    assert connections.evicted == []
    connections.receive("sending", 1, 3)
    assert connections.evicted == ["sending"]


# Deadlines


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
    assert fixture.expirations == []
    fixture.loop.advance_to(99)
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
    assert fixture.loop.pending_timers == []
