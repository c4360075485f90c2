"""One HTTP/1.1 connection as a state machine, the requests on it, and what the connections to a socket share.

A connection has one request at a time: what follows a request waits unparsed until its response is complete. Nothing is
read while there is such a rest, while the client leaves a response unread, and while more than `READ_BYTES` (16 KiB) of
a body wait for the handler. So the client's end of sending is noticed after all that it has sent before, and requests
before it are answered. The states and their transitions are `State` and `TRANSITIONS`. Times and sizes below are the
defaults. A connection is closed

| in state   | when                                                                 | and the client gets         |
|------------|----------------------------------------------------------------------|-----------------------------|
| any        | the client reads nothing of a response for `stalled_seconds` (10 s,  | nothing more: a response is |
|            | checked every 10 s), unless it is a proxy; all unread responses and  | incomplete, or none came    |
|            | unparsed rests take more than `MAX_HELD_BYTES` (32 MiB; 32 KiB more  |                             |
|            | for each of them, which the kernel may have received), and those of  |                             |
|            | this client have waited longest; it is evicted while a response is   |                             |
|            | unread; the server has been stopping for 6 s                         |                             |
| NEW        | `max_connections` (4,096) others are open, and too few of them can   | 503                         |
|            | be evicted                                                           |                             |
| NEW        | no request begins within `head_seconds` (8.5 s) of the connection    | nothing                     |
|            | (empty lines begin none); it is evicted                              |                             |
| HEAD       | the head is incomplete `head_seconds` (8.5 s) after its first byte,  | 503                         |
|            | or after the connection if it is the first one; it is evicted        |                             |
| HEAD       | the head is invalid, of HTTP/0.9 or HTTP/2.0, larger than            | 400, 414, 431 or 505        |
|            | `max_head_bytes` (16 KiB), has more than `max_headers` (100), or a   |                             |
|            | target larger than `MAX_TARGET_BYTES` (2 KiB)                        |                             |
| NEW, HEAD, | the client closes its sending side before its request is complete    | nothing                     |
| WAITING,   |                                                                      |                             |
| RUNNING    |                                                                      |                             |
| NEW, HEAD, | the server has been stopping for `STOP_GRACE_SECONDS` (5 s)          | 503; nothing while an       |
| WAITING,   |                                                                      | earlier response is unread  |
| RUNNING    |                                                                      |                             |
| HEAD,      | the chunks or trailers of the body are invalid or too large          | 400 or 431                  |
| WAITING,   |                                                                      |                             |
| RUNNING    |                                                                      |                             |
| WAITING,   | the body is incomplete, or the request waits for its turn and posts  | 503, or 429 to an attempt   |
| RUNNING    | no share; and the connection is evicted                              |                             |
| WAITING,   | the client has closed its sending side after its request, and the    | nothing, or an incomplete   |
| RUNNING,   | response is incomplete `half_closed_seconds` (10 s) later            | response                    |
| RESPONDING |                                                                      |                             |
| RUNNING    | the edge itself fails, or returns without a response                 | 500                         |
| RESPONDING | the handler fails, aborts or ends before the response is complete;   | an incomplete response      |
|            | the body of the request is invalid, or cut off by the client; the    |                             |
|            | connection is evicted; the server has been stopping for 5 s          |                             |
| RESPONDING | response and request are complete, and the response says close, the  | the response                |
|            | server stops, or the client has closed its sending side              |                             |
| DRAINING   | the rest of the body has come, and the response says close, or the   | the response                |
|            | server stops; the body is invalid, cut off by the client, larger     |                             |
|            | than `MAX_DISCARDED_BYTES` (4 MiB), or incomplete `head_seconds`     |                             |
|            | (8.5 s) after the response (`DRAIN_SECONDS`, 3 s, if that says       |                             |
|            | close); the connection is evicted                                    |                             |
| IDLE       | no request begins within `keep_alive_seconds` (30 s) of the latest   | nothing more                |
|            | response; it is evicted; the client closes its sending side; the     |                             |
|            | server stops                                                         |                             |
| LINGERING  | the client closes; after `LINGER_SECONDS` (1 s) or                   | the refusal that began it   |
|            | `MAX_DISCARDED_BYTES`                                                |                             |

To evict is to close a connection because there are too many, or because incomplete requests take too much memory. For a
place, the slowest go first (idle ones before all others, those of proxies last), none within `eviction_seconds` (4 s)
of the start of its request or of the wait for it, or within 1 s of a response, also in DRAINING; if there are too few,
those go that had a response before and are not idle. For memory, those go first that hold the most. None is evicted
whose complete request is being answered or posts a share, unless its client has left bytes unread for 10 s.

The 400 to 505 of this table close the connection at once if they refuse a connection or a slow or evicted head; after
the others, input is discarded first (LINGERING). The edge calls the handlers, and answers their errors with 500, which
leaves the connection open like other responses. The time of a body has no limit here: handlers that read one have a
`BodyReader`, whose refusal of a slow one (503, or 408 to an attempt) says close. "An attempt" is a request with
`ATTEMPT_HEADER`, and "says close" means the header `connection: close`.

A response says close if the request or the handler does, to HTTP/1.0 and upgrade requests, to `Expect: 100-continue`,
after the client's end of sending was noticed, and when the server stops. What follows the request is discarded then. An
incomplete response ends with a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from enum import IntEnum, auto
from http import HTTPStatus
from typing import ClassVar, Final, NamedTuple, Protocol, cast

import structlog
from starlette.responses import Response

from helper.clock import Clock, SystemClock
from helper.core.refusals import Refusal, Situation, attempt_token, find_refusal
from helper.core.text_forms import Network, is_in_networks, parse_address
from helper.errors import ClientLeft
from helper.server.connection_limits import (
    DRAIN_SECONDS,
    KERNEL_UNSENT_BYTES,
    LINGER_SECONDS,
    MAX_DISCARDED_BYTES,
    MAX_HELD_BYTES,
    READ_BYTES,
    RECEIVE_BUFFER_BYTES,
    SEND_BUFFER_BYTES,
    UNIX_SEND_BUFFER_BYTES,
    ConnectionEvictor,
    ConnectionLimits,
    ConnectionProgress,
)
from helper.server.request_parser import InvalidRequestError, RequestHead, RequestParser

log = structlog.get_logger("helper.server")

HANDLERS_PER_ITERATION: Final = 4
"""Handlers that are called in one iteration of the event loop, except those of shares. One takes about 0.3 ms."""
SHARES_PER_ITERATION: Final = 32
"""Handlers of posted shares that are called in one iteration. One takes about 0.1 ms."""
_PIECE_BYTES: Final = 16 << 10
"""Maximum bytes of a response that are written at once. A client that has read a piece begins to wait anew, so that
one that reads slowly is not aborted for others that read nothing, however large its response is."""
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES: Final = [f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode() for status in range(600)]
_BODILESS_STATUSES: Final = frozenset({HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED})
_CREDENTIALS: Final = struct.Struct("3i")
_RESET: Final = struct.pack("ii", 1, 0)
"""Value of `SO_LINGER` with which closing resets the connection, and drops what is not sent."""
TRACE_HEADER: Final = b"x-vote-request-id"
"""Header that names a request to trace, and its response (`RequestTrace`)."""

Headers = Sequence[tuple[bytes, bytes]]


class State(IntEnum):
    """States of a connection."""

    NEW = auto()
    """No request has begun. Empty lines begin none (RFC 9112, section 2.2)."""
    HEAD = auto()
    """A part of a request's head was received."""
    WAITING = auto()
    """The head is complete. The handler is called in its turn, after the client has read the earlier responses."""
    RUNNING = auto()
    """The handler was called, and its response has not begun."""
    RESPONDING = auto()
    """The response has begun."""
    DRAINING = auto()
    """The response is complete; the rest of the request's body is discarded."""
    IDLE = auto()
    """Request and response are complete, and no other request has begun."""
    LINGERING = auto()
    """A refusal was sent; input is discarded until the client closes.

    Closing with bytes unread resets the connection, and the client may lose the response.
    """
    CLOSED = auto()
    """The connection is closed, or will be when all bytes are sent."""


TRANSITIONS: Final = {
    State.NEW: {State.HEAD, State.LINGERING, State.CLOSED},
    State.HEAD: {State.WAITING, State.LINGERING, State.CLOSED},
    State.WAITING: {State.RUNNING, State.LINGERING, State.CLOSED},
    State.RUNNING: {State.RESPONDING, State.LINGERING, State.CLOSED},
    State.RESPONDING: {State.DRAINING, State.IDLE, State.CLOSED},
    State.DRAINING: {State.IDLE, State.CLOSED},
    State.IDLE: {State.HEAD, State.CLOSED},
    State.LINGERING: {State.CLOSED},
    State.CLOSED: set[State](),
}
"""The states that may follow each state."""
_BEFORE_HEAD: Final = frozenset({State.NEW, State.IDLE})
_UNANSWERED: Final = frozenset({State.NEW, State.HEAD, State.WAITING, State.RUNNING})
_DISCARDING: Final = frozenset({State.DRAINING, State.LINGERING})
_ENDED: Final = frozenset({State.LINGERING, State.CLOSED})


class Addresses(NamedTuple):
    """The ends of a connection.

    Attributes:
        client: address and port of the peer; None on a unix socket, or if it has left.
        server: own address and port, or the path of the unix socket and None.
        user: user id of the peer's process, when it connected; None on a TCP socket.
    """

    client: tuple[str, int] | None
    server: tuple[str, int | None]
    user: int | None


class Edge(Protocol):
    """Answers the requests of a listener."""

    def __call__(self, request: Request) -> Awaitable[None]:
        """Answer a request."""
        ...

    def refuse(self, refusal: Refusal) -> Response:
        """The response to a request that its connection refuses."""
        ...

    def posts_share(self, request: Request) -> bool:
        """Whether a request posts a share, which does not wait behind other requests."""
        ...


class Listener:
    """What the connections to one socket share.

    Args:
        trusted_networks: networks of proxies, whose idle connections are closed last.

    Attributes:
        held: connections whose client leaves a response unread or has sent requests behind the current one, those
            that have waited longest first; with the bytes that waited at first.
        is_stopping: whether each connection closes after its response.
        ended: set when a connection or a handler has ended.
    """

    def __init__(self, edge: Edge, limits: ConnectionLimits, trusted_networks: Sequence[Network]) -> None:
        self.edge = edge
        self.limits = limits
        self.trusted_networks = trusted_networks
        self.connections: set[Connection] = set()
        self.evictor = ConnectionEvictor(self.connections, limits)
        self.tasks: set[asyncio.Task[None]] = set()
        self.held: dict[Connection, int] = {}
        self._held_bytes = 0
        self.is_stopping = False
        self.ended = asyncio.Event()
        self._turns = _Turns(HANDLERS_PER_ITERATION)
        self._share_turns = _Turns(SHARES_PER_ITERATION)
        self._clock: Clock = SystemClock()
        self._second = -1
        self._date_line = b""

    def date_line(self) -> bytes:
        """The `Date` header of the current second."""
        second = int(self._clock.now())
        if second != self._second:
            self._second, self._date_line = second, f"date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._date_line

    def hold(self, connection: Connection) -> None:
        """Count what waits because of a client. If that is too much, abort connections that have waited longest.

        The newest one stays open, however large its response is.
        """
        self.held[connection] = connection.held_bytes
        self._held_bytes += self.held[connection]
        while self._held_bytes > MAX_HELD_BYTES and len(self.held) > 1:
            longest = next(iter(self.held))
            self.release(longest)
            longest.abort()

    def release(self, connection: Connection) -> None:
        """Stop counting what waits because of a client."""
        self._held_bytes -= self.held.pop(connection, 0)

    def run_in_turn(self, connection: Connection, request: Request) -> None:
        """Call the handler of a connection in its turn.

        Every handler that starts makes the current iteration of the event loop longer. A posted share needs several
        iterations, and would wait for seconds behind a few hundred other requests that are always ready. A new
        connection also waits for an iteration, and behind the others that are accepted before it, a few in each.
        """
        self._turns_of(request).add(connection.run)

    async def wait_turn(self, request: Request) -> None:
        """Wait for the turn of a handler that continues with a body, for the same reason."""
        turn = asyncio.Event()
        self._turns_of(request).add(turn.set)
        await turn.wait()

    def _turns_of(self, request: Request) -> _Turns:
        return self._share_turns if self.edge.posts_share(request) else self._turns

    def discard_connection(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self.connections.discard(connection)
        self.release(connection)
        self.evictor.discard(connection)
        self.ended.set()

    def add_task(self, task: asyncio.Task[None]) -> None:
        """Keep a running handler until its end."""
        self.tasks.add(task)
        task.add_done_callback(self._discard_task)

    def _discard_task(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.ended.set()


class _Turns:
    """Calls functions that start or continue handlers in order, at most `per_iteration` in one loop iteration."""

    def __init__(self, per_iteration: int) -> None:
        self._left = self._per_iteration = per_iteration  # that may still be called in this iteration
        self._waiting = deque[Callable[[], None]]()  # empty while any are left

    def add(self, call: Callable[[], None]) -> None:
        """Call a function in its turn."""
        if self._left == self._per_iteration:
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        if self._left:
            self._left -= 1
            call()
        else:
            self._waiting.append(call)

    def _begin_iteration(self) -> None:
        self._left = self._per_iteration
        for _ in range(min(self._per_iteration, len(self._waiting))):
            self.add(self._waiting.popleft())


class RequestTrace:
    """The times of a request, which begins now, in headers of its response, for clients that measure latency.

    None is stored or logged.
    """

    def __init__(self, trace_id: bytes, clock: Clock) -> None:
        self._id = trace_id
        self._clock = clock
        self._started_at, self._started = clock.now(), clock.monotonic()
        self._body: list[tuple[bytes, bytes]] = []

    def note_body_end(self) -> None:
        """Note that the body was received completely."""
        self._body = [(b"x-vote-body-read-us", self._elapsed_us())]

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of a response that begins now."""
        started = b"%d" % (self._started_at * 1e6)
        times = [(b"x-vote-handler-started-us", started), (b"x-vote-handler-duration-us", self._elapsed_us())]
        return [(TRACE_HEADER, self._id.lower()), *times, *self._body]

    def _elapsed_us(self) -> bytes:
        return b"%d" % ((self._clock.monotonic() - self._started) * 1e6)


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A request and the sending of its response.

    Attributes:
        connection: the connection; None when the response is complete or not wanted any more.
        id, trace: set by the edge; `trace` is None if the request is not traced.
        body: received bytes of the body that the handler has not taken.
        is_body_complete: whether the body was received completely.
        has_response_begun: whether the response's status is decided.
    """

    connection: Connection | None
    head: RequestHead
    addresses: Addresses
    id: str = ""
    trace: RequestTrace | None = None
    body: bytes | bytearray = b""
    is_body_complete: bool = False
    has_response_begun: bool = False
    _changed: asyncio.Event | None = None  # set when a part of the body arrives, and at the end
    _is_end_taken: bool = False
    _head_lines: bytes = b""  # the begin of the response, written with the first part of its body
    _body_left: int | None = 0  # bytes of the response's body; None if it has no length
    _is_chunked: bool = False

    # ------------------------------------------------------------------ for the handler: request

    @property
    def has_left(self) -> bool:
        """Whether no response can be sent any more: the client has left, or the request was refused."""
        return self.connection is None or self.connection.transport.is_closing()

    async def receive(self) -> tuple[bytes, bool]:
        """The next part of the body, and whether more follows. After the last one, waits for the end.

        Raises:
            ClientLeft: the client has left, the request was refused, or its response is complete.
        """
        connection = self.connection
        if self.head.expects_continue and connection is not None and not self.has_response_begun:
            self.head.expects_continue = False
            connection.transport.write(_CONTINUE)
        while self.connection is not None:
            if self.body or (self.is_body_complete and not self._is_end_taken):
                body, self.body = bytes(self.body), b""
                self._is_end_taken = self.is_body_complete
                self.connection.adjust_reading()
                return body, not self._is_end_taken
            if self._changed is None:
                self._changed = asyncio.Event()
            self._changed.clear()
            await self._changed.wait()
        raise ClientLeft("the client disconnected")

    async def wait_turn(self) -> None:
        """Wait until it is the turn of a handler that has waited for the body: many bodies may end in one moment."""
        if self.connection is not None:
            await self.connection.listener.wait_turn(self)

    # ------------------------------------------------------------------ for the handler: response

    def begin_response(self, status: int, headers: Headers) -> None:
        """Begin a response. The head is sent with the first part of the body, or in the next iteration of the loop.

        Without `content-length`, the response is chunked. It must fit this header. Nothing if the client has left.
        """
        connection = self.connection
        if connection is not None:
            self._head_lines = self._encode_head(connection, status, headers)
            asyncio.get_running_loop().call_soon(self._send_head)

    async def send(self, part: bytes, *, more: bool) -> None:
        """Send a part of the response's body in pieces, each after the client has read those before.

        Nothing if it has left. The response to HEAD gets no body.
        """
        rest = memoryview(part)  # not copied, because connections can share a document
        while len(rest) > _PIECE_BYTES:
            await self._send_piece(rest[:_PIECE_BYTES], more=True)
            rest = rest[_PIECE_BYTES:]
        await self._send_piece(rest, more=more)

    async def _send_piece(self, part: bytes | memoryview, *, more: bool) -> None:
        if self.connection is not None:
            await self.connection.wait_sent()
        connection = self.connection
        if connection is None:
            return
        if self.head.method == "HEAD":
            part = b""
        elif self._body_left is not None:
            self._body_left -= len(part)
            if self._body_left < 0 or (self._body_left and not more):
                raise ValueError("the response's body does not fit its content-length")
        elif self._is_chunked:
            part = (b"%x\r\n%b\r\n" % (len(part), bytes(part)) if part else b"") + (b"" if more else b"0\r\n\r\n")
        if self._head_lines:
            part, self._head_lines = self._head_lines + part, b""
        if part:
            connection.transport.write(part)
        if not more:
            self.drop()
            connection.end_response(self)

    def abort(self) -> None:
        """Abort the connection, which is the only way to mark a response as incomplete."""
        if self.connection is not None:
            self.connection.abort()

    # ------------------------------------------------------------------ for the connection

    def add_body(self, part: bytes) -> None:
        """Store a received part of the body, unless the request was dropped."""
        if self.connection is None:
            return
        self.body = append_part(self.body, part)
        self._notify()

    def end_body(self) -> None:
        """Mark the body as complete."""
        self.is_body_complete = True
        if self.trace is not None:
            self.trace.note_body_end()
        self._notify()

    def drop(self) -> None:
        """Drop the request: its response is not wanted any more, or complete."""
        self.connection = None
        self.body = b""
        self._notify()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def _encode_head(self, connection: Connection, status: int, headers: Headers) -> bytes:
        """Encode the head of the response, and determine how its body ends."""
        if self.has_response_begun:
            raise RuntimeError("the response has already begun")
        says_close = is_chunked = False
        length: int | None = None
        lines = [_STATUS_LINES[status], connection.listener.date_line()]
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
                continue
            if name == b"transfer-encoding":
                is_chunked = True
            elif name == b"connection" and b"close" in value.lower():
                says_close = True
            lines.append(b"%b: %b\r\n" % (name, value))
        if says_close or connection.listener.is_stopping:
            self.head.keep_alive = False
        if status not in _BODILESS_STATUSES:
            if length is not None:
                lines.append(b"content-length: %d\r\n" % length)
            elif self.head.http_version == "1.1" and self.head.method != "HEAD" and not is_chunked:
                is_chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        if not self.head.keep_alive and not says_close:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        head = b"".join(lines)
        if not head.count(b"\n") == head.count(b"\r") == len(lines):
            raise ValueError("a header of the response has a line end")
        self._body_left, self._is_chunked = length, is_chunked
        self.has_response_begun = True
        connection.move(State.RESPONDING)
        return head

    def _send_head(self) -> None:
        head, self._head_lines = self._head_lines, b""
        if head and self.connection is not None:
            self.connection.transport.write(head)


def append_part(body: bytes | bytearray, part: bytes) -> bytes | bytearray:
    """Return a body with another part. It is one buffer: freed pieces would stay in the heap, between smaller objects.

    The first part is not copied. In almost every share it is the only one, and many clients may stall behind it.
    """
    if not body or not part:
        return body or part
    if isinstance(body, bytes):
        body = bytearray(body)
    body += part
    return body


class Connection(ConnectionProgress, asyncio.BufferedProtocol):
    """A connection.

    A read returns at most `READ_BYTES`, so unread data stays in the kernel's buffers, which are bounded. All
    connections share one buffer: a read is processed before the next one begins.

    Attributes:
        transport, addresses: set by `connection_made`.
    """

    _buffer: ClassVar = memoryview(bytearray(READ_BYTES))
    transport: asyncio.Transport
    addresses: Addresses

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._loop = asyncio.get_running_loop()
        self._state = State.NEW
        self._parser = RequestParser(listener.limits, self._begin_request)
        self._request: Request | None = None  # from the end of its head to the end of its body and response
        self._unparsed = b""  # bytes behind the request; nothing is read while there are any
        self._discardable_bytes = 0  # that are still discarded in the states DRAINING and LINGERING
        self._is_reading = True
        self._deadline: asyncio.TimerHandle | None = None  # of the state
        self._stall: asyncio.TimerHandle | None = None  # when the client must have read something
        self._stalled_since: float | None = None  # since when there are unsent bytes, in event loop time
        self._unsent_bytes = 0  # when `_stall` was set
        self._sent: asyncio.Event | None = None  # set when there are none any more; None if nothing waits for that

    def move(self, state: State) -> None:
        """Change the state.

        Raises:
            RuntimeError: the transition is not allowed.
        """
        if state not in TRANSITIONS[self._state]:
            raise RuntimeError(f"a connection cannot change from {self._state.name} to {state.name}")
        self._state = state

    # ------------------------------------------------------------------ events of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request, or refuse the connection when a limit is reached."""
        self.transport = transport = cast("asyncio.Transport", transport)
        listener, limits, now = self.listener, self.listener.limits, self._loop.time()
        # writing pauses, and so the bytes are counted, as soon as the kernel's buffer is full
        transport.set_write_buffer_limits(high=0)
        sock: socket.socket = transport.get_extra_info("socket")
        is_unix = sock.family == socket.AF_UNIX
        send_buffer = UNIX_SEND_BUFFER_BYTES if is_unix else SEND_BUFFER_BYTES
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        if not is_unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, KERNEL_UNSENT_BYTES)
        self.addresses = _read_addresses(sock)
        if listener.trusted_networks and self.addresses.client is not None:
            self.is_proxy = is_in_networks(parse_address(self.addresses.client[0]), listener.trusted_networks)
        excess = len(listener.connections) + 1 - limits.max_connections
        has_room = excess <= 0 or listener.evictor.make_room(excess, now)
        listener.connections.add(self)
        self.started_at = now
        if has_room:
            self._set_deadline(now + limits.head_seconds)
        else:
            with contextlib.suppress(OSError):
                os.read(sock.fileno(), READ_BYTES)  # closing with a request unread would reset the connection
            self._refuse(find_refusal(Situation.TOO_MANY_CONNECTIONS, names_attempt=False), lingers=False)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (required by the protocol)
        """Stop all timers and release everything, so that this object is freed without the garbage collector."""
        self._end(State.CLOSED)
        self._end_stall()
        self.listener.discard_connection(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (required by the protocol)
        """Return the buffer for the next read."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Process received bytes as the state requires."""
        if self._state in _DISCARDING:
            self._discardable_bytes -= nbytes
            if self._discardable_bytes < 0:
                self._close()
        if self._state in _ENDED:
            return
        data = bytes(self._buffer[:nbytes])
        request = self._request
        if request is None or not request.is_body_complete:
            self._receive(data)
        elif request.head.keep_alive:
            self._unparsed += data
            self.adjust_reading()

    def eof_received(self) -> bool:
        """Handle a closed sending side of the client: answer a complete request, drop a partial one, then close.

        Returns:
            True to keep the connection open for writing.
        """
        request = self._request
        if request is None or not request.is_body_complete:
            self._close()
            return False
        request.head.keep_alive = False
        if self._deadline is None:  # a transport that reads again after a pause reports the end again
            self._set_deadline(self._loop.time() + self.listener.limits.half_closed_seconds)
        return True

    def pause_writing(self) -> None:
        """Limit the time in which the client must read: bytes are unsent. Drop connections if there are too many."""
        self._stalled_since = self._loop.time()
        self._limit_stall()
        self.listener.release(self)  # it has read what was sent before
        self.adjust_reading()

    def _limit_stall(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._stall = self._loop.call_later(self.listener.limits.stalled_seconds, self._on_stall)

    def _on_stall(self) -> None:
        """Abort the connection if the client has read nothing; close() would wait until it has read everything.

        Not that of a proxy. It reads in steps of megabytes, each when its slow client has taken the one before.
        """
        if self.transport.get_write_buffer_size() >= self._unsent_bytes and not self.is_proxy:
            self.abort()
        else:
            self._limit_stall()

    async def wait_sent(self) -> None:
        """Wait until there are no unsent bytes, or the connection is closed."""
        if self._stalled_since is not None:
            self._sent = self._sent or asyncio.Event()
            await self._sent.wait()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
        self._stall = self._stalled_since = None
        if self._sent is not None:
            self._sent.set()
            self._sent = None

    def resume_writing(self) -> None:
        """Continue what waited until all bytes are sent."""
        self._end_stall()
        self.adjust_reading()
        if self._state is State.WAITING:
            self._run_in_turn()

    # ------------------------------------------------------------------ a request, from its first byte to its handler

    def _receive(self, data: bytes) -> None:
        """Parse received bytes up to the end of the current request, and keep the others."""
        at = 0
        while at < len(data) and (self._request is None or not self._request.is_body_complete):
            if self._state in _BEFORE_HEAD:
                at, data = 0, data[at:].lstrip(b"\r\n")
                if not data:
                    break
                if self._state is State.IDLE:
                    self.is_idle, self.started_at = False, self._loop.time()
                self.move(State.HEAD)
            try:
                at = self._parser.feed(data, at)
            except InvalidRequestError as error:
                self._refuse(error.refusal)
                return
            is_drained = self._state is State.DRAINING and self._request is not None and self._request.is_body_complete
            if is_drained and not self._end_request():
                return
        if self._request is not None and self._request.head.keep_alive:
            self._unparsed = data[at:]
        self._continue(len(data))
        self.adjust_reading()

    def _continue(self, size: int) -> None:
        """Call the handler if the head is complete, and set the limits of an incomplete request."""
        request = self._request
        if self._state is State.HEAD and request is None:
            self._set_deadline(self.started_at + self.listener.limits.head_seconds)
        elif self._state is State.HEAD:
            self.move(State.WAITING)
            self._set_deadline(None)
            self._run_in_turn()
        if request is not None and request.is_body_complete:
            self.listener.evictor.clear_pending(self)
        elif self._state not in _DISCARDING and self._state is not State.IDLE:
            self.listener.evictor.add_pending(self, size, self._loop.time())

    def _begin_request(self, head: RequestHead) -> Request:
        self._request = Request(self, head, self.addresses)
        return self._request

    def _run_in_turn(self) -> None:
        """Call the handler in turn, but not before the client has read the earlier responses.

        Otherwise each connection of a client that reads nothing holds two responses, of which one is not counted.
        """
        if self._stalled_since is None and self._request is not None:
            self.listener.run_in_turn(self, self._request)

    def run(self) -> None:
        """Call the handler, unless the request was dropped while it waited."""
        if self._state is State.WAITING and self._request is not None:
            self.move(State.RUNNING)
            self.listener.add_task(self._loop.create_task(self._handle(self._request)))

    async def _handle(self, request: Request) -> None:
        try:
            await self.listener.edge(request)
        except asyncio.CancelledError:
            pass  # the server stops, and has refused the request
        except Exception:
            log.exception("request_failed")
        finally:
            if request.has_response_begun:
                request.abort()  # unless it is complete
            elif request.connection is not None:
                self._refuse(Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error"))

    # ------------------------------------------------------------------ a response, and what follows it

    def end_response(self, request: Request) -> None:
        """Continue after a complete response: with the rest of the request's body, the next request, or the end."""
        if request.is_body_complete:
            if self._end_request() and self._unparsed:
                data, self._unparsed = self._unparsed, b""
                self._receive(data)
        else:  # the body may be on its way even if the client awaits a 100 response
            self.move(State.DRAINING)
            self.is_idle = True  # for the evictor: the client has its response
            self._discard(self.listener.limits.head_seconds if request.head.keep_alive else DRAIN_SECONDS)

    def _end_request(self) -> bool:
        """Wait for the next request, or close. Returns whether the connection stays open."""
        request, self._request = self._request, None
        if request is None or not request.head.keep_alive or self.listener.is_stopping:
            self._close()
            return False
        self.move(State.IDLE)
        self.is_idle = self.is_served = True
        self.started_at = self._loop.time()
        self._set_deadline(self.started_at + self.listener.limits.keep_alive_seconds)
        self.adjust_reading()
        return True

    @property
    def held_bytes(self) -> int:
        """Bytes that wait because of the client, with those that the kernel may have received."""
        return self.transport.get_write_buffer_size() + len(self._unparsed) + RECEIVE_BUFFER_BYTES

    def adjust_reading(self) -> None:
        """Read from the transport only while the bytes can be used, so that the client cannot make them many."""
        request, listener = self._request, self.listener
        is_held = bool(self._unparsed) or self._stalled_since is not None
        if not is_held:
            listener.release(self)
        elif self not in listener.held:
            listener.hold(self)
        reads = not is_held and (request is None or len(request.body) <= READ_BYTES)
        if reads is not self._is_reading and not self.transport.is_closing():
            self._is_reading = reads
            if reads:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    # ------------------------------------------------------------------ ends

    def _set_deadline(self, at: float | None) -> None:
        """Move the deadline of the state, in event loop time, or clear it."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if at is None else self._loop.call_at(at, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._state is State.HEAD:
            seconds = self.listener.limits.head_seconds
            self._refuse(find_refusal(Situation.SLOW_HEAD, seconds, names_attempt=False), lingers=False)
        else:
            self._close()

    def is_evictable(self) -> bool:
        """Whether no complete request is being answered. One that waits for its turn is not, except a posted share."""
        request = self._request
        if request is not None and not request.is_body_complete:
            return True
        if self.transport.get_write_buffer_size():
            since = self._stalled_since
            return since is not None and self._loop.time() - since >= self.listener.limits.stalled_seconds
        if request is None:
            return self._state not in _ENDED
        return self._state is State.WAITING and not self.listener.edge.posts_share(request)

    def evict(self) -> None:
        """Close the connection, because others need its place or memory; refuse a request that is not answered yet."""
        if self.transport.get_write_buffer_size():
            self.abort()
        elif self._state is State.HEAD:
            self._refuse(find_refusal(Situation.TOO_MANY_CONNECTIONS, names_attempt=False), lingers=False)
        elif self._state in _UNANSWERED and self._request is not None:
            names_attempt = attempt_token(self._request.head.headers) is not None
            self._refuse(find_refusal(Situation.TOO_MANY_SLOW_REQUESTS, names_attempt=names_attempt))
        else:
            self.abort()

    def close_idle(self) -> None:
        """Close the connection if it is idle."""
        if self._state is State.IDLE:
            self._close()

    def stop_now(self) -> None:
        """Refuse a request that is not answered yet, and abort an incomplete response."""
        if self._state in _UNANSWERED and not self.transport.get_write_buffer_size():
            self._refuse(find_refusal(Situation.STOPPING, names_attempt=False))
        elif self._state in _UNANSWERED or self._state is State.RESPONDING:
            self.abort()

    def _refuse(self, refusal: Refusal, *, lingers: bool = True) -> None:
        """Refuse the request being received or handled, and close; only close if its response has begun."""
        if self._state not in _UNANSWERED or self.transport.is_closing():
            self._close()
            return
        response = self.listener.edge.refuse(refusal)
        lines = [b"%b: %b\r\n" % header for header in response.raw_headers]
        lines += [b"connection: close\r\n\r\n", bytes(response.body)]
        self.transport.write(b"".join([_STATUS_LINES[response.status_code], self.listener.date_line(), *lines]))
        if lingers:
            self._end(State.LINGERING)
            with contextlib.suppress(OSError):  # the client has left, which is not noticed while nothing is read
                self.transport.write_eof()
            self._discard(LINGER_SECONDS)
        else:
            self._close()

    def _discard(self, seconds: float) -> None:
        """Discard input for some time, up to some size."""
        self._discardable_bytes = MAX_DISCARDED_BYTES
        self.started_at = self._loop.time()  # the client has time to read the response
        self._set_deadline(self.started_at + seconds)
        self.listener.evictor.clear_pending(self)
        self.adjust_reading()

    def _close(self) -> None:
        """Close the connection once all bytes are sent; abort it if its response is incomplete."""
        if self._state is State.RESPONDING and self._request is not None and self._request.connection is not None:
            self.abort()
            return
        self._end(State.CLOSED)
        self.transport.close()

    def abort(self) -> None:
        """Close the connection immediately. Reset it if that cuts off a response.

        Otherwise a client of HTTP/1.0 would take the response for complete, and the kernel would keep for minutes what
        the client does not read.
        """
        sock: socket.socket = self.transport.get_extra_info("socket")
        is_cut_off = self._state is State.RESPONDING or self.transport.get_write_buffer_size()
        if is_cut_off and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._end(State.CLOSED)
        self.transport.abort()

    def _end(self, state: State) -> None:
        """Drop the request and its bytes."""
        if self._state not in _ENDED:
            self._parser.close()
        if self._state is not State.CLOSED:
            self.move(state)
        self._set_deadline(None)
        self._unparsed = b""
        self.listener.evictor.clear_pending(self)
        request, self._request = self._request, None
        if request is not None:
            request.drop()


def _read_addresses(sock: socket.socket) -> Addresses:
    own = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        return Addresses(None, (str(own), None), user)
    try:
        client = sock.getpeername()[:2]
    except OSError:
        client = None
    return Addresses(client, own[:2], None)
