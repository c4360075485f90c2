"""Floods of validator registrations, a part of the `hostile` campaign.

Method. Registrations whose URL has a host of 500 ligatures come from changing networks, while honest wallets post to
the same helper: converting such a host to punycode takes more than 0.1 s, in which no other Python code runs. Then an
attacker with 100 networks occupies all places before the helper starts, and keeps registering through a trusted proxy,
from old and new networks. At the same time, validators from other networks register, and the list is read page by page.
At the end clients request the list and disconnect, and the helper is stopped.

Requirements. No honest registration is refused or lost, and no network occupies more than 200 places. Pages are at most
64 kB and load quickly, and the helper stops within 10 s. Honest POSTs take at most 50 ms (p99) while long URLs arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from cosmpy.crypto.address import Address

from admin.registration_request import ACCOUNT_PREFIX
from helper.observability.stats import percentile
from tests.campaign.attack_clients import RawRequest, ReusedConnection, flood
from tests.campaign.campaign import CampaignRun, Findings
from tests.support.devnet import DevChain
from tests.support.harness import REAL_PROGRAM, HelperProcess, run_helper
from tests.unit.admin.fixtures import sign_registration

MAX_REGISTRATIONS = 10_000
NETWORK_COUNT = 100
PROXY_ADDRESS = "127.0.0.3"
REGISTER_PATH, PENDING_PATH = "/api/register-validator", "/api/pending-validators"
CONNECTIONS = 4
SLOW_URL = "https://" + "\ufdfa" * 500
SLOW_URLS_PER_SECOND = 50


async def register_slow_urls(setting: CampaignRun, findings: Findings, port: int, client: str) -> None:
    """Register URLs that are slow to convert.

    Args:
        setting: the run.
        findings: results.
        port: of the helper.
        client: address of a trusted proxy of this helper.
    """
    body = json.dumps({**json.loads(_signed_registration(bytes(31) + b"\1", "attacker")), "url": SLOW_URL}).encode()
    requests = _hostile_requests(itertools.repeat(body, setting.scale(1_500, 150)), setting.seeded_random("slow urls"))
    statuses = await flood(port, client, CONNECTIONS, requests, pause_seconds=CONNECTIONS / SLOW_URLS_PER_SECOND)
    findings.record_figure("slow URLs registered", statuses.total())
    findings.require_equal("slow URLs that were not refused", statuses.total() - statuses[400] - statuses[429], 0)


async def attack_registration(
    setting: CampaignRun, findings: Findings, chain: DevChain, http: httpx.AsyncClient
) -> None:
    """Fill all places, keep registering, and check honest validators' results."""
    directory = setting.directory / "registration"
    section = {"trusted_proxies": [PROXY_ADDRESS], "disable": True}
    async with run_helper(directory, http, chain, program=REAL_PROGRAM, until="listening", helper=section) as helper:
        assert await helper.stop() == 0
        path = directory / "svote-admin.db"
        _fill_registrations(path, setting.seeded_random("places"))
        await helper.start()
        honest = await _run_flood(setting, findings, helper)
        await _check_list(findings, helper, http, honest)
        await _stop_with_abandoned_requests(findings, helper)
        _check_file(findings, path)


def _fill_registrations(path: Path, rng: random.Random) -> None:
    """Fill the file with accepted registrations from `NETWORK_COUNT` networks."""
    now = int(time.time())
    rows = []
    for number in range(MAX_REGISTRATIONS):
        address, network = (
            str(Address(rng.randbytes(20), ACCOUNT_PREFIX)),
            (number % NETWORK_COUNT).to_bytes(8, "big"),
        )
        rows.append((address, f"https://attacker-{rng.random()}.example.org", now, now + 86_400, network))
    with contextlib.closing(sqlite3.connect(path)) as conn, conn:
        conn.executemany(
            "INSERT INTO registrations"
            " (operator_address, url, moniker, signed_at, requested_at, expires_at, network)"
            " VALUES (?1, ?2, 'attacker', ?3, ?3, ?4, ?5)",
            rows,
        )


def _signed_registration(key: bytes, moniker: str) -> bytes:
    return json.dumps(sign_registration(key, moniker=moniker, timestamp=int(time.time()))).encode()


def _hostile_requests(bodies: Iterable[bytes], rng: random.Random) -> Iterator[RawRequest]:
    """Yield registrations from addresses of one /16 and one /40: few networks, many addresses."""
    for number, body in enumerate(bodies):
        old = f"198.18.{rng.randrange(8)}.{rng.randrange(256)}"
        new = f"2001:db8:{rng.randrange(4):x}:{rng.randrange(1 << 16):x}::1"
        yield RawRequest("POST", REGISTER_PATH, body, {"X-Forwarded-For": new if number % 2 else old})


async def _run_flood(setting: CampaignRun, findings: Findings, helper: HelperProcess) -> set[str]:
    """Run hostile and honest registrations concurrently; return the honest monikers."""
    port = urlsplit(helper.url).port
    assert port is not None
    rng = setting.seeded_random("registrations")
    keys = range(MAX_REGISTRATIONS + 2, MAX_REGISTRATIONS + 2 + setting.scale(5_000, 400))
    bodies = (_signed_registration(key.to_bytes(32, "big"), "attacker") for key in keys)
    finished = asyncio.Event()

    async def read_pending() -> list[float]:
        waits = list[float]()
        connection = ReusedConnection(port, "127.0.0.5")
        while not finished.is_set():
            started_at = time.monotonic()
            response = await connection.send(RawRequest("GET", f"{PENDING_PATH}?page={1 + len(waits) % 20}"))
            waits.append(time.monotonic() - started_at if response is not None and response.status == 200 else 60.0)
            await asyncio.sleep(0.005)
        connection.close()
        return waits

    async def register_honest() -> set[str]:
        connection, monikers, refused = ReusedConnection(port, PROXY_ADDRESS), set[str](), 0
        for number in range(setting.scale(100, 30)):
            body = _signed_registration(rng.randbytes(32), f"honest {number}")
            client = {"X-Forwarded-For": f"203.{number}.113.9"}
            response = await connection.send(RawRequest("POST", REGISTER_PATH, body, client))
            monikers.add(f"honest {number}")
            refused += response is None or response.status != 200
            await asyncio.sleep(setting.scale(0.1, 0.02))
        connection.close()
        findings.record_figure("honest registrations", len(monikers))
        findings.require_equal("honest registrations refused", refused, 0)
        return monikers

    reading = asyncio.create_task(read_pending())
    hostile = flood(port, PROXY_ADDRESS, CONNECTIONS, _hostile_requests(bodies, rng))
    honest, statuses = await asyncio.gather(register_honest(), hostile)
    finished.set()
    waits = await reading
    findings.record_figure("hostile registrations", statuses.total())
    findings.record_figure("hostile registrations refused", statuses[429])
    findings.require_equal("hostile registrations, 5xx", sum(statuses[status] for status in range(500, 600)), 0)
    findings.record_figure("pending list, reads", len(waits))
    findings.record_figure("pending list, read p50 s", percentile(waits, 0.5) or 0.0)
    findings.require_at_most("pending list, read p99 s", percentile(waits, 0.99) or 60.0, 0.5)
    return honest


async def _check_list(findings: Findings, helper: HelperProcess, http: httpx.AsyncClient, honest: set[str]) -> None:
    """Read all pages once the list has every honest validator or no longer changes."""
    async with asyncio.timeout(60):
        sizes, monikers = await _read_pages(helper, http)
        deadline = time.monotonic() + 10
        while not honest <= monikers and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            sizes, monikers = await _read_pages(helper, http)
    findings.record_figure("pending list, pages", len(sizes))
    findings.require_at_most("pending list, page bytes", max(sizes), 64_000)
    findings.require_equal("honest registrations lost", len(honest - monikers), 0)


async def _read_pages(helper: HelperProcess, http: httpx.AsyncClient) -> tuple[list[int], set[str]]:
    sizes, monikers, url = list[int](), set[str](), httpx.URL(f"{helper.url}{PENDING_PATH}")
    while True:
        response = await http.get(url)
        sizes.append(len(response.content))
        monikers |= {entry["moniker"] for entry in response.json()}
        if "next" not in response.links:
            return sizes, monikers
        url = url.join(response.links["next"]["url"])


async def _stop_with_abandoned_requests(findings: Findings, helper: HelperProcess) -> None:
    """Request the list over many connections, disconnect, and stop the helper."""
    port = urlsplit(helper.url).port
    for number in range(200):
        _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(f"127.0.1.{number % 20 + 1}", 0))
        writer.write(RawRequest("GET", PENDING_PATH).encode_head())
        writer.close()
    started_at = time.monotonic()
    findings.require_equal("stop amid abandoned requests, exit status", await helper.stop(), 0)
    findings.require_at_most("stop amid abandoned requests s", time.monotonic() - started_at, 10)


def _check_file(findings: Findings, path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as conn:
        ((total,),) = conn.execute("SELECT count(*) FROM registrations")
        ((most,),) = conn.execute("SELECT max(held) FROM (SELECT count(*) AS held FROM registrations GROUP BY network)")
    findings.require_at_most("registrations", total, MAX_REGISTRATIONS)
    findings.require_at_most("registrations of one network", most, 200)
    written = b"".join(file.read_bytes() for file in path.parent.iterdir() if file.is_file())
    findings.require_equal(
        "addresses of registrants in log and files",
        sum(written.count(prefix) for prefix in (b"198.18.", b"2001:db8:")),
        0,
    )
