"""Policy for URLs: which may be registered, followed as redirects, or published. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

MAX_URL_CHARS: Final = 512
_FORBIDDEN_CHARS: Final = re.compile(r"[\x00-\x20\x7f\\]")
_LABEL: Final = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)")
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST_IPV6: Final = ipaddress.ip_network("2000::/3")
"""Global unicast (https://www.iana.org/assignments/ipv6-address-space)."""
_DOCUMENTATION_IPV6: Final = ipaddress.ip_network("3fff::/20")
"""Documentation addresses (RFC 9637); `ipaddress` contains only the older range."""
_PRIVATE_ENDINGS: Final = ("localhost", "local", "internal", "lan", "home", "corp", "arpa", "test", "invalid", "onion")


class UrlNotAllowedError(ValueError):
    """The URL is not allowed. The text states the reason."""


def check_url(url: str, *, production: bool) -> None:
    """Check that a URL is a public HTTPS URL (in production) or any HTTP(S) URL (otherwise).

    Raises:
        UrlNotAllowedError: the URL is not allowed.
    """
    if len(url) > MAX_URL_CHARS:
        raise UrlNotAllowedError(f"is longer than {MAX_URL_CHARS} characters")
    if not url.isascii():
        # Converting an international name takes up to 0.2 s, in which no other Python code runs.
        raise UrlNotAllowedError("is not ASCII; write an international host name in punycode (xn--…)")
    if _FORBIDDEN_CHARS.search(url):
        raise UrlNotAllowedError("contains a space, a backslash or a control character")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise UrlNotAllowedError("is not a URL") from None
    schemes = ("https",) if production else ("https", "http")
    if parts.scheme not in schemes:
        raise UrlNotAllowedError(f"must begin with {' or '.join(f'{scheme}://' for scheme in schemes)}")
    if not host or port == 0 or ("[" in parts.netloc and ":" not in host):
        raise UrlNotAllowedError("has no valid host")
    if parts.username is not None or parts.password is not None:
        raise UrlNotAllowedError("contains credentials")
    if parts.fragment or url.endswith("#"):
        raise UrlNotAllowedError("contains a fragment")
    check_host(host, production=production)


def first_publishable(urls: Iterable[str], *, production: bool) -> str:
    """Return the first node URL that may be published, "" if there is none.

    Only bare origins are published: URLs of hosted nodes often contain the customer's key in path, query or userinfo.

    Args:
        urls: the configured node URLs.
        production: whether only public HTTPS URLs may be published.
    """
    return next((url for url in urls if _is_publishable(url, production=production)), "")


def _is_publishable(url: str, *, production: bool) -> bool:
    try:
        check_url(url, production=production)
    except UrlNotAllowedError:
        return False
    parts = urlsplit(url)
    return parts.path in ("", "/") and "?" not in url


def check_host(host: str, *, production: bool) -> None:
    """Check that a host is a valid name or address and, in production, public.

    Raises:
        UrlNotAllowedError: the host is not allowed.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        _check_name(host.rstrip("."), production=production)
    else:
        if production and not is_public(address):
            raise UrlNotAllowedError("refers to an address in a private network")


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an address is globally routable. Embedded IPv4 addresses are checked as IPv4."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address not in _GLOBAL_UNICAST_IPV6 or address in _DOCUMENTATION_IPV6:
            return False
    return address.is_global and not address.is_multicast


def _check_name(host: str, *, production: bool) -> None:
    labels = host.lower().split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise UrlNotAllowedError("has no valid host")
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):
        # Resolvers accept 127.1, 2130706433 and 0x7f.1 as IPv4 addresses.
        raise UrlNotAllowedError("contains an IP address in a non-standard notation")
    if production and (len(labels) == 1 or labels[-1] in _PRIVATE_ENDINGS):
        raise UrlNotAllowedError("refers to a host in a private network")
