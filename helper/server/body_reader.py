"""Reads request bodies with limits on size, time, rate and total memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from helper.core.refusals import Situation, TemporaryRefusal
from helper.ingest.payload import MAX_SHARE_BODY_BYTES, SMALL_BODY_BYTES

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
COMPLETE_BODY_KEY: Final = "complete body"
"""Key of the body in the request state, if the connection receives all of it before the request is served.

Valid only until the first call of `receive`.
"""

CLOSE_AFTER_BODY_KEY: Final = "close after body"
"""Key in the request state: a weak reference to a function that delays the close of the connection.

After the call, a connection that is closed by a response with an unread body first discards the rest of the body for a
few seconds.
"""

HAS_LEFT_KEY: Final = "has left"
"""Key in the request state: a function that returns whether the connection is closed, so no response can be sent."""

DRAIN_SECONDS: Final = 1.0
DRAIN_BYTES: Final = 4 << 20
"""Limits for reading and discarding the rest of a body that is not used, so that the client can read the response."""

CLOSE_HEADERS: Final = {"Connection": "close"}
"""Sent when a body was not read completely: the connection cannot be reused."""


class BodyReader:
    """Reads request bodies for one application.

    Args:
        max_bytes: maximum bytes of a body.
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

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Read a body for brief use: it no longer counts towards the budget on return. See `buffer_body`."""
        async with self.buffer_body(scope, receive) as body:
            return body

    def take_received(self, scope: Scope) -> bytes | None:
        """Return a small body that the connection has already received completely, as for almost every share.

        Returns None for any other body; read it with `buffer_body`. A small body does not count towards the budget.
        """
        body: bytearray | None = scope.get("state", {}).get(COMPLETE_BODY_KEY)
        if body is None or len(body) > min(self._uncounted_bytes, self._max_bytes):
            return None
        complete_body = bytes(body)
        body.clear()  # the connection stays open and must not hold the share in memory
        return complete_body

    @asynccontextmanager
    async def buffer_body(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """Read the body of a request; `receive` must not have been called. It counts towards the budget until exit.

        Args:
            scope: ASGI scope of the request.
            receive: ASGI receive function of the request.

        Raises:
            TemporaryRefusal: the body is too slow, or the budget is exhausted. No part of the request was processed.
            HTTPException: 413, the body is too large.
            ClientDisconnect: the client disconnected.
        """
        if (received := self.take_received(scope)) is not None:
            yield received
            return
        content_length = Headers(scope=scope).get("content-length", "")
        if content_length.isdecimal() and int(content_length[:20]) > self._max_bytes:
            raise await self._drain_and_refuse(scope, receive)
        # One buffer instead of a list: freed pieces of 16 KiB would stay in the heap, between smaller objects.
        buffer = bytearray()
        size = 0
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._timeout_seconds
        expected_size = MIN_GROWTH_BYTES
        try:
            try:
                async with asyncio.timeout_at(min(ends_at, loop.time() + SMALL_BODY_STALL_SECONDS)) as deadline:
                    more = True
                    while more:
                        chunk, more = await _receive_chunk(receive)
                        previous_size, size = size, size + len(chunk)
                        self._buffered += self._counted_bytes(size) - self._counted_bytes(previous_size)
                        if size > self._max_bytes:
                            raise await self._drain_and_refuse(scope, receive)
                        if size > self._uncounted_bytes and self._buffered > self._budget:
                            raise TemporaryRefusal(Situation.TOO_MANY_REQUESTS, headers=CLOSE_HEADERS)
                        buffer += chunk
                        if size >= expected_size:
                            expected_size, stall_seconds = self._next_target(size)
                            deadline.reschedule(min(ends_at, loop.time() + stall_seconds))
            except TimeoutError:
                reference = scope.get("state", {}).get(CLOSE_AFTER_BODY_KEY)
                if reference is not None and (close_after_body := reference()) is not None:
                    close_after_body()
                raise TemporaryRefusal(Situation.SLOW_BODY, headers=CLOSE_HEADERS) from None
            body = bytes(buffer)
            buffer.clear()
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

    async def _drain_and_refuse(self, scope: Scope, receive: Receive) -> HTTPException:
        """Discard the rest of the body within limits, then return the refusal.

        Closing with bytes unread resets the connection, and the client may lose the response.
        """
        if "expect" not in Headers(scope=scope):
            drained, more = 0, True
            with anyio.move_on_after(DRAIN_SECONDS):
                while more and drained <= DRAIN_BYTES:
                    chunk, more = await _receive_chunk(receive)
                    drained += len(chunk)
        return HTTPException(413, f"body: is larger than {self._max_bytes} bytes", CLOSE_HEADERS)


async def _receive_chunk(receive: Receive) -> tuple[bytes, bool]:
    """The next chunk of the body, and whether there are more."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)
