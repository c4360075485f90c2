"""HTTP/1.1 connections with limits that uvicorn lacks.

Limits the time and size of a request head, the time of a body that the application no longer reads, the time that a
client may leave a response unread, and the number of connections.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, ClassVar, Final, Protocol, cast

import httptools
import orjson
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from helper.ingest.payload import SMALL_BODY, error_answer
from helper.server import peer_credentials
from helper.server.body_reader import DRAIN_BYTES, DRAIN_SECONDS, WHOLE
from helper.server.deadline import Deadline
from helper.server.middleware import RETRY_AFTER_SECONDS, CorsMiddleware, error_response
from helper.server.rate_limits import costs

CUT: Final = "cut"
"""Key in a request's state of a function that aborts its connection: the only way to mark a response as incomplete."""

MAX_PIPELINED: Final = 1
"""Parsed requests of one connection that may wait for the response to an earlier one.

A parsed request takes up to thirty times the memory of its bytes, so further requests wait unparsed.
"""
READ_BYTES: Final = 16 << 10
"""Maximum bytes of one read, and of a connection's unparsed data: nothing is read while requests wait."""
_HEAD_END: Final = b"\n\r\n"
"""The end of every request head that llhttp accepts."""

_STOPPING: Final = CorsMiddleware(
    error_response(
        HTTPStatus.SERVICE_UNAVAILABLE.value,
        "the service is stopping; retry later",
        {"Retry-After": str(RETRY_AFTER_SECONDS), "Connection": "close"},
    )
)
"""Answers requests that the stop of the service interrupts."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections.

    Attributes:
        head_seconds: from the connection, or a request's first byte, to the end of its headers.
        request_seconds: from the same moment to the end of the body, so that a client that is slow with both is cut
            off within 10 s.
        half_closed_seconds: for the response to a client that has closed its sending side. A client that is gone looks
            the same, so this also limits how long requests of such clients run.
        stalled_seconds: a connection is dropped if the client reads nothing of a waiting response for this long.
        head_bytes: size of a request line with its headers; also of the chunk framing and trailers of a body.
        headers: number of headers and trailers of one request.
        connections: concurrent connections. For one more, the server closes an idle connection of the client with the
            most connections, or refuses the new one.
        connections_each: concurrent connections of one client.
    """

    head_seconds: float = 8.5
    request_seconds: float = 9.0
    half_closed_seconds: float = 10.0
    stalled_seconds: float = 10.0
    head_bytes: int = 64 << 10
    headers: int = 100
    connections: int = 4096
    connections_each: int = 1024


class ClientPolicy(Protocol):
    """Identifies clients and charges them for refused connections."""

    def who(self, peer_credentials: str | None) -> bytes | None:
        """The client of a peer address; None for a peer without limits: a trusted proxy, or a unix socket."""
        ...

    def pay(self, client: bytes) -> None:
        """Charge a client whose connection was refused before there was a request."""
        ...

    def refused(self, status: int) -> None:
        """Count a connection that was refused with this status."""
        ...


class NoClientPolicy:
    """Policy without client limits."""

    def who(self, peer_credentials: str | None) -> bytes | None:  # noqa: ARG002 (the protocol's)
        """Return None: no peer has limits."""
        return None

    def pay(self, client: bytes) -> None:
        """Do nothing."""

    def refused(self, status: int) -> None:
        """Do nothing."""


class _RefusedError(Exception):
    """Stops the parser; the response is in `_refusal`."""


class _PipelineFlow(FlowControl):
    """uvicorn's flow control, without resuming reads while requests wait in the pipeline."""

    def __init__(self, transport: asyncio.Transport, pipeline: deque[Any]) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        """Resume unless requests wait. uvicorn calls this after each response, and when the app reads a body."""
        if not self._pipeline:
            super().resume_reading()


class _SmallReads(asyncio.BufferedProtocol):
    """Forwards a transport's events to a connection, with reads of at most `READ_BYTES`.

    By default a read returns up to 256 KiB, and each connection may hold one. Unread data stays in the kernel's
    buffers, which are bounded. All connections share one buffer: a read is delivered before the next one begins.
    """

    _buffer: ClassVar = memoryview(bytearray(READ_BYTES))

    def __init__(self, connection: BoundedProtocol) -> None:
        self._connection = connection

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (the protocol's)
        """Memory for the next read."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Deliver a copy of the bytes read."""
        self._connection.data_received(bytes(self._buffer[:nbytes]))

    def eof_received(self) -> bool:
        """Forward to the connection."""
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        """Forward to the connection."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Forward to the connection."""
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forward to the connection."""
        self._connection.connection_lost(exc)


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 connection with limits; `bounded` returns a subclass with other limits."""

    limits = ConnectionLimits()
    door: ClientPolicy = NoClientPolicy()
    held: ClassVar[defaultdict[bytes, set[BoundedProtocol]]] = defaultdict(set)  # connections by client

    def __init__(self, *arguments: Any, **parts: Any) -> None:
        super().__init__(*arguments, **parts)
        self._peer: bytes | None = None  # the client
        self._cut = Deadline(self.loop, self._too_slow)  # of the current request, or of the wait for it
        self._idle = Deadline(self.loop, self.timeout_keep_alive_handler)
        self._stalled: asyncio.TimerHandle | None = None
        self.since = 0.0  # when the current request, or the wait for it, began
        self._in_head = True  # or between two requests
        self._unread = 0  # bytes received since the parser last reported a part of a body or the end of a head
        self._head_size = 0
        self._header_count = 0
        self._running: RequestResponseCycle | None = None  # the latest request that the application was called for
        self._unparsed = b""  # received bytes that wait until the pipeline is empty
        self._refusal = (HTTPStatus.BAD_REQUEST, "invalid HTTP/1.1 request")
        # Replaces uvicorn's parser, which goes on after a request with `Connection: close`.
        self.parser = httptools.HttpRequestParser(self)
        self._is_last_request = False  # the last request is complete; what follows it is discarded
        self._last_response: bytes | None = None  # the refusal to send after the responses to earlier requests
        self._discardable: int | None = None  # bytes still discarded after a refusal; None before it is sent

    # ------------------------------------------------------------------ transport events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request, or refuse the connection when a limit is reached."""
        super().connection_made(cast("asyncio.Transport", transport))
        self.transport.set_protocol(_SmallReads(self))
        self.flow = _PipelineFlow(self.transport, self.pipeline)
        own = {peer_credentials.KEY: peer_credentials.peer_of(transport), CUT: self.transport.abort}
        self.app_state = {**self.app_state, **own}  # each request's state is a copy of it
        self._peer = self.door.who(self.client[0] if self.client else None)
        own_count = 0
        if self._peer is not None:
            self.held[self._peer].add(self)
            own_count = len(self.held[self._peer])
        if own_count > self.limits.connections_each:
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, "too many connections from this client; retry later")
        elif len(self.connections) > self.limits.connections and not self._make_room(own_count):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections; retry later")
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers and release the connection."""
        self._cut.close()
        self._idle.close()
        self.app_state = {}  # breaks a reference cycle, so that this object is freed without the garbage collector
        self._stop_stall_timer()
        if self._running is not None:
            # uvicorn does this only for the request parsed last; a write after the end raises an exception.
            self._running.disconnected = True
            self._running.message_event.set()
        for cycle, _ in self.pipeline:
            cycle.on_response = _do_nothing  # never called, and its reference would keep this object alive
        self.pipeline.clear()
        if self.cycle is not None:
            self.cycle.transport = self.transport
        self._unparsed = b""
        if self._peer is not None:
            self.held[self._peer].discard(self)
            if not self.held[self._peer]:
                del self.held[self._peer]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; enforce the limits on the head."""
        if self._is_last_request:
            self._discard(len(data))
            return
        if self._in_head and not self._cut:
            self._arm()
        self._idle.clear()
        if not self._unparsed and not self.pipeline and _ends_at_most_one_head(data):
            self._parse(data)
        else:
            self._unparsed += data
            self._parse_pieces()

    def eof_received(self) -> bool:  # type: ignore[override] # uvicorn always closes
        """The client has closed its sending side: answer complete requests, drop a partial one, then close.

        Returns:
            True to keep the connection open for writing.
        """
        if self._last_response is None:
            if not self._answering() or self.cycle.more_body:
                return False
            self.cycle.keep_alive = False
            self._is_last_request = True
            self._cut.clear()
        self._idle.set(self.loop.time() + self.limits.half_closed_seconds)
        return True

    def pause_writing(self) -> None:
        """The write buffer is full: start the stall timer."""
        super().pause_writing()
        self._check_stalled(None)

    def resume_writing(self) -> None:
        """The client reads again: stop the stall timer."""
        super().resume_writing()
        self._stop_stall_timer()

    # ------------------------------------------------------------------ parser events

    def on_message_begin(self) -> None:
        """Begin a request."""
        if self._is_last_request:
            raise _RefusedError  # httptools reads on after a keep-alive request of HTTP/1.0
        self._in_head, self._head_size, self._header_count = True, 0, 0
        if not self._cut:
            self._arm()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Measure and store a part of the path."""
        self._measure(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; drop a trailer after a body, which is not a header (RFC 9110, section 6.5)."""
        self._header_count += 1
        if self._header_count > self.limits.headers:
            self._refusal = (
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"headers: more than {self.limits.headers} headers",
            )
            raise _RefusedError
        self._measure(len(name) + len(value))
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request: its head is complete."""
        upgrade = self.parser.should_upgrade()
        if upgrade and self.parser.get_method() == b"CONNECT":
            self._refusal = (HTTPStatus.BAD_REQUEST, "CONNECT is not supported")
            raise _RefusedError
        self._in_head, self._unread = False, 0
        self._idle.clear()
        self._cut.set(self.since + self.limits.request_seconds)
        super().on_headers_complete()
        if upgrade:
            self.cycle.keep_alive = False
            self.cycle.transport = cast("asyncio.Transport", self._closed_after_body())

    def on_body(self, body: bytes) -> None:
        """Store a part of the body; `BodyReader` limits its size."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request: its body is complete."""
        if self.parser.should_upgrade():
            return  # httptools ends a request with `Upgrade` at its head; `_parse` reads the body
        self._is_last_request = not self.cycle.keep_alive
        self._in_head, self._unread = True, 0
        self._cut.clear()
        super().on_message_complete()
        if self.cycle.response_complete and self._is_last_request:
            self.transport.close()
        elif self.cycle.response_complete:
            # The response was complete before the request, so `on_response_complete` could not start this timer.
            self._idle.set(self.loop.time() + self.timeout_keep_alive)
        elif not self.expect_100_continue and len(self.cycle.body) <= SMALL_BODY:
            # Not with `Expect: 100-continue`: uvicorn sends the 100 response when the application reads the body.
            self.scope["state"][WHOLE] = self.cycle.body

    def on_response_complete(self) -> None:
        """Start the next request of the pipeline; limit the time for an unread rest of the request body.

        The first half replaces uvicorn's, which sets a timer for each response and reads on while requests wait.
        """
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self._idle.clear()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
                if not self.pipeline:
                    self._leave_pipeline()
            elif self._last_response is not None:
                self._send_last(self._last_response)
                return
            else:
                self._idle.set(self.loop.time() + self.timeout_keep_alive)
            self.flow.resume_reading()
        if self._in_head or not self.cycle.response_complete:
            return
        if self.expect_100_continue:
            # The client need not send the announced body after a final response, so the next bytes are ambiguous.
            self.transport.close()
        elif not self._cut:
            self._arm()

    # ------------------------------------------------------------------ parsing

    def _parse(self, data: bytes) -> None:
        """Feed bytes to the parser; replaces uvicorn's method, which loses the body of an `Upgrade` request.

        No upgrade is supported, and a server may ignore the header (RFC 9110, section 7.8). httptools cannot ignore
        it: it ends the request at its head. The body is read by a second parser, and the connection is closed after
        the response.
        """
        self._unread += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._ignore_upgrade()
                self.parser.feed_data(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._is_last_request:
                self._reject(*self._refusal)
        if self._unread > self.limits.head_bytes and not self._is_last_request:
            self._reject(*self._too_large())

    def _parse_pieces(self) -> None:
        """Feed the unparsed bytes to the parser, until the pipeline is full.

        httptools cannot stop in the middle of its input, so no piece ends more than one request head.
        """
        data, at = self._unparsed, 0
        while at < len(data) and len(self.pipeline) < MAX_PIPELINED:
            if self._is_last_request or self.transport.is_closing():
                at = len(data)
                break
            end = _piece_end(data, at)
            self._parse(data[at:end])
            at = end
        self._unparsed = data[at:]

    def _leave_pipeline(self) -> None:
        """The last request of the pipeline has started: parse what was received meanwhile."""
        if self._cut:
            self._arm()  # the client could not send the rest of this request before
        self._parse_pieces()

    def _ignore_upgrade(self) -> None:
        """Replace the parser by one that reads the body of the current request, and nothing after it.

        The new parser is fed a head with the framing headers of the request, so llhttp applies the same rules to the
        body as it does without an upgrade. `Connection: close` makes it reject whatever follows the body.
        """
        framing = [header for header in self.headers if header[0] in {b"content-length", b"transfer-encoding"}]
        lines = [b"POST / HTTP/1.1", b"connection: close", *(b"%b: %b" % header for header in framing), b"", b""]
        callbacks = SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete)
        self.parser = httptools.HttpRequestParser(callbacks)
        self.parser.feed_data(b"\r\n".join(lines))

    def _closed_after_body(self) -> SimpleNamespace:
        """The transport for a response with `Connection: close`; it closes once the request body is read too.

        Closing with bytes unread resets the connection, and the client may lose the response.
        """

        def close() -> None:
            if not self.cycle.more_body:
                self.transport.close()

        return SimpleNamespace(write=self.transport.write, is_closing=self.transport.is_closing, close=close)

    def _measure(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self.limits.head_bytes:
            self._refusal = self._too_large()
            raise _RefusedError

    def _too_large(self) -> tuple[HTTPStatus, str]:
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers: are larger than {self.limits.head_bytes} bytes"

    # ------------------------------------------------------------------ limits and refusals

    def _make_room(self, own_count: int) -> bool:
        """Abort the longest-idle connection of the client with the most connections; return whether there was one.

        Not for a client that holds as many itself. Without this, a few clients at their limit could block all others.
        """
        most: set[BoundedProtocol] = max(self.held.values(), key=len, default=set())
        idle = [connection for connection in most if connection.waits_for_client()]
        if len(most) <= own_count or not idle:
            return False
        # Abort, because close() would keep the place until the write buffer is empty.
        min(idle, key=lambda connection: connection.since).transport.abort()
        return True

    def _arm(self) -> None:
        if not self.transport.is_closing():
            self.since = self.loop.time()
            self._cut.set(self.since + self.limits.head_seconds)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, partial(self._serve, cycle, app))

    async def _serve(self, cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; respond 503 when the server cancels it (uvicorn would respond 500 and log an error)."""
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if cycle.response_started or self.transport.get_write_buffer_size():
                cycle.disconnected = True  # otherwise uvicorn logs an incomplete response
                self.transport.abort()
                return
            self.door.refused(HTTPStatus.SERVICE_UNAVAILABLE.value)
            await _STOPPING(scope, receive, send)

    def _unset_keepalive_if_required(self) -> None:
        self._idle.clear()  # uvicorn cancels its own timer here

    def _too_slow(self) -> None:
        if self.pipeline or (self._in_head and self._answering()):
            self._arm()  # an earlier request is still being answered; nothing is read meanwhile
        elif self._unread and self._in_head:
            seconds = f"{self.limits.head_seconds:g}"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"request headers timed out after {seconds} s")
        else:
            self.transport.close()

    def _check_stalled(self, before: int | None) -> None:
        """Abort if the client has read nothing since the last check; else check again after `stalled_seconds`."""
        left = self.transport.get_write_buffer_size()
        if before is not None and left >= before:
            self.transport.abort()  # close() would wait until the client has read the rest
            return
        self._stalled = self.loop.call_later(self.limits.stalled_seconds, self._check_stalled, left)

    def _stop_stall_timer(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def waits_for_client(self) -> bool:
        """Whether it is idle, or a request is incomplete, and no request is being answered."""
        if self.transport.is_closing():
            return False
        return bool(self._cut) or (self._in_head and not self._answering())

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Respond and close, when no request is being answered."""
        if self.transport.is_closing():
            return
        self.transport.write(self._refusal_response(status, message))
        self.transport.close()

    def _reject(self, status: HTTPStatus, message: str) -> None:
        """Refuse the request being parsed, after the responses to earlier requests, and stop parsing."""
        if self.transport.is_closing():
            return
        response = self._refusal_response(status, message)
        self._is_last_request = True
        if not self._in_head and not self._drop_incomplete_request():
            self.transport.close()
        elif self._running is None or self._running.response_complete or self._running.disconnected:
            self._send_last(response)
        else:
            self._last_response = response
            self.flow.resume_reading()  # a dropped request may have paused it

    def _drop_incomplete_request(self) -> bool:
        """Drop the request whose body is being parsed; return False if its response has begun."""
        cycle = self.cycle
        if cycle.response_started:
            return False
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
            cycle.on_response = _do_nothing
        else:
            cycle.disconnected = True
            cycle.message_event.set()
        return True

    def _refusal_response(self, status: HTTPStatus, message: str) -> bytes:
        """Count a refusal, charge the client for it, and return the response."""
        self._cut.clear()
        self.door.refused(status.value)
        if self._peer is not None and costs(status):
            self.door.pay(self._peer)
        body = orjson.dumps(error_answer(message))
        retry_after = f"retry-after: {RETRY_AFTER_SECONDS}\r\n" if status == HTTPStatus.TOO_MANY_REQUESTS else ""
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n{retry_after}"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body

    def _send_last(self, response: bytes) -> None:
        """Send a response, then discard input until the client closes; at most `DRAIN_BYTES` and `DRAIN_SECONDS`.

        Closing with bytes unread resets the connection, and the client may lose the response.
        """
        self.transport.write(response)
        self.transport.write_eof()
        self._last_response = None
        self._discardable = DRAIN_BYTES
        self.flow.resume_reading()
        self._idle.set(self.loop.time() + DRAIN_SECONDS)

    def _discard(self, size: int) -> None:
        if self._discardable is None:
            return
        self._discardable -= size
        if self._discardable < 0:
            self.transport.close()


def _ends_at_most_one_head(data: bytes) -> bool:
    """Whether received bytes end at most one request head, so that they are one piece."""
    # In a posted share the last line feed ends the head; this is much faster than a search through the body.
    last = data.rfind(b"\n")
    return last < 0 or (not data.startswith((b"\n", b"\r\n")) and data.find(_HEAD_END) + 2 == last)


def _piece_end(data: bytes, at: int) -> int:
    """End of the piece that begins at `at` and ends at most one request head: after the next end of a head.

    A line end at the start is a piece by itself, because the head that it ends may have begun in an earlier read.
    """
    if data.startswith((b"\n", b"\r\n"), at):
        return data.index(b"\n", at) + 1
    found = data.find(_HEAD_END, at)
    return found + len(_HEAD_END) if found >= 0 else len(data)


def _do_nothing() -> None:
    pass


def bounded(limits: ConnectionLimits, door: ClientPolicy | None = None) -> type[BoundedProtocol]:
    """Return a protocol class with these limits; uvicorn requires a class."""
    return type(
        "Bounded", (BoundedProtocol,), {"limits": limits, "door": door or NoClientPolicy(), "held": defaultdict(set)}
    )
