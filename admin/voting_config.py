"""The published voting configuration, fetched every minute. The last valid copy survives restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import orjson
import structlog

from admin.config_documents import InvalidConfigError, PublishedConfig, parse_config, parse_static
from admin.config_fetch import ConfigFetcher
from admin.schemas import RoundAuthenticationResponse
from admin.store import AdminStore, ConfigDocuments
from helper.clock import Clock
from helper.core.log_limits import LoggedProblem
from helper.core.round_authentication import RoundAuthentication
from helper.errors import HelperError
from helper.observability.error_log import log_error

log = structlog.get_logger("helper.admin")

INTERVAL_SECONDS: Final = 60.0
"""Seconds between two fetches."""


class VotingConfig:
    """Fetches and caches the voting configuration at one URL.

    Args:
        url: URL of the configuration, empty for none.
        store: stores the last valid copy.
        fetcher: fetches the configuration at this URL.
        clock: the time.
    """

    def __init__(self, url: str, store: AdminStore, fetcher: ConfigFetcher, *, clock: Clock) -> None:
        self._url = url
        self._store = store
        self._fetcher = fetcher
        self._clock = clock
        self._problem = LoggedProblem()
        self._config: PublishedConfig | None = None
        self._chain_keys: Mapping[bytes, bytes] = {}
        self.authentication_body: bytes | None = None
        """Response body, see `admin.schemas.RoundAuthenticationResponse`; None if there is no valid copy."""

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
        stored = await self._store.load_config(self._url)
        if stored is None:
            return
        try:
            self._replace(await asyncio.to_thread(_parse_stored, stored))
        except InvalidConfigError as error:  # a damaged row, or one that an older version accepted
            log.warning("stored_voting_config_ignored", reason=str(error))

    async def run(self) -> None:
        """Fetch every `INTERVAL_SECONDS` seconds until cancelled."""
        while self._url:
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
            documents = ConfigDocuments(config.body, b"" if config.static is None else config.static.body)
            try:
                await self._store.save_config(self._url, documents, now=self._clock.now())
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


def _parse_stored(documents: ConfigDocuments) -> PublishedConfig:
    static = parse_static(documents.static_body) if documents.static_body else None
    return parse_config(documents.body, static)
