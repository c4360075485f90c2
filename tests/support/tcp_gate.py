"""TCP proxy in front of a node that can refuse connections, or accept them without a response."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Self
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 16


class TcpGate:
    """Forwards connections to another local port until it is closed. An async context manager.

    Attributes:
        url: listening address; constant over its lifetime.
        is_silent: whether connections are accepted and read, but never get a response.
    """

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._target = (address.hostname or "", address.port or 0)
        self._server: asyncio.Server | None = None
        # Bound but not listening: the port refuses connections, and no other process can take it.
        self._reserved = _bind_socket(0)
        self._port: int = self._reserved.getsockname()[1]
        self._connections: set[asyncio.Task[None]] = set()
        self.url = f"http://127.0.0.1:{self._port}"
        self.is_silent = False

    async def __aenter__(self) -> Self:
        await self.open_port()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_port()
        self._reserved.close()

    async def open_port(self) -> None:
        """Accept connections."""
        self._reserved.close()
        self._server = await asyncio.start_server(self._serve, sock=_bind_socket(self._port))

    async def close_port(self) -> None:
        """Refuse connections, and abort open ones."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self._reserved = _bind_socket(self._port)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._read_silently(reader) if self.is_silent else self._forward(reader, writer))
        self._connections.add(task)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _read_silently(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(CHUNK_BYTES):
                pass

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            node_reader, node_writer = await asyncio.open_connection(*self._target)
            pumps = [
                asyncio.ensure_future(self._pump(reader, node_writer, is_request=True)),
                asyncio.ensure_future(self._pump(node_reader, writer, is_request=False)),
            ]
            try:
                # An abort of one side, unlike a normal end, must abort the other side.
                await asyncio.gather(*pumps)
            finally:
                for pump in pumps:
                    pump.cancel()
                node_writer.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_request: bool) -> None:
        while chunk := await source.read(CHUNK_BYTES):
            target.write(chunk)
            await target.drain()
        target.write_eof()


def _bind_socket(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    return listener


@contextlib.asynccontextmanager
async def open_gates(*urls: str) -> AsyncIterator[list[TcpGate]]:
    """Open a gate in front of each of these ports."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(TcpGate(url)) for url in urls]
