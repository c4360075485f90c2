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

from helper.ingest.payload import MAX_SHARE_BODY_BYTES, SMALL_BODY_BYTES
from helper.server.rate_limits import RateLimitMiddleware, RefusalLimiter, TokenBuckets, costs_token
from helper.store.models import EnqueueResult
from tests.unit.ingest.admission_fixtures import FakeClock, create_body
from tests.unit.server.wallet_fixtures import SHARES_PATH, STATUS_PATH, WalletApp, error_text

ONE, OTHER = b"one", b"other"
HOME, FOREIGN, PROXY = "192.0.2.1", "203.0.113.9", "10.0.0.1"


def test_token_buckets_empty_after_burst() -> None:
    buckets = TokenBuckets(burst=3, per_second=2)
    for _ in range(3):
        assert buckets.wait_seconds(ONE, 100.0) == 0
        buckets.charge(ONE, 100.0)
    assert buckets.wait_seconds(ONE, 100.0) == pytest.approx(0.5)
    assert buckets.wait_seconds(ONE, 100.25) == pytest.approx(0.25)
    assert buckets.wait_seconds(ONE, 100.5) == 0
    assert buckets.wait_seconds(OTHER, 100.0) == 0


def test_token_buckets_refill_up_to_burst() -> None:
    buckets = TokenBuckets(burst=2, per_second=1)
    buckets.charge(ONE, 0.0)
    for _ in range(2):
        assert buckets.wait_seconds(ONE, 1000.0) == 0
        buckets.charge(ONE, 1000.0)
    assert buckets.wait_seconds(ONE, 1000.0) == pytest.approx(1.0)


def test_token_buckets_concurrent_charges_become_debt() -> None:
    buckets = TokenBuckets(burst=2, per_second=1)
    for _ in range(5):
        buckets.charge(ONE, 0.0)
    assert buckets.wait_seconds(ONE, 0.0) == pytest.approx(4.0)
    assert buckets.wait_seconds(ONE, 4.0) == 0


def test_token_buckets_several_tokens_become_debt() -> None:
    buckets = TokenBuckets(burst=4, per_second=2)
    buckets.charge(ONE, 0.0, tokens=3)
    assert buckets.wait_seconds(ONE, 0.0) == 0
    buckets.charge(ONE, 0.0, tokens=5)
    assert buckets.wait_seconds(ONE, 0.0) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("size", "tokens"), [(SMALL_BODY_BYTES, 0), (SMALL_BODY_BYTES + 1, 1), (MAX_SHARE_BODY_BYTES, 63)]
)
@pytest.mark.parametrize("end", [b"}", b""])
async def test_shares_large_body_costs_a_token_for_each_16_kib(size: int, tokens: int, end: bytes) -> None:
    limits = RefusalLimiter(FakeClock(), burst=100, per_second=1)
    posted = create_body()[:-1] + b" " * (size - len(create_body()) + 1 - len(end)) + end
    async with WalletApp(limiter=limits).create_client() as client:
        response = await client.post(SHARES_PATH, content=posted)
    refused = 0 if end else 1
    assert response.status_code == (400 if refused else 200)
    limits.charge(b"\x7f\0\0\1", tokens=100)
    assert limits.wait_seconds(b"\x7f\0\0\1") == pytest.approx(1 + tokens + refused)


async def test_shares_of_two_addresses_are_two_clients_to_intake(monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[bytes | None] = []

    async def take(_body: bytes, client: bytes | None = None, *, names_attempt: bool) -> EnqueueResult:
        assert not names_attempt
        clients.append(client)
        return EnqueueResult.QUEUED

    wallets = WalletApp(limiter=RefusalLimiter(FakeClock()))
    monkeypatch.setattr(wallets.view.admission, "admit", take)
    for address in (HOME, FOREIGN):
        transport = httpx.ASGITransport(app=wallets.app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://helper") as client:
            assert (await client.post(SHARES_PATH, content=create_body())).status_code == 200
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
        wait = buckets.wait_seconds(ONE, now)
        if wait == 0:
            buckets.charge(ONE, now)
            passed.append(now)
        else:
            assert buckets.wait_seconds(ONE, now + wait) == 0, "the reported time is correct"
            assert buckets.wait_seconds(ONE, now + wait * 0.99) > 0
    for first, start in enumerate(passed):
        for last, end in enumerate(passed[first:], first):
            assert last - first + 1 <= burst + (end - start) * per_second + 1e-3


def test_token_buckets_evict_full_buckets_first() -> None:
    buckets = TokenBuckets(burst=100, per_second=1, max_clients=10)
    for _ in range(50):
        buckets.charge(b"flooder", 0.0)
    for number in range(9):
        buckets.charge(b"full %d" % number, 1.0)
    buckets.charge(b"newcomer", 10.0)
    assert len(buckets) == 2, "all other buckets are full again"
    for _ in range(100):
        buckets.charge(b"flooder", 10.0)
    assert buckets.wait_seconds(b"flooder", 10.0) > 0


def test_token_buckets_evict_longest_uncharged_client() -> None:
    buckets = TokenBuckets(burst=1, per_second=0.001, max_clients=10)
    names = [b"%d" % number for number in range(11)]
    for name in names[:10]:
        buckets.charge(name, 0.0)
    buckets.charge(names[0], 1.0)
    buckets.charge(names[10], 2.0)
    assert len(buckets) == 9
    expired = [name for name in names if buckets.wait_seconds(name, 2.0) == 0]
    assert expired == [names[1], names[2]]


def test_token_buckets_number_is_limited() -> None:
    buckets = TokenBuckets(max_clients=100)
    for number in range(10_000):
        buckets.charge(number.to_bytes(4), number * 1e-6)
        assert len(buckets) <= 100


@pytest.mark.parametrize("status", [400, 401, 404, 405, 408, 413, 422, 431])
def test_costs_client_error_is_charged(status: int) -> None:
    assert costs_token(status)


@pytest.mark.parametrize("status", [200, 204, 304, 429, 500, 503])
def test_costs_other_status_is_free(status: int) -> None:
    assert not costs_token(status)


# Middleware


class RateLimitHarness:
    """An application with a small bucket, and clients of chosen addresses."""

    def __init__(self, burst: int = 3) -> None:
        self.clock = FakeClock()
        limits = RefusalLimiter(self.clock, burst=burst, per_second=0.5, trusted_networks=[ip_network(f"{PROXY}/32")])
        self.wallets = WalletApp(limiter=limits)
        self.limits = limits

    async def request(
        self, peer: str | None, method: str = "GET", path: str = "/nothing", **request: Any
    ) -> httpx.Response:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self.wallets.app({**scope, "client": peer and (peer, 4711)}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://helper") as client:
            return await client.request(method, path, **request)


async def exhaust_tokens(flood: RateLimitHarness, peer: str, **request: Any) -> None:
    for _ in range(3):
        assert (await flood.request(peer, **request)).status_code == 404


@pytest.mark.anyio
async def test_rate_limit_empty_bucket_is_503_or_429_with_exact_wait() -> None:
    flood = RateLimitHarness()
    await exhaust_tokens(flood, FOREIGN)
    flood.limits.charge(ip_address(FOREIGN).packed, tokens=2)
    flood.clock.time += 0.9
    refused = await flood.request(FOREIGN, path=STATUS_PATH)
    attempt = await flood.request(FOREIGN, "POST", SHARES_PATH, headers={"X-Vote-Ingress-Attempt-V1": "0f" * 32})
    assert (refused.status_code, attempt.status_code) == (503, 429)
    assert "6 s" in error_text(refused)
    assert (refused.headers["retry-after"], attempt.headers["retry-after"]) == ("2", "6")
    assert refused.headers["access-control-allow-origin"] == "*", "pages can read it too"
    flood.clock.time += 6
    assert (await flood.request(FOREIGN, path=STATUS_PATH)).status_code == 200


@pytest.mark.anyio
async def test_rate_limit_admitted_request_is_served_without_token() -> None:
    limits = RefusalLimiter(FakeClock(), burst=1)
    served: list[Scope] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        served.append(scope)

    async def do_nothing(*_: Any) -> Any:
        pass

    admitted, late = [{"type": "http", "client": (FOREIGN, 1), "headers": []} for _ in range(2)]
    assert limits.admit_request(admitted)
    limits.charge(limits.identify_request(admitted) or b"")
    assert not limits.admit_request(late)
    for scope in (late, admitted):
        await RateLimitMiddleware(app, limits)(scope, do_nothing, do_nothing)
    assert served == [admitted]
    assert limits.refusals == {503: 1}


@pytest.mark.anyio
async def test_rate_limit_empty_bucket_reads_no_body() -> None:
    flood = RateLimitHarness()
    await exhaust_tokens(flood, FOREIGN)
    read = []

    async def stream() -> AsyncIterator[bytes]:
        read.append(1)
        yield create_body()

    response = await flood.request(FOREIGN, "POST", SHARES_PATH, content=stream())
    assert (response.status_code, flood.wallets.store.shares) == (503, [])
    assert read == []


@pytest.mark.rule("N29")
@pytest.mark.anyio
async def test_rate_limit_accepted_and_duplicate_shares_are_free() -> None:
    flood = RateLimitHarness()
    for _ in range(20):
        assert (await flood.request(HOME, "POST", SHARES_PATH, content=create_body())).status_code == 200
        assert (await flood.request(HOME, path=STATUS_PATH)).status_code == 200
    await exhaust_tokens(flood, HOME)


@pytest.mark.anyio
async def test_rate_limit_every_refusal_is_charged() -> None:
    flood = RateLimitHarness(burst=4)
    responses = [
        await flood.request(FOREIGN, "POST", SHARES_PATH, content=b"{"),
        await flood.request(FOREIGN, "DELETE", SHARES_PATH),
        await flood.request(FOREIGN, "POST", SHARES_PATH, content=bytes((1 << 20) + 1)),
        await flood.request(FOREIGN),
        await flood.request(FOREIGN),
    ]
    assert [response.status_code for response in responses] == [400, 405, 413, 404, 503]


@pytest.mark.anyio
async def test_rate_limit_flood_does_not_affect_other_clients() -> None:
    flood = RateLimitHarness()
    await exhaust_tokens(flood, FOREIGN)
    assert (await flood.request(FOREIGN)).status_code == 503
    assert (await flood.request(HOME)).status_code == 404


@pytest.mark.anyio
async def test_rate_limit_trusts_forwarded_address_only_of_proxies() -> None:
    flood = RateLimitHarness()
    for spoofed in range(3):
        await flood.request(FOREIGN, headers={"X-Forwarded-For": f"198.51.100.{spoofed}"})
    forged = {"X-Forwarded-For": HOME, "Forwarded": f"for={HOME}"}
    assert (await flood.request(FOREIGN, headers=forged)).status_code == 503
    assert (await flood.request(HOME, path=STATUS_PATH)).status_code == 200
    await exhaust_tokens(flood, PROXY, headers={"X-Forwarded-For": "198.51.100.7"})
    assert (await flood.request(PROXY, headers={"X-Forwarded-For": "198.51.100.7"})).status_code == 503
    assert (await flood.request(PROXY, headers={"X-Forwarded-For": "198.51.100.8"})).status_code == 404
    assert (await flood.request("198.51.100.7")).status_code == 503, "the same client without the proxy"


@pytest.mark.anyio
async def test_rate_limit_unix_socket_has_no_limits() -> None:
    flood = RateLimitHarness()
    assert {(await flood.request(None)).status_code for _ in range(10)} == {404}


@pytest.mark.anyio
async def test_rate_limit_connection_of_proxy_has_no_client() -> None:
    flood = RateLimitHarness()
    peer = flood.limits.identify_connection(FOREIGN)
    assert peer is not None
    for _ in range(3):
        flood.limits.charge(peer)
    assert (await flood.request(FOREIGN)).status_code == 503
    assert flood.limits.identify_connection(PROXY) is None
    assert flood.limits.identify_connection(None) is None


def test_limiter_not_by_address_identifies_no_client() -> None:
    limits = RefusalLimiter(FakeClock(), burst=1, by_address=False, trusted_networks=[ip_network(f"{PROXY}/32")])
    assert limits.identify_connection(FOREIGN) is None
    for peer in (FOREIGN, PROXY):
        scope = {"client": (peer, 1), "headers": [(b"x-forwarded-for", HOME.encode())]}
        assert limits.identify_request(scope) is None
        assert limits.admit_request(scope)
    assert limits.is_trusted_proxy(PROXY)
    assert not limits.is_trusted_proxy(FOREIGN)
