"""Validator onboarding: its composition, and its routes under `/api`. Errors are `{"error": "…"}`."""

from __future__ import annotations

import contextlib
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Final

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from admin import api_models
from admin.admin_database import AdminStore, RegistryFullError
from admin.api_models import ChainFacts, UiConfig
from admin.config_refresh import ConfigFetcher, VotingConfig
from admin.pending_registrations import RegistrationRegistry
from admin.published_config import AUTH_VERSION, InvalidConfigError, parse_entry
from admin.registration_limit import RegistrationLimit, client_network
from admin.registration_request import MAX_REGISTRATION_BYTES, RegistrationError, SignatureRefusedError
from admin.round_totals import GetAudit, RoundsView
from helper.chain.node_pool import ReadOnlyNodePool
from helper.clock import Clock
from helper.core.text_forms import Network
from helper.errors import StoreError
from helper.runtime.supervisor import AuxiliaryTasks
from helper.server.body_reader import BodyReader
from helper.server.edge import API_PREFIX, JsonResponse, request_id_of, request_of
from helper.server.openapi import ApiRoute

log = structlog.get_logger("helper.admin")

_NO_CONFIG: Final = "no voting configuration has been fetched yet"
_NO_STORE: Final = {"Cache-Control": "no-store"}


class AdminService:
    """Registrations, published configuration and rounds, and their routes.

    Args:
        db_path: database file of the registrations.
        fetcher: fetches the published voting configuration.
        ui: configuration of the page.
        chain: the nodes, queried for staking records and rounds.
        get_chain_facts: returns the chain's data for browser wallets; called on each request.
        clock: the time.
        trusted_networks: networks of proxies whose forwarding headers are trusted.
        get_audit: returns the helper's audit of a finalized round.
    """

    def __init__(
        self,
        *,
        db_path: Path,
        fetcher: ConfigFetcher,
        ui: UiConfig,
        chain: ReadOnlyNodePool,
        get_chain_facts: Callable[[], ChainFacts],
        clock: Clock,
        trusted_networks: Sequence[Network] = (),
        get_audit: GetAudit = lambda *_: None,
    ) -> None:
        self.store = AdminStore(db_path)
        self.config = VotingConfig(self.store, fetcher, clock=clock)
        self.registry = RegistrationRegistry(self.store, chain, clock=clock)
        self.rounds = RoundsView(chain, clock=clock, report_keys=self.config.compare_keys, get_audit=get_audit)
        self._ui = ui
        self._get_chain_facts = get_chain_facts
        self._clock = clock
        self._trusted_networks = tuple(trusted_networks)
        self._limit = RegistrationLimit()
        self._body_reader = BodyReader(max_bytes=MAX_REGISTRATION_BYTES)

    @contextlib.asynccontextmanager
    async def open_store(self) -> AsyncIterator[None]:
        """Open the database file for the duration of the context.

        Raises:
            StoreError: the file cannot be opened.
        """
        await self.store.open()
        try:
            await self.config.restore()
            await self.registry.publish()
            yield
        finally:
            await self.config.aclose()
            await self.store.close()

    @property
    def tasks(self) -> AuxiliaryTasks:
        """Background tasks by name: they fetch the configuration, check registrations and read the rounds."""
        return {
            "voting configuration": self.config.run,
            "registrations": self.registry.run,
            "rounds view": self.rounds.run,
        }

    def routes(self) -> list[ApiRoute]:
        """Return the routes with their OpenAPI descriptions."""
        return [
            ApiRoute(f"{API_PREFIX}voting-config", self._voting_config, "GET", api_models.VOTING_CONFIG),
            ApiRoute(f"{API_PREFIX}round-authentication", self._authentication, "GET", api_models.ROUND_AUTHENTICATION),
            ApiRoute(f"{API_PREFIX}sign-config-entry", self._sign_config_entry, "POST", api_models.SIGN_CONFIG_ENTRY),
            ApiRoute(f"{API_PREFIX}register-validator", self._register, "POST", api_models.REGISTER),
            ApiRoute(f"{API_PREFIX}pending-validators", self._pending, "GET", api_models.PENDING),
            ApiRoute(f"{API_PREFIX}ui-config", self._ui_config, "GET", api_models.UI_CONFIG),
            ApiRoute(f"{API_PREFIX}chain", self._chain, "GET", api_models.CHAIN),
            ApiRoute(f"{API_PREFIX}rounds", self._rounds, "GET", api_models.ROUNDS),
        ]

    async def _voting_config(self, _request: Request) -> Response:
        """Return the published configuration unchanged."""
        if self.config.body is None:
            raise HTTPException(502, _NO_CONFIG)
        return Response(self.config.body, media_type="application/json")

    async def _authentication(self, _request: Request) -> Response:
        """Return which rounds of the configuration are authenticated."""
        if self.config.authentication_body is None:
            raise HTTPException(502, _NO_CONFIG, _NO_STORE)
        return Response(self.config.authentication_body, headers=_NO_STORE, media_type="application/json")

    async def _sign_config_entry(self, request: Request) -> Response:
        """Return what a manager signs for an entry of the configuration. Nothing is stored."""
        body = await self._body_reader.read(request_of(request.scope))
        try:
            message = parse_entry(body)
        except InvalidConfigError as error:
            raise HTTPException(400, str(error)) from None
        return JsonResponse(
            {
                "canonical_payload_b64": b64encode(message).decode(),
                "signed_payload_hash": sha256(message).hexdigest(),
                "auth_version": AUTH_VERSION,
            }
        )

    async def _register(self, request: Request) -> Response:
        """Register a validator."""
        peer = None if request.client is None else request.client.host
        network = client_network(peer, request.scope["headers"], self._trusted_networks)
        if (wait := self._limit.take(network, self._clock.monotonic())) > 0:
            raise HTTPException(429, "too many registrations; retry later", {"Retry-After": str(ceil(wait))})
        body = await self._body_reader.read(request_of(request.scope))
        try:
            result = await self.registry.register(body, production=self._ui.mode == "production", network=network)
        except RegistrationError as error:
            raise HTTPException(400, str(error)) from None
        except SignatureRefusedError as error:
            raise HTTPException(401, str(error)) from None
        except RegistryFullError as error:
            raise HTTPException(429, str(error), {"Retry-After": "3600"}) from None
        except StoreError as error:
            name = request_id_of(request)
            log.error("registrations_unavailable", error=str(error), advice=error.advice, request_id=name)
            raise HTTPException(503, "registrations cannot be stored now; retry later") from None
        if result is None:
            return JsonResponse({"status": "registered"})
        return JsonResponse({"status": "pending", "expires_at": result.expires_at})

    async def _pending(self, request: Request) -> Response:
        """Return a page of the pending registrations. The `Link` header points to the next page."""
        number = request.query_params.get("page", "1")
        page = int(number) if re.fullmatch(r"[0-9]{1,6}", number) else 0
        if not 1 <= page <= api_models.MAX_PAGES:
            raise HTTPException(400, f"page: must be a number from 1 to {api_models.MAX_PAGES}")
        published = self.registry.published
        headers = {**_NO_STORE, "X-Total-Count": str(published.total)}
        if page < len(published.pages):
            headers["Link"] = f'<?page={page + 1}>; rel="next"'
        body = published.pages[page - 1] if page <= len(published.pages) else b"[]"
        return Response(body, headers=headers, media_type="application/json")

    async def _chain(self, _request: Request) -> Response:
        """Return the chain's data that a browser wallet needs to add it."""
        return JsonResponse(self._get_chain_facts(), headers=_NO_STORE)

    async def _rounds(self, _request: Request) -> Response:
        """Return the chain's rounds as last read."""
        if self.rounds.body is None:
            raise HTTPException(502, "no rounds have been read from the chain yet", _NO_STORE)
        return Response(self.rounds.body, headers=_NO_STORE, media_type="application/json")

    async def _ui_config(self, _request: Request) -> Response:
        """Return the page's configuration."""
        return JsonResponse(self._ui, headers=_NO_STORE)
