"""Creates HTTP clients that store no cookies, follow no redirects and ignore proxy variables.

Cookies would let a server fill the memory of a long-lived client and link unrelated requests. All HTTP clients of
the helper are created here; a test enforces this.

A request that is cancelled while it waits in httpcore's connection pool can lose a connection of the pool permanently
(encode/httpcore#1093), and one that is cancelled later can leave its connection open. `LimitedTransport` therefore
limits the requests before httpcore, and gives each connection a pool of its own.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import cache, partial
from http.cookiejar import CookieJar
from typing import Any, Final, cast
from urllib.request import Request

import anyio
import httpx

DEFAULT_CONNECTIONS: Final = 100
"""Default maximum number of concurrent requests of an asynchronous client."""
_IDLE_SECONDS: Final = 30.0


class LimitedTransport(httpx.AsyncBaseTransport):
    """Limits concurrent requests, and keeps connections alive.

    A request has a slot from before its connection is opened until its response is closed. Each connection is a
    transport of its own. That of a failed or cancelled request is closed, because httpcore may no longer know its
    state.

    Args:
        create: creates the transport of one connection.
        slots: maximum number of concurrent requests.
        max_idle: maximum number of idle connections.
    """

    def __init__(self, create: Callable[[], httpx.AsyncBaseTransport], *, slots: int, max_idle: int) -> None:
        self._create = create
        self._slots = asyncio.Semaphore(slots)
        self._max_idle = max_idle
        self._idle: list[tuple[httpx.AsyncBaseTransport, float]] = []  # with the monotonic time of the last use
        self._closing: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request once there is a slot.

        Raises:
            httpx.PoolTimeout: there was no slot in time.
        """
        if self._slots.locked():
            try:
                async with asyncio.timeout(request.extensions.get("timeout", {}).get("pool")):
                    await self._slots.acquire()
            except TimeoutError:
                raise httpx.PoolTimeout("too many concurrent requests", request=request) from None
        else:
            await self._slots.acquire()
        connection = self._take_idle() or self._create()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._discard(connection)
            raise
        response.stream = _LimitedStream(cast(httpx.AsyncByteStream, response.stream), partial(self._end, connection))
        return response

    def _take_idle(self) -> httpx.AsyncBaseTransport | None:
        """Take the idle connection that was used last; close those that were idle for too long."""
        oldest = anyio.current_time() - _IDLE_SECONDS
        while self._idle and self._idle[0][1] < oldest:
            self._close(self._idle.pop(0)[0])
        return self._idle.pop()[0] if self._idle else None

    def _end(self, connection: httpx.AsyncBaseTransport, is_reusable: bool) -> None:
        """End a request whose response was closed."""
        if is_reusable and len(self._idle) < self._max_idle:
            self._idle.append((connection, anyio.current_time()))
            self._slots.release()
        else:
            self._discard(connection)

    def _discard(self, connection: httpx.AsyncBaseTransport) -> None:
        self._close(connection).add_done_callback(lambda _: self._slots.release())

    def _close(self, connection: httpx.AsyncBaseTransport) -> asyncio.Task[None]:
        """Close a connection in a task of its own, which the cancellation of a request does not reach."""
        task = asyncio.create_task(connection.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def aclose(self) -> None:
        """Close the idle connections; the others close with their responses."""
        self._max_idle = 0
        idle, self._idle = self._idle, []
        for connection, _ in idle:
            self._close(connection)
        await asyncio.gather(*self._closing, return_exceptions=True)


class _LimitedStream(httpx.AsyncByteStream):
    """The body of a response. Calls `on_end` once, with whether the connection can be reused."""

    def __init__(self, stream: httpx.AsyncByteStream, on_end: Callable[[bool], None]) -> None:
        self._stream = stream
        self._on_end: Callable[[bool], None] | None = on_end

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._stream.__aiter__()

    async def aclose(self) -> None:
        on_end, self._on_end = self._on_end, None
        is_closed = False
        try:
            await self._stream.aclose()
            is_closed = True
        finally:
            if on_end is not None:
                on_end(is_closed)


def create_transport(
    connections: int = DEFAULT_CONNECTIONS, *, max_idle: int = 20, socket_options: Iterable[Any] = ()
) -> LimitedTransport:
    """Create a transport for the network.

    Args:
        connections: maximum number of concurrent requests, and so of connections.
        max_idle: maximum number of idle connections.
        socket_options: as for `socket.setsockopt`.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_idle, keepalive_expiry=_IDLE_SECONDS)
    options = list(socket_options)

    def create() -> httpx.AsyncBaseTransport:
        return httpx.AsyncHTTPTransport(
            verify=_get_ssl_context(), limits=limits, trust_env=False, socket_options=options
        )

    return LimitedTransport(create, slots=connections, max_idle=max_idle)


@cache
def _get_ssl_context() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


class _NoCookies(CookieJar):
    """A cookie jar that stores nothing and does not parse `Set-Cookie` headers."""

    def extract_cookies(self, response: Any, request: Request) -> None:
        """Ignore the cookies of a response."""


def create_async_client(
    *,
    timeout: httpx.Timeout | float,
    transport: httpx.AsyncBaseTransport | None = None,
    base_url: httpx.URL | str = "",
    headers: Mapping[str, str] | None = None,
) -> httpx.AsyncClient:
    """Create an asynchronous client.

    Args:
        timeout: seconds for connecting and for each read and write; httpx does not limit the total time.
        transport: sends the requests; None for the network.
        base_url: base of relative URLs.
        headers: sent with each request.
    """
    return httpx.AsyncClient(
        cookies=_NoCookies(),
        follow_redirects=False,
        trust_env=False,
        timeout=timeout,
        transport=transport or create_transport(),
        base_url=base_url,
        headers=headers,
    )


def create_client(
    *,
    timeout: httpx.Timeout | float,
    transport: httpx.BaseTransport | None = None,
    base_url: httpx.URL | str = "",
) -> httpx.Client:
    """Create a blocking client; the arguments are those of `create_async_client`."""
    return httpx.Client(
        cookies=_NoCookies(),
        follow_redirects=False,
        trust_env=False,
        timeout=timeout,
        transport=transport,
        base_url=base_url,
        limits=httpx.Limits(max_connections=None),
    )
