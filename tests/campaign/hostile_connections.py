"""Attacks on connections: smuggling by `Upgrade`, pipelines, bodies in tiny pieces, many headers, log floods.

Injected fault: uvicorn's own handling of `Upgrade`, pipelines, headers and malformed requests. Reported: "smuggling,
attempts with more than one response: 100 (= 0)", "pipelines, peak memory MB: 373.764 (≤ 150)", "headers, responses
other than 431: 100 (= 0)", "log flood, lines per second: 258.9592 (≤ 1)"; this was the original behavior. Injected
fault: reads of 256 KiB and 16 requests parsed ahead. Reported: "many pipelines, added memory MB: 36.316 (≤ 18)"; this
was the original behavior. Injected fault: each piece of a body up to a line end is parsed by itself. Reported: "line
feeds, honest p95 ms: 1015 (≤ 500)". Injected fault: every request starts when it is ready. Reported: "pipelined reads,
honest p95 ms: 1022 (≤ 500)". Both were the original behavior.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from helper.observability.stats import percentile
from helper.server.connection_limits import MAX_UNSENT_BYTES_PER_CLIENT
from tests.campaign.attack_clients import CONNECTION_ERRORS, HOST, SHARES_PATH, RawRequest, ReusedConnection
from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.process_monitor import peak_memory_mb, reset_peak_memory
from tests.support.harness import HelperProcess

ATTACKER_ADDRESS = "127.0.0.5"
MAX_MEMORY_MB = 150
MAX_ADDED_LOG_KB = 60
"""Maximum memory per pipelining connection of a client with many."""
LIVEZ_REQUEST = b"GET /livez HTTP/1.1\r\nHost: helper\r\n\r\n"
DOCUMENT_REQUEST = b"GET /openapi.json HTTP/1.1\r\nHost: helper\r\n\r\n"
SMUGGLED_REQUEST = b"GET /livez HTTP/1.1\r\nHost: helper\r\n\r\n"
UPGRADE_REQUEST = (
    f"POST {SHARES_PATH} HTTP/1.1\r\nHost: helper\r\nConnection: Upgrade\r\nUpgrade: x\r\nContent-Length: %d\r\n\r\n"
)
MANY_HEADERS_REQUEST = b"GET /livez HTTP/1.1\r\n" + b"a:\r\n" * 15_000 + b"\r\n"
MALFORMED_REQUESTS = (
    b"no HTTP\r\n\r\n",
    UPGRADE_REQUEST.encode() % 0,
    b"CONNECT helper:1 HTTP/1.1\r\n\r\n",
    LIVEZ_REQUEST * 50,
)


async def attack_connections(setting: CampaignRun, findings: Findings, helper: HelperProcess, port: int) -> None:
    """Run each attack in turn with a concurrent honest client."""
    attacks: dict[str, Callable[[CampaignRun, Findings, int], Awaitable[None]]] = {
        "smuggling": _smuggle,
        "pipelines": _pipeline,
        "headers": _send_many_headers,
        "line feeds": _send_line_feeds,
        "tiny chunks": _send_tiny_chunks,
        "discarded bodies": _send_discarded_bodies,
        "pipelined reads": _pipeline_reads,
    }
    for name, attack in attacks.items():
        reset_peak_memory(helper.pid)
        waits = await _measure_honest_client(port, attack(setting, findings, port))
        findings.require_at_most(f"{name}, peak memory MB", peak_memory_mb(helper.pid), MAX_MEMORY_MB)
        findings.record_figure(f"{name}, honest p99 ms", (percentile(waits, 0.99) or 0.0) * 1000)
        # Ten times the requirement on an idle machine, because campaigns share their machine.
        findings.require_at_most(f"{name}, honest p95 ms", (percentile(waits, 0.95) or 60.0) * 1000, 500)
    await _pipeline_on_many_connections(setting, findings, helper, port)
    await _leave_responses_unread(setting, findings, helper, port)
    await _flood_log(setting, findings, helper, port)


async def _smuggle(setting: CampaignRun, findings: Findings, port: int) -> None:
    """Send `Upgrade` requests whose bodies look like requests, in separate segments."""
    attempts = setting.scale(1000, 100)
    responses = [
        await _count_raw_responses(
            port, [UPGRADE_REQUEST.encode() % len(SMUGGLED_REQUEST), SMUGGLED_REQUEST], pause=0.005
        )
        for _ in range(attempts)
    ]
    findings.require_equal("smuggling, attempts with more than one response", sum(n > 1 for n in responses), 0)
    findings.require_equal("smuggling, attempts without a response", sum(n < 1 for n in responses), 0)


async def _pipeline(setting: CampaignRun, findings: Findings, port: int) -> None:
    """Send endless requests on one connection that reads its responses and one that does not."""
    most, seconds = setting.scale((56 << 20, 30.0), (56 << 20, 4.0))
    sent = await asyncio.gather(
        *(_send_endlessly(port, most, seconds, reads_responses=reads) for reads in (True, False))
    )
    findings.record_figure("pipelines, MB sent with responses read", sent[0] / 1e6)
    findings.record_figure("pipelines, MB sent with no response read", sent[1] / 1e6)


async def _pipeline_on_many_connections(
    setting: CampaignRun, findings: Findings, helper: HelperProcess, port: int
) -> None:
    """Fill the buffers with requests on all of a client's connections concurrently."""
    count, seconds = setting.scale((1000, 30), (300, 5))
    reset_peak_memory(helper.pid)
    before = peak_memory_mb(helper.pid)

    async def attack() -> None:
        await asyncio.gather(*(_send_endlessly(port, 1 << 30, seconds, reads_responses=False) for _ in range(count)))

    waits = await _measure_honest_client(port, attack())
    findings.require_at_most(
        "many pipelines, added memory MB", peak_memory_mb(helper.pid) - before, count * MAX_ADDED_LOG_KB / 1000
    )
    findings.require_equal("many pipelines, honest requests without a response", sum(wait >= 60 for wait in waits), 0)
    findings.record_figure("many pipelines, honest p99 ms", (percentile(waits, 0.99) or 0.0) * 1000)


async def _leave_responses_unread(setting: CampaignRun, findings: Findings, helper: HelperProcess, port: int) -> None:
    """Request a large document on many connections, and read nothing."""
    count, seconds = setting.scale((1000, 30), (300, 5))
    reset_peak_memory(helper.pid)
    before = peak_memory_mb(helper.pid)
    await asyncio.gather(
        *(
            _send_endlessly(port, 1 << 30, seconds, reads_responses=False, request=DOCUMENT_REQUEST)
            for _ in range(count)
        )
    )
    findings.require_at_most(
        "unread responses, added memory MB",
        peak_memory_mb(helper.pid) - before,
        (MAX_UNSENT_BYTES_PER_CLIENT + count * MAX_ADDED_LOG_KB * 1000) / 1e6,
    )


async def _send_line_feeds(setting: CampaignRun, findings: Findings, port: int) -> None:
    """Send bodies of line feeds, each of which could end a request head."""
    body = b"\n" * (1 << 20)
    request = f"POST {SHARES_PATH} HTTP/1.1\r\nHost: helper\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    sent = await _attack_with_bodies(port, request, setting.scale(30.0, 2.0))
    findings.record_figure("line feeds, MB sent", sent / 1e6)


async def _send_tiny_chunks(setting: CampaignRun, findings: Findings, port: int) -> None:
    """Send bodies in chunks of one byte."""
    head = f"POST {SHARES_PATH} HTTP/1.1\r\nHost: helper\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    sent = await _attack_with_bodies(port, head + b"1\r\n[\r\n" * 100_000 + b"0\r\n\r\n", setting.scale(30.0, 2.0))
    findings.record_figure("tiny chunks, MB sent", sent / 1e6)


async def _send_discarded_bodies(setting: CampaignRun, findings: Findings, port: int) -> None:
    """Send large bodies to a path that does not accept the method."""
    head = b"PUT /livez HTTP/1.1\r\nHost: helper\r\nContent-Length: 67108864\r\n\r\n"
    sent = await _attack_with_bodies(port, head + b"x" * (64 << 20), setting.scale(30.0, 2.0))
    findings.record_figure("discarded bodies, MB sent", sent / 1e6)


async def _pipeline_reads(setting: CampaignRun, findings: Findings, port: int) -> None:
    """Send endless requests on many connections that read their responses."""
    seconds = setting.scale(30.0, 3.0)
    sent = await asyncio.gather(*(_send_endlessly(port, 1 << 30, seconds, reads_responses=True) for _ in range(250)))
    findings.record_figure("pipelined reads, MB sent", sum(sent) / 1e6)


async def _attack_with_bodies(port: int, request: bytes, seconds: float) -> int:
    """Send a request repeatedly on four connections, each reopened when it is closed; return the bytes sent."""
    end = time.monotonic() + seconds

    async def send_repeatedly() -> int:
        sent = 0
        while time.monotonic() < end:
            reader, writer = await asyncio.open_connection(HOST, port, local_addr=(ATTACKER_ADDRESS, 0))
            reading = asyncio.create_task(_discard(reader))
            with contextlib.suppress(*CONNECTION_ERRORS):
                for start in range(0, len(request), 1 << 16):
                    if reading.done() or time.monotonic() > end:
                        break
                    piece = request[start : start + (1 << 16)]
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)  # `drain` alone would starve the honest client in this process
                    sent += len(piece)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            writer.transport.abort()
        return sent

    return sum(await asyncio.gather(*(send_repeatedly() for _ in range(4))))


async def _send_endlessly(
    port: int, max_bytes: int, seconds: float, *, reads_responses: bool, request: bytes = LIVEZ_REQUEST
) -> int:
    """Send requests until a byte limit, a timeout or a closed connection; return the bytes sent."""
    reader, writer = await asyncio.open_connection(HOST, port, local_addr=(ATTACKER_ADDRESS, 0))
    if not reads_responses:
        writer.transport.pause_reading()  # type: ignore[attr-defined] # typed as write-only, but can read
    reading = asyncio.create_task(_discard(reader))
    sent = 0
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(seconds):
            while sent < max_bytes:
                writer.write(request * 1000)
                await writer.drain()
                await asyncio.sleep(0)  # `drain` alone would starve the honest client in this process
                sent += len(request) * 1000
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    writer.transport.abort()
    return sent


async def _discard(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 20):
        pass


async def _send_many_headers(setting: CampaignRun, findings: Findings, port: int) -> None:
    statuses = Counter([await _first_status(port, MANY_HEADERS_REQUEST) for _ in range(setting.scale(1000, 100))])
    findings.require_equal("headers, responses other than 431", statuses.total() - statuses[431], 0)


async def _flood_log(setting: CampaignRun, findings: Findings, helper: HelperProcess, port: int) -> None:
    """Send malformed requests, and pipelines whose responses are never read."""
    before, started_at = _read_log_lines(helper.log), time.monotonic()
    for number in range(setting.scale(4000, 400)):
        await _first_status(port, MALFORMED_REQUESTS[number % len(MALFORMED_REQUESTS)])
    await asyncio.sleep(1)
    written, seconds = _read_log_lines(helper.log) - before, time.monotonic() - started_at
    findings.record_figure("log flood, seconds", seconds)
    findings.require_at_most("log flood, lines per second", written / seconds, 1)


async def _measure_honest_client(port: int, attack: Awaitable[None]) -> list[float]:
    """Return the seconds of each request of an honest client during an attack."""
    waits: list[float] = []
    connection, request = ReusedConnection(port), RawRequest("GET", "/shielded-vote/v1/status")
    attacking = asyncio.ensure_future(attack)
    while not attacking.done():
        started_at = time.monotonic()
        response = await connection.send(request)
        waits.append(time.monotonic() - started_at if response is not None and response.status == 200 else 60.0)
        await asyncio.sleep(0.005)
    await attacking
    connection.close()
    return waits


async def _count_raw_responses(port: int, segments: list[bytes], pause: float) -> int:
    """Count the responses to these segments until the server closes the connection or sends nothing."""
    response = b""
    reader, writer = await asyncio.open_connection(HOST, port, local_addr=(ATTACKER_ADDRESS, 0))
    with contextlib.suppress(*CONNECTION_ERRORS, TimeoutError):
        async with asyncio.timeout(1):
            for segment in segments:
                writer.write(segment)
                await writer.drain()
                await asyncio.sleep(pause)
            while chunk := await reader.read(1 << 16):
                response += chunk
    writer.transport.abort()
    return response.count(b"HTTP/1.1 ")


async def _first_status(port: int, request: bytes) -> int:
    """Return the status of the first response (0 for none), then abort the connection."""
    reader, writer = await asyncio.open_connection(HOST, port, local_addr=(ATTACKER_ADDRESS, 0))
    status = 0
    with contextlib.suppress(*CONNECTION_ERRORS, TimeoutError):
        async with asyncio.timeout(5):
            writer.write(request)
            status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
    writer.transport.abort()
    return status


def _read_log_lines(log: Path) -> int:
    """Count the log's lines without those at debug level, which only campaigns enable."""
    return sum(b'"level": "debug"' not in line for line in log.read_bytes().splitlines())
