"""Adapter of uvicorn: the only module that uses uvicorn's undocumented classes and attributes.

`HttpConnection` and `Server` extend uvicorn's classes and change behavior that the service cannot use. Other modules
use only members that these two classes define. Before raising the upper bound in pyproject.toml, run mypy, which
reports members of uvicorn that are missing, and tests/unit/server, which checks the behavior.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, cast

import httptools
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from helper.clock import Clock, SystemClock

_ACCEPTS_PER_ITERATION: Final = 8
"""Connections that are accepted in one iteration of the event loop."""
_MAX_JOINED_BYTES: Final = 16 << 10
"""A longer part of a body is not joined with the head. Connections can share it, and a copy of it takes more time."""


class _PipelineFlow(FlowControl):
    """uvicorn's flow control, without resuming reads while requests wait in the pipeline."""

    def __init__(self, transport: asyncio.Transport, pipeline: deque[Any]) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        """Resume unless requests wait. uvicorn calls this after each response, and when the app reads a body."""
        if not self._pipeline:
            super().resume_reading()


class _ResponseTransport:
    """Transport of one response: joins its head and the first part of its body into one write.

    uvicorn writes them separately. With a second system call for each posted share, the accept rate is 4 % lower.

    Args:
        transport: the transport of the connection.
        loop: the event loop.

    Attributes:
        connection: if set, the transport closes only after the connection has received the request's body. Closing
            with bytes unread resets the connection, and the client may lose the response.
    """

    __slots__ = ("_connection_transport", "_held", "_is_first", "_loop", "connection")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._connection_transport = transport
        self._loop = loop
        self._held = b""
        self._is_first = True
        self.connection: HttpConnection | None = None

    def write(self, data: bytes) -> None:
        """Write bytes; hold the first ones until the next write, at most until the next iteration of the loop."""
        if self._held:
            if len(data) > _MAX_JOINED_BYTES:
                self.flush()
            else:
                data, self._held = self._held + data, b""
        elif self._is_first:
            self._held, self._is_first = data, False
            self._loop.call_soon(self.flush)
            return
        self._connection_transport.write(data)

    def flush(self) -> None:
        """Write the held bytes."""
        if self._held:
            held, self._held = self._held, b""
            if not self._connection_transport.is_closing():
                self._connection_transport.write(held)

    def is_closing(self) -> bool:
        """Whether the transport is closing or closed."""
        return self._connection_transport.is_closing()

    def close(self) -> None:
        """Write the held bytes and close the transport, unless the rest of the body is awaited."""
        self.flush()
        if self.connection is None or not self.connection.is_body_incomplete:
            self._connection_transport.close()


class ConnectRefusedError(Exception):
    """The method of a request is CONNECT, which httptools handles as an upgrade."""


class HttpConnection(HttpToolsProtocol):
    """HTTP/1.1 connection without limits and without protocol upgrades.

    A subclass overrides callbacks of asyncio and httptools. It forwards each with `super()`, except `data_received` and
    `eof_received`. It decides which received bytes to `parse`, in `on_request_ready` when to `start_ready`, and in
    `on_response_complete` when to `start_pipelined`.

    Attributes:
        loop: the event loop.
        transport: the transport; set by `connection_made`.
        headers: headers of the latest request; set when it begins.
        keep_alive_seconds: how long the connection may stay open between two requests.
        pipelined: parsed requests that wait for the response to an earlier one.
        is_upgrade: whether the head that has ended requests an upgrade; its body is yet to be read by a second parser.
    """

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    headers: list[tuple[bytes, bytes]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Replaces uvicorn's parser, which continues after a request with `Connection: close`.
        self.parser = httptools.HttpRequestParser(self)
        self.keep_alive_seconds: float = self.timeout_keep_alive
        self.pipelined: Sized = self.pipeline
        self.is_upgrade = False
        self._running: RequestResponseCycle | None = None  # the latest request that the application was called for
        self._ready: tuple[RequestResponseCycle, Any] | None = None  # a request that waits for `start_ready`

    # ------------------------------------------------------------------ connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the connection."""
        super().connection_made(cast("asyncio.Transport", transport))
        self.flow = _PipelineFlow(self.transport, self.pipeline)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection and its requests."""
        self.app_state = {}  # breaks a reference cycle, so that this object is freed without the garbage collector
        if self._running is not None:
            # uvicorn does this only for the request parsed last; a write after the end raises an exception.
            self._running.disconnected = True
            self._running.message_event.set()
        for cycle, _ in (*self.pipeline, *([self._ready] if self._ready else ())):
            cycle.on_response = _do_nothing  # never called, and its reference would keep this object alive
        self.pipeline.clear()
        self._ready = None
        if self.cycle is not None:
            self._response_transport(self.cycle).connection = None
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close an idle connection, and another one after its response: the server stops."""
        super().shutdown()

    def refuse_incomplete(self) -> None:
        """Refuse a request whose head is incomplete: the server stops now."""
        raise NotImplementedError

    @property
    def peer_address(self) -> str | None:
        """Address of the peer; None on a unix socket."""
        return self.client[0] if self.client else None

    @property
    def all_connections(self) -> set[Any]:
        """Open connections of the server, this one included."""
        return self.connections

    @property
    def open_connections(self) -> int:
        """Number of open connections of the server, this one included."""
        return len(self.connections)

    def add_state(self, values: dict[str, Any]) -> None:
        """Add values to the state of each request of this connection."""
        self.app_state = {**self.app_state, **values}  # each request's state is a copy of it

    def resume_reading(self) -> None:
        """Read from the transport again, unless requests wait in the pipeline."""
        self.flow.resume_reading()

    # ------------------------------------------------------------------ parsing

    def parse(self, data: bytes) -> None:
        """Feed bytes to the parser, which calls the `on_…` methods. Replaces uvicorn's `data_received`.

        No upgrade is supported, and a server may ignore the header (RFC 9110, section 7.8). httptools cannot ignore
        it: it ends the request at its head. The body is read by a second parser, and the connection is closed after
        the response.

        Raises:
            httptools.HttpParserError: the bytes are not valid, or a callback raised an exception, its `__context__`.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade()
            self.parser.feed_data(data[upgrade.args[0] :])

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. `Expect` is a list, of which uvicorn recognizes only a single member."""
        super().on_header(name, value)
        if self.headers[-1][0] == b"expect" and b"100-continue" in map(bytes.strip, value.lower().split(b",")):
            self.expect_100_continue = True

    def on_headers_complete(self) -> None:
        """Start the request, or append it to the pipeline: its head is complete.

        Raises:
            ConnectRefusedError: the method is CONNECT.
        """
        self.is_upgrade = self.parser.should_upgrade()
        if self.is_upgrade and self.parser.get_method() == b"CONNECT":
            raise ConnectRefusedError("CONNECT is not supported")
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # such a client takes the 100 for its response (RFC 9110, section 10.1.1)
        super().on_headers_complete()
        self.cycle.transport = _ResponseTransport(self.transport, self.loop)  # type: ignore[assignment] # has its methods
        if self.is_upgrade:
            self.close_after_response()
            self.close_after_body()
        if self.expects_continue or getattr(self.server_state, "is_stopping", False):
            # After a final response to a request that expects 100, the client may omit the body. A proxy must not reuse
            # the connection then, so the response says that it is closed.
            self.close_after_response()

    def on_chunk_header(self) -> None:
        """Begin a chunk of the body."""

    @property
    def content_length(self) -> int:
        """Length of the body by the headers of the request parsed last; 0 if it is chunked or there is none."""
        headers = dict(self.headers)
        return 0 if b"transfer-encoding" in headers else int(headers.get(b"content-length", b"0"))

    def _ignore_upgrade(self) -> None:
        """Replace the parser with one that parses only the body of the current request.

        The new parser is fed a head with the framing headers of the request, so llhttp applies the same rules to the
        body as it does without an upgrade. `Connection: close` makes it reject input after the body.
        """
        framing = [header for header in self.headers if header[0] in {b"content-length", b"transfer-encoding"}]
        lines = [b"POST / HTTP/1.1", b"connection: close", *(b"%b: %b" % header for header in framing), b"", b""]
        callbacks = SimpleNamespace(
            on_chunk_header=self.on_chunk_header, on_body=self.on_body, on_message_complete=self.on_message_complete
        )
        self.parser = httptools.HttpRequestParser(callbacks)
        self.is_upgrade = False
        self.parser.feed_data(b"\r\n".join(lines))

    # ------------------------------------------------------------------ the request parsed last

    @property
    def has_valid_host(self) -> bool:
        """Whether the head has one `Host`. HTTP/1.0 does not require it (RFC 9112, section 3.2)."""
        count = [name for name, _ in self.headers].count(b"host")
        return count == 1 or (count == 0 and self.parser.get_http_version() == "1.0")

    @property
    def is_answering(self) -> bool:
        """Whether there is a request, complete or not, whose response is incomplete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_body_incomplete(self) -> bool:
        """Whether more of the request's body is expected."""
        return self.cycle.more_body

    @property
    def is_kept_alive(self) -> bool:
        """Whether another request may follow the response."""
        return self.cycle.keep_alive

    @property
    def expects_continue(self) -> bool:
        """Whether the request has `Expect: 100-continue`; the 100 is sent when the application reads the body."""
        return self.expect_100_continue

    def share_body(self, key: str, limit: int) -> None:
        """Put the received body, unless it is larger than `limit`, into the request's state.

        Not with `Expect: 100-continue`: uvicorn sends the 100 response when the application reads the body.
        """
        if not self.expect_100_continue and len(self.cycle.body) <= limit:
            self.scope["state"][key] = self.cycle.body

    def close_after_response(self) -> None:
        """Close the connection after the response."""
        self.cycle.keep_alive = False

    def close_after_body(self) -> None:
        """Close the connection only after the body of the request, whose response has not begun."""
        self._response_transport(self.cycle).connection = self

    def drop_request(self) -> bool:
        """Drop the request, whose body is being parsed. Return False if its response has begun."""
        cycle = self.cycle
        if cycle.response_started:
            return False
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
            cycle.on_response = _do_nothing
        else:
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False
            cycle.message_event.set()
        return True

    # ------------------------------------------------------------------ running requests

    @property
    def is_running(self) -> bool:
        """Whether a request runs, or is ready to start, whose response is still wanted and incomplete."""
        running = self._ready[0] if self._ready is not None else self._running
        return running is not None and not running.response_complete and not running.disconnected

    def on_request_ready(self, method: str) -> None:  # noqa: ARG002 (for subclasses)
        """Start a request: its head is complete, and no earlier one is being answered. A subclass may start it later.

        Args:
            method: of the request.
        """
        self.start_ready()

    def start_ready(self) -> None:
        """Start the request that is ready, unless it was dropped or the connection was lost."""
        if self._ready is not None:
            ready, self._ready = self._ready, None
            if not ready[0].disconnected:
                self._start(*ready)

    def start_pipelined(self) -> None:
        """Start the request that has waited longest in the pipeline, if there is one."""
        if self.pipeline:
            self._start(*self.pipeline.pop())

    def on_response_complete(self) -> None:
        """Count the response. uvicorn's method also sets a timer and resumes reading while requests wait."""
        self.server_state.total_requests += 1
        if self._running is not None:
            self._response_transport(self._running).flush()  # the response to a HEAD request has no second part

    async def respond_cancelled(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request that the server has cancelled before its response began."""
        raise NotImplementedError

    @staticmethod
    def _response_transport(cycle: RequestResponseCycle) -> _ResponseTransport:
        return cycle.transport  # type: ignore[return-value] # set by `on_headers_complete`

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._ready = cycle, app
        self.on_request_ready(cycle.scope["method"])

    def _start(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, partial(self._run, cycle, app))

    async def _run(self, cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application. Respond when the server cancels it (uvicorn would respond 500 and log an error)."""
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if cycle.response_started or self.transport.get_write_buffer_size():
                cycle.disconnected = True  # otherwise uvicorn logs an incomplete response
                self.transport.abort()
                return
            await self.respond_cancelled(scope, receive, send)


class DateHeaderState(ServerState):
    """Server state that computes the `Date` header on demand, at most once per second.

    Attributes:
        is_stopping: whether the server stops, so that each connection closes after its response.
    """

    def __init__(self, clock: Clock) -> None:
        self.is_stopping = False
        self._clock = clock
        self._second = -1
        super().__init__()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every response."""
        second = int(self._clock.now())
        if second != self._second:
            self._second = second
            self._headers = [(b"date", formatdate(second, usegmt=True).encode())]
        return self._headers

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._headers = headers


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Time limits of a server, in seconds.

    Attributes:
        keep_alive: an idle connection stays open for this long.
        stop_grace: running requests may take this long to complete when the server stops.
        stop_flush: after `stop_grace`, connections may take this long to send their last bytes.
    """

    keep_alive: int
    stop_grace: int
    stop_flush: int


class Server(uvicorn.Server):
    """uvicorn server without signal handling and without polling.

    uvicorn's own server polls ten times per second whether to stop, and updates the date. With one server per listener,
    that took a third of the CPU time of an idle service.

    Args:
        app: the ASGI application.
        protocol: creates a connection.
        times: time limits.
        backlog: maximum number of connections waiting to be accepted.
    """

    def __init__(
        self, app: ASGIApp, protocol: Callable[..., HttpConnection], *, times: ServerTimes, backlog: int
    ) -> None:
        self._times = times
        self._stop = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=cast("type[asyncio.Protocol]", protocol),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=times.keep_alive,
                timeout_graceful_shutdown=times.stop_grace + 2 * times.stop_flush,  # `shutdown` ends requests earlier
                backlog=backlog,
            )
        )
        self.server_state = self._state = DateHeaderState(SystemClock())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Several handles for each socket, because uvloop accepts one connection per handle and iteration.

        With one handle, a few hundred connections per second that all send data delay new ones by seconds.
        """
        assert sockets is not None, "the service creates its sockets"
        copies = [copy.dup() for copy in sockets for _ in range(_ACCEPTS_PER_ITERATION - 1)]
        await super().startup([*sockets, *copies])

    @property
    def should_exit(self) -> bool:
        """Whether the server should stop; set it to stop the server."""
        return self._stop.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._stop.set()
        else:
            self._stop.clear()

    async def main_loop(self) -> None:
        """Wait until `should_exit` is set."""
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop as uvicorn does, with two differences.

        Connections that wait to be accepted are served too. Late requests and connections end before uvicorn's timeout,
        which logs an error.
        """
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(self._times.stop_grace, self._refuse_late_requests),
            loop.call_later(self._times.stop_grace + self._times.stop_flush, self._abort_connections),
        ]
        waiting = [accepted for listener in sockets or () for accepted in self._accept_waiting(listener)]
        for server in self.servers:
            server.close()
        self._state.is_stopping = True
        try:
            for accepted in waiting:
                with contextlib.suppress(OSError):  # the client has left
                    await loop.connect_accepted_socket(self._create_connection, accepted)
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()

    def _accept_waiting(self, listener: socket.socket) -> Iterator[socket.socket]:
        """Accept the connections that wait; closing the listener would reset them."""
        listener.setblocking(False)
        with contextlib.suppress(OSError):  # none waits any more, or too many files are open
            for _ in range(self.config.backlog):
                yield listener.accept()[0]

    def _create_connection(self) -> asyncio.Protocol:
        protocol = cast("Callable[..., HttpConnection]", self.config.http_protocol_class)
        return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def _refuse_late_requests(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()
        for connection in list(self.server_state.connections):
            cast("HttpConnection", connection).refuse_incomplete()

    def _abort_connections(self) -> None:
        for connection in self.server_state.connections:
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the service handles signals."""
        yield


def _do_nothing() -> None:
    pass
