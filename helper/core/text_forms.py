"""Addresses, times and foreign text: parse, sanitize and format them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

_UNSAFE_RANGES: Final = (
    (0x00, 0x1F),  # control characters: end lines, command terminals; PostgreSQL rejects NUL
    (0x7F, 0x9F),
    (0x2028, 0x2029),  # line and paragraph separators
    (0x202A, 0x202E),  # bidirectional embeddings, overrides and isolates: reorder displayed text
    (0x2066, 0x2069),
    (0xD800, 0xDFFF),  # lone surrogates: not encodable as UTF-8
)
_SPACES: Final = {code: " " for first, last in _UNSAFE_RANGES for code in range(first, last + 1)}


def clean_text(text: str) -> str:
    """Replace every character that is unsafe in a database, a log or a terminal with a space.

    Letters of all scripts, combining characters and emoji (with their joiners) are not changed.
    """
    return text if text.isprintable() else text.translate(_SPACES)


def format_time(seconds: float, *, local: bool = False) -> str:
    """Format a Unix time as `2026-01-31 18:30:00`, with milliseconds unless they are 0.

    A time that the calendar cannot represent is returned as a number, and one before 1970, that of a damaged row, as
    `unknown`.

    Args:
        local: use this machine's time zone instead of UTC, and append its name.
    """
    if seconds < 0:
        return "unknown"
    try:
        time = datetime.fromtimestamp(seconds, UTC)
        if local:
            time = time.astimezone()
    except (OverflowError, ValueError, OSError):
        return str(seconds)
    text = time.strftime("%Y-%m-%d %H:%M:%S") + (f".{time.microsecond // 1000:03d}" if time.microsecond else "")
    return f"{text} {time.strftime('%Z')}" if local else text


def format_duration(seconds: float | None) -> str:
    """Format a duration in at most eight columns: `45 s`, `38 min`, `5.2 h`, `3.0 d`.

    Returns `-` for None, and `ended` for a negative duration.
    """
    if seconds is None:
        return "-"
    if seconds < 0:
        return "ended"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86_400:.1f} d"


Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def parse_address(text: str) -> Address:
    """Parse an address; an IPv4-mapped IPv6 address becomes an IPv4 address.

    A listener on `::` accepts IPv4 clients too, and both ends of their connections are IPv4-mapped.

    Raises:
        ValueError: the text is not an address.
    """
    address = ip_address(text)
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def is_in_networks(address: Address, networks: Iterable[Network]) -> bool:
    """Return whether an address belongs to one of these networks."""
    return any(address in network for network in networks)


def is_loopback(text: str) -> bool:
    """Return whether a text is a loopback address. A name such as `localhost` is not."""
    try:
        return parse_address(text).is_loopback
    except ValueError:
        return False
