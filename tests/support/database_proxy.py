"""TCP proxy in front of a database server that cuts connections mid-message or drops notifications."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from tests.support.servers import serve_connections

CHUNK_BYTES: Final = 1 << 16
MESSAGE_HEADER: Final = struct.Struct("!cI")
"""Header of each server message: type, and length without the type byte."""
NOTIFICATION: Final = b"A"
"""Type of a notification from another host (LISTEN, NOTIFY)."""
KEY_DATA: Final = b"K"
"""Type of the message with the process id of the session and the key that cancels its queries."""


class _ConnectionCutError(Exception):
    """The byte limit of the connection is exhausted."""


class _ProxiedConnection:
    """One connection. `bytes_left` is the number of bytes that it still forwards; None for no limit."""

    def __init__(self) -> None:
        self.bytes_left: int | None = None

    def forward(self, data: bytes, target: asyncio.StreamWriter) -> None:
        if self.bytes_left is None:
            target.write(data)
            return
        target.write(data[: self.bytes_left])
        self.bytes_left -= len(data)
        if self.bytes_left <= 0:
            raise _ConnectionCutError


class DatabaseProxy:
    """A local port that forwards to a server's socket, without encryption.

    Attributes:
        reports_own_id: whether clients get another process id than that of the server, as from a pooler.
    """

    def __init__(self, server: Path) -> None:
        self._server = server
        self._connections: set[_ProxiedConnection] = set()
        self.port = 0
        self.drops_notifications = False
        self.dropped_notifications = 0
        self.reports_own_id = False

    def cut_connections(self, after_bytes: int) -> None:
        """Cut each open connection after this many more bytes in either direction."""
        for connection in self._connections:
            connection.bytes_left = after_bytes

    @property
    def open_cut_connections(self) -> int:
        """The number of limited connections that are still open."""
        return sum(connection.bytes_left is not None for connection in self._connections)

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[None]:
        """Listen on a free port until the end of the block."""
        async with serve_connections(self._serve) as self.port:
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _ProxiedConnection()
        self._connections.add(connection)
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(str(self._server))
            pumps = [asyncio.ensure_future(self._forward_to_server(connection, reader, server_writer))]
            pumps.append(asyncio.ensure_future(self._forward_to_client(connection, server_reader, writer)))
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)  # close both directions if one ends
            finally:
                server_writer.transport.abort()  # first: this task may be cancelled while it waits
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # the server does not run
        finally:
            self._connections.discard(connection)
            writer.transport.abort()

    async def _forward_to_server(
        self, connection: _ProxiedConnection, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        while chunk := await source.read(CHUNK_BYTES):
            connection.forward(chunk, target)
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
            if kind == KEY_DATA and self.reports_own_id:
                body = bytes(4) + body[4:]
            connection.forward(header + body, target)
            await target.drain()
