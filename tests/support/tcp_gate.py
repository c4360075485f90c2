"""A port in front of a node's: a test can shut it for real, or let it take connections and never answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Self
from urllib.parse import urlsplit

CHUNK = 1 << 16


class Door:
    """Passes connections on to another port of this machine, until it is shut. An async context manager.

    Attributes:
        url: where it listens; the same for its whole life.
        silent: whether connections are taken, read, and never answered.
        heard: the bytes that came over each connection while it was silent.
        held: for how many seconds each of them lasted.
    """

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._behind = (address.hostname or "", address.port or 0)
        self._server: asyncio.Server | None = None
        # Bound and not listening: the port refuses connections, and nobody else can have it.
        self._kept = _bound(0)
        self._port: int = self._kept.getsockname()[1]
        self._open: set[asyncio.Task[None]] = set()
        self.url = f"http://127.0.0.1:{self._port}"
        self.silent = False
        self.heard: list[bytearray] = []
        self.held: list[float] = []

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shut()
        self._kept.close()

    async def open(self) -> None:
        """Let connections through."""
        self._kept.close()
        self._server = await asyncio.start_server(self._serve, sock=_bound(self._port))

    async def shut(self) -> None:
        """Refuse connections, and cut those that are open."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self._kept = _bound(self._port)
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._listen(reader) if self.silent else self._pass_on(reader, writer))
        self._open.add(task)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        heard, began = bytearray(), time.monotonic()
        self.heard.append(heard)
        with contextlib.suppress(OSError):
            while piece := await reader.read(CHUNK):
                heard += piece
        self.held.append(time.monotonic() - began)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(*self._behind)
            pumps = [asyncio.ensure_future(_pump(reader, back)), asyncio.ensure_future(_pump(there, writer))]
            try:
                # a side that breaks off, and does not only end, breaks off the other
                await asyncio.gather(*pumps)
            finally:
                for pump in pumps:
                    pump.cancel()
                back.transport.abort()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while piece := await source.read(CHUNK):
        target.write(piece)
        await target.drain()
    target.write_eof()


def _bound(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    return made


@contextlib.asynccontextmanager
async def doors(*urls: str) -> AsyncIterator[list[Door]]:
    """A door in front of each of these."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Door(url)) for url in urls]
