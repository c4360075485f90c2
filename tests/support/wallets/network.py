"""Connections of a wallet to servers in this process, without sockets, so that time may be virtual."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping

import httpx

from helper.server.listening import Server
from helper.server.protocol import Connection
from tests.unit.server.server_fixtures import FakeTransport

Script = Callable[[httpx.Request], Awaitable[httpx.Response]]
"""Answers the requests to a server that is not of this service."""


class WalletNetwork(httpx.AsyncBaseTransport):
    """The connections of one wallet: HTTP/1.1, as behind a proxy without HTTP/2.

    Args:
        servers: by host; one that is missing or stops refuses connections.
        keeps_connections: whether a connection is used again.
        connections: maximum connections to a host at once; None for no limit.
        connect_seconds: for name look-up, TCP and TLS.
        bytes_per_second: rate at which bodies are sent; None for all at once.

    Attributes:
        opened: number of connections that were opened, by host.
        exchanges: the responses, with the seconds from the end of their requests.
    """

    def __init__(
        self,
        servers: Mapping[str, Server | Script],
        *,
        keeps_connections: bool = True,
        connections: int | None = None,
        connect_seconds: float = 0.0,
        bytes_per_second: float | None = None,
    ) -> None:
        self.servers = servers
        self.opened: dict[str, int] = defaultdict(int)
        self.exchanges: list[tuple[httpx.Response, float]] = []
        self._keeps_connections = keeps_connections
        self._slots = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(connections or 1 << 20))
        self._idle = defaultdict[str, list[_Wire]](list)
        self._connect_seconds = connect_seconds
        self._bytes_per_second = bytes_per_second

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host, content = request.url.host, await request.aread()
        async with self._slots[host]:
            wire = self._find_idle(host)
            if wire is None:
                await asyncio.sleep(self._connect_seconds)
                server = self.servers.get(host)
                if server is None or (isinstance(server, Server) and server.is_stopping):
                    raise httpx.ConnectError("refused", request=request)
                if not isinstance(server, Server):
                    await _trace_sending(request)
                    return await server(request)
                self.opened[host] += 1
                wire = _Wire(server.create_connection())
            try:
                await _trace_sending(request)
                wire.deliver(_encode_head(request))
                await wire.send_slowly(content, self._bytes_per_second)
                sent_at = asyncio.get_running_loop().time()
                async with asyncio.timeout(request.extensions["timeout"]["read"]):
                    response = await wire.read_response()
                response.request = request
                self.exchanges.append((response, asyncio.get_running_loop().time() - sent_at))
            except TimeoutError as error:
                wire.leave()
                raise httpx.ReadTimeout("silence", request=request) from error
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise httpx.ReadError("reset", request=request) from error
            except asyncio.CancelledError:
                wire.leave()
                raise
            if self._keeps_connections:
                self._idle[host].append(wire)
            else:
                wire.leave()
            return response

    async def aclose(self) -> None:
        for wire in (wire for idle in self._idle.values() for wire in idle):
            wire.leave()

    def _find_idle(self, host: str) -> _Wire | None:
        idle = self._idle[host]
        while idle:
            if not (wire := idle.pop()).is_closed:
                return wire
        return None


class _Wire(FakeTransport):
    """A connection of the service, and its client's end."""

    def __init__(self, connection: Connection) -> None:
        self._responses = asyncio.StreamReader()
        self._undelivered = b""
        self._has_left = self._has_response = False
        super().__init__(connection)

    # ------------------------------------------------------------------ for the service

    def resume_reading(self) -> None:
        super().resume_reading()
        asyncio.get_running_loop().call_soon(self.deliver, b"")

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._has_left:
            self.abort()
        elif not self.is_closed:
            self._has_response = True
            self._responses.feed_data(bytes(data))

    def write_eof(self) -> None:
        super().write_eof()
        self._responses.feed_eof()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._responses.feed_eof()
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)

    abort = close

    # ------------------------------------------------------------------ for the client

    def deliver(self, data: bytes) -> int:
        self._undelivered += data
        delivered = super().deliver(self._undelivered)
        self._undelivered = self._undelivered[delivered:]
        return delivered

    async def send_slowly(self, content: bytes, bytes_per_second: float | None) -> None:
        """Send a body, second by second until a response arrives."""
        if bytes_per_second is None:
            self.deliver(content)
            return
        size = math.ceil(bytes_per_second)
        for at in range(0, len(content), size):
            if self.is_closed or self._has_response:
                return
            await asyncio.sleep(size / bytes_per_second)
            self.deliver(content[at : at + size])

    async def read_response(self) -> httpx.Response:
        """Read a response with a length."""
        head = await self._responses.readuntil(b"\r\n\r\n")
        self._has_response = False
        status_line, *lines = head[:-4].split(b"\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        response = httpx.Response(int(status_line.split()[1]), headers=headers)
        body = await self._responses.readexactly(int(response.headers.get("content-length", "0")))
        return httpx.Response(response.status_code, headers=headers, content=body)

    def leave(self) -> None:
        """Close the client's end."""
        self._has_left = True
        if not self.is_closed and not self._connection.eof_received():
            self.close()


async def _trace_sending(request: httpx.Request) -> None:
    await request.extensions["trace"]("http11.send_request_headers.started", {})


def _encode_head(request: httpx.Request) -> bytes:
    lines = [b"%b: %b" % header for header in request.headers.raw]
    return b"\r\n".join([b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path), *lines, b"", b""])
