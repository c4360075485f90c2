"""Which connections `ConnectionEvictor` closes."""

from __future__ import annotations

from helper.server.connection_eviction import PROGRESS_BYTES, ConnectionEvictor, ConnectionProgress


class Connections:
    """Connections of one listener, by name."""

    def __init__(self, *, min_seconds: float = 1.0, max_pending_bytes: int = 1000) -> None:
        self.evictor = ConnectionEvictor(min_seconds, max_pending_bytes)
        self.evicted: list[str] = []
        self.being_answered: set[str] = set()
        self.progress: dict[str, ConnectionProgress] = {}

    def open(self, name: str, now: float) -> None:
        """Open a connection."""

        def evict() -> None:
            self.evicted.append(name)

        self.progress[name] = ConnectionProgress(lambda: name not in self.being_answered, evict)
        self.evictor.add(self.progress[name], now)

    def receive(self, name: str, size: int, now: float) -> None:
        """Receive a part of a request."""
        self.evictor.add_pending(self.progress[name], size, now)


def test_make_room_closes_connection_without_progress_first() -> None:
    connections = Connections(max_pending_bytes=10_000)
    for name in ("dripping", "sending"):
        connections.open(name, 0)
    for second in range(1, 6):
        connections.receive("dripping", PROGRESS_BYTES // 10, second)
        connections.receive("sending", PROGRESS_BYTES, second)
    assert connections.evictor.make_room(1, 7)
    assert connections.evicted == ["dripping"]


def test_make_room_closes_idle_connection_before_slow_one() -> None:
    connections = Connections()
    connections.open("silent", 0)
    connections.open("idle", 5)
    connections.progress["idle"].is_idle = True
    assert connections.evictor.make_room(1, 10)
    assert connections.evicted == ["idle"]


def test_make_room_spares_idle_connection_of_proxy() -> None:
    connections = Connections()
    connections.open("proxy", 0)
    connections.progress["proxy"].is_kept_idle = True
    connections.progress["proxy"].is_idle = True
    assert not connections.evictor.make_room(1, 10)
    connections.progress["proxy"].is_idle = False
    assert connections.evictor.make_room(1, 11)
    assert connections.evicted == ["proxy"], "its request is slow"


def test_make_room_spares_recent_and_answered_connections() -> None:
    connections = Connections()
    connections.open("answered", 0)
    connections.being_answered.add("answered")
    connections.open("recent", 9.5)
    assert not connections.evictor.make_room(1, 10)
    assert connections.evicted == []


def test_make_room_after_failure_examines_connections_again_later() -> None:
    connections = Connections()
    connections.open("recent", 9.99)
    assert not connections.evictor.make_room(1, 10.98)
    assert not connections.evictor.make_room(1, 11), "examined a moment ago"
    assert connections.evictor.make_room(1, 11.1)


def test_make_room_of_many_closes_several_for_later_connections() -> None:
    connections = Connections()
    for number in range(128):
        connections.open(str(number), number / 1000)
    assert connections.evictor.make_room(1, 10)
    assert connections.evictor.make_room(2, 10)
    assert connections.evicted == ["0", "1"], "both are closed, but have not ended"
    connections.evictor.discard(connections.progress["0"])
    assert connections.evictor.make_room(1, 10)
    assert connections.evicted == ["0", "1"]
    assert connections.evictor.make_room(2, 10)
    assert connections.evicted == ["0", "1", "2"]


def test_pending_bytes_above_limit_close_slowest_holders() -> None:
    connections = Connections(max_pending_bytes=4000)
    for name in ("silent", "stalled", "sending"):
        connections.open(name, 0)
    connections.receive("stalled", 2000, 1)
    connections.receive("sending", 1000, 2)
    assert connections.evicted == []
    connections.receive("sending", 1001, 3)
    assert connections.evicted == ["stalled"], "the silent connection holds no memory"


def test_pending_bytes_of_complete_request_do_not_count() -> None:
    connections = Connections(max_pending_bytes=4000)
    for name in ("complete", "closed", "sending"):
        connections.open(name, 0)
        connections.receive(name, 1 if name == "sending" else 1900, 1)
    connections.evictor.clear_pending(connections.progress["complete"])
    connections.evictor.discard(connections.progress["closed"])
    connections.receive("sending", 3999, 2)
    assert connections.evicted == []
    connections.receive("sending", 1, 3)
    assert connections.evicted == ["sending"]
