"""Event stream of queue states, for the page and `queue watch`.

States are numbered and encoded once for all listeners. A ring buffer holds the newest ones. A listener is a position in
the buffer and an `asyncio.Event`. A listener that falls behind the buffer is disconnected, so that it delays no other
listener. A listener that reconnects continues after the last state it received, or with the newest state if the buffer
no longer contains that state.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import orjson
import structlog

from helper.clock import Clock
from helper.errors import HelperError

log = structlog.get_logger("helper.observability")

INTERVAL_SECONDS: Final = 1.0
"""Seconds between two states."""
BUFFER_SIZE: Final = 64
"""Number of states in the ring buffer."""
MAX_LISTENERS: Final = 2048
"""Maximum number of listeners."""
WAKE_BATCH_SIZE: Final = 32
"""Number of listeners that are woken together."""
WAKE_PAUSE_SECONDS: Final = 0.01
"""Seconds between two batches. The event loop and the GIL are free in between, so that a due share waits for at most
one batch. All listeners are woken well before the next state."""


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """One state: its name `<run>-<number>` and its JSON."""

    event_id: str
    number: int
    data: bytes


class StatusFeed:
    """Publishes queue states to listeners.

    Args:
        read_state: returns the state as plain JSON values; called only while there are listeners.
        clock: the time.
        run_id: identifies this run of the service, to recognize event numbers of an earlier run.
        buffer_size: size of the ring buffer.
    """

    def __init__(
        self, read_state: Callable[[], Awaitable[object]], *, clock: Clock, run_id: str, buffer_size: int = BUFFER_SIZE
    ) -> None:
        self._read_state = read_state
        self._clock = clock
        self._run_id = run_id
        self._ring: deque[FeedEvent] = deque(maxlen=buffer_size)
        self._last_number = 0
        self._published_at = float("-inf")
        self._listeners: dict[asyncio.Event, None] = {}  # an event is set when its listener has a new state to send
        self._has_listeners = asyncio.Event()
        self._is_closed = False

    @property
    def listener_count(self) -> int:
        """The number of listeners."""
        return len(self._listeners)

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of listeners is reached."""
        return len(self._listeners) >= MAX_LISTENERS

    async def run(self) -> None:
        """Publish a state every second while there are listeners, until cancelled."""
        while True:
            await self._has_listeners.wait()
            try:
                self.publish(orjson.dumps(await self._read_state()))
            except HelperError as error:
                log.error("status_feed_failed", error=str(error), advice=error.advice)
            await self._clock.sleep(INTERVAL_SECONDS)

    def publish(self, data: bytes) -> None:
        """Publish a state to all listeners."""
        self._last_number += 1
        self._published_at = self._clock.monotonic()
        self._ring.append(FeedEvent(f"{self._run_id}-{self._last_number}", self._last_number, data))
        self._wake_listeners(iter(list(self._listeners)))

    def close(self) -> None:
        """Disconnect all listeners, on shutdown."""
        self._is_closed = True
        for changed in self._listeners:
            changed.set()

    async def subscribe(self, last_event_id: str | None = None) -> AsyncIterator[FeedEvent]:
        """Yield the states after event `last_event_id`. Ends when the listener has fallen behind."""
        position = self._start_position(last_event_id)
        with self._add_listener() as changed:
            while not self._is_closed:
                if self._ring and position < self._ring[0].number - 1:
                    return
                changed.clear()
                for event in [event for event in self._ring if event.number > position]:
                    yield event
                    position = event.number
                if position >= self._last_number and not self._is_closed:
                    await changed.wait()

    def _start_position(self, last_event_id: str | None) -> int:
        """The number of the state before the first one to send."""
        name, _, number = (last_event_id or "").rpartition("-")
        if name == self._run_id and number.isdecimal() and self._ring:
            position = int(number[:18])
            if self._ring[0].number - 1 <= position <= self._last_number:
                return position
        # Otherwise start with the newest state if it is recent, else with the next one.
        is_recent = self._clock.monotonic() - self._published_at < 2 * INTERVAL_SECONDS
        return self._last_number - 1 if is_recent else self._last_number

    @contextlib.contextmanager
    def _add_listener(self) -> Iterator[asyncio.Event]:
        changed = asyncio.Event()
        self._listeners[changed] = None
        self._has_listeners.set()
        try:
            yield changed
        finally:
            del self._listeners[changed]
            if not self._listeners:
                self._has_listeners.clear()

    def _wake_listeners(self, waiting: Iterator[asyncio.Event]) -> None:
        batch = list(islice(waiting, WAKE_BATCH_SIZE))
        for changed in batch:
            changed.set()
        if batch:
            asyncio.get_running_loop().call_later(WAKE_PAUSE_SECONDS, self._wake_listeners, waiting)
