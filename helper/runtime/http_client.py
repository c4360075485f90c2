"""Creates HTTP clients that store no cookies, follow no redirects and ignore proxy variables.

Cookies would let a server fill the memory of a long-lived client and link unrelated requests. All HTTP clients of
the helper are created here; a test enforces this.
"""

from __future__ import annotations

from collections.abc import Mapping
from http.cookiejar import CookieJar
from typing import Any
from urllib.request import Request

import httpx


class _NoCookies(CookieJar):
    """A cookie jar that stores nothing and does not parse `Set-Cookie` headers."""

    def extract_cookies(self, response: Any, request: Request) -> None:
        """Ignore the cookies of a response."""


def create_async_client(
    *,
    timeout: httpx.Timeout | float,
    transport: httpx.AsyncBaseTransport | None = None,
    base_url: httpx.URL | str = "",
    headers: Mapping[str, str] | None = None,
) -> httpx.AsyncClient:
    """Create an asynchronous client.

    Args:
        timeout: seconds for connecting and for each read and write; httpx does not limit the total time.
        transport: sends the requests; None for the network.
        base_url: base of relative URLs.
        headers: sent with each request.
    """
    return httpx.AsyncClient(
        cookies=_NoCookies(),
        follow_redirects=False,
        trust_env=False,
        timeout=timeout,
        transport=transport,
        base_url=base_url,
        headers=headers,
    )


def create_client(
    *,
    timeout: httpx.Timeout | float,
    transport: httpx.BaseTransport | None = None,
    base_url: httpx.URL | str = "",
) -> httpx.Client:
    """Create a blocking client; the arguments are those of `create_async_client`."""
    return httpx.Client(
        cookies=_NoCookies(),
        follow_redirects=False,
        trust_env=False,
        timeout=timeout,
        transport=transport,
        base_url=base_url,
    )
