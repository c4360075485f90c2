"""Connections: upgrade requests, pipelines, number of headers, half-closed connections."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs

from helper.server.connection_limits import (
    IDLE_SECONDS,
    MAX_BODY_PIECES,
    MAX_DISCARDED_BYTES,
    MAX_TARGET_BYTES,
    READ_BYTES,
    ConnectionLimits,
)
from helper.server.edge import REQUEST_EXTENSION, Edge, json_application
from helper.server.listening import Server, bind_tcp
from helper.server.protocol import HANDLERS_PER_ITERATION, SHARES_PER_ITERATION, Request
from helper.server.request_parser import RequestParser
from tests.simulation.virtual_loop import SimLoop
from tests.support.fakes import wait_until
from tests.unit.server.server_fixtures import (
    HELLO_REQUEST,
    EndlessRoutes,
    FakeTransport,
    RawClient,
    create_test_app,
    parse_error,
    run_server,
    track_protocols,
)

LIMITS = ConnectionLimits(head_seconds=60)
MAX_HEADERS = LIMITS.max_headers
PAUSE = b"GET /pause/0.2 HTTP/1.1\r\nHost: x\r\n\r\n"
SMUGGLED_REQUEST = b"GET /hello HTTP/1.1\r\nHost: x\r\nX-Smuggled: yes\r\n\r\n"
UPGRADES = [
    (b"Upgrade", b"x"),
    (b"Upgrade", b"websocket"),
    (b"Upgrade, HTTP2-Settings", b"h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"),
    (b"keep-alive, upgrade", b"foo/2, bar"),
]
"""Values of the headers Connection and Upgrade."""


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with run_server(LIMITS) as listening:
        yield listening


def build_post(body: bytes, *headers: bytes, upgrade: tuple[bytes, bytes] = UPGRADES[0]) -> bytes:
    lines = [b"POST /echo HTTP/1.1", b"Host: x", b"Connection: " + upgrade[0], b"Upgrade: " + upgrade[1], *headers]
    return b"\r\n".join([*lines, b"", b""]) + body


def build_with_length(body: bytes, *headers: bytes, upgrade: tuple[bytes, bytes] = UPGRADES[0]) -> bytes:
    return build_post(body, b"Content-Length: %d" % len(body), *headers, upgrade=upgrade)


def build_chunked(*chunks: bytes, trailers: bytes = b"") -> bytes:
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return build_post(pieces + b"0\r\n" + trailers + b"\r\n", b"Transfer-Encoding: chunked")


def split_at(data: bytes, *cuts: int) -> list[bytes]:
    offsets = [0, *cuts, len(data)]
    return [data[start:end] for start, end in itertools.pairwise(offsets) if start < end]


async def exchange(port: int, segments: Sequence[bytes]) -> bytes:
    """Return everything that the server sends until it closes; each segment arrives separately."""
    client = await RawClient.connect(port)
    with contextlib.suppress(ConnectionError):
        for number, segment in enumerate(segments):
            client.writer.write(segment)
            await client.writer.drain()
            if number < len(segments) - 1:
                # The round trip of another connection gives the server a turn to read this segment.
                await (other := await RawClient.connect(port)).request()
                other.writer.close()
    return await client.read_rest()


def response_bodies(response: bytes) -> list[bytes]:
    return [part.partition(b"\r\n\r\n")[2] for part in response.split(b"HTTP/1.1 200 OK\r\n")[1:]]


@pytest.mark.parametrize("upgrade", UPGRADES, ids=lambda upgrade: upgrade[1].decode()[:9])
async def test_upgrade_request_with_body_is_served_and_connection_closed(
    port: int, upgrade: tuple[bytes, bytes]
) -> None:
    response = await exchange(port, [build_with_length(b"a share", upgrade=upgrade)])
    assert response_bodies(response) == [b"a share"]
    assert b"\r\nconnection: close\r\n" in response


HEAD_END = build_with_length(SMUGGLED_REQUEST).index(b"\r\n\r\n") + 4
SEGMENTED = {
    "one segment": [build_with_length(SMUGGLED_REQUEST)],
    "body later": split_at(build_with_length(SMUGGLED_REQUEST), HEAD_END),
    "body in two segments": split_at(build_with_length(SMUGGLED_REQUEST), HEAD_END, HEAD_END + 10),
    "head in two segments": split_at(build_with_length(SMUGGLED_REQUEST), 20, HEAD_END),
    "split within the head's end": split_at(build_with_length(SMUGGLED_REQUEST), HEAD_END - 1),
    "byte by byte at the boundary": split_at(build_with_length(SMUGGLED_REQUEST), *range(HEAD_END - 5, HEAD_END + 6)),
    "chunked": [build_chunked(SMUGGLED_REQUEST)],
    "chunked, later": split_at(build_chunked(SMUGGLED_REQUEST), build_chunked(b"").index(b"\r\n\r\n") + 4),
    "chunked, chunk by chunk": split_at(build_chunked(SMUGGLED_REQUEST[:9], SMUGGLED_REQUEST[9:]), 120, 125, 140),
    "chunked, with trailers": [build_chunked(SMUGGLED_REQUEST, trailers=b"X-Trailer: 1\r\n")],
}


@pytest.mark.parametrize("late", [1, 2])
async def test_upgrade_request_body_may_begin_with_line_ends_after_a_split_head(port: int, late: int) -> None:
    request = build_with_length(b"\n\r\n a share")
    segments = split_at(request, request.index(b"\r\n\r\n") + 4 - late)
    assert response_bodies(await exchange(port, segments)) == [b"\n\r\n a share"]


@pytest.mark.parametrize("name", SEGMENTED)
async def test_upgrade_request_body_is_never_parsed_as_request(port: int, name: str) -> None:
    assert response_bodies(await exchange(port, SEGMENTED[name])) == [SMUGGLED_REQUEST]


@pytest.mark.parametrize(
    "after", [SMUGGLED_REQUEST, b"\r\n" + SMUGGLED_REQUEST, b"\x00rubbish", build_with_length(b"again")]
)
@pytest.mark.parametrize("body", [b"", b"a share"])
@pytest.mark.parametrize("is_late", [False, True])
async def test_bytes_after_upgrade_request_are_never_parsed(
    port: int, after: bytes, body: bytes, is_late: bool
) -> None:
    request = build_with_length(body)
    segments = [request[:-1], request[-1:] + after] if is_late else [request + after]
    assert response_bodies(await exchange(port, segments)) == [body]


async def test_upgrade_request_without_framing_headers_has_no_body(port: int) -> None:
    request = HELLO_REQUEST[:-2] + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    assert response_bodies(await exchange(port, [request + SMUGGLED_REQUEST])) == [b"hello"]
    assert response_bodies(await exchange(port, [request, SMUGGLED_REQUEST])) == [b"hello"]


async def test_upgrade_request_after_pipelined_requests_is_served_last(port: int) -> None:
    segments = [HELLO_REQUEST + HELLO_REQUEST + build_with_length(SMUGGLED_REQUEST) + SMUGGLED_REQUEST]
    assert response_bodies(await exchange(port, segments)) == [b"hello", b"hello", SMUGGLED_REQUEST]


async def test_upgrade_request_answered_early_is_closed_after_its_body(port: int) -> None:
    client = await RawClient.connect(port)
    head = build_post(b"", b"Content-Length: %d" % len(SMUGGLED_REQUEST)).replace(b"/echo", b"/early")
    client.writer.write(head)
    assert b"\r\nconnection: close\r\n" in await client.reader.readuntil(b"\r\n\r\nhello")
    other = await RawClient.connect(port)
    assert await other.request() == b"hello"
    other.writer.close()
    assert not client.reader.at_eof(), "closing now would reset the connection when the body arrives"
    client.writer.write(SMUGGLED_REQUEST + SMUGGLED_REQUEST)
    assert await client.read_rest() == b""


async def test_upgrade_request_that_expects_100_is_continued_and_served(port: int) -> None:
    head = build_post(b"", b"Content-Length: %d" % len(SMUGGLED_REQUEST), b"Expect: 100-continue")
    client = await RawClient.connect(port, head)
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.writer.write(SMUGGLED_REQUEST)
    assert response_bodies(await client.read_rest()) == [SMUGGLED_REQUEST]


FRAMINGS = {
    "length and chunked": [b"Content-Length: 5", b"Transfer-Encoding: chunked"],
    "chunked and length": [b"Transfer-Encoding: chunked", b"Content-Length: 5"],
    "two lengths": [b"Content-Length: 5", b"Content-Length: 6"],
    "negative length": [b"Content-Length: -5"],
    "unknown coding": [b"Transfer-Encoding: gzip"],
    "chunked is not the last coding": [b"Transfer-Encoding: chunked, gzip"],
}


@pytest.mark.parametrize("name", FRAMINGS)
async def test_upgrade_request_with_ambiguous_framing_is_not_served(port: int, name: str) -> None:
    body = b"5\r\nhello\r\n0\r\n\r\n" + SMUGGLED_REQUEST
    for segments in ([build_post(body, *FRAMINGS[name])], [build_post(b"", *FRAMINGS[name]), body]):
        assert response_bodies(await exchange(port, segments)) == []


@pytest.mark.parametrize("target", [b"/echo", b"example.org:443"])
async def test_connect_request_is_refused_and_connection_closed(port: int, target: bytes) -> None:
    for request in (b"CONNECT %b HTTP/1.1\r\nHost: x\r\n\r\n", b"CONNECT %b HTTP/1.1\r\nContent-Length: 9\r\n\r\n"):
        assert parse_error(await exchange(port, [request % target + SMUGGLED_REQUEST]))[0] == 400


@pytest.mark.parametrize("version", [b"1.0\r\nConnection: keep-alive", b"1.1\r\nConnection: close"])
async def test_bytes_after_last_request_of_connection_are_discarded(port: int, version: bytes) -> None:
    last = b"POST /echo HTTP/%b\r\nHost: x\r\nContent-Length: 2\r\n\r\nok" % version
    for after in (SMUGGLED_REQUEST, b"\x00rubbish"):
        assert response_bodies(await exchange(port, [last + after])) == [b"ok"]


# Pipelines


@pytest.fixture
def running_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of running requests at the start of each one."""
    counts: list[int] = []
    running = 0
    serve = Edge.__call__

    async def record(self: Edge, request: Request) -> None:
        nonlocal running
        running += 1
        counts.append(running)
        await serve(self, request)
        running -= 1

    monkeypatch.setattr(Edge, "__call__", record)
    return counts


def numbered(count: int) -> list[bytes]:
    """Requests to `/echo`; some bodies look like many heads, some are larger than a segment."""
    fillings = [b"", b"\n\r\n" * 60, SMUGGLED_REQUEST * 3, b"x" * 70_000]
    contents = [b"%d %b" % (number, fillings[number % 50 % 7 % 4]) for number in range(count)]
    return [b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(c), c) for c in contents]


@pytest.mark.parametrize("segment_bytes", [1 << 20, 4099, 211])
async def test_pipeline_is_answered_in_order_one_by_one(
    port: int, segment_bytes: int, running_counts: list[int]
) -> None:
    requests = numbered(120 if segment_bytes == 211 else 600)
    sent = b"".join(requests)
    client = await RawClient.connect(port)

    async def send() -> None:
        for start in range(0, len(sent), segment_bytes):
            client.writer.write(sent[start : start + segment_bytes])
            await client.writer.drain()

    sending = asyncio.create_task(send())
    for request in requests:
        assert await client.request(b"") == request.partition(b"\r\n\r\n")[2]
    await sending
    client.writer.close()
    assert running_counts == [1] * len(requests)


async def test_pipeline_of_tiny_requests_is_answered_one_by_one(port: int, running_counts: list[int]) -> None:
    count = 1000
    client = await RawClient.connect(port)
    client.writer.write(b"GET /x HTTP/1.1\r\nHost:\r\n\r\n" * count + HELLO_REQUEST[:-2] + b"Connection: close\r\n\r\n")
    response = await client.read_rest()
    assert response.count(b"HTTP/1.1 404 Not Found\r\n") == count
    assert response_bodies(response) == [b"hello"]
    assert running_counts == [1] * (count + 1)


BODY_HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\n%b\r\n"


def count_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    pieces: list[int] = []
    feed = RequestParser.feed

    def record(self: RequestParser, data: bytes, at: int) -> int:
        end = feed(self, data, at)
        pieces.append(end - at)
        return end

    monkeypatch.setattr(RequestParser, "feed", record)
    return pieces


@pytest.mark.parametrize("pattern", [b"\n", b"\r\n", b"\n\r\n", b"a\n\r\n", b"\nGET /hello HTTP/1.1\r\n\r\n"])
async def test_body_of_line_ends_is_parsed_in_few_pieces(
    port: int, pattern: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = count_pieces(monkeypatch)
    body = pattern * (200_000 // len(pattern))
    client = await RawClient.connect(port, BODY_HEAD % b"Content-Length: %d\r\n" % len(body) + body)
    assert await client.request(b"") == body
    assert await client.request() == b"hello"
    client.writer.close()
    assert sum(pieces) == len(BODY_HEAD % b"Content-Length: %d\r\n" % len(body) + body + HELLO_REQUEST)
    assert len(pieces) <= 2 * len(body) // READ_BYTES + 8


async def test_line_ends_before_request_are_parsed_in_few_pieces(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = count_pieces(monkeypatch)
    client = await RawClient.connect(port, b"\n" * 2000)
    assert await client.request() == b"hello"
    client.writer.close()
    assert len(pieces) < 20


@pytest.mark.parametrize("upgrade", [b"", b"Connection: Upgrade\r\nUpgrade: x\r\n"])
@pytest.mark.parametrize(
    ("chunk", "count", "status"),
    [
        (b"1\r\n{\r\n", 200, 200),
        (b"1\r\n{\r\n", MAX_BODY_PIECES + 1, 400),
        (b"4\r\na\n\r\n\r\n", MAX_BODY_PIECES + 1, 400),
        (b"200\r\n" + b"a" * 512 + b"\r\n", MAX_BODY_PIECES + 1, 200),
    ],
)
async def test_body_of_many_small_chunks_is_refused(
    port: int, upgrade: bytes, chunk: bytes, count: int, status: int
) -> None:
    head = BODY_HEAD % (upgrade + b"Transfer-Encoding: chunked\r\nConnection: close\r\n")
    client = await RawClient.connect(port, head + chunk * count + b"0\r\n\r\n")
    response = await client.read_rest()
    assert response.startswith(b"HTTP/1.1 %d " % status)


MANY_HEADERS = b"GET /hello HTTP/1.1\r\nHost:\r\n" + b"a:\r\n" * (MAX_HEADERS - 1) + b"\r\n"


@pytest.mark.parametrize("request_head", [HELLO_REQUEST, MANY_HEADERS])
async def test_pipelining_connections_hold_at_most_64_kib_each(request_head: bytes) -> None:
    server = Server(Edge(json_application([])), LIMITS)
    sent = request_head * (1_000_000 // len(request_head))
    count = 50

    def connect() -> FakeTransport:
        return FakeTransport(server.create_connection())

    connect().deliver(HELLO_REQUEST)  # exclude one-time allocations of the first request
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        transports = [connect() for _ in range(count)]
        delivered = [transport.deliver(sent) for transport in transports]
        held = (tracemalloc.get_traced_memory()[0] - before) / count
    finally:
        tracemalloc.stop()
        for connection in list(server.connections):
            connection.connection_lost(OSError())  # drops the requests that wait for their turn
    assert max(delivered) < len(sent), "the pipeline is full"
    assert held <= 64 << 10


# Turns


async def test_idle_connection_does_not_hold_the_head_of_its_request(port: int) -> None:
    query, value = b"q" * 2_000, b"x" * (LIMITS.max_head_bytes - 2_100)
    request = b"GET /hello?%b HTTP/1.1\r\nHost: x\r\nX: %b\r\n\r\n" % (query, value)
    clients = [await RawClient.connect(port) for _ in range(10)]
    for client in clients:
        assert await client.request() == b"hello"
    tracemalloc.start()
    try:
        for client in clients:
            assert await client.request(request) == b"hello"
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < len(clients) * 10_000
    for client in clients:
        client.writer.close()


@pytest.mark.parametrize(
    ("request_head", "most"),
    [
        (HELLO_REQUEST, HANDLERS_PER_ITERATION),
        (b"POST /early HTTP/1.1\r\nHost: x\r\n\r\n", HANDLERS_PER_ITERATION),
        (b"POST /share HTTP/1.1\r\nHost: x\r\n\r\n", SHARES_PER_ITERATION),
    ],
)
async def test_requests_of_many_connections_start_in_turn(
    port: int, request_head: bytes, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections, pipelined = 60, 20
    loop = asyncio.get_running_loop()
    iteration = 0
    starts = Counter[int]()

    def count_iteration() -> None:
        nonlocal iteration
        iteration += 1
        timers[:] = [loop.call_soon(count_iteration)]

    async def count_start(edge: Edge, request: Request) -> None:
        starts[iteration] += 1
        await serve(edge, request)

    timers: list[asyncio.Handle] = []
    serve = Edge.__call__
    monkeypatch.setattr(Edge, "__call__", count_start)
    clients = [await RawClient.connect(port) for _ in range(connections)]
    count_iteration()
    for client in clients:
        client.writer.write(request_head * pipelined)
    for client in clients:
        assert [await client.request(b"") for _ in range(pipelined)] == [b"hello"] * pipelined
        client.writer.close()
    timers[0].cancel()
    assert starts.total() == connections * pipelined
    assert max(starts.values()) <= most


def exchange_in_virtual_time(*sent: tuple[float, bytes]) -> tuple[bytes, bool]:
    """Send bytes after these pauses, with the default limits; return the response and whether the connection closed."""

    async def send() -> tuple[bytes, bool]:
        server = Server(Edge(create_test_app(EndlessRoutes())))
        transport = FakeTransport(server.create_connection())
        for seconds, data in sent:
            await asyncio.sleep(seconds)
            if not transport.is_closed:
                transport.deliver(data)
        await asyncio.sleep(0.1)
        response = bytes(transport.written), bool(transport.is_closed)
        for connection in list(server.connections):
            connection.connection_lost(None)
        await asyncio.sleep(0.1)  # the request ends
        return response

    result: tuple[bytes, bool] = SimLoop(random.Random("loop")).run_until_complete(send())
    return result


POST_HEAD, POST_BODY = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\n", b"a share"
UNREAD_BODY = b"GET /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
EARLY = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
SLOW: dict[str, tuple[list[tuple[float, bytes]], list[bytes], str]] = {
    "no data": ([(8.5, b"")], [], "closed"),
    "half a head": ([(0, POST_HEAD[:9]), (8.5, b"")], [], "refused"),
    "slow lines": ([(0, b"GET /hello HTTP/1.1\r\n"), *[(1, b"X: y\r\n")] * 8, (0.5, b"")], [], "refused"),
    "a head and a body": ([(0, POST_HEAD[:9]), (8.4, POST_HEAD[9:]), (99, POST_BODY)], [POST_BODY], "open"),
    "a line end after a request": ([(0, HELLO_REQUEST), (1, b"\r\n"), (28, b"")], [b"hello"], "open"),
    "line ends while idle": ([(0, HELLO_REQUEST + b"\n"), *[(10, b"\r\n")] * 3], [b"hello"], "closed"),
    "a letter after a request": ([(0, HELLO_REQUEST), (1, b"G"), (8.5, b"")], [b"hello"], "refused"),
    "half a second head": ([(0, HELLO_REQUEST), (1, HELLO_REQUEST[:-2]), (8.5, b"")], [b"hello"], "refused"),
    "an unread body": ([(0, UNREAD_BODY), (1, b"1"), (7.5, b"")], [b"hello"], "closed"),
    "idle": ([(0, HELLO_REQUEST), (29, b"")], [b"hello"], "open"),
    "idle for too long": ([(0, HELLO_REQUEST), (30, b"")], [b"hello"], "closed"),
    "idle before half a head": (
        [(0, HELLO_REQUEST), (29, HELLO_REQUEST[:9]), (2, HELLO_REQUEST[9:])],
        [b"hello"] * 2,
        "open",
    ),
    "idle before a body": ([(0, HELLO_REQUEST), (20, POST_HEAD), (20, POST_BODY)], [b"hello", POST_BODY], "open"),
    "a body behind a slow request": (
        [(0, PAUSE.replace(b"0.2", b"70") + POST_HEAD), (80, POST_BODY)],
        [b"paused", POST_BODY],
        "open",
    ),
    # The first response completes before its request, and so starts the idle timer.
    "a pipeline behind an idle timer": (
        [(0, EARLY + b"xx"), (1, b"xx" + PAUSE + PAUSE.replace(b"0.2", b"45")), (46, b"")],
        [b"hello", b"paused", b"paused"],
        "open",
    ),
}


@pytest.mark.parametrize("name", SLOW)
def test_slow_client_has_time_for_each_part_of_a_request(name: str) -> None:
    sent, served, end = SLOW[name]
    response, is_closed = exchange_in_virtual_time(*sent)
    answers, status, refusal = response.partition(b"HTTP/1.1 503 ")
    assert response_bodies(answers) == served
    assert end == ("refused" if status else "closed" if is_closed else "open")
    if status:
        assert is_closed
        assert parse_error(status + refusal)[1]["status"] == "error"


BAD_HEAD = b"no HTTP\r\n\r\n"
BAD_BODY = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\nno size\r\n"
LARGE_HEAD = HELLO_REQUEST[:-2] + b"X: " + b"a" * LIMITS.max_head_bytes + b"\r\n\r\n"


@pytest.mark.parametrize("earlier", [[PAUSE], [PAUSE, PAUSE, HELLO_REQUEST]], ids=len)
@pytest.mark.parametrize(("bad", "status"), [(BAD_HEAD, 400), (BAD_BODY, 400), (LARGE_HEAD, 431)])
@pytest.mark.parametrize("is_half_closed", [False, True])
async def test_bad_request_is_refused_after_the_earlier_responses(
    port: int, earlier: list[bytes], bad: bytes, status: int, is_half_closed: bool
) -> None:
    client = await RawClient.connect(port, b"".join([*earlier, bad, HELLO_REQUEST]))
    if is_half_closed:
        client.writer.write_eof()
    response = await client.read_rest()
    *served, refused = [b"HTTP/1.1 " + part for part in response.split(b"HTTP/1.1 ", len(earlier) + 1)[1:]]
    assert response_bodies(b"".join(served)) == [
        {PAUSE: b"paused", HELLO_REQUEST: b"hello"}[request] for request in earlier
    ]
    assert parse_error(refused)[0] == status


@pytest.mark.parametrize("earlier", [b"", PAUSE])
async def test_refused_connection_is_closed_when_the_client_closes(
    earlier: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocols = track_protocols(monkeypatch)
    async with run_server(ConnectionLimits(half_closed_seconds=3600)) as port:
        client = await RawClient.connect(port, earlier + BAD_HEAD)
        assert (await client.read_rest()).count(b"HTTP/1.1 400") == 1
        await wait_until(lambda: not protocols)


@pytest.mark.parametrize("framing", [b"Content-Length: 67108864\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_body_after_its_response_is_discarded_up_to_a_limit(port: int, framing: bytes) -> None:
    chunk = b"x" * (1 << 20)
    if b"chunked" in framing:
        chunk = b"100000\r\n" + chunk + b"\r\n"
    sent = 0
    client = await RawClient.connect(port)
    assert await client.request(b"POST /early HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n") == b"hello"
    with contextlib.suppress(ConnectionError):
        for _ in range(64):
            client.writer.write(chunk)
            await client.writer.drain()
            sent += len(chunk)
    client.writer.close()
    # The buffers of both sockets and of the client hold several megabytes.
    assert MAX_DISCARDED_BYTES // 2 < sent < 32 << 20


def test_client_has_time_to_read_a_response_before_its_body_is_complete() -> None:
    async def exchange() -> None:
        loop = asyncio.get_running_loop()
        server = Server(Edge(create_test_app(EndlessRoutes())), LIMITS)
        connection = server.create_connection()
        transport = FakeTransport(connection)
        transport.deliver(b"POST /early HTTP/1.1\r\nHost: x\r\n")
        await asyncio.sleep(2 * LIMITS.eviction_seconds)  # of the loop's virtual time
        transport.deliver(b"Content-Length: 9\r\n\r\nabc")
        await wait_until(lambda: transport.written.endswith(b"hello"))
        assert not server.evictor.make_room(1, loop.time())
        assert not transport.is_closed
        await asyncio.sleep(IDLE_SECONDS)
        assert server.evictor.make_room(1, loop.time())
        assert transport.is_closed
        connection.connection_lost(None)
        await asyncio.sleep(0.1)  # the request ends

    SimLoop(random.Random("loop")).run_until_complete(exchange())


async def test_connection_is_reused_after_a_short_body_that_is_discarded(port: int) -> None:
    client = await RawClient.connect(port)
    for _ in range(3):
        assert await client.request(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n") == b"hello"
        client.writer.write(b"x" * 3_000_000)
    assert await client.request() == b"hello"
    client.writer.close()


async def test_request_with_invalid_body_is_refused_while_the_app_reads_it(port: int) -> None:
    assert parse_error(await exchange(port, [BAD_BODY[:-9], BAD_BODY[-9:] + HELLO_REQUEST]))[0] == 400


async def test_request_with_invalid_body_gets_no_second_response(port: int) -> None:
    client = await RawClient.connect(port)
    assert await client.request(BAD_BODY.replace(b"/echo", b"/early")[:-9]) == b"hello"
    client.writer.write(BAD_BODY[-9:])
    assert await client.read_rest() == b""


# Number of headers


@pytest.mark.parametrize("count", [MAX_HEADERS + 1, 15_000])
async def test_request_with_too_many_headers_is_refused_with_431(port: int, count: int) -> None:
    response = await exchange(port, [b"GET /hello HTTP/1.1\r\n" + b"a:\r\n" * count + b"\r\n"])
    status, error = parse_error(response)
    assert (status, error["error"]) == (431, "headers: more than 100 headers")


async def test_each_request_may_have_the_maximum_number_of_headers(port: int) -> None:
    client = await RawClient.connect(port)
    for _ in range(2):
        assert await client.request(MANY_HEADERS) == b"hello"
    client.writer.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/1.1\r\n", 400),
        (b"HTTP/1.1\r\nHost: x\r\nhost: x\r\n", 400),
        (b"HTTP/1.0\r\nHost: x\r\nHost: y\r\n", 400),
        (b"HTTP/1.0\r\n", 200),
        (b"HTTP/1.1\r\nHost:\r\nConnection: close\r\n", 200),
    ],
)
async def test_http_1_1_requires_one_host(port: int, head: bytes, status: int) -> None:
    response = await exchange(port, [b"GET /hello " + head + b"\r\n"])
    if status == 200:
        assert response_bodies(response) == [b"hello"]
    else:
        code, error = parse_error(response)
        assert (code, error["error"]) == (400, "headers: exactly one Host is required")


@pytest.mark.parametrize(
    ("line", "status"), [(b"GET /", 505), (b"GET / HTTP/0.9", 505), (b"GET / HTTP/2.0", 505), (b"GET / HTTP/1.2", 400)]
)
async def test_other_versions_of_http_are_refused(port: int, line: bytes, status: int) -> None:
    assert parse_error(await exchange(port, [line + b"\r\nHost: x\r\n\r\n"]))[0] == status


@pytest.mark.parametrize(("excess", "status"), [(0, 200), (1, 414)])
async def test_target_is_limited(port: int, excess: int, status: int) -> None:
    target = b"/hello?".ljust(MAX_TARGET_BYTES + excess, b"x")
    head = [b"GET " + target[:99], target[99:] + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"]
    assert (await exchange(port, head)).startswith(b"HTTP/1.1 %d " % status)


TRAILED = b"POST /header-names HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"


@pytest.mark.parametrize("trailer", [b"a:\r\n", b"a: " + b"x" * (LIMITS.max_head_bytes // 90) + b"\r\n"])
async def test_trailers_are_limited_in_number_and_size(port: int, trailer: bytes) -> None:
    response = await exchange(port, [TRAILED + trailer * (MAX_HEADERS - 1) + b"\r\n"])
    assert b"HTTP/1.1 200" not in response


@pytest.mark.parametrize("trailer", [b"Content-Length: 5", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("is_late", [False, True])
async def test_body_with_framing_trailer_is_refused_as_incomplete(trailer: bytes, is_late: bool) -> None:
    body = b"2\r\nok\r\n0\r\n"
    endless = EndlessRoutes()
    async with run_server(LIMITS, endless=endless) as port:
        segments = [b"GET /endless/wait HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body, trailer]
        segments = segments if is_late else [b"".join(segments)]
        response = await exchange(port, [*segments, b"\r\n\r\n"])
        assert parse_error(response)[0] == 400
        # the application was called and notified that the request is incomplete
        await wait_until(lambda: endless.disconnects >= is_late)
    assert endless.disconnects == is_late


@pytest.mark.parametrize("name", [b"Connection", b"proxy-connection"])
@pytest.mark.parametrize("is_late", [False, True])
async def test_trailer_never_ends_the_connection_before_the_next_request(port: int, name: bytes, is_late: bool) -> None:
    segments = [TRAILED + name + b": close\r\n", b"\r\n"]
    response = await exchange(port, segments if is_late else [b"".join(segments)])
    status, error = parse_error(response)
    assert (status, error["error"]) == (400, "trailers: Connection is not permitted")


async def test_trailers_are_not_merged_into_headers(port: int) -> None:
    client = await RawClient.connect(port)
    response = await client.request(TRAILED + b"X-Forwarded-For: 192.0.2.1\r\nX-Helper-Token: t\r\n\r\n")
    assert response == b"host,transfer-encoding"
    client.writer.close()


# Half-closed connections

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
LoopFactory = Callable[[], asyncio.AbstractEventLoop]
PLAIN_POST = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\na share"


def run(loop: LoopFactory, test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(test)


async def half_close(port: int, request: bytes) -> bytes:
    """Everything that the server sends to a client that closes its sending side after the request."""
    client = await RawClient.connect(port, request)
    client.writer.write_eof()
    return await client.read_rest()


@LOOPS
@pytest.mark.parametrize("dropped", [b"", b"GET /hel", PLAIN_POST[:-1]], ids=["complete", "half a head", "half a body"])
def test_half_closed_client_gets_responses_to_complete_requests(loop: LoopFactory, dropped: bytes) -> None:
    async def test() -> None:
        async with run_server(LIMITS) as port:
            assert response_bodies(await half_close(port, PAUSE + dropped)) == [b"paused"]
            response = await half_close(port, PLAIN_POST + PAUSE + HELLO_REQUEST + dropped)
            assert response_bodies(response) == [b"a share", b"paused", b"hello"]
            assert await half_close(port, dropped) == b""

    run(loop, test())


@LOOPS
@pytest.mark.parametrize("kind", ["stream", "wait"])
def test_half_closed_connection_ends_at_its_deadline(loop: LoopFactory, kind: str) -> None:
    async def test() -> None:
        endless = EndlessRoutes()
        async with run_server(ConnectionLimits(half_closed_seconds=0.3), endless=endless) as port:
            response = await half_close(port, f"GET /endless/{kind} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (b"piece" in response) == (kind == "stream")
            await wait_until(lambda: endless.disconnects > 0)

    run(loop, test())


@LOOPS
def test_stream_ends_before_the_deadline_when_the_client_disconnects(loop: LoopFactory) -> None:
    async def test() -> None:
        endless = EndlessRoutes()
        async with run_server(ConnectionLimits(half_closed_seconds=3600), endless=endless) as port:
            client = await RawClient.connect(port, b"GET /endless/stream HTTP/1.1\r\nHost: x\r\n\r\n")
            await client.reader.readuntil(b"piece")
            client.writer.close()
            await wait_until(lambda: endless.disconnects > 0)

    run(loop, test())


@LOOPS
def test_response_that_is_aborted_does_not_look_complete_to_http_1_0(loop: LoopFactory) -> None:
    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"piece", "more_body": True})
        await receive()
        await receive()  # the client has read it
        scope["extensions"][REQUEST_EXTENSION].abort()

    async def test() -> None:
        server, listener = Server(Edge(respond)), bind_tcp("127.0.0.1", 0)
        task = asyncio.create_task(server.serve([listener]))
        head = b"POST / HTTP/1.0\r\nHost: x\r\nContent-Length: 2\r\n\r\n1"
        client = await RawClient.connect(listener.getsockname()[1], head)
        await client.reader.readuntil(b"piece")
        client.writer.write(b"2")
        end = await asyncio.gather(client.reader.read(), return_exceptions=True)
        client.writer.close()
        server.stop()
        await task
        assert isinstance(end[0], ConnectionResetError)

    run(loop, test())


# The log


def assert_writes_no_log(loop: LoopFactory, test: Coroutine[Any, Any, None], caplog: pytest.LogCaptureFixture) -> None:
    with capture_logs() as lines:
        run(loop, test)
    assert lines == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO] == []


@LOOPS
def test_client_errors_write_no_log_lines(loop: LoopFactory, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with run_server(LIMITS) as port:
            for request in (
                b"\x16\x03\x01",
                b"no HTTP\r\n\r\n",
                build_with_length(b""),
                b"CONNECT x:1 HTTP/1.1\r\n\r\n",
            ):
                await exchange(port, [request])

    assert_writes_no_log(loop, test(), caplog)


@LOOPS
def test_connection_closed_with_pipelined_requests_writes_no_log_lines(
    loop: LoopFactory, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with run_server(LIMITS) as port:
            for request in (PAUSE * 50, PAUSE + PLAIN_POST * 50, PAUSE * 2 + PLAIN_POST[:-1], HELLO_REQUEST * 50):
                client = await RawClient.connect(port)
                await client.request(HELLO_REQUEST + request)
                client.writer.transport.abort()
            # Longer than the pauses of the connections above.
            assert response_bodies(await half_close(port, PAUSE * 4)) == [b"paused"] * 4

    assert_writes_no_log(loop, test(), caplog)
