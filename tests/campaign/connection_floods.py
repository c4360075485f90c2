"""Floods over many connections: `python -m tests.campaign.connection_floods KIND PORT SECONDS < SHARE`.

`SHARE` is a well-formed share whose leaf is in no tree. Prints the number of bytes sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from statistics import median
from typing import Any

from tests.campaign.attack_clients import (
    CONNECTION_ERRORS,
    HOST,
    SHARES_PATH,
    UNTERMINATED_REQUEST,
    RawRequest,
    ReusedConnection,
    flood,
    open_narrow_connection,
)

ATTACKER_ADDRESS = "127.0.0.5"
LIVEZ_REQUEST = b"GET /livez HTTP/1.1\r\nHost: helper\r\n\r\n"
POST_HEAD = f"POST {SHARES_PATH} HTTP/1.1\r\nHost: helper\r\n".encode()
BODY_BYTES = 1 << 20
DOCUMENT_REQUEST = b"GET /openapi.json HTTP/1.1\r\nHost: helper\r\n\r\n"
EXPECT_REQUESTS = [
    b"POST %b HTTP/1.1\r\nHost: helper\r\nExpect: x, 100-continue\r\nContent-Length: 4000\r\n\r\n" % path
    for path in (b"/livez", SHARES_PATH.encode()) * 2
]
POSTING_CONNECTIONS = 4
BURST_CONNECTIONS = 32
MIN_WAIT_SECONDS = 3.0
"""Seconds for which a share at least waits for its leaf."""


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


async def send_unterminated(port: int, seconds: float) -> int:
    """Send bodies whose error was slow to locate as fast as they are refused."""
    end = time.monotonic() + seconds
    requests = itertools.takewhile(lambda _: time.monotonic() < end, itertools.repeat(UNTERMINATED_REQUEST))
    return (await flood(port, ATTACKER_ADDRESS, BURST_CONNECTIONS, requests))[400] * len(UNTERMINATED_REQUEST.body)


async def expect_continue(port: int, seconds: float) -> int:
    """Send 500 requests per second whose `Expect` is a list, each over a new connection; omit their bodies."""
    end, sent = time.monotonic() + seconds, 0

    async def send(request: bytes) -> None:
        with contextlib.suppress(*CONNECTION_ERRORS):
            reader, writer = await asyncio.open_connection(HOST, port, local_addr=(ATTACKER_ADDRESS, 0))
            writer.write(request)
            await reader.read(1 << 12)
            writer.transport.abort()

    async with asyncio.TaskGroup() as group:
        while time.monotonic() < end:
            for request in EXPECT_REQUESTS:
                group.create_task(send(request))
                sent += len(request)
            await asyncio.sleep(len(EXPECT_REQUESTS) / 500)
    return sent


async def hold_unread(port: int, seconds: float) -> int:
    """Request one document over each of 1,500 connections, and read nothing."""
    writers = []
    for _ in range(1_500):
        _, writer = await open_narrow_connection(port, ATTACKER_ADDRESS)
        writers.append(writer)
        writer.transport.pause_reading()  # type: ignore[attr-defined] # typed as write-only, but can read
        writer.write(DOCUMENT_REQUEST)
        await asyncio.sleep(0.004)
    await asyncio.sleep(seconds)
    for writer in writers:
        writer.transport.abort()
    return len(writers) * len(DOCUMENT_REQUEST)


async def post_waiting(port: int, seconds: float) -> int:
    """Post a share that waits for its leaf on 1,500 connections; post it again after each response."""
    end, sent, waits = time.monotonic() + seconds, 0, list[float]()
    request = RawRequest("POST", SHARES_PATH, sys.stdin.buffer.read())

    async def post_repeatedly(delay: float) -> None:
        nonlocal sent
        await asyncio.sleep(delay)
        connection = ReusedConnection(port, ATTACKER_ADDRESS)
        while time.monotonic() < end:
            began = time.monotonic()
            response = await connection.send(request)
            sent += len(request.body)
            if response is not None:
                waits.append(time.monotonic() - began)
        connection.close()

    await asyncio.gather(*(post_repeatedly(0.002 * number) for number in range(1_500)))
    if median(waits) < MIN_WAIT_SECONDS:
        raise RuntimeError(f"the helper held shares for {median(waits):.1f} s only")
    return sent


async def pipeline(request: bytes, connections: int, port: int, seconds: float, *, reads_responses: bool) -> int:
    """Send endless requests on many connections, which open one after the other."""

    async def send_endlessly(delay: float) -> int:
        await asyncio.sleep(delay)
        if reads_responses:
            reader, writer = await asyncio.open_connection(HOST, port, local_addr=(ATTACKER_ADDRESS, 0))
        else:
            reader, writer = await open_narrow_connection(port, ATTACKER_ADDRESS)
            writer.transport.pause_reading()  # type: ignore[attr-defined] # typed as write-only, but can read
        reading = asyncio.create_task(_discard(reader))
        sent = 0
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds - delay):
                while True:
                    writer.write(request * 1000)
                    await writer.drain()
                    await asyncio.sleep(0)  # `drain` alone does not let other tasks run while the server reads quickly
                    sent += len(request) * 1000
        await _end(reading)
        writer.transport.abort()
        return sent

    delays = (seconds / 3 * number / connections for number in range(connections))
    return sum(await asyncio.gather(*map(send_endlessly, delays)))


async def _discard(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 20):
        pass


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


FLOODS: dict[str, Callable[[int, float], Coroutine[Any, Any, int]]] = {
    "unterminated strings": send_unterminated,
    "unread documents": partial(pipeline, DOCUMENT_REQUEST, 1_500, reads_responses=False),
    "pipelined reads": partial(pipeline, LIVEZ_REQUEST, 250, reads_responses=True),
    "unread pipelines": partial(pipeline, LIVEZ_REQUEST, 1_000, reads_responses=False),
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
}
"""Floods by name; each takes the port and the duration in seconds, and returns the number of bytes sent."""
PACED_FLOODS: dict[str, Callable[[int, float], Coroutine[Any, Any, int]]] = {
    "requests that expect 100": expect_continue,
    "held responses": hold_unread,
    "waiting shares": post_waiting,
}
"""Floods that leave most of the processor free."""


if __name__ == "__main__":
    kind, port, seconds = sys.argv[1:]
    print(asyncio.run((FLOODS | PACED_FLOODS)[kind](int(port), float(seconds))))
