"""Reads request bodies with limits on size, time, rate and total memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from starlette.exceptions import HTTPException

from helper.core.refusals import Situation, TemporaryRefusal
from helper.ingest.validator import MAX_SHARE_BODY_BYTES, SMALL_BODY_BYTES
from helper.server.protocol import Request, append_part

BODY_TIMEOUT_SECONDS: Final = 30.0
"""Maximum seconds to receive a body, from its start: as long as a vote-sdk node, and as a wallet waits for a share."""
SMALL_BODY_STALL_SECONDS: Final = 20.0
"""Seconds in which a body of at most `SMALL_BODY_BYTES` must grow by `MIN_GROWTH_BYTES`.

It takes no memory that counts, so a stalled Tor circuit may recover.
"""
LARGE_BODY_STALL_SECONDS: Final = 8.0
"""Seconds in which a larger body must grow by a `GROWTH_DIVISOR`th of the bytes received.

A body that arrives evenly within the time limits is faster than that, even with a stall of 4 s.
"""
MIN_GROWTH_BYTES: Final = 512
GROWTH_DIVISOR: Final = 16
MAX_BUFFERED_BYTES: Final = 24 << 20
"""Maximum bytes of all bodies in memory together, without the first `SMALL_BODY_BYTES` of each."""

CLOSE_HEADERS: Final = {"Connection": "close"}
"""Sent when a body was not read completely: the connection cannot be reused."""


class BodyReader:
    """Reads request bodies for one application.

    Args:
        timeout_seconds: maximum time to receive a body. One that grows too slowly is refused sooner.
        budget: maximum bytes of all bodies in memory together, without the first `uncounted_bytes` of each.
        uncounted_bytes: bytes of a body that do not count towards the budget, so that clients with large bodies do
            not block others. The number of connections limits them.
    """

    def __init__(
        self,
        max_bytes: int = MAX_SHARE_BODY_BYTES,
        timeout_seconds: float = BODY_TIMEOUT_SECONDS,
        budget: int = MAX_BUFFERED_BYTES,
        uncounted_bytes: int = SMALL_BODY_BYTES,
    ) -> None:
        self._max_bytes = max_bytes
        self._uncounted_bytes = uncounted_bytes
        self._timeout_seconds = timeout_seconds
        self._budget = budget
        self._buffered = 0

    async def read(self, request: Request) -> bytes:
        """Read a body for brief use: it no longer counts towards the budget on return. See `buffer_body`."""
        async with self.buffer_body(request) as body:
            return body

    @asynccontextmanager
    async def buffer_body(self, request: Request) -> AsyncIterator[bytes]:
        """Read a body, of which nothing was read before. It counts towards the budget until exit.

        Raises:
            TemporaryRefusal: the body is too slow, or the budget is exhausted. No part of the request was processed.
            HTTPException: 413, the body is too large.
            ClientLeft: the client disconnected.
        """
        if request.is_body_complete and len(request.body) <= min(self._uncounted_bytes, self._max_bytes):
            received, _ = await request.receive()  # as of almost every share; a small body does not count
            yield received
            return
        if request.head.content_length > self._max_bytes:
            raise self._too_large()
        buffer: bytes | bytearray = b""
        size = 0
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._timeout_seconds
        expected_size = MIN_GROWTH_BYTES
        try:
            try:
                async with asyncio.timeout_at(min(ends_at, loop.time() + SMALL_BODY_STALL_SECONDS)) as deadline:
                    more = True
                    while more:
                        chunk, more = await request.receive()
                        previous_size, size = size, size + len(chunk)
                        self._buffered += self._counted_bytes(size) - self._counted_bytes(previous_size)
                        if size > self._max_bytes:
                            raise self._too_large()
                        if size > self._uncounted_bytes and self._buffered > self._budget:
                            raise TemporaryRefusal(Situation.TOO_MANY_REQUESTS, headers=CLOSE_HEADERS)
                        buffer = append_part(buffer, chunk)
                        del chunk  # it would be held until the next one comes
                        if size >= expected_size:
                            expected_size, stall_seconds = self._next_target(size)
                            deadline.reschedule(min(ends_at, loop.time() + stall_seconds))
            except TimeoutError:
                raise TemporaryRefusal(Situation.SLOW_BODY, headers=CLOSE_HEADERS) from None
            body = bytes(buffer)
            buffer = b""
            await request.wait_turn()
            yield body
        finally:
            self._buffered -= self._counted_bytes(size)

    def _next_target(self, size: int) -> tuple[int, float]:
        """Return the next size that the body must reach, and the seconds allowed for it."""
        if size <= self._uncounted_bytes:
            return size + MIN_GROWTH_BYTES, SMALL_BODY_STALL_SECONDS
        return size + max(MIN_GROWTH_BYTES, size // GROWTH_DIVISOR), LARGE_BODY_STALL_SECONDS

    def _counted_bytes(self, size: int) -> int:
        """The bytes of a body that count towards the budget."""
        return max(0, size - self._uncounted_bytes)

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"body: is larger than {self._max_bytes} bytes", CLOSE_HEADERS)
