"""The uvicorn adapter: the only module that imports uvicorn, and how it writes responses."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import re
from pathlib import Path
from typing import cast

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

import helper
from helper.server.connection import BoundedProtocol
from helper.server.uvicorn_adapter import DateHeaderState, HttpConnection
from tests.support.clock import FakeClock

PACKAGE = Path(helper.__file__).parent
ADAPTER = PACKAGE / "server" / "uvicorn_adapter.py"


class FakeTransport(asyncio.Transport):
    """Records what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 1234), "sockname": ("192.0.2.2", 80)})
        self.writes: list[bytes] = []
        self.is_closed = False

    @property
    def written(self) -> bytes:
        return b"".join(self.writes)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return False


def test_no_other_module_of_the_service_imports_uvicorn() -> None:
    statement = re.compile(r"^\s*(?:import|from) uvicorn\b", re.MULTILINE)
    assert {path for path in PACKAGE.rglob("*.py") if statement.search(path.read_text("utf-8"))} == {ADAPTER}


def test_connection_uses_no_attribute_that_only_uvicorn_defines() -> None:
    used = {
        node.attr
        for node in ast.walk(ast.parse(Path(inspect.getfile(BoundedProtocol)).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    config = uvicorn.Config(app=respond_whole, http=HttpToolsProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        by_uvicorn = set(dir(HttpToolsProtocol(config, ServerState(), {}, loop))) - set(dir(asyncio.Protocol))
    by_adapter = {*vars(HttpConnection), *HttpConnection.__annotations__}
    assert used & by_uvicorn <= by_adapter


async def respond_whole(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def respond_in_parts(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
    for part in (b"a", b"b", b"c"):
        await asyncio.sleep(0)  # one iteration of the event loop
        await send({"type": "http.response.body", "body": part, "more_body": part != b"c"})


LONG_BODY = b"x" * 100_000


async def respond_long(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100000")]})
    await send({"type": "http.response.body", "body": LONG_BODY})


async def respond_and_fail(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    raise ValueError("no body")


class CompletionRecorder(HttpConnection):
    """Records which bytes are written when a response is complete: other writes may follow directly."""

    written_at_completion: bytes | None = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.written_at_completion = cast("FakeTransport", self.transport).written


HEAD_LINES = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%b\r\n"


@pytest.mark.parametrize(
    ("request_line", "app", "writes", "is_closed"),
    [
        (b"GET / HTTP/1.1", respond_whole, [HEAD_LINES % (2, b"") + b"ok"], False),
        (b"HEAD / HTTP/1.1", respond_whole, [HEAD_LINES % (2, b"")], False),
        (b"GET / HTTP/1.0", respond_whole, [HEAD_LINES % (2, b"connection: close\r\n") + b"ok"], True),
        (b"HEAD / HTTP/1.0", respond_whole, [HEAD_LINES % (2, b"connection: close\r\n")], True),
        (b"GET / HTTP/1.1", respond_in_parts, [HEAD_LINES % (3, b""), b"a", b"b", b"c"], False),
        (b"GET / HTTP/1.1", respond_long, [HEAD_LINES % (100_000, b""), LONG_BODY], False),
        (b"GET / HTTP/1.1", respond_and_fail, [HEAD_LINES % (2, b"")], True),
    ],
    ids=["whole", "head", "whole, close", "head, close", "parts", "long", "failed after the head"],
)
def test_response_head_is_written_with_the_body_or_without_delay(
    request_line: bytes, app: ASGIApp, writes: list[bytes], is_closed: bool
) -> None:
    async def respond() -> None:
        config = uvicorn.Config(app=app, http=HttpConnection, ws="none", lifespan="off", log_config=None)
        config.load()
        state, transport = ServerState(), FakeTransport()
        connection = CompletionRecorder(config, state, {}, asyncio.get_running_loop())
        connection.connection_made(transport)
        connection.parse(request_line + b"\r\nHost: x\r\n\r\n")
        await asyncio.wait(state.tasks)
        assert transport.writes == writes
        assert transport.is_closed is is_closed
        assert connection.written_at_completion == (None if app is respond_and_fail else transport.written)
        connection.connection_lost(None)

    asyncio.run(respond())


def test_date_header_is_that_of_the_current_second() -> None:
    clock = FakeClock(1795268520.0)
    state = DateHeaderState(clock)
    first = state.default_headers
    assert first == [(b"date", b"Sat, 21 Nov 2026 13:42:00 GMT")]
    clock.advance(0.9)
    assert state.default_headers is first
    clock.advance(0.1)
    assert state.default_headers == [(b"date", b"Sat, 21 Nov 2026 13:42:01 GMT")]
