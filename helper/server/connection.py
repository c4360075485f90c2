"""HTTP/1.1 connections with limits that uvicorn lacks.

Limits the time and size of a request head, the time of a body that the application no longer reads, the time that a
client may leave a response unread, the length of a pipeline, and the number of connections. When there are too many,
`ConnectionEvictor` decides which are closed.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
import orjson
from starlette.types import Receive, Scope, Send

from helper.core.refusals import Refusal, Situation, attempt_token, find_refusal
from helper.ingest.payload import SMALL_BODY_BYTES, error_body
from helper.server.body_reader import (
    CLOSE_AFTER_BODY_KEY,
    COMPLETE_BODY_KEY,
    DRAIN_BYTES,
    DRAIN_SECONDS,
    HAS_LEFT_KEY,
)
from helper.server.client_limits import Network, is_trusted_proxy
from helper.server.connection_io import (
    PEER_KEY,
    Deadline,
    SmallReads,
    StallTimer,
    ends_at_most_one_head,
    piece_end,
    read_peer,
)
from helper.server.connection_limits import (
    LINGER_SECONDS,
    MAX_BODY_PIECES,
    MAX_PIPELINED,
    MAX_UNSENT_BYTES,
    MIN_PIECE_BYTES,
    SEND_BUFFER_BYTES,
    ConnectionEvictor,
    ConnectionLimits,
    ConnectionProgress,
    RequestTurns,
)
from helper.server.middleware import CORS_HEADERS, CorsMiddleware, refusal_response
from helper.server.uvicorn_adapter import ConnectRefusedError, HttpConnection

ABORT_KEY: Final = "abort connection"
"""Key in the request state: a function that aborts the connection, the only way to mark a response as incomplete."""


class _RefusedError(Exception):
    """Raised in a parser callback: stops the parser, and the request is refused for good."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(status, message, None)


class BoundedProtocol(HttpConnection):
    """HTTP/1.1 connection with limits.

    The parser is in one of these states: between requests or in a head (`_is_in_head`), in a body, or discarded after
    the last request of the connection (`_is_last_request`).

    Args:
        limits: limits of connections.
        refusals: counts the connection's own refusals by status; None to count none.
        trusted_networks: networks of proxies, whose idle connections are not closed.
        evictor: closes the slowest connections under pressure; only used with `refusals`.
        turns: starts the requests of all connections of the listener.
        arguments: for uvicorn's protocol.
        options: for uvicorn's protocol.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        refusals: Counter[int] | None,
        trusted_networks: Sequence[Network],
        evictor: ConnectionEvictor,
        turns: RequestTurns,
        *arguments: Any,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.limits = limits
        self._refusals = refusals
        self._trusted_networks = trusted_networks
        self._evictor = evictor
        self._turns = turns
        self._progress = ConnectionProgress(self._is_evictable, self._evict)
        # deadline of the current request, or of the wait for the first request
        self._request_deadline = Deadline(self.loop, self._on_request_deadline)
        self._idle_deadline = Deadline(self.loop, self._on_idle_deadline)
        self._stall_timer = StallTimer(self.loop, limits.stalled_seconds)
        self._stalled_since: float | None = None  # since when the client leaves a response unread, in loop time
        self._held_start: Callable[[BoundedProtocol], None] | None = None  # of a request that waits for the client
        self._is_in_head = True  # or between two requests
        self._head_bytes_left = limits.max_head_bytes
        self._headers_left = limits.max_headers
        # bytes received since the parser last reported a part of a body or the end of a head
        self._unreported_bytes = 0
        self._body_bytes = 0  # parsed bytes of the current body
        self._body_pieces = 0
        self._unparsed = b""  # received bytes that wait until the pipeline is empty
        self._is_last_request = False  # the last request is complete; later input is discarded
        self._last_response: bytes | None = None  # the refusal to send after the responses to earlier requests
        # bytes that are still discarded: of a body after its response, or after the last response; otherwise None
        self._discardable_bytes: int | None = None

    # ------------------------------------------------------------------ transport events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request, or refuse the connection when a limit is reached."""
        super().connection_made(transport)
        self.transport.set_protocol(SmallReads(self))
        # writing pauses, and so the bytes are counted, as soon as the kernel's buffer is full
        self.transport.set_write_buffer_limits(high=0)
        sock: socket.socket = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.add_state(
            {
                PEER_KEY: read_peer(transport),
                ABORT_KEY: self.transport.abort,
                HAS_LEFT_KEY: self.transport.is_closing,
                # weak, so that a closed connection is freed without the garbage collector
                CLOSE_AFTER_BODY_KEY: weakref.WeakMethod(self.close_after_body),
            }
        )
        self._progress.is_kept_idle = is_trusted_proxy(self.peer_address, self._trusted_networks)
        excess = self.open_connections - self.limits.max_connections
        if excess > 0 and not self._evictor.make_room(excess, self.loop.time()):
            self._refuse(Situation.TOO_MANY_CONNECTIONS)
        else:
            self._start_request_deadline()
            if self._refusals is not None:
                self._evictor.add(self._progress, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers and release the connection."""
        self._request_deadline.close()
        self._idle_deadline.close()
        self._stall_timer.stop()
        self._stalled_since = self._held_start = None
        self._unparsed = b""
        self._evictor.discard(self._progress)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; enforce the limits on the head."""
        self._discard(len(data))
        if self._is_last_request or self.transport.is_closing():
            return
        if self._is_in_head and not self._request_deadline:
            self._start_request_deadline()
        self._idle_deadline.clear()
        self._progress.is_idle = False
        if not self._unparsed and not self.pipelined and ends_at_most_one_head(data):
            self._parse_piece(data)
        else:
            self._unparsed += data
            self._parse_unparsed()
        if self._request_deadline and self._discardable_bytes is None:  # the request is incomplete
            self._evictor.add_pending(self._progress, len(data), self.loop.time())

    def eof_received(self) -> bool:  # type: ignore[override] # uvicorn always closes
        """Handle a closed sending side of the client: respond to complete requests, drop a partial one, then close.

        Returns:
            True to keep the connection open for writing.
        """
        if self._last_response is None:
            if not self.is_answering or self.is_body_incomplete:
                self._watch_unsent()  # the transport closes once they are sent
                return False
            self.close_after_response()
            self._is_last_request = True
            self._request_deadline.clear()
        self._set_idle_deadline(self.limits.half_closed_seconds)
        return True

    def pause_writing(self) -> None:
        """Start the stall timer: bytes are unsent. Drop stalled connections if there are too many."""
        super().pause_writing()
        self._stall_timer.start(self.transport)
        self._stalled_since = self.loop.time()
        _limit_unsent(cast("set[BoundedProtocol]", self.all_connections), MAX_UNSENT_BYTES)

    def resume_writing(self) -> None:
        """Stop the stall timer: all bytes are sent. Start the request that waited for that."""
        super().resume_writing()
        self._stalled_since = None
        self._watch_unsent()
        if self._held_start is not None:
            start, self._held_start = self._held_start, None
            self._start_in_turn(start)

    # ------------------------------------------------------------------ stop

    def shutdown(self) -> None:
        """Close an idle connection; await the request of one that is new or has sent a part of a head."""
        if not self._is_awaiting_head:
            super().shutdown()

    def refuse_incomplete(self) -> None:
        """Refuse an incomplete head with 503, also one of which no byte has arrived yet."""
        if self._is_awaiting_head:
            self._reject(find_refusal(Situation.STOPPING, names_attempt=False))

    @property
    def _is_awaiting_head(self) -> bool:
        return self._is_in_head and bool(self._request_deadline) and self._discardable_bytes is None

    # ------------------------------------------------------------------ parser events

    def on_message_begin(self) -> None:
        """Begin a request."""
        if self._is_last_request:
            # httptools continues to parse after a keep-alive request of HTTP/1.0
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "request after the last one")
        self._is_in_head = True
        self._head_bytes_left, self._headers_left = self.limits.max_head_bytes, self.limits.max_headers
        if not self._request_deadline:
            self._start_request_deadline()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Measure and store a part of the path."""
        self._head_bytes_left -= len(url)
        if self._head_bytes_left < 0:
            raise self._head_too_large()
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Drop a trailer, because it is not a header (RFC 9110, section 6.5)."""
        self._headers_left -= 1
        self._head_bytes_left -= len(name) + len(value)
        if self._headers_left < 0:
            raise self._too_many_headers()
        if self._head_bytes_left < 0:
            raise self._head_too_large()
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request: its head is complete.

        Raises:
            _RefusedError: `Host` is missing or repeated (RFC 9112, section 3.2).
        """
        if not self.has_valid_host:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "headers: exactly one Host is required")
        super().on_headers_complete()
        self._is_in_head, self._unreported_bytes = False, 0
        self._body_bytes = self._body_pieces = 0
        self._idle_deadline.clear()
        self._request_deadline.set(self.loop.time() + self.limits.body_seconds)

    def on_chunk_header(self) -> None:
        """Count a chunk of the body."""
        self._count_body_piece()

    def on_body(self, body: bytes) -> None:
        """Store a part of the body; `BodyReader` limits its size."""
        self._unreported_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request: its body is complete."""
        if self.is_upgrade:
            return  # httptools ends a request with `Upgrade` at its head; the body follows
        self._is_last_request = not self.is_kept_alive
        self._is_in_head, self._unreported_bytes, self._discardable_bytes = True, 0, None
        self._request_deadline.clear()
        self._evictor.clear_pending(self._progress)
        super().on_message_complete()
        if self.is_answering:
            self.share_body(COMPLETE_BODY_KEY, SMALL_BODY_BYTES)
        elif self._is_last_request:
            # The response was complete before the request, so `on_response_complete` did neither of these.
            self._close()
        else:
            self._set_idle_deadline(self.keep_alive_seconds)

    # ------------------------------------------------------------------ responses

    def on_request_ready(self, method: str) -> None:
        """Start a posted share immediately, and other requests in turn."""
        if method == "POST":
            self.start_ready()
        else:
            self._start_in_turn(BoundedProtocol.start_ready)

    def _start_in_turn(self, start: Callable[[BoundedProtocol], None]) -> None:
        """Start a request in its turn, but only after the client has read the earlier responses.

        Otherwise each connection of a client that reads nothing holds two responses, of which one is not counted.
        """
        if self._stalled_since is None:
            self._turns.append(partial(start, self))
        else:
            self._held_start = start

    def on_response_complete(self) -> None:
        """Start the next request of the pipeline, or the timer for the unread request body."""
        super().on_response_complete()
        self._watch_unsent()
        if not self.transport.is_closing():
            self._progress.started_at, self._progress.is_idle = self.loop.time(), self._is_in_head
            if self.pipelined:
                self._idle_deadline.clear()
                self._start_in_turn(BoundedProtocol._start_pipelined)
            elif self._last_response is not None:
                self._send_last_response(self._last_response)
                return
            else:
                self._idle_deadline.set(self.loop.time() + self.keep_alive_seconds)
            self.resume_reading()
        if self._is_in_head or self.is_answering:
            return
        if self.expects_continue:
            # the client may omit the announced body, so the next bytes are ambiguous
            self._close()
            return
        self._discardable_bytes = DRAIN_BYTES
        self._evictor.clear_pending(self._progress)
        self._start_request_deadline(self.limits.head_seconds if self.is_kept_alive else LINGER_SECONDS)

    async def respond_cancelled(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond 503 because the service stops."""
        response = refusal_response(scope, Situation.STOPPING, headers={"Connection": "close"})
        self._count_refusal(response.status_code)
        await CorsMiddleware(response)(scope, receive, send)

    # ------------------------------------------------------------------ pipeline

    def _parse_unparsed(self) -> None:
        """Feed the unparsed bytes to the parser, until the pipeline is full.

        httptools cannot stop in the middle of its input, so no piece ends more than one request head.
        """
        data, at = self._unparsed, 0
        while at < len(data) and len(self.pipelined) < MAX_PIPELINED:
            if self._is_last_request or self.transport.is_closing():
                at = len(data)
                break
            end = self._piece_end(data, at)
            self._parse_piece(data[at:end])
            at = end
        self._unparsed = data[at:]

    def _piece_end(self, data: bytes, at: int) -> int:
        """End of the piece that begins at `at`: the rest of a body of known length, or the next end of a head."""
        if not self._is_in_head:
            left = self.content_length - self._body_bytes
            if left > 0:
                return min(at + left, len(data))
            try:
                self._count_body_piece()
            except _RefusedError as error:
                self._reject(error.refusal)
        return piece_end(data, at)

    def _count_body_piece(self) -> None:
        self._body_pieces += 1
        if self._body_pieces > MAX_BODY_PIECES and self._body_pieces * MIN_PIECE_BYTES > self._body_bytes:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"body: has more than {MAX_BODY_PIECES} small chunks")

    def _start_pipelined(self) -> None:
        """Start the next request of the pipeline, and parse the unparsed bytes if it was the last one."""
        self.start_pipelined()
        if self.pipelined or self.transport.is_closing():
            return
        if self._request_deadline:
            # until now the client could not send the rest of this request
            self._start_request_deadline(self.limits.head_seconds if self._is_in_head else self.limits.body_seconds)
        self._parse_unparsed()

    # ------------------------------------------------------------------ size of the head

    def _parse_piece(self, data: bytes) -> None:
        """Feed a piece to the parser. Refuse the request if the piece is invalid or exceeds a limit."""
        self._unreported_bytes += len(data)
        try:
            self.parse(data)
        except httptools.HttpParserError as error:
            if not self._is_last_request:
                cause = error.__context__  # httptools raises this error instead of the callback's exception
                if not isinstance(cause, _RefusedError):
                    text = str(cause) if isinstance(cause, ConnectRefusedError) else "invalid HTTP/1.1 request"
                    cause = _RefusedError(HTTPStatus.BAD_REQUEST, text)
                self._reject(cause.refusal)
        if self._unreported_bytes > self.limits.max_head_bytes and not self._is_last_request:
            self._reject(self._head_too_large().refusal)

    def _too_many_headers(self) -> _RefusedError:
        return _RefusedError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers: more than {self.limits.max_headers} headers"
        )

    def _head_too_large(self) -> _RefusedError:
        return _RefusedError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers: are larger than {self.limits.max_head_bytes} bytes"
        )

    # ------------------------------------------------------------------ timeouts

    def _start_request_deadline(self, seconds: float | None = None) -> None:
        """Wait for `seconds` from now, by default for a head."""
        if not self.transport.is_closing():
            self._progress.started_at = self.loop.time()
            seconds = self.limits.head_seconds if seconds is None else seconds
            self._request_deadline.set(self._progress.started_at + seconds)

    def _on_request_deadline(self) -> None:
        if self.pipelined or (self._is_in_head and self.is_answering):
            # Reading is paused while an earlier request is being answered.
            self._request_deadline.set(self.loop.time() + self.limits.head_seconds)
        elif self._unreported_bytes and self._is_in_head:
            self._refuse(Situation.SLOW_HEAD, self.limits.head_seconds)
        else:
            self._close()

    def _set_idle_deadline(self, seconds: float) -> None:
        self._idle_deadline.set(self.loop.time() + seconds)

    def _on_idle_deadline(self) -> None:
        self._close()

    # ------------------------------------------------------------------ number of connections

    def _is_evictable(self) -> bool:
        """Whether only the client delays this connection: no request is being answered."""
        if self.transport.get_write_buffer_size():
            # A client that reads a long response resumes writing in between.
            since = self._stalled_since if self.is_answering else self._stall_timer.started_at
            return since is not None and self.loop.time() - since >= self.limits.stalled_seconds
        if self.transport.is_closing() or self._is_last_request or self.pipelined:
            return False
        return not (self._is_in_head and self.is_answering)

    def _evict(self) -> None:
        """Close the connection, because others need its place or its memory; refuse an incomplete request."""
        if self.transport.get_write_buffer_size() or self._is_last_request or self._discardable_bytes is not None:
            self.transport.abort()
        elif not self._is_in_head:
            names_attempt = attempt_token(self.headers) is not None
            self._reject(find_refusal(Situation.TOO_MANY_SLOW_REQUESTS, names_attempt=names_attempt))
        elif self._unreported_bytes and not self.is_answering:
            self._refuse(Situation.TOO_MANY_CONNECTIONS)
        else:
            self.transport.abort()

    # ------------------------------------------------------------------ close

    def _close(self) -> None:
        """Close the connection once all bytes are sent."""
        self.transport.close()
        self._watch_unsent()

    def _watch_unsent(self) -> None:
        """Run the stall timer while there are unsent bytes. Without it, a close could take forever."""
        if self.transport.get_write_buffer_size():
            self._stall_timer.start(self.transport)
        else:
            self._stall_timer.stop()

    # ------------------------------------------------------------------ refusals

    def _refuse(self, situation: Situation, *details: object) -> None:
        """Respond before a head is complete, and close. Only call this while no request is being answered."""
        if self.transport.is_closing():
            return
        self.transport.write(self._record_refusal(find_refusal(situation, *details, names_attempt=False)))
        self._close()

    def _reject(self, refusal: Refusal) -> None:
        """Refuse the request being parsed, after the responses to earlier requests, and stop parsing."""
        if self.transport.is_closing():
            return
        response = self._record_refusal(refusal)
        self._is_last_request = True
        if not self._is_in_head and not self.drop_request():
            self._close()
        elif not self.is_running:
            self._send_last_response(response)
        else:
            self._last_response = response
            self.resume_reading()  # a dropped request may have paused it

    def _record_refusal(self, refusal: Refusal) -> bytes:
        """Count a refusal and return the response."""
        self._request_deadline.clear()
        self._evictor.clear_pending(self._progress)
        self._count_refusal(refusal.status)
        body = orjson.dumps(error_body(refusal.text))
        retry_after = "" if refusal.retry_after is None else f"retry-after: {refusal.retry_after}\r\n"
        head = (
            f"HTTP/1.1 {refusal.status} {refusal.status.phrase}\r\ncontent-type: application/json\r\n{retry_after}"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
        )
        return b"".join([head.encode(), *(b"%b: %b\r\n" % header for header in CORS_HEADERS), b"\r\n", body])

    def _count_refusal(self, status: int) -> None:
        if self._refusals is not None:
            self._refusals[int(status)] += 1

    def _send_last_response(self, response: bytes) -> None:
        """Send a response, then discard input until the client closes; at most `DRAIN_BYTES` and `DRAIN_SECONDS`.

        Closing with bytes unread resets the connection, and the client may lose the response.
        """
        self.transport.write(response)
        self.transport.write_eof()
        self._last_response = None
        self._discardable_bytes = DRAIN_BYTES
        self.resume_reading()
        self._set_idle_deadline(DRAIN_SECONDS)

    def _discard(self, size: int) -> None:
        if self._discardable_bytes is not None:
            self._discardable_bytes -= size
            if self._discardable_bytes < 0:
                self._close()


def _limit_unsent(connections: Iterable[BoundedProtocol], limit: int) -> None:
    """Abort connections, the longest-stalled first, until their clients leave at most `limit` bytes unread.

    The one that stalled last stays open, however large its response is.
    """
    stalled = [connection for connection in connections if connection._stalled_since is not None]
    unsent = sum(connection.transport.get_write_buffer_size() for connection in stalled)
    if unsent <= limit:
        return
    for connection in sorted(stalled, key=lambda each: each._stalled_since or 0.0)[:-1]:
        unsent -= connection.transport.get_write_buffer_size()
        connection._stalled_since = None
        connection.transport.abort()
        if unsent <= limit:
            return
