"""IP addresses, with one view of IPv4 addresses that are written as IPv6 (`::ffff:127.0.0.1`). Pure."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

Address = IPv4Address | IPv6Address


def parse_address(text: str) -> Address:
    """An address; an IPv4-mapped IPv6 address is the IPv4 address.

    A listener on `::` has IPv4 clients too, and both ends of their connections are IPv4-mapped.

    Raises:
        ValueError: it is not an address.
    """
    address = ip_address(text)
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def is_loopback(text: str) -> bool:
    """Whether a text is a loopback address; a name, `localhost` too, is not."""
    try:
        return parse_address(text).is_loopback
    except ValueError:
        return False
