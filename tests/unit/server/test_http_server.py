"""HTTP servers over real sockets: slow and large heads, connection limits, control socket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import resource
import socket
import stat
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest
import uvloop
from structlog.testing import capture_logs

from helper.clock import SystemClock
from helper.errors import HelperError
from helper.server.connection import BoundedProtocol
from helper.server.connection_limits import ConnectionLimits
from helper.server.http_server import (
    MIN_CONNECTIONS,
    SPARE_FILES,
    connection_limit,
    connection_limits,
    unix_listener,
)
from tests.unit.server.server_fixtures import ASK, PATIENCE, Client, error_of, serving

pytestmark = pytest.mark.anyio

SOON = ConnectionLimits(head_seconds=0.2, head_bytes=4096, connections=3)
PATIENT_WITH_ROOM = ConnectionLimits(head_seconds=60)
PATIENT = ConnectionLimits(head_seconds=60, head_bytes=4096, connections=3)


async def test_server_response_has_date() -> None:
    async with serving(PATIENT) as port:
        client = await Client.connect(port, ASK)
        head = await client.reader.readuntil(b"\r\n\r\n")
        (date,) = [line[6:].decode() for line in head.split(b"\r\n") if line.startswith(b"date: ")]
        assert abs(parsedate_to_datetime(date).timestamp() - SystemClock().now()) < PATIENCE
        client.writer.close()


async def test_connection_without_data_is_closed() -> None:
    async with serving(SOON) as port:
        assert await (await Client.connect(port)).rest() == b""


async def test_connection_partial_head_times_out() -> None:
    async with serving(SOON) as port:
        client = await Client.connect(port, ASK[:20])
        status, answer = error_of(await client.rest())
        assert (status, answer["status"]) == (408, "error")


async def test_connection_slow_head_times_out() -> None:
    async with serving(SOON) as port:
        client = await Client.connect(port, b"GET /hello HTTP/1.1\r\n")

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    client.writer.write(b"X: y\r\n")
                    await client.writer.drain()
                    await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        told = await client.rest()
        dripping.cancel()
        assert told == b"" or error_of(told)[0] == 408


@pytest.mark.parametrize("more", [b"\r\n", b"G", ASK[:-2]])
async def test_connection_partial_second_request_times_out(more: bytes) -> None:
    async with serving(SOON) as port:
        client = await Client.connect(port)
        assert await client.ask() == b"hello"
        client.writer.write(more)
        assert error_of(await client.rest())[0] == 408


async def test_connection_unread_body_times_out() -> None:
    async with serving(SOON) as port:
        client = await Client.connect(port)
        assert await client.ask(b"GET /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n") == b"hello"
        client.writer.write(b"1")
        assert await client.rest() == b""


async def test_connection_slow_head_and_body_times_out() -> None:
    slow = ConnectionLimits(head_seconds=60, request_seconds=0.3)
    async with serving(slow) as port:
        client = await Client.connect(port, b"POST /echo HTTP/1.1\r\n")
        for piece in (b"Host: x\r\n", b"Content-Length: 9\r\n\r\n", b"1"):
            client.writer.write(piece)
        assert await client.rest() == b""


class Known:
    """Identifies each client by its address."""

    def __init__(self) -> None:
        self.paid: list[bytes] = []
        self.refusals: list[int] = []

    def who(self, peer: str | None) -> bytes | None:
        return peer.encode() if peer else None

    def pay(self, client: bytes) -> None:
        self.paid.append(client)

    def refused(self, status: int) -> None:
        self.refusals.append(status)


async def test_connections_of_one_client_are_limited() -> None:
    limits = ConnectionLimits(head_seconds=60, connections=5, connections_each=2)
    async with serving(limits, Known()) as port:
        mine = [await Client.connect(port) for _ in range(2)]
        for client in mine:
            assert await client.ask() == b"hello"
        told = await (await Client.connect(port)).rest()
        assert error_of(told)[0] == 429
        assert b"retry-after: 2\r\n" in told
        other = await Client.connect(port, source="127.0.0.2")
        assert await other.ask() == b"hello"
        mine.pop().writer.close()
        assert await mine[0].ask() == b"hello"
        again = await Client.connect(port)
        assert await again.ask() == b"hello", "who hangs up makes room"
        for client in (*mine, other, again):
            client.writer.close()


async def test_connections_full_closes_longest_idle_of_busiest_client() -> None:
    limits = ConnectionLimits(head_seconds=60, connections=4, connections_each=3)
    async with serving(limits, Known()) as port:
        at_work = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
        idle, slow, begun = [await Client.connect(port) for _ in range(3)]
        assert await idle.ask() == b"hello"
        slow.writer.write(at_work + b"o")
        begun.writer.write(ASK[:-2])
        one = await Client.connect(port, source="127.0.0.2")
        assert await one.ask() == b"hello", "there is room for a fourth"

        two = await Client.connect(port, source="127.0.0.3")
        assert await two.ask() == b"hello", "and the fifth is another client's"
        assert await idle.rest() == b""
        three = await Client.connect(port, source="127.0.0.4")
        assert await three.ask() == b"hello"
        assert await slow.rest() == b"", "a body that does not come is waiting too"
        assert error_of(await (await Client.connect(port, source="127.0.0.5")).rest())[0] == 503, "nobody has more"
        begun.writer.write(b"\r\n")
        for client in (begun, one, two, three):
            assert await client.ask() == b"hello"
            client.writer.close()


async def test_connection_refused_before_request_is_charged_and_counted() -> None:
    known = Known()
    async with serving(SOON, known) as port:
        for begun in (b"GET /hel", b"no HTTP\r\n\r\n", ASK[:-2] + b"X: " + b"a" * 5000):
            error_of(await (await Client.connect(port, begun)).rest())
        assert known.paid == [b"127.0.0.1"] * 3
        told = [await client.rest() for client in [await Client.connect(port) for _ in range(4)]]
        assert sorted(map(bool, told)) == [False, False, False, True]
        assert len(known.paid) == 3, "to say nothing, or to come when it is full, is no offence"
        assert known.refusals == [408, 400, 431, 503], "and each is counted"


async def test_connection_refused_expect_100_body_may_be_omitted() -> None:
    async with serving(PATIENT) as port:
        client = await Client.connect(port)
        head = b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
        assert json.loads(await client.ask(head))["error"] == "method not allowed"
        assert await client.rest() == b"", "the next request would be taken for the body"


async def test_connection_pipelined_request_outlives_earlier_idle_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the first is answered before its end, which sets that time
    monkeypatch.setattr("helper.server.http_server.KEEP_ALIVE", 1)
    async with serving(PATIENT) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nxx")
        await reader.readuntil(b"\r\n\r\nhello")
        asks = [f"GET /pause/{seconds} HTTP/1.1\r\nHost: x\r\n\r\n" for seconds in (0.1, 1.5)]
        writer.write(f"xx{''.join(asks)}".encode())
        assert (await reader.read(-1)).count(b"\r\n\r\npaused") == 2
        writer.close()


async def test_connection_closed_is_freed_immediately() -> None:
    def there() -> int:
        return sum(isinstance(one, BoundedProtocol) for one in gc.get_objects())

    async with serving(PATIENT) as port:
        before = there()
        gc.disable()
        try:
            for _ in range(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(ASK)
                await reader.readuntil(b"\r\n\r\nhello")
                assert there() == before + 1
                writer.close()
                while there() > before:
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


async def test_connection_idle_outlives_head_timeout() -> None:
    async with serving(SOON) as port:
        idle = await Client.connect(port)
        assert await idle.ask() == b"hello"
        silent = await Client.connect(port)
        assert await silent.rest() == b"", "time for a head has passed"
        assert await idle.ask() == b"hello"
        late_body = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
        idle.writer.write(late_body)
        assert await (await Client.connect(port)).rest() == b""
        assert await idle.ask(b"ok") == b"ok", "a body has a time of its own"
        idle.writer.close()


@pytest.mark.parametrize(
    "start",
    [
        b"GET /hello HTTP/1.1\r\n",
        b"GET /hello HTTP/1.1\r\nX: ",
        b"GET /",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n",
    ],
)
@pytest.mark.parametrize("piece", [b"a" * 1024, b"X: " + b"a" * 1000 + b"\r\n"])
async def test_connection_endless_head_is_refused_at_limit(start: bytes, piece: bytes) -> None:
    async with serving(PATIENT) as port:
        client = await Client.connect(port, start)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 100 << 20:
                client.writer.write(piece * 16)
                await client.writer.drain()
                sent += len(piece) * 16
        assert sent < 20 << 20, "what fits into the kernel's buffers"
        await client.rest()


async def test_connection_large_head_is_431_only_over_limit() -> None:
    async with serving(PATIENT) as port:
        large = await Client.connect(port, ASK[:-2] + b"X: " + b"a" * 5000 + b"\r\n\r\n")
        status, answer = error_of(await large.rest())
        assert (status, answer["error"]) == (431, "headers: are larger than 4096 bytes")
        client = await Client.connect(port)
        assert await client.ask(ASK[:-2] + b"X: " + b"a" * 3000 + b"\r\n\r\n") == b"hello"
        assert await client.ask(ASK[:-2] + b"X: " + b"a" * 3000 + b"\r\n\r\n") == b"hello", "each its own"
        body = b"b" * 100_000
        post = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
        assert await client.ask(post + body) == body, "a body is no head"
        client.writer.close()


async def test_connection_invalid_http_is_400_as_json() -> None:
    async with serving(PATIENT) as port:
        client = await Client.connect(port, b"\x16\x03\x01 hello\r\n\r\n")
        assert error_of(await client.rest())[0] == 400


async def test_connections_over_limit_are_refused_and_others_served() -> None:
    async with serving(PATIENT) as port:
        clients = [await Client.connect(port) for _ in range(3)]
        for client in clients:
            assert await client.ask() == b"hello"
        status, _ = error_of(await (await Client.connect(port)).rest())
        assert status == 503
        for client in clients:
            assert await client.ask() == b"hello"
        clients[0].writer.close()
        await clients[0].writer.wait_closed()
        assert await clients[1].ask() == b"hello"
        again = await Client.connect(port)
        assert await again.ask() == b"hello"
        for client in [again, *clients[1:]]:
            client.writer.close()


# The stop of the server


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_server_stop_answers_running_requests_with_503_without_error_log(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("helper.server.http_server.STOP_GRACE", 0.2)
    unfinished = {
        "waiting for a body": b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\no",
        "at work": b"GET /pause/3600 HTTP/1.1\r\nHost: x\r\n\r\n",
        "pipelined": b"GET /pause/3600 HTTP/1.1\r\nHost: x\r\n\r\n" * 5,
    }

    async def test() -> None:
        async with serving(PATIENT_WITH_ROOM) as port:
            clients = {name: await Client.connect(port, request) for name, request in unfinished.items()}
            streaming = await Client.connect(port, b"GET /endless/stream HTTP/1.1\r\nHost: x\r\n\r\n")
            await streaming.reader.readuntil(b"piece")
            deaf = await Client.connect(port, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            await deaf.reader.readuntil(b"\r\n\r\n")
            deaf.writer.transport.pause_reading()  # type: ignore[attr-defined] # a WriteTransport to its type
            other = await Client.connect(port)
            assert await other.ask() == b"hello", "the server has read what came before"
        for client in clients.values():
            async with asyncio.timeout(PATIENCE):
                answer = await client.rest()
            status, error = error_of(answer)
            assert (status, error["status"]) == (503, "error")
            head = answer.lower().split(b"\r\n\r\n")[0].split(b"\r\n")
            assert {b"connection: close", b"retry-after: 2"} <= set(head)
        for client in (streaming, deaf, other):
            client.writer.transport.abort()

    with capture_logs() as lines, asyncio.Runner(loop_factory=loop) as runner:
        runner.run(test())
    assert [line for line in lines if line["log_level"] != "debug"] == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_connection_limit_fits_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        limit = connection_limit(4096)
        assert connection_limits().connections_each == max(MIN_CONNECTIONS, limit // 4)
        now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert limit == min(4096, now - SPARE_FILES)
        assert now == 4096 + SPARE_FILES or now == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# The control socket


def test_unix_listener_socket_is_private_and_deleted(tmp_path: Path) -> None:
    path = tmp_path / "helper.sock"
    with unix_listener(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
    assert not path.exists()


def test_unix_listener_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "helper.sock"
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(path))
    with unix_listener(path), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))


def test_unix_listener_socket_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "helper.sock"
    with unix_listener(path):
        with pytest.raises(HelperError, match="another process is listening") as caught, unix_listener(path):
            pass
        assert "[operator] socket" in caught.value.advice
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))


def test_unix_listener_deletes_only_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "helper.sock"
    with unix_listener(path):
        path.rename(tmp_path / "moved")
        path.touch()
    assert path.exists()


def test_unix_listener_other_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "helper.sock"
    path.write_text("mine")
    with pytest.raises(HelperError, match="cannot create the control socket"), unix_listener(path):
        pass
    assert path.read_text() == "mine"
