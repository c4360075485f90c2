"""Limits of pending registrations: per network, node queries, published list."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Never

import pytest

from admin import admin_database, pending_registrations
from admin.admin_database import AdminStore
from admin.pending_registrations import (
    CHECK_SECONDS,
    MAX_CONCURRENT_QUERIES,
    MAX_PER_CHECK,
    PAGE_BYTES,
    PUBLISH_SECONDS,
)
from admin.registration_request import MAX_MONIKER_CHARS, RegistrationRequest, validator_address
from admin.url_policy import MAX_URL_CHARS
from helper.errors import ChainUnavailable
from tests.unit.admin.fixtures import NOW, AdminStack, open_admin_stack, sign_registration

pytestmark = pytest.mark.rule("R16")


def registration_body(number: int) -> dict[str, Any]:
    return sign_registration((number + 1).to_bytes(32, "big"), moniker=f"node {number}")


async def list_monikers(stack: AdminStack) -> set[str]:
    return {waiting["moniker"] for waiting in await stack.fetch_pending()}


async def register_many(stack: AdminStack, count: int, *, moniker: str = "node", url: str = "") -> None:
    rows = [(f"sv1{number:040d}", url, moniker, NOW + number, NOW + number + 10**6) for number in range(count)]
    assert stack.store._conn is not None
    await stack.store._conn.execute("BEGIN")
    await stack.store._conn.executemany(
        "INSERT INTO registrations (operator_address, url, moniker, signed_at, requested_at, expires_at, network)"
        " VALUES (?1, ?2, ?3, ?4, ?4, ?5, x'')",
        rows,
    )
    await stack.store._conn.execute("COMMIT")


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit pending registrations to six, at most four for a network."""
    monkeypatch.setattr(admin_database, "MAX_REGISTRATIONS", 6)
    monkeypatch.setattr(admin_database, "MAX_REGISTRATIONS_PER_NETWORK", 4)


# Limits for each network


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    ("addresses", "elsewhere"),
    [
        (["198.51.100.1", "198.51.100.2", "198.51.100.3", "198.51.100.250"], "198.51.101.1"),
        (["2001:db8:7::1", "2001:db8:7:1::1", "2001:db8:7:2::1", "2001:db8:7:ffff::1"], "2001:db8:8::1"),
        # IPv6 listeners see IPv4 clients as IPv4-mapped addresses; 2002:c633:64xx::/48 is the 6to4 prefix of one.
        (["198.51.100.1", "::ffff:198.51.100.2", "::ffff:c633:6403", "2002:c633:64fa::1"], "::ffff:198.51.101.1"),
    ],
)
async def test_register_with_network_at_its_bound_is_refused(
    stack: AdminStack, addresses: list[str], elsewhere: str
) -> None:
    for number, address in enumerate(addresses):
        assert (await stack.register_from(address, registration_body(number))).status_code == 200
    refused = await stack.register_from(addresses[0], registration_body(4))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "3600")
    assert refused.json() == {"error": "too many pending registrations from this network"}
    again = {**sign_registration((1).to_bytes(32, "big"), moniker="node 0 again", timestamp=NOW + 1)}
    assert (await stack.register_from(addresses[1], again)).status_code == 200, "the validator is already registered"
    assert (await stack.register_from(elsewhere, registration_body(5))).status_code == 200
    assert await list_monikers(stack) == {"node 0 again", "node 1", "node 2", "node 3", "node 5"}


@pytest.mark.usefixtures("small_limits")
async def test_register_when_full_evicts_newest_of_most_crowded_network(stack: AdminStack) -> None:
    assert (await stack.register_from("203.0.113.1", registration_body(0))).status_code == 200
    for number in range(1, 5):
        stack.clock.advance(1)
        assert (await stack.register_from(f"198.51.100.{number}", registration_body(number))).status_code == 200
    assert (await stack.register_from("203.0.114.1", registration_body(5))).status_code == 200
    stack.clock.advance(1)
    assert (await stack.register_from("203.0.115.1", registration_body(6))).status_code == 200
    assert await list_monikers(stack) == {"node 0", "node 1", "node 2", "node 3", "node 5", "node 6"}
    assert (await stack.register_from("203.0.116.1", registration_body(7))).status_code == 200
    assert await list_monikers(stack) == {"node 0", "node 1", "node 2", "node 5", "node 6", "node 7"}


@pytest.mark.usefixtures("small_limits")
async def test_register_when_full_refuses_most_crowded_network(stack: AdminStack) -> None:
    for number, address in enumerate(["198.51.100.1", "198.51.100.2", "198.51.100.3"]):
        await stack.register_from(address, registration_body(number))
    for number, address in enumerate(["203.0.113.1", "203.0.114.1", "203.0.115.1"], 3):
        await stack.register_from(address, registration_body(number))
    refused = await stack.register_from("198.51.100.9", registration_body(6))
    assert (refused.status_code, refused.json()) == (429, {"error": "too many pending registrations"})
    assert await list_monikers(stack) == {f"node {number}" for number in range(6)}


@pytest.mark.usefixtures("small_limits")
async def test_register_bonded_validator_when_full_is_registered(stack: AdminStack) -> None:
    for number in range(6):
        await stack.register_from(f"198.51.{number // 2}.1", registration_body(number))
    bonded = registration_body(9)
    stack.staking.validators[validator_address(bonded["operator_address"])] = "BOND_STATUS_BONDED"
    response = await stack.register_from("198.51.0.1", bonded)
    assert (response.status_code, response.json()) == (200, {"status": "registered"})
    assert await list_monikers(stack) == {f"node {number}" for number in range(6)}


@pytest.mark.usefixtures("small_limits")
async def test_register_through_trusted_proxy_counts_the_forwarded_network(tmp_path: Path) -> None:
    async with open_admin_stack(tmp_path / "admin.db", trusted=[ip_network("10.0.0.0/8")]) as stack:
        statuses = [
            (
                await stack.register_from(
                    "10.0.0.1", registration_body(number), **{"X-Forwarded-For": f"198.51.100.{number}"}
                )
            )
            for number in range(5)
        ]
        assert [response.status_code for response in statuses] == [200] * 4 + [429]
        other = await stack.register_from("10.0.0.1", registration_body(5), **{"X-Forwarded-For": "203.0.113.1"})
        assert other.status_code == 200


async def test_store_keeps_no_client_address(tmp_path: Path) -> None:
    hashes = []
    for name in ("first.db", "second.db"):
        async with open_admin_stack(tmp_path / name) as stack:
            await stack.register_from("198.51.100.77", registration_body(0))
        with sqlite3.connect(tmp_path / name) as conn:
            ((hashed,),) = conn.execute("SELECT network FROM registrations").fetchall()
        conn.close()
        hashes.append(hashed)
        written = b"".join(path.read_bytes() for path in tmp_path.glob(f"{name}*"))
        assert b"198.51.100" not in written
        assert bytes([198, 51, 100]) not in written
    assert [len(hashed) for hashed in hashes] == [8, 8]
    assert hashes[0] != hashes[1], "the hash is keyed by a secret of each file"


# The published list


async def test_get_pending_queries_neither_nodes_nor_store(stack: AdminStack, monkeypatch: pytest.MonkeyPatch) -> None:
    await register_many(stack, 500)
    await stack.registry.publish()

    async def refuse(*_: object, **__: object) -> Never:
        raise AssertionError("a GET reached the store")

    monkeypatch.setattr(AdminStore, "_rows", refuse)
    for _ in range(20):
        assert (await stack.client.get("/pending-validators")).headers["x-total-count"] == "500"
    assert stack.staking.queried_addresses == []


@pytest.mark.parametrize(
    ("moniker", "url"),
    [
        ("node", "https://a.example.org"),
        ("🗳" * MAX_MONIKER_CHARS, "🗳" * MAX_URL_CHARS),
    ],
)
async def test_get_pending_when_full_is_paged(stack: AdminStack, moniker: str, url: str) -> None:
    await register_many(stack, 10_000, moniker=moniker, url=url)
    await stack.registry.publish()
    page, monikers = "", list[str]()
    while True:
        response = await stack.client.get(f"/pending-validators{page}")
        assert len(response.content) <= PAGE_BYTES <= 64 << 10
        assert response.headers["x-total-count"] == "10000"
        monikers += [entry["operator_address"] for entry in response.json()]
        if "next" not in response.links:
            break
        page = response.links["next"]["url"]
    assert monikers == [f"sv1{number:040d}" for number in range(10_000)], "each once, oldest first"
    assert (await stack.client.get("/pending-validators?page=9999")).json() == []


@pytest.mark.parametrize("page", ["0", "-1", "x", "", "1.5", "10001", "9" * 2000, "²"])
async def test_get_pending_with_invalid_page_is_refused(stack: AdminStack, page: str) -> None:
    response = await stack.client.get("/pending-validators", params={"page": page})
    assert (response.status_code, response.json()) == (400, {"error": "page: must be a number from 1 to 10000"})


# Background work


@asynccontextmanager
async def run_registry(stack: AdminStack) -> AsyncIterator[None]:
    task = asyncio.create_task(stack.registry.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled()


async def count_pending(stack: AdminStack) -> int:
    return int((await stack.client.get("/pending-validators")).headers["x-total-count"])


async def wait_for_count(stack: AdminStack, count: int) -> None:
    async with asyncio.timeout(20):
        while await count_pending(stack) != count:
            await asyncio.sleep(0)


async def test_run_publishes_registrations_and_removes_bonded_validators(tmp_path: Path) -> None:
    async with open_admin_stack(tmp_path / "admin.db") as stack, run_registry(stack):
        first, second = registration_body(0), registration_body(1)
        await stack.register_from("198.51.100.1", first)
        await wait_for_count(stack, 1)
        stack.clock.advance(PUBLISH_SECONDS)
        await stack.register_from("198.51.100.1", second)
        await wait_for_count(stack, 2)
        stack.staking.validators[validator_address(first["operator_address"])] = "BOND_STATUS_UNBONDED"
        stack.clock.advance(CHECK_SECONDS)
        await wait_for_count(stack, 1)
        (remaining,) = (await stack.client.get("/pending-validators")).json()
        assert remaining["moniker"] == "node 1"


async def test_record_that_one_node_reports_alone_deletes_no_registration(stack: AdminStack) -> None:
    body = registration_body(0)
    stack.staking.validators[validator_address(body["operator_address"])] = "BOND_STATUS_BONDED"
    stack.staking.does_other_disagree = True
    for _ in range(2):
        assert (await stack.register_from("198.51.100.1", body)).json()["status"] == "pending"
        await stack.registry.check_staking()
    await stack.registry.publish()
    assert await count_pending(stack) == 1


async def test_check_staking_queries_a_bounded_number_and_all_in_turn(stack: AdminStack) -> None:
    bodies = [registration_body(number) for number in range(2 * MAX_PER_CHECK + 5)]
    for number, body in enumerate(bodies):
        claim = RegistrationRequest(body["operator_address"], "", "node", NOW)
        await stack.store.register(claim, network=bytes([number]), now=NOW)
    rounds = []
    for _ in range(3):
        stack.staking.queried_addresses.clear()
        await stack.registry.check_staking()
        rounds.append(set(stack.staking.queried_addresses))
    assert [len(addresses) for addresses in rounds] == [MAX_PER_CHECK, MAX_PER_CHECK, 5]
    assert rounds[0] | rounds[1] | rounds[2] == {validator_address(body["operator_address"]) for body in bodies}


async def test_query_without_response_does_not_end_the_staking_check(
    stack: AdminStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a batch without any response does."""
    for number in range(3 * MAX_CONCURRENT_QUERIES):
        request = RegistrationRequest(registration_body(number)["operator_address"], "", "node", NOW)
        await stack.store.register(request, network=bytes([number]), now=NOW)
    call, queries = stack.staking.call, 0

    async def fail_first(fn: Any) -> Any:
        nonlocal queries
        queries += 1
        if queries == 1:
            raise ChainUnavailable("no response")
        return await call(fn)

    monkeypatch.setattr(stack.staking, "call", fail_first)
    await stack.registry.check_staking()
    assert queries == 3 * MAX_CONCURRENT_QUERIES


async def test_run_with_slow_updates_pauses_in_proportion(stack: AdminStack, monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[float] = []
    publish = stack.registry.publish

    async def publish_slowly() -> None:
        await publish()
        stack.registry._changed.set()  # registrations arrive all the time
        stack.clock.advance(2)
        updates.append(stack.clock.monotonic())

    monkeypatch.setattr(stack.registry, "publish", publish_slowly)
    stack.registry._changed.set()
    async with run_registry(stack), asyncio.timeout(20):
        while len(updates) < 3:
            await asyncio.sleep(0.01)
            stack.clock.advance(0.5)
    busy, total_time = 2 * (len(updates) - 1), updates[-1] - updates[0]
    assert busy / total_time <= 0.1


async def test_publish_prepares_the_list_outside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    creator_threads = set[threading.Thread]()

    make = admin_database.Registration

    def record(*row: Any) -> admin_database.Registration:
        creator_threads.add(threading.current_thread())
        return make(*row)

    monkeypatch.setattr(admin_database, "Registration", record)
    async with open_admin_stack(tmp_path / "admin.db") as stack:
        await register_many(stack, 50)
        await stack.registry.publish()
        assert await count_pending(stack) == 50
    assert creator_threads
    assert threading.main_thread() not in creator_threads


async def test_register_parses_and_verifies_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running_checks, most, lock = 0, 0, threading.Lock()
    verify = pending_registrations._parse_and_verify

    def record(body: bytes, now: float, *, production: bool) -> RegistrationRequest:
        nonlocal running_checks, most
        with lock:
            running_checks += 1
            most = max(most, running_checks)
        time.sleep(0.01)
        try:
            return verify(body, now, production=production)
        finally:
            with lock:
                running_checks -= 1

    monkeypatch.setattr(pending_registrations, "_parse_and_verify", record)
    async with open_admin_stack(tmp_path / "admin.db") as stack:
        responses = await asyncio.gather(
            *(stack.client.post("/register-validator", json=registration_body(number)) for number in range(8))
        )
        assert [response.status_code for response in responses] == [200] * 8
    assert most == 1


async def test_register_first_imports_modules_outside_the_event_loop(tmp_path: Path) -> None:
    """Runs in a subprocess, in which no module is imported yet."""
    body = json.dumps({**registration_body(0), "timestamp": int(time.time())})
    script = f"""
import asyncio, builtins, json, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from admin.onboarding import AdminService
from admin.api_models import UiConfig
from admin.config_refresh import ConfigFetcher
from helper.clock import SystemClock
from helper.server.edge import json_application

async def main():
    service = AdminService(db_path=Path({str(tmp_path / "admin.db")!r}), fetcher=ConfigFetcher(""), ui=UiConfig(),
                           chain=None, get_chain_facts=None, clock=SystemClock())
    messages = []
    async def send(message):
        messages.append(message)
    async def receive():
        return {body.encode()!r}, False
    request = SimpleNamespace(is_body_complete=True, body=b"", receive=receive)
    scope = {{"type": "http", "method": "POST", "path": "/api/register-validator", "headers": [],
              "query_string": b"", "extensions": {{"request": request}}}}
    async with service.open_store():
        imported, on_loop = set(sys.modules), []
        import_module = builtins.__import__
        def watch(name, *args, **options):
            before = len(sys.modules)
            module = import_module(name, *args, **options)
            if len(sys.modules) > before and threading.current_thread() is threading.main_thread():
                on_loop.append(name)
            return module
        builtins.__import__ = watch
        await json_application(service.routes())(scope, None, send)
        builtins.__import__ = import_module
    assert "admin.account_keys" in set(sys.modules) - imported
    print(json.dumps([messages[0]["status"], on_loop]))

asyncio.run(main())
"""
    completed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script], capture_output=True, timeout=60)
    assert completed.returncode == 0, completed.stderr.decode()
    status, on_loop = json.loads(completed.stdout.splitlines()[-1])
    assert status == 401, "the moniker is signed with another time"
    assert on_loop == []


async def test_register_with_invalid_signature_queries_and_stores_nothing(stack: AdminStack) -> None:
    before = stack.registry.published
    for number in range(30):
        response = await stack.register_from(f"198.51.{number}.1", {**registration_body(number), "moniker": "another"})
        assert response.status_code == 401
    assert not stack.registry._changed.is_set()
    assert (stack.staking.queried_addresses, await stack.store.list_pending(now=NOW)) == ([], [])
    await stack.registry.publish()
    assert stack.registry.published == before


async def test_run_with_node_that_hangs_stops_immediately(stack: AdminStack, monkeypatch: pytest.MonkeyPatch) -> None:
    is_requested = asyncio.Event()

    async def hang(*_: object) -> Never:
        is_requested.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    for number in range(MAX_PER_CHECK):
        await stack.store.register(
            RegistrationRequest(registration_body(number)["operator_address"], "", "n", NOW), network=b"", now=NOW
        )
    monkeypatch.setattr(stack.staking, "call", hang)
    async with run_registry(stack):
        async with asyncio.timeout(10):
            await is_requested.wait()
    await stack.registry.publish()
    assert await count_pending(stack) == MAX_PER_CHECK, "no registration is dropped"
