"""Limits registrations by the network of their client. Pure.

The peer of the connection is the client, unless the peer is a trusted proxy. Then the client is the right-most address
of X-Forwarded-For that is not a trusted proxy's. Addresses further left come from the client and are ignored. No
address is cached: it would stay in memory after its request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address
from typing import Final

from helper.core.text_forms import Address, Network, is_in_networks, parse_address

BURST_REGISTRATIONS: Final = 20
"""Burst of registrations per network: each costs a signature verification, and a valid one is stored."""
REGISTRATIONS_PER_SECOND: Final = 0.2
"""Registrations per second and network after the burst."""
MAX_NETWORKS: Final = 1 << 16
"""Maximum number of networks in memory; about 10 MB."""
MAX_HOPS: Final = 16
"""Maximum number of hops that are read, so that a long list costs no time."""
MAX_HOP_CHARS: Final = 64
"""Maximum characters of a hop. An IPv6 address with brackets, zone and port is shorter."""
_6TO4_PREFIX: Final = b"\x20\x02"
_V4_AND_PORT: Final = re.compile(r"([0-9.]+)(?::[0-9]{1,5})?")
_V6_AND_PORT: Final = re.compile(r"\[([^\]]*)\](?::[0-9]{1,5})?")


def client_network(peer: str | None, headers: Iterable[tuple[bytes, bytes]], trusted: Sequence[Network]) -> bytes:
    """The network of a client: its IPv4 /24 (3 bytes) or IPv6 /48 (6 bytes); empty if it has no address.

    A 6to4 address (2002::/16) belongs to the network of the IPv4 address in it, because each IPv4 address has such
    a /48.

    Args:
        peer: address of the connection's peer; None on a unix socket.
        headers: the request's headers, names in lower case.
        trusted: networks of the operator's proxies.
    """
    address = _parse_hop(peer or "")
    if address is None:
        return b""
    values = [(name, value) for name, value in headers if name in (b"x-forwarded-for", b"forwarded")]
    # A proxy that writes only `Forwarded` may pass on an `X-Forwarded-For` of the client: use the proxy's network.
    is_ambiguous = any(name == b"forwarded" for name, _ in values)
    forwarded = "" if is_ambiguous else b",".join(value for _, value in values).decode("latin-1")
    for hop in reversed(forwarded.rsplit(",", MAX_HOPS)):  # the last hops, then the rest, valid only as a single one
        before = _parse_hop(hop.strip()) if is_in_networks(address, trusted) else None
        if before is None:  # the client, or a proxy that reported no valid address
            break
        address = before
    packed = address.packed
    if isinstance(address, IPv4Address):
        return packed[:3]
    return packed[2:5] if packed[:2] == _6TO4_PREFIX else packed[:6]


def _parse_hop(text: str) -> Address | None:
    """Parse an address with or without a port."""
    if len(text) > MAX_HOP_CHARS:
        return None
    match = _V4_AND_PORT.fullmatch(text) or _V6_AND_PORT.fullmatch(text)
    try:
        return parse_address(match[1] if match else text)
    except ValueError:
        return None


class RegistrationLimit:
    """A token bucket for each network, stored as the time at which it will be full again."""

    def __init__(self) -> None:
        self._full_at: dict[bytes, float] = {}  # in order of the latest request

    def take(self, network: bytes, now: float) -> float:
        """Take a token; return the seconds to wait if there is none, otherwise 0. `now` is monotonic time."""
        full_at = max(self._full_at.pop(network, now), now)
        wait = full_at - now - (BURST_REGISTRATIONS - 1) / REGISTRATIONS_PER_SECOND
        if wait <= 0:
            full_at += 1 / REGISTRATIONS_PER_SECOND
        self._full_at[network] = full_at
        while len(self._full_at) > MAX_NETWORKS or next(iter(self._full_at.values())) <= now:
            del self._full_at[next(iter(self._full_at))]
        return max(0.0, wait)
