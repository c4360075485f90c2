"""One connection's limits, which uvicorn does not have: how long and how large a request's head may be, how long
a body may be dragged on that nobody reads any more, how long an answer may lie there that the client does not read, and
how many connections there may be.
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
"""The name in a request's state of what ends its connection at once: only so can an answer be said not to be whole."""

MAX_PIPELINED: Final = 1
"""Requests of one connection that may wait for the response to an earlier one. A parsed request takes up to thirty
times the memory of its bytes, so what follows waits unparsed."""
READ_BYTES: Final = 16 << 10
"""Bytes of one read, and the most that a connection holds unparsed: nothing is read while requests wait."""
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
    """What one connection may take.

    Attributes:
        head_seconds: from the connection, or a request's first byte, to the end of its headers.
        request_seconds: to the end of its body. Whoever is slow with both is cut off within 10 s all the same.
        half_closed_seconds: for the response to a client that has closed its sending side. A client that is gone looks
            the same, so this also limits how long requests of such clients go on.
        stalled_seconds: in which nothing of an answer that waits was taken: whoever does not read is dropped.
        head_bytes: of a request line with its headers; also of what a body carries beside its content.
        headers: number of headers and trailers of one request.
        connections: at once; for one more, whoever has most of them loses one that does nothing, or it is told to come
            again.
        connections_each: of one client, so that nobody can take them all.
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
    """Who comes in, and what it costs to be thrown out."""

    def who(self, peer_credentials: str | None) -> bytes | None:
        """The client at the other end; None for one without limits: a trusted proxy, a unix socket (no address)."""
        ...

    def pay(self, client: bytes) -> None:
        """This client's connection was refused before there was a request."""
        ...

    def refused(self, status: int) -> None:
        """A connection was refused with this status, whoever's it was."""
        ...


class NoClientPolicy:
    """Nobody is known."""

    def who(self, peer_credentials: str | None) -> bytes | None:  # noqa: ARG002 (the protocol's)
        """Nobody."""
        return None

    def pay(self, client: bytes) -> None:
        """Nothing."""

    def refused(self, status: int) -> None:
        """Nothing."""


class _RefusedError(Exception):
    """Stops the parser; what to answer is noted."""


class _PipelineFlow(FlowControl):
    """uvicorn's flow control, which does not resume reading while requests wait in the pipeline."""

    def __init__(self, transport: asyncio.Transport, pipeline: deque[Any]) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        """Read on, unless requests wait; uvicorn calls this after each response, and when the app asks for a body."""
        if not self._pipeline:
            super().resume_reading()


class _SmallReads(asyncio.BufferedProtocol):
    """Forwards a transport's events to a connection, with reads of at most `READ_BYTES`.

    Without it a read has up to 256 KiB, and each connection may hold one. What is not read stays in the kernel's
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
        """Forward."""
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        """Forward."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Forward."""
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forward."""
        self._connection.connection_lost(exc)


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits. `bounded` makes the class for other limits than the usual."""

    limits = ConnectionLimits()
    door: ClientPolicy = NoClientPolicy()
    held: ClassVar[defaultdict[bytes, set[BoundedProtocol]]] = defaultdict(set)  # connections by client

    def __init__(self, *arguments: Any, **parts: Any) -> None:
        super().__init__(*arguments, **parts)
        self._who: bytes | None = None
        self._cut = Deadline(self.loop, self._too_slow)  # of the request under way, or of the wait for it
        self._idle = Deadline(self.loop, self.timeout_keep_alive_handler)
        self._stalled: asyncio.TimerHandle | None = None
        self.since = 0.0  # when the request under way, or the wait for it, began
        self._in_head = True  # or between two requests
        self._unread = 0  # bytes that came since the parser last gave a part of a body or the end of a head
        self._head_size = 0
        self._header_count = 0
        self._running: RequestResponseCycle | None = None  # the request that is being answered, or was last
        self._unparsed = b""  # received bytes that wait until the pipeline is empty
        self._refusal = (HTTPStatus.BAD_REQUEST, "this is not HTTP/1.1")
        # Replaces uvicorn's parser, which goes on after a request with `Connection: close`.
        self.parser = httptools.HttpRequestParser(self)
        self._is_last_request = False  # the last request is complete; what follows it is discarded
        self._last_response: bytes | None = None  # the refusal to send after the responses to earlier requests
        self._discardable: int | None = None  # bytes still discarded after a refusal; None before it is sent

    # What the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        super().connection_made(cast("asyncio.Transport", transport))
        self.transport.set_protocol(_SmallReads(self))
        self.flow = _PipelineFlow(self.transport, self.pipeline)
        own = {peer_credentials.KEY: peer_credentials.peer_of(transport), CUT: self.transport.abort}
        self.app_state = {**self.app_state, **own}  # of which each request's state is a copy
        self._who = self.door.who(self.client[0] if self.client else None)
        mine = 0
        if self._who is not None:
            self.held[self._who].add(self)
            mine = len(self.held[self._who])
        if mine > self.limits.connections_each:
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, "too many connections at once, come again")
        elif len(self.connections) > self.limits.connections and not self._make_room(mine):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections, come again")
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._cut.close()
        self._idle.close()
        # and be gone, without the help of the cyclic collector
        self.app_state = {}
        self._read_on()
        if self._running is not None:
            # uvicorn does this for the request parsed last; what is written after the end raises an exception.
            self._running.disconnected = True
            self._running.message_event.set()
        for cycle, _ in self.pipeline:
            cycle.on_response = _do_nothing  # it never runs, and would keep this object alive
        self.pipeline.clear()
        if self.cycle is not None:
            self.cycle.transport = self.transport
        self._unparsed = b""
        if self._who is not None:
            self.held[self._who].discard(self)
            if not self.held[self._who]:
                del self.held[self._who]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse on, unless too much has come of what must be short."""
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
        """The client sends no more: answer the complete requests, then close. A partial request is dropped.

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
        """More waits to be taken by the client than is kept for it."""
        super().pause_writing()
        self._watch_reading(None)

    def resume_writing(self) -> None:
        """The client has read on."""
        super().resume_writing()
        self._read_on()

    # What the parser finds

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._is_last_request:
            raise _RefusedError  # httptools reads on after a keep-alive request of HTTP/1.0
        self._in_head, self._head_size, self._header_count = True, 0, 0
        if not self._cut:
            self._arm()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the path."""
        self._measure(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer after a body. Trailers are not headers (RFC 9110, section 6.5): they are dropped."""
        self._header_count += 1
        if self._header_count > self.limits.headers:
            self._refusal = (
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"headers: there are more than {self.limits.headers}",
            )
            raise _RefusedError
        self._measure(len(name) + len(value))
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there."""
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
        """A piece of a body; whoever reads it has limits of his own."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there."""
        if self.parser.should_upgrade():
            return  # httptools ends a request with `Upgrade` at its head; `_parse` reads the body
        self._is_last_request = not self.cycle.keep_alive
        self._in_head, self._unread = True, 0
        self._cut.clear()
        super().on_message_complete()
        if self.cycle.response_complete and self._is_last_request:
            self.transport.close()
        elif self.cycle.response_complete:
            # It was answered before its end, and its end has stopped the clock that watches idle connections.
            self._idle.set(self.loop.time() + self.timeout_keep_alive)
        elif not self.expect_100_continue and len(self.cycle.body) <= SMALL_BODY:
            # not where it was asked whether to send it: that is answered where the body is received
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
            # Whoever asked whether to send a body and was answered need not send it: what comes next may be anything.
            self.transport.close()
        elif not self._cut:
            self._arm()

    # What is done about it

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
        """The transport, for a response that announces the end of the connection; closes once the body is read too.

        To close with bytes unread resets the connection, and the client may lose the response.
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

    def _make_room(self, mine: int) -> bool:
        """Close that connection of whoever has most of them which has waited for its client longest; not for one with
        as many. A few clients who hold all that they may would keep everybody else out.
        """
        theirs: set[BoundedProtocol] = max(self.held.values(), key=len, default=set())
        waiting = [one for one in theirs if one.waits_for_client()]
        if len(theirs) <= mine or not waiting:
            return False
        min(waiting, key=lambda one: one.since).transport.abort()  # at once: its place is taken
        return True

    def _arm(self) -> None:
        if not self.transport.is_closing():
            self.since = self.loop.time()
            self._cut.set(self.since + self.limits.head_seconds)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, partial(self._serve, cycle, app))

    async def _serve(self, cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; answer 503 when the server cancels it, as uvicorn would answer 500 and log an error."""
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if cycle.response_started or self.transport.get_write_buffer_size():
                cycle.disconnected = True  # or uvicorn logs that the response is incomplete
                self.transport.abort()
                return
            self.door.refused(HTTPStatus.SERVICE_UNAVAILABLE.value)
            await _STOPPING(scope, receive, send)

    def _unset_keepalive_if_required(self) -> None:
        self._idle.clear()  # where uvicorn cancels its timer

    def _too_slow(self) -> None:
        if self.pipeline or (self._in_head and self._answering()):
            self._arm()  # an earlier request is still being answered; nothing is read meanwhile
        elif self._unread and self._in_head:
            seconds = f"{self.limits.head_seconds:g}"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the headers did not come within {seconds} s")
        else:
            self.transport.close()

    def _watch_reading(self, before: int | None) -> None:
        left = self.transport.get_write_buffer_size()
        if before is not None and left >= before:
            # Not closed: that would wait until the rest is taken.
            self.transport.abort()
            return
        self._stalled = self.loop.call_later(self.limits.stalled_seconds, self._watch_reading, left)

    def _read_on(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def waits_for_client(self) -> bool:
        """Whether it is between two requests, or one has not come whole; not while one is being answered."""
        if self.transport.is_closing():
            return False
        return bool(self._cut) or (self._in_head and not self._answering())

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer and close, where no request is being answered."""
        if self.transport.is_closing():
            return
        self.transport.write(self._refusal_response(status, message))
        self.transport.close()

    def _reject(self, status: HTTPStatus, message: str) -> None:
        """Refuse the request that is being parsed, after the responses to earlier requests, and parse no more."""
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
        """Drop the request whose body is being parsed; return whether it may still be refused: no response began."""
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
        if self._who is not None and costs(status):
            self.door.pay(self._who)
        body = orjson.dumps(error_answer(message))
        later = f"retry-after: {RETRY_AFTER_SECONDS}\r\n" if status == HTTPStatus.TOO_MANY_REQUESTS else ""
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n{later}"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body

    def _send_last(self, response: bytes) -> None:
        """Send a response, then discard what comes until the client closes; at most `DRAIN_BYTES` and `DRAIN_SECONDS`.

        To close with bytes unread resets the connection, and the client may lose the response.
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
    """Whether received bytes end one request head or none, so that they are one piece."""
    last = data.rfind(
        b"\n"
    )  # of a posted share the one that ends its head, which is much faster than to search the body
    return last < 0 or (not data.startswith((b"\n", b"\r\n")) and data.find(_HEAD_END) + 2 == last)


def _piece_end(data: bytes, at: int) -> int:
    """Where a piece that begins here and ends at most one request head ends: after the next end of a head.

    A line end comes alone, as the head that it ends may have begun before.
    """
    if data.startswith((b"\n", b"\r\n"), at):
        return data.index(b"\n", at) + 1
    found = data.find(_HEAD_END, at)
    return found + len(_HEAD_END) if found >= 0 else len(data)


def _do_nothing() -> None:
    pass


def bounded(limits: ConnectionLimits, door: ClientPolicy | None = None) -> type[BoundedProtocol]:
    """The protocol with these limits, as uvicorn takes it: a class."""
    return type(
        "Bounded", (BoundedProtocol,), {"limits": limits, "door": door or NoClientPolicy(), "held": defaultdict(set)}
    )
