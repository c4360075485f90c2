"""Event stream of queue states, for the page and `queue watch`.

States are numbered and encoded once for all listeners. A ring buffer holds the newest ones. A listener is a position in
the buffer and an `asyncio.Event`. A listener that falls behind the buffer is disconnected, so that it delays nobody. A
listener that reconnects continues after the last state it received, or with the newest state if that one is gone.
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

INTERVAL: Final = 1.0
"""Seconds between two states."""
KEPT: Final = 64
"""Number of states in the ring buffer."""
LISTENERS: Final = 2048
"""Maximum number of listeners."""
SLICE: Final = 32
"""Number of listeners that are woken together."""
PAUSE: Final = 0.01
"""Seconds between two slices. The event loop and the GIL are free meanwhile, so that a due share waits for one slice at
most. All listeners are woken well before the next state."""


@dataclass(frozen=True, slots=True)
class Event:
    """One state: its name `<run>-<number>` and its JSON."""

    name: str
    number: int
    data: bytes


class Feed:
    """Publishes queue states to listeners.

    Args:
        snapshot: returns the state as plain JSON values; called only while there are listeners.
        clock: the time.
        name: identifies this run of the service, to recognize event numbers of an earlier run.
        kept: size of the ring buffer.
    """

    def __init__(self, snapshot: Callable[[], Awaitable[object]], *, clock: Clock, name: str, kept: int = KEPT) -> None:
        self._snapshot = snapshot
        self._clock = clock
        self._name = name
        self._ring: deque[Event] = deque(maxlen=kept)
        self._number = 0
        self._made_at = float("-inf")
        self._listeners: dict[asyncio.Event, None] = {}  # an event is set when its listener has a new state to send
        self._wanted = asyncio.Event()
        self._closed = False

    @property
    def listeners(self) -> int:
        """The number of listeners."""
        return len(self._listeners)

    @property
    def full(self) -> bool:
        """Whether the maximum number of listeners is reached."""
        return len(self._listeners) >= LISTENERS

    async def run(self) -> None:
        """Publish a state every second while there are listeners, until cancelled."""
        while True:
            await self._wanted.wait()
            try:
                self.publish(orjson.dumps(await self._snapshot()))
            except HelperError as error:
                log.error("status_feed_failed", error=str(error), advice=error.advice)
            await self._clock.sleep(INTERVAL)

    def publish(self, data: bytes) -> None:
        """Publish a state to all listeners."""
        self._number += 1
        self._made_at = self._clock.monotonic()
        self._ring.append(Event(f"{self._name}-{self._number}", self._number, data))
        self._wake_some(iter(list(self._listeners)))

    def close(self) -> None:
        """Disconnect all listeners, on shutdown."""
        self._closed = True
        for changed in self._listeners:
            changed.set()

    async def listen(self, last: str | None = None) -> AsyncIterator[Event]:
        """Yield the states after the one named `last`. Ends when the listener has fallen behind."""
        position = self._position(last)
        with self._listening() as changed:
            while not self._closed:
                if self._ring and position < self._ring[0].number - 1:
                    return
                changed.clear()
                for event in [event for event in self._ring if event.number > position]:
                    yield event
                    position = event.number
                if position >= self._number and not self._closed:
                    await changed.wait()

    def _position(self, last: str | None) -> int:
        """The number of the state before the first one to send."""
        name, _, number = (last or "").rpartition("-")
        if name == self._name and number.isdecimal() and self._ring:
            position = int(number[:18])
            if self._ring[0].number - 1 <= position <= self._number:
                return position
        # Otherwise start with the newest state if it is recent, else with the next one.
        fresh = self._clock.monotonic() - self._made_at < 2 * INTERVAL
        return self._number - 1 if fresh else self._number

    @contextlib.contextmanager
    def _listening(self) -> Iterator[asyncio.Event]:
        changed = asyncio.Event()
        self._listeners[changed] = None
        self._wanted.set()
        try:
            yield changed
        finally:
            del self._listeners[changed]
            if not self._listeners:
                self._wanted.clear()

    def _wake_some(self, waiting: Iterator[asyncio.Event]) -> None:
        batch = list(islice(waiting, SLICE))
        for changed in batch:
            changed.set()
        if batch:
            asyncio.get_running_loop().call_later(PAUSE, self._wake_some, waiting)
