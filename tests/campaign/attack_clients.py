"""Malicious HTTP clients over plain sockets: slow clients and floods."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from helper.core.refusals import ATTEMPT_HEADER, RETRY_AFTER_SECONDS

API_PREFIX = "/shielded-vote/v1"
SHARES_PATH = f"{API_PREFIX}/shares"
HOST = "127.0.0.1"
MAX_MEMORY_MB = 150
"""Memory of the helper under an attack."""
FAST, USUALLY_FAST, BUSY = (0.99, 0.05), (0.5, 0.5), (0.5, 2.0)
"""Bounds of honest requests during an attack: a percentile, and seconds. Busy machines run the short form."""
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
        writer.close()  # first: this task may be cancelled while it waits
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
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


# Clients that do not read


async def open_narrow_connection(port: int, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection with a small receive buffer, so that the server has to wait until the client reads."""
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.bind((source, 0))
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (HOST, port))
    except OSError:
        sock.close()
        raise
    return await asyncio.open_connection(sock=sock, limit=512)


# Floods


UNTERMINATED_REQUEST = RawRequest("POST", SHARES_PATH, b'{"shares_hash": "' + rb"\"" * 8_000)
"""A body whose error was slow to locate: each quotation mark could end the string."""
INVALID_REQUESTS: Sequence[RawRequest] = (
    RawRequest("POST", SHARES_PATH, b"{"),
    RawRequest("POST", SHARES_PATH, b'{"shares_hash": 1}'),
    UNTERMINATED_REQUEST,
    RawRequest("GET", f"{API_PREFIX}/share-status/ab/cd"),
    RawRequest("GET", "/wp-login.php"),
    RawRequest("GET", "/livez", headers={str(number): "" for number in range(2_000)}),
    RawRequest("DELETE", SHARES_PATH),
    RawRequest("POST", "/livez", b"{}", {"Expect": "x, 100-continue"}),
    RawRequest("POST", SHARES_PATH, b"", {"Content-Length": str(1 << 30), "Expect": "100-continue"}),
)
"""One refused request of each kind."""


async def flood(
    port: int, source: str, connections: int, requests: Iterable[RawRequest], pause_seconds: float = 0.0
) -> Counter[int]:
    """Send requests over reused connections; return the number of responses by status.

    Counts 0 for no response, and for a response to a wallet that contradicts `helper.core.refusals`: 429 for a request
    that names no attempt, or a refusal that may pass without the usual Retry-After.
    """
    statuses, waiting = Counter[int](), iter(requests)

    async def send_requests() -> None:
        connection = ReusedConnection(port, source)
        for request in waiting:
            response = await connection.send(request)
            statuses[0 if response is None or _is_wrong_refusal(request, response) else response.status] += 1
            await asyncio.sleep(pause_seconds)
        connection.close()

    await asyncio.gather(*(send_requests() for _ in range(connections)))
    return statuses


def _is_wrong_refusal(request: RawRequest, response: RawResponse) -> bool:
    if response.status not in (429, 503) or not request.path.startswith(API_PREFIX):
        return False
    lacks_attempt = response.status == 429 and ATTEMPT_HEADER not in request.headers
    return lacks_attempt or response.headers.get("retry-after") != str(RETRY_AFTER_SECONDS)
