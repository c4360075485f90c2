"""Composition of validator onboarding. The service opens and runs it, and mounts it under `/api`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from admin.api import AdminRoutes
from admin.config_fetch import ConfigFetcher
from admin.registry import ChainQueries, RegistrationRegistry
from admin.rounds import GetAudit, RoundsView
from admin.schemas import ChainFacts, UiConfig
from admin.store import AdminStore
from admin.voting_config import VotingConfig
from helper.clock import Clock
from helper.core.round_authentication import RoundAuthentication
from helper.runtime.supervisor import AuxiliaryTasks
from helper.server.client_address import Network
from helper.server.openapi import ApiMount


class AdminService:
    """Registrations, published configuration and rounds.

    Args:
        db_path: database file of the registrations.
        config_url: URL of the published voting configuration, empty for none.
        ui: configuration of the page.
        chain: the nodes, queried for staking records and rounds.
        get_chain_facts: returns the chain's data for browser wallets.
        clock: the time.
        trusted_networks: networks of proxies whose forwarding headers are trusted.
        get_audit: returns the helper's audit of a finalized round.
    """

    def __init__(
        self,
        *,
        db_path: Path,
        config_url: str,
        ui: UiConfig,
        chain: ChainQueries,
        get_chain_facts: Callable[[], ChainFacts],
        clock: Clock,
        trusted_networks: Sequence[Network] = (),
        get_audit: GetAudit = lambda _: None,
    ) -> None:
        self._store = AdminStore(db_path)
        self._config = VotingConfig(config_url, self._store, ConfigFetcher(config_url), clock=clock)
        self._registry = RegistrationRegistry(self._store, chain, clock=clock)
        self._rounds = RoundsView(chain, clock=clock, report_keys=self._config.compare_keys, get_audit=get_audit)
        routes = AdminRoutes(
            self._registry,
            self._config,
            self._rounds,
            ui,
            get_chain_facts=get_chain_facts,
            clock=clock,
            trusted_networks=trusted_networks,
        )
        self.mount = ApiMount("/api", routes.app(), routes.routes())

    @property
    def vote_server_origins(self) -> Sequence[str]:
        """Origins of the published vote servers, which the page connects to."""
        return self._config.origins

    def get_round_authentication(self, round_id: bytes) -> RoundAuthentication:
        """Return whether the published configuration authenticates a round."""
        return self._config.get_authentication(round_id)

    @contextlib.asynccontextmanager
    async def open_store(self) -> AsyncIterator[None]:
        """Open the database file for the duration of the context.

        Raises:
            StoreError: the file cannot be opened.
        """
        await self._store.open()
        try:
            await self._config.restore()
            await self._registry.publish()
            yield
        finally:
            await self._config.aclose()
            await self._store.close()

    @property
    def tasks(self) -> AuxiliaryTasks:
        """Background tasks by name: they fetch the configuration, check registrations and read the rounds."""
        return {
            "voting configuration": self._config.run,
            "registrations": self._registry.run,
            "rounds view": self._rounds.run,
        }
