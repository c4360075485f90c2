"""Floods over many connections: `python -m tests.campaign.connection_floods KIND PORT SECONDS`.

Prints the number of bytes sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from tests.campaign.attack_clients import CONNECTION_ERRORS, HOST, SHARES_PATH

ATTACKER_ADDRESS = "127.0.0.5"
LIVEZ_REQUEST = b"GET /livez HTTP/1.1\r\nHost: helper\r\n\r\n"
POST_HEAD = f"POST {SHARES_PATH} HTTP/1.1\r\nHost: helper\r\n".encode()
BODY_BYTES = 1 << 20
PIPELINING_CONNECTIONS = 250
POSTING_CONNECTIONS = 4


async def send_bodies(request: bytes, port: int, seconds: float) -> int:
    """Send a request repeatedly over a few connections, each reopened after every request."""
    end = time.monotonic() + seconds

    async def send_repeatedly() -> int:
        sent = 0
        while time.monotonic() < end:
            reader, writer = await asyncio.open_connection(HOST, port, local_addr=(ATTACKER_ADDRESS, 0))
            reading = asyncio.create_task(_discard(reader))
            with contextlib.suppress(*CONNECTION_ERRORS):
                for start in range(0, len(request), 1 << 16):
                    if reading.done() or time.monotonic() > end:
                        break
                    piece = request[start : start + (1 << 16)]
                    writer.write(piece)
                    await writer.drain()
                    sent += len(piece)
            await _end(reading)
            writer.transport.abort()
        return sent

    return sum(await asyncio.gather(*(send_repeatedly() for _ in range(POSTING_CONNECTIONS))))


async def pipeline_reads(port: int, seconds: float) -> int:
    """Send endless requests on many connections that read their responses."""
    attacks = (send_endlessly(port, 1 << 40, seconds, reads_responses=True) for _ in range(PIPELINING_CONNECTIONS))
    return sum(await asyncio.gather(*attacks))


async def send_endlessly(
    port: int, max_bytes: int, seconds: float, *, reads_responses: bool, request: bytes = LIVEZ_REQUEST
) -> int:
    """Send requests until a byte limit, a timeout or a closed connection; return the bytes sent."""
    reader, writer = await asyncio.open_connection(HOST, port, local_addr=(ATTACKER_ADDRESS, 0))
    if not reads_responses:
        writer.transport.pause_reading()  # type: ignore[attr-defined] # typed as write-only, but can read
    reading = asyncio.create_task(_discard(reader))
    sent = 0
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(seconds):
            while sent < max_bytes:
                writer.write(request * 1000)
                await writer.drain()
                await asyncio.sleep(0)  # `drain` alone does not let other tasks run while the server reads quickly
                sent += len(request) * 1000
    await _end(reading)
    writer.transport.abort()
    return sent


async def _discard(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 20):
        pass


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


FLOODS: dict[str, Callable[[int, float], Coroutine[Any, Any, int]]] = {
    # Each line feed could end a request head.
    "line feeds": partial(send_bodies, POST_HEAD + b"Content-Length: %d\r\n\r\n" % BODY_BYTES + b"\n" * BODY_BYTES),
    "tiny chunks": partial(
        send_bodies, POST_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n[\r\n" * 100_000 + b"0\r\n\r\n"
    ),
    # The path does not accept the method, so the body is not used.
    "discarded bodies": partial(
        send_bodies,
        b"PUT /livez HTTP/1.1\r\nHost: helper\r\nContent-Length: %d\r\n\r\n" % (64 << 20) + b"x" * (64 << 20),
    ),
    "pipelined reads": pipeline_reads,
}
"""Floods by name. Each takes the port and the duration in seconds, and returns the number of bytes sent."""


if __name__ == "__main__":
    kind, port, seconds = sys.argv[1:]
    print(asyncio.run(FLOODS[kind](int(port), float(seconds))))
