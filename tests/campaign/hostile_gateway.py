"""Slow clients against the gateway: unfinished requests, and responses that are not read.

Method. Two addresses hold as many connections as the gateway has slots. Half of them send the body of a vote at a byte
per second, after 1 byte or 512 KiB sent immediately. The others request a page of leaves that never ends and read 512
bytes of it every half second, or nothing. Each connection is reopened when it is closed, which uses all of the
processor. At the same time, wallets at a third address read rounds and leaves, and post votes of 20 kB. Afterwards,
one address requests 40 pages per second and reads none.

Requirements. No request of these wallets is refused, half of them get a response within 0.5 s, 99 % of them within 50
ms while only pages are requested (full form), and the gateway uses at most 150 MB: the bodies are limited to 24 MiB,
and each slow reader takes less than 0.5 MB. The kernel's send buffers hold at most 16.8 MB: twice their size for each
response in progress.

Injected fault: the slot is acquired before the body is read, and no request is aborted to free one. Reported: "gateway,
honest requests refused: 160 (= 0)"; this was the original behavior. Injected fault: slow readers are not disconnected.
Reported: the same. Injected fault: the kernel's default receive buffer for the connections to nodes. Reported:
"gateway, added memory MB: 609.276 (≤ 100)"; this was the original behavior. Injected fault: the kernel's default size
of send buffers. Reported: "gateway, kernel's send buffers MB: 174.7258 (≤ 16.7772)".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx

from helper.server.connection_limits import SEND_BUFFER_BYTES
from helper.server.gateway_routes import GatewayLimits
from tests.campaign.attack_clients import (
    API_PREFIX,
    BUSY,
    CONNECTION_ERRORS,
    FAST,
    HOST,
    MAX_MEMORY_MB,
    USUALLY_FAST,
    RawRequest,
    open_narrow_connection,
)
from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.honest_clients import run_honest_clients
from tests.campaign.process_monitor import peak_memory_mb, reset_peak_memory, unsent_mb
from tests.support.devnet import DevChain
from tests.support.harness import REAL_PROGRAM, HelperProcess, run_helper
from tests.support.servers import serve_connections
from tests.support.tasks import is_met_within

LEAVES_PATH = f"{API_PREFIX}/commitment-tree/{'ab' * 32}/leaves"
CAST_VOTE_PATH = f"{API_PREFIX}/cast-vote"
ATTACKER_ADDRESSES = ("127.0.0.5", "127.0.0.6")
READ_REQUEST = RawRequest("GET", f"{API_PREFIX}/rounds")
POST_REQUEST = RawRequest(
    "POST", CAST_VOTE_PATH, b'{"pad":"' + b"A" * 20_000 + b'"}', {"Content-Type": "application/json"}
)
GATEWAY_LIMITS = GatewayLimits()
UNREAD_SECONDS = 10.0
"""Seconds until a client that reads nothing opens another connection."""


class EndlessNode:
    """A proxy for a chain node that sends an endless response for `LEAVES_PATH`, and counts those in progress."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._target = (address.hostname or "", address.port or 0)
        self.endless_responses = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(*CONNECTION_ERRORS):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(f"GET {LEAVES_PATH} ".encode()):
                await self._stream(writer)
            else:
                # one request per connection, so that the next one is inspected too
                await self._forward(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1), reader, writer)
        writer.transport.abort()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        self.endless_responses += 1
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                writer.write(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
                await writer.drain()
        finally:
            self.endless_responses -= 1

    async def _forward(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node_reader, node_writer = await asyncio.open_connection(*self._target)
        node_writer.write(head)
        sending = asyncio.create_task(_copy(reader, node_writer))
        try:
            await _copy(node_reader, writer)
        finally:
            node_writer.transport.abort()  # first: this task may be cancelled while it waits
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while chunk := await source.read(1 << 16):
        target.write(chunk)
        await target.drain()


@contextlib.asynccontextmanager
async def _run_gateway(
    setting: CampaignRun, chain: DevChain, http: httpx.AsyncClient
) -> AsyncIterator[tuple[EndlessNode, HelperProcess]]:
    """Run a gateway without a queue in front of an endless node; yield both."""
    node = EndlessNode(chain.nodes[0]["rest"])
    disabled = {"disable": True}
    sections: dict[str, Any] = {"helper": disabled, "admin": disabled, "gateway": {"enable": True}}
    async with serve_connections(node.serve) as port:
        sections["chain"] = {"endpoints": [f"http://127.0.0.1:{port}"], "rpc": [""]}
        directory = setting.directory / "gateway"
        async with run_helper(directory, http, chain, program=REAL_PROGRAM, until="listening", **sections) as helper:
            await helper.wait_for_response(READ_REQUEST.path, 200)
            yield node, helper


async def attack_gateway(
    setting: CampaignRun, findings: Findings, chain: DevChain, round_id: bytes, http: httpx.AsyncClient
) -> None:
    """Attack a dedicated gateway in front of a chain, and record what wallets observe."""
    request_count = setting.scale(4000, 160)
    leaves = RawRequest("GET", f"{API_PREFIX}/commitment-tree/{round_id.hex()}/leaves?from_height=1&to_height=100")
    requests = (READ_REQUEST, leaves, READ_REQUEST, POST_REQUEST)
    async with _run_gateway(setting, chain, http) as (node, helper), asyncio.TaskGroup() as group:
        port = urlsplit(helper.url).port or 0
        reset_peak_memory(helper.pid)
        attack = [
            group.create_task(_repeat_slow_connections(port, source, number))
            for source in ATTACKER_ADDRESSES
            for number in range(GATEWAY_LIMITS.max_concurrent)
        ]
        expected = GATEWAY_LIMITS.max_concurrent - len(ATTACKER_ADDRESSES)
        await is_met_within(10, lambda: node.endless_responses >= expected)
        findings.require_at_least("gateway, responses that are not read", node.endless_responses, 1)
        statuses, seconds = await run_honest_clients(port, requests, request_count)
        unsent = unsent_mb(helper.pid, port)
        for task in attack:
            task.cancel()
        findings.require_at_most("gateway, peak memory MB", peak_memory_mb(helper.pid), MAX_MEMORY_MB)
        holding = group.create_task(_hold_unread_pages(port))
        _, paced_seconds = await run_honest_clients(port, requests, request_count)
        holding.cancel()
        findings.require_percentile(
            "gateway, pages not read, honest request", paced_seconds, *setting.scale(FAST, BUSY)
        )
    bound = GATEWAY_LIMITS.max_streams * 2 * SEND_BUFFER_BYTES / 1e6
    findings.require_at_most("gateway, kernel's send buffers MB", unsent, bound)
    refused = statuses[0] + statuses[429] + statuses[503]
    findings.record_figure("gateway, honest requests", statuses.total())
    findings.require_equal("gateway, honest requests refused", refused, 0)
    findings.require_equal("gateway, honest reads served", statuses[200], request_count * 3 // 4)
    findings.require_percentile("gateway, honest request", seconds, *setting.scale(USUALLY_FAST, BUSY))


async def _hold_unread_pages(port: int) -> None:
    """Request a page of leaves that never ends over a new connection, 40 times per second, and read nothing."""
    writers = []
    try:
        while True:
            _, writer = await open_narrow_connection(port, ATTACKER_ADDRESSES[0])
            writers.append(writer)
            writer.write(RawRequest("GET", LEAVES_PATH).encode_head())
            await asyncio.sleep(1 / 40)
    finally:
        for writer in writers:
            writer.transport.abort()


async def _repeat_slow_connections(port: int, source: str, number: int) -> None:
    """Open slow connections in sequence; `number` selects how it reads, or a small or large start of a body."""
    while True:
        with contextlib.suppress(*CONNECTION_ERRORS):
            if number % 2:
                await _read_slowly(port, source, reads=number % 4 == 1)
            else:
                await _send_slowly(port, source, initial_bytes=512 << 10 if number % 4 else 1)
        await asyncio.sleep(0.05)


async def _send_slowly(port: int, source: str, *, initial_bytes: int) -> None:
    reader, writer = await asyncio.open_connection(HOST, port, local_addr=(source, 0))
    try:
        writer.write(
            RawRequest("POST", CAST_VOTE_PATH, headers={"Content-Length": str(1 << 20)}).encode_head()
            + b"[" * initial_bytes
        )
        closed = asyncio.create_task(reader.read())
        while not (await asyncio.wait([closed], timeout=1))[0]:
            writer.write(b"[")
    finally:
        writer.transport.abort()  # first: this task may be cancelled while it waits
        closed.cancel()
        await asyncio.gather(closed, return_exceptions=True)


async def _read_slowly(port: int, source: str, *, reads: bool) -> None:
    reader, writer = await open_narrow_connection(port, source)
    try:
        writer.write(RawRequest("GET", LEAVES_PATH).encode_head())
        if not reads:
            await asyncio.sleep(UNREAD_SECONDS)
        while reads and await reader.read(512):
            await asyncio.sleep(0.5)
    finally:
        writer.transport.abort()
