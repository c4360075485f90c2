"""The gateway over real sockets: large responses, faulty nodes, concurrent clients."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
import uvloop

from helper.chain.chain_data import BlockHead
from helper.chain.gateway_proxy import GatewayProxy
from helper.chain.node_http import STREAM_LIMIT_BYTES
from helper.chain.node_pool import NodePool, create_nodes
from helper.clock import SystemClock
from helper.server.body_reader import BodyReader
from helper.server.connection_limits import ConnectionLimits
from helper.server.edge import Edge, json_application
from helper.server.gateway_routes import Gateway, GatewayLimits
from helper.server.listening import Server, base_url, bind_tcp
from tests.support.fakes import wait_until
from tests.support.servers import serve_connections

API_PREFIX = "/shielded-vote/v1"
RESPONSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
RESPONSE_CHUNK = b'"' + b"A" * 65_534 + b'"'
CHUNK_COUNT = 800
"""Chunks of a response of 50 MB."""

ROUNDS_REQUEST = f"GET {API_PREFIX}/rounds HTTP/1.1\r\nHost: x\r\n\r\n".encode()

ResponseWriter = Callable[[asyncio.StreamWriter], Awaitable[None]]


class FakeNode:
    """A node with the same response to every request."""

    def __init__(self, write_response: ResponseWriter) -> None:
        self.write_response = write_response
        self.writers_by_path: dict[str, ResponseWriter] = {}
        self.requests: list[bytes] = []
        self.open_connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_connections += 1
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                    path = self.requests[-1].split()[1].decode()
                    await self.writers_by_path.get(path, self.write_response)(writer)
                    await writer.drain()
        finally:
            self.open_connections -= 1
            writer.transport.abort()


@contextlib.asynccontextmanager
async def run_node(write_response: ResponseWriter) -> AsyncIterator[FakeNode]:
    node = FakeNode(write_response)
    async with serve_connections(node.serve) as port:
        node.url = f"http://127.0.0.1:{port}"
        yield node


@contextlib.asynccontextmanager
async def run_gateway(
    *nodes: str,
    timeout: float = 5.0,
    limit: int = STREAM_LIMIT_BYTES,
    bodies: BodyReader | None = None,
    stalled_seconds: float = 60.0,
    **limits: Any,
) -> AsyncIterator[tuple[str, Gateway]]:
    """Run only a gateway, in front of nodes that are treated as in sync. At the end no request may hold a slot."""
    clock = SystemClock()
    endpoints = NodePool(create_nodes([(node, "") for node in nodes]), clock=clock, chain_id="test")
    for endpoint in endpoints.nodes:
        endpoint.health.record_probe(
            BlockHead("test", 7, clock.now()),
            is_syncing=False,
            started_at=clock.monotonic(),
            ended_at=clock.monotonic(),
        )
    gateway = Gateway(
        GatewayProxy(endpoints, timeout=timeout, limit=limit),
        body_reader=bodies,
        limits=GatewayLimits(**limits),
    )
    connections = ConnectionLimits(half_closed_seconds=0.1, stalled_seconds=stalled_seconds)
    server = Server(Edge(json_application(gateway.routes())), connections)
    listener = bind_tcp("127.0.0.1", 0)
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", gateway
        await wait_until(lambda: len(gateway._active) == 0)
    finally:
        server.stop()
        await task
        await gateway.aclose()
        await endpoints.aclose()


async def write_large(writer: asyncio.StreamWriter) -> None:
    length = CHUNK_COUNT * (len(RESPONSE_CHUNK) + 1) + 1
    writer.write(RESPONSE_HEAD + b"Content-Length: %d\r\n\r\n[" % length)
    for number in range(CHUNK_COUNT):
        writer.write(RESPONSE_CHUNK + (b"]" if number == CHUNK_COUNT - 1 else b","))
        await writer.drain()


async def write_endless(writer: asyncio.StreamWriter) -> None:
    writer.write(RESPONSE_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"%x\r\n%b\r\n" % (len(RESPONSE_CHUNK), RESPONSE_CHUNK))
        await writer.drain()


async def test_gateway_50_mb_response_is_streamed(http: httpx.AsyncClient) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with run_node(write_large) as node, run_gateway(node.url) as (base, _):
        size, ends = 0, b""
        async with http.stream("GET", f"{base}{API_PREFIX}/rounds") as response:
            assert response.status_code == 200
            async for chunk in response.aiter_bytes():
                size += len(chunk)
                ends = chunk[-1:]
    assert size == CHUNK_COUNT * (len(RESPONSE_CHUNK) + 1) + 1
    assert ends == b"]"
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth < 40_000, f"{growth} kB"  # more than 50,000 if the response were buffered


async def test_gateway_client_disconnect_cancels_node_request(http: httpx.AsyncClient) -> None:
    async with run_node(write_endless) as node, run_gateway(node.url) as (base, gateway):
        async with http.stream("GET", f"{base}{API_PREFIX}/rounds") as response:
            async for _ in response.aiter_bytes():
                break
            assert (len(gateway._active), node.open_connections) == (1, 1)
        await wait_until(lambda: len(gateway._active) == 0 and node.open_connections == 0)


async def write_nothing(_: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def test_gateway_client_disconnect_before_response_cancels_request() -> None:
    async with (
        run_node(write_nothing) as node,
        run_gateway(node.url, timeout=60) as (base, _),
        open_unfinished_requests(base, ROUNDS_REQUEST, "127.0.0.1"),
    ):
        await wait_until(lambda: len(node.requests) == 1)


async def test_gateway_non_reading_client_is_disconnected() -> None:
    endless = EndlessAnswer()
    async with (
        run_node(endless) as node,
        run_gateway(node.url, stalled_seconds=0.3) as (base, gateway),
        open_unfinished_requests(base, ROUNDS_REQUEST, "127.0.0.1"),
    ):
        await wait_until(lambda: len(node.requests) == 1)
        await wait_until(lambda: len(gateway._active) == 0 and node.open_connections == 0)
        assert endless.sent < 24 << 20  # capacity of the socket buffers on the path


def send_endlessly(listener: socket.socket) -> None:
    """Write a response to one connection until it is closed. Blocks, so that this process buffers nothing."""
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        connection.recv(1 << 16)
        connection.sendall(RESPONSE_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            connection.sendall(b"%x\r\n%b\r\n" % (len(RESPONSE_CHUNK), RESPONSE_CHUNK))


def test_gateway_response_that_is_not_read_takes_little_memory() -> None:
    # uvloop, as in production: it reads all that the kernel has received before reading can be paused.
    count = 6

    async def hold_responses() -> float:
        async with run_gateway(base_url(listener), timeout=60) as (base, gateway):
            tracemalloc.start()
            clients = [await open_slow_client(int(base.rpartition(":")[2])) for _ in range(count)]
            await wait_until(lambda: len(gateway._active) == count)
            held = [0]
            while len(held) < 30 or max(held[-20:]) > max(held[:-20]) + 4096:  # the list is counted too, and grows
                await asyncio.sleep(0.05)
                held.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
            for client in clients:
                client.close()
            return max(held) / count

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=send_endlessly, args=(listener,)) for _ in range(count)]
        for thread in threads:
            thread.start()
        assert uvloop.run(hold_responses()) < 1 << 20
        for thread in threads:
            thread.join()


async def open_slow_client(port: int) -> socket.socket:
    """Request a response without reading it, through a small receive buffer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, ROUNDS_REQUEST)
    return client


async def stall_body(writer: asyncio.StreamWriter) -> None:
    writer.write(RESPONSE_HEAD + b"Content-Length: 100\r\n\r\n[")
    await writer.drain()
    await asyncio.Event().wait()


async def drip_body(writer: asyncio.StreamWriter) -> None:
    writer.write(RESPONSE_HEAD + b"Content-Length: 100000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("write_response", "limits"),
    [(write_endless, {"limit": 1 << 20}), (stall_body, {"timeout": 0.3}), (drip_body, {"response_seconds": 0.5})],
)
async def test_gateway_response_beyond_a_limit_is_cut_off_visibly(
    http: httpx.AsyncClient, write_response: ResponseWriter, limits: dict[str, Any]
) -> None:
    async with run_node(write_response) as node, run_gateway(node.url, **limits) as (base, _):
        with pytest.raises(httpx.HTTPError):
            await http.get(f"{base}{API_PREFIX}/rounds")
        # A node that writes nothing does not notice that its connection is closed.
        await wait_until(lambda: node.open_connections == (write_response is stall_body))


@pytest.mark.parametrize(
    "line",
    [
        "GET /shielded-vote/v1/round/../rounds HTTP/1.1",
        "GET /shielded-vote/v1/./rounds HTTP/1.1",
        "GET /shielded-vote/v1/%2e%2e/v1/rounds HTTP/1.1",
        "GET /shielded-vote/v1/rounds%2factive HTTP/1.1",
        "GET /shielded-vote/v1\\rounds HTTP/1.1",
        "GET //shielded-vote/v1/rounds HTTP/1.1",
        "GET /shielded-vote/v1/rounds;x HTTP/1.1",
        "BREW /shielded-vote/v1/rounds HTTP/1.1",
        "OPTIONS /shielded-vote/v1/rounds HTTP/1.1",
        "GET http://127.0.0.1:1/shielded-vote/v1/round/../rounds HTTP/1.1",
    ],
)
async def test_gateway_unknown_paths_and_methods_reach_no_node(line: str) -> None:
    async with run_node(write_large) as node, run_gateway(node.url) as (base, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rpartition(":")[2]))
        writer.write(f"{line}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        response = await asyncio.wait_for(reader.read(), 20)
        assert int(response.split()[1]) in ({204} if line.startswith("OPTIONS") else {400, 404, 405})
        writer.transport.abort()
        assert node.requests == []


async def write_small(writer: asyncio.StreamWriter) -> None:
    writer.write(RESPONSE_HEAD + b"Content-Length: 2\r\n\r\n{}")


class EndlessAnswer:
    """Writes chunks as long as the client reads.

    Attributes:
        sent: bytes of complete chunks.
        stalled: number of connections whose client reads nothing.
    """

    def __init__(self) -> None:
        self.sent = self.stalled = 0

    async def __call__(self, writer: asyncio.StreamWriter) -> None:
        writer.write(RESPONSE_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(RESPONSE_CHUNK), RESPONSE_CHUNK))
            try:
                await asyncio.wait_for(writer.drain(), 0.5)
            except TimeoutError:  # if only this process was stopped, it continues
                self.stalled += 1
                try:
                    await writer.drain()
                finally:
                    self.stalled -= 1
            self.sent += len(RESPONSE_CHUNK)


@contextlib.asynccontextmanager
async def open_unfinished_requests(base: str, request: bytes, *sources: str) -> AsyncIterator[None]:
    """Open a connection from each of these local addresses. Each sends this request and reads nothing."""
    writers = []
    try:
        for source in sources:
            port = int(base.rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0), limit=1 << 10)
            writers.append(writer)
            writer.write(request)
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


SLOW_BODY = f"POST {API_PREFIX}/cast-vote HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n[".encode()
CAST_VOTE = f"{API_PREFIX}/cast-vote"
LEAVES = f"{API_PREFIX}/commitment-tree/{'ab' * 32}/leaves"
UNREAD = f"{API_PREFIX}/tally-results/{'ab' * 32}"
UNREAD_REQUEST = f"GET {UNREAD} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


ONE_SLOT_EACH = ("127.0.0.2", "127.0.0.3")
TWO_CLIENTS = ("127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.3")


async def test_gateway_slow_bodies_leave_slots_for_others(http: httpx.AsyncClient) -> None:
    async with (
        run_node(write_small) as node,
        run_gateway(node.url, max_concurrent=4) as (base, _),
        open_unfinished_requests(base, SLOW_BODY, *TWO_CLIENTS),
    ):
        # The server reads connections in order: after this response it has read the others too.
        assert (await http.get(f"{base}{API_PREFIX}/nothing")).status_code == 404
        assert (await http.get(f"{base}{API_PREFIX}/rounds")).status_code == 200
        assert (await http.post(f"{base}{API_PREFIX}/cast-vote", json={"some": "vote"})).status_code == 200
        assert len(node.requests) == 2


async def test_gateway_body_counts_until_its_request_has_ended(http: httpx.AsyncClient) -> None:
    bodies = BodyReader(budget=40_000, uncounted_bytes=16_000)
    vote = b"[" * 50_000
    sent = f"POST {API_PREFIX}/cast-vote HTTP/1.1\r\nHost: x\r\nContent-Length: {len(vote)}\r\n\r\n".encode() + vote
    async with run_node(write_nothing) as node, run_gateway(node.url, timeout=60, bodies=bodies) as (base, gateway):
        async with open_unfinished_requests(base, sent, "127.0.0.1"):
            await wait_until(lambda: len(node.requests) == 1)
            node.write_response = write_small
            assert (await http.post(f"{base}{API_PREFIX}/cast-vote", content=vote)).status_code == 503
        await wait_until(lambda: len(gateway._active) == 0)
        assert (await http.post(f"{base}{API_PREFIX}/cast-vote", content=vote)).status_code == 200


def respond_with(head: bytes, rest: bytes) -> ResponseWriter:
    async def write_response(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 " + head + b"\r\nContent-Type: application/json\r\n" + rest)

    return write_response


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("status", [b"304 Not Modified", b"600 Odd", b"777 Odd", b"999 Odd"])
async def test_gateway_invalid_status_of_a_node_is_502(http: httpx.AsyncClient, status: bytes, method: str) -> None:
    path = "rounds" if method == "GET" else "cast-vote"
    async with (
        run_node(respond_with(status, b"Content-Length: 2\r\n\r\n{}")) as node,
        run_gateway(node.url) as (base, _),
    ):
        refused = await http.request(method, f"{base}{API_PREFIX}/{path}", content=None if method == "GET" else b"{}")
    assert (refused.status_code, refused.json()["status"]) == (502, "error")


@pytest.mark.parametrize("rest", [b"\r\n", b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n"])
async def test_gateway_204_of_a_node_has_no_body(http: httpx.AsyncClient, rest: bytes) -> None:
    async with run_node(respond_with(b"204 No Content", rest)) as node, run_gateway(node.url) as (base, _):
        response = await http.get(f"{base}{API_PREFIX}/rounds")
        assert (response.status_code, response.content) == (204, b"")
        assert not {"content-length", "content-type", "transfer-encoding"} & set(response.headers)
        assert (await http.get(f"{base}{API_PREFIX}/rounds")).status_code == 204


async def test_gateway_length_of_chunked_response_is_ignored(http: httpx.AsyncClient) -> None:
    chunked = b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    async with run_node(respond_with(b"200 OK", chunked)) as node, run_gateway(node.url) as (base, _):
        response = await http.get(f"{base}{API_PREFIX}/rounds")
    assert (response.status_code, response.content) == (200, b"{}")


async def test_gateway_full_of_slow_readers_frees_a_slot_for_another_client(http: httpx.AsyncClient) -> None:
    async with run_node(write_small) as node, run_gateway(node.url, max_concurrent=4, max_streams=4) as (base, gateway):
        node.writers_by_path[UNREAD] = endless = EndlessAnswer()
        async with open_unfinished_requests(base, UNREAD_REQUEST, *TWO_CLIENTS):
            await wait_until(lambda: endless.stalled == 4)
            assert len(gateway._active) == 4
            assert (await http.get(f"{base}{API_PREFIX}/rounds")).status_code == 200
            await wait_until(lambda: endless.stalled == len(gateway._active) == 3)
            assert (await http.post(f"{base}{API_PREFIX}/cast-vote", json={"some": "vote"})).status_code == 200


async def test_gateway_stalled_reads_hold_no_slot_and_the_longest_is_aborted(http: httpx.AsyncClient) -> None:
    async with (
        run_node(write_small) as node,
        run_gateway(node.url, max_concurrent=1, max_streams=3) as (base, gateway),
    ):
        node.writers_by_path[UNREAD] = endless = EndlessAnswer()
        async with contextlib.AsyncExitStack() as stack:
            for stalled in (1, 2):
                await stack.enter_async_context(open_unfinished_requests(base, UNREAD_REQUEST, "127.0.0.2"))
                await wait_until(lambda expected=stalled: endless.stalled == expected)  # type: ignore[misc]
            assert (await http.get(f"{base}{API_PREFIX}/rounds")).status_code == 200
            assert endless.stalled == len(gateway._active) == 2
            await stack.enter_async_context(open_unfinished_requests(base, UNREAD_REQUEST, "127.0.0.3"))
            await wait_until(lambda: endless.stalled == 3)
            assert (await http.get(f"{base}{API_PREFIX}/rounds")).status_code == 200
            await wait_until(lambda: endless.stalled == len(gateway._active) == 2)


@pytest.mark.parametrize(
    ("pending", "sources", "slow_seconds", "asked", "status"),
    [
        (f"GET {UNREAD}", ONE_SLOT_EACH, 60, "GET rounds", 503),
        (f"GET {UNREAD}", ONE_SLOT_EACH, 0, "GET rounds", 200),
        (f"GET {UNREAD}", ONE_SLOT_EACH, 0, "POST cast-vote", 200),
        (f"POST {CAST_VOTE}", TWO_CLIENTS, 0, "GET rounds", 503),
    ],
)
async def test_gateway_full_of_pending_requests_aborts_a_slow_read_or_refuses(
    http: httpx.AsyncClient, pending: str, sources: tuple[str, ...], slow_seconds: int, asked: str, status: int
) -> None:
    limits: dict[str, Any] = {"max_concurrent": len(sources), "slow_seconds": slow_seconds}
    request = f"{pending} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    async with run_node(write_small) as node, run_gateway(node.url, timeout=60, **limits) as (base, gateway):
        node.writers_by_path[pending.split()[1]] = write_nothing
        async with open_unfinished_requests(base, request, *sources):
            await wait_until(lambda: len(node.requests) == len(sources))
            method, path = asked.split()
            response = await http.request(method, f"{base}{API_PREFIX}/{path}", json={} if method == "POST" else None)
            assert response.status_code == status
            await wait_until(lambda: len(gateway._active) == len(sources) - (status == 200))


async def test_gateway_reads_leave_slots_to_transactions(http: httpx.AsyncClient) -> None:
    limits: dict[str, Any] = {"max_concurrent": 3, "max_reads": 2}
    async with run_node(write_small) as node, run_gateway(node.url, timeout=60, **limits) as (base, _):
        node.writers_by_path[UNREAD] = write_nothing
        async with open_unfinished_requests(base, UNREAD_REQUEST, *ONE_SLOT_EACH):
            await wait_until(lambda: len(node.requests) == 2)
            assert (await http.get(f"{base}{API_PREFIX}/rounds")).status_code == 503
            assert (await http.post(f"{base}{CAST_VOTE}", json={})).status_code == 200


@contextlib.asynccontextmanager
async def requested_pages(
    base: str, node: FakeNode, *heights: int
) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """Request pages of leaves from these heights, one after the other, each by a client of its own."""
    async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as stack:
        tasks = []
        for height in heights:
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
            tasks.append(group.create_task(client.get(f"{base}{LEAVES}?from_height={height}")))
            # The server reads connections in order: after this response it has read the page's request too.
            await client.get(f"{base}{API_PREFIX}/nothing")
        await wait_until(lambda: bool(node.requests))
        yield tasks


def requested_heights(node: FakeNode) -> list[int]:
    return [int(head.split()[1].rpartition(b"=")[2]) for head in node.requests if b"from_height" in head]


@pytest.mark.parametrize(("shared_bytes", "reads"), [(1 << 20, [1, 2, 4]), (1, [1, 2, 2, 4])])
async def test_gateway_pages_of_leaves_wait_for_their_turn_and_equal_ones_share_it(
    http: httpx.AsyncClient, shared_bytes: int, reads: list[int]
) -> None:
    answered = asyncio.Event()

    async def write_late(writer: asyncio.StreamWriter) -> None:
        await answered.wait()
        await write_small(writer)

    limits: dict[str, Any] = {"max_concurrent": 1, "max_leaves": 1, "max_waiting_leaves": 3}
    async with (
        run_node(write_small) as node,
        run_gateway(node.url, timeout=60, max_shared_bytes=shared_bytes, **limits) as (base, _),
    ):
        node.writers_by_path[f"{LEAVES}?from_height=1"] = write_late
        async with requested_pages(base, node, 1, 3, 2, 2, 4) as (first, displaced, *others):
            refused = await displaced
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            assert (await http.get(f"{base}{API_PREFIX}/rounds")).status_code == 200, "pages hold no slot of others"
            assert requested_heights(node) == [1]
            answered.set()
            responses = [await task for task in (first, *others)]
            assert [(each.status_code, each.content) for each in responses] == [(200, b"{}")] * 4
        assert requested_heights(node) == reads


async def test_gateway_shared_page_of_leaves_is_read_once_though_its_reader_leaves() -> None:
    answered = asyncio.Event()

    async def write_late(writer: asyncio.StreamWriter) -> None:
        await answered.wait()
        await write_small(writer)

    async with run_node(write_small) as node, run_gateway(node.url, timeout=60, max_leaves=1) as (base, gateway):
        node.writers_by_path[f"{LEAVES}?from_height=1"] = write_nothing
        node.writers_by_path[f"{LEAVES}?from_height=2"] = write_late
        async with requested_pages(base, node, 1, 2, 2, 2) as (first, reader, left, other):
            first.cancel()
            await wait_until(lambda: requested_heights(node) == [1, 2])
            reader.cancel()
            left.cancel()
            await wait_until(lambda: len(gateway._active) == 2)
            answered.set()
            assert (await other).status_code == 200
        assert requested_heights(node) == [1, 2]


async def test_gateway_shared_page_of_leaves_ends_when_all_have_left() -> None:
    async with run_node(write_small) as node, run_gateway(node.url, timeout=60, max_leaves=1) as (base, gateway):
        node.write_response = write_nothing
        async with requested_pages(base, node, 1, 2, 2) as (first, reader, other):
            first.cancel()
            await wait_until(lambda: requested_heights(node) == [1, 2])
            reader.cancel()
            other.cancel()
            await wait_until(lambda: not gateway._active)


async def test_gateway_page_of_leaves_that_takes_long_is_aborted_for_another(http: httpx.AsyncClient) -> None:
    limits: dict[str, Any] = {"max_leaves": 1, "slow_leaves_seconds": 0}
    async with run_node(write_small) as node, run_gateway(node.url, timeout=60, **limits) as (base, _):
        node.writers_by_path[LEAVES] = write_nothing
        async with open_unfinished_requests(base, f"GET {LEAVES} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), "127.0.0.2"):
            await wait_until(lambda: len(node.requests) == 1)
            assert (await http.get(f"{base}{LEAVES}?from_height=1")).status_code == 200
