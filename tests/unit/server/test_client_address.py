"""Client identification: by peer address, or by the headers of trusted proxies only."""

from __future__ import annotations

import gc
from ipaddress import IPv4Address, ip_address, ip_network

import pytest

from helper.server.client_address import MAX_ELEMENT_CHARS, MAX_HOPS, identify_client, is_trusted_proxy

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
