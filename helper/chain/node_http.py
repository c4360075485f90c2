"""HTTP client for one chain node, with a total timeout and a size limit.

httpx limits each read but not the entire call, so every call runs under `anyio.fail_after`. A GET can also be limited
by the node's recent response times (decision 30). Redirects are not followed. Compressed responses are refused, so that
the size limit applies to the received bytes. Errors contain whether the request may have been sent.
"""

from __future__ import annotations

import re
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from http import HTTPStatus
from typing import NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx

from helper.errors import ChainUnavailable, ConfigError, InvalidResponse
from helper.runtime.network_clients import create_async_client, create_transport

T = TypeVar("T")

DEFAULT_LIMIT_BYTES = 1 << 20
"""Size limit of ordinary responses, in bytes."""
ERROR_LIMIT_BYTES = 64 << 10
"""Size limit of responses with an error status, in bytes. Their text is only logged and compared."""
PAGE_LIMIT_BYTES = 8 << 20
"""Size limit of lists and of pages of leaves or transactions, in bytes."""
BLOCK_LIMIT_BYTES = 16 << 20
"""Size limit of a block and of its results, in bytes. A node's JSON contains a block twice, in base64."""
STREAM_LIMIT_BYTES = 64 << 20
"""Size limit of streamed responses, in bytes. Streamed responses are never buffered in full."""
SHORT_BODY_BYTES = 4 << 10
"""Maximum length of a streamed response, in bytes, that is read before it is streamed."""
CHUNKS_PER_CHECKPOINT = 64
"""Response chunks to read before yielding to the event loop."""
MAX_SMALL_CHUNKS = 4096
"""Number of chunks of a response that may have any size."""
MIN_MEAN_CHUNK_BYTES = 256
"""Minimum mean chunk size, in bytes, of a response with more than `MAX_SMALL_CHUNKS` chunks. Each chunk costs about 20
µs, regardless of its size; regular nodes send chunks of 1,400 bytes or more.
"""
THREAD_PARSE_BYTES = 1 << 16
"""Size, in bytes, above which a response is parsed in a thread."""
DEFAULT_TIMEOUT_SECONDS = 10.0
"""Default total timeout of a call, in seconds."""
SEND_TIMEOUT_SECONDS = 75.0
"""Minimum total timeout of a send, in seconds.
A node tries three times to reach its consensus engine, 10 s each, and looks the transaction up for 5 s after each try.
"""
RESPONSE_WAIT_SECONDS = 3.0
"""Maximum seconds until a send without a response counts as unanswered. Its call continues."""
SLOW_CALL_SECONDS = 1.0
"""Seconds after which a call in progress makes a node slow. Other nodes are then called before it."""
MIN_LIMIT_SECONDS = 1.0
"""Minimum time limit in seconds. A retransmitted packet or a loaded disk can delay a response almost this long."""
LIMIT_FACTOR = 4
"""The time limit is this multiple of the longest recent time."""
MIN_RESPONSES = 8
"""Number of recent responses from which the limit is derived; with fewer, the maximum applies."""
MAX_RESPONSES = 64
"""Number of most recent responses that count."""
MAX_CONNECTIONS = 64
"""Maximum number of connections to one node."""
MAX_RETRY_AFTER_SECONDS = 60
"""Greatest `Retry-After` that counts. A node must not exclude itself for the rest of a round, and a wallet behind the
gateway waits for the whole time."""
UNAVAILABLE_STATUSES = frozenset({429, 502, 503, 504})
"""Statuses of a node, or of a proxy before it, that cannot answer now."""
_CONNECT_TIMEOUT_SECONDS = 3.0
_CACHED_REQUESTS = 16
_IDENTIFIER_PATTERN = re.compile(r"/(?:\d+|[0-9A-Fa-f]{64})(?=/|$)")
_DEAD_CONNECTION_ERRORS = (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)
_NOT_SENT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


class NodeResponse(NamedTuple):
    """A complete response: HTTP status, body, and `Retry-After` in seconds, limited (None without one)."""

    status: int
    body: bytes
    retry_after: int | None = None


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A request whose response is streamed.

    Attributes:
        method: GET, or another method, which is sent on a new connection.
        target: path and query, encoded.
        body: JSON body.
        timeout: maximum seconds until the response head, and between two chunks of the body; None for the client's
            timeout.
    """

    method: str
    target: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None


class ResponseTooLong(InvalidResponse):
    """A response is longer than its size limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"response is longer than {limit} bytes")


class StreamedResponse:
    """A response whose head was received and whose body is streamed. See `NodeHttp.stream`.

    Attributes:
        length: declared length of the body in bytes, None if not declared.
        retry_after: value of the `Retry-After` header in seconds, limited; None without one.
    """

    def __init__(self, response: httpx.Response, limit: int) -> None:
        self._pieces: list[bytes] = []  # the part that was read before it is streamed
        self._rest = _iter_streamed(response, limit)
        headers = response.headers
        self.status = response.status_code
        self.is_json = headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        # Transfer-Encoding overrides Content-Length (RFC 9112, section 6.3).
        self.length = (
            None if "transfer-encoding" in headers else _parse_header_number(headers.get("content-length", ""))
        )
        self.retry_after = _parse_retry_after(response)

    async def read_short(self) -> bytes | None:
        """Read a body of at most `SHORT_BODY_BYTES` bytes; None without a declared length or if it is longer.

        `iter_chunks` still returns it. Raises as `iter_chunks`.
        """
        if self.length is None or self.length > SHORT_BODY_BYTES:
            return None
        await self.buffer(lambda _: True)
        return b"".join(self._pieces)

    async def buffer(self, may_hold: Callable[[int], bool]) -> bool:
        """Read the body while `may_hold` returns true for the length of each piece. Returns whether it is complete.

        `iter_chunks` still returns it, and any number of times if it is complete. Raises as `iter_chunks`.
        """
        async for piece in self._rest:
            self._pieces.append(piece)
            if not may_hold(len(piece)):
                return False
        return True

    async def iter_chunks(self) -> AsyncIterator[bytes]:
        """Iterate over the body; see `_iter_chunks`. Raises `NoResponse` if the response is incomplete or stalls."""
        for piece in self._pieces:
            yield piece
        async for piece in self._rest:
            yield piece


async def _iter_streamed(response: httpx.Response, limit: int) -> AsyncIterator[bytes]:
    try:
        async for piece in _iter_chunks(response, limit):
            yield piece
    except httpx.HTTPError as error:
        raise NoResponse(f"incomplete response ({type(error).__name__})", sent=True) from None


class RequestProgress:
    """Whether the bytes of a request have left, as the HTTP client's `trace` extension reports it.

    Attributes:
        has_started: whether the first byte may have left this machine.
        written_at: monotonic time at which the whole request was written; None before.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.has_started = False
        self.written_at: float | None = None

    async def trace(self, event: str, _info: object) -> None:
        """Record an event of httpcore. The first part of its name is the HTTP version."""
        name = event.partition(".")[2]
        if name == "send_request_headers.started":
            self.has_started = True
        elif name == "send_request_body.complete":
            self.written_at = self._now()


class NoResponse(ChainUnavailable):
    """No complete response. `sent`: whether any byte of the request may have left this machine."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class _Connections:
    """Builds requests to one base URL and sends them over its own connections.

    An `httpx.AsyncClient` builds the requests but does not send them: its handling of redirects, cookies and
    authentication is a third of the cost of a request, and polling nodes is most of the work of an idle helper.
    """

    def __init__(self, url: httpx.URL, transport: httpx.AsyncBaseTransport, timeout: httpx.Timeout) -> None:
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        if url.userinfo:
            (authenticated,) = httpx.BasicAuth(url.username, url.password).auth_flow(httpx.Request("GET", url))
            headers["authorization"] = authenticated.headers["authorization"]
        builder = create_async_client(base_url=url, transport=transport, timeout=timeout, headers=headers)
        self.request = builder.build_request
        self.get = lru_cache(_CACHED_REQUESTS)(partial(self.request, "GET"))
        """Return the GET request of a path; cached, because the same few are sent repeatedly."""
        self.send = transport.handle_async_request
        """Send a request and return the response, whose body the caller reads or closes."""
        self.aclose = builder.aclose


class _DataWait:
    """The deadline of a call that waits for data: a total timeout, and a limit of each wait without data.

    Attributes:
        longest: longest wait so far, in seconds.
    """

    def __init__(self, scope: anyio.CancelScope, limit: float) -> None:
        self._scope = scope
        self._end = scope.deadline
        self._last_at = anyio.current_time()
        self._limit = limit
        self.longest = 0.0
        scope.deadline = min(self._end, self._last_at + limit)

    def note_data(self) -> None:
        """Record that data has arrived."""
        now = anyio.current_time()
        self.longest = max(self.longest, now - self._last_at)
        self._last_at = now
        self._scope.deadline = min(self._end, now + self._limit)


class ResponseTimes:
    """Recent response times of one node to one kind of request, and the time limit that follows from them."""

    def __init__(self, maximum: float) -> None:
        self._maximum = maximum
        self._seconds: deque[float] = deque(maxlen=MAX_RESPONSES)

    @property
    def limit(self) -> float:
        """Seconds to wait for the node: the maximum, or less if its recent responses were fast."""
        if len(self._seconds) < MIN_RESPONSES:
            return self._maximum
        return min(self._maximum, max(MIN_LIMIT_SECONDS, LIMIT_FACTOR * max(self._seconds)))

    def add(self, seconds: float) -> None:
        """Add the time of a response."""
        self._seconds.append(seconds)

    def forget(self) -> None:
        """Return to the maximum until the node has responded `MIN_RESPONSES` times.

        For a response that took longer than the limit. The node may be slow and not dead, or this request larger than
        the recent ones, and then a repeated short limit would never let it respond.
        """
        self._seconds.clear()


@lru_cache(256)
def request_kind(path: str) -> str:
    """Return the path without round ids, hashes and heights: such requests take about the same time."""
    return _IDENTIFIER_PATTERN.sub("", path)


class NodeHttp:
    """A keep-alive HTTP client for one base URL.

    Args:
        url: base URL; may contain credentials.
        timeout: total timeout of a call, in seconds.
        is_adaptive: whether a GET also ends when the node sends nothing for longer than its recent times suggest. For
            clients whose callers try another node then.
        receive_buffer: size of the kernel's receive buffer of each connection in bytes; None for the kernel's default.

    Attributes:
        name: host and port, without credentials and path, which may be one. It identifies the node in logs and rules.
        url: the base URL, with its credentials; never logged.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        transport: httpx.AsyncBaseTransport | None = None,
        connections: int = MAX_CONNECTIONS,
        is_adaptive: bool = False,
        receive_buffer: int | None = None,
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"invalid node URL: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError("a node URL must begin with http:// or https:// and contain a host")
        port = parsed.port or (443 if parsed.scheme == "https" else 80)
        self.name = f"[{parsed.host}]:{port}" if ":" in parsed.host else f"{parsed.host}:{port}"
        self.url = url
        self._timeout = timeout
        # By kind of request; None without limits from recent times.
        self._read_times: dict[str, ResponseTimes] | None = {} if is_adaptive else None
        self._send_times = ResponseTimes(RESPONSE_WAIT_SECONDS)
        self._in_progress: dict[anyio.CancelScope, float] = {}  # start of each call, in event loop time, in order
        options = [] if receive_buffer is None else [(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)]
        create = partial(create_transport, connections, socket_options=options)
        self._reusable = _Connections(parsed, transport or create(max_idle=8), _create_timeout(timeout))
        # Never reused, so that a stale keep-alive connection cannot make the outcome of a POST ambiguous.
        self._single_use = _Connections(parsed, transport or create(max_idle=0), _create_timeout(timeout))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._reusable.aclose()
        await self._single_use.aclose()

    @property
    def is_slow(self) -> bool:
        """Whether a call has been in progress for more than `SLOW_CALL_SECONDS` seconds."""
        oldest = next(iter(self._in_progress.values()), None)
        return oldest is not None and anyio.current_time() - oldest > SLOW_CALL_SECONDS

    @property
    def response_wait(self) -> float:
        """Seconds after which a send without a response counts as unanswered, from the recent times of sends."""
        return self._send_times.limit

    @contextmanager
    def _limit_time(self, seconds: float, times: ResponseTimes | None = None) -> Iterator[anyio.CancelScope]:
        """Apply a total timeout to a call, which `times` limits further. Raises `NoResponse` for its failures."""
        try:
            with anyio.fail_after(seconds) as scope:
                self._in_progress[scope] = anyio.current_time()
                yield scope
        except (httpx.HTTPError, TimeoutError) as error:
            no_response = _create_no_response(error, seconds if times is None else times.limit)
            if isinstance(error, TimeoutError) and times is not None:
                times.forget()
            raise no_response from None
        finally:
            self._in_progress.pop(scope, None)

    async def get(
        self, path: str, params: dict[str, str] | None = None, *, limit: int = DEFAULT_LIMIT_BYTES
    ) -> NodeResponse:
        """Send a GET request. Retries once on a new connection if a reused one is dead.

        Raises `NoResponse` without a complete response, and `ChainResponseError` if it cannot be read.
        """
        request = self._reusable.request("GET", path, params=params) if params else self._reusable.get(path)
        times = ResponseTimes(self._timeout)
        if self._read_times is not None:
            times = self._read_times.setdefault(request_kind(path), times)
        with self._limit_time(self._timeout, times) as scope:
            wait = _DataWait(scope, times.limit)
            try:
                response = await self._exchange(self._reusable, request, limit, wait.note_data)
            except _DEAD_CONNECTION_ERRORS:
                response = await self._exchange(self._single_use, request, limit, wait.note_data)
        times.add(wait.longest)
        return response

    async def post(self, path: str, body: dict[str, object], progress: RequestProgress | None = None) -> NodeResponse:
        """Send a POST request with a JSON body once, on a new connection. Raises like `get`.

        `progress` is updated when the request's bytes leave. The timeout is at least `SEND_TIMEOUT_SECONDS`.
        """
        timeout = max(self._timeout, SEND_TIMEOUT_SECONDS)
        extensions = {} if progress is None else {"trace": progress.trace}
        request = self._single_use.request(
            "POST", path, json=body, timeout=_create_timeout(timeout), extensions=extensions
        )
        started_at = anyio.current_time()
        with self._limit_time(timeout):
            response = await self._exchange(self._single_use, request, DEFAULT_LIMIT_BYTES, lambda: None)
        self._send_times.add(anyio.current_time() - started_at)
        return response

    @asynccontextmanager
    async def stream(
        self, request: StreamRequest, *, limit: int = STREAM_LIMIT_BYTES
    ) -> AsyncIterator[StreamedResponse]:
        """Send a request and stream the response. A GET is retried once if a reused connection is dead.

        Raises:
            NoResponse: no response head was received in time.
            ChainResponseError: the response is compressed, a redirect, has an invalid status, or declares a length
                above `limit`.
        """
        response = await self._send_for_head(request, request.timeout or self._timeout)
        try:
            streamed = StreamedResponse(response, limit)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise InvalidResponse("response is compressed, but no encoding was requested")
            if 300 <= streamed.status < 400:
                raise InvalidResponse(f"response is a redirect (HTTP {streamed.status})")
            if not 200 <= streamed.status < 600:
                raise InvalidResponse(f"response has an invalid status (HTTP {streamed.status})")
            if streamed.length is not None and streamed.length > limit:
                raise ResponseTooLong(limit)
            yield streamed
        finally:
            await response.aclose()

    async def _send_for_head(self, request: StreamRequest, seconds: float) -> httpx.Response:
        content_type = {} if request.body is None else {"content-type": "application/json"}
        built = self._single_use.request(
            request.method,
            request.target,
            content=request.body,
            headers={**content_type, **request.headers},
            timeout=_create_timeout(seconds),
        )
        with self._limit_time(seconds):
            if request.method == "GET":
                with suppress(*_DEAD_CONNECTION_ERRORS):
                    return await self._reusable.send(built)
            return await self._single_use.send(built)

    async def _exchange(
        self, connections: _Connections, request: httpx.Request, limit: int, on_data: Callable[[], None]
    ) -> NodeResponse:
        """Send a request and read the response. `on_data` is called for its head and for each chunk."""
        response = await connections.send(request)
        try:
            on_data()
            if response.headers.get("content-encoding", "identity") != "identity":
                raise InvalidResponse("response is compressed, but no encoding was requested")
            body = bytearray()
            if response.status_code >= HTTPStatus.BAD_REQUEST:
                limit = min(limit, ERROR_LIMIT_BYTES)
            async for piece in _iter_chunks(response, limit):
                body += piece
                on_data()
            return NodeResponse(response.status_code, bytes(body), _parse_retry_after(response))
        finally:
            await response.aclose()


def _create_timeout(seconds: float) -> httpx.Timeout:
    """The timeout of each read and write; a shorter one to connect."""
    return httpx.Timeout(seconds, connect=min(_CONNECT_TIMEOUT_SECONDS, seconds))


def _create_no_response(error: Exception, seconds: float) -> NoResponse:
    if isinstance(error, _NOT_SENT_ERRORS):
        return NoResponse(f"unreachable ({type(error).__name__})", sent=False)
    if isinstance(error, (TimeoutError, httpx.TimeoutException)):
        return NoResponse(f"no response within {seconds:.3g} s", sent=True)
    return NoResponse(f"connection failed ({type(error).__name__})", sent=True)


async def parse_response(response: NodeResponse, parse: Callable[[NodeResponse], T]) -> T:
    """Parse a response; a large one in a thread."""
    if len(response.body) > THREAD_PARSE_BYTES:
        return await anyio.to_thread.run_sync(parse, response)
    return parse(response)


async def _iter_chunks(response: httpx.Response, limit: int) -> AsyncIterator[bytes]:
    """Iterate over a response's body, which must not be too long or have too many small chunks.

    Reading buffered data does not suspend the task, so this yields to the event loop explicitly.
    """
    size = count = 0
    async for piece in response.aiter_bytes():
        size, count = size + len(piece), count + 1
        if size > limit:
            raise ResponseTooLong(limit)
        if count > MAX_SMALL_CHUNKS + size // MIN_MEAN_CHUNK_BYTES:
            raise InvalidResponse(f"response was sent in too many small chunks ({count} for {size} bytes)")
        if count % CHUNKS_PER_CHECKPOINT == 0:
            await anyio.lowlevel.checkpoint()
        yield piece


def _parse_retry_after(response: httpx.Response) -> int | None:
    seconds = _parse_header_number(response.headers.get("retry-after", ""))
    return None if seconds is None else min(seconds, MAX_RETRY_AFTER_SECONDS)


def _parse_header_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None
