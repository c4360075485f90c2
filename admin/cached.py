"""Questions that many visitors cause and the nodes are asked but now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from helper.clock import Clock

LOOK_AGAIN: Final = 5.0
"""Seconds for which an answer is good."""


class CachedQuery:
    """Something that is done at most every `LOOK_AGAIN` seconds, once at a time, however many want it done.

    Args:
        act: does it; what it raises is raised to who wanted it, and the next one has it tried again.
        clock: the time.
    """

    def __init__(self, act: Callable[[], Awaitable[None]], *, clock: Clock) -> None:
        self._act = act
        self._clock = clock
        self._alone = asyncio.Lock()
        self._done_at = float("-inf")

    async def __call__(self) -> None:
        """Have it done if it was not of late; returns when it was."""
        async with self._alone:
            if self._clock.monotonic() - self._done_at >= LOOK_AGAIN:
                await self._act()
                self._done_at = self._clock.monotonic()
