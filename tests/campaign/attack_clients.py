"""Clients that mean ill, over plain sockets: as slow as they dare, or as fast as they can."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

SHARES = "/shielded-vote/v1/shares"
HOST = "127.0.0.1"
DEAD = (OSError, asyncio.IncompleteReadError)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the status, the headers (names in lower case), the body."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Ask:
    """A request."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def head(self) -> bytes:
        """Its head, with the body's length unless the headers lie about it."""
        headers = {"Host": "helper", "Content-Length": str(len(self.body)), **self.headers}
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode()


class Line:
    """One connection at a time to a helper, from an address of choice; opened again when it was closed."""

    def __init__(self, port: int, source: str = HOST) -> None:
        self._port = port
        self._source = source
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, ask: Ask) -> Answer | None:
        """The answer to a request, None when the connection went away without one."""
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(HOST, self._port, local_addr=(self._source, 0))
            reader, writer = self._streams
            writer.write(ask.head() + ask.body)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
            answer = Answer(int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"])))
        except DEAD:
            self.close()
            return None
        if headers.get("connection") == "close" or "Expect" in ask.headers:
            self.close()
        return answer

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


# As slow as they dare

HEAD = f"POST {SHARES} HTTP/1.1\r\nHost: helper\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n"
WAYS = ("silent", "head", "body", "both")


async def slow(port: int, source: str, way: str) -> float:
    """Keep a connection for as long as it may be kept, a byte a second; how many seconds that was.

    Args:
        port: the helper's.
        source: our address.
        way: says nothing, drips its head, drips its body, or is late with its head and then drips its body.
    """
    begun = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection(HOST, port, local_addr=(source, 0))
    except OSError:
        return time.monotonic() - begun
    dripping = asyncio.create_task(_drip(writer, way))
    try:
        with contextlib.suppress(OSError):
            while await reader.read(4096):
                pass
    finally:
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        writer.close()
    return time.monotonic() - begun


async def _drip(writer: asyncio.StreamWriter, way: str) -> None:
    if way == "silent":
        return
    if way == "body":
        writer.write(HEAD.encode() + b"\r\n")
    elif way == "both":
        writer.write(HEAD.encode())
        await asyncio.sleep(7)
        writer.write(b"\r\n")
    drops = HEAD.encode() if way == "head" else itertools.cycle(b"[")
    for byte in drops:
        writer.write(bytes([byte]))
        await asyncio.sleep(1)


async def siege(port: int, source: str, connections: int, seconds: float) -> list[float]:
    """So many slow connections at once, each opened anew when it was cut, for some time; how long each was kept."""
    kept: list[float] = []
    end = time.monotonic() + seconds

    async def one(way: str) -> None:
        kept.append(await slow(port, source, way))
        while time.monotonic() < end:
            kept.append(await slow(port, source, way))

    ways = itertools.islice(itertools.cycle(WAYS), connections)
    await asyncio.gather(*map(one, ways))
    return kept


# As fast as they can


@dataclass(slots=True)
class Flooded:
    """What a flood was told.

    Attributes:
        statuses: how often each status came; 0 for none.
        passed: refusals other than 429.
        untrue: 429s without a Retry-After that is a number of at least 1.
        wait: the last Retry-After, seconds.
        seconds: how long it went on.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    untrue: int = 0
    wait: float = 0.0
    seconds: float = 0.0

    @property
    def passed(self) -> int:
        """How many were refused for what they were, and not for coming too often."""
        return sum(count for status, count in self.statuses.items() if 400 <= status < 500 and status != 429)


RUBBISH: Sequence[Ask] = (
    Ask("POST", SHARES, b"{"),
    Ask("POST", SHARES, b'{"shares_hash": 1}'),
    Ask("GET", "/shielded-vote/v1/share-status/ab/cd"),
    Ask("GET", "/wp-login.php"),
    Ask("DELETE", SHARES),
    Ask("POST", SHARES, b"", {"Content-Length": str(1 << 30), "Expect": "100-continue"}),
)
"""Requests of each kind that is refused."""


async def flood(port: int, source: str, lines: int, disguises: Sequence[dict[str, str]], enough: int) -> Flooded:
    """Ask rubbish over some connections, under these headers in turn, until 429 came often enough; at most 60 s."""
    told = Flooded()
    end = time.monotonic() + 60
    rubbish: Iterator[tuple[Ask, dict[str, str]]] = zip(
        itertools.cycle(RUBBISH), itertools.cycle(disguises), strict=False
    )

    async def one() -> None:
        line = Line(port, source)
        while time.monotonic() < end and told.statuses[429] < enough:
            ask, disguise = next(rubbish)
            answer = await line.ask(Ask(ask.method, ask.path, ask.body, {**ask.headers, **disguise}))
            told.statuses[answer.status if answer else 0] += 1
            if answer is not None and answer.status == 429:
                wait = answer.headers.get("retry-after", "")
                told.untrue += not wait.isdecimal() or int(wait) < 1
                told.wait = float(wait) if wait.isdecimal() else 0.0
        line.close()

    begun = time.monotonic()
    await asyncio.gather(*(one() for _ in range(lines)))
    told.seconds = time.monotonic() - begun
    return told
