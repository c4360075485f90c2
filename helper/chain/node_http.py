"""One node's HTTP: a whole-call time limit, a size limit, no redirects, and a clear word on what may have
been sent.

httpx limits each read but not the whole call, so every call runs under `anyio.fail_after`. Answers are read
raw and compressed ones are not asked for: the size limit is the number of bytes that came.
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
"""Size limit of a block and of its results, in bytes. A node's JSON has a block twice, in base64."""

LARGE = 64 << 20
"""Size limit of answers that are passed on as they come and never held as a whole, in bytes."""

PIECES_PER_TURN = 64
"""Pieces of an answer that are read before other tasks get a turn of the event loop."""

FREE_PIECES = 4096
"""Pieces of an answer that may be of any size."""

LEAST_PIECE = 256
"""Mean size, in bytes, of the pieces of an answer that has more than `FREE_PIECES`. Each piece costs some 20 µs,
however small it is; honest nodes send pieces of 1,400 bytes and more.
"""

IN_THREAD = 1 << 16
"""Size, in bytes, above which an answer is parsed in a thread."""

TIMEOUT = 10.0
"""Seconds that a whole call may take unless a client is told otherwise."""

SLOW = 1.0
"""Seconds after which a call under way makes a node slow: others are asked before it."""

CONNECTIONS = 64
"""Connections to one node at once."""

_CONNECT = 3.0
_REQUESTS_KEPT = 16
_DEAD = (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)
_NOTHING_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


class Answer(NamedTuple):
    """A whole answer: HTTP status and body."""

    status: int
    body: bytes


class AnswerTooLong(InvalidAnswer):
    """An answer is longer than the limit of its kind."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the answer is longer than {limit} bytes")


class Streamed:
    """An answer whose head is there, and whose body comes piece by piece; see `NodeHttp.stream`.

    Attributes:
        status: HTTP status.
        is_json: whether its body says to be JSON.
        length: bytes of its body, None where it does not say.
        retry_after: seconds that it asks to wait, None where it does not.
    """

    def __init__(self, response: httpx.Response, limit: int) -> None:
        self._response = response
        self._limit = limit
        headers = response.headers
        self.status = response.status_code
        self.is_json = headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        # A chunked body has no other length, whatever a second header says (RFC 9112, section 6.3).
        self.length = None if "transfer-encoding" in headers else _number(headers.get("content-length", ""))
        self.retry_after = _number(headers.get("retry-after", ""))

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes; see `_pieces`. Raises `Unanswered` too, when it breaks off or stands still."""
        try:
            async for piece in _pieces(self._response, self._limit):
                yield piece
        except httpx.HTTPError as error:
            raise Unanswered(f"the answer broke off ({type(error).__name__})", sent=True) from None


class Unanswered(ChainUnavailable):
    """No whole answer came; `sent` says whether any byte of the request may have left this machine."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class _Way:
    """Requests to one base URL, and the connections that they go over.

    A client makes the requests, but they do not go through it: redirects, cookies and authentication, which it looks
    after each time, are a third of a request's cost, and asking the chain is what an idle helper does.
    """

    def __init__(self, url: httpx.URL, transport: httpx.AsyncBaseTransport, timeout: httpx.Timeout) -> None:
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        if url.userinfo:
            (asked,) = httpx.BasicAuth(url.username, url.password).auth_flow(httpx.Request("GET", url))
            headers["authorization"] = asked.headers["authorization"]
        self._transport = transport
        self._maker = create_async_client(base_url=url, transport=transport, timeout=timeout, headers=headers)
        self.get = lru_cache(_REQUESTS_KEPT)(partial(self.request, "GET"))
        """A request without parameters: the same few are asked again and again."""

    def request(self, method: str, target: str, **parts: Any) -> httpx.Request:
        """A request, made as `httpx.AsyncClient.build_request` does."""
        return self._maker.build_request(method, target, **parts)

    async def send(self, request: httpx.Request) -> httpx.Response:
        """The head of its answer, whose body is to be read or closed."""
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._maker.aclose()


class NodeHttp:
    """A keep-alive HTTP client for one base URL.

    `name` is host and port, without credentials, for logs; `url` may hold some. `transport` replaces the network in
    tests.
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
            raise ConfigError(f"not a URL of a node: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError("the URL of a node must begin with http:// or https:// and name a host")
        port = parsed.port or (443 if parsed.scheme == "https" else 80)
        self.name = f"[{parsed.host}]:{port}" if ":" in parsed.host else f"{parsed.host}:{port}"
        self.url = url
        self._timeout = timeout
        self._connections = connections
        self._under_way: set[float] = set()  # when each call began, by the event loop's time
        self._kept = self._way(parsed, transport, keep=8)
        # Connections of this one are never reused: no stale keep-alive can make its outcome ambiguous.
        self._new = self._way(parsed, transport, keep=0)

    def _way(self, url: httpx.URL, transport: httpx.AsyncBaseTransport | None, *, keep: int) -> _Way:
        limits = httpx.Limits(max_connections=self._connections, max_keepalive_connections=keep, keepalive_expiry=30)
        timeout = httpx.Timeout(self._timeout, connect=min(_CONNECT, self._timeout))
        return _Way(url, transport or httpx.AsyncHTTPTransport(limits=limits, trust_env=False), timeout)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._kept.aclose()
        await self._new.aclose()

    @property
    def slow(self) -> bool:
        """Whether a call to it has been under way for long: the next one may well be, too."""
        return bool(self._under_way) and anyio.current_time() - min(self._under_way) > SLOW

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """One whole call: `TimeoutError` when it takes too long."""
        began = anyio.current_time()
        while began in self._under_way:
            began = math.nextafter(began, math.inf)
        self._under_way.add(began)
        try:
            with anyio.fail_after(self._timeout):
                yield
        finally:
            self._under_way.discard(began)

    async def get(self, path: str, params: dict[str, str] | None = None, *, limit: int = SMALL) -> Answer:
        """GET; asked once more on a new connection when a kept one turns out to be dead.

        Raises `Unanswered`, `AnswerTooLong` above `limit` bytes, `ChainAnswerError` for what is read in no other way.
        """
        request = self._kept.request("GET", path, params=params) if params else self._kept.get(path)
        try:
            with self._limited():
                try:
                    return await self._exchange(self._kept, request, limit)
                except _DEAD:
                    return await self._exchange(self._new, request, limit)
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._unanswered(error) from None

    async def post(self, path: str, body: dict[str, object]) -> Answer:
        """POST a JSON body once, on a new connection. Raises `Unanswered`, or `ChainAnswerError` (long)."""
        request = self._new.request("POST", path, json=body)
        try:
            with self._limited():
                return await self._exchange(self._new, request, SMALL)
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._unanswered(error) from None

    @asynccontextmanager
    async def stream(
        self, method: str, target: str, body: bytes | None = None, *, limit: int = LARGE
    ) -> AsyncIterator[Streamed]:
        """Ask once, and have the answer as it comes. A GET is asked once more where a kept connection is dead.

        Args:
            method: GET, or anything else to be sent on a connection of its own.
            target: path and query, encoded.
            body: JSON to send.
            limit: bytes of the longest answer.

        Raises:
            Unanswered: no head of an answer came in time.
            ChainAnswerError: it is compressed, points elsewhere, has no valid status, or says that it is longer than
                `limit`.
        """
        response = await self._head(method, target, body)
        try:
            answer = Streamed(response, limit)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise InvalidAnswer("the answer is compressed though that was not asked for")
            if 300 <= answer.status < 400:
                raise InvalidAnswer(f"the answer points elsewhere (HTTP {answer.status})")
            if not 200 <= answer.status < 600:
                raise InvalidAnswer(f"the answer has no valid status (HTTP {answer.status})")
            if answer.length is not None and answer.length > limit:
                raise AnswerTooLong(limit)
            yield answer
        finally:
            await response.aclose()

    async def _head(self, method: str, target: str, body: bytes | None) -> httpx.Response:
        headers = {} if body is None else {"content-type": "application/json"}
        request = self._new.request(method, target, content=body, headers=headers)
        try:
            with self._limited():
                if method == "GET":
                    with suppress(*_DEAD):
                        return await self._kept.send(request)
                return await self._new.send(request)
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._unanswered(error) from None

    async def _exchange(self, way: _Way, request: httpx.Request, limit: int) -> Answer:
        response = await way.send(request)
        try:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise InvalidAnswer("the answer is compressed though that was not asked for")
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
    """What `parse` makes of an answer; that of a large one is made in a thread."""
    if len(answer.body) > IN_THREAD:
        return await anyio.to_thread.run_sync(parse, answer)
    return parse(answer)


async def _pieces(response: httpx.Response, limit: int) -> AsyncIterator[bytes]:
    """An answer's body as it comes. What is in the receive buffer comes without a turn of the event loop between two
    pieces, so turns are given here.

    Raises:
        AnswerTooLong: it is longer than `limit` bytes.
        ChainAnswerError: it came in too many small pieces.
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
    """A header's whole number, if it is one."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None
