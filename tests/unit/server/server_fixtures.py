"""A server on its own socket, and a client that sends raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from helper.core.text_forms import Network
from helper.server.connection_limits import ConnectionLimits
from helper.server.edge import Edge, json_application
from helper.server.listening import Server, bind_tcp
from helper.server.protocol import Connection

PATIENCE_SECONDS = 20.0
HELLO_REQUEST = b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"

MEDIUM_BYTES = 8 << 20


async def hello(_request: object) -> Response:
    return Response(b"hello")


async def large(_request: Request) -> Response:
    return Response(b"x" * (32 << 20))


async def medium(_request: Request) -> Response:
    return Response(b"x" * MEDIUM_BYTES)


async def echo(request: Request) -> Response:
    return Response(await request.body())


async def header_names(request: Request) -> Response:
    await request.body()
    return Response(",".join(request.headers.keys()))


async def pause(request: Request) -> Response:
    await asyncio.sleep(float(request.path_params["seconds"]))
    return Response(b"paused")


class EndlessRoutes:
    """Responds to `GET /endless` until the client disconnects, or never starts a response."""

    def __init__(self) -> None:
        self.disconnects = 0

    async def stream(self, _request: Request) -> Response:
        return StreamingResponse(self._pieces())

    async def wait(self, request: Request) -> Response:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.disconnects += 1
        return Response(b"not read")

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"piece"
                await asyncio.sleep(0.01)
        finally:
            self.disconnects += 1


def create_test_app(endless: EndlessRoutes) -> ASGIApp:
    return json_application(
        [
            Route("/endless/stream", endless.stream),
            Route("/endless/wait", endless.wait),
            Route("/hello", hello),
            Route("/large", large),
            Route("/medium", medium),
            Route("/early", hello, methods=["POST"]),
            Route("/echo", echo, methods=["POST"]),
            Route("/header-names", header_names, methods=["POST"]),
            Route("/pause/{seconds}", pause),
        ]
    )


@contextlib.asynccontextmanager
async def run_server(
    limits: ConnectionLimits,
    refusals: Counter[int] | None = None,
    endless: EndlessRoutes | None = None,
    proxies: Sequence[Network] = (),
) -> AsyncIterator[int]:
    app = create_test_app(endless or EndlessRoutes())
    server = Server(Edge(app, refusals, {"/share": hello}), limits, trusted_networks=proxies)
    listener = bind_tcp("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    async with asyncio.timeout(PATIENCE_SECONDS):
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield port
        finally:
            server.stop()
            await task


def track_protocols(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Connection]:
    """Return the connections opened from now on that are not freed yet."""
    protocols = weakref.WeakSet[Connection]()
    connection_made = Connection.connection_made

    def record(self: Connection, transport: asyncio.BaseTransport) -> None:
        protocols.add(self)
        connection_made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", record)
    return protocols


class FakeTransport(asyncio.Transport):
    """Records what is written. Delivers bytes as uvloop does, and none while reading is paused."""

    def __init__(self, connection: Connection) -> None:
        names: dict[str, Any] = {
            "getpeername": lambda: ("127.0.0.1", 1234),
            "getsockname": lambda: ("127.0.0.1", 80),
            "family": socket.AF_INET,
            "fileno": lambda: 1 << 30,  # of no open file
        }
        self.socket_options = list[int]()
        names["setsockopt"] = lambda _level, option, _value: self.socket_options.append(option)
        super().__init__({"socket": SimpleNamespace(**names)})
        self._connection = connection
        self._is_paused = False
        self.writes: list[bytes] = []
        self.is_half_closed = False
        self.unsent_bytes = 0
        self.is_closed = False
        connection.connection_made(self)

    @property
    def written(self) -> bytes:
        return b"".join(self.writes)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def deliver(self, data: bytes) -> int:
        """Deliver until reading is paused or the connection is closed; return the number of bytes delivered."""
        at = 0
        while at < len(data) and not self._is_paused and not self.is_closed:
            buffer = self._connection.get_buffer(-1)
            size = min(len(buffer), len(data) - at)
            buffer[:size] = data[at : at + size]
            self._connection.buffer_updated(size)
            at += size
        return at

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False

    def is_closing(self) -> bool:
        return self.is_closed

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def write_eof(self) -> None:
        self.is_half_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.is_closed = True


class RawClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, first: bytes = b"", source: str = "127.0.0.1") -> RawClient:
        client = cls(*await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0)))
        client.writer.write(first)
        return client

    async def request(self, request: bytes = HELLO_REQUEST) -> bytes:
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        return await self.reader.readexactly(int(length.partition(b":")[2]))

    async def read_rest(self) -> bytes:
        data = b""
        with contextlib.suppress(ConnectionError):
            while part := await self.reader.read(1 << 20):
                data += part
        self.writer.close()
        return data


def parse_error(response: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    assert lengths == [b"content-length: %d" % len(body)], "a proxy refuses a response with two lengths"
    error = json.loads(body)
    assert set(error) == {"status", "error"}
    return int(head.split()[1]), error
