"""TCP proxy that behaves like a slow link: limited bandwidth and a delay in each direction."""

from __future__ import annotations

import asyncio
from typing import Final

from tests.support.tcp_gate import TcpGate

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
        tasks = [
            asyncio.ensure_future(self._send(source, on_link)),
            asyncio.ensure_future(_deliver(on_link, target)),
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

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


class SlowLink(TcpGate):
    """Forwards connections to another local port like a slow link. An async context manager.

    A request takes at least twice the delay. The opening of a connection takes no time, because the kernel accepts it.

    Args:
        bytes_per_second: bandwidth of each direction, for all connections together.
    """

    def __init__(self, url: str, *, bytes_per_second: float, delay: float) -> None:
        super().__init__(url)
        self._up = _Direction(bytes_per_second, delay)
        self._down = _Direction(bytes_per_second, delay)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_request: bool) -> None:
        await (self._up if is_request else self._down).carry(source, target)
