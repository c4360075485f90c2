"""HTTP clients: no cookies, and one module that creates them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from helper.chain.node_http import MAX_CONNECTIONS, NodeHttp, NoResponse
from helper.runtime.network_clients import MAX_HEAD_BYTES, LimitedTransport, create_async_client
from tests.support.fakes import wait_until

REPO_ROOT = Path(__file__).parents[3]
CREATION_PATTERN = re.compile(r"\bhttpx\.(Client|AsyncClient|get|post|put|patch|delete|head|options|request|stream)\(")
"""Expressions that create a client, or use one that httpx creates."""


def respond_with_cookie(request: httpx.Request) -> httpx.Response:
    assert "cookie" not in request.headers
    if request.url.path == "/moved":
        return httpx.Response(302, headers={"location": "/", "set-cookie": "moved=1"})
    return httpx.Response(200, headers=[("set-cookie", f"name-{number}=1; Path=/") for number in range(100)])


@pytest.mark.anyio
async def test_client_ignores_set_cookie() -> None:
    transport = httpx.MockTransport(respond_with_cookie)
    async with create_async_client(timeout=5, transport=transport, base_url="http://node") as http:
        assert [(await http.get(path)).status_code for path in ("/", "/moved", "/")] == [200, 302, 200]
        assert len(http.cookies.jar) == 0


def test_http_clients_are_created_in_one_module() -> None:
    packages = ("helper", "admin", "audit", "conformance")
    files = [path for package in packages for path in (REPO_ROOT / package).rglob("*.py")]
    assert len(files) > 100
    creators = {str(path.relative_to(REPO_ROOT)) for path in files if CREATION_PATTERN.search(path.read_text("utf-8"))}
    assert creators == {"helper/runtime/network_clients.py"}


CANCELLED_REQUESTS = int(os.environ.get("SVOTE_CANCELLED_REQUESTS", "3000"))
"""Cancelled requests of the soak test; 100,000 for a full run."""
SLOTS = 8


class SlowConnection(httpx.AsyncBaseTransport):
    """A connection that responds after some event loop iterations."""

    open_count = 0

    def __init__(self) -> None:
        SlowConnection.open_count += 1

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        for _ in range(3):
            await asyncio.sleep(0)
        return httpx.Response(200, stream=SlowBody())

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        SlowConnection.open_count -= 1


class SlowBody(httpx.AsyncByteStream):
    """A body that arrives in two parts."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in (b"{", b"}"):
            await asyncio.sleep(0)
            yield piece

    async def aclose(self) -> None:
        await asyncio.sleep(0)


@pytest.mark.anyio
async def test_cancelled_requests_lose_no_slot() -> None:
    rng, SlowConnection.open_count = random.Random(4), 0
    transport = LimitedTransport(SlowConnection, slots=SLOTS, max_idle=2)
    http = create_async_client(timeout=5, transport=transport, base_url="http://node")
    cancelled = 0
    while cancelled < CANCELLED_REQUESTS:
        tasks = [asyncio.create_task(http.get("/")) for _ in range(4 * SLOTS)]
        for task in tasks:
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            task.cancel()
        cancelled += sum(isinstance(r, BaseException) for r in await asyncio.gather(*tasks, return_exceptions=True))
    async with asyncio.timeout(5):
        replies = await asyncio.gather(*(http.get("/") for _ in range(4 * SLOTS)))
    assert {reply.text for reply in replies} == {"{}"}
    await http.aclose()
    assert SlowConnection.open_count == 0, "every connection was closed"


@pytest.mark.anyio
async def test_calls_that_time_out_lose_no_connection() -> None:
    open_connections = set[asyncio.StreamWriter]()
    meeting: list[asyncio.Barrier] = []

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_connections.add(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                if not meeting:
                    await reader.read()  # until the client closes the connection
                    return
                await meeting[0].wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            open_connections.discard(writer)
            writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0, backlog=256)
    http = NodeHttp(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=1.0)
    for _ in range(3):
        results = await asyncio.gather(*(http.get("/") for _ in range(2 * MAX_CONNECTIONS)), return_exceptions=True)
        assert {type(result) for result in results} == {NoResponse}
    http._timeout = 20.0
    meeting.append(asyncio.Barrier(MAX_CONNECTIONS))  # every connection is in use at the same time
    responses = await asyncio.gather(*(http.get("/") for _ in range(MAX_CONNECTIONS)))
    assert {response.body for response in responses} == {b"{}"}
    await http.aclose()
    await wait_until(lambda: not open_connections)
    server.close()


INTERIM = b"HTTP/1.1 103 Early Hints\r\n\r\n"
FINAL = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
BLANKS = b" " * 20_000


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "is_valid"),
    [
        (INTERIM * 3 + FINAL, True),
        (INTERIM * (MAX_HEAD_BYTES // len(INTERIM) + 1) + FINAL, False),
        (FINAL + INTERIM * 10_000, True),  # it belongs to the next response, which is requested again
        (FINAL.replace(b"\r\n\r\n", b"\r\na: " + b"x" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n"), True),
        (FINAL.replace(b"\r\n\r\n", b"\r\na: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n"), False),
        (FINAL.replace(b"\r\n\r\n", b"\r\na:" + BLANKS + b"x \t y" + b"\t" * 9 + b"\r\n\r\n"), True),
        (FINAL.replace(b"\r\n\r\n", b"\r\na:" + BLANKS + b"\x00\r\n\r\n"), False),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;" + BLANKS + b" \r\n{}\r\n0;a=b\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;" + BLANKS + b"\nX\r\n{}\r\n0\r\n\r\n", False),
    ],
)
async def test_hostile_head_or_chunk_costs_little_time_and_a_legal_one_is_read(answer: bytes, is_valid: bool) -> None:
    """A line of 20,000 blanks took 1.2 s of CPU: the patterns of h11 are quadratic in their number."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    http = NodeHttp(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    began = time.process_time()
    for _ in range(3):  # a connection that was used before, too
        if is_valid:
            assert (await http.get("/")).body == b"{}"
        else:
            with pytest.raises(NoResponse):
                await http.get("/")
    assert time.process_time() - began < 1.0
    await http.aclose()
    server.close()
