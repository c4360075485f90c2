"""Starts requests of many connections in turn, so that no number of them delays the event loop for long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

log = structlog.get_logger("helper.server")

STARTS_PER_ITERATION: Final = 4
"""Requests started in one iteration of the event loop. Starting one takes about 0.3 ms."""


class RequestTurns:
    """A queue of requests to start, shared by all connections of a listener.

    Every request that starts makes the current iteration of the event loop longer, and a posted share needs several
    iterations. Without a limit, a few hundred connections that always have a request ready delay each share by seconds.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def append(self, start: Callable[[], None]) -> None:
        """Call `start` in its turn. It must tolerate that its connection is closed by then."""
        self._waiting.append(start)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_next)

    def _start_next(self) -> None:
        self._is_scheduled = False
        for _ in range(min(STARTS_PER_ITERATION, len(self._waiting))):
            try:
                self._waiting.popleft()()
            except Exception:  # of one connection; the requests of the others still start
                log.exception("request_start_failed")
        if self._waiting:
            self._schedule()
