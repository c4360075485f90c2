"""Identifies the client of a request by its address, and limits the rate of clients. Pure.

The peer of the connection is the client, unless the peer is a trusted proxy. Then the client is the right-most address
of X-Forwarded-For (or Forwarded, RFC 7239) that is not a trusted proxy's. Addresses further left come from the client
and are ignored. No address is cached: it would stay in memory after its request.

Token buckets limit routes that cost much or could be used to guess a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Network
from typing import Final

from helper.core.text_forms import Address, parse_address

Network = IPv4Network | IPv6Network
Headers = Iterable[tuple[bytes, bytes]]

MAX_HOPS: Final = 16
"""Maximum number of hops that are read, so that a long list costs no time."""
MAX_HOP_CHARS: Final = 64
"""Maximum characters of a hop. An IPv6 address with brackets, zone and port is shorter."""
MAX_ELEMENT_CHARS: Final = 512
"""Maximum characters of an element of Forwarded: a hop and its other parameters."""
_6TO4_PREFIX = b"\x20\x02"
_FOR_PARAMETER = re.compile(r'(?:^|;)\s*for\s*=\s*(?:"([^"]*)"|([^;"\s]*))\s*(?=;|$)', re.IGNORECASE)
_V4_AND_PORT = re.compile(r"([0-9.]+)(?::[0-9]{1,5})?")
_V6_AND_PORT = re.compile(r"\[([^\]]*)\](?::[0-9]{1,5})?")


def identify_client(peer: str | None, headers: Headers, trusted: Sequence[Network]) -> bytes | None:
    """Identify a client by its IPv4 address (4 bytes) or IPv6 /64 (8 bytes).

    Args:
        peer: address of the connection's peer; None on a unix socket.
        headers: the request's headers, names in lower case.
        trusted: networks of the operator's proxies.

    Returns:
        None for a request over a unix socket.
    """
    address = _parse_address(peer or "")
    if address is None:
        return None
    if trusted and is_trusted_proxy(address, trusted):
        address = _forwarded_client(address, headers, trusted)
    return address.packed if isinstance(address, IPv4Address) else address.packed[:8]


def client_network(client: bytes) -> bytes:
    """The network of a client: its IPv4 /24 (3 bytes) or IPv6 /48 (6 bytes).

    A 6to4 address (2002::/16) belongs to the network of the IPv4 address in it, because each IPv4 address has such
    a /48.
    """
    if len(client) == 4:
        return client[:3]
    return client[2:5] if client[:2] == _6TO4_PREFIX else client[:6]


def is_trusted_proxy(address: Address | str | None, trusted: Sequence[Network]) -> bool:
    """Whether an address belongs to one of the operator's proxies."""
    if not trusted:
        return False
    parsed = _parse_address(address or "") if isinstance(address, str | None) else address
    return parsed is not None and any(parsed in network for network in trusted)


def _forwarded_client(proxy: Address, headers: Headers, trusted: Sequence[Network]) -> Address:
    """The client of a request that a trusted proxy forwarded.

    A proxy writes one of the two headers and forwards the other unchanged from the client. If both are present and
    contain different clients, neither is trusted, and the proxy itself is the client.
    """
    lists, standard = [], []
    for name, value in headers:
        if name == b"x-forwarded-for":
            lists.append(value.decode("latin-1"))
        elif name == b"forwarded":
            standard.append(value.decode("latin-1"))
    clients = {
        _rightmost_untrusted(proxy, hops, trusted)
        for hops in (_x_forwarded_for_hops(",".join(lists)), _forwarded_hops(",".join(standard)))
        if hops is not None
    }
    return clients.pop() if len(clients) == 1 else proxy


def _x_forwarded_for_hops(text: str) -> Iterator[str] | None:
    """The hops of X-Forwarded-For, last first; None without the header."""
    return _last_elements(text) if text else None


def _forwarded_hops(text: str) -> Iterator[str] | None:
    """The hops of Forwarded, last first; None without the header."""
    return (_parse_for_parameter(element) for element in _last_elements(text)) if text else None


def _last_elements(text: str) -> Iterator[str]:
    """The last `MAX_HOPS` elements of a list, last first; then the rest, valid only if it is a single one."""
    return reversed(text.rsplit(",", MAX_HOPS))


def _parse_for_parameter(element: str) -> str:
    match = _FOR_PARAMETER.search(element) if len(element) <= MAX_ELEMENT_CHARS else None
    return (match[1] or match[2] or "") if match else ""


def _rightmost_untrusted(proxy: Address, hops: Iterator[str], trusted: Sequence[Network]) -> Address:
    """The last hop that is not a trusted proxy; if it is invalid, the proxy that reported it."""
    last = proxy
    for hop in hops:
        address = _parse_address(hop.strip())
        if address is None:
            return last
        if not is_trusted_proxy(address, trusted):
            return address
        last = address
    return last


def _parse_address(text: str) -> Address | None:
    """Parse an address with or without a port; an IPv4-mapped IPv6 address becomes the IPv4 address."""
    if len(text) > MAX_HOP_CHARS:
        return None
    match = _V4_AND_PORT.fullmatch(text) or _V6_AND_PORT.fullmatch(text)
    try:
        return parse_address(match[1] if match else text)
    except ValueError:
        return None


MAX_CLIENTS: Final = 1 << 16
"""Maximum number of buckets; about 10 MB."""
_RETAINED_FRACTION: Final = 0.9
"""Fraction of the buckets that an eviction retains, so that not every new client causes an eviction."""
_ROUNDING_SECONDS: Final = 1e-6
"""Rounding error of sums of times, in seconds."""


class TokenBuckets:
    """A token bucket for each client. The time is a parameter, in seconds of a monotonic clock.

    A bucket is stored as the time at which it will be full again; a client without an entry has a full bucket.

    Args:
        burst: tokens of a full bucket.
        per_second: tokens refilled per second.
        max_clients: maximum number of buckets. Above it, full buckets are evicted, then those whose client was charged
            longest ago.
    """

    def __init__(self, burst: int, per_second: float, max_clients: int = MAX_CLIENTS) -> None:
        self._seconds_per_token = 1 / per_second
        self._last_token_refill = (burst - 1) / per_second  # a bucket needs longer than this only if it is empty
        self._max_clients = max_clients
        self._full_at: dict[bytes, float] = {}  # in order of the latest charge

    def __len__(self) -> int:
        """Number of buckets."""
        return len(self._full_at)

    def wait_seconds(self, client: bytes, now: float) -> float:
        """Seconds until this client has a token; 0 if it has one."""
        missing = self._full_at.get(client, now) - now - self._last_token_refill
        return missing if missing > _ROUNDING_SECONDS else 0.0

    def charge(self, client: bytes, now: float) -> None:
        """Take a token. The balance may become negative, because a client may have several concurrent requests."""
        full_at = self._full_at.pop(client, now)
        self._full_at[client] = max(full_at, now) + self._seconds_per_token
        if len(self._full_at) > self._max_clients:
            self._evict_buckets(now)

    def _evict_buckets(self, now: float) -> None:
        retained = [(client, full_at) for client, full_at in self._full_at.items() if full_at > now]
        self._full_at = dict(retained[-max(1, int(self._max_clients * _RETAINED_FRACTION)) :])
