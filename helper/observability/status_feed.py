"""Event stream of queue states, for the page and `queue watch`.

A state is complete, and encoded once for all listeners. A listener that is slow misses states, and delays no other one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import islice
from typing import Final

import orjson
import structlog

from helper.clock import Clock
from helper.errors import HelperError

log = structlog.get_logger("helper.observability")

INTERVAL_SECONDS: Final = 1.0
"""Seconds between two states."""
MAX_LISTENERS: Final = 2048
"""Maximum number of listeners, for those who add them."""
WAKE_BATCH_SIZE: Final = 32
"""Number of listeners that are woken together."""
WAKE_PAUSE_SECONDS: Final = 0.01
"""Seconds between two batches. The event loop and the GIL are free in between, so that a due share waits for at most
one batch. All listeners are woken well before the next state."""


class StatusFeed:
    """Publishes queue states to listeners.

    Args:
        read_state: returns the state as plain JSON values; called only while there are listeners.
    """

    def __init__(self, read_state: Callable[[], Awaitable[object]], *, clock: Clock) -> None:
        self._read_state = read_state
        self._clock = clock
        self._newest = b""
        self._number = 0
        self._published_at = float("-inf")
        self._listeners: dict[asyncio.Event, None] = {}  # an event is set when there is a new state
        self._has_listeners = asyncio.Event()
        self._is_closed = False

    @property
    def listener_count(self) -> int:
        """The number of listeners."""
        return len(self._listeners)

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
        self._newest = data
        self._number += 1
        self._published_at = self._clock.monotonic()
        self._wake_listeners(iter(list(self._listeners)))

    def close(self) -> None:
        """Disconnect all listeners, on shutdown."""
        self._is_closed = True
        for changed in self._listeners:
            changed.set()

    async def subscribe(self) -> AsyncIterator[bytes]:
        """Yield the newest state if it is recent, then later ones."""
        is_recent = self._clock.monotonic() - self._published_at < 2 * INTERVAL_SECONDS
        last = self._number - is_recent
        with self._add_listener() as changed:
            while not self._is_closed:
                changed.clear()
                if last < self._number:
                    last = self._number
                    yield self._newest
                else:
                    await changed.wait()

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
