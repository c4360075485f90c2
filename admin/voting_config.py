"""The published voting configuration: fetched every minute, checked, and the last good copy kept over restarts."""

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
REDIRECTS: Final = 3
LONGEST_ORIGINS: Final = 2000
"""Maximum number of characters of all origins: proxies limit the size of response headers, nginx to 4 kB."""
MOST_SERVERS: Final = 256
"""Maximum number of vote servers that are considered for the policy; production has ten."""
_HOST: Final = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)*")
_OWN_MACHINE: Final = ("localhost", "127.0.0.1")
_MOVED: Final = (301, 302, 303, 307, 308)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class BadConfigError(Exception):
    """What was fetched is not a voting configuration, or nothing was; the text says why."""


@dataclass(frozen=True, slots=True)
class PublishedConfig:
    """A voting configuration.

    Attributes:
        body: as it was published.
        origins: distinct origins of its vote servers that a page may connect to, in order. These are https origins, and
            http ones of the visitor's own machine. Hosts that a content security policy cannot name (IPv6 addresses)
            are left out, and so is what would exceed `MOST_SERVERS` or `LONGEST_ORIGINS`.
    """

    body: bytes
    origins: tuple[str, ...]


def parse_config(body: bytes) -> PublishedConfig:
    """Check a voting configuration: what pages read must be there, unknown fields may be.

    Hostile configurations of `LARGEST` bytes take tens of milliseconds: call it in a thread.

    Raises:
        BadConfigError: it is not a voting configuration.
    """
    try:
        found = json.loads(body.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise BadConfigError("it is not JSON in UTF-8") from None
    if not isinstance(found, dict):
        raise BadConfigError("it is not an object")
    if "version" not in found and "config_version" not in found:
        raise BadConfigError("neither version nor config_version is there")
    servers = _check_list(found, "vote_servers", required=True)
    _check_list(found, "pir_endpoints", required=False)
    height = found.get("snapshot_height")
    if height is not None and (isinstance(height, bool) or not isinstance(height, int) or height < 0):
        raise BadConfigError("snapshot_height is not a height")
    return PublishedConfig(body, _origins(servers))


def _origins(urls: Sequence[str]) -> tuple[str, ...]:
    found: list[str] = []
    size = 0
    for url in urls[:MOST_SERVERS]:
        origin = _origin(url)
        if origin is None or origin in found:
            continue
        size += len(origin) + 1
        if size > LONGEST_ORIGINS:
            break
        found.append(origin)
    return tuple(found)


def _origin(url: str) -> str | None:
    if len(url) > LONGEST:  # no server's, and slow to parse
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
    """NaN and infinities: Python reads them, and no browser does."""
    raise ValueError(f"{name} is not JSON")


def _check_list(found: dict[str, Any], name: str, *, required: bool) -> list[str]:
    """The URLs of a list's entries."""
    entries = found.get(name)
    if entries is None and not required:
        return []
    if not isinstance(entries, list):
        raise BadConfigError(f"{name} is not a list")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("url"), str):
            raise BadConfigError(f"an entry of {name} has no url")
        if not entry["url"].startswith(("https://", "http://")):
            raise BadConfigError(f"an entry of {name} has a url that is none of the web")
    return [entry["url"] for entry in entries]


class VotingConfig:
    """The configuration at one URL.

    Args:
        url: where it is published; empty for none.
        store: keeps the last good copy.
        clock: the time.
        transport: takes the network's place in tests.
        resolve: a name's addresses; the system's resolver unless a test brings another.
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
        self._told = ""
        self.body: bytes | None = None
        """The last good copy, as published; None when there never was one."""
        self.fetched_at: int | None = None
        """When it was fetched, unix seconds."""
        self.origins: tuple[str, ...] = ()
        """Origins of its vote servers, see `PublishedConfig`."""

    async def restore(self) -> None:
        """Begin with the copy on disk."""
        kept = await self._store.kept_config(self._url)
        if kept is None:
            return
        try:
            self._replace(await asyncio.to_thread(parse_config, kept.body), kept.fetched_at)
        except BadConfigError as error:  # a damaged row, or one that an older version accepted
            log.warning("stored_voting_config_ignored", reason=str(error))

    async def run(self) -> None:
        """Fetch for ever."""
        try:
            while self._url:
                await self.refresh()
                await self._clock.sleep(INTERVAL)
            await asyncio.Event().wait()
        finally:
            await self._http.aclose()

    async def refresh(self) -> None:
        """Fetch it once; a copy that is not good changes nothing and is named in the log."""
        try:
            body = await self._fetch()
            found = None if body == self.body else await asyncio.to_thread(parse_config, body)
        except BadConfigError as error:
            self._tell(str(error))
            return
        now = self._clock.now()
        if found is None:
            self.fetched_at = int(now)
        else:
            try:
                await self._store.keep_config(self._url, body, now=now)
            except HelperError as error:
                log.error("the voting configuration could not be kept", error=str(error), advice=error.advice)
            self._replace(found, int(now))
        self._tell("")

    def _replace(self, found: PublishedConfig, fetched_at: int) -> None:
        self.body, self.origins, self.fetched_at = found.body, found.origins, fetched_at

    async def _fetch(self) -> bytes:
        try:
            url, address = httpx.URL(self._url), ""
            with anyio.fail_after(PATIENCE):
                for _ in range(REDIRECTS + 1):
                    answer, body = await self._get(url, address)
                    if answer.status_code not in _MOVED:
                        break
                    url, address = await self._next(url, answer)
                else:
                    raise BadConfigError(f"it moved more than {REDIRECTS} times")
        except TimeoutError:
            raise BadConfigError(f"it did not come within {PATIENCE:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # the last for a host that is no IDNA
            raise BadConfigError(f"it could not be fetched: {type(error).__name__}") from None
        if answer.status_code != 200:
            raise BadConfigError(f"HTTP {answer.status_code}")
        return body

    async def _get(self, url: httpx.URL, address: str) -> tuple[httpx.Response, bytes]:
        """One answer; from this address of the URL's host, where one is given: its name may mean another by now."""
        headers, extensions = {"Accept-Encoding": "identity"}, {}
        if address:
            headers["Host"], extensions["sni_hostname"] = url.netloc.decode(), url.raw_host.decode()
            url = url.copy_with(host=address)
        async with self._http.stream("GET", url, headers=headers, extensions=extensions) as answer:
            chunks, size = [], 0
            async for chunk in answer.aiter_raw():
                size += len(chunk)
                if size > LARGEST:
                    raise BadConfigError(f"it is larger than {LARGEST} bytes")
                chunks.append(chunk)
            return answer, b"".join(chunks)

    async def _next(self, url: httpx.URL, answer: httpx.Response) -> tuple[httpx.URL, str]:
        """Where a redirect leads, and an address of it: only to public places. The operator's own URL may be any."""
        try:
            target = url.join(answer.headers.get("location", ""))
            check_url(str(target), production=True)
            addresses = await self._resolve(target.host, target.port or 443)
        except (UrlNotAllowedError, httpx.InvalidURL, OSError) as error:
            raise BadConfigError(f"it moved to a place that is not followed: {error}") from None
        if not addresses or not all(is_public(ipaddress.ip_address(address)) for address in addresses):
            raise BadConfigError("it moved to a private network")
        return target, addresses[0]

    def _tell(self, problem: str) -> None:
        """One line a change, not one a minute."""
        if problem != self._told:
            if problem:
                log.warning("the voting configuration was not renewed", reason=problem)
            else:
                log.info("the voting configuration is renewed")
        self._told = problem


async def _system_resolve(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]
