"""IP addresses, with IPv4-mapped IPv6 addresses (`::ffff:127.0.0.1`) treated as IPv4. Pure."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

Address = IPv4Address | IPv6Address


def parse_address(text: str) -> Address:
    """Parse an address; an IPv4-mapped IPv6 address becomes an IPv4 address.

    A listener on `::` accepts IPv4 clients too, and both ends of their connections are IPv4-mapped.

    Raises:
        ValueError: the text is not an address.
    """
    address = ip_address(text)
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def is_loopback(text: str) -> bool:
    """Return whether a text is a loopback address. A name such as `localhost` is not."""
    try:
        return parse_address(text).is_loopback
    except ValueError:
        return False
