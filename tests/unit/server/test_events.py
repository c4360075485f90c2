"""The status stream over real sockets: a client that does not read is dropped and delays no other client."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from helper.observability.status_feed import StatusFeed
from helper.server.connection_limits import ConnectionLimits
from helper.server.edge import Edge, json_application
from helper.server.listening import Server, bind_tcp
from helper.server.page_routes import PATH, events_route
from tests.support.clock import FakeClock
from tests.support.fakes import wait_until

SECONDS = 12_345.0
"""Time limit of a client that does not read; tests say when it is over."""
LARGE_EVENT = b"x" * (1 << 18)
"""A state larger than the buffers."""


async def fail_snapshot() -> object:
    raise AssertionError("no state is created in these tests")


@pytest.fixture
async def expire(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let the time limits of all clients that have bytes to read be over. Returns their number."""
    loop, held = asyncio.get_running_loop(), dict[asyncio.TimerHandle, Callable[[], None]]()
    call_later = loop.call_later

    def hold(delay: float, callback: Callable[..., None], *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        handle = call_later(delay, callback, *args, **kwargs)
        if delay == SECONDS:
            held[handle] = callback
        return handle

    def expire_held() -> int:
        due = [callback for handle, callback in held.items() if not handle.cancelled()]
        held.clear()
        for callback in due:
            callback()
        return len(due)

    monkeypatch.setattr(loop, "call_later", hold)
    return expire_held


@contextlib.asynccontextmanager
async def serve_feed(feed: StatusFeed) -> AsyncIterator[int]:
    """Serve events to clients with this time limit; yields the port."""
    server = Server(
        Edge(json_application([events_route(feed, "token", FakeClock())])), ConnectionLimits(stalled_seconds=SECONDS)
    )
    listener = bind_tcp("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    task = asyncio.create_task(server.serve([listener]))
    try:
        async with asyncio.timeout(30):
            yield listener.getsockname()[1]
    finally:
        feed.close()
        server.stop()
        await task


async def open_listener(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    request = f"GET {PATH} HTTP/1.1\r\nHost: helper\r\nAuthorization: Bearer token\r\n\r\n"
    await loop.sock_sendall(client, request.encode())
    return client


async def read_until(client: socket.socket, text: bytes) -> None:
    received = b""
    while text not in received:
        data = await asyncio.get_running_loop().sock_recv(client, 1 << 18)
        assert data, f"the connection ended before {text!r}"
        received = received[-100:] + data


async def test_events_client_that_does_not_read_is_the_only_one_dropped(
    capfd: pytest.CaptureFixture[str], expire: Callable[[], int]
) -> None:
    feed = StatusFeed(fail_snapshot, clock=FakeClock())
    async with serve_feed(feed) as port:
        with await open_listener(port) as stalled, await open_listener(port) as responsive:
            await wait_until(lambda: feed.listener_count == 2)
            for number in range(1, 9):
                feed.publish(b"%d-" % number + LARGE_EVENT)
                await read_until(responsive, b"data: %d-x" % number)
                await read_until(responsive, b"x\n\n")
            await wait_until(lambda: not expire() and feed.listener_count == 1)  # its slot is free
            feed.publish(b"last")
            await read_until(responsive, b"data: last\n\n")
            with pytest.raises((ConnectionResetError, AssertionError)):
                await read_until(stalled, b"data: last")
    assert not any(capfd.readouterr()), "a client that does not read is not logged as an error"


async def test_events_slow_reader_is_not_dropped(expire: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.server.protocol._PIECE_BYTES", 1 << 20)  # has read a part of what waits
    feed = StatusFeed(fail_snapshot, clock=FakeClock())
    async with serve_feed(feed) as port:
        with await open_listener(port) as slow:
            await wait_until(lambda: feed.listener_count)
            feed.publish(LARGE_EVENT + b"middle" + LARGE_EVENT + b"end")
            await read_until(slow, b"middle")
            assert expire() == 1
            await read_until(slow, b"xend\n\n")
            assert expire() == 0, "it has read everything"
