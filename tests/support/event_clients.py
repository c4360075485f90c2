"""Many that follow the queue's events at once, and what they cost the service."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

ADDRESSES = 4
"""Addresses of this machine that they listen from: one client may hold a quarter of all connections."""


class Listener(asyncio.Protocol):
    """Asks once, and counts what comes."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.size = 0
        self.states = 0
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.size += len(data)
        self.states += data.count(b"event: state")

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True

    def close(self) -> None:
        self._transport.close()


@contextlib.asynccontextmanager
async def listening(url: str, token: str, number: int) -> AsyncIterator[list[Listener]]:
    """So many that listen, from when the last has had a state."""
    place = urlsplit(url)
    host, port = place.hostname, place.port
    assert host is not None
    assert port is not None
    request = (
        f"GET /shielded-vote/v1/events HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {token}\r\n\r\n"
    ).encode()
    loop = asyncio.get_running_loop()
    listeners: list[Listener] = []
    for index in range(number):
        _, listener = await loop.create_connection(
            lambda: Listener(request), host, port, local_addr=(f"127.0.0.{2 + index % ADDRESSES}", 0)
        )
        listeners.append(listener)
    try:
        async with asyncio.timeout(60):
            while any(not listener.states for listener in listeners):
                await asyncio.sleep(0.05)
        yield listeners
    finally:
        for listener in listeners:
            listener.close()


def cpu_seconds(pid: int) -> float:
    """What a living process has used, its children aside: its CPU clock (clock_getcpuclockid(3)), to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)
