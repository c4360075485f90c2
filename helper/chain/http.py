"""One node's HTTP: a whole-call time limit, a size limit, no redirects, and a clear word on what may have
been sent.

httpx limits each read but not the whole call, so every call runs under `anyio.fail_after`. Answers are read
raw and compressed ones are not asked for: the size limit is the number of bytes that came.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import anyio
import httpx

from helper.errors import ChainAnswerError, ChainUnavailable, ConfigError

SMALL = 1 << 20
"""Size limit of ordinary answers, in bytes."""

LARGE = 64 << 20
"""Size limit of pages of leaves and of blocks, in bytes."""

TIMEOUT = 10.0
"""Seconds that a whole call may take unless a client is told otherwise."""

SLOW = 1.0
"""Seconds after which a call under way makes a node slow: others are asked before it."""

_CONNECT = 3.0
_NOTHING_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


class Answer(NamedTuple):
    """A whole answer: HTTP status and body."""

    status: int
    body: bytes


class Unanswered(ChainUnavailable):
    """No whole answer came; `sent` says whether any byte of the request may have left this machine."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class NodeHttp:
    """A keep-alive HTTP client for one base URL.

    `name` is host and port, without credentials, for logs. `transport` replaces the network in tests.
    """

    def __init__(
        self, url: str, *, timeout: float = TIMEOUT, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"not a URL of a node: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError("the URL of a node must begin with http:// or https:// and name a host")
        port = parsed.port or (443 if parsed.scheme == "https" else 80)
        self.name = f"[{parsed.host}]:{port}" if ":" in parsed.host else f"{parsed.host}:{port}"
        self._timeout = timeout
        self._under_way: set[float] = set()  # when each call began, by the event loop's time
        self._kept = self._client(parsed, transport, keep=8)
        # Connections of this one are never reused: no stale keep-alive can make its outcome ambiguous.
        self._new = self._client(parsed, transport, keep=0)

    def _client(self, url: httpx.URL, transport: httpx.AsyncBaseTransport | None, *, keep: int) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=url,
            transport=transport,
            timeout=httpx.Timeout(self._timeout, connect=min(_CONNECT, self._timeout)),
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=keep, keepalive_expiry=30),
            headers={"accept": "application/json", "accept-encoding": "identity"},
            follow_redirects=False,
            trust_env=False,
        )

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

        Raises `Unanswered`, or `ChainAnswerError` for an answer above `limit` bytes.
        """
        request = self._kept.build_request("GET", path, params=params)
        again = self._new.build_request("GET", path, params=params)
        try:
            with self._limited():
                try:
                    return await self._exchange(self._kept, request, limit)
                except (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError):
                    return await self._exchange(self._new, again, limit)
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._unanswered(error) from None

    async def post(self, path: str, body: dict[str, object]) -> Answer:
        """POST a JSON body once, on a new connection. Raises `Unanswered`, or `ChainAnswerError` (long)."""
        request = self._new.build_request("POST", path, json=body)
        try:
            with self._limited():
                return await self._exchange(self._new, request, SMALL)
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._unanswered(error) from None

    async def _exchange(self, client: httpx.AsyncClient, request: httpx.Request, limit: int) -> Answer:
        response = await client.send(request, stream=True)
        try:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ChainAnswerError("the answer is compressed though that was not asked for")
            parts: list[bytes] = []
            size = 0
            async for part in response.aiter_bytes():
                size += len(part)
                if size > limit:
                    raise ChainAnswerError(f"the answer is longer than {limit} bytes")
                parts.append(part)
            return Answer(response.status_code, b"".join(parts))
        finally:
            await response.aclose()

    def _unanswered(self, error: Exception) -> Unanswered:
        if isinstance(error, _NOTHING_SENT):
            return Unanswered(f"unreachable ({type(error).__name__})", sent=False)
        if isinstance(error, (TimeoutError, httpx.TimeoutException)):
            return Unanswered(f"no answer within {self._timeout:g} s", sent=True)
        return Unanswered(f"connection failed ({type(error).__name__})", sent=True)
