"""Downloads the published voting configuration every minute; the last valid copy survives restarts.

It is at its URL, or at the mirrors that the static document there names.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import anyio
import httpx
import orjson
import structlog

from admin.admin_database import AdminStore
from admin.api_models import RoundAuthenticationResponse
from admin.published_config import InvalidConfigError, PublishedConfig, StaticConfig, parse_config, parse_static
from admin.url_policy import UrlNotAllowedError, check_url, is_public
from helper.chain.chain_data import RoundAuthentication
from helper.clock import Clock
from helper.config.value_types import PinnedUrl
from helper.core.log_limits import LoggedProblem
from helper.errors import HelperError
from helper.observability.log_config import log_error
from helper.runtime.network_clients import create_async_client

MAX_CONFIG_BYTES: Final = 1 << 20
"""Maximum size of a document in bytes. Production had 5 kB in 2026, a test network with a thousand rounds 450 kB."""
FETCH_TIMEOUT_SECONDS: Final = 30.0
"""Timeout of each document in seconds, including redirects; wallets use the same."""
MAX_REDIRECTS: Final = 3
"""Maximum number of redirects."""
_REDIRECT_STATUSES: Final = (301, 302, 303, 307, 308)

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]


class ConfigFetcher:
    """Fetches the configuration at one URL.

    The URL itself may be on any host, because the operator chose it. Mirrors on other origins and targets of redirects
    must be public https URLs.

    Args:
        url: URL of a static or dynamic document; empty for none. With a `checksum`, the document must have it
            (`PinnedUrl`).
        timeout: timeout of each document in seconds.
        transport: replaces the network in tests.
        resolve: resolves a host name; the system's resolver by default.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = FETCH_TIMEOUT_SECONDS,
        transport: httpx.AsyncBaseTransport | None = None,
        resolve: Resolver | None = None,
    ) -> None:
        self.url = url
        self._pinned = PinnedUrl.parse(url)
        self._timeout = timeout
        self._resolve = resolve or _system_resolve
        self._http = create_async_client(transport=transport, timeout=timeout)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def fetch(self, previous: PublishedConfig | None = None) -> PublishedConfig:
        """Fetch and validate the configuration.

        Mirrors are tried in order. Like a wallet, this takes the first valid document in which at least one round is
        authenticated. If there is none, it takes the first valid document.

        Args:
            previous: the last result; documents that have not changed are not validated again.

        Raises:
            InvalidConfigError: a fetch failed, or there is no valid document; the text has the reason of each mirror.
        """
        body = await self._download(self._pinned.url)
        if not self._pinned.matches(body):
            raise InvalidConfigError("its SHA-256 is not the checksum in the URL")
        static = None if previous is None else previous.static
        if previous is not None and static is None and previous.body == body:
            return previous
        if static is None or static.body != body:
            static = await asyncio.to_thread(parse_static, body)
        if static is None:
            return await asyncio.to_thread(parse_config, body)
        return await self._fetch_from_mirrors(static, previous)

    async def _fetch_from_mirrors(self, static: StaticConfig, previous: PublishedConfig | None) -> PublishedConfig:
        unauthenticated, problems = None, []
        for number, url in enumerate(static.mirrors, 1):
            try:
                body = await self._download(url)
                if previous is not None and (previous.static, previous.body) == (static, body):
                    config = previous
                else:
                    config = await asyncio.to_thread(parse_config, body, static)
            except InvalidConfigError as error:
                problems.append(f"mirror {number}: {error}")
                continue
            if config.authenticates_a_round:
                return config
            unauthenticated = unauthenticated or config
        if unauthenticated is None:
            raise InvalidConfigError("; ".join(problems))
        return unauthenticated

    async def _download(self, source: str) -> bytes:
        try:
            with anyio.fail_after(self._timeout):
                url, address = _parse_url(source), ""
                if _get_origin(url) != _get_origin(httpx.URL(self._pinned.url)):
                    address = await self._check_target(url, "not fetched")
                for _ in range(MAX_REDIRECTS + 1):
                    response, body = await self._get(url, address)
                    if response.status_code not in _REDIRECT_STATUSES:
                        break
                    url = url.join(_parse_url(response.headers.get("location", "")))
                    address = await self._check_target(url, "redirect not followed")
                else:
                    raise InvalidConfigError(f"more than {MAX_REDIRECTS} redirects")
        except TimeoutError:
            raise InvalidConfigError(f"timed out after {self._timeout:g} s") from None
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

    async def _check_target(self, url: httpx.URL, refusal: str) -> str:
        """Return an address of a URL that the operator did not choose. Its host must be public."""
        try:
            check_url(str(url), production=True)
            addresses = await self._resolve(url.host, url.port or 443)
        except (UrlNotAllowedError, OSError) as error:
            raise InvalidConfigError(f"{refusal}: {error}") from None
        if not addresses or not all(is_public(ipaddress.ip_address(address)) for address in addresses):
            raise InvalidConfigError(f"{refusal}: private network")
        return addresses[0]


def _get_origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


async def _system_resolve(host: str, port: int) -> Sequence[str]:
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]


def _parse_url(text: str) -> httpx.URL:
    if not text.isascii():  # slow to parse
        raise InvalidConfigError("a URL is not ASCII; write an international host name in punycode (xn--…)")
    return httpx.URL(text)


log = structlog.get_logger("helper.admin")

INTERVAL_SECONDS: Final = 60.0
"""Seconds between two fetches."""


class VotingConfig:
    """Fetches and caches the voting configuration at the URL of `fetcher`, if it has one.

    Args:
        store: stores the last valid copy.
        clock: the time.
    """

    def __init__(self, store: AdminStore, fetcher: ConfigFetcher, *, clock: Clock) -> None:
        self._store = store
        self._fetcher = fetcher
        self._clock = clock
        self._problem = LoggedProblem()
        self._config: PublishedConfig | None = None
        self._chain_keys: Mapping[bytes, bytes] = {}
        self.authentication_body: bytes | None = None
        """Response body, see `admin.api_models.RoundAuthenticationResponse`; None if there is no valid copy."""

    @property
    def body(self) -> bytes | None:
        """The last valid copy as published, None if there is none."""
        return None if self._config is None else self._config.body

    @property
    def origins(self) -> tuple[str, ...]:
        """Origins of its vote servers, see `PublishedConfig`."""
        return () if self._config is None else self._config.origins

    def get_authentication(self, round_id: bytes) -> RoundAuthentication:
        """Return whether the last valid copy authenticates a round."""
        if self._config is None:
            return RoundAuthentication.UNKNOWN
        return self._config.get_authentication(round_id, self._chain_keys.get(round_id, b""))

    def compare_keys(self, chain_keys: Mapping[bytes, bytes]) -> None:
        """Compare the configuration with the election authorities' keys on the chain, by round id, from now on."""
        if chain_keys != self._chain_keys:
            self._chain_keys = chain_keys
            self._update_response()

    async def restore(self) -> None:
        """Load the stored copy."""
        stored = await self._store.load_config(self._fetcher.url)
        if stored is None:
            return
        try:
            self._replace(await asyncio.to_thread(_parse_stored, *stored))
        except InvalidConfigError as error:  # a damaged row, or one that an older version accepted
            log.warning("stored_voting_config_ignored", reason=str(error))

    async def run(self) -> None:
        """Fetch every `INTERVAL_SECONDS` seconds until cancelled."""
        while self._fetcher.url:
            await self.refresh()
            await self._clock.sleep(INTERVAL_SECONDS)
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._fetcher.aclose()

    async def refresh(self) -> None:
        """Fetch once. An invalid configuration is logged and changes nothing."""
        try:
            config = await self._fetcher.fetch(self._config)
        except InvalidConfigError as error:
            if self._problem.note(str(error)):
                log.warning("voting_config_refresh_failed", reason=str(error))
            return
        if config is not self._config:
            static_body = b"" if config.static is None else config.static.body
            try:
                await self._store.save_config(self._fetcher.url, config.body, static_body, now=self._clock.now())
            except HelperError as error:
                log_error(log, "voting_config_not_stored", error)
            self._replace(config)
        if self._problem.clear():
            log.info("voting_config_refreshed")

    def _replace(self, config: PublishedConfig) -> None:
        self._config = config
        self._update_response()

    def _update_response(self) -> None:
        if self._config is None:
            return
        static = self._config.static
        response: RoundAuthenticationResponse = {
            "trusted_keys": None if static is None else list(static.keys),
            "rounds": {round_id.hex(): self.get_authentication(round_id) for round_id in self._config.rounds},
        }
        self.authentication_body = orjson.dumps(response)


def _parse_stored(body: bytes, static_body: bytes) -> PublishedConfig:
    return parse_config(body, parse_static(static_body) if static_body else None)
