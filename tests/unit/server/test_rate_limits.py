"""Rate limits: token buckets with a fake clock, and the middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator
from ipaddress import ip_address, ip_network
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from helper.ingest.payload import MAX_BODY, SMALL_BODY
from helper.server.rate_limits import RateLimitMiddleware, RefusalLimiter, TokenBuckets, costs
from helper.store.rows import Enqueued
from tests.unit.ingest.admission_fixtures import FakeClock, body
from tests.unit.server.wallet_fixtures import SHARES, STATUS, Wallets, is_error

ONE, OTHER = b"one", b"other"
HOME, FOREIGN, PROXY = "192.0.2.1", "203.0.113.9", "10.0.0.1"


def test_token_buckets_empty_after_burst() -> None:
    buckets = TokenBuckets(burst=3, per_second=2)
    for _ in range(3):
        assert buckets.wait(ONE, 100.0) == 0
        buckets.pay(ONE, 100.0)
    assert buckets.wait(ONE, 100.0) == pytest.approx(0.5)
    assert buckets.wait(ONE, 100.25) == pytest.approx(0.25)
    assert buckets.wait(ONE, 100.5) == 0
    assert buckets.wait(OTHER, 100.0) == 0


def test_token_buckets_refill_up_to_burst() -> None:
    buckets = TokenBuckets(burst=2, per_second=1)
    buckets.pay(ONE, 0.0)
    for _ in range(2):
        assert buckets.wait(ONE, 1000.0) == 0
        buckets.pay(ONE, 1000.0)
    assert buckets.wait(ONE, 1000.0) == pytest.approx(1.0)


def test_token_buckets_concurrent_charges_are_owed() -> None:
    buckets = TokenBuckets(burst=2, per_second=1)
    for _ in range(5):
        buckets.pay(ONE, 0.0)
    assert buckets.wait(ONE, 0.0) == pytest.approx(4.0)
    assert buckets.wait(ONE, 4.0) == 0


def test_token_buckets_several_tokens_are_owed() -> None:
    buckets = TokenBuckets(burst=4, per_second=2)
    buckets.pay(ONE, 0.0, tokens=3)
    assert buckets.wait(ONE, 0.0) == 0
    buckets.pay(ONE, 0.0, tokens=5)
    assert buckets.wait(ONE, 0.0) == pytest.approx(2.5)


@pytest.mark.parametrize(("size", "tokens"), [(SMALL_BODY, 0), (SMALL_BODY + 1, 1), (MAX_BODY, 63)])
@pytest.mark.parametrize("end", [b"}", b""])
async def test_shares_large_body_costs_a_token_for_each_16_kib(size: int, tokens: int, end: bytes) -> None:
    limits = RefusalLimiter(FakeClock(), burst=100, per_second=1)
    posted = body()[:-1] + b" " * (size - len(body()) + 1 - len(end)) + end
    async with Wallets(limits=limits).client() as client:
        answer = await client.post(SHARES, content=posted)
    refused = 0 if end else 1
    assert answer.status_code == (400 if refused else 200)
    limits.pay(b"\x7f\0\0\1", tokens=100)
    assert limits.wait(b"\x7f\0\0\1") == pytest.approx(1 + tokens + refused)


async def test_shares_of_two_addresses_are_two_clients_to_intake(monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[bytes | None] = []

    async def take(_body: bytes, client: bytes | None = None) -> Enqueued:
        clients.append(client)
        return Enqueued.QUEUED

    wallets = Wallets(limits=RefusalLimiter(FakeClock()))
    monkeypatch.setattr(wallets.view.intake, "take", take)
    for address in (HOME, FOREIGN):
        transport = httpx.ASGITransport(app=wallets.app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://helper") as client:
            assert (await client.post(SHARES, content=body())).status_code == 200
    assert clients == [ip_address(HOME).packed, ip_address(FOREIGN).packed]


@given(
    st.integers(1, 50),
    st.floats(0.1, 1000),
    st.lists(st.floats(0, 30), max_size=200),
)
def test_token_buckets_never_exceed_burst_and_refill(burst: int, per_second: float, pauses: list[float]) -> None:
    buckets = TokenBuckets(burst, per_second)
    now, passed = 0.0, []
    for pause in pauses:
        now += pause
        wait = buckets.wait(ONE, now)
        if wait == 0:
            buckets.pay(ONE, now)
            passed.append(now)
        else:
            assert buckets.wait(ONE, now + wait) == 0, "the time that it tells is true"
            assert buckets.wait(ONE, now + wait * 0.99) > 0
    for first, begin in enumerate(passed):
        for last, end in enumerate(passed[first:], first):
            assert last - first + 1 <= burst + (end - begin) * per_second + 1e-3


def test_token_buckets_evict_full_buckets_first() -> None:
    buckets = TokenBuckets(burst=100, per_second=1, clients=10)
    for _ in range(50):
        buckets.pay(b"flooder", 0.0)
    for number in range(9):
        buckets.pay(b"full %d" % number, 1.0)
    buckets.pay(b"newcomer", 10.0)
    assert len(buckets) == 2, "all the others' are full again"
    for _ in range(100):
        buckets.pay(b"flooder", 10.0)
    assert buckets.wait(b"flooder", 10.0) > 0


def test_token_buckets_evict_longest_uncharged_client() -> None:
    buckets = TokenBuckets(burst=1, per_second=0.001, clients=10)
    names = [b"%d" % number for number in range(11)]
    for name in names[:10]:
        buckets.pay(name, 0.0)
    buckets.pay(names[0], 1.0)
    buckets.pay(names[10], 2.0)
    assert len(buckets) == 9
    forgotten = [name for name in names if buckets.wait(name, 2.0) == 0]
    assert forgotten == [names[1], names[2]]


def test_token_buckets_number_is_limited() -> None:
    buckets = TokenBuckets(clients=100)
    for number in range(10_000):
        buckets.pay(number.to_bytes(4), number * 1e-6)
        assert len(buckets) <= 100


@pytest.mark.parametrize("status", [400, 401, 404, 405, 408, 413, 422, 431])
def test_costs_client_error_is_charged(status: int) -> None:
    assert costs(status)


@pytest.mark.parametrize("status", [200, 204, 304, 429, 500, 503])
def test_costs_other_status_is_free(status: int) -> None:
    assert not costs(status)


# Around the application


class Flood:
    """An application with a small bucket, and clients of chosen addresses."""

    def __init__(self, burst: int = 3) -> None:
        self.clock = FakeClock()
        limits = RefusalLimiter(self.clock, burst=burst, per_second=0.5, trusted=[ip_network(f"{PROXY}/32")])
        self.wallets = Wallets(limits=limits)
        self.limits = limits

    async def ask(
        self, peer: str | None, method: str = "GET", path: str = "/nothing", **request: Any
    ) -> httpx.Response:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self.wallets.app({**scope, "client": peer and (peer, 4711)}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://helper") as client:
            return await client.request(method, path, **request)


async def empty(flood: Flood, peer: str, **request: Any) -> None:
    for _ in range(3):
        assert (await flood.ask(peer, **request)).status_code == 404


@pytest.mark.anyio
async def test_rate_limit_empty_bucket_is_429_with_exact_wait() -> None:
    flood = Flood()
    await empty(flood, FOREIGN)
    flood.clock.time += 0.9
    refused = await flood.ask(FOREIGN, path=STATUS)
    assert refused.status_code == 429
    assert "2 s" in is_error(refused)
    assert refused.headers["retry-after"] == "2"
    assert refused.headers["access-control-allow-origin"] == "*", "a page may read it too"
    flood.clock.time += 2
    assert (await flood.ask(FOREIGN, path=STATUS)).status_code == 200


@pytest.mark.anyio
async def test_rate_limit_admitted_request_is_served_without_token() -> None:
    limits = RefusalLimiter(FakeClock(), burst=1)
    served: list[Scope] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        served.append(scope)

    async def nothing(*_: Any) -> Any:
        pass

    admitted, late = [{"type": "http", "client": (FOREIGN, 1), "headers": []} for _ in range(2)]
    assert limits.admits(admitted)
    limits.pay(limits.client(admitted) or b"")
    assert not limits.admits(late)
    for scope in (late, admitted):
        await RateLimitMiddleware(app, limits)(scope, nothing, nothing)
    assert served == [admitted]
    assert limits.refusals == {429: 1}


@pytest.mark.anyio
async def test_rate_limit_empty_bucket_reads_no_body() -> None:
    flood = Flood()
    await empty(flood, FOREIGN)
    read = []

    async def stream() -> AsyncIterator[bytes]:
        read.append(1)
        yield body()

    answer = await flood.ask(FOREIGN, "POST", SHARES, content=stream())
    assert (answer.status_code, flood.wallets.store.kept) == (429, [])
    assert read == []


@pytest.mark.anyio
async def test_rate_limit_accepted_and_duplicate_shares_are_free() -> None:
    flood = Flood()
    for _ in range(20):
        assert (await flood.ask(HOME, "POST", SHARES, content=body())).status_code == 200
        assert (await flood.ask(HOME, path=STATUS)).status_code == 200
    await empty(flood, HOME)


@pytest.mark.anyio
async def test_rate_limit_every_refusal_is_charged() -> None:
    flood = Flood(burst=4)
    answers = [
        await flood.ask(FOREIGN, "POST", SHARES, content=b"{"),
        await flood.ask(FOREIGN, "DELETE", SHARES),
        await flood.ask(FOREIGN, "POST", SHARES, content=bytes((1 << 20) + 1)),
        await flood.ask(FOREIGN),
        await flood.ask(FOREIGN),
    ]
    assert [answer.status_code for answer in answers] == [400, 405, 413, 404, 429]


@pytest.mark.anyio
async def test_rate_limit_flood_does_not_affect_other_clients() -> None:
    flood = Flood()
    await empty(flood, FOREIGN)
    assert (await flood.ask(FOREIGN)).status_code == 429
    assert (await flood.ask(HOME)).status_code == 404


@pytest.mark.anyio
async def test_rate_limit_trusts_forwarded_address_only_of_proxies() -> None:
    flood = Flood()
    for spoofed in range(3):
        await flood.ask(FOREIGN, headers={"X-Forwarded-For": f"198.51.100.{spoofed}"})
    spoof = {"X-Forwarded-For": HOME, "Forwarded": f"for={HOME}"}
    assert (await flood.ask(FOREIGN, headers=spoof)).status_code == 429
    assert (await flood.ask(HOME, path=STATUS)).status_code == 200
    await empty(flood, PROXY, headers={"X-Forwarded-For": "198.51.100.7"})
    assert (await flood.ask(PROXY, headers={"X-Forwarded-For": "198.51.100.7"})).status_code == 429
    assert (await flood.ask(PROXY, headers={"X-Forwarded-For": "198.51.100.8"})).status_code == 404
    assert (await flood.ask("198.51.100.7")).status_code == 429, "it is the same client without the proxy"


@pytest.mark.anyio
async def test_rate_limit_unix_socket_has_no_limits() -> None:
    flood = Flood()
    assert {(await flood.ask(None)).status_code for _ in range(10)} == {404}


@pytest.mark.anyio
async def test_rate_limit_connection_of_proxy_has_no_client() -> None:
    flood = Flood()
    peer = flood.limits.who(FOREIGN)
    assert peer is not None
    for _ in range(3):
        flood.limits.pay(peer)
    assert (await flood.ask(FOREIGN)).status_code == 429
    assert flood.limits.who(PROXY) is None
    assert flood.limits.who(None) is None
