"""HTTP servers over real sockets: slow and large heads, connection limits, control socket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import resource
import socket
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from ipaddress import ip_network
from pathlib import Path

import pytest
import uvloop
from starlette.routing import Route
from structlog.testing import capture_logs

from helper.errors import HelperError
from helper.ingest.admission import MAX_IN_FLIGHT, MAX_WAITING
from helper.server.connection_limits import (
    KERNEL_UNSENT_BYTES,
    MAX_CLOSING,
    RECEIVE_BUFFER_BYTES,
    SEND_BUFFER_BYTES,
    UNIX_SEND_BUFFER_BYTES,
    ConnectionEvictor,
    ConnectionLimits,
    ConnectionProgress,
)
from helper.server.edge import Edge, json_application
from helper.server.gateway_routes import GatewayLimits
from helper.server.listening import (
    GROUP_MODE,
    RESERVED_FILE_DESCRIPTORS,
    Server,
    bind_tcp,
    connection_limits,
    listen_unix,
)
from helper.server.protocol import Connection
from tests.support.fakes import wait_until
from tests.unit.server.server_fixtures import (
    HELLO_REQUEST,
    MEDIUM_BYTES,
    PATIENCE_SECONDS,
    RawClient,
    hello,
    parse_error,
    run_server,
    track_protocols,
)

SHORT_TIMEOUT = ConnectionLimits(head_seconds=0.2)
PATIENT_WITH_ROOM = ConnectionLimits(head_seconds=60)
PATIENT = ConnectionLimits(head_seconds=60, max_head_bytes=4096, max_connections=3)


@pytest.fixture
def received_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Number of bytes that the server has received of incomplete requests."""
    sizes: list[int] = []
    add_pending = ConnectionEvictor.add_pending

    def record(self: ConnectionEvictor, connection: ConnectionProgress, size: int, now: float) -> None:
        add_pending(self, connection, size, now)
        sizes.append(size)

    monkeypatch.setattr(ConnectionEvictor, "add_pending", record)
    return lambda: sum(sizes)


FEW_CONNECTIONS = ConnectionLimits(head_seconds=60, max_connections=2, eviction_seconds=0)
PARTIAL_BODY = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\no"
PARTIAL_HEAD = b"GET /hello HTTP/1.1\r\nX: " + b"x" * 600


@pytest.mark.rule("N8")
@pytest.mark.rule("N29")
@pytest.mark.parametrize(
    ("slow", "statuses"), [(b"", []), (PARTIAL_HEAD[:9], [503]), (PARTIAL_BODY, [503])], ids=["silent", "head", "body"]
)
async def test_connections_full_closes_slowest(
    slow: bytes, statuses: list[int], received_bytes: Callable[[], int]
) -> None:
    async with run_server(FEW_CONNECTIONS, Counter()) as port:
        slowest = await RawClient.connect(port, slow)
        faster = await RawClient.connect(port, PARTIAL_HEAD)
        await wait_until(lambda: received_bytes() == len(slow) + len(PARTIAL_HEAD))
        newest = await RawClient.connect(port)
        assert await newest.request() == b"hello", "it has the address of the other clients"
        response = await slowest.read_rest()
        assert [parse_error(part)[0] for part in [response] if part] == statuses
        assert await faster.request(b"\r\nHost: x\r\n\r\n") == b"hello"
        for client in (faster, newest):
            client.writer.close()


async def test_connections_full_closes_idle_before_slow_and_idle_of_proxy() -> None:
    limits = replace(FEW_CONNECTIONS, max_connections=3)
    async with run_server(limits, Counter(), proxies=[ip_network("127.0.0.2/32")]) as port:
        slow = await RawClient.connect(port, PARTIAL_BODY)
        proxy = await RawClient.connect(port, source="127.0.0.2")
        assert await proxy.request() == b"hello"
        idle = await RawClient.connect(port)
        assert await idle.request() == b"hello"
        newest = await RawClient.connect(port)
        assert await newest.request() == b"hello"
        assert await idle.read_rest() == b""
        assert await slow.request(b"o" * 1999) == b"o" * 2000
        assert await proxy.request() == b"hello"
        for client in (slow, proxy, newest):
            client.writer.close()


async def test_connections_full_of_clients_that_always_begin_a_request_serves_new_connection(
    received_bytes: Callable[[], int],
) -> None:
    async with run_server(replace(FEW_CONNECTIONS, eviction_seconds=60), Counter()) as port:
        holders = [await RawClient.connect(port) for _ in range(2)]
        for holder in holders:
            before = received_bytes()
            assert await holder.request(HELLO_REQUEST + PARTIAL_HEAD) == b"hello"
            await wait_until(partial(lambda size: received_bytes() > size, before))
        newest = await RawClient.connect(port)
        assert await newest.request() == b"hello"
        assert parse_error(await holders[0].read_rest())[0] == 503
        for client in (holders[1], newest):
            client.writer.close()


async def test_connections_full_of_recent_requests_refuses_new_connection() -> None:
    limits = replace(FEW_CONNECTIONS, eviction_seconds=60)
    async with run_server(limits, Counter()) as port:
        clients = [await RawClient.connect(port, PARTIAL_HEAD) for _ in range(2)]
        refusal = await (await RawClient.connect(port)).read_rest()
        assert parse_error(refusal)[0] == 503
        assert b"retry-after: 2\r\n" in refusal
        sending = socket.create_connection(("127.0.0.1", port))
        sending.sendall(HELLO_REQUEST)  # before the server accepts it, as a proxy does
        refused = RawClient(*await asyncio.open_connection(sock=sending))
        assert parse_error(await refused.read_rest())[0] == 503, "it is not reset"
        for client in clients:
            assert await client.request(b"\r\nHost: x\r\n\r\n") == b"hello"
            client.writer.close()
            await client.writer.wait_closed()
        reconnected = await RawClient.connect(port)
        assert await reconnected.request() == b"hello", "a closed connection has left its place"
        reconnected.writer.close()


async def test_connection_refused_for_its_head_is_not_evicted(received_bytes: Callable[[], int]) -> None:
    async with run_server(FEW_CONNECTIONS, Counter()) as port:
        refused = await RawClient.connect(port, b"no HTTP\r\n\r\n")  # stays open for a second after its response
        slow = await RawClient.connect(port, PARTIAL_BODY)
        await wait_until(lambda: received_bytes() == len(PARTIAL_BODY))
        newest = await RawClient.connect(port)
        assert await newest.request() == b"hello"
        assert parse_error(await refused.read_rest())[0] == 400
        assert parse_error(await slow.read_rest())[0] == 503
        newest.writer.close()


async def test_connection_that_leaves_a_short_response_unread_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = asyncio.Event()
    connection_lost = Connection.connection_lost

    def note_lost(self: Connection, exc: Exception | None) -> None:
        connection_lost(self, exc)
        lost.set()

    monkeypatch.setattr(Connection, "connection_lost", note_lost)
    limits = ConnectionLimits(head_seconds=60, stalled_seconds=0.2)
    async with run_server(limits, proxies=[ip_network("127.0.0.2/32")]) as port:
        proxy = await connect_stalled(port, source="127.0.0.2")
        client = await connect_stalled(port)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await lost.wait()
            assert await count_bytes(proxy) > MEDIUM_BYTES, "its clients may read slowly"
        for connection in (client, proxy):
            connection.close()


async def test_connection_refused_before_request_is_counted_and_readable_in_browsers() -> None:
    refusals = Counter[int]()
    async with run_server(SHORT_TIMEOUT, refusals) as port:
        assert await (await RawClient.connect(port)).read_rest() == b"", "without a request there is no response"
        responses = [await (await RawClient.connect(port, b"GET /hel")).read_rest()]
    async with run_server(PATIENT, refusals) as port:
        for prefix in (b"no HTTP\r\n\r\n", HELLO_REQUEST[:-2] + b"X: " + b"a" * 5000):
            responses.append(await (await RawClient.connect(port, prefix)).read_rest())
        silent = [await RawClient.connect(port) for _ in range(3)]
        responses.append(await (await RawClient.connect(port)).read_rest())
        for client in silent:
            client.writer.close()
    assert [parse_error(response)[0] for response in responses] == [503, 400, 431, 503]
    assert all(b"\r\naccess-control-allow-origin: *\r\n" in response for response in responses)
    assert refusals == {503: 2, 400: 1, 431: 1}, "each one is counted"


@pytest.mark.parametrize("expect", ["100-continue", "other,\t100-Continue", "100-continue\r\nExpect: other"])
@pytest.mark.parametrize(("path", "body"), [("hello", b""), ("hello", b"x" * 9), ("echo", b"x" * 9)])
async def test_connection_closes_after_final_response_to_expect_100(expect: str, path: str, body: bytes) -> None:
    head = f"POST /{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: {expect}\r\n\r\n"
    async with run_server(PATIENT) as port:
        client = await RawClient.connect(port, head.encode() + body + HELLO_REQUEST)
        response = await client.read_rest()
    assert b"\r\nconnection: close\r\n" in response, "a proxy must not reuse the connection"
    assert len(re.findall(rb"HTTP/1.1 [2-5]", response)) == 1, "the next request may be read as the body"


async def test_refusal_is_readable_while_body_is_on_its_way_despite_expect_100() -> None:
    head = b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    async with run_server(PATIENT) as port:
        client = await RawClient.connect(port)
        assert b"not allowed" in await client.request(head)
        client.writer.write(b"x" * 9 + HELLO_REQUEST)
        assert await client.reader.read() == b"", "neither a reset nor a second response"
        client.writer.close()


async def test_connection_sends_no_100_response_to_http_1_0() -> None:
    head = b"POST /echo HTTP/1.0\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    async with run_server(PATIENT) as port:
        response = await (await RawClient.connect(port, head + b"x" * 9)).read_rest()
    assert response.startswith(b"HTTP/1.1 200 OK\r\n"), "it would be taken for the final one"


async def test_connection_closed_is_freed_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    protocols = track_protocols(monkeypatch)
    async with run_server(PATIENT) as port:
        gc.disable()
        try:
            for _ in range(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(HELLO_REQUEST)
                await reader.readuntil(b"\r\n\r\nhello")
                assert len(protocols) == 1
                writer.close()
                await wait_until(lambda: not protocols)
        finally:
            gc.enable()


@pytest.mark.parametrize(
    "start",
    [
        b"GET /hello HTTP/1.1\r\n",
        b"GET /hello HTTP/1.1\r\nX: ",
        b"GET /",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n",
    ],
)
@pytest.mark.parametrize("chunk", [b"a" * 1024, b"X: " + b"a" * 1000 + b"\r\n"])
async def test_connection_endless_head_is_refused_at_limit(start: bytes, chunk: bytes) -> None:
    async with run_server(PATIENT) as port:
        client = await RawClient.connect(port, start)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 100 << 20:
                client.writer.write(chunk * 16)
                await client.writer.drain()
                sent += len(chunk) * 16
        assert sent < 20 << 20, "the part that fits into the kernel's buffers"
        await client.read_rest()


async def test_connection_large_head_is_431_only_over_limit() -> None:
    async with run_server(PATIENT) as port:
        large = await RawClient.connect(port, HELLO_REQUEST[:-2] + b"X: " + b"a" * 5000 + b"\r\n\r\n")
        status, response = parse_error(await large.read_rest())
        assert (status, response["error"]) == (431, "headers: are larger than 4096 bytes")
        client = await RawClient.connect(port)
        assert await client.request(HELLO_REQUEST[:-2] + b"X: " + b"a" * 3000 + b"\r\n\r\n") == b"hello"
        assert await client.request(HELLO_REQUEST[:-2] + b"X: " + b"a" * 3000 + b"\r\n\r\n") == b"hello", (
            "each request gets its own response"
        )
        body = b"b" * 100_000
        post = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
        assert await client.request(post + body) == body, "a body does not count as a head"
        client.writer.close()


# Server shutdown


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_server_stop_responds_503_to_running_requests_without_error_log(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("helper.server.listening.STOP_GRACE_SECONDS", 0.2)
    unfinished = {
        "waiting for a body": b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\no",
        "processing": b"GET /pause/3600 HTTP/1.1\r\nHost: x\r\n\r\n",
        "pipelined": b"GET /pause/3600 HTTP/1.1\r\nHost: x\r\n\r\n" * 5,
        "no request": b"",
        "half a head": HELLO_REQUEST[:-9],
    }

    async def test() -> None:
        async with run_server(PATIENT_WITH_ROOM) as port:
            clients = {name: await RawClient.connect(port, request) for name, request in unfinished.items()}
            streaming = await RawClient.connect(port, b"GET /endless/stream HTTP/1.1\r\nHost: x\r\n\r\n")
            await streaming.reader.readuntil(b"piece")
            stalled = await RawClient.connect(port, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            await stalled.reader.readuntil(b"\r\n\r\n")
            stalled.writer.transport.pause_reading()  # type: ignore[attr-defined] # a WriteTransport to its type
            other = await RawClient.connect(port)
            assert await other.request() == b"hello", "the server has read the earlier data"
        for client in clients.values():
            async with asyncio.timeout(PATIENCE_SECONDS):
                response = await client.read_rest()
            status, error = parse_error(response)
            assert (status, error["status"]) == (503, "error")
            head = response.lower().split(b"\r\n\r\n")[0].split(b"\r\n")
            assert {b"connection: close", b"retry-after: 2"} <= set(head)
        for client in (streaming, stalled, other):
            client.writer.transport.abort()

    with capture_logs() as lines, asyncio.Runner(loop_factory=loop) as runner:
        runner.run(test())
    assert [line for line in lines if line["log_level"] != "debug"] == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_server_stop_answers_connections_that_were_opened_before(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def test() -> None:
        server, listener = Server(Edge(json_application([Route("/hello", hello)]))), bind_tcp("127.0.0.1", 0)
        port = listener.getsockname()[1]
        task = asyncio.create_task(server.serve([listener]))
        earlier = {"new": b"", "half a head": HELLO_REQUEST[:20], "second head": HELLO_REQUEST + HELLO_REQUEST[:20]}
        clients = {name: await RawClient.connect(port, begin) for name, begin in earlier.items()}
        await clients["second head"].reader.readuntil(b"hello")
        # in the iteration of the event loop that stops the server, so that they wait to be accepted
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        server.stop()
        await wait_until(lambda: listener.fileno() < 0)
        for name, client in clients.items():
            client.writer.write(HELLO_REQUEST[20 if "head" in name else 0 :])
        for connection in waiting:
            connection.sendall(HELLO_REQUEST)
            clients[str(connection)] = RawClient(*await asyncio.open_connection(sock=connection))
        for client in clients.values():
            response = await client.read_rest()
            assert response.startswith(b"HTTP/1.1 200 OK\r\n")
            assert response.endswith(b"\r\nconnection: close\r\n\r\nhello")
        await task
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(test(), PATIENCE_SECONDS))


@pytest.mark.parametrize("iterations", range(4))
def test_idle_server_that_stops_answers_a_connection_that_is_being_accepted(iterations: int) -> None:
    async def test() -> None:
        server, listener = Server(Edge(json_application([Route("/hello", hello)]))), bind_tcp("127.0.0.1", 0)
        task = asyncio.create_task(server.serve([listener]))
        await wait_until(lambda: server.started)
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(HELLO_REQUEST)
            for _ in range(iterations):
                await asyncio.sleep(0)
            server.stop()
            await task
            client.setblocking(False)
            assert client.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n"), "the server has not ended before its response"

    # asyncio's own loop drops such a connection: its transport cannot be created after the listener's end
    uvloop.run(asyncio.wait_for(test(), PATIENCE_SECONDS))


async def test_server_that_stops_answers_requests_of_a_proxy_before_it_closes() -> None:
    app = json_application([Route("/hello", hello)])
    server = Server(Edge(app), trusted_networks=[ip_network("127.0.0.2/32")])
    listener = bind_tcp("127.0.0.1", 0)
    port = listener.getsockname()[1]
    task = asyncio.create_task(server.serve([listener]))
    idle = await RawClient.connect(port, source="127.0.0.2")
    assert await idle.request() == b"hello"
    server.stop()
    await wait_until(lambda: server.is_stopping)
    idle.writer.write(HELLO_REQUEST)
    for client in (idle, await RawClient.connect(port, HELLO_REQUEST, source="127.0.0.2")):
        assert (await client.read_rest()).endswith(b"\r\nconnection: close\r\n\r\nhello")
    await task


def test_server_that_stops_answers_a_request_that_it_has_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with run_server(PATIENT) as port:
            client = await RawClient.connect(port)
            assert await client.request() == b"hello"
            connection = client.writer.get_extra_info("socket").fileno()

            def send_request(listening: socket.socket) -> tuple[()]:
                listening.close()
                os.write(connection, HELLO_REQUEST)
                return ()

            monkeypatch.setattr("helper.server.listening._accept_last", send_request)
        assert (await client.read_rest()).endswith(b"hello")

    uvloop.run(test())


def test_waiting_connections_are_accepted_in_few_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 64
    accepted: list[int] = []
    connection_made = Connection.connection_made
    iteration = 0

    def record(self: Connection, transport: asyncio.BaseTransport) -> None:
        accepted.append(iteration)
        connection_made(self, transport)

    async def connect() -> None:
        nonlocal iteration
        async with run_server(PATIENT_WITH_ROOM) as port:
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
            while len(accepted) < count:
                iteration += 1
                await asyncio.sleep(0)
            for client in clients:
                client.close()
        with pytest.raises(ConnectionRefusedError):  # every copy of the listening socket is closed
            socket.create_connection(("127.0.0.1", port))

    monkeypatch.setattr(Connection, "connection_made", record)
    uvloop.run(connect())  # asyncio's own loop accepts all waiting connections in one iteration
    assert accepted[-1] - accepted[0] < count / 4


def test_connections_and_the_gateway_leave_open_files_to_the_database_and_the_nodes() -> None:
    assert RESERVED_FILE_DESCRIPTORS - MAX_CLOSING - GatewayLimits().max_connections >= 100


def test_shares_on_all_connections_are_processed_at_once() -> None:
    assert ConnectionLimits().max_connections + MAX_WAITING <= MAX_IN_FLIGHT


def test_connection_limit_fits_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        limits = connection_limits()
        now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert limits.max_connections == min(4096, now - RESERVED_FILE_DESCRIPTORS)
        assert now == 4096 + RESERVED_FILE_DESCRIPTORS or now == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# The control socket


def test_unix_listener_socket_is_private_and_deleted(tmp_path: Path) -> None:
    path = tmp_path / "helper.sock"
    with listen_unix(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
    assert not path.exists()


def test_unix_listener_group_mode_does_not_depend_on_umask(tmp_path: Path) -> None:
    path = tmp_path / "wallets.sock"
    umask = os.umask(0o077)
    try:
        with listen_unix(path, mode=GROUP_MODE):
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
    finally:
        os.umask(umask)


def test_unix_listener_error_names_socket_and_setting(tmp_path: Path) -> None:
    listening = listen_unix(tmp_path / "no" / "x", name="socket of the wallet API", setting="[server] unix_socket")
    with pytest.raises(HelperError, match="cannot create the socket of the wallet API") as caught, listening:
        pass
    assert "[server] unix_socket" in caught.value.advice


def test_unix_listener_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "helper.sock"
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(path))
    with listen_unix(path), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))


def test_unix_listener_socket_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "helper.sock"
    with listen_unix(path):
        with pytest.raises(HelperError, match="another process is listening") as caught, listen_unix(path):
            pass
        assert "[operator] socket" in caught.value.advice
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))


def test_unix_listener_deletes_only_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "helper.sock"
    with listen_unix(path):
        path.rename(tmp_path / "moved")
        path.touch()
    assert path.exists()


def test_unix_listener_other_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "helper.sock"
    path.write_text("mine")
    with pytest.raises(HelperError, match="cannot create the control socket"), listen_unix(path):
        pass
    assert path.read_text() == "mine"


@pytest.mark.parametrize(("size", "requests"), [(8 << 20, 1), (53_000, 8)])
async def test_unread_responses_are_limited(size: int, requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 8 * RECEIVE_BUFFER_BYTES
    lost, most_unsent = asyncio.Event(), 0
    connection_lost, run = Connection.connection_lost, Connection.run

    def note_lost(self: Connection, exc: Exception | None) -> None:
        lost.set()
        connection_lost(self, exc)

    def note_run(self: Connection) -> None:
        nonlocal most_unsent
        most_unsent = max(
            most_unsent, sum(each.transport.get_write_buffer_size() for each in self.listener.connections)
        )
        assert not self.transport.get_write_buffer_size(), "a response would wait that is not counted"
        run(self)

    monkeypatch.setattr(Connection, "connection_lost", note_lost)
    monkeypatch.setattr(Connection, "run", note_run)
    monkeypatch.setattr("tests.unit.server.server_fixtures.MEDIUM_BYTES", size)
    monkeypatch.setattr("helper.server.protocol.MAX_HELD_BYTES", limit)
    limits = ConnectionLimits(head_seconds=60, stalled_seconds=60)
    async with contextlib.AsyncExitStack() as closing, run_server(limits) as port:
        stalled = [await connect_stalled(port, requests) for _ in range(12)]
        for connection in stalled:
            closing.callback(connection.close)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await lost.wait()
            counts = [await count_bytes(connection) for connection in stalled]
    assert min(counts) < size * requests < max(counts), "some were aborted, and not all"
    assert most_unsent <= limit


async def test_clients_that_read_nothing_do_not_end_a_slow_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.server.protocol.MAX_HELD_BYTES", 5 * RECEIVE_BUFFER_BYTES)
    loop, received = asyncio.get_running_loop(), 0
    async with contextlib.AsyncExitStack() as closing, run_server(ConnectionLimits()) as port:
        slow = await connect_stalled(port)
        closing.callback(slow.close)
        for number in range(1, 13):
            closing.callback((await connect_stalled(port)).close)
            while received < number << 19:
                received += len(await loop.sock_recv(slow, 1 << 16))
        assert received + await count_bytes(slow) > MEDIUM_BYTES


async def test_requests_behind_the_current_one_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.server.protocol.MAX_HELD_BYTES", 5 * RECEIVE_BUFFER_BYTES)
    monkeypatch.setattr("helper.server.listening.STOP_GRACE_SECONDS", 0)
    async with run_server(ConnectionLimits()) as port, contextlib.AsyncExitStack() as closing:
        pipelines = []
        for _ in range(12):  # each of two requests, of which the first is not answered
            client = await RawClient.connect(port, b"GET /endless/wait HTTP/1.1\r\nHost: x\r\n\r\n" + HELLO_REQUEST)
            closing.callback(client.writer.transport.abort)
            pipelines.append(asyncio.create_task(client.read_rest()))
        await wait_until(lambda: sum(each.done() for each in pipelines) == 8)
        other = await RawClient.connect(port)
        closing.callback(other.writer.transport.abort)
        assert await other.request() == b"hello"
        assert sum(each.done() for each in pipelines) == 8, "the newest stay open"


@pytest.mark.parametrize("is_unix", [False, True])
async def test_connection_kernel_buffers_are_bounded(
    is_unix: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    connection_made = Connection.connection_made

    def note_size(self: Connection, transport: asyncio.BaseTransport) -> None:
        connection_made(self, transport)
        sock = transport.get_extra_info("socket")
        sizes.extend(sock.getsockopt(socket.SOL_SOCKET, buffer) for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF))
        if not is_unix:
            sizes.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT))

    monkeypatch.setattr(Connection, "connection_made", note_size)
    with contextlib.ExitStack() as closing:
        if is_unix:
            listener = closing.enter_context(listen_unix(tmp_path / "x"))
        else:
            listener = closing.enter_context(contextlib.closing(bind_tcp("127.0.0.1", 0)))
        server = Server(Edge(json_application([])))
        task = asyncio.create_task(server.serve([listener]))
        with socket.socket(listener.family) as client:
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, listener.getsockname())
            await asyncio.get_running_loop().sock_sendall(client, HELLO_REQUEST)
            assert await asyncio.get_running_loop().sock_recv(client, 1)
        server.stop()
        await task
    send_buffer = UNIX_SEND_BUFFER_BYTES if is_unix else SEND_BUFFER_BYTES
    assert sizes == [2 * send_buffer, 2 * RECEIVE_BUFFER_BYTES] + [KERNEL_UNSENT_BYTES] * (not is_unix)


async def connect_stalled(port: int, requests: int = 1, source: str = "127.0.0.1") -> socket.socket:
    """Request `/medium` and do not read the responses."""
    connection = socket.socket()
    connection.bind((source, 0))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", port))
    request = b"GET /medium HTTP/1.1\r\nHost: x\r\n"
    await loop.sock_sendall(connection, (request + b"\r\n") * (requests - 1) + request + b"Connection: close\r\n\r\n")
    return connection


async def count_bytes(connection: socket.socket) -> int:
    count = 0
    with contextlib.suppress(ConnectionResetError):
        while data := await asyncio.get_running_loop().sock_recv(connection, 1 << 20):
            count += len(data)
    return count
