"""HTTP/1.1 over a plain stream, for requests that HTTP clients do not send: broken, slow, pipelined, half-closed."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from conformance.http_client import JSON_TYPE, SHARES_PATH, TOKEN_HEADER, Address, Reply
from conformance.verdicts import CheckFailed

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
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def share_request(
        self, content: bytes, headers: Iterable[tuple[str, str]] = (), *, length: int | None = None
    ) -> bytes:
        """The bytes of a posted share. `length` replaces the value of `Content-Length`."""
        size = str(len(content) if length is None else length)
        return self.head([("Content-Type", JSON_TYPE), ("Content-Length", size), *headers]) + content

    async def send(self, data: bytes) -> None:
        """Send bytes. A closed connection is not an error: the helper may have responded."""
        with suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    def close_sending(self) -> None:
        """Close the sending side only."""
        if self._writer.can_write_eof():
            self._writer.write_eof()

    async def response(self, seconds: float = RESPONSE_SECONDS, *, method: str = "POST") -> Reply:
        """Read one response; responses with status 1xx are skipped.

        Raises:
            ConnectionEnded: the connection ended first.
            CheckFailed: there was no complete response in time.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    status, headers = await self._read_head()
                    if status >= 200:
                        body = await self._read_body(status, headers, method)
                        return Reply(status, headers, body, loop.time() - started)
        except TimeoutError:
            raise CheckFailed(f"no response within {seconds:.0f} s") from None
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.LimitOverrunError) as error:
            raise ConnectionEnded(f"connection closed without a response ({type(error).__name__})") from None

    async def interim_status(self, seconds: float) -> int | None:
        """The status of the next response head, which may be 1xx; None if none arrives in time."""
        try:
            async with asyncio.timeout(seconds):
                return (await self._read_head())[0]
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
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
        except ConnectionError:
            return True
        return True

    async def _read_head(self) -> tuple[int, list[tuple[str, str]]]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        parts = lines[0].split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdecimal():
            raise CheckFailed(f"not an HTTP response: {lines[0][:80]!r}")
        pairs = (line.partition(":") for line in lines[1:] if line)
        return int(parts[1]), [(name.strip().lower(), value.strip()) for name, _, value in pairs]

    async def _read_body(self, status: int, headers: Sequence[tuple[str, str]], method: str) -> bytes:
        values = dict(headers)
        if status in _NO_BODY or method == "HEAD":
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
