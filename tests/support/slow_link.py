"""TCP proxy that behaves like a slow link: limited bandwidth and a delay in each direction."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final
from urllib.parse import urlsplit

from tests.support.servers import serve_connections

_PIECE_BYTES: Final = 1460
"""Bytes that are forwarded together, as in a TCP segment. Connections share a link piece by piece."""
_MAX_PIECES: Final = 1024
"""Maximum number of pieces of a connection that are on the link in one direction."""


class _Direction:
    """One direction of a link, shared by all of its connections.

    Args:
        delay: seconds from the departure of a byte until its arrival.
    """

    def __init__(self, bytes_per_second: float, delay: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._delay = delay
        self._free_at = 0.0

    async def carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Forward one connection until its source ends."""
        on_link: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_PIECES)
        await _run_both(self._send(source, on_link), _deliver(on_link, target))

    async def _send(self, source: asyncio.StreamReader, on_link: asyncio.Queue[tuple[float, bytes]]) -> None:
        """Put the data of a connection on the link; nothing for its end."""
        loop = asyncio.get_running_loop()
        while True:
            piece = await source.read(_PIECE_BYTES)
            self._free_at = max(loop.time(), self._free_at) + len(piece) / self._bytes_per_second
            sent_at = self._free_at
            await on_link.put((sent_at + self._delay, piece))
            if not piece:
                return
            await asyncio.sleep(sent_at - loop.time())


async def _deliver(on_link: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    while True:
        arrives_at, piece = await on_link.get()
        await asyncio.sleep(arrives_at - loop.time())
        if not piece:
            target.write_eof()
            return
        target.write(piece)
        await target.drain()


async def _run_both(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run two coroutines; an error of one ends the other."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def run_slow_link(url: str, *, bytes_per_second: float, delay: float) -> AsyncIterator[str]:
    """Forward connections to another local port like a slow link; yields the link's URL.

    A request takes at least twice the delay. The opening of a connection takes no time, because the kernel accepts it.

    Args:
        bytes_per_second: bandwidth of each direction, for all connections together.
    """
    address, up, down = urlsplit(url), _Direction(bytes_per_second, delay), _Direction(bytes_per_second, delay)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                # An abort of one side, unlike a normal end, must abort the other side.
                await _run_both(up.carry(reader, far_writer), down.carry(far_reader, writer))
            finally:
                far_writer.transport.abort()

    async with serve_connections(forward) as port:
        yield f"http://127.0.0.1:{port}"
