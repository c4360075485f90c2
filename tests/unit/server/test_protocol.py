"""The connection's state table, its responses on the wire, and its seam with uvicorn."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import helper
from helper.core.refusals import Refusal
from helper.server import connection_limits, listening, protocol
from helper.server.body_reader import BodyReader
from helper.server.connection_limits import MAX_DISCARDED_BYTES, ConnectionLimits
from helper.server.edge import Edge
from helper.server.listening import Server
from helper.server.protocol import (
    HANDLERS_PER_ITERATION,
    SHARES_PER_ITERATION,
    TRANSITIONS,
    Connection,
    Request,
    State,
)
from tests.simulation.virtual_loop import SimLoop
from tests.support.clock import FakeClock
from tests.unit.server.server_fixtures import FakeTransport

ROOT = Path(helper.__file__).parents[1]


def test_only_two_modules_import_uvicorn_and_nothing_private() -> None:
    statement = re.compile(r"^\s*(?:import|from) (uvicorn\S*)", re.MULTILINE)
    imports = {
        (path.relative_to(ROOT).as_posix(), name)
        for package in ("helper", "admin", "audit", "conformance", "devnet")
        for path in (ROOT / package).rglob("*.py")
        for name in statement.findall(path.read_text("utf-8"))
    }
    assert imports == {("helper/server/listening.py", "uvicorn"), ("devnet/server.py", "uvicorn")}


def test_defaults_in_the_documentation_are_those_of_the_code() -> None:
    code = {
        **vars(connection_limits),
        **vars(listening),
        **asdict(ConnectionLimits()),
    }
    documented = re.findall(r"`(\w+)`,? \(?([\d.,]+)( s| KiB| MiB|\b)", protocol.__doc__ or "")
    assert len(documented) > 15
    for name, number, unit in documented:
        factor = {" KiB": 1 << 10, " MiB": 1 << 20}.get(unit, 1)
        assert code[name] == float(number.replace(",", "")) * factor, name


# The state table


class ScriptedEdge:
    """Answers a request as its path says."""

    def __init__(self) -> None:
        self.is_released = asyncio.Event()

    async def __call__(self, request: Request) -> None:
        if request.head.path == "/wait":
            await self.is_released.wait()
        if request.head.path == "/read":
            await BodyReader().read(request)
        if request.head.path == "/parts":
            request.begin_response(200, [])
            await request.send(b"first", more=True)
            await self.is_released.wait()
            await request.send(b"last", more=False)
            return
        if request.head.path == "/abort":
            request.begin_response(200, [])
            request.abort()
            return
        request.begin_response(200, [(b"content-length", b"0")])
        await request.send(b"", more=False)

    def posts_share(self, _request: Request) -> bool:
        return False

    def refuse(self, refusal: Refusal) -> Response:
        return Response(refusal.text, refusal.status)


class Wire:
    """A connection without a socket, and the states that it has had."""

    def __init__(self) -> None:
        self.edge = ScriptedEdge()
        self.server = Server(self.edge, ConnectionLimits())
        self.connection = Connection(self.server)
        self.states = [State.NEW]
        move = self.connection.move

        def record(state: State) -> None:
            move(state)
            self.states.append(state)

        self.connection.move = record  # type: ignore[method-assign]
        self.transport = FakeTransport(self.connection)

    async def deliver(self, data: bytes) -> None:
        self.transport.deliver(data)
        await settle()

    async def answer(self) -> None:
        self.edge.is_released.set()
        await settle()

    async def lose(self) -> None:
        if self.connection in self.server.connections:
            self.connection.connection_lost(None)
        await settle()


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


GET = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /%b HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
NEW, HEAD, WAITING, RUNNING, RESPONDING, DRAINING, IDLE, LINGERING, CLOSED = State
ANSWERED = [NEW, HEAD, WAITING, RUNNING, RESPONDING, IDLE]


async def answer_twice(wire: Wire) -> None:
    await wire.deliver(GET % b"" + GET % b"")


async def stall_between(wire: Wire) -> None:
    await wire.deliver(GET % b"parts" + GET % b"")
    wire.connection.pause_writing()
    await wire.answer()
    assert wire.connection._state is RESPONDING, "the last part waits for the client"
    wire.connection.resume_writing()
    await settle()


async def refuse_new(wire: Wire) -> None:
    wire.server.refuse_late()


async def refuse_head(wire: Wire) -> None:
    await wire.deliver(b"no HTTP\r\n\r\n")


def deliver_waiting(wire: Wire, per_iteration: int = HANDLERS_PER_ITERATION) -> None:
    """Deliver a request whose turn comes in the next iteration of the event loop."""
    for _ in range(per_iteration):
        FakeTransport(Connection(wire.server)).deliver(GET % b"")
    wire.transport.deliver(GET % b"")


async def refuse_waiting(wire: Wire) -> None:
    deliver_waiting(wire)
    wire.server.refuse_late()


async def refuse_running(wire: Wire) -> None:
    await wire.deliver(GET % b"wait")
    wire.server.refuse_late()
    await settle()
    assert not wire.server.tasks


async def drain(wire: Wire) -> None:
    await wire.deliver(POST % b"")
    await wire.deliver(b"body")


async def drain_too_much(wire: Wire) -> None:
    await wire.deliver(POST.replace(b"4", b"%d" % (MAX_DISCARDED_BYTES + 9)) % b"")
    await wire.deliver(b"x" * (MAX_DISCARDED_BYTES + 1))


async def linger(wire: Wire) -> None:
    await refuse_head(wire)
    assert not wire.connection.eof_received()


async def lose_new(wire: Wire) -> None:
    await wire.lose()


async def lose_head(wire: Wire) -> None:
    await wire.deliver(b"GET")
    await wire.lose()


async def lose_waiting(wire: Wire) -> None:
    deliver_waiting(wire)
    await wire.lose()


async def lose_running(wire: Wire) -> None:
    await wire.deliver(GET % b"wait")
    await wire.lose()
    await wire.answer()
    assert not wire.server.tasks


async def lose_responding(wire: Wire) -> None:
    await wire.deliver(GET % b"abort")


async def close_idle(wire: Wire) -> None:
    await wire.deliver(GET % b"")
    wire.server.close_idle()


PATHS: list[tuple[Callable[[Wire], Awaitable[None]], list[State]]] = [
    (answer_twice, [*ANSWERED, *ANSWERED[1:]]),
    (stall_between, [*ANSWERED, *ANSWERED[1:]]),
    (refuse_new, [NEW, LINGERING]),
    (refuse_head, [NEW, HEAD, LINGERING]),
    (refuse_waiting, [NEW, HEAD, WAITING, LINGERING]),
    (refuse_running, [NEW, HEAD, WAITING, RUNNING, LINGERING]),
    (drain, [NEW, HEAD, WAITING, RUNNING, RESPONDING, DRAINING, IDLE]),
    (drain_too_much, [NEW, HEAD, WAITING, RUNNING, RESPONDING, DRAINING, CLOSED]),
    (linger, [NEW, HEAD, LINGERING, CLOSED]),
    (lose_new, [NEW, CLOSED]),
    (lose_head, [NEW, HEAD, CLOSED]),
    (lose_waiting, [NEW, HEAD, WAITING, CLOSED]),
    (lose_running, [NEW, HEAD, WAITING, RUNNING, CLOSED]),
    (lose_responding, [NEW, HEAD, WAITING, RUNNING, RESPONDING, CLOSED]),
    (close_idle, [*ANSWERED, CLOSED]),
]


@pytest.mark.parametrize(("run", "states"), PATHS, ids=lambda value: getattr(value, "__name__", ""))
async def test_connection_passes_through_states(run: Callable[[Wire], Awaitable[None]], states: list[State]) -> None:
    wire = Wire()
    await run(wire)
    assert wire.states == states
    await wire.lose()


def test_every_transition_of_the_table_occurs_and_no_other() -> None:
    occurring = {pair for _, states in PATHS for pair in itertools.pairwise(states)}
    assert occurring == {(state, following) for state, allowed in TRANSITIONS.items() for following in allowed}
    assert set(TRANSITIONS) == set(State)


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
async def test_other_transitions_are_refused(state: State) -> None:
    for following in set(State) - TRANSITIONS[state]:
        connection = Wire().connection
        connection._state = state
        with pytest.raises(RuntimeError, match=f"from {state.name} to {following.name}"):
            connection.move(following)
        assert connection._state is state
        connection.connection_lost(None)


CUT_OFF: dict[str, Callable[[Wire], object]] = {
    "invalid body": lambda wire: wire.transport.deliver(b"no size\r\n"),
    "closed sending side": lambda wire: wire.connection.eof_received(),
    "evicted": lambda wire: wire.server.evictor.make_room(1, asyncio.get_running_loop().time() + 9),
    "stopped": lambda wire: wire.server.refuse_late(),
}


@pytest.mark.parametrize("end", CUT_OFF)
async def test_response_in_progress_is_cut_off_without_another_answer(end: str) -> None:
    wire = Wire()
    await wire.deliver(b"POST /parts HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert wire.transport.written.endswith(b"\r\n5\r\nfirst\r\n")
    CUT_OFF[end](wire)
    await wire.answer()
    assert wire.states[-1] is CLOSED
    assert wire.transport.is_closed
    assert socket.SO_LINGER in wire.transport.socket_options, "to HTTP/1.0, a close is the end of a response"
    assert wire.transport.written.endswith(b"\r\n5\r\nfirst\r\n")
    await wire.lose()


@pytest.mark.parametrize("posts_share", [False, True])
async def test_full_server_refuses_a_request_that_waits_for_its_turn_unless_it_posts_a_share(
    posts_share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire()
    monkeypatch.setattr(wire.edge, "posts_share", lambda _: posts_share)
    deliver_waiting(wire, SHARES_PER_ITERATION if posts_share else HANDLERS_PER_ITERATION)
    has_room = wire.server.evictor.make_room(1, asyncio.get_running_loop().time() + 9)
    assert has_room is not posts_share
    assert wire.states[-1] is (WAITING if posts_share else LINGERING)
    assert wire.transport.written.startswith(b"" if posts_share else b"HTTP/1.1 503 ")
    await wire.lose()


async def test_requests_whose_bodies_end_at_once_continue_in_turn() -> None:
    wire = Wire()
    transports = [FakeTransport(Connection(wire.server)) for _ in range(3 * HANDLERS_PER_ITERATION)]
    for transport in transports:
        transport.deliver(POST % b"read")
    await settle()
    for transport in transports:
        transport.deliver(b"body")
    answered = [0]
    for _ in range(8):
        await asyncio.sleep(0)
        answered.append(sum(bool(transport.written) for transport in transports))
    assert max(later - earlier for earlier, later in pairwise(answered)) == HANDLERS_PER_ITERATION
    assert answered[-1] == len(transports)


@pytest.mark.parametrize(("read", "is_closed"), [(0, True), (1, False)])
def test_connection_is_aborted_if_the_client_has_read_nothing(read: int, is_closed: bool) -> None:
    async def stall() -> None:
        wire = Wire()
        await wire.deliver(GET % b"wait")
        wire.transport.unsent_bytes = 100
        wire.connection.pause_writing()
        wire.transport.unsent_bytes -= read
        await asyncio.sleep(15)
        assert wire.transport.is_closed is is_closed
        wire.connection.resume_writing()
        wire.transport.is_closed = False
        await asyncio.sleep(45)
        assert not wire.transport.is_closed
        await wire.lose()
        await wire.answer()

    SimLoop(random.Random("loop")).run_until_complete(stall())


async def test_nothing_is_read_while_a_response_is_unread() -> None:
    wire = Wire()
    await wire.deliver(GET % b"")
    wire.connection.pause_writing()
    assert wire.transport.deliver(POST % b"" + b"body") == 0, "it would wait in memory"
    wire.connection.resume_writing()
    await wire.deliver(POST % b"" + b"body")
    assert wire.transport.written.count(b"HTTP/1.1 200 OK") == 2
    await wire.lose()


async def test_incomplete_request_of_a_client_that_reads_nothing_is_evicted() -> None:
    wire = Wire()
    await wire.deliver(b"POST /parts HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4000\r\n" + b"x" * 16384)
    wire.transport.unsent_bytes = 100
    wire.connection.pause_writing()
    wire.server.evictor.make_room(1, asyncio.get_running_loop().time() + 9)
    assert wire.transport.is_closed, "requests of other clients would be refused for its memory"
    await wire.lose()


def test_end_of_input_that_is_reported_again_does_not_extend_the_time_of_a_half_closed_client() -> None:
    async def half_close() -> None:
        wire = Wire()
        await wire.deliver(GET % b"wait")
        assert wire.connection.eof_received()
        await asyncio.sleep(9)
        assert wire.connection.eof_received()
        await asyncio.sleep(2)
        assert wire.transport.is_closed
        await wire.lose()
        await wire.answer()

    SimLoop(random.Random("loop")).run_until_complete(half_close())


@pytest.mark.parametrize("end", ["closed sending side", "lost", "invalid bytes"])
async def test_every_prefix_of_a_request_has_a_defined_end(end: str) -> None:
    head = POST % b"wait"
    for size in range(len(head) + 4):
        wire = Wire()
        await wire.deliver((head + b"body")[:size])
        if end == "closed sending side":
            assert not wire.connection.eof_received()
            assert (wire.states[-1], wire.transport.writes) == (CLOSED, [])
        elif end == "invalid bytes":
            await wire.deliver(b"\x00\r\n\r\n")
            if size < len(head):
                assert wire.states[-1] is LINGERING
                assert wire.transport.written.startswith(b"HTTP/1.1 400 ")
        await wire.lose()
        await wire.answer()
        assert not wire.server.tasks
        assert not wire.server.connections


# Responses


async def respond_whole(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def respond_in_parts(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
    for part in (b"a", b"b", b"c"):
        await asyncio.sleep(0)  # one iteration of the event loop
        await send({"type": "http.response.body", "body": part, "more_body": part != b"c"})


async def respond_chunked(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ab", "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def respond_empty(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


LONG_BODY = b"x" * 40_000


async def respond_long(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"40000")]})
    await send({"type": "http.response.body", "body": LONG_BODY})


async def respond_and_fail(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await asyncio.sleep(0)
    raise ValueError("no body")


async def respond_too_little(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"1"})


async def respond_with_line_end(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"a\r\nb: c")]})


async def respond_nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
    pass


DATE = b"date: Sat, 21 Nov 2026 13:42:00 GMT\r\n"
OK = b"HTTP/1.1 200 OK\r\n" + DATE
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
CLOSE = b"connection: close\r\n\r\n"
ERROR = b'{"status":"error","error":"internal error"}'
FAILED = b"HTTP/1.1 500 Internal Server Error\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    DATE,
    len(ERROR),
    ERROR,
)
_ID_LINE = re.compile(rb"x-request-id: [0-9a-f]{16}\r\n")


def with_length(length: int, close: bytes = b"\r\n") -> bytes:
    return OK + b"content-length: %d\r\n" % length + close


@pytest.mark.parametrize(
    ("line", "app", "writes", "is_closed"),
    [
        (b"GET / HTTP/1.1", respond_whole, [with_length(2) + b"ok"], False),
        (b"HEAD / HTTP/1.1", respond_whole, [with_length(2)], False),
        (b"GET / HTTP/1.0", respond_whole, [with_length(2, CLOSE) + b"ok"], True),
        (b"HEAD / HTTP/1.0", respond_whole, [with_length(2, CLOSE)], True),
        (b"GET / HTTP/1.1", respond_in_parts, [with_length(3), b"a", b"b", b"c"], False),
        (
            b"GET / HTTP/1.1",
            respond_chunked,
            [OK + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n", b"0\r\n\r\n"],
            False,
        ),
        (b"HEAD / HTTP/1.1", respond_chunked, [OK + b"\r\n"], False),
        (b"GET / HTTP/1.0", respond_chunked, [OK + CLOSE + b"ab"], True),
        (b"GET / HTTP/1.1", respond_empty, [b"HTTP/1.1 204 No Content\r\n" + DATE + b"\r\n"], False),
        (
            b"GET / HTTP/1.1",
            respond_long,
            [with_length(40_000) + LONG_BODY[: 16 << 10], LONG_BODY[: 16 << 10], LONG_BODY[32 << 10 :]],
            False,
        ),
        (b"GET / HTTP/1.1", respond_and_fail, [with_length(2)], True),
        (b"GET / HTTP/1.1", respond_too_little, [], True),
        (b"GET / HTTP/1.1", respond_with_line_end, [FAILED], False),
        (b"GET / HTTP/1.1", respond_nothing, [FAILED], False),
    ],
    ids=lambda value: getattr(value, "__name__", value.decode() if isinstance(value, bytes) else ""),
)
async def test_response_on_the_wire(line: bytes, app: ASGIApp, writes: list[bytes], is_closed: bool) -> None:
    server = Server(Edge(app), ConnectionLimits())
    server._clock = FakeClock(1795268520.0)
    transport = FakeTransport(Connection(server))
    transport.deliver(line + b"\r\nHost: x\r\n\r\n")
    await settle()
    assert [_ID_LINE.sub(b"", write) for write in transport.writes] == writes
    assert transport.is_closed is is_closed
    for connection in list(server.connections):
        connection.connection_lost(None)


async def test_date_header_is_that_of_the_current_second() -> None:
    clock = FakeClock(1795268520.0)
    server = Server(ScriptedEdge(), ConnectionLimits())
    server._clock = clock
    first = server.date_line()
    assert first == DATE
    clock.advance(0.9)
    assert server.date_line() is first
    clock.advance(0.1)
    assert server.date_line() == DATE.replace(b":00 ", b":01 ")
