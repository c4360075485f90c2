"""Reads request bodies, with limits on size, time and the memory of all bodies together."""

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
"""A body must be here in this time, so that a slow client is cut off within 10 s all in all."""
MAX_BUFFERED: Final = 64 << 20
"""Bytes of all bodies that are read or used at once, without the first `SMALL_BODY` of each."""
MAX_BUFFERED_EACH: Final = MAX_BUFFERED // 4
"""Of them, bytes of one client's bodies, where the reader knows the client."""
WHOLE: Final = "whole body"
"""The name in a request's state of its body, where the connection has all of it before the request is served. It says
so only until something is received."""

DRAIN_SECONDS: Final = 1.0
DRAIN_BYTES: Final = 4 << 20
"""How long and how far a body that is too large is read on, so that its sender can read the answer."""

_CLOSE: Final = {"Connection": "close"}
"""After a body that was not read to its end the connection is of no more use."""


class BodyReader:
    """Reads bodies for one application.

    Args:
        limit: bytes of the largest body.
        seconds: longest time that one body may take.
        budget: bytes of all bodies together that may be in memory, without the first `small` of each.
        budget_each: the same, of one client's bodies.
        small: bytes up to which a body is read in any case: clients with large bodies must not keep out the others.
            There are as many at once as connections.
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
        """The whole body of a request, for a caller that needs it for a moment only; see `reading`."""
        async with self.reading(scope, receive, client) as body:
            return body

    def received(self, scope: Scope) -> bytes | None:
        """The body if it is small and the connection has already received all of it, as with almost every share.

        Otherwise None, and the body is to be read by `reading`. A small body does not count towards the budgets.
        """
        body: bytearray | None = scope.get("state", {}).get(WHOLE)
        if body is None or len(body) > min(self._small, self._limit):
            return None
        whole = bytes(body)
        body.clear()  # the connection stays open, and must not hold the share
        return whole

    @asynccontextmanager
    async def reading(self, scope: Scope, receive: Receive, client: bytes | None = None) -> AsyncIterator[bytes]:
        """The whole body of a request of which nothing has been received. Counts towards the budgets until the exit.

        Args:
            scope: the request's.
            receive: the request's.
            client: who sends it; None for no limit of its own.

        Raises:
            HTTPException: 413 as soon as it is known to be too large, 408 when it is too slow, 429 when too
                much is being read at once.
            ClientDisconnect: the client went away.
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
                            raise HTTPException(429, "too much at once, come again", _CLOSE)
                        chunks.append(chunk)
            except TimeoutError:
                raise HTTPException(408, f"the body did not come within {self._seconds:g} s", _CLOSE) from None
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
        """The part of a body that counts."""
        return max(0, size - self._small)

    async def _too_large(self, scope: Scope, receive: Receive) -> HTTPException:
        """The refusal, after a moment of reading on into nothing.

        A connection that is closed with bytes unread is reset, and the client may lose the answer with it.
        """
        if "expect" not in Headers(scope=scope):
            drained, more = 0, True
            with anyio.move_on_after(DRAIN_SECONDS):
                while more and drained <= DRAIN_BYTES:
                    chunk, more = await _next(receive)
                    drained += len(chunk)
        return HTTPException(413, f"body: is larger than {self._limit} bytes", _CLOSE)


async def _next(receive: Receive) -> tuple[bytes, bool]:
    """The next piece of the body, and whether there are more."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)
