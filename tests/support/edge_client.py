"""An HTTP client whose connections are served by an edge, over socket pairs instead of a listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from helper.server.edge import Edge
from helper.server.listening import Server


def create_edge_client(edge: Edge, **options: Any) -> httpx.AsyncClient:
    """Create a client. Each of its connections is one of the server's, with the peer of a unix socket."""
    transport = httpx.AsyncHTTPTransport(verify=False)  # the certificate authorities take 25 ms to load
    transport._pool = _Pool(Server(edge))
    return httpx.AsyncClient(transport=transport, base_url="http://helper", timeout=30, **options)


async def request_and_wait(edge: Edge, head: bytes, body: bytes) -> httpx.Response:
    """Send a head and a part of a body, and wait for the response until the connection ends."""
    stream = await _SocketPairs(Server(edge)).connect_tcp("helper", 80)
    await stream.write(head + body)
    received = b""
    while data := await stream.read(1 << 16):
        received += data
    await stream.aclose()
    status_line, *lines = received.partition(b"\r\n\r\n")[0].split(b"\r\n")
    headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    return httpx.Response(int(status_line.split()[1]), headers=headers, content=received.partition(b"\r\n\r\n")[2])


class _Pool(httpcore.AsyncConnectionPool):
    """Connections to a server; closing them ends only after the handlers, which may have files to close."""

    def __init__(self, server: Server) -> None:
        super().__init__(network_backend=_SocketPairs(server))
        self._server = server

    async def aclose(self) -> None:
        await super().aclose()
        await self._server.wait_ended()


class _SocketPairs(httpcore.AsyncNetworkBackend):
    def __init__(self, server: Server) -> None:
        self._server = server

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        ours, theirs = socket.socketpair()
        await asyncio.get_running_loop().connect_accepted_socket(self._server.create_connection, theirs)
        return _Stream(*await asyncio.open_connection(sock=ours))


class _Stream(httpcore.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return await asyncio.wait_for(self._reader.read(max_bytes), timeout)
        except ConnectionError as error:
            raise httpcore.ReadError from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._writer.write(buffer)
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise httpcore.WriteError from error

    async def aclose(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise NotImplementedError

    def get_extra_info(self, info: str) -> Any:
        return None
