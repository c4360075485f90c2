"""HTTP client for one chain node, with a total timeout and a size limit.

httpx limits each read but not the whole call, so every call runs under `anyio.fail_after`. Redirects are not followed.
Compressed answers are refused, so that the size limit applies to the received bytes. Errors say whether the request may
have been sent.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx

from helper.errors import ChainUnavailable, ConfigError, InvalidAnswer
from helper.runtime.http_client import create_async_client

T = TypeVar("T")

SMALL = 1 << 20
"""Size limit of ordinary answers, in bytes."""

PAGE = 8 << 20
"""Size limit of lists and of pages of leaves or transactions, in bytes."""

BLOCK = 16 << 20
"""Size limit of a block and of its results, in bytes. A node's JSON contains a block twice, in base64."""

LARGE = 64 << 20
"""Size limit of streamed answers, which are never held in memory as a whole, in bytes."""

PIECES_PER_TURN = 64
"""Pieces of an answer that are read before control returns to the event loop."""

FREE_PIECES = 4096
"""Number of pieces of an answer that may have any size."""

LEAST_PIECE = 256
"""Minimum mean piece size, in bytes, of an answer with more than `FREE_PIECES` pieces. Each piece costs about 20 µs,
whatever its size; regular nodes send pieces of 1,400 bytes or more.
"""

IN_THREAD = 1 << 16
"""Size, in bytes, above which an answer is parsed in a thread."""

TIMEOUT = 10.0
"""Default timeout of a whole call, in seconds."""

SLOW = 1.0
"""Seconds after which a call in progress makes a node slow. Other nodes are then called before it."""

CONNECTIONS = 64
"""Maximum number of connections to one node."""

_CONNECT = 3.0
_CACHED_REQUESTS = 16
_DEAD = (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)
_NOTHING_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


class Answer(NamedTuple):
    """A whole answer: HTTP status and body."""

    status: int
    body: bytes


class AnswerTooLong(InvalidAnswer):
    """An answer is longer than its size limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the answer is longer than {limit} bytes")


class Streamed:
    """An answer whose head was received and whose body is streamed. See `NodeHttp.stream`.

    Attributes:
        status: HTTP status.
        is_json: whether the content type is JSON.
        length: declared length of the body in bytes, None if not declared.
        retry_after: value of the `Retry-After` header in seconds, None without one.
    """

    def __init__(self, response: httpx.Response, limit: int) -> None:
        self._response = response
        self._limit = limit
        headers = response.headers
        self.status = response.status_code
        self.is_json = headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        # Transfer-Encoding overrides Content-Length (RFC 9112, section 6.3).
        self.length = None if "transfer-encoding" in headers else _number(headers.get("content-length", ""))
        self.retry_after = _number(headers.get("retry-after", ""))

    async def pieces(self) -> AsyncIterator[bytes]:
        """Iterate over the body; see `_pieces`. Raises `Unanswered` too, if the answer is incomplete or stalls."""
        try:
            async for piece in _pieces(self._response, self._limit):
                yield piece
        except httpx.HTTPError as error:
            raise Unanswered(f"incomplete answer ({type(error).__name__})", sent=True) from None


class Unanswered(ChainUnavailable):
    """No complete answer. `sent` says whether any byte of the request may have left this machine."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class _Connections:
    """Builds requests to one base URL and sends them over its own connections.

    An `httpx.AsyncClient` builds the requests but does not send them: its handling of redirects, cookies and
    authentication is a third of the cost of a request, and polling nodes is most of an idle helper's work.
    """

    def __init__(self, url: httpx.URL, transport: httpx.AsyncBaseTransport, timeout: httpx.Timeout) -> None:
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        if url.userinfo:
            (authenticated,) = httpx.BasicAuth(url.username, url.password).auth_flow(httpx.Request("GET", url))
            headers["authorization"] = authenticated.headers["authorization"]
        self._transport = transport
        self._builder = create_async_client(base_url=url, transport=transport, timeout=timeout, headers=headers)
        self.get = lru_cache(_CACHED_REQUESTS)(partial(self.request, "GET"))
        """Return the GET request of a path; cached, because the same few are sent repeatedly."""

    def request(self, method: str, target: str, **parts: Any) -> httpx.Request:
        """Build a request as `httpx.AsyncClient.build_request` does."""
        return self._builder.build_request(method, target, **parts)

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send the request and return the response, whose body the caller reads or closes."""
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._builder.aclose()


class NodeHttp:
    """A keep-alive HTTP client for one base URL.

    Args:
        url: base URL; may contain credentials.
        timeout: seconds that a whole call may take.
        transport: replaces the network in tests.
        connections: maximum number of connections.

    Attributes:
        name: host and port, without credentials, for logs.
        url: the base URL, with its credentials.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = TIMEOUT,
        transport: httpx.AsyncBaseTransport | None = None,
        connections: int = CONNECTIONS,
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
        self._connections = connections
        self._in_progress: set[float] = set()  # start of each call, in event loop time
        self._reusable = self._connect(parsed, transport, keep=8)
        # Never reused, so that a stale keep-alive connection cannot make the outcome of a POST ambiguous.
        self._single_use = self._connect(parsed, transport, keep=0)

    def _connect(self, url: httpx.URL, transport: httpx.AsyncBaseTransport | None, *, keep: int) -> _Connections:
        limits = httpx.Limits(max_connections=self._connections, max_keepalive_connections=keep, keepalive_expiry=30)
        timeout = httpx.Timeout(self._timeout, connect=min(_CONNECT, self._timeout))
        return _Connections(url, transport or httpx.AsyncHTTPTransport(limits=limits, trust_env=False), timeout)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._reusable.aclose()
        await self._single_use.aclose()

    @property
    def slow(self) -> bool:
        """Whether a call has been in progress for more than `SLOW` seconds."""
        return bool(self._in_progress) and anyio.current_time() - min(self._in_progress) > SLOW

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Apply the total timeout to a call; raises `TimeoutError`."""
        began = anyio.current_time()
        while began in self._in_progress:
            began = math.nextafter(began, math.inf)
        self._in_progress.add(began)
        try:
            with anyio.fail_after(self._timeout):
                yield
        finally:
            self._in_progress.discard(began)

    async def get(self, path: str, params: dict[str, str] | None = None, *, limit: int = SMALL) -> Answer:
        """Send a GET request. Retries once on a new connection if a reused one is dead.

        Raises:
            Unanswered: no complete answer.
            AnswerTooLong: the answer is longer than `limit` bytes.
            ChainAnswerError: the answer cannot be read for another reason.
        """
        request = self._reusable.request("GET", path, params=params) if params else self._reusable.get(path)
        try:
            with self._limited():
                try:
                    return await self._exchange(self._reusable, request, limit)
                except _DEAD:
                    return await self._exchange(self._single_use, request, limit)
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._unanswered(error) from None

    async def post(self, path: str, body: dict[str, object]) -> Answer:
        """Send a POST request with a JSON body once, on a new connection. Raises like `get`."""
        request = self._single_use.request("POST", path, json=body)
        try:
            with self._limited():
                return await self._exchange(self._single_use, request, SMALL)
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._unanswered(error) from None

    @asynccontextmanager
    async def stream(
        self, method: str, target: str, body: bytes | None = None, *, limit: int = LARGE
    ) -> AsyncIterator[Streamed]:
        """Send a request and stream the answer. A GET is retried once if a reused connection is dead.

        Args:
            method: GET, or another method, which is sent on a new connection.
            target: path and query, encoded.
            body: JSON body.
            limit: maximum length of the answer in bytes.

        Raises:
            Unanswered: no response head was received in time.
            ChainAnswerError: the answer is compressed, a redirect, has an invalid status, or declares a length above
                `limit`.
        """
        response = await self._head(method, target, body)
        try:
            answer = Streamed(response, limit)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise InvalidAnswer("the answer is compressed although no encoding was accepted")
            if 300 <= answer.status < 400:
                raise InvalidAnswer(f"the answer is a redirect (HTTP {answer.status})")
            if not 200 <= answer.status < 600:
                raise InvalidAnswer(f"the answer has an invalid status (HTTP {answer.status})")
            if answer.length is not None and answer.length > limit:
                raise AnswerTooLong(limit)
            yield answer
        finally:
            await response.aclose()

    async def _head(self, method: str, target: str, body: bytes | None) -> httpx.Response:
        headers = {} if body is None else {"content-type": "application/json"}
        request = self._single_use.request(method, target, content=body, headers=headers)
        try:
            with self._limited():
                if method == "GET":
                    with suppress(*_DEAD):
                        return await self._reusable.send(request)
                return await self._single_use.send(request)
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._unanswered(error) from None

    async def _exchange(self, connections: _Connections, request: httpx.Request, limit: int) -> Answer:
        response = await connections.send(request)
        try:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise InvalidAnswer("the answer is compressed although no encoding was accepted")
            body = bytearray()
            async for piece in _pieces(response, limit):
                body += piece
            return Answer(response.status_code, bytes(body))
        finally:
            await response.aclose()

    def _unanswered(self, error: Exception) -> Unanswered:
        if isinstance(error, _NOTHING_SENT):
            return Unanswered(f"unreachable ({type(error).__name__})", sent=False)
        if isinstance(error, (TimeoutError, httpx.TimeoutException)):
            return Unanswered(f"no answer within {self._timeout:g} s", sent=True)
        return Unanswered(f"connection failed ({type(error).__name__})", sent=True)


async def parse_answer(answer: Answer, parse: Callable[[Answer], T]) -> T:
    """Parse an answer; a large one in a thread."""
    if len(answer.body) > IN_THREAD:
        return await anyio.to_thread.run_sync(parse, answer)
    return parse(answer)


async def _pieces(response: httpx.Response, limit: int) -> AsyncIterator[bytes]:
    """Iterate over an answer's body.

    Reading buffered data does not suspend the task, so this yields to the event loop explicitly.

    Raises:
        AnswerTooLong: the body is longer than `limit` bytes.
        ChainAnswerError: the body has too many small pieces.
    """
    size = count = 0
    async for piece in response.aiter_bytes():
        size, count = size + len(piece), count + 1
        if size > limit:
            raise AnswerTooLong(limit)
        if count > FREE_PIECES + size // LEAST_PIECE:
            raise InvalidAnswer(f"the answer came in too many small pieces ({count} in {size} bytes)")
        if count % PIECES_PER_TURN == 0:
            await anyio.lowlevel.checkpoint()
        yield piece


def _number(text: str) -> int | None:
    """Parse a header as a non-negative integer, None if it is not one."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None
