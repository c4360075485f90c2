"""Client identification, by peer address or by the headers of trusted proxies only, and token buckets."""

from __future__ import annotations

import gc
from ipaddress import IPv4Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.server.client_limits import MAX_ELEMENT_CHARS, MAX_HOPS, TokenBuckets, identify_client, is_trusted_proxy

PROXIES = tuple(map(ip_network, ("10.0.0.0/8", "fd00::/8")))
PROXY = "10.0.0.1"
CLIENT = "203.0.113.9"


def ipv4_bytes(text: str) -> bytes:
    return ip_address(text).packed


def ipv6_bytes(text: str) -> bytes:
    return ip_address(text).packed[:8]


def forwarded(*lines: str) -> list[tuple[bytes, bytes]]:
    return [(b"x-forwarded-for", line.encode()) for line in lines]


def standard(*lines: str) -> list[tuple[bytes, bytes]]:
    return [(b"forwarded", line.encode()) for line in lines]


@pytest.mark.parametrize("headers", [[], forwarded("198.51.100.1"), standard("for=198.51.100.1")])
def test_client_of_untrusted_peer_ignores_headers(headers: list[tuple[bytes, bytes]]) -> None:
    assert identify_client(CLIENT, headers, PROXIES) == ipv4_bytes(CLIENT)
    assert identify_client(PROXY, headers, ()) == ipv4_bytes(PROXY)


def test_client_of_ipv6_address_is_its_64_prefix() -> None:
    first, other, foreign = "2001:db8:1:2::1", "2001:db8:1:2:ffff::9", "2001:db8:1:3::1"
    assert identify_client(first, [], PROXIES) == identify_client(other, [], PROXIES) == ipv6_bytes(first)
    assert identify_client(foreign, [], PROXIES) != ipv6_bytes(first)
    assert identify_client("fe80::1%eth0", [], PROXIES) == ipv6_bytes("fe80::1")


def test_client_of_mapped_ipv6_address_is_ipv4_address() -> None:
    assert identify_client(f"::ffff:{CLIENT}", [], PROXIES) == ipv4_bytes(CLIENT)
    assert identify_client(f"::ffff:{PROXY}", forwarded(CLIENT), PROXIES) == ipv4_bytes(CLIENT)


@pytest.mark.parametrize("peer", [None, "", "testclient"])
def test_client_of_peer_without_address_is_none(peer: str | None) -> None:
    assert identify_client(peer, forwarded(CLIENT), PROXIES) is None


@pytest.mark.parametrize(
    "headers",
    [
        forwarded(CLIENT),
        forwarded(f"198.51.100.1, {CLIENT}"),
        forwarded(f"{CLIENT}, 10.9.9.9"),
        forwarded("198.51.100.1", f"{CLIENT},fd00::5"),
        forwarded(f"10.0.0.7,198.51.100.1,  {CLIENT}:4711 ,10.1.1.1"),
        standard(f"for={CLIENT}"),
        standard(f'For="{CLIENT}:80";proto=https;by=10.0.0.1'),
        standard("for=198.51.100.1", f"proto=http; for={CLIENT} , for=10.2.2.2"),
        [*forwarded(CLIENT), *standard(f"for={CLIENT}")],
    ],
)
def test_client_of_trusted_proxy_is_rightmost_untrusted_address(headers: list[tuple[bytes, bytes]]) -> None:
    assert identify_client(PROXY, headers, PROXIES) == ipv4_bytes(CLIENT)


@pytest.mark.parametrize("text", ["2001:db8::1", "[2001:db8::1]", "[2001:db8::1]:443"])
def test_client_of_forwarded_ipv6_address_may_have_port(text: str) -> None:
    assert identify_client(PROXY, forwarded(text), PROXIES) == ipv6_bytes("2001:db8::1")
    assert identify_client(PROXY, standard(f'for="{text}"'), PROXIES) == ipv6_bytes("2001:db8::1")


@pytest.mark.parametrize(
    ("headers", "client_ip"),
    [
        ([], PROXY),
        (forwarded(""), PROXY),
        (forwarded(f"{CLIENT}, unknown"), PROXY),
        (forwarded(f"{CLIENT}, nonsense, 10.7.7.7"), "10.7.7.7"),
        (forwarded("10.3.3.3, 10.4.4.4"), "10.3.3.3"),
        (standard("for=_hidden"), PROXY),
        (standard("proto=https"), PROXY),
        (standard(f'for="{CLIENT}'), PROXY),
        ([*forwarded(CLIENT), *standard("for=198.51.100.1")], PROXY),
        ([*forwarded("198.51.100.1"), *standard("for=unknown")], PROXY),
        (forwarded(f"{CLIENT}, fd00::1%{'z' * 60}"), PROXY),
        (standard(f'for="[fd00::1%{"z" * 60}]"'), PROXY),
        (standard(f"for={CLIENT};by={'z' * MAX_ELEMENT_CHARS}"), PROXY),
        (forwarded(",".join(["10.2.2.2", "10.2.2.3", *["10.3.3.3"] * MAX_HOPS])), "10.3.3.3"),
    ],
)
def test_client_of_invalid_header_is_last_proxy(headers: list[tuple[bytes, bytes]], client_ip: str) -> None:
    assert identify_client(PROXY, headers, PROXIES) == ipv4_bytes(client_ip)


def test_no_address_remains_in_memory_after_its_request() -> None:
    identify_client(CLIENT, [], PROXIES)
    identify_client(PROXY, forwarded("198.51.100.1"), PROXIES)
    assert not is_trusted_proxy("192.0.2.77", PROXIES)
    addresses = {str(held) for held in gc.get_objects() if isinstance(held, IPv4Address)}
    assert not addresses & {CLIENT, PROXY, "198.51.100.1", "192.0.2.77"}


def test_is_trusted_matches_networks() -> None:
    assert is_trusted_proxy("10.255.0.1", PROXIES)
    assert is_trusted_proxy("fd00::1", PROXIES)
    assert not is_trusted_proxy("11.0.0.1", PROXIES)
    assert not is_trusted_proxy(None, PROXIES)
    assert not is_trusted_proxy("helper.sock", PROXIES)


ONE, OTHER = b"one", b"other"


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
    buckets = TokenBuckets(burst=800, per_second=50, max_clients=100)
    for number in range(10_000):
        buckets.charge(number.to_bytes(4), number * 1e-6)
        assert len(buckets) <= 100
