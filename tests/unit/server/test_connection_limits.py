"""Limits of connections: which ones are closed for others."""

from __future__ import annotations

from helper.server.connection_limits import (
    IDLE_SECONDS,
    MAX_CLOSING,
    UNCOUNTED_BYTES,
    ConnectionEvictor,
    ConnectionLimits,
    ConnectionProgress,
)

GRACE_SECONDS = 4.0
MAX_PENDING_BYTES = 100_000


class FakeConnection(ConnectionProgress):
    def __init__(self, name: str, evicted: list[str], now: float) -> None:
        self.name = name
        self.evicted = evicted
        self.started_at = now
        self.is_answered = False

    def is_evictable(self) -> bool:
        return not self.is_answered

    def evict(self) -> None:
        self.evicted.append(self.name)


class Connections:
    def __init__(self) -> None:
        self.open_ones: set[FakeConnection] = set()
        limits = ConnectionLimits(eviction_seconds=GRACE_SECONDS, max_pending_bytes=MAX_PENDING_BYTES)
        self.evictor = ConnectionEvictor(self.open_ones, limits)
        self.evicted: list[str] = []
        self.progress: dict[str, FakeConnection] = {}

    def open(self, name: str, now: float) -> FakeConnection:
        self.progress[name] = FakeConnection(name, self.evicted, now)
        self.open_ones.add(self.progress[name])
        return self.progress[name]

    def close(self, name: str) -> None:
        self.open_ones.remove(self.progress[name])
        self.evictor.discard(self.progress[name])

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
    connections.open("answered", 0).is_answered = True
    connections.open("new", 10 - GRACE_SECONDS + 0.1)
    connections.open("idle", 10 - IDLE_SECONDS + 0.1).is_idle = True
    assert not connections.evictor.make_room(1, 10)
    assert connections.evicted == []


def test_make_room_without_slow_connection_closes_earliest_request_of_served_ones() -> None:
    connections = Connections()
    for name, began in (("later", 9.5), ("earlier", 9), ("proxy", 8), ("answered", 8), ("idle", 9.9), ("new", 8)):
        connections.open(name, began).is_served = name != "new"
    connections.progress["proxy"].is_proxy = True
    connections.progress["answered"].is_answered = True
    connections.progress["idle"].is_idle = True
    assert connections.evictor.make_room(1, 10)
    assert connections.evicted == ["earlier"]
    connections.open("slow", 5).is_served = True
    assert connections.evictor.make_room(2, 10.1)
    assert connections.evicted == ["earlier", "slow"]


def test_make_room_with_too_few_slow_connections_also_closes_served_ones() -> None:
    connections = Connections()
    for number in range(63):
        connections.open(str(number), 9 + number / 100).is_served = True
    connections.open("slow", 5)
    assert connections.evictor.make_room(1, 10)
    assert connections.evicted == ["slow", "0", "1"], "one would be too few for the connections before the next scan"


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
    connections.close("0")
    assert connections.evictor.make_room(1, 10)
    assert connections.evicted == ["0", "1"]
    connections.progress["2"].started_at = 9.9  # it has sent its request since
    assert connections.evictor.make_room(2, 10.1)
    assert connections.evicted == ["0", "1", "3"]


def test_make_room_above_the_limit_of_closing_connections_aborts_those_that_have_closed_longest() -> None:
    connections = Connections()
    for number in range(2 * MAX_CLOSING):
        connections.open(f"{number:03}", number / 1000)
    assert connections.evictor.make_room(MAX_CLOSING, 10)
    closed = list(connections.evicted)
    assert connections.evictor.make_room(MAX_CLOSING + 1, 10)
    assert connections.evictor.make_room(MAX_CLOSING + 2, 10), "the first one has not ended yet"
    assert connections.evicted == [*closed, "000", "001"]


def test_make_room_without_enough_closing_connections_aborts_one_and_refuses() -> None:
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
    connections.progress["answered"].is_answered = True
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
    connections.close("closed")
    connections.receive("sending", MAX_PENDING_BYTES, 2)
    assert connections.evicted == []
    connections.receive("sending", 1, 3)
    assert connections.evicted == ["sending"]
