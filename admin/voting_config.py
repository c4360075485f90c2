"""The published voting configuration: fetched every minute and validated. The last valid copy survives restarts."""

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
from admin.url_policy import MAX_URL_CHARS, UrlNotAllowedError, check_url, is_public
from helper.clock import Clock
from helper.core.log_limits import LoggedProblem
from helper.errors import HelperError
from helper.observability.error_log import log_error
from helper.runtime.http_client import create_async_client

log = structlog.get_logger("helper.admin")

INTERVAL_SECONDS: Final = 60.0
"""Seconds between two fetches."""
MAX_CONFIG_BYTES: Final = 512 << 10
"""Maximum size in bytes. The production configuration of 2026 has 5 kB, a test network's with a thousand rounds 450."""
FETCH_TIMEOUT_SECONDS: Final = 10.0
"""Timeout of a fetch in seconds, including redirects."""
MAX_REDIRECTS: Final = 3
"""Maximum number of redirects."""
MAX_ORIGINS_CHARS: Final = 2000
"""Maximum number of characters of all origins: proxies limit the size of response headers, nginx to 4 kB."""
MAX_SERVERS: Final = 256
"""Maximum number of vote servers read for the content security policy; production has ten."""
_HOST: Final = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)*")
_LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1")
_REDIRECT_STATUSES: Final = (301, 302, 303, 307, 308)

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]


class InvalidConfigError(Exception):
    """The fetch failed, or the response is not a voting configuration. The text states the reason."""


@dataclass(frozen=True, slots=True)
class PublishedConfig:
    """A validated voting configuration.

    Attributes:
        body: the published bytes.
        origins: distinct origins of its vote servers that a page may connect to, in order: https origins, and http
            origins on the visitor's own host. Omits hosts that a content security policy cannot express (IPv6
            addresses), and all above `MAX_SERVERS` or `MAX_ORIGINS_CHARS`.
    """

    body: bytes
    origins: tuple[str, ...]


def parse_config(body: bytes) -> PublishedConfig:
    """Validate a voting configuration. The fields that pages read are required; unknown fields are allowed.

    A hostile configuration of `MAX_CONFIG_BYTES` bytes takes tens of milliseconds; call this in a thread.

    Raises:
        InvalidConfigError: it is not a voting configuration.
    """
    try:
        config = json.loads(body.decode(), parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise InvalidConfigError("it is not JSON in UTF-8") from None
    if not isinstance(config, dict):
        raise InvalidConfigError("it is not an object")
    if "version" not in config and "config_version" not in config:
        raise InvalidConfigError("version and config_version are missing")
    servers = _check_list(config, "vote_servers", required=True)
    _check_list(config, "pir_endpoints", required=False)
    height = config.get("snapshot_height")
    if height is not None and (isinstance(height, bool) or not isinstance(height, int) or height < 0):
        raise InvalidConfigError("snapshot_height is not a height")
    return PublishedConfig(body, _origins(servers))


def _origins(urls: Sequence[str]) -> tuple[str, ...]:
    origins: list[str] = []
    size = 0
    for url in urls[:MAX_SERVERS]:
        origin = _origin(url)
        if origin is None or origin in origins:
            continue
        size += len(origin) + 1
        if size > MAX_ORIGINS_CHARS:
            break
        origins.append(origin)
    return tuple(origins)


def _origin(url: str) -> str | None:
    if len(url) > MAX_URL_CHARS:  # slow to parse
        return None
    try:
        parsed = httpx.URL(url)
        host = parsed.raw_host.decode()
    except (httpx.InvalidURL, UnicodeError):
        return None
    if not _HOST.fullmatch(host) or (parsed.scheme != "https" and host not in _LOOPBACK_HOSTS):
        return None
    return f"{parsed.scheme}://{host}" + (f":{parsed.port}" if parsed.port else "")


def _reject_constant(name: str) -> Never:
    """Reject NaN and infinities, which Python accepts and browsers do not."""
    raise ValueError(f"{name} is not JSON")


def _check_list(config: dict[str, Any], name: str, *, required: bool) -> list[str]:
    """Validate a list of servers and return their URLs."""
    entries = config.get(name)
    if entries is None and not required:
        return []
    if not isinstance(entries, list):
        raise InvalidConfigError(f"{name} is not a list")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("url"), str):
            raise InvalidConfigError(f"an entry of {name} has no url")
        if not entry["url"].startswith(("https://", "http://")):
            raise InvalidConfigError(f"an entry of {name} has a url that is not http or https")
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
        resolve: Resolver | None = None,
    ) -> None:
        self._url = url
        self._store = store
        self._clock = clock
        self._resolve = resolve or _system_resolve
        self._http = create_async_client(transport=transport, timeout=FETCH_TIMEOUT_SECONDS)
        self._problem = LoggedProblem()
        self.body: bytes | None = None
        """The last valid copy as published, None if there is none."""
        self.origins: tuple[str, ...] = ()
        """Origins of its vote servers, see `PublishedConfig`."""

    async def restore(self) -> None:
        """Load the stored copy."""
        stored = await self._store.load_config(self._url)
        if stored is None:
            return
        try:
            self._replace(await asyncio.to_thread(parse_config, stored))
        except InvalidConfigError as error:  # a damaged row, or one that an older version accepted
            log.warning("stored_voting_config_ignored", reason=str(error))

    async def run(self) -> None:
        """Fetch every `INTERVAL_SECONDS` seconds until cancelled."""
        try:
            while self._url:
                await self.refresh()
                await self._clock.sleep(INTERVAL_SECONDS)
            await asyncio.Event().wait()
        finally:
            await self._http.aclose()

    async def refresh(self) -> None:
        """Fetch once. An invalid configuration is logged and changes nothing."""
        try:
            body = await self._fetch()
            config = None if body == self.body else await asyncio.to_thread(parse_config, body)
        except InvalidConfigError as error:
            if self._problem.note(str(error)):
                log.warning("voting_config_refresh_failed", reason=str(error))
            return
        if config is not None:
            try:
                await self._store.save_config(self._url, body, now=self._clock.now())
            except HelperError as error:
                log_error(log, "voting_config_not_stored", error)
            self._replace(config)
        if self._problem.clear():
            log.info("voting_config_refreshed")

    def _replace(self, config: PublishedConfig) -> None:
        self.body, self.origins = config.body, config.origins

    async def _fetch(self) -> bytes:
        try:
            url, address = httpx.URL(self._url), ""
            with anyio.fail_after(FETCH_TIMEOUT_SECONDS):
                for _ in range(MAX_REDIRECTS + 1):
                    response, body = await self._get(url, address)
                    if response.status_code not in _REDIRECT_STATUSES:
                        break
                    url, address = await self._follow_redirect(url, response)
                else:
                    raise InvalidConfigError(f"more than {MAX_REDIRECTS} redirects")
        except TimeoutError:
            raise InvalidConfigError(f"timed out after {FETCH_TIMEOUT_SECONDS:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # UnicodeError: host is not valid IDNA
            raise InvalidConfigError(f"fetch failed: {type(error).__name__}") from None
        if response.status_code != 200:
            raise InvalidConfigError(f"HTTP {response.status_code}")
        return body

    async def _get(self, url: httpx.URL, address: str) -> tuple[httpx.Response, bytes]:
        """Send one request; to `address` if given, which prevents DNS rebinding after the check."""
        headers, extensions = {"Accept-Encoding": "identity"}, {}
        if address:
            headers["Host"], extensions["sni_hostname"] = url.netloc.decode(), url.raw_host.decode()
            url = url.copy_with(host=address)
        async with self._http.stream("GET", url, headers=headers, extensions=extensions) as response:
            chunks, size = [], 0
            async for chunk in response.aiter_raw():
                size += len(chunk)
                if size > MAX_CONFIG_BYTES:
                    raise InvalidConfigError(f"it is larger than {MAX_CONFIG_BYTES} bytes")
                chunks.append(chunk)
            return response, b"".join(chunks)

    async def _follow_redirect(self, url: httpx.URL, response: httpx.Response) -> tuple[httpx.URL, str]:
        """Return the target of a redirect and its address. Only public hosts are followed."""
        try:
            target = url.join(response.headers.get("location", ""))
            check_url(str(target), production=True)
            addresses = await self._resolve(target.host, target.port or 443)
        except (UrlNotAllowedError, httpx.InvalidURL, OSError) as error:
            raise InvalidConfigError(f"redirect not followed: {error}") from None
        if not addresses or not all(is_public(ipaddress.ip_address(address)) for address in addresses):
            raise InvalidConfigError("redirect to a private network")
        return target, addresses[0]


async def _system_resolve(host: str, port: int) -> Sequence[str]:
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]
