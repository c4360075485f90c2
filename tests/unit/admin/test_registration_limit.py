"""The network of a client, by peer address or by the header of trusted proxies only, and the limit of registrations."""

from __future__ import annotations

import gc
from ipaddress import IPv4Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

import admin.registration_limit
from admin.registration_limit import (
    BURST_REGISTRATIONS,
    MAX_HOPS,
    REGISTRATIONS_PER_SECOND,
    RegistrationLimit,
    client_network,
)

PROXIES = tuple(map(ip_network, ("10.0.0.0/8", "fd00::/8")))
PROXY = "10.0.0.1"
CLIENT = "203.0.113.9"
SECONDS_PER_TOKEN = 1 / REGISTRATIONS_PER_SECOND


def network_of(text: str) -> bytes:
    packed = ip_address(text).packed
    return packed[:3] if len(packed) == 4 else packed[:6]


def forwarded(*lines: str) -> list[tuple[bytes, bytes]]:
    return [(b"x-forwarded-for", line.encode()) for line in lines]


def test_client_of_untrusted_peer_ignores_headers() -> None:
    for headers in ([], forwarded("198.51.100.1")):
        assert client_network(CLIENT, headers, PROXIES) == network_of(CLIENT)
        assert client_network(PROXY, headers, ()) == network_of(PROXY)


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("2001:db8:1:2::1", network_of("2001:db8:1::")),
        ("fe80::1%eth0", network_of("fe80::1")),
        (f"::ffff:{CLIENT}", network_of(CLIENT)),
        ("2002:cb00:7109::1", network_of(CLIENT)),
        (None, b""),
        ("", b""),
        ("testclient", b""),
    ],
)
def test_client_is_known_by_its_network(peer: str | None, network: bytes) -> None:
    assert client_network(peer, forwarded("198.51.100.1"), PROXIES) == network


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        (forwarded(CLIENT), CLIENT),
        (forwarded(f"198.51.100.1, {CLIENT}"), CLIENT),
        (forwarded(f"{CLIENT}, 10.9.9.9"), CLIENT),
        (forwarded("198.51.100.1", f"{CLIENT},fd00::5"), CLIENT),
        (forwarded(f"10.0.0.7,198.51.100.1,  {CLIENT}:4711 ,10.1.1.1"), CLIENT),
        *[(forwarded(text), "2001:db8::1") for text in ("2001:db8::1", "[2001:db8::1]", "[2001:db8::1]:443")],
        ([], PROXY),
        ([(b"forwarded", b"for=203.0.113.9")], PROXY),
        ([*forwarded("198.51.100.1"), (b"forwarded", b"for=203.0.113.9")], PROXY),
        (forwarded(""), PROXY),
        (forwarded(f"{CLIENT}, unknown"), PROXY),
        (forwarded(f"{CLIENT}, nonsense, 10.7.7.7"), "10.7.7.7"),
        (forwarded("10.3.3.3, 10.4.4.4"), "10.3.3.3"),
        (forwarded(f"{CLIENT}, fd00::1%{'z' * 60}"), PROXY),
        (forwarded(",".join(["10.2.2.2", "10.2.2.3", *["10.3.3.3"] * MAX_HOPS])), "10.3.3.3"),
    ],
)
def test_client_of_trusted_proxy_is_rightmost_untrusted_address_or_last_proxy(
    headers: list[tuple[bytes, bytes]], client: str
) -> None:
    assert client_network(PROXY, headers, PROXIES) == network_of(client)
    assert client_network(f"::ffff:{PROXY}", headers, PROXIES) == network_of(client)


def test_no_address_remains_in_memory_after_its_request() -> None:
    client, proxy, behind = "203.0.113.231", "10.77.66.55", "198.51.100.213"  # in no other test
    client_network(client, [], PROXIES)
    client_network(proxy, forwarded(behind), PROXIES)
    addresses = {str(held) for held in gc.get_objects() if isinstance(held, IPv4Address)}
    assert not addresses & {client, proxy, behind}


def test_each_network_has_a_burst_then_waits() -> None:
    limit = RegistrationLimit()
    assert [limit.take(b"one", 100.0) for _ in range(BURST_REGISTRATIONS)] == [0] * BURST_REGISTRATIONS
    for _ in range(2):
        assert limit.take(b"one", 101.0) == pytest.approx(SECONDS_PER_TOKEN - 1), "a refusal costs no token"
    assert limit.take(b"other", 101.0) == 0


@given(st.lists(st.floats(0, 60), max_size=200))
def test_limit_never_exceeds_burst_and_refill(pauses: list[float]) -> None:
    limit, now, passed = RegistrationLimit(), 0.0, list[float]()
    for pause in pauses:
        now += pause
        wait = limit.take(b"one", now)
        if wait == 0:
            passed.append(now)
        else:
            assert limit.take(b"one", now + wait * 0.99) > 0, "the reported time is not too long"
    for first, start in enumerate(passed):
        for last, end in enumerate(passed[first:], first):
            assert last - first + 1 <= BURST_REGISTRATIONS + (end - start) * REGISTRATIONS_PER_SECOND + 1e-3


def test_limit_forgets_networks_that_have_all_tokens_and_then_those_that_came_least_recently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = RegistrationLimit()
    for number in range(10):
        limit.take(b"%d" % number, 0.0)
    limit.take(b"later", SECONDS_PER_TOKEN)
    assert len(limit._full_at) == 1
    monkeypatch.setattr(admin.registration_limit, "MAX_NETWORKS", 3)
    for name in (b"flooder", b"second", b"third"):
        for _ in range(BURST_REGISTRATIONS):
            limit.take(name, SECONDS_PER_TOKEN)
    limit.take(b"second", SECONDS_PER_TOKEN)
    limit.take(b"fourth", SECONDS_PER_TOKEN)
    assert len(limit._full_at) == 3
    assert limit.take(b"flooder", SECONDS_PER_TOKEN) == 0, "it was forgotten"
    assert limit.take(b"second", SECONDS_PER_TOKEN) > 0
