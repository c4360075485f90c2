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

CHUNK: Final = 1 << 16
HEADER: Final = struct.Struct("!cI")
"""Of whatever a server says: what it is, and its length without that one byte."""
NOTICE: Final = b"A"
"""A word of another host (LISTEN, NOTIFY)."""


class _Cut(Exception):
    """The way ends here."""


class _Road:
    """One connection; `left` is how many bytes it still takes, None for all."""

    def __init__(self) -> None:
        self.left: int | None = None

    def pass_on(self, piece: bytes, target: asyncio.StreamWriter) -> None:
        """Pass on as much as goes."""
        if self.left is None:
            target.write(piece)
            return
        target.write(piece[: self.left])
        self.left -= len(piece)
        if self.left <= 0:
            raise _Cut


class Way:
    """A port of this machine that leads to a server's socket. Nothing is encrypted on it.

    Args:
        server: the server's socket.

    Attributes:
        deaf: whether words of other hosts are lost.
        lost: how many were.
    """

    def __init__(self, server: Path) -> None:
        self._server = server
        self._roads: set[_Road] = set()
        self.port = 0
        self.deaf = False
        self.lost = 0

    def cut(self, after: int) -> None:
        """Cut all connections that there are, each when so many bytes more have gone either way."""
        for road in self._roads:
            road.left = after

    @property
    def cutting(self) -> int:
        """How many of them there still are."""
        return sum(road.left is not None for road in self._roads)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Listen."""
        listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = listening.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            listening.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        road = _Road()
        self._roads.add(road)
        try:
            there, back = await asyncio.open_unix_connection(str(self._server))
            pumps = [asyncio.ensure_future(self._up(road, reader, back))]
            pumps.append(asyncio.ensure_future(self._down(road, there, writer)))
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)  # half a connection is none
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                back.transport.abort()
        except OSError:
            pass  # no server is there
        finally:
            self._roads.discard(road)
            writer.transport.abort()

    async def _up(self, road: _Road, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while piece := await source.read(CHUNK):
            road.pass_on(piece, target)
            await target.drain()

    async def _down(self, road: _Road, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while True:
            header = await source.readexactly(HEADER.size)
            kind, length = HEADER.unpack(header)
            body = await source.readexactly(length - 4)
            if kind == NOTICE and self.deaf:
                self.lost += 1
                continue
            road.pass_on(header + body, target)
            await target.drain()
