"""The stream of states that pages and `queue watch` follow: numbered, the newest few kept, the same bytes for all.

A listener is a place in the ring and a bell, nothing else. One that falls behind the ring is dropped, nobody waits for
it; one that comes back with the number it saw last goes on from there, or from the newest state when that is long gone.
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

log = structlog.get_logger("helper.feed")

INTERVAL: Final = 1.0
"""Seconds between two states."""
KEPT: Final = 64
LISTENERS: Final = 2048
"""Most listeners at once."""
SLICE: Final = 32
"""Listeners that are woken at one go."""
PAUSE: Final = 0.01
"""Seconds between two goes: the loop, and the interpreter's lock with it, is free for everything else, so that a share
that is due waits for one go at most and not for all who listen. All have been told well before the next state."""


@dataclass(frozen=True, slots=True)
class Event:
    """One state: its name, `<run>-<number>`, and the JSON."""

    name: str
    number: int
    data: bytes


class Feed:
    """States of this run of the service.

    Args:
        snapshot: makes the state as plain JSON values; called only while somebody listens.
        clock: the time.
        name: names this run of the service, so that numbers of an earlier one are known as such.
        kept: how many states the ring holds.
    """

    def __init__(self, snapshot: Callable[[], Awaitable[object]], *, clock: Clock, name: str, kept: int = KEPT) -> None:
        self._snapshot = snapshot
        self._clock = clock
        self._name = name
        self._ring: deque[Event] = deque(maxlen=kept)
        self._number = 0
        self._made_at = float("-inf")
        self._listeners: dict[asyncio.Event, None] = {}  # each set when there is something new for it
        self._wanted = asyncio.Event()
        self._closed = False

    @property
    def listeners(self) -> int:
        """How many listen now."""
        return len(self._listeners)

    @property
    def full(self) -> bool:
        """Whether nobody more may listen."""
        return len(self._listeners) >= LISTENERS

    async def run(self) -> None:
        """Make states for ever, while somebody listens."""
        while True:
            await self._wanted.wait()
            try:
                self.publish(orjson.dumps(await self._snapshot()))
            except HelperError as error:
                log.error("no state could be made for listeners", error=str(error), advice=error.advice)
            await self._clock.sleep(INTERVAL)

    def publish(self, data: bytes) -> None:
        """Give a state to everybody."""
        self._number += 1
        self._made_at = self._clock.monotonic()
        self._ring.append(Event(f"{self._name}-{self._number}", self._number, data))
        self._wake_some(iter(list(self._listeners)))

    def close(self) -> None:
        """End all listening: the service stops."""
        self._closed = True
        for changed in self._listeners:
            changed.set()

    async def listen(self, last: str | None = None) -> AsyncIterator[Event]:
        """The states after the one named `last`, for ever; ends when this listener has fallen behind."""
        seen = self._place(last)
        with self._listening() as changed:
            while not self._closed:
                if self._ring and seen < self._ring[0].number - 1:
                    return
                changed.clear()
                for event in [event for event in self._ring if event.number > seen]:
                    yield event
                    seen = event.number
                if seen >= self._number and not self._closed:
                    await changed.wait()

    def _place(self, last: str | None) -> int:
        """The number to go on after."""
        name, _, number = (last or "").rpartition("-")
        if name == self._name and number.isdecimal() and self._ring:
            seen = int(number[:18])
            if self._ring[0].number - 1 <= seen <= self._number:
                return seen
        # Else the newest: the one that is there if it is of now, or the next.
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
        some = list(islice(waiting, SLICE))
        for changed in some:
            changed.set()
        if some:
            asyncio.get_running_loop().call_later(PAUSE, self._wake_some, waiting)
