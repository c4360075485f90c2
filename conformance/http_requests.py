"""Requests to the helper under test: with time limits, without redirects, and repeated if it asks for this.

`RawConnection` sends what no HTTP client sends: broken, slow, pipelined and half-closed requests.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from conformance.check_failures import CheckFailed, shorten
from helper.clock import Clock
from helper.errors import UsageError
from helper.runtime.network_clients import create_async_client

PREFIX: Final = "/shielded-vote/v1"
SHARES_PATH: Final = f"{PREFIX}/shares"
TOKEN_HEADER: Final = "X-Helper-Token"  # noqa: S105 (the header's name)
ATTEMPT_HEADER: Final = "X-Vote-Ingress-Attempt-V1"
JSON_TYPE: Final = "application/json"

TIMEOUT_SECONDS: Final = 30.0
"""Seconds that wallet library 5.3.0 waits for the response to a share."""
PATIENCE_SECONDS: Final = 30.0
"""Seconds in which a request is repeated if the helper asks for it. A helper may limit requests."""
MAX_PAUSE_SECONDS: Final = 5.0
"""Maximum wait between two attempts, even if `Retry-After` is longer."""
MAX_REPLY_BYTES: Final = 256 << 10
"""Maximum bytes of a response that wallet library 5.3.0 reads."""

_MAX_BODY_BYTES: Final = 16 << 20
"""Bytes after which a response is no longer read."""

Headers = Mapping[str, str] | Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Reply:
    """A response. Names of headers are in lower case; `seconds` last from the request's start to its last byte."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes = field(repr=False)
    seconds: float

    def header(self, name: str) -> str:
        """The first value of a header, empty if there is none."""
        return next((value for key, value in self.headers if key == name.lower()), "")

    @property
    def media_type(self) -> str:
        """The media type, without parameters."""
        return self.header("content-type").partition(";")[0].strip().lower()

    def json(self) -> Any:
        """The JSON value of the body, None if it is not JSON. Ignores the content type."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):  # the latter if it is nested too deeply
            return None

    @property
    def outcome(self) -> str:
        """The field `status` of the JSON body, or an empty string."""
        value = self.json()
        outcome = value.get("status", "") if isinstance(value, dict) else ""
        return outcome if isinstance(outcome, str) else ""

    @property
    def error(self) -> str:
        """The text of an error: its field `error`, with the parts of a JSON-RPC error, or the body."""
        value = self.json()
        if isinstance(value, dict) and "error" in value:
            return value["error"] if isinstance(value["error"], str) else json.dumps(value["error"])
        return self.body.decode("utf-8", "replace")

    @property
    def is_accepted(self) -> bool:
        """Whether the share was accepted, now or earlier."""
        return self.status == HTTPStatus.OK and self.outcome in ("queued", "duplicate")

    @property
    def is_pending(self) -> bool:
        """Whether a share's status is pending: 202, or 200, which the wallet zkool reads as confirmed."""
        return self.status in (HTTPStatus.OK, HTTPStatus.ACCEPTED) and self.outcome == "pending"

    @property
    def is_confirmed(self) -> bool:
        """Whether a share's status is confirmed."""
        return self.status == HTTPStatus.OK and self.outcome == "confirmed"

    @property
    def asks_to_repeat(self) -> bool:
        """Whether the helper asks for the request again: 429, or 503 with whole seconds in `Retry-After`."""
        is_pause = self.status == HTTPStatus.SERVICE_UNAVAILABLE and self.header("retry-after").isdecimal()
        return is_pause or self.status == HTTPStatus.TOO_MANY_REQUESTS

    def __str__(self) -> str:
        """Status, content type and beginning of the body, on one line."""
        text = " ".join(self.body.decode("utf-8", "replace").split())
        return f"{self.status} {self.header('content-type') or 'without content type'} {shorten(text, 160)}".rstrip()


@dataclass(frozen=True, slots=True)
class Address:
    """Address of the helper: base URL, host, port, and the path under which it is mounted."""

    url: str
    host: str
    port: int
    path: str
    is_tls: bool

    @property
    def authority(self) -> str:
        """Value of the header `Host`."""
        default = 443 if self.is_tls else 80
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == default else f"{host}:{self.port}"


def parse_address(url: str) -> Address:
    """Parse a base URL.

    Raises:
        UsageError: it is not an http or https URL without query and fragment.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        httpx.URL(url)  # refuses names that no resolver takes
    except (httpx.InvalidURL, ValueError) as error:
        raise UsageError(f"not a base URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise UsageError(f"not a base URL: {url}")
    is_tls = parts.scheme == "https"
    return Address(url.rstrip("/"), parts.hostname, port or (443 if is_tls else 80), parts.path.rstrip("/"), is_tls)


class HelperClient:
    """Sends requests to one helper. `token` is the value of `X-Helper-Token`, empty for none."""

    def __init__(self, address: Address, token: str, clock: Clock) -> None:
        self.address = address
        self.token = token
        self._clock = clock
        self._http = create_async_client(timeout=TIMEOUT_SECONDS)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def get(self, path: str, headers: Headers = (), *, token: str | None = None) -> Reply:
        """Send a GET. `path` is relative to the mount point."""
        return await self.send("GET", path, headers=headers, token=token)

    async def post(self, content: bytes, headers: Headers = (), *, token: str | None = None) -> Reply:
        """Post a body as a share."""
        given = list(headers.items() if isinstance(headers, Mapping) else headers)
        if not any(name.lower() == "content-type" for name, _ in given):
            given.append(("Content-Type", JSON_TYPE))
        return await self.send("POST", SHARES_PATH, content=content, headers=given, token=token)

    async def send(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: Headers = (),
        token: str | None = None,
        is_patient: bool = True,
    ) -> Reply:
        """Send a request. Repeats it until the time limit if the helper asks for it.

        Args:
            path: relative to the mount point.
            headers: sent in addition to the token.
            token: replaces the helper's token; empty for none.
            is_patient: whether to repeat a request if the helper asks for it.

        Raises:
            CheckFailed: there was no complete response in time.
        """
        sent = list(headers.items() if isinstance(headers, Mapping) else headers)
        if value := self.token if token is None else token:
            sent.append((TOKEN_HEADER, value))
        loop = asyncio.get_running_loop()  # the clock measures responses only: tests slow it down
        ends_at = loop.time() + PATIENCE_SECONDS
        while True:
            reply = await self._send_once(method, path, content, sent)
            pause = retry_pause_seconds(reply)
            is_over = loop.time() + pause > ends_at
            if not reply.asks_to_repeat or not is_patient or is_over:
                return reply
            await self._clock.sleep(pause)

    async def _send_once(self, method: str, path: str, content: bytes | None, headers: list[tuple[str, str]]) -> Reply:
        started, body, url = self._clock.monotonic(), bytearray(), f"{self.address.url}{path}"
        encoded = httpx.Headers(headers, encoding="utf-8")  # a token may have any characters
        try:
            async with (
                asyncio.timeout(TIMEOUT_SECONDS),
                self._http.stream(method, url, content=content, headers=encoded) as response,
            ):
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > _MAX_BODY_BYTES:
                        raise CheckFailed(f"{method} {path}: the response is longer than {_MAX_BODY_BYTES >> 20} MiB")
        except TimeoutError:
            raise CheckFailed(f"{method} {path}: no response within {TIMEOUT_SECONDS:.0f} s") from None
        except httpx.RequestError as error:  # also if the body is not in its Content-Encoding
            raise CheckFailed(f"{method} {path}: {type(error).__name__} {error}".rstrip()) from error
        seconds = self._clock.monotonic() - started
        received = [(name.lower(), value) for name, value in response.headers.multi_items()]
        return Reply(response.status_code, received, bytes(body), seconds)


def retry_pause_seconds(reply: Reply) -> float:
    """The wait before a request is repeated."""
    text = reply.header("retry-after")
    return min(max(float(text), 0.2), MAX_PAUSE_SECONDS) if text.isdecimal() else 1.0


RESPONSE_SECONDS: Final = 15.0
"""Default limit for a response, in seconds."""
_MAX_LINE: Final = 64 << 10
_NO_BODY: Final = frozenset({204, 304})


class ConnectionEnded(CheckFailed):
    """The helper closed the connection without a complete response. Some checks allow this."""


class RawConnection:
    """A connection to the helper."""

    def __init__(
        self, address: Address, token: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._address = address
        self._token = token
        self._reader = reader
        self._writer = writer

    def head(
        self,
        headers: Iterable[tuple[str, str]] = (),
        *,
        method: str = "POST",
        path: str = SHARES_PATH,
        version: str = "1.1",
    ) -> bytes:
        """The bytes of a request line with its headers, with `Host` and the helper's token."""
        named = list(headers)
        if not any(name.lower() == "host" for name, _ in named):
            named.insert(0, ("Host", self._address.authority))
        if self._token:
            named.append((TOKEN_HEADER, self._token))
        lines = [f"{method} {self._address.path}{path} HTTP/{version}", *(f"{name}: {value}" for name, value in named)]
        return "\r\n".join([*lines, "", ""]).encode()

    def share_request(
        self, content: bytes, headers: Iterable[tuple[str, str]] = (), *, length: int | None = None
    ) -> bytes:
        """The bytes of a posted share. `length` replaces the value of `Content-Length`."""
        size = str(len(content) if length is None else length)
        return self.head([("Content-Type", JSON_TYPE), ("Content-Length", size), *headers]) + content

    async def send(self, data: bytes) -> None:
        """Send bytes. A closed connection is not an error: the helper may have responded."""
        with suppress(OSError):
            self._writer.write(data)
            await self._writer.drain()

    def close_sending(self) -> None:
        """Close the sending side only."""
        if self._writer.can_write_eof():
            self._writer.write_eof()

    async def response(self, seconds: float = RESPONSE_SECONDS) -> Reply:
        """Read one response; responses with status 1xx are skipped.

        Raises:
            ConnectionEnded: the connection ended first.
            CheckFailed: there was no complete response in time.
        """
        loop = asyncio.get_running_loop()  # the clock measures responses only: tests slow it down
        started = loop.time()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    status, headers = await self._read_head()
                    if status >= 200:
                        body = await self._read_body(status, headers)
                        return Reply(status, headers, body, loop.time() - started)
        except TimeoutError:
            raise CheckFailed(f"no response within {seconds:.0f} s") from None
        except (asyncio.IncompleteReadError, OSError, asyncio.LimitOverrunError) as error:  # OSError: also of TLS
            raise ConnectionEnded(f"connection closed without a response ({type(error).__name__})") from None

    async def interim_status(self, seconds: float) -> int | None:
        """The status of the next response head, which may be 1xx; None if none arrives in time."""
        try:
            async with asyncio.timeout(seconds):
                return (await self._read_head())[0]
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def responses(self, seconds: float = RESPONSE_SECONDS) -> list[Reply]:
        """Read responses until the connection ends or nothing arrives within `seconds`."""
        replies: list[Reply] = []
        with suppress(CheckFailed):
            while True:
                replies.append(await self.response(seconds))
        return replies

    async def is_closed(self, seconds: float = RESPONSE_SECONDS) -> bool:
        """Whether the helper closes the connection within `seconds`; data until then is discarded."""
        try:
            async with asyncio.timeout(seconds):
                while await self._reader.read(_MAX_LINE):
                    pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True

    async def _read_head(self) -> tuple[int, list[tuple[str, str]]]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        parts = lines[0].split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdecimal():
            raise CheckFailed(f"not an HTTP response: {lines[0][:80]!r}")
        pairs = (line.partition(":") for line in lines[1:] if line)
        return int(parts[1]), [(name.strip().lower(), value.strip()) for name, _, value in pairs]

    async def _read_body(self, status: int, headers: Sequence[tuple[str, str]]) -> bytes:
        values = dict(headers)
        if status in _NO_BODY:
            return b""
        if values.get("transfer-encoding", "").lower() == "chunked":
            return await self._read_chunks()
        if "content-length" in values:
            return await self._reader.readexactly(int(values["content-length"]))
        return await self._reader.read()

    async def _read_chunks(self) -> bytes:
        body = b""
        while True:
            size = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
            chunk = await self._reader.readexactly(size + 2)
            if not size:
                return body
            body += chunk[:-2]


@asynccontextmanager
async def open_raw(address: Address, token: str) -> AsyncIterator[RawConnection]:
    """Open a connection to the helper.

    Raises:
        CheckFailed: the connection failed.
    """
    context = ssl.create_default_context() if address.is_tls else None
    try:
        async with asyncio.timeout(RESPONSE_SECONDS):
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context, limit=1 << 20)
    except (OSError, TimeoutError) as error:
        raise CheckFailed(f"no connection: {type(error).__name__} {error}".rstrip()) from None
    try:
        yield RawConnection(address, token, reader, writer)
    finally:
        writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                await writer.wait_closed()


def encode_chunks(content: bytes, size: int) -> bytes:
    """Encode a body in chunks of `size` bytes."""
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
