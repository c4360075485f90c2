"""Contract of the uvicorn adapter: the names that it uses, and that no other module uses
uvicorn. A test that fails here after an upgrade reports the class and the attribute that uvicorn has removed or
changed.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httptools
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

import helper
from helper.server.connection import BoundedProtocol
from helper.server.uvicorn_adapter import DateHeaderState, HttpConnection
from tests.support.clock import FakeClock

VERSION = f"uvicorn {uvicorn.__version__}"
PACKAGE = Path(helper.__file__).parent
ADAPTER = PACKAGE / "server" / "uvicorn_adapter.py"
REQUEST = b"POST /path HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"

METHODS: dict[type, dict[str, list[str]]] = {
    HttpToolsProtocol: {
        "__init__": ["self", "config", "server_state", "app_state", "_loop"],
        "connection_made": ["self", "transport"],
        "connection_lost": ["self", "exc"],
        "data_received": ["self", "data"],
        "eof_received": ["self"],
        "pause_writing": ["self"],
        "resume_writing": ["self"],
        "on_message_begin": ["self"],
        "on_url": ["self", "url"],
        "on_header": ["self", "name", "value"],
        "on_headers_complete": ["self"],
        "on_body": ["self", "body"],
        "on_message_complete": ["self"],
        "on_response_complete": ["self"],
        "shutdown": ["self"],
        "_start_asgi_task": ["self", "cycle", "app"],
    },
    RequestResponseCycle: {"run_asgi": ["self", "app"], "send": ["self", "message"], "receive": ["self"]},
    FlowControl: {
        "__init__": ["self", "transport"],
        "pause_reading": ["self"],
        "resume_reading": ["self"],
        "pause_writing": ["self"],
        "resume_writing": ["self"],
        "drain": ["self"],
    },
    uvicorn.Server: {
        "__init__": ["self", "config"],
        "serve": ["self", "sockets"],
        "startup": ["self", "sockets"],
        "main_loop": ["self"],
        "shutdown": ["self", "sockets"],
        "capture_signals": ["self"],
    },
    ServerState: {"__init__": ["self"]},
}
"""Methods that the adapter calls or overrides, with their parameters."""

CONNECTION_ATTRIBUTES: dict[str, type] = {
    "parser": httptools.HttpRequestParser,
    "loop": asyncio.AbstractEventLoop,
    "transport": asyncio.Transport,
    "flow": FlowControl,
    "app_state": dict,
    "server_state": ServerState,
    "connections": set,
    "tasks": set,
    "client": tuple,
    "timeout_keep_alive": int,
    "expect_100_continue": bool,
    "headers": list,
    "scope": dict,
}
"""Attributes of a connection during a request."""

CYCLE_ATTRIBUTES: dict[str, object] = {
    "disconnected": False,
    "waiting_for_100_continue": False,
    "keep_alive": True,
    "more_body": True,
    "response_started": False,
    "response_complete": False,
    "body": bytearray(b"ab"),
}
"""Attributes of a request when half of its body has been received, with their values."""

STATE_ATTRIBUTES: dict[str, object] = {"total_requests": 0, "connections": set(), "tasks": set(), "default_headers": []}
"""Attributes of a new server's state."""

CHECKED_ALONE = {"cycle", "pipeline", "on_response", "message_event"}
"""Attributes with a separate test."""


class FakeTransport(asyncio.Transport):
    """Records what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 1234), "sockname": ("192.0.2.2", 80)})
        self.writes: list[bytes] = []
        self.is_paused = False
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

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Recorder:
    """A connection of plain uvicorn; its requests are not run, but recorded."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        config = uvicorn.Config(app=_unused, http=HttpToolsProtocol, ws="none", lifespan="off", log_config=None)
        config.load()
        self.transport = FakeTransport()
        self.connection = HttpToolsProtocol(config, ServerState(), {"key": "value"}, loop)
        self.started: list[tuple[RequestResponseCycle, Any]] = []
        self.connection._start_asgi_task = lambda cycle, app: self.started.append((cycle, app))  # type: ignore[method-assign]
        self.connection.connection_made(self.transport)


async def _unused(_scope: object, _receive: object, _send: object) -> None:
    raise AssertionError


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    loop = asyncio.new_event_loop()
    yield Recorder(loop)
    loop.close()


def attribute(owner: object, name: str) -> Any:
    """The value of an attribute of uvicorn; fails if it is missing."""
    if not hasattr(owner, name):
        pytest.fail(f"{VERSION}: {type(owner).__name__}.{name} is missing; the adapter relies on it")
    return getattr(owner, name)


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, methods in METHODS.items() for name in methods], ids=str
)
def test_uvicorn_has_method_with_these_parameters(owner: type, name: str) -> None:
    method: Callable[..., Any] | None = vars(owner).get(name)
    assert method is not None, f"{VERSION}: {owner.__name__} no longer defines {name}(); the adapter relies on it"
    parameters = list(inspect.signature(method).parameters)
    assert parameters == METHODS[owner][name], f"{VERSION}: {owner.__name__}.{name}() has other parameters"


@pytest.mark.parametrize("name", CONNECTION_ATTRIBUTES)
def test_uvicorn_connection_has_attribute(recorder: Recorder, name: str) -> None:
    recorder.connection.data_received(REQUEST)
    value = attribute(recorder.connection, name)
    expected = CONNECTION_ATTRIBUTES[name]
    assert isinstance(value, expected), f"{VERSION}: HttpToolsProtocol.{name} is {value!r}, not {expected.__name__}"


@pytest.mark.parametrize("name", CYCLE_ATTRIBUTES)
def test_uvicorn_request_has_attribute(recorder: Recorder, name: str) -> None:
    recorder.connection.data_received(REQUEST + b"ab")
    value = attribute(recorder.connection.cycle, name)
    expected = CYCLE_ATTRIBUTES[name]
    assert value == expected, f"{VERSION}: RequestResponseCycle.{name} is {value!r}, not {expected!r}"


@pytest.mark.parametrize("name", STATE_ATTRIBUTES)
def test_uvicorn_server_state_has_attribute(name: str) -> None:
    value = attribute(ServerState(), name)
    assert value == STATE_ATTRIBUTES[name], f"{VERSION}: ServerState.{name} is {value!r}"


def test_uvicorn_request_ends_with_its_callbacks(recorder: Recorder) -> None:
    connection = recorder.connection
    connection.data_received(REQUEST)
    cycle = connection.cycle
    assert attribute(cycle, "on_response") == connection.on_response_complete, VERSION
    assert attribute(cycle, "transport") is recorder.transport, VERSION
    assert not attribute(cycle, "message_event").is_set(), VERSION
    connection.data_received(b"abcd")
    assert cycle.message_event.is_set(), f"{VERSION}: message_event is not set when the body is complete"
    assert not cycle.more_body, f"{VERSION}: more_body remains set when the body is complete"


def test_uvicorn_scope_is_created_before_the_head_with_a_copy_of_the_state(recorder: Recorder) -> None:
    connection = recorder.connection
    connection.data_received(REQUEST[:6])
    assert connection.scope["state"] == {"key": "value"}, VERSION
    assert connection.scope["state"] is not connection.app_state, f"{VERSION}: requests share one state"
    assert connection.scope["headers"] is connection.headers, VERSION


def test_uvicorn_starts_first_request_and_appends_next_to_the_left_of_the_pipeline(recorder: Recorder) -> None:
    connection = recorder.connection
    for _ in range(3):
        connection.data_received(REQUEST + b"abcd")
    (first,) = recorder.started
    assert first[0] is not connection.cycle, VERSION
    newest, older = connection.pipeline
    assert newest[0] is connection.cycle, f"{VERSION}: the pipeline is in another order"
    assert older == (older[0], connection.app), f"{VERSION}: the pipeline holds other values than (cycle, app)"
    assert recorder.transport.is_paused, f"{VERSION}: reading continues while requests wait"


def test_uvicorn_calls_on_response_complete_once_after_the_response(recorder: Recorder) -> None:
    connection, loop = recorder.connection, recorder.connection.loop
    connection.data_received(REQUEST + b"abcd")
    cycle = connection.cycle

    async def respond() -> None:
        await cycle.send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        assert cycle.response_started, VERSION
        assert connection.server_state.total_requests == 0, VERSION
        await cycle.send({"type": "http.response.body", "body": b"ok", "more_body": False})

    loop.run_until_complete(respond())
    assert cycle.response_complete, VERSION
    assert connection.server_state.total_requests == 1, f"{VERSION}: on_response_complete counts otherwise"
    assert recorder.transport.written.startswith(b"HTTP/1.1 200 OK\r\n"), VERSION


def test_uvicorn_server_creates_connections_with_these_arguments() -> None:
    created: dict[str, Any] = {}

    def protocol(**arguments: Any) -> asyncio.Protocol:
        created.update(arguments)
        return asyncio.Protocol()

    async def connect() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(_unused, http=protocol, ws="none", lifespan="off", log_config=None)  # type: ignore[arg-type]
            server = uvicorn.Server(config)
            config.load()
            server.lifespan = config.lifespan_class(config)
            await server.startup([listener])
            _, writer = await asyncio.open_connection(*listener.getsockname())
            while not created:
                await asyncio.sleep(0.01)
            assert created["server_state"] is server.server_state, VERSION
            writer.close()
            await server.shutdown([listener])

    asyncio.run(connect())
    names = {"config", "server_state", "app_state"}
    assert names <= set(created) <= {*names, "_loop"}, f"{VERSION}: connections get other arguments"


# The adapter


def test_no_other_module_of_the_service_imports_uvicorn() -> None:
    importing = {
        path
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Import) and any(name.name.partition(".")[0] == "uvicorn" for name in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "uvicorn")
    }
    assert importing == {ADAPTER}


def test_connection_uses_no_attribute_that_only_uvicorn_defines(recorder: Recorder) -> None:
    used = {
        node.attr
        for node in ast.walk(ast.parse(Path(inspect.getfile(BoundedProtocol)).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    by_uvicorn = set(dir(recorder.connection)) - set(dir(asyncio.Protocol))
    by_adapter = {*vars(HttpConnection), *HttpConnection.__annotations__}
    assert used & by_uvicorn <= by_adapter


def test_this_list_has_every_attribute_that_the_adapter_uses(recorder: Recorder) -> None:
    recorder.connection.data_received(REQUEST)
    connection = recorder.connection
    parts = (connection, connection.cycle, connection.flow, connection.server_state, uvicorn.Server)
    by_uvicorn = {name for part in parts for name in dir(part)} - {"config"}
    tree = ast.parse(ADAPTER.read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    listed = {name for methods in METHODS.values() for name in methods}
    listed |= {*CONNECTION_ATTRIBUTES, *CYCLE_ATTRIBUTES, *STATE_ATTRIBUTES, *CHECKED_ALONE}
    assert used & by_uvicorn <= listed


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
