"""Malicious HTTP clients over plain sockets: slow clients and floods."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

SHARES_PATH = "/shielded-vote/v1/shares"
HOST = "127.0.0.1"
CONNECTION_ERRORS = (OSError, asyncio.IncompleteReadError)


@dataclass(frozen=True, slots=True)
class RawResponse:
    """A response: status, headers with lower-case names, and body."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class RawRequest:
    """An HTTP request to send."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def encode_head(self) -> bytes:
        """Return the request head, with Content-Length unless the headers override it."""
        headers = {"Host": "helper", "Content-Length": str(len(self.body)), **self.headers}
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode()


class ReusedConnection:
    """A connection from a chosen source address, reopened after it was closed."""

    def __init__(self, port: int, source: str = HOST) -> None:
        self._port = port
        self._source = source
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: RawRequest) -> RawResponse | None:
        """Send a request; return None if the connection closed without a response."""
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(HOST, self._port, local_addr=(self._source, 0))
            reader, writer = self._streams
            writer.write(request.encode_head() + request.body)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
            response = RawResponse(
                int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
            )
        except CONNECTION_ERRORS:
            self.close()
            return None
        if headers.get("connection") == "close" or "Expect" in request.headers:
            self.close()
        return response

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


# Slow clients

SLOW_POST_HEAD = (
    f"POST {SHARES_PATH} HTTP/1.1\r\nHost: helper\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n"
)
SLOW_MODES = ("silent", "head", "body", "both")


async def hold_slow_connection(port: int, source: str, mode: str) -> float:
    """Hold a connection at one byte per second; return the seconds until it was closed.

    Args:
        port: the helper's port.
        source: local address.
        mode: sends nothing, drips the head, drips the body, or sends the head late and then drips the body.
    """
    started_at = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection(HOST, port, local_addr=(source, 0))
    except OSError:
        return time.monotonic() - started_at
    sender = asyncio.create_task(_send_slowly(writer, mode))
    try:
        with contextlib.suppress(OSError):
            while await reader.read(4096):
                pass
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        writer.close()
    return time.monotonic() - started_at


async def _send_slowly(writer: asyncio.StreamWriter, mode: str) -> None:
    if mode == "silent":
        return
    if mode == "body":
        writer.write(SLOW_POST_HEAD.encode() + b"\r\n")
    elif mode == "both":
        writer.write(SLOW_POST_HEAD.encode())
        await asyncio.sleep(7)
        writer.write(b"\r\n")
    data = SLOW_POST_HEAD.encode() if mode == "head" else itertools.cycle(b"[")
    for byte in data:
        writer.write(bytes([byte]))
        await asyncio.sleep(1)


async def hold_slow_connections(port: int, source: str, connections: int, seconds: float) -> list[float]:
    """Hold slow connections for the given time, reopening closed ones; return how long each lasted."""
    durations: list[float] = []
    end = time.monotonic() + seconds

    async def hold_repeatedly(mode: str) -> None:
        durations.append(await hold_slow_connection(port, source, mode))
        while time.monotonic() < end:
            durations.append(await hold_slow_connection(port, source, mode))

    modes = itertools.islice(itertools.cycle(SLOW_MODES), connections)
    await asyncio.gather(*map(hold_repeatedly, modes))
    return durations


# Floods


INVALID_REQUESTS: Sequence[RawRequest] = (
    RawRequest("POST", SHARES_PATH, b"{"),
    RawRequest("POST", SHARES_PATH, b'{"shares_hash": 1}'),
    RawRequest("GET", "/shielded-vote/v1/share-status/ab/cd"),
    RawRequest("GET", "/wp-login.php"),
    RawRequest("DELETE", SHARES_PATH),
    RawRequest("POST", SHARES_PATH, b"", {"Content-Length": str(1 << 30), "Expect": "100-continue"}),
)
"""One refused request of each kind."""


async def flood(
    port: int, source: str, connections: int, extra_headers: Sequence[dict[str, str]], count: int
) -> Counter[int]:
    """Send this many refused requests with these headers in turn; return responses by status, 0 for none."""
    statuses = Counter[int]()
    requests = itertools.islice(
        zip(itertools.cycle(INVALID_REQUESTS), itertools.cycle(extra_headers), strict=False), count
    )

    async def send_requests() -> None:
        connection = ReusedConnection(port, source)
        for request, headers in requests:
            response = await connection.send(
                RawRequest(request.method, request.path, request.body, {**request.headers, **headers})
            )
            statuses[response.status if response else 0] += 1
        connection.close()

    await asyncio.gather(*(send_requests() for _ in range(connections)))
    return statuses
