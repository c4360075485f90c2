"""HTTP clients without cookies, redirects or proxies, and SOCKS5 streams for Tor.

Cookies would let a server fill the memory of a long-lived client and link unrelated requests. All HTTP clients of the
helper are created here; a test enforces this.

A request that is cancelled while it waits in the connection pool of httpcore can lose a connection of the pool
permanently (encode/httpcore#1093), and one that is cancelled later can leave its connection open. `LimitedTransport`
therefore limits the requests before httpcore, and gives each connection a pool of its own.

A server may be hostile. httpcore reads interim responses (1xx) without limit, so `_LimitedNetworkStream` limits what
precedes the body of a response. The patterns of h11 for header lines and chunk headers take time that is quadratic in
the number of blanks, 26 s for 95 kB, so they are replaced by linear ones.

Of SOCKS5 there is only `CONNECT` without authentication (RFC 1928): Tor resolves the host name. The proxy may listen on
a unix socket, which HTTP clients do not support.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import cache, partial
from http.cookiejar import CookieJar
from typing import Any, Final, cast
from urllib.request import Request

import anyio
import h11._readers
import httpcore
import httpx

DEFAULT_CONNECTIONS: Final = 100
"""Default maximum number of concurrent requests of an asynchronous client."""
_IDLE_SECONDS: Final = 30.0
MAX_HEAD_BYTES: Final = 32 << 10
"""Maximum number of bytes that are read until the head of a response is complete, interim responses included."""
_READ_BYTES: Final = 16 << 10
"""Maximum number of bytes of a read. What a server sends in advance, httpcore parses at once."""

# They match what those of h11 match, except a chunk extension that contains a carriage return.
h11._readers.header_field_re = re.compile(
    rb"(?P<field_name>[-!#$%&'*+.^_`|~0-9a-zA-Z]+):[ \t]*+"
    rb"(?P<field_value>(?:[^\x00\s]++(?:[ \t]++[^\x00\s]++)*+)?+)[ \t]*+"
)
h11._readers.chunk_header_re = re.compile(rb"(?P<chunk_size>[0-9A-Fa-f]{1,20})(?P<chunk_ext>;[^\r\n]*+)?+[ \t]*+\r\n")


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
        if isinstance(stream := response.extensions.get("network_stream"), _LimitedNetworkStream):
            stream.head_bytes_left = None
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


class _LimitedNetworkStream(httpcore.AsyncNetworkStream):
    """A connection that limits what precedes the body of each response.

    Attributes:
        head_bytes_left: number of bytes that may still be read of the head of a response, None outside of one.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self.head_bytes_left: int | None = None

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read data. Raises `httpcore.RemoteProtocolError` if the head of a response is too long."""
        if self.head_bytes_left is None:
            return await self._stream.read(min(max_bytes, _READ_BYTES), timeout)
        if self.head_bytes_left <= 0:
            raise httpcore.RemoteProtocolError(f"the response's head is longer than {MAX_HEAD_BYTES} bytes")
        data = await self._stream.read(min(max_bytes, _READ_BYTES, self.head_bytes_left), timeout)
        self.head_bytes_left -= len(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write data of a request. The head of a response follows."""
        self.head_bytes_left = MAX_HEAD_BYTES
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _LimitedNetworkStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _LimitedBackend(httpcore.AnyIOBackend):
    """Opens connections that limit what precedes the body of each response."""

    async def connect_tcp(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        return _LimitedNetworkStream(await super().connect_tcp(*args, **options))


def create_transport(
    connections: int = DEFAULT_CONNECTIONS, *, max_idle: int = 20, socket_options: Iterable[Any] = ()
) -> LimitedTransport:
    """Create a transport for the network.

    Args:
        connections: maximum number of concurrent requests, and so of connections.
        socket_options: as for `socket.setsockopt`.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_idle, keepalive_expiry=_IDLE_SECONDS)
    options = list(socket_options)

    def create() -> httpx.AsyncBaseTransport:
        transport = httpx.AsyncHTTPTransport(
            verify=_get_ssl_context(), limits=limits, trust_env=False, socket_options=options
        )
        cast(Any, transport)._pool._network_backend = _LimitedBackend()  # httpx has no parameter for it
        return transport

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


_VERSION: Final = 5
_NO_AUTHENTICATION: Final = 0
_CONNECT: Final = 1
_ADDRESS_BYTES: Final = {1: 4, 4: 16}
"""Length of an address by its type; a host name (3) is preceded by its length."""
_HOST_NAME: Final = 3
REPLIES: Final = {
    1: "general failure",
    2: "connection not allowed",
    3: "network unreachable",
    4: "host unreachable",
    5: "connection refused",
    6: "TTL expired",
    0xF0: "the descriptor is not published",
    0xF1: "the descriptor is invalid",
    0xF2: "the introduction failed",
    0xF3: "the rendezvous failed",
    0xF4: "client authorization is required",
    0xF5: "client authorization is wrong",
    0xF6: "the onion address is invalid",
    0xF7: "the introduction timed out",
}
"""Failures by reply code. Tor sends codes from 0xF0 only on a port with `ExtendedErrors` (proposal 304)."""


class SocksError(Exception):
    """The proxy refuses the request, or is not a SOCKS5 proxy."""


async def open_socks_stream(proxy: str, host: str, port: int) -> tuple[StreamReader, StreamWriter]:
    """Open a stream through a proxy.

    Args:
        proxy: address of the proxy: `unix:PATH` or `HOST:PORT`.
        host: host name of at most 255 bytes.

    Raises:
        OSError: the proxy cannot be reached.
        SocksError: the proxy cannot connect to the host.
    """
    if proxy.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(proxy.removeprefix("unix:"))
    else:
        proxy_host, _, proxy_port = proxy.rpartition(":")
        reader, writer = await asyncio.open_connection(proxy_host.strip("[]"), int(proxy_port))
    try:
        name = host.encode()
        writer.write(bytes([_VERSION, 1, _NO_AUTHENTICATION]))
        if await reader.readexactly(2) != bytes([_VERSION, _NO_AUTHENTICATION]):
            raise SocksError("not a SOCKS5 proxy without authentication")
        writer.write(bytes([_VERSION, _CONNECT, 0, _HOST_NAME, len(name)]) + name + port.to_bytes(2, "big"))
        _, code, _, address_type = await reader.readexactly(4)
        if code:
            raise SocksError(REPLIES.get(code, f"SOCKS error {code}"))
        length = _ADDRESS_BYTES.get(address_type) or (await reader.readexactly(1))[0]
        await reader.readexactly(length + 2)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
        raise SocksError("the proxy closed the connection") from None
    except BaseException:
        writer.close()
        raise
    return reader, writer
