"""The way between hosts and their database: a test cuts it in the middle of a word, or has what hosts say to each
other lost on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

CHUNK_BYTES: Final = 1 << 16
MESSAGE_HEADER: Final = struct.Struct("!cI")
"""Of whatever a server says: what it is, and its length without that one byte."""
NOTIFICATION: Final = b"A"
"""A word of another host (LISTEN, NOTIFY)."""


class _ConnectionCutError(Exception):
    """The way ends here."""


class _ProxiedConnection:
    """One connection; `left` is how many bytes it still takes, None for all."""

    def __init__(self) -> None:
        self.bytes_left: int | None = None

    def forward(self, data: bytes, target: asyncio.StreamWriter) -> None:
        """Pass on as much as goes."""
        if self.bytes_left is None:
            target.write(data)
            return
        target.write(data[: self.bytes_left])
        self.bytes_left -= len(data)
        if self.bytes_left <= 0:
            raise _ConnectionCutError


class DatabaseProxy:
    """A port of this machine that leads to a server's socket. Nothing is encrypted on it.

    Args:
        server: the server's socket.

    Attributes:
        drops_notifications: whether words of other hosts are lost.
        dropped_notifications: how many were.
    """

    def __init__(self, server: Path) -> None:
        self._server = server
        self._connections: set[_ProxiedConnection] = set()
        self.port = 0
        self.drops_notifications = False
        self.dropped_notifications = 0

    def cut_connections(self, after_bytes: int) -> None:
        """Cut all connections that there are, each when so many bytes more have gone either way."""
        for road in self._connections:
            road.bytes_left = after_bytes

    @property
    def open_cut_connections(self) -> int:
        """How many of them there still are."""
        return sum(road.bytes_left is not None for road in self._connections)

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[None]:
        """Listen."""
        listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = listening.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            listening.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _ProxiedConnection()
        self._connections.add(connection)
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(str(self._server))
            pumps = [asyncio.ensure_future(self._forward_to_server(connection, reader, server_writer))]
            pumps.append(asyncio.ensure_future(self._forward_to_client(connection, server_reader, writer)))
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)  # half a connection is none
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                server_writer.transport.abort()
        except OSError:
            pass  # no server is there
        finally:
            self._connections.discard(connection)
            writer.transport.abort()

    async def _forward_to_server(
        self, connection: _ProxiedConnection, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        while piece := await source.read(CHUNK_BYTES):
            connection.forward(piece, target)
            await target.drain()

    async def _forward_to_client(
        self, connection: _ProxiedConnection, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        while True:
            header = await source.readexactly(MESSAGE_HEADER.size)
            kind, length = MESSAGE_HEADER.unpack(header)
            body = await source.readexactly(length - 4)
            if kind == NOTIFICATION and self.drops_notifications:
                self.dropped_notifications += 1
                continue
            connection.forward(header + body, target)
            await target.drain()
