"""Attacks on connections: smuggling by `Upgrade`, endless pipelines, many headers, unread responses, log floods.

Injected fault: uvicorn's own handling of `Upgrade`, pipelines, headers and malformed requests. Reported: "smuggling,
attempts with more than one response: 100 (= 0)", "pipelines, peak memory MB: 373.764 (≤ 150)", "headers, responses
other than 431: 100 (= 0)", "log flood, lines per second: 258.9592 (≤ 1)"; this was the original behavior. Injected
fault: reads of 256 KiB and 16 requests parsed ahead. Reported: "many pipelines, added memory MB: 36.316 (≤ 18)"; this
was the original behavior.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from helper.observability.stats import percentile
from helper.server.connection_limits import MAX_UNSENT_BYTES
from tests.campaign.attack_clients import CONNECTION_ERRORS, HOST, SHARES_PATH, RawRequest, ReusedConnection
from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.connection_floods import ATTACKER_ADDRESS, LIVEZ_REQUEST, send_endlessly
from tests.campaign.process_monitor import peak_memory_mb, reset_peak_memory
from tests.support.harness import HelperProcess

MAX_MEMORY_MB = 150
MAX_ADDED_KB_PER_CONNECTION = 60
"""Maximum memory per pipelining connection of a client with many."""
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
        *(send_endlessly(port, most, seconds, reads_responses=reads) for reads in (True, False))
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
        await asyncio.gather(*(send_endlessly(port, 1 << 30, seconds, reads_responses=False) for _ in range(count)))

    waits = await _measure_honest_client(port, attack())
    findings.require_at_most(
        "many pipelines, added memory MB",
        peak_memory_mb(helper.pid) - before,
        count * MAX_ADDED_KB_PER_CONNECTION / 1000,
    )
    findings.require_equal("many pipelines, honest requests without a response", sum(wait >= 60 for wait in waits), 0)
    findings.record_figure("many pipelines, honest p99 ms", (percentile(waits, 0.99) or 0.0) * 1000)


async def _leave_responses_unread(setting: CampaignRun, findings: Findings, helper: HelperProcess, port: int) -> None:
    """Request a large document on many connections, and read nothing."""
    count, seconds = setting.scale((1000, 30), (300, 5))
    reset_peak_memory(helper.pid)
    before = peak_memory_mb(helper.pid)
    await asyncio.gather(
        *(send_endlessly(port, 1 << 30, seconds, reads_responses=False, request=DOCUMENT_REQUEST) for _ in range(count))
    )
    findings.require_at_most(
        "unread responses, added memory MB",
        peak_memory_mb(helper.pid) - before,
        (MAX_UNSENT_BYTES + count * MAX_ADDED_KB_PER_CONNECTION * 1000) / 1e6,
    )


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
