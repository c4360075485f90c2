"""Concurrent clients of the event stream, and their cost to the service."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

ADDRESS_COUNT = 4
"""Local addresses of the clients: each client address may hold a quarter of all connections."""


class EventClient(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self.received_bytes = 0
        self.state_events = 0
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        self.state_events += data.count(b"event: state")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True

    def close(self) -> None:
        self._transport.close()


@contextlib.asynccontextmanager
async def open_event_clients(url: str, token: str, count: int) -> AsyncIterator[list[EventClient]]:
    """Open this many clients. Yields once every client has received a state."""
    address = urlsplit(url)
    host, port = address.hostname, address.port
    assert host is not None
    assert port is not None
    request = (
        f"GET /shielded-vote/v1/events HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {token}\r\n\r\n"
    ).encode()
    loop = asyncio.get_running_loop()
    listeners: list[EventClient] = []
    for index in range(count):
        _, listener = await loop.create_connection(
            lambda: EventClient(request), host, port, local_addr=(f"127.0.0.{2 + index % ADDRESS_COUNT}", 0)
        )
        listeners.append(listener)
    try:
        async with asyncio.timeout(60):
            while any(not listener.state_events for listener in listeners):
                await asyncio.sleep(0.05)
        yield listeners
    finally:
        for listener in listeners:
            listener.close()


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a running process without its children.

    Reads the process's CPU clock (clock_getcpuclockid(3)), which has nanosecond resolution.
    """
    return time.clock_gettime(~pid << 3 | 2)
