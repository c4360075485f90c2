"""Reads request bodies with limits on size, time and total memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from helper.ingest.payload import MAX_BODY, SMALL_BODY

BODY_SECONDS: Final = 8.0
"""Maximum seconds to receive a body; with the head, a slow client is cut off within 10 s."""
MAX_BUFFERED: Final = 64 << 20
"""Maximum bytes of all bodies in memory together, without the first `SMALL_BODY` of each."""
MAX_BUFFERED_EACH: Final = MAX_BUFFERED // 4
"""The same for the bodies of one client, if the client is known."""
WHOLE: Final = "whole body"
"""Key in a request's state of its complete body, if the connection has received all of it before the request is served.

Valid only until the first call of `receive`.
"""

DRAIN_SECONDS: Final = 1.0
DRAIN_BYTES: Final = 4 << 20
"""Limits for reading and discarding the rest of a body that is too large, so that the client can read the response."""

_CLOSE: Final = {"Connection": "close"}
"""Sent when a body was not read completely: the connection cannot be reused."""


class BodyReader:
    """Reads request bodies for one application.

    Args:
        limit: maximum bytes of a body.
        seconds: maximum time to receive a body.
        budget: maximum bytes of all bodies in memory together, without the first `small` of each.
        budget_each: the same for the bodies of one client.
        small: bytes of a body that do not count towards the budgets, so that clients with large bodies do not block
            others. The number of connections limits them.
    """

    def __init__(
        self,
        limit: int = MAX_BODY,
        seconds: float = BODY_SECONDS,
        budget: int = MAX_BUFFERED,
        small: int = SMALL_BODY,
        budget_each: int = MAX_BUFFERED_EACH,
    ) -> None:
        self._limit = limit
        self._small = small
        self._seconds = seconds
        self._budget = budget
        self._budget_each = budget_each
        self._buffered = 0
        self._buffered_by_client: Counter[bytes] = Counter()

    async def read(self, scope: Scope, receive: Receive, client: bytes | None = None) -> bytes:
        """Read a body for short use: it stops counting towards the budgets on return. See `reading`."""
        async with self.reading(scope, receive, client) as body:
            return body

    def received(self, scope: Scope) -> bytes | None:
        """Return a small body that the connection has already received completely, as for almost every share.

        Otherwise None: read the body with `reading`. A small body does not count towards the budgets.
        """
        body: bytearray | None = scope.get("state", {}).get(WHOLE)
        if body is None or len(body) > min(self._small, self._limit):
            return None
        whole = bytes(body)
        body.clear()  # the connection stays open and must not hold the share in memory
        return whole

    @asynccontextmanager
    async def reading(self, scope: Scope, receive: Receive, client: bytes | None = None) -> AsyncIterator[bytes]:
        """Read the body of a request; `receive` must not have been called. It counts towards the budgets until exit.

        Args:
            scope: ASGI scope of the request.
            receive: ASGI receive function of the request.
            client: the client; None for no limit for each client.

        Raises:
            HTTPException: 413 as soon as it is known to be too large, 408 when it is too slow, 429 when a budget is
                exhausted.
            ClientDisconnect: the client disconnected.
        """
        if (received := self.received(scope)) is not None:
            yield received
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._limit:
            raise await self._too_large(scope, receive)
        chunks: list[bytes] = []
        size = 0
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    more = True
                    while more:
                        chunk, more = await _next(receive)
                        before, size = size, size + len(chunk)
                        self._count(client, self._large(size) - self._large(before))
                        if size > self._limit:
                            raise await self._too_large(scope, receive)
                        if size > self._small and self._is_full(client):
                            raise HTTPException(429, "too many requests; retry later", _CLOSE)
                        chunks.append(chunk)
            except TimeoutError:
                raise HTTPException(408, f"request body timed out after {self._seconds:g} s", _CLOSE) from None
            body = b"".join(chunks)
            chunks.clear()
            yield body
        finally:
            self._count(client, -self._large(size))

    def _count(self, client: bytes | None, added: int) -> None:
        self._buffered += added
        if client is not None and added:
            self._buffered_by_client[client] += added
            if not self._buffered_by_client[client]:
                del self._buffered_by_client[client]

    def _is_full(self, client: bytes | None) -> bool:
        return self._buffered > self._budget or (
            client is not None and self._buffered_by_client[client] > self._budget_each
        )

    def _large(self, size: int) -> int:
        """The bytes of a body that count towards the budgets."""
        return max(0, size - self._small)

    async def _too_large(self, scope: Scope, receive: Receive) -> HTTPException:
        """Discard the rest of the body within limits, then return the refusal.

        Closing with bytes unread resets the connection, and the client may lose the response.
        """
        if "expect" not in Headers(scope=scope):
            drained, more = 0, True
            with anyio.move_on_after(DRAIN_SECONDS):
                while more and drained <= DRAIN_BYTES:
                    chunk, more = await _next(receive)
                    drained += len(chunk)
        return HTTPException(413, f"body: is larger than {self._limit} bytes", _CLOSE)


async def _next(receive: Receive) -> tuple[bytes, bool]:
    """The next chunk of the body, and whether there are more."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)
