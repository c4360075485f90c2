"""The published voting configuration: fetched every minute and validated; the last valid copy survives restarts."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Never

import anyio
import httpx
import structlog

from admin.store import AdminStore
from admin.url_policy import LONGEST, UrlNotAllowedError, check_url, is_public
from helper.clock import Clock
from helper.errors import HelperError
from helper.runtime.http_client import create_async_client

log = structlog.get_logger("helper.admin")

INTERVAL: Final = 60.0
"""Seconds between two fetches."""
LARGEST: Final = 512 << 10
"""Maximum size in bytes. The production configuration of 2026 has 5 kB, a test network's with a thousand rounds 450."""
PATIENCE: Final = 10.0
"""Timeout of a fetch in seconds, including redirects."""
REDIRECTS: Final = 3
"""Maximum number of redirects."""
LONGEST_ORIGINS: Final = 2000
"""Maximum number of characters of all origins: proxies limit the size of response headers, nginx to 4 kB."""
MOST_SERVERS: Final = 256
"""Maximum number of vote servers that are considered for the policy; production has ten."""
_HOST: Final = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)*")
_OWN_MACHINE: Final = ("localhost", "127.0.0.1")
_MOVED: Final = (301, 302, 303, 307, 308)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class BadConfigError(Exception):
    """The fetch failed, or the response is not a voting configuration. The text states the reason."""


@dataclass(frozen=True, slots=True)
class PublishedConfig:
    """A voting configuration.

    Attributes:
        body: the published bytes.
        origins: distinct origins of its vote servers that a page may connect to, in order: https origins, and http
            origins on the visitor's own host. Omits hosts that a content security policy cannot express (IPv6
            addresses), and all beyond `MOST_SERVERS` or `LONGEST_ORIGINS`.
    """

    body: bytes
    origins: tuple[str, ...]


def parse_config(body: bytes) -> PublishedConfig:
    """Validate a voting configuration. The fields that pages read are required; unknown fields are allowed.

    A hostile configuration of `LARGEST` bytes takes tens of milliseconds; call this in a thread.

    Raises:
        BadConfigError: it is not a voting configuration.
    """
    try:
        config = json.loads(body.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise BadConfigError("it is not JSON in UTF-8") from None
    if not isinstance(config, dict):
        raise BadConfigError("it is not an object")
    if "version" not in config and "config_version" not in config:
        raise BadConfigError("version and config_version are missing")
    servers = _check_list(config, "vote_servers", required=True)
    _check_list(config, "pir_endpoints", required=False)
    height = config.get("snapshot_height")
    if height is not None and (isinstance(height, bool) or not isinstance(height, int) or height < 0):
        raise BadConfigError("snapshot_height is not a height")
    return PublishedConfig(body, _origins(servers))


def _origins(urls: Sequence[str]) -> tuple[str, ...]:
    origins: list[str] = []
    size = 0
    for url in urls[:MOST_SERVERS]:
        origin = _origin(url)
        if origin is None or origin in origins:
            continue
        size += len(origin) + 1
        if size > LONGEST_ORIGINS:
            break
        origins.append(origin)
    return tuple(origins)


def _origin(url: str) -> str | None:
    if len(url) > LONGEST:  # slow to parse
        return None
    try:
        parsed = httpx.URL(url)
        host = parsed.raw_host.decode()
    except (httpx.InvalidURL, UnicodeError):
        return None
    if not _HOST.fullmatch(host) or (parsed.scheme != "https" and host not in _OWN_MACHINE):
        return None
    return f"{parsed.scheme}://{host}" + (f":{parsed.port}" if parsed.port else "")


def _no_number(name: str) -> Never:
    """Reject NaN and infinities, which Python accepts and browsers do not."""
    raise ValueError(f"{name} is not JSON")


def _check_list(config: dict[str, Any], name: str, *, required: bool) -> list[str]:
    """Validate a list of servers and return their URLs."""
    entries = config.get(name)
    if entries is None and not required:
        return []
    if not isinstance(entries, list):
        raise BadConfigError(f"{name} is not a list")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("url"), str):
            raise BadConfigError(f"an entry of {name} has no url")
        if not entry["url"].startswith(("https://", "http://")):
            raise BadConfigError(f"an entry of {name} has a url that is not http or https")
    return [entry["url"] for entry in entries]


class VotingConfig:
    """Fetches and caches the voting configuration at one URL.

    Args:
        url: URL of the configuration, empty for none.
        store: stores the last valid copy.
        clock: the time.
        transport: replaces the network in tests.
        resolve: resolves a host name; the system's resolver by default.
    """

    def __init__(
        self,
        url: str,
        store: AdminStore,
        *,
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        self._url = url
        self._store = store
        self._clock = clock
        self._resolve = resolve or _system_resolve
        self._http = create_async_client(transport=transport, timeout=PATIENCE)
        self._problem = ""
        self.body: bytes | None = None
        """The last valid copy as published, None if there is none."""
        self.fetched_at: int | None = None
        """Time of its last fetch, Unix seconds."""
        self.origins: tuple[str, ...] = ()
        """Origins of its vote servers, see `PublishedConfig`."""

    async def restore(self) -> None:
        """Load the copy on disk."""
        stored = await self._store.kept_config(self._url)
        if stored is None:
            return
        try:
            self._replace(await asyncio.to_thread(parse_config, stored.body), stored.fetched_at)
        except BadConfigError as error:  # a damaged row, or one that an older version accepted
            log.warning("stored_voting_config_ignored", reason=str(error))

    async def run(self) -> None:
        """Fetch every `INTERVAL` seconds until cancelled."""
        try:
            while self._url:
                await self.refresh()
                await self._clock.sleep(INTERVAL)
            await asyncio.Event().wait()
        finally:
            await self._http.aclose()

    async def refresh(self) -> None:
        """Fetch once. An invalid configuration is logged and changes nothing."""
        try:
            body = await self._fetch()
            config = None if body == self.body else await asyncio.to_thread(parse_config, body)
        except BadConfigError as error:
            self._report(str(error))
            return
        now = self._clock.now()
        if config is None:
            self.fetched_at = int(now)
        else:
            try:
                await self._store.keep_config(self._url, body, now=now)
            except HelperError as error:
                log.error("voting_config_not_stored", error=str(error), advice=error.advice)
            self._replace(config, int(now))
        self._report("")

    def _replace(self, config: PublishedConfig, fetched_at: int) -> None:
        self.body, self.origins, self.fetched_at = config.body, config.origins, fetched_at

    async def _fetch(self) -> bytes:
        try:
            url, address = httpx.URL(self._url), ""
            with anyio.fail_after(PATIENCE):
                for _ in range(REDIRECTS + 1):
                    response, body = await self._get(url, address)
                    if response.status_code not in _MOVED:
                        break
                    url, address = await self._next(url, response)
                else:
                    raise BadConfigError(f"more than {REDIRECTS} redirects")
        except TimeoutError:
            raise BadConfigError(f"timed out after {PATIENCE:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # UnicodeError: host is not valid IDNA
            raise BadConfigError(f"fetch failed: {type(error).__name__}") from None
        if response.status_code != 200:
            raise BadConfigError(f"HTTP {response.status_code}")
        return body

    async def _get(self, url: httpx.URL, address: str) -> tuple[httpx.Response, bytes]:
        """Send one request; to `address` if given, so that the checked address is used (no DNS rebinding)."""
        headers, extensions = {"Accept-Encoding": "identity"}, {}
        if address:
            headers["Host"], extensions["sni_hostname"] = url.netloc.decode(), url.raw_host.decode()
            url = url.copy_with(host=address)
        async with self._http.stream("GET", url, headers=headers, extensions=extensions) as response:
            chunks, size = [], 0
            async for chunk in response.aiter_raw():
                size += len(chunk)
                if size > LARGEST:
                    raise BadConfigError(f"it is larger than {LARGEST} bytes")
                chunks.append(chunk)
            return response, b"".join(chunks)

    async def _next(self, url: httpx.URL, response: httpx.Response) -> tuple[httpx.URL, str]:
        """Return the target of a redirect and its address. Only public hosts are followed."""
        try:
            target = url.join(response.headers.get("location", ""))
            check_url(str(target), production=True)
            addresses = await self._resolve(target.host, target.port or 443)
        except (UrlNotAllowedError, httpx.InvalidURL, OSError) as error:
            raise BadConfigError(f"redirect not followed: {error}") from None
        if not addresses or not all(is_public(ipaddress.ip_address(address)) for address in addresses):
            raise BadConfigError("redirect to a private network")
        return target, addresses[0]

    def _report(self, problem: str) -> None:
        """Log a change of the problem."""
        if problem != self._problem:
            if problem:
                log.warning("voting_config_refresh_failed", reason=problem)
            else:
                log.info("voting_config_refreshed")
        self._problem = problem


async def _system_resolve(host: str, port: int) -> Sequence[str]:
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]
