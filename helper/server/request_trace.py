"""Times of a request in headers of its response, for clients that measure latency. None is stored or logged."""

from __future__ import annotations

import re
from typing import Final

from helper.clock import Clock

TRACE_HEADER: Final = b"x-vote-request-id"
TRACE_ID: Final = re.compile(rb"[0-9A-Fa-f]{32}")


class RequestTrace:
    """The times of a request, which begins now."""

    def __init__(self, trace_id: bytes, clock: Clock) -> None:
        self._id = trace_id
        self._clock = clock
        self._started_at, self._started = clock.now(), clock.monotonic()
        self._body: list[tuple[bytes, bytes]] = []

    def note_body_end(self) -> None:
        """Note that the body was received completely."""
        self._body = [(b"x-vote-body-read-us", self._elapsed_us())]

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of a response that begins now."""
        started = b"%d" % (self._started_at * 1e6)
        times = [(b"x-vote-handler-started-us", started), (b"x-vote-handler-duration-us", self._elapsed_us())]
        return [(TRACE_HEADER, self._id.lower()), *times, *self._body]

    def _elapsed_us(self) -> bytes:
        return b"%d" % ((self._clock.monotonic() - self._started) * 1e6)
