"""Requests to the wallet API on a socket, and its observable behavior."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from structlog.testing import capture_logs

from helper.server.body_reader import BodyReader
from helper.server.listening import Server, bind_tcp
from helper.server.wallet_routes import create_wallet_edge
from tests.unit.server.wallet_fixtures import SHARES_PATH, STATUS_PATH, WalletApp

PATIENCE_SECONDS = 20.0
MAX_BODY_BYTES = 64 << 10
"""Maximum body size in these tests."""
PROBE_REQUEST = f"GET {STATUS_PATH} HTTP/1.1\r\nHost: probe\r\n\r\n".encode()
"""Sent last in each scenario: shows whether the connection is still open and synchronized."""
_VARIABLE_HEADERS = re.compile(rb"(?<=\r\ndate: )[^\r]+|(?<=\r\nx-request-id: )[0-9a-f]{16}(?=\r\n)")
_REQUEST_IDS = re.compile(rb"\r\nx-request-id: ([0-9a-f]{16})\r\n")


def build_post(
    content: bytes = b"", *headers: str, line: str = f"POST {SHARES_PATH} HTTP/1.1", size: int | None = None
) -> bytes:
    length = len(content) if size is None else size
    return (
        "\r\n".join((line, "Host: helper", f"Content-Length: {length}", *headers, "", "")).encode("latin-1") + content
    )


def build_head(*headers: str, line: str = f"POST {SHARES_PATH} HTTP/1.1") -> bytes:
    """The head of a request without Content-Length."""
    return "\r\n".join((line, "Host: helper", *headers, "", "")).encode("latin-1")


def encode_chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


@dataclass(frozen=True)
class Scenario:
    """A sequence of requests over one connection, and the application's configuration.

    Attributes:
        segments: the segments, each sent before the next one is created.
        prepare: changes the application before the first request.
    """

    name: str
    segments: Sequence[bytes]
    statuses: Sequence[int]
    prepare: Callable[[WalletApp], None] = lambda _: None
    disconnects: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScenarioResult:
    """The observable result of a scenario.

    Attributes:
        responses: received responses, without the date and the request ids.
        logs: the log lines, without the request ids.
    """

    responses: list[bytes]
    is_open: bool
    counts: Counter[str]
    refusals: Counter[int]
    logs: list[dict[str, object]]
    store_calls: list[str]
    stored_count: int

    @property
    def statuses(self) -> list[int]:
        return [int(response.split()[1]) for response in self.responses]


async def run_scenario(scenario: Scenario) -> ScenarioResult:
    wallets, counts = WalletApp(), Counter[str]()
    scenario.prepare(wallets)
    settings = {"token": "", "budget": 64 << 20, "body_seconds": PATIENCE_SECONDS, **scenario.settings}
    refusals = Counter[int]()
    bodies = BodyReader(max_bytes=MAX_BODY_BYTES, timeout_seconds=settings["body_seconds"], budget=settings["budget"])
    api = replace(
        wallets.api,
        count_outcome=lambda outcome: counts.update([outcome]),
        api_token=settings["token"],
        body_reader=bodies,
    )
    edge = create_wallet_edge(api, refusals=refusals)
    with capture_logs() as logs:
        async with asyncio.timeout(PATIENCE_SECONDS), count_served(Server(edge)) as port:
            raw, is_open = await send_segments(scenario, port)
    names = [name.decode() for response in raw for name in _REQUEST_IDS.findall(response)]
    assert len(set(names)) == len(names)
    lines = [dict(line) for line in logs]
    for line in lines:
        assert line.pop("request_id", names[0] if names else None) in names or scenario.disconnects
    return ScenarioResult(
        responses=[_VARIABLE_HEADERS.sub(b"...", response) for response in raw],
        is_open=is_open,
        counts=counts,
        refusals=refusals,
        logs=lines,
        store_calls=wallets.store.calls,
        stored_count=len(wallets.store.shares),
    )


@contextlib.asynccontextmanager
async def count_served(server: Server) -> AsyncIterator[int]:
    """Serve connections on a port until all have ended."""
    listener = bind_tcp("127.0.0.1", 0)
    async with await asyncio.get_running_loop().create_server(server.create_connection, sock=listener):
        yield listener.getsockname()[1]
        while server.connections or server.tasks:
            await asyncio.sleep(0.002)


async def send_segments(scenario: Scenario, port: int) -> tuple[list[bytes], bool]:
    """Send the segments and the probe; return the responses, and whether the connection is still open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for piece in scenario.segments:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
    responses: list[bytes] = []
    if not scenario.disconnects:
        with_body = not scenario.segments[0].startswith(b"HEAD")
        async for response in read_responses(reader, len(scenario.statuses), with_body):
            responses.append(response)
    is_open = False
    if responses:
        with contextlib.suppress(ConnectionError):
            writer.write(PROBE_REQUEST)
            async for response in read_responses(reader, 1, with_body=True):
                is_open = response.startswith(b"HTTP/1.1 ")
    writer.close()
    return responses, is_open


async def read_responses(reader: asyncio.StreamReader, number: int, with_body: bool) -> AsyncIterator[bytes]:
    """Read up to this many responses, fewer if the connection ends before."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        for _ in range(number):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head)
            body = await reader.readexactly(int(length[1])) if length is not None and with_body else b""
            yield head + body
